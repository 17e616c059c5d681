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
from hostcall._core.array_values import is_numeric
from hostcall._core.captured import has_tracers_text
from hostcall._core.errors import SpecError, counted

# --- When the line is printed --------------------------------------------------------


def formatted(fmt: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """`fmt.format(*args, **kwargs)`; a spec holds for each element of an array."""
    printed_args = [printable(value) for value in args]
    named = {key: printable(value) for key, value in kwargs.items()}
    # Python's own way first, which is many times as fast. It fails at arrays with a
    # spec, which take none, and would print {!r} of a scalar as "array(1.)".
    if "!" not in fmt:
        with contextlib.suppress(TypeError):
            return fmt.format(*printed_args, **named)
    return EachElement().vformat(fmt, printed_args, named)


def printable(value: object) -> object:
    """Converts scalars of small types to Python's: they support no format specs."""
    # The types of ml_dtypes, such as bfloat16 and int4, have the kind "V".
    if not isinstance(value, np.ndarray) or value.ndim or value.dtype.kind != "V":
        return value
    return int(value) if "int" in value.dtype.name else float(value)


class EachElement(string.Formatter):
    """Formats each element of an array as its field says: {:.2f} -> [0.10 0.20].

    A scalar is a number, also as {!r}: the text of an array says nothing more.
    """

    def __init__(self) -> None:
        self._unnamed = itertools.count()  # one formatter for each line

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
        # Once more: a field such as {x[0]} leads to a scalar only now.
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
    used = dict.fromkeys(name for name, _ in fields)  # in order, each once
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
        guesses = [hint(name) for name in unused if isinstance(name, str)]
        hints = "".join(f". {guess}" for guess in guesses if guess)
        raise _wrong(
            f"hc.print({fmt!r}) does not use {_listed(listed)}. Each argument"
            " needs a field in the format, and an f-string has none left. Write"
            f" hc.print('x = {{}}', x){hints}"
        )
    for name, spec in fields:
        why = _why_not(by_name[name], spec)
        if why:
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
    unnumbered = itertools.count()
    texts = set()
    for field, spec, conversion in parsed(fmt):
        text = _NAME_ENDS.split(field)[0]  # "x" of "x[0].real"
        texts.add(text)
        name: int | str = text
        if text.isdecimal():
            name = int(text)
        elif not text:
            name = next(unnumbered)
        # Else the spec holds for a part or a text of the argument, or has fields.
        is_of_the_argument = field == text and conversion is None and "{" not in spec
        fields.append((name, spec if is_of_the_argument else ""))
    if "" in texts and any(map(str.isdecimal, texts)):
        raise ValueError("it mixes numbered and unnumbered fields")
    return tuple(fields)


# Where the name of an argument ends, and a part of it begins.
_NAME_ENDS = re.compile(r"[.[]")


def parsed(fmt: str, depth: int = 0) -> Iterator[tuple[str, str, str | None]]:
    """The (field, spec, conversion) of a format's fields, also of those in specs
    ("{:{width}}"), in the order in which fields without names are numbered.

    Raises ValueError if the format can't be read.
    """
    for _, field, spec, conversion in string.Formatter().parse(fmt):
        if field is None:  # text behind the last field
            continue
        # What `str.format` finds out when it formats is refused here, where the user's
        # line still is on the stack.
        if conversion not in (None, "r", "s", "a"):
            raise ValueError(f"unknown conversion !{conversion}")
        spec = spec or ""
        if depth and "{" in spec:
            raise ValueError("a field in a spec has fields in its own spec")
        yield field, spec, conversion
        yield from parsed(spec, depth + 1)


def _how_to_give(
    fmt: object, missing: Sequence[int | str], used: Sequence[int | str]
) -> str:
    """What to write if fields have no arguments."""
    names = [name for name in used if isinstance(name, str)]
    # A field such as {"a": 1} is no name: a dict was written into the format.
    if not all(name.isidentifier() for name in names):
        return "If the braces belong to the text, write them twice: {{ and }}"
    positions = [name for name in used if isinstance(name, int)]
    if missing[0] in names:
        args = [f"{name}={name}" for name in names]
        if positions:
            args.insert(0, "...")
        need = f"The field {{{missing[0]}}} needs a keyword"
        return f"{need}: hc.print({fmt!r}, {', '.join(args)})"
    count = counted(max(positions) + 1, "positional argument")
    return f"Its fields without names need {count}"


def _why_not(value: object, spec: str) -> str:
    """Why a value can't be formatted by a spec, as far as its type tells; or ""."""
    if not spec:
        return ""
    if isinstance(value, (bool, int, float, complex)):
        # It comes as an array of the dtype that JAX gives it.
        value = np.zeros((), _jax.canonical_dtype(np.dtype(type(value))))
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return _why_no_array(value, spec)
    kind: Any = type(value)
    if kind.__format__ is not object.__format__ or hasattr(value, "__jax_array__"):
        return ""
    return (
        f"a {kind.__name__} takes no format. Give its numbers fields of their own, as"
        " in {x[0]:.3f} and {x[name]:.3f}, or write {}"
    )


def _why_no_array(value: jax.Array | np.ndarray | np.generic, spec: str) -> str:
    """As `_why_not`: formats a zero of the array's dtype."""
    dtype = value.dtype
    if 0 in value.shape:
        return ""  # there is nothing to format
    if _jax.is_key_dtype(dtype) or not is_numeric(np.dtype(dtype)):
        return ""  # only printing finds it out
    zero = np.zeros((1,) if value.shape else (), dtype)
    try:
        formatted(f"{{:{spec}}}", [zero], {})
    except (TypeError, ValueError) as error:
        return f"it is {dtype}, and Python says: {error}. Write {{:.3g}}, or {{}}"
    return ""


def _wrong(complaint: str) -> SpecError:
    return SpecError(f"hostcall: {complaint}", code="hc-arguments")


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names)) or "none"
