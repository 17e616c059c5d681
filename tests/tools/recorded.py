"""What a recorder has written, for its tests."""

from __future__ import annotations

import numpy as np


def columns(table, *names):
    return [np.array(table[name].to_pylist()) for name in names]
