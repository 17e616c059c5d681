"""`hc.observe(progress=True)`: a bar for each loop that lasts.

Each loop gets the tap of `hc.progress` at the beginning of its body; that of an inner
loop does not let its first and last step pass. `_progress/bars.py` draws it when its
loop has lasted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from hostcall._jax import jaxprs
from hostcall._jax.rewriting import Insertion, Level
from hostcall.tools._observe import labels
from hostcall.tools._observe.where import Where
from hostcall.tools._progress import bars, drawing

EVERY = 0.1  # seconds between two steps that are shown


class Loops:
    """Puts the bars into programs, for loops at lines that are looked at."""

    def __init__(self, scope: Where) -> None:
        self._scope = scope

    def look(self, level: Level) -> Iterator[Insertion]:
        if level.kind not in jaxprs.LOOPS or os.environ.get("HOSTCALL_PROGRESS") == "0":
            return
        assert level.inside is not None  # the loop
        if not self._scope.has(level.inside):
            return
        params = level.inside.eqn.params
        total = params.get("length")
        reverse = params.get("reverse", False)
        if total == 1:
            return
        desc = f"{level.kind} {labels.line_of(level.inside)}"
        if level.inside.is_backward:
            desc += " backward"
        drawing.need_tqdm()
        path = tuple(f"{x.eqn.primitive.name} {labels.path_of(x)}" for x in level.loops)

        def show(step: jax.Array) -> None:
            if step.ndim:  # rows of a batched loop
                step = step.max()
            if reverse:
                step = jnp.int32(total) - 1 - step
            loop = bars.Loop(total, desc, "it", 0, "auto", "batched", path)
            edge = (step == 0) | (step == (total or 0) - 1)
            # Inner loops may start a million times a second.
            loop.tap(step, None, {}, EVERY, edge if len(path) == 1 else None)

        yield Insertion(show, level.steps[-1:], -1)
