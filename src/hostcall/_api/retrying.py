"""`hc.retrying`: an executor that survives the death of its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostcall._core.errors import SpecError
from hostcall._runtime.executors import is_executor
from hostcall._runtime.retrying import Retrying


def retrying(make: Callable[[], Any], *, retries: int = 1) -> Retrying:
    """An `executor=` that is made anew when a worker dies, and gets the rows again.

    ::

        pool = hc.retrying(lambda: ProcessPoolExecutor(4), retries=2)
        f = hc.host(solve, ..., vmap_method="parallel", executor=pool)

    A row whose worker died (it crashed, was killed, or ran out of memory) and the rows
    that had not ended are sent to a new pool. Results that are there are kept. Rows of
    a call with effects (order= is not "pure") are never sent again: the call fails, and
    the next one gets a new pool.

    Args:
        make: returns a new pool: a concurrent.futures executor of processes, loky's, or
            a multiprocessing.Pool. It is called when it is first
            needed (a program that uses it is compiled, or the first call), and after
            a death.
        retries: how often the rows of one call are sent again, before the call fails as
            it does without `retrying`. A row may have killed its worker, and would then
            kill the next ones too.

    Returns:
        An object for `executor=`. It ends its pool by `close()`, as a context manager,
        or with the process.

    Raises:
        SpecError: an argument is invalid.
    """
    if not callable(make) or is_executor(make):
        raise SpecError(
            f"hostcall: hc.retrying takes a function that makes a pool, got {make!r}."
            " Write hc.retrying(lambda: ProcessPoolExecutor(4)): a pool whose worker"
            " has died can't be used again",
            code="hc-option",
        )
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 1:
        raise SpecError(
            f"hostcall: retries= of hc.retrying should be an int of 1 or more, got"
            f" {retries!r}. Without retries pass the pool itself",
            code="hc-option",
        )
    return Retrying(make, retries)
