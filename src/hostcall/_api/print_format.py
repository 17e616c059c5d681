"""The formats of `hc.print`: applies them, and refuses what does not fit them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.captured import has_tracers_text
from hostcall._core.errors import SpecError, counted
from hostcall._core.spec import is_numeric

# --- When the line is printed --------------------------------------------------------


def formatted(fmt: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """`fmt.format(*args, **kwargs)`; a spec holds for each element of an array."""
    shown = [*map(printable, args)]
    named = {k: printable(v) for k, v in kwargs.items()}
    if "!" not in fmt:
        with contextlib.suppress(TypeError):  # NumPy's arrays take no format specs
            return fmt.format(*shown, **named)
    return EachElement().vformat(fmt, shown, named)


def printable(value: object) -> object:
    """Converts scalars of small types to Python's: they support no format specs."""
    if not isinstance(value, np.ndarray) or value.ndim or value.dtype.kind != "V":
        return value
    number = int if "int" in value.dtype.name else float
    return number(value)


class EachElement(string.Formatter):
    """Formats each element of an array as its field says: {:.2f} -> [0.10 0.20].

    A scalar is a number, also as {!r}: the text of an array says nothing more.
    """

    def __init__(self) -> None:
        self._unnamed = itertools.count()

    def parse(self, format_string: str) -> Iterator[Any]:
        """Numbers the fields without names, also those that begin with [ or a dot.

        `vformat` asks for a spec's fields behind the field that has it, since a width
        without a name is the next argument.
        """
        for text, field, spec, conversion in super().parse(format_string):
            if field is not None and field[:1] in ("", ".", "["):
                field = f"{next(self._unnamed)}{field}"
            yield text, field, spec, conversion

    def convert_field(self, value: object, conversion: Any) -> object:
        value = printable(value)
        if conversion and isinstance(value, np.ndarray) and not value.ndim:
            return str(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if not isinstance(value, np.ndarray) or not value.ndim or not format_spec:
            return str(super().format_field(value, format_spec))

        def show(element: np.ndarray) -> str:
            return format(element.item(), format_spec)

        return np.array2string(value, formatter={"all": show})


# --- When it is traced ---------------------------------------------------------------


def check(
    fmt: object,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    hint: Callable[[str], str],
) -> None:
    """Refuses a format that can't be read, or that the arguments do not fit.

    `hint` guesses what a keyword that no field uses was meant to be.
    """
    fields = _read(fmt)
    by_name: dict[Any, object] = {**dict(enumerate(args)), **kwargs}
    used = dict.fromkeys(name for name, _ in fields)
    missing = [name for name in used if name not in by_name]
    if missing:
        raise _wrong(
            f"hc.print({fmt!r}) has no argument for its fields"
            f" {_listed(missing)}. It got"
            f" {counted(len(args), 'positional argument')}, and the keywords"
            f" {_listed([*kwargs])}. {_how_to_give(fmt, missing, [*used])}"
        )
    unused = [name for name in by_name if name not in used]
    if unused:
        listed = [f"argument {n}" if isinstance(n, int) else n for n in unused]
        hints = "".join(f". {hint(n)}" for n in kwargs if n in unused and hint(n))
        raise _wrong(
            f"hc.print({fmt!r}) does not use {_listed(listed)}. Each argument"
            " needs a field in the format, and an f-string has none left. Write"
            f" hc.print('x = {{}}', x){hints}"
        )
    for name, spec in fields:
        if spec and (why := _why_not(by_name[name], spec)):
            which = f"argument {name}" if isinstance(name, int) else f"{name}="
            raise _wrong(
                f"hc.print({fmt!r}) can't format its {which} as {{:{spec}}}: {why}"
            )


def _read(fmt: object) -> tuple[tuple[int | str, str], ...]:
    """The fields of a format, as `_fields`."""
    if not isinstance(fmt, str):
        raise SpecError(
            f"hostcall: the first argument of hc.print should be a format string, got"
            f" {fmt!r}. Write hc.print('x = {{}}', x)"
        )
    try:
        fields = _fields(fmt)
    except ValueError as error:
        raise _wrong(
            f"hc.print can't read the format {fmt!r}: {error}. Write literal"
            " braces twice: {{ }}"
        ) from None
    if has_tracers_text(fmt):
        raise SpecError(
            f"hostcall: the format of hc.print contains the text of a tracer: {fmt!r}."
            " It looks like an f-string, which is formatted while the program is"
            " traced, before its values exist. Write hc.print('x = {}', x)",
            code="hc-traced",
        )
    return fields


@functools.lru_cache(maxsize=1024)
def _fields(fmt: str) -> tuple[tuple[int | str, str], ...]:
    """For each field the name of its argument, or its position, and its spec.

    The spec is the text by which the argument itself is formatted, such as ".2f"; "" if
    there is none, or it is known only when the line is printed.
    """
    fields: list[tuple[int | str, str]] = []
    automatic = itertools.count()
    texts = set()
    for field, spec, conversion in parsed(fmt):
        text = _NAME_ENDS.split(field)[0]
        name = int(text) if text.isdecimal() else text or next(automatic)
        is_known = field == text and conversion is None and "{" not in spec
        fields.append((name, spec if is_known else ""))
        texts.add(text)
    if "" in texts and any(map(str.isdecimal, texts)):
        raise ValueError("it mixes numbered and unnumbered fields")
    return tuple(fields)


_NAME_ENDS = re.compile(r"[.[]")


def parsed(fmt: str, depth: int = 0) -> Iterator[tuple[str, str, str | None]]:
    """The (field, spec, conversion) of a format's fields, also of those in specs
    ("{:{width}}"), in the order in which fields without names are numbered.

    Raises ValueError if the format can't be read.
    """
    for _, field, spec, conversion in string.Formatter().parse(fmt):
        if field is None:
            continue
        if conversion not in (None, "r", "s", "a"):
            raise ValueError(f"unknown conversion !{conversion}")
        if depth and "{" in (spec or ""):
            raise ValueError("a field in a spec has fields in its own spec")
        yield field, spec or "", conversion
        yield from parsed(spec or "", depth + 1)


def _how_to_give(
    fmt: object, missing: Sequence[int | str], used: Sequence[int | str]
) -> str:
    """What to write if fields have no arguments."""
    names = [name for name in used if isinstance(name, str)]
    if not all(name.isidentifier() for name in names):
        return "If the braces belong to the text, write them twice: {{ and }}"
    last = max((n for n in used if isinstance(n, int)), default=-1)
    if missing[0] in names:
        args = ["..."] * (last >= 0) + [f"{name}={name}" for name in names]
        need = f"The field {{{missing[0]}}} needs a keyword"
        return f"{need}: hc.print({fmt!r}, {', '.join(args)})"
    return f"Its fields without names need {counted(last + 1, 'positional argument')}"


def _why_not(value: object, spec: str) -> str:
    """Why a value can't be formatted by a spec, as far as its type tells; or ""."""
    if isinstance(value, (bool, int, float, complex)):
        value = np.zeros((), _jax.canonical_dtype(np.dtype(type(value))))
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        dtype = value.dtype
        shape = value.shape
        if 0 in shape or _jax.is_key_dtype(dtype) or not is_numeric(np.dtype(dtype)):
            return ""  # nothing to format, or what only printing finds out
        try:
            formatted(f"{{:{spec}}}", [np.zeros((1,) if shape else (), dtype)], {})
        except (TypeError, ValueError) as error:
            return f"it is {dtype}, and Python says: {error}. Write {{:.3g}}, or {{}}"
        return ""
    kind: Any = type(value)
    if kind.__format__ is not object.__format__ or hasattr(value, "__jax_array__"):
        return ""
    return (
        f"a {kind.__name__} takes no format. Give its numbers fields of their own, as"
        " in {x[0]:.3f} and {x[name]:.3f}, or write {}"
    )


def _wrong(complaint: str) -> SpecError:
    return SpecError(f"hostcall: {complaint}", code="hc-arguments")


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names)) or "none"
