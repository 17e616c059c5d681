"""`hc.print`: prints a line from a compiled program; the tap worker formats it."""

from __future__ import annotations

import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TextIO

import jax
import numpy as np

from hostcall._api.tap import tap
from hostcall._core.captured import has_tracers_text
from hostcall._core.counted import counted
from hostcall._core.errors import SpecError
from hostcall._core.mistakes import Face, options_of
from hostcall._core.order import Order
from hostcall._core.portable import Malformed, NotPortable, read_plain, tell_plain
from hostcall._core.spec import Static
from hostcall._engine.params.tap import On, Rows, WhenFull
from hostcall._engine.portable import add_kind


def print(
    fmt: str,
    *args: Any,
    order: Order = "unordered",
    where: Any = None,
    rows: Rows = "batched",
    when_full: WhenFull = "block",
    every: int | float | None = None,
    on: On | jax.Device = "once",
    file: TextIO | None = None,
    flush: bool = False,
    end: str = "\n",
    **kwargs: Any,
) -> None:
    """Prints `fmt.format(*args, **kwargs)` from a program, which does not wait for it.

    Args:
        fmt: a format string with braces. Not an f-string: the values do not exist yet
            when the program is traced.
        *args: pytrees. Arrays are formatted as NumPy arrays, other leaves as they are.
            `fmt` must use each of them. A format such as {:.2f} holds for each element
            of an array.
        order: as in `hc.tap`.
        where: a bool scalar. If it is False, nothing is printed.
        rows: under vmap, "batched" prints one line for the batch, "each" prints one
            line per row, like `jax.debug.print`.
        when_full: what happens if the tap queue is full, as in `hc.tap`.
        every: prints one line in so many executions (an int), or in so many seconds (a
            float), as in `hc.tap`.
        on: in a jitted program over several devices, "once": one line with the whole
            value, in one process; "process": one line in each process, with what that
            process holds; "shards": one for each block; a device: one line, in that
            device's process. As in `hc.tap`.
        file: where to print. Default: what `sys.stdout` is when the line is printed, so
            that notebooks and tests that capture output get it.
        flush: whether to flush the file after the line.
        end: the text after the line.
        **kwargs: like `args`, for the named fields of `fmt`.

    Raises:
        SpecError: `fmt` is no format string, or the arguments do not fit it.

    NumPy's print options apply as they are when the program is traced.

    Under transformations: as for `hc.tap`.

    Cost: that of `hc.tap`. The thread that delivers taps does the formatting.
    """
    _check_format(fmt, len(args), kwargs)
    printer = Printer(
        fmt=fmt,
        file=None if file is None else Static(file),
        flush=flush,
        end=end,
        options=_print_options(),
    )
    tap(  # as two trees, since a field of `fmt` may be named like an option of tap
        printer,
        args,
        kwargs,
        order=order,
        where=where,
        rows=rows,
        when_full=when_full,
        every=every,
        on=on,
    )


_FACE = Face(
    "hc.print",
    "hc.print({args})",
    options_of(print, "fmt"),
    {"ordered": 'order="ordered"', "partitioned": 'on="shards"'},
)


@dataclass(frozen=True)
class Printer:
    """The function of a tap that prints.

    Printers of equal lines are equal, so tracing a line again hits JAX's caches.
    """

    hostcall_kind: ClassVar = "print"  # for _engine/portable.py

    fmt: str
    file: Static | None
    flush: bool
    end: str
    options: tuple[tuple[str, Any], ...]

    @property
    def __name__(self) -> str:
        return f"hc.print({self.fmt!r})"

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shown = [*map(_printable, args)]
        named = {k: _printable(v) for k, v in kwargs.items()}
        with np.printoptions(**dict(self.options)):
            try:
                text = self.fmt.format(*shown, **named)
            except TypeError:  # NumPy's arrays take no format specs
                text = _EachElement().vformat(self.fmt, shown, named)
        file = sys.stdout if self.file is None else self.file.value
        # One write, so that other threads can't print between text and end.
        file.write(text + self.end)
        if self.flush:
            file.flush()


def _tell(printer: Printer, _: bool) -> Any:
    if printer.file is not None:
        raise NotPortable(
            "file= is a stream of this process. Leave it out: the line goes to what"
            " sys.stdout is where the program runs"
        )
    told = {"fmt": printer.fmt, "flush": printer.flush, "end": printer.end}
    return {**told, "options": tell_plain(printer.options, "a NumPy print option")}


