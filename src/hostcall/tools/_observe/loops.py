"""`hc.observe(progress=True)`: a bar for each loop that lasts.

Each loop gets the tap of `hc.progress` at the beginning of its body; that of an inner
loop does not let its first and last step pass. A bar is not drawn before its loop has
lasted for some tenths of a second. Then those of the loops around it are drawn first.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import hostcall as hc
from hostcall._jax import jaxprs
from hostcall._jax.rewriting import Insertion, Level
from hostcall.tools._observe import labels
from hostcall.tools._progress import bars, checks, drawing

LASTS = 0.3  # seconds
EVERY = 0.1  # seconds between two steps that are shown


class Loops:
    """Puts the bars into programs."""

    def __init__(self) -> None:
        self._bars: list[_Late] = []  # those that are open

    def look(self, level: Level) -> Iterator[Insertion]:
        if level.kind not in jaxprs.LOOPS or os.environ.get("HOSTCALL_PROGRESS") == "0":
            return
        params = level.around[-1].params
        total, reverse = params.get("length"), params.get("reverse", False)
        if total == 1:
            return
        desc = f"{level.kind} {labels.line_of(level.around[-1])}"
        if labels.is_backward(*level.around):
            desc += " backward"
        depth = len(level.loops)
        bar = functools.partial(_Late, self._bars, depth)

        def show(step: jax.Array) -> None:
            if step.ndim:  # rows of a batched loop
                step = step.max()
            if reverse:
                step = jnp.int32(total) - 1 - step
            loop = bars.Loop(total, desc, "it", 0, bar, "batched")
            checks.check(replace(loop, bar="auto"), step, total, {})
            edge = (step == 0) | (step == (total or 0) - 1)
            hc.tap(
                loop,
                step,
                None,
                {},
                every=EVERY,
                # Inner loops may start a million times a second.
                always=edge if depth == 1 else None,
                when_full="drop_oldest",
            )

        yield Insertion(show, level.steps[-1:], -1)


class _Late:
    """A bar, with three of tqdm's methods, that is drawn once its loop has lasted.

    `depth` is 1 for a loop that is inside no other. Inner loops' bars are erased.
    """

    def __init__(
        self, open_: list[_Late], depth: int, initial: int, **options: Any
    ) -> None:
        self.depth, self.leave = depth, depth == 1
        self._make = functools.partial(drawing.factory("auto"), **options)
        self._bars, self._n, self._start = open_, initial, time.perf_counter()
        self._drawn: Any = None
        open_.append(self)

    def update(self, n: int) -> None:
        self._n += n
        if self._drawn is not None:
            self._drawn.update(n)
        elif time.perf_counter() - self._start > LASTS:
            around = [bar for bar in self._bars if bar.depth < self.depth]
            for bar in (*sorted(around, key=lambda bar: bar.depth), self):
                bar.draw()

    def draw(self) -> None:
        if self._drawn is None:
            self._drawn = self._make(initial=self._n, leave=self.leave)

    def set_postfix_str(self, text: str, refresh: bool = False) -> None:
        """There are no metrics."""

    def close(self) -> None:
        self._bars.remove(self)
        if self._drawn is not None:
            self._drawn.leave = self.leave
            self._drawn.close()
