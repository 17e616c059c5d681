"""The keys by which programs find their calls (native/base/slot_table.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostcall._core.fingerprint import fingerprint
from hostcall._core.registry import name_of_held
from hostcall._engine.params.equation import Equation

# Fields of a call's or tap's parameters that its key has.
_IN_KEY = (
    *("order", "masked", "grid", "batched", "levels", "keep"),
    *("rows", "when_full", "on", "every", "sample", "batch", "always", "through"),
    *("kind", "partitioned"),
)


def key_of(params: Equation, operands: Sequence[Any]) -> int:
    """The key by which programs find a call: equal in all processes for equal calls.

    It says what the call is: the function, the avals, the options. A program that was
    compiled in another process looks its calls up here, so it finds no call of another
    kind. It also says where the program runs: JAX 0.10's disk cache may return a
    program that was compiled without host callbacks for one that has them, and XLA
    would run that on a thread of its own.
    """
    callback = params.callback
    return fingerprint(
        (
            name_of_held(callback.function) or callback.function,
            callback.tag,
            callback.arrays,
            callback.lend,
            [(a.shape, str(a.dtype)) for a in (*operands, *params.avals)],
            type(params).__name__,
            params.vmap_method,
            params.runs_where_dispatched,
            [getattr(params, option, None) for option in _IN_KEY],
        )
    )
