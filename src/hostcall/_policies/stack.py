"""Puts the layers of a call together, in the one order that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from hostcall._core.options import CallOptions
from hostcall._native import ResultForm
from hostcall._policies.here import Here, OnThread
from hostcall._policies.layer import Bound, Choices, Index, Leaves, Runs, Site
from hostcall._policies.trees import Checked, Trees, filled
from hostcall._runtime.workers import ThreadSettings

# Most programs have no cache, merged calls, coroutines or parallel rows, so
# what these need is imported when a plan has one.


class Entries(NamedTuple):
    """What the engine calls.

    Attributes:
        function: takes the leaves of one row.
        form: of what it returns.
        runner: takes the leaves of several rows, and their indices in the batch; None
            if the engine calls the function for each.
        sends: whether the runner sends rows to other processes.
    """

    function: Callable[..., Any]
    form: ResultForm
    runner: Callable[[list[Leaves], list[Index]], list[Any]] | None = None
    sends: bool = False


def entries(choices: Choices) -> Entries:
    """The function with its layers. Without any, it is the user's function itself."""
    policy, run = choices.callback.policy, _runs(choices)
    if isinstance(run, Here) and not choices.plain:
        return Entries(_direct(choices), choices.form)
    # Innermost is what runs the function and waits for it, so what has the limit. It
    # gets (args, kwargs), which can be sent elsewhere; no treedef can.
    layer: Any = Trees(run, choices)
    if choices.plain:
        # What follows reads plain arrays: it stacks them, drops rows, makes keys.
        layer = Checked(layer, choices)
    if choices.compressed:
        from hostcall._policies.unmasked import Unmasked, UnmaskedTap

        # Inside the cache: without the mask, shapes would differ from call to call.
        tap = choices.tap
        layer = UnmaskedTap(layer, choices.batch) if tap else Unmasked(layer, choices)
    if policy.coalesce is not None:
        from hostcall._policies.merged import Merged

        layer = Merged(layer, choices, *policy.coalesce)
    if policy.cache is not None:
        from hostcall._policies.cached import Cached

        # Outermost: only what is not known is merged, or sent. A row that waits for
        # others has claimed its key, and no merged call waits for a key.
        layer = Cached(layer, choices, policy.cache)

    def function(*leaves: Any) -> Any:
        return layer.rows((leaves,), Site())[0]

    def runner(rows: list[Leaves], indices: list[Index]) -> list[Any]:
        return layer.rows(rows, Site(indices))  # type: ignore[no-any-return]

    together = choices.grid and (choices.parallel or policy.coalesce is not None)
    flat = choices.plain and not choices.tap  # one plain array for each result
    form = ResultForm.TUPLE if flat else choices.form
    return Entries(function, form, runner if together else None, run.sends)


def _runs(choices: Choices) -> Runs:
    """What runs the function, and waits for it.

    These are alternatives, not layers: a limit belongs to whoever waits, and coroutines
    and executors don't meet.
    """
    callback, policy = choices.callback, choices.callback.policy
    # Merged rows are one call, so they need no executor.
    together = choices.grid and choices.parallel and policy.coalesce is None
    if not (callback.awaits or together or policy.timeout is not None):
        return Here(callback.function)
    settings = ThreadSettings(choices.device, choices.guard, callback.traced)
    name = choices.results.name
    bound = Bound(callback.function, settings, policy.timeout, name)
    if callback.awaits:
        from hostcall._policies.on_loop import OnLoop

        return OnLoop(bound, policy.concurrency)
    if together:
        from hostcall._policies.on_executor import OnExecutor

        return OnExecutor(bound, policy.pool, choices.once)
    return OnThread(bound)


# --- Without a layer ------------------------------------------------------------------
#
# A stack costs 2.8 us a call, one closure 1.4, the function itself 0.13.


def _direct(choices: Choices) -> Callable[..., Any]:
    callback = choices.callback
    whole = callback.function
    options = callback.options
    if not callback.template.is_flat or (choices.tap and options.tag is not None):
        whole = _with_trees(whole, filled(choices))
    own = isinstance(options, CallOptions) and options.lend == "out"
    return _with_own_results(whole) if own else whole


def _with_trees(fn: Callable[..., Any], fill: Callable[..., Any]) -> Any:
    def whole(*leaves: Any, **out: Any) -> Any:
        args, kwargs = fill(leaves)
        return fn(*args, **kwargs, **out)

    return whole


def _with_own_results(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Copies the results that a function with `out=` returns anyway.

    They may be views of `out`, and then storing one could overwrite another.
    """

    def call(*leaves: Any, out: Any) -> Any:
        value = whole(*leaves, out=out)
        if value is None:
            return None
        return jax.tree.map(
            lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value
        )

    return call
