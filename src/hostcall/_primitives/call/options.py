"""Checks of the options that every face of a call has."""

from __future__ import annotations

from typing import Any

from hostcall._core.errors import SpecError
from hostcall._core.order import ORDERS
from hostcall._primitives.call import batching
from hostcall._runtime.executors import is_executor

_ARRAYS = ("numpy", "jax", "dlpack", "cuda")
_METHODS = (*batching.ROWS, *batching.WHOLE)


def check_options(
    name: str,
    order: Any,
    vmap_method: Any,
    arrays: Any,
    lend: Any,
    timeout: Any,
    executor: Any,
) -> None:
    def choose(option: str, value: Any, allowed: tuple[Any, ...]) -> None:
        raise SpecError(
            f"hostcall: {option}= of `{name}` should be one of"
            f" {', '.join(map(repr, allowed))}, got {value!r}"
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
            " thread could outlive the memory it was lent: drop one of the two"
        )
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise SpecError(
            f"hostcall: timeout= of `{name}` should be a number of seconds above 0,"
            f" got {timeout!r}"
        )
    if executor is not None:
        if not is_executor(executor):
            raise SpecError(
                f"hostcall: executor= of `{name}` should be a"
                " concurrent.futures.Executor, a Dask client or a pool such as"
                f" multiprocessing.Pool, got {executor!r}"
            )
        if vmap_method != "parallel":
            raise SpecError(
                f"hostcall: `{name}` has executor= and vmap_method={vmap_method!r}."
                ' Rows go to an executor with vmap_method="parallel"'
            )


def check_keep(name: str, keep: Any, masked: bool, vmap_method: Any) -> None:
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
        raise SpecError(
            f"hostcall: keep= of `{name}` should be a number of executions, an int of 0"
            f" or more, got {keep!r}"
        )
    if not masked:
        raise SpecError(
            f"hostcall: `{name}` has keep= and no where=. It keeps the executions that"
            " where= lets pass without a call; give where=, or leave out keep="
        )
    if vmap_method not in (None, "sequential"):
        raise SpecError(
            f"hostcall: `{name}` has keep= and vmap_method={vmap_method!r}. It keeps"
            " rows that are called one by one: leave out vmap_method=, or keep="
        )
