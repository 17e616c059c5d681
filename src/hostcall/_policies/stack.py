"""Puts the layers of a call together, in the one order that works.

The layers here make what the function gets of one array for each leaf, as the engine
has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hostcall._core.callback import CallSpec
from hostcall._native import ResultForm
from hostcall._policies.here import Here, OnThread
from hostcall._policies.layer import (
    Body,
    Choices,
    Flat,
    Leaves,
    Row,
    RowContext,
    Runs,
    TimedFunction,
)
from hostcall._runtime import delivery
from hostcall._runtime.workers import ThreadSettings

# Most programs have no coroutines or parallel rows, so what these need is imported when
# a plan has one.


class EngineFunctions(NamedTuple):
    """What the engine calls.

    Attributes:
        function: takes the leaves of one row.
        form: of what it returns.
        runner: takes the leaves of several rows, and their indices in the batch; None
            if the engine calls the function for each.
        sends: whether the runner sends rows to other processes.
        plain: whether a layer reads arrays before they become what the function gets;
            else the engine converts them.
    """

    function: Callable[..., Any]
    form: ResultForm
    runner: Callable[..., list[Any]] | None = None
    sends: bool = False
    plain: bool = False


def entries(choices: Choices) -> EngineFunctions:
    """The function with its layers."""
    together = choices.grid and choices.parallel  # rows run at the same time
    # Innermost is what runs the function and waits for it, so what has the limit. It
    # gets (args, kwargs), which can be sent elsewhere; no treedef can.
    run = _runs(choices, together)
    layer: Any = Trees(run, choices)
    plain = choices.compressed
    if plain:
        # What follows reads plain arrays, of which it drops rows.
        layer = Checked(layer, choices)
        from hostcall._policies.unmasked import Unmasked, UnmaskedTap

        if choices.tap:
            layer = UnmaskedTap(layer, choices.batch)
        else:
            layer = Unmasked(layer, choices)

    def function(*leaves: Any) -> Any:
        return layer.rows((leaves,), RowContext())[0]

    def runner(rows: list[Leaves], indices: Sequence[tuple[int, ...]]) -> list[Any]:
        return layer.rows(rows, RowContext(indices))  # type: ignore[no-any-return]

    is_flat = plain and not choices.tap  # one plain array for each result
    return EngineFunctions(
        function=function,
        form=ResultForm.TUPLE if is_flat else choices.form,
        runner=runner if together else None,
        sends=run.sends,
        plain=plain,
    )


def _runs(choices: Choices, together: bool) -> Runs:
    """What runs the function, and waits for it.

    These are alternatives, not layers: a limit belongs to whoever waits, and coroutines
    and executors don't meet.
    """
    callback = choices.callback
    policy = callback.policy
    awaits = callback.facts.awaits
    if not (awaits or together or policy.timeout is not None):
        return Here(callback.function)
    timed = TimedFunction(
        fn=callback.function,
        settings=ThreadSettings(choices.device, choices.guard, callback.traced),
        timeout=policy.timeout,
        name=choices.results.name,
    )
    if awaits:
        from hostcall._policies.on_loop import OnLoop

        return OnLoop(timed, policy.concurrency)
    if together:
        from hostcall._policies.on_executor import OnExecutor

        return OnExecutor(timed, policy.pool, choices.once)
    return OnThread(timed)


# --- The layers that most stacks have -------------------------------------------------
#
# They stand outside of what runs the function: an executor gets (args, kwargs), since a
# treedef can't be pickled, and a worker on another machine has none. Above `Trees` all
# layers have one array for each leaf, and above `Checked` plain arrays in and out.


class Trees:
    """Leaves to (args, kwargs). Collectors (`tag=` of a tap) see these first."""

    def __init__(self, inner: Runs, choices: Choices) -> None:
        self._inner = inner
        self._unflatten = unflattened(choices.callback)

    def rows(self, rows: Sequence[Leaves], site: RowContext) -> list[Any]:
        return self._inner.rows([self._unflatten(row) for row in rows], site)


def unflattened(callback: CallSpec) -> Callable[[Leaves], Row]:
    """What makes (args, kwargs) of leaves."""
    unflatten = callback.template.unflatten
    tag = callback.options.collected
    if tag is None:
        return unflatten

    def unflatten_for_collectors(leaves: Leaves) -> Row:
        # Each gets containers of its own, which the function can't change.
        for take in delivery.state.collectors.copy():
            take(tag, *unflatten(leaves))
        return unflatten(leaves)

    return unflatten_for_collectors


class Checked:
    """Plain arrays to the kind that the function gets; its results to leaves.

    Only below a layer that reads arrays: else the engine does both, and faster.
    """

    def __init__(self, inner: Body, choices: Choices) -> None:
        self._inner = inner
        self._converters = choices.converters
        self._flatten = (lambda value: []) if choices.tap else choices.results.flatten

    def rows(self, rows: Sequence[Leaves], site: RowContext) -> list[Flat]:
        converted = [self._converted(row) for row in rows]
        return [self._flatten(value) for value in self._inner.rows(converted, site)]

    def _converted(self, row: Leaves) -> Leaves:
        converted = []
        for array, convert in zip(row, self._converters, strict=True):
            # None: the function gets it as it is.
            converted.append(array if convert is None else convert(array))
        return converted
