"""Checks of the options that every face of a call has."""

from __future__ import annotations

from typing import Any

from hostcall._core import config
from hostcall._core.errors import SpecError
from hostcall._core.order import ORDERS
from hostcall._core.signatures import own_option
from hostcall._primitives.call import batching
from hostcall._runtime.executors import is_executor

_ARRAYS = ("numpy", "jax", "dlpack", "cuda")
_WAIT = 0.002  # seconds that a call waits for others without `wait=`
_METHODS = (*batching.ROWS, *batching.WHOLE)


def check_options(
    name: str,
    order: Any,
    vmap_method: Any,
    arrays: Any,
    lend: Any,
    timeout: Any,
    executor: Any,
    concurrency: Any = None,
    awaits: bool = False,
    fn: Any = None,
) -> None:
    """Refuses wrong options. `fn` is the function, if its own keywords come with them,
    so that a value may have been meant for it.
    """

    def choose(option: str, value: Any, allowed: tuple[Any, ...]) -> None:
        own = "" if fn is None else own_option(fn, option, value)
        if value == "sequential_unrolled":
            own = ". 'sequential' does the same"
        raise SpecError(
            f"hostcall: {option}= of `{name}` should be one of"
            f" {', '.join(map(repr, allowed))}, got {value!r}{own}",
            code="hc-option",
        )

    if order not in ORDERS:
        choose("order", order, ORDERS)
    if not callable(vmap_method) and vmap_method not in (*_METHODS, None):
        choose("vmap_method", vmap_method, (*_METHODS, None))
    if arrays not in _ARRAYS:
        choose("arrays", arrays, _ARRAYS)
    if lend not in (False, True, "out"):
        choose("lend", lend, (False, True, "out"))
    if lend and (timeout is not None or vmap_method == "parallel"):
        other = "timeout=" if timeout is not None else 'vmap_method="parallel"'
        raise SpecError(
            f"hostcall: `{name}` has lend={lend!r} and {other}. A function on another"
            " thread could outlive the memory it was lent: drop one of the two",
            code="hc-conflict",
        )
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise SpecError(
            f"hostcall: timeout= of `{name}` should be a number of seconds above 0,"
            f" got {timeout!r}",
            code="hc-option",
        )
    if concurrency is not None:
        _check_concurrency(name, concurrency, awaits)
    if awaits:
        check_awaits(name, arrays, lend, executor)
    if executor is not None:
        if not is_executor(executor):
            raise SpecError(
                f"hostcall: executor= of `{name}` should be a"
                " concurrent.futures.Executor, a Dask client or a pool such as"
                f" multiprocessing.Pool, got {executor!r}",
                code="hc-option",
            )
        if vmap_method != "parallel":
            raise SpecError(
                f"hostcall: `{name}` has executor= and vmap_method={vmap_method!r}."
                ' Rows go to an executor with vmap_method="parallel"',
                code="hc-conflict",
            )


def _check_concurrency(name: str, concurrency: Any, awaits: bool) -> None:
    if not awaits:
        raise SpecError(
            f"hostcall: `{name}` has concurrency= and is not a coroutine function. Make"
            " it an `async def`, or leave out concurrency=: rows of a plain function"
            ' run on the threads of executor= with vmap_method="parallel"',
            code="hc-conflict",
        )
    if (
        not isinstance(concurrency, int)
        or isinstance(concurrency, bool)
        or concurrency < 1
    ):
        raise SpecError(
            f"hostcall: concurrency= of `{name}` should be how many of its calls wait"
            f" at the same time, an int of 1 or more, got {concurrency!r}",
            code="hc-option",
        )


def check_awaits(name: str, arrays: Any, lend: Any, executor: Any) -> None:
    """Refuses options that a coroutine function can't have."""
    why = {
        "executor=": executor is not None
        and "it runs on the event loop, with concurrency= in place of executor=",
        f"lend={lend!r}": lend
        and "it runs on another thread and could outlive the memory it was lent",
        "arrays='cuda'": arrays == "cuda"
        and "XLA's memory and stream are its own only while XLA's thread runs",
    }
    for option, reason in why.items():
        if reason:
            raise SpecError(
                f"hostcall: the coroutine function `{name}` can't have {option}:"
                f" {reason}. Leave out {option}",
                code="hc-conflict",
            )


def parse_coalesce(
    name: str,
    coalesce: Any,
    wait: Any,
    order: Any,
    vmap_method: Any,
    others: dict[str, bool],
) -> tuple[int, float] | None:
    """(size, seconds) of coalesce= and wait=, or None if calls are not merged.

    `others` says of options that don't go with coalesce= whether they were given.
    """
    if coalesce is None:
        if wait is not None:
            raise SpecError(
                f"hostcall: `{name}` has wait= and no coalesce=. Calls wait for others"
                " to be merged with: give coalesce=, or leave out wait=",
                code="hc-conflict",
            )
        return None
    if not isinstance(coalesce, int) or isinstance(coalesce, bool) or coalesce < 1:
        raise SpecError(
            f"hostcall: coalesce= of `{name}` should be how many calls are merged into"
            f" one at most, an int of 1 or more, got {coalesce!r}",
            code="hc-option",
        )
    wait = _WAIT if wait is None else wait
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or wait < 0:
        raise SpecError(
            f"hostcall: wait= of `{name}` should be the seconds that a call waits for"
            f" others, a number of 0 or more, got {wait!r}",
            code="hc-option",
        )
    if order != "pure":
        raise SpecError(
            f"hostcall: `{name}` has coalesce= and order={order!r}. Merged calls have"
            " no order among each other: leave out order=, or coalesce=",
            code="hc-conflict",
        )
    if vmap_method not in (None, "sequential", "parallel"):
        raise SpecError(
            f"hostcall: `{name}` has coalesce= and vmap_method={vmap_method!r}. With"
            " coalesce= the rows of a batch are merged anyway: leave out vmap_method=",
            code="hc-conflict",
        )
    for option, given in others.items():
        if given:
            raise SpecError(
                f"hostcall: `{name}` has coalesce= and {option}, which is for calls"
                f" that are made one by one: leave out {option}, or coalesce=",
                code="hc-conflict",
            )
    return coalesce, float(wait)


def refuse_no_arrays(name: str) -> None:
    raise SpecError(
        f"hostcall: `{name}` has coalesce= and no array among its arguments, so it"
        " could not tell how many calls were merged: pass one, or leave out coalesce=",
        code="hc-conflict",
    )


def check_fail(name: str, fail: Any) -> None:
    if fail is not None and fail not in config.FAILS:
        raise SpecError(
            f"hostcall: fail= of `{name}` should be one of"
            f" {', '.join(map(repr, config.FAILS))} or None, got {fail!r}",
            code="hc-option",
        )
