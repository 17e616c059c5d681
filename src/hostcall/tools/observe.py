"""`hc.tools.observe`: looks into programs that nobody changed.

A program that is lowered inside the block gets further equations there, after
derivatives, vmap and dead code (`_jax/rewriting.py`). It is compiled once more for the
block, and programs that were compiled before are found again after it.

What is put in are calls and taps as a user would write them. Each use is a class with a
method `look`, which says what goes into a level of a program:

    _observe/nans.py    finds the equation that made a bad value
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from types import TracebackType

import hostcall as hc
from hostcall._jax import execution, rewriting, tracing
from hostcall.errors import HostcallError, SpecError
from hostcall.tools._observe.nans import Nans


class observe:
    """A context manager in which compiled programs are observed, as they are.

    Raises:
        FloatingPointError: with `nans`, a program has made a bad value.
    """

    def __init__(self, *, nans: bool = False) -> None:
        self._uses: dict[Hashable, rewriting.Use] = {}
        if nans:
            self._uses["nans"] = Nans()
        self._block: contextlib.ExitStack | None = None

    def __enter__(self) -> observe:
        if self._block is not None:
            raise HostcallError(
                "hostcall: this hc.observe block is open already. Make another one"
                " inside it: their options add up",
                code="hc-closed",
            )
        if tracing.is_staged():
            raise SpecError(
                "hostcall: a block of hc.observe begins while a program is traced, and"
                " not when it runs. Put it around the call of the program",
                code="hc-traced",
            )
        outer = execution.rewriting_here()
        uses = {**(outer.uses if outer else {}), **self._uses}
        with contextlib.ExitStack() as stack:
            stack.enter_context(hc.reraise())
            stack.enter_context(execution.Rewriting(uses))
            self._block = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        block, self._block = self._block, None
        assert block is not None
        block.__exit__(kind, error, trace)
