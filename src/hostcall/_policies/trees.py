"""Between one array per leaf, as the engine has it, and what the function gets.

This stands outside of what runs the function: an executor gets (args, kwargs), since a
treedef can't be pickled, and a worker on another machine has none. Above it all layers
have leaves in, and above `Checked` plain arrays in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hostcall._policies.layer import Body, Choices, Flat, Leaves, Row, Runs, Site
from hostcall._runtime.collectors import collectors


class Trees:
    """Leaves to (args, kwargs). Collectors (`tag=` of a tap) see these first."""

    def __init__(self, inner: Runs, choices: Choices) -> None:
        self._inner, self._fill = inner, filled(choices)

    def rows(self, rows: Sequence[Leaves], site: Site) -> list[Any]:
        try:
            return self._inner.rows([self._fill(row) for row in rows], site)
        except BaseException as error:
            site.failed(error)
            raise


def filled(choices: Choices) -> Callable[[Leaves], Row]:
    """What makes (args, kwargs) of leaves."""
    fill = choices.callback.template.fill
    tag = choices.callback.options.tag if choices.tap else None
    if tag is None:
        return fill

    def seen(leaves: Leaves) -> Row:
        for collector in collectors.active.copy():
            collector.take(tag, *fill(leaves))
        return fill(leaves)

    return seen


class Checked:
    """Plain arrays to the kind that the function gets; its results to leaves.

    Only below a layer that reads arrays: else the engine does both, and faster.
    """

    def __init__(self, inner: Body, choices: Choices) -> None:
        self._inner, self._converters = inner, choices.converters
        self._flatten = _nothing if choices.tap else choices.results.flatten

    def rows(self, rows: Sequence[Leaves], site: Site) -> list[Flat]:
        made = [
            [
                array if convert is None else convert(array)
                for array, convert in zip(row, self._converters, strict=True)
            ]
            for row in rows
        ]
        return [self._flatten(value) for value in self._inner.rows(made, site)]


def _nothing(value: Any) -> list[Any]:
    return []
