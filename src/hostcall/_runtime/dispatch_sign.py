"""The sign of a dispatched program: what it leaves behind by which its failure shows.

That is its smallest result, or the tokens of its effects. Both fail if the program
fails. `hc.reraise` keeps one sign of each program (reraise.py says for how long).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from hostcall import _jax
from hostcall._core import failures


class Sign:
    """A result or the tokens of a program, by which its failure is noticed.

    Attributes:
        kept_bytes: how many bytes of the result are kept alive.
        tokens: the tokens of its effects.
        failures_before: how many callbacks had failed before it was dispatched.
    """

    __slots__ = ("_result", "failures_before", "kept_bytes", "tokens")

    def __init__(
        self, result: Any, kept_bytes: int, tokens: Sequence[Any], failures_before: int
    ) -> None:
        # A result that takes too many bytes is held weakly: a block must not keep the
        # states of a loop alive.
        is_weak = result is not None and kept_bytes == 0
        self._result = weakref.ref(result) if is_weak else (lambda: result)
        self.kept_bytes = kept_bytes
        self.tokens = tokens
        self.failures_before = failures_before

    def is_ready(self) -> bool:
        """Whether the program has ended, as far as its result and tokens tell."""
        result = self._result()
        try:
            if result is not None:
                return bool(result.is_ready())
        except RuntimeError:  # deleted, or donated to a program, which fails with it
            pass
        # One that is ready says that all of the program has ended. Those of unordered
        # effects can't be asked, and count as not ready.
        return not self.tokens or any(map(_jax.is_token_ready, self.tokens))

    def is_gone(self) -> bool:
        """Whether the result can tell nothing: it is deleted, donated or dropped."""
        result = self._result()
        return result is None or result.is_deleted()

    def report(self) -> BaseException | None:
        """Waits for the program; returns what JAX raises if a host call failed."""
        for result in (self._result(), *self.tokens):
            report = None if result is None else failures.failure_of(result)
            # Without a number it is no failure of host code: XLA's own, which the user
            # gets where a result is read.
            if report is not None and failures.number_in(report):
                return report
        return None


def has_ended(result: jax.Array) -> bool:
    """Whether the program that gives this result has ended."""
    try:
        return bool(result.is_ready())
    except RuntimeError:  # donated already
        return False


def cheapest(results: Sequence[Any], room: float) -> tuple[Any, int]:
    """The smallest result of a program, and how many of its bytes to keep alive; (None,
    0) without one.
    """
    if len(results) > 8:
        # To look at hundreds would cost as much as the dispatch. The smallest of these
        # eight is small enough.
        results = [*results[:4], *results[-4:]]
    arrays = [_jax.data_of(x) for x in results if isinstance(x, jax.Array)]
    smallest = min(arrays, key=operator.attrgetter("nbytes"), default=None)
    if smallest is None:
        return None, 0
    size = int(smallest.nbytes) or 1  # 0 would say that it is not kept
    return smallest, size if size <= room else 0