def _read(told: Any) -> tuple[Printer, dict[str, Any]]:
    options = read_plain(told["options"])
    for name, _ in options:
        if name not in _DEFAULTS:
            raise Malformed(f"the print option {name!r}")
    texts = {key: str(told[key]) for key in ("fmt", "end")}
    printer = Printer(file=None, flush=bool(told["flush"]), options=options, **texts)
    return printer, {}


add_kind("print", _tell, _read)


def _printable(value: Any) -> Any:
    """Converts scalars of small types to Python's: they support no format specs."""
    if not isinstance(value, np.ndarray) or value.ndim or value.dtype.kind != "V":
        return value
    number = int if "int" in value.dtype.name else float
    return number(value)


class _EachElement(string.Formatter):
    """Formats each element of an array as its field says: {:.2f} -> [0.10 0.20]."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if not isinstance(value, np.ndarray) or not value.ndim or not format_spec:
            return str(super().format_field(value, format_spec))

        def show(element: Any) -> str:
            return format(element.item(), format_spec)

        return np.array2string(value, formatter={"all": show})


def _print_options() -> tuple[tuple[str, Any], ...]:
    """NumPy's print options that differ from its defaults, in hashable form."""
    options: dict[str, Any] = dict(np.get_printoptions())
    return tuple(
        (name, options[name])
        for name in sorted(options)
        if options[name] != _DEFAULTS.get(name) and name != "override_repr"
    )


_DEFAULTS = {
    "edgeitems": 3,
    "threshold": 1000,
    "floatmode": "maxprec",
    "precision": 8,
    "suppress": False,
    "linewidth": 75,
    "nanstr": "nan",
    "infstr": "inf",
    "sign": "-",
    "formatter": None,
    "legacy": False,
}


def _check_format(fmt: Any, positional: int, keywords: dict[str, Any]) -> None:
    if not isinstance(fmt, str):
        raise SpecError(
            f"hostcall: the first argument of hc.print should be a format string, got"
            f" {fmt!r}. Write hc.print('x = {{}}', x)"
        )
    try:
        used = list(_fields(fmt))
    except ValueError as error:
        raise SpecError(
            f"hostcall: hc.print can't read the format {fmt!r}: {error}. Write literal"
            " braces twice: {{ }}",
            code="hc-arguments",
        ) from None
    if has_tracers_text(fmt):
        raise SpecError(
            f"hostcall: the format of hc.print contains the text of a tracer: {fmt!r}."
            " It looks like an f-string, which is formatted while the program is"
            " traced, before its values exist. Write hc.print('x = {}', x)",
            code="hc-traced",
        )
    missing = [f for f in used if _is_missing(f, positional, keywords)]
    if missing:
        raise SpecError(
            f"hostcall: hc.print({fmt!r}) has no argument for its fields"
            f" {_listed(missing)}. It got"
            f" {counted(positional, 'positional argument')}, and the keywords"
            f" {_listed(list(keywords))}",
            code="hc-arguments",
        )
    unused = [i for i in range(positional) if i not in used]
    names = [name for name in keywords if name not in used]
    if unused or names:
        hints = "".join(f". {_FACE.hint(name)}" for name in names if _FACE.hint(name))
        raise SpecError(
            f"hostcall: hc.print({fmt!r}) does not use"
            f" {_listed([f'argument {i}' for i in unused] + names)}. Each argument"
            " needs a field in the format, and an f-string has none left. Write"
            f" hc.print('x = {{}}', x){hints}",
            code="hc-arguments",
        )


def _fields(fmt: str) -> list[int | str]:
    """The fields that a format uses, also in nested specs ("{:{width}}")."""
    found: list[int | str] = []
    automatic, numbered = 0, False
    todo = [(fmt, 0)]
    while todo:
        text, depth = todo.pop(0)
        for _, field, spec, conversion in string.Formatter().parse(text):
            if field is None:
                continue
            if conversion not in (None, "r", "s", "a"):
                raise ValueError(f"unknown conversion {conversion!r}")
            name = field.split(".")[0].split("[")[0]
            if name == "":
                found.append(automatic)
                automatic += 1
            elif name.isdecimal():
                found.append(int(name))
                numbered = True
            else:
                found.append(name)
            if automatic and numbered:
                raise ValueError("it mixes numbered and unnumbered fields")
            if depth and "{" in (spec or ""):
                raise ValueError("a field in a spec has fields in its own spec")
            if spec:
                todo.append((spec, depth + 1))
    return found


def _is_missing(field: int | str, positional: int, keywords: dict[str, Any]) -> bool:
    return field >= positional if isinstance(field, int) else field not in keywords


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names)) or "none"
