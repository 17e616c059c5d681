"""Formats of `hc.print` in exported programs, where a stranger may have written them.

`str.format` looks up any attribute of what it prints, and from an array some of these
lead to all modules of the process. So a format that leaves the process, or comes from
a file, names its arguments and their items, and nothing else: items are looked up in
tuples, lists, dicts and arrays only, by functions of these types themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hostcall._api.print_format import EachElement, parsed

# The largest width or precision in a spec. What a larger one asks for is memory.
WIDEST = 9999

_FIELD = re.compile(r"(\w*)((?:\[[^][{}]+\])*)")
_DIGITS = re.compile(r"\d+")
# Colours may pass. Others move the cursor, set the title or type into the terminal.
_CONTROL = re.compile(r"\x1b\[[\d;]*m|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_SPECS = (bool, int, float, complex, str)


def fault(fmt: str) -> str:
    """What a format may not have; completes a sentence. "" if there is nothing."""
    try:
        for field, spec, _ in parsed(fmt):
            if not _FIELD.fullmatch(field):
                return (
                    f"has the field {{{field}}}. In a program that leaves the process,"
                    " fields are names and numbers, with [item]s of tuples, lists and"
                    " dicts behind them. Pass what the attribute has as an argument of"
                    " its own"
                )
            if _is_wide(spec):
                return f"has a width or precision of more than {WIDEST}: {spec}"
    except ValueError as error:
        return f"can't be read: {error}"
    return ""


def _is_wide(spec: str) -> bool:
    return any(
        len(digits) > 9 or int(digits) > WIDEST for digits in _DIGITS.findall(spec)
    )


class OnlyItems(EachElement):
    """Fills formats without a `fault`: looks up items, and formats plain values."""

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, str]:
        found = _FIELD.fullmatch(field_name)
        assert found is not None  # `fault` has looked
        name, items = found.groups()
        value = args[int(name)] if name.isdecimal() else kwargs[name]
        for item in items[1:-1].split("][") if items else ():
            value = _item(value, item)
        return value, name

    def format_field(self, value: Any, format_spec: str) -> str:
        if not format_spec:
            return format(value)
        kind = type(value)
        if _is_wide(format_spec):
            raise ValueError(
                "hostcall: the format of a loaded hc.print has the spec"
                f" {format_spec!r}, and a width or precision of more than {WIDEST} is"
                " refused there"
            )
        if kind in _SPECS or kind is np.ndarray or issubclass(kind, np.generic):
            return super().format_field(value, format_spec)
        raise TypeError(
            f"hostcall: the format of a loaded hc.print formats a {kind.__name__} as"
            f" {{:{format_spec}}}. Only numbers, texts and arrays are formatted there"
        )


def _item(value: Any, item: str) -> Any:
    key = int(item) if item.isdecimal() else item
    kind = type(value)
    known: Any
    for known in (dict, tuple, list):
        # Also of subclasses, such as named tuples, whose own look-up is not asked.
        if issubclass(kind, known):
            return known.__getitem__(value, key)
    if kind is np.ndarray or issubclass(kind, jax.Array):
        return value[key]
    raise TypeError(
        f"hostcall: the format of a loaded hc.print takes the item [{item}] of a"
        f" {kind.__name__}. Only tuples, lists, dicts and arrays have items there"
    )


def without_controls(text: str) -> str:
    """The text, with control characters that are no colours written as escapes."""
    return _CONTROL.sub(
        lambda found: found[0] if len(found[0]) > 1 else repr(found[0])[1:-1], text
    )
