"""How the jobs print, and how they compare."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # a NumPy array outside of JAX programs, a jax.Array or tracer within


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def line(name: str, value: object) -> None:
    print(f"  {name:<36} {value}")


def close(ours: Array, plain: Array, tolerance: float) -> float:
    """Asserts that the largest difference is within the tolerance, and returns it."""
    difference = float(np.max(np.abs(np.asarray(ours) - np.asarray(plain))))
    said = f"the results differ by {difference}, which is more than {tolerance}"
    assert difference <= tolerance, said
    return difference
