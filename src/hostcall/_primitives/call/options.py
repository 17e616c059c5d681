"""Checks of the options that every face of a call has."""

from __future__ import annotations

from typing import Any

from hostcall._core import config
from hostcall._core.arguments import (
    check_count,
    check_seconds,
    choices,
    conflict,
    wrong,
)
from hostcall._core.errors import SpecError
from hostcall._core.order import ORDERS
from hostcall._core.signatures import own_option
from hostcall._primitives.call import batching

_ARRAYS = ("numpy", "jax", "dlpack", "cuda")
_LENDS = (False, True, "out")
_METHODS = (*batching.ROWS, *batching.WHOLE, None)
_WAIT = 0.002  # seconds that a call waits for others without `wait=`


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
    of = f"`{name}`"

    def choose(option: str, value: Any, allowed: tuple[Any, ...]) -> None:
        if value in allowed:
            return
        own = "" if fn is None else own_option(fn, option, value)
        if value == "sequential_unrolled":
            own = ". 'sequential' does the same"
        raise wrong(option, of, choices(allowed), value, own)

    choose("order", order, ORDERS)
    if not callable(vmap_method):
        choose("vmap_method", vmap_method, _METHODS)
    choose("arrays", arrays, _ARRAYS)
    choose("lend", lend, _LENDS)
    if lend and (timeout is not None or vmap_method == "parallel"):
        other = "timeout=" if timeout is not None else 'vmap_method="parallel"'
        raise conflict(
            of,
            f"lend={lend!r} and {other}. A function on another thread could outlive the"
            " memory it was lent: drop one of the two",
        )
    if timeout is not None:
        check_seconds("timeout", of, timeout)
    if concurrency is not None:
        if not awaits:
            raise conflict(
                of,
                "concurrency= and is not a coroutine function. Make it an `async def`,"
                " or leave out concurrency=: rows of a plain function run on the"
                ' threads of executor= with vmap_method="parallel"',
            )
        what = "how many of its calls wait at the same time"
        check_count("concurrency", of, concurrency, what)
    if awaits:
        check_awaits(name, arrays, lend, executor)
    if executor is not None:
        # Most programs have none.
        from hostcall._runtime.executors import is_executor

        if not is_executor(executor):
            wanted = (
                "a concurrent.futures.Executor, a Dask client or a pool such as"
                " multiprocessing.Pool"
            )
            raise wrong("executor", of, wanted, executor)
        if vmap_method != "parallel":
            raise conflict(
                of,
                f"executor= and vmap_method={vmap_method!r}. Rows go to an executor"
                ' with vmap_method="parallel"',
            )


def check_awaits(name: str, arrays: Any, lend: Any, executor: Any) -> None:
    """Refuses options that a coroutine function can't have."""
    if executor is not None:
        option = "executor="
        why = "it runs on the event loop, with concurrency= in place of executor="
    elif lend:
        option = f"lend={lend!r}"
        why = "it runs on another thread and could outlive the memory it was lent"
    elif arrays == "cuda":
        option = "arrays='cuda'"
        why = "XLA's memory and stream are its own only while XLA's thread runs"
    else:
        return
    raise SpecError(
        f"hostcall: the coroutine function `{name}` can't have {option}: {why}. Leave"
        f" out {option}",
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
    of = f"`{name}`"
    if coalesce is None:
        if wait is not None:
            raise conflict(
                of,
                "wait= and no coalesce=. Calls wait for others to be merged with: give"
                " coalesce=, or leave out wait=",
            )
        return None
    check_count("coalesce", of, coalesce, "how many calls are merged into one at most")
    wait = _WAIT if wait is None else wait
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or wait < 0:
        wanted = "the seconds that a call waits for others, a number of 0 or more"
        raise wrong("wait", of, wanted, wait)
    if order != "pure":
        raise conflict(
            of,
            f"coalesce= and order={order!r}. Merged calls have no order among each"
            " other: leave out order=, or coalesce=",
        )
    if vmap_method not in (None, "sequential", "parallel"):
        raise conflict(
            of,
            f"coalesce= and vmap_method={vmap_method!r}. With coalesce= the rows of a"
            " batch are merged anyway: leave out vmap_method=",
        )
    for option, given in others.items():
        if given:
            raise conflict(
                of,
                f"coalesce= and {option}, which is for calls that are made one by one:"
                f" leave out {option}, or coalesce=",
            )
    return coalesce, float(wait)


def refuse_no_arrays(name: str) -> None:
    raise conflict(
        f"`{name}`",
        "coalesce= and no array among its arguments, so it could not tell how many"
        " calls were merged: pass one, or leave out coalesce=",
    )


def check_fail(name: str, fail: Any) -> None:
    if fail is not None and fail not in config.FAILS:
        raise wrong("fail", f"`{name}`", f"{choices(config.FAILS)} or None", fail)
