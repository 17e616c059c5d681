"""Between two programs of the gallery, which one process runs."""

from __future__ import annotations

from typing import Any

import jax
import kept

import hostcall as hc


def reset(settings: dict[str, Any], name: str | None, when: str) -> None:
    hc.barrier()
    hc.testing.unpatch_jax()
    jax.config.update("jax_enable_x64", False)
    if when == "after" and name is not None:
        kept.note_used(name)
