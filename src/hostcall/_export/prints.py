"""`hc.print` in programs that leave the process (_export/records.py).

A stranger may have written a format that comes from a file. `str.format` looks up any
attribute of what it prints, and from an array some of these lead to all modules of the
process. So a format that leaves the process, or comes from a file, names its arguments
and their items, and nothing else: items are looked up in tuples, lists, dicts and
arrays only, by functions of these types themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hostcall._api.print import Printer
from hostcall._api.print_format import EachElement, parsed
from hostcall._core.codec import Json, Malformed, NotPortable
from hostcall._core.options import Policy
from hostcall._export.structures import CODEC


class LoadedPrinter(Printer):
    """One whose format comes from a file."""

    def line(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        filled = _OnlyItems().vformat(self.fmt, args, kwargs)
        return _without_controls(filled + self.end)


def record_of(printer: Printer, _: bool) -> Printer:
    if printer.file is not None:
        raise NotPortable(
            "file= is a stream of this process. Leave it out: the line goes to what"
            " sys.stdout is where the program runs"
        )
    if why := _fault(printer.fmt):
        raise NotPortable(f"its format {why}")
    return printer


def read(json: Json) -> tuple[Printer, Policy]:
    printer = LoadedPrinter(file=None, **CODEC.fields(json, Printer))
    if why := _fault(printer.fmt):
        raise Malformed(f"the format {printer.fmt!r}, which {why}")
    if not 0 <= (printer.options.precision or 0) <= _WIDEST:
        raise Malformed(f"the option precision={printer.options.precision}")
    if min(printer.numbers, default=0) < 0:
        raise Malformed(f"the numbers {printer.numbers} of arguments of a print")
    return printer, Policy()


# --- Formats ------------------------------------------------------------------------

# The largest width or precision in a spec. What a larger one asks for is memory.
_WIDEST = 9999

_FIELD = re.compile(r"(\w*)((?:\[[^][{}]+\])*)")
_DIGITS = re.compile(r"\d+")
# Colours may pass. Others move the cursor, set the title or type into the terminal.
_CONTROL = re.compile(r"\x1b\[[\d;]*m|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_SPECS = (bool, int, float, complex, str)


def _fault(fmt: str) -> str:
    """What a format may not have; completes a sentence. "" if there is nothing."""
    try:
        for field, spec, _ in parsed(fmt):
            # A dot is an attribute, which may lead anywhere.
            if not _FIELD.fullmatch(field):
                return (
                    f"has the field {{{field}}}. In a program that leaves the process,"
                    " fields are names and numbers, with [item]s of tuples, lists and"
                    " dicts behind them. Pass what the attribute has as an argument of"
                    " its own"
                )
            if _is_wide(spec):
                return f"has a width or precision of more than {_WIDEST}: {spec}"
    except ValueError as error:
        return f"can't be read: {error}"
    return ""


def _is_wide(spec: str) -> bool:
    for digits in _DIGITS.findall(spec):
        # Reading a number of a million digits takes minutes by itself.
        if len(digits) > 9 or int(digits) > _WIDEST:
            return True
    return False


class _OnlyItems(EachElement):
    """Fills formats without a `_fault`: looks up items, and formats plain values."""

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, str]:
        field = _FIELD.fullmatch(field_name)
        assert field is not None, "`_fault` has refused other fields"
        name, items = field.groups()
        value = args[int(name)] if name.isdecimal() else kwargs[name]
        if items:  # "[0][key]"
            for item in items[1:-1].split("]["):
                value = _item(value, item)
        return value, name

    def format_field(self, value: Any, format_spec: str) -> str:
        if not format_spec:
            return format(value)
        kind = type(value)
        # A width may itself be a field, whose value is known only here.
        if _is_wide(format_spec):
            raise ValueError(
                "hostcall: the format of a loaded hc.print has the spec"
                f" {format_spec!r}, and a width or precision of more than {_WIDEST} is"
                " refused there"
            )
        # Any other class may have a `__format__` that runs code.
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
    # Not a subclass of NumPy's: it may have an item access of its own.
    if kind is np.ndarray or issubclass(kind, jax.Array):
        return value[key]
    raise TypeError(
        f"hostcall: the format of a loaded hc.print takes the item [{item}] of a"
        f" {kind.__name__}. Only tuples, lists, dicts and arrays have items there"
    )


def _without_controls(text: str) -> str:
    """The text, with control characters that are no colours written as escapes."""

    def escaped(match: re.Match[str]) -> str:
        control = match[0]
        is_colour = len(control) > 1
        return control if is_colour else repr(control)[1:-1]

    return _CONTROL.sub(escaped, text)
