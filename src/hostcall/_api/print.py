"""`hc.print`: prints a line from a compiled program; the tap worker formats it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, TextIO

import jax
import numpy as np

from hostcall._api.print_format import check, formatted
from hostcall._api.tap import FACE, tap
from hostcall._core import stream
from hostcall._core.host_code import HostCode
from hostcall._core.mistakes import Face, options_of
from hostcall._core.options import LOCAL_ONLY, On, Rows, WhenFull
from hostcall._core.order import Order
from hostcall._core.spec import Opaque


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
            when the program is traced. In an exported program (`hc.export`) fields are
            names and numbers with [item]s, and no attributes.
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
            value, in one process; "shards": one for each block; a device: one line, in
            that device's process. As in `hc.tap`.
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
    options = FACE.given(locals())  # as hc.tap calls them; the others are the printer's
    check(fmt, args, kwargs, _hint)
    printer = Printer(
        fmt=fmt,
        numbers=_numbers_in((args, kwargs)),
        file=None if file is None else Opaque(file),
        flush=bool(flush),
        end=end,
        options=NumPys.now(),
    )
    # As two trees, since a field of `fmt` may be named like an option of tap.
    tap(printer, args, kwargs, **options)


_FACE = Face(
    "hc.print",
    "hc.print({args})",
    options_of(print, "fmt"),
    {"ordered": 'order="ordered"', "partitioned": 'on="shards"'},
)


def _hint(keyword: str) -> str:
    """Guesses what a keyword that no field uses was meant to be."""
    if keyword in FACE.options:
        return (
            f"{keyword}= is an option of hc.tap, not of hc.print. Write"
            f" hc.tap(lambda x: print(x), x, {keyword}=...)"
        )
    return _FACE.hint(keyword)


def _numbers_in(args_and_kwargs: object) -> tuple[int, ...]:
    """Which leaves are Python's numbers in containers, such as those of a shape."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(args_and_kwargs)
    numbers = []
    for number, (path, leaf) in enumerate(leaves):
        # The path of an argument itself has two steps: args or kwargs, and which one.
        # An array of one number prints as the number does, so only those inside count.
        is_inside = len(path) > 2
        if is_inside and type(leaf) in (bool, int, float):
            numbers.append(number)
    return tuple(numbers)


@dataclass(frozen=True)
class NumPys:
    """NumPy's print options, and what they may be in a file."""

    edgeitems: int
    threshold: int
    floatmode: Literal["fixed", "unique", "maxprec", "maxprec_equal"]
    precision: int | None
    suppress: bool
    linewidth: int
    nanstr: str
    infstr: str
    sign: Literal["-", "+", " "]
    formatter: None  # functions
    legacy: Literal[False] | str

    @classmethod
    def now(cls) -> NumPys:
        """The options of this moment, without those that newer NumPys have besides."""
        options: dict[str, Any] = dict(np.get_printoptions())
        return cls(**{option.name: options[option.name] for option in fields(cls)})


@dataclass(frozen=True)
class Printer(HostCode):
    """The function of a tap that prints.

    Printers of equal lines are equal, so tracing a line again hits JAX's caches.

    Attributes:
        numbers: the leaves of the arguments that arrive as arrays, and are printed as
            Python's numbers: "(3,)", not "(array(3, dtype=int32),)".
    """

    travels_as = "print"
    travels_alone = True

    fmt: str
    file: Opaque | None = field(metadata=LOCAL_ONLY)
    flush: bool
    end: str
    options: NumPys
    numbers: tuple[int, ...] = ()

    @property
    def __name__(self) -> str:
        return f"hc.print({self.fmt!r})"

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.numbers:
            leaves, treedef = jax.tree.flatten((args, kwargs))
            for number in self.numbers:
                leaves[number] = _of_python(leaves[number])
            args, kwargs = treedef.unflatten(leaves)
        with np.printoptions(**vars(self.options)):
            text = self.line(args, kwargs)
        # None: what `sys.stdout` is now.
        file = None if self.file is None else self.file.value
        stream.write(text, file, flush=self.flush)

    def line(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The printed line. An exported program's printer formats in another way
        (_export/prints.py).
        """
        return formatted(self.fmt, args, kwargs) + self.end


def _of_python(array: np.ndarray) -> Any:
    """The Python number that was given, as far as its array can hold it: 0.1, not
    0.10000000149 for a float32.
    """
    if array.dtype.kind == "f":
        # NumPy's text has as many digits as the array's own dtype needs.
        return float(str(array[()]))
    return array.item()
