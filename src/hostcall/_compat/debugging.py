"""Drop-ins for `jax.debug.callback` and `jax.debug.print`."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import jax
import numpy as np

from hostcall import _jax
from hostcall._api.print_format import parsed
from hostcall._core import stream
from hostcall._core.host_code import HostCode
from hostcall._core.mistakes import refuse_coroutines
from hostcall._core.source import Place
from hostcall._core.spec import Opaque, Results, Template
from hostcall._engine.params.drop_in import (
    PRINT,
    DropInParams,
    arrays_of,
    make_params,
)
from hostcall._primitives.drop_in import bind

__all__ = ["callback", "print"]

Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]


def callback(
    callback: Callable[..., None] | None = None,
    *args: Any,
    ordered: bool = False,
    partitioned: bool = False,
    arrays: str = "jax",
    **kwargs: Any,
) -> Callable[..., None] | None:
    """`jax.debug.callback` on hostcall's engine.

    Called without a function, it takes the options and returns a function that takes
    `callback` and its arguments: `debug.callback(ordered=True)(f, x, ordered=x)`.

    Args:
        callback: a function that is called for its effects; its results are dropped.
        *args: pytrees. Arrays and numbers arrive as arrays, other leaves as they are.
        ordered: runs it after the ordered callback or print before it, across programs
            and their devices; only in programs on one device.
        partitioned: in a jitted program over several devices, each device calls for its
            own part of the values, which then are not gathered.
        arrays: "jax" or "numpy", as in `hc.pure_callback`.
        **kwargs: as `args`.

    Raises:
        TypeError: `callback` can't be called.
        jax.errors.JaxRuntimeError: when the program runs and `callback` fails. An eager
            call raises the callback's own exception.

    Under transformations: vmap: once for each row, in row order. grad and jvp: the
    primal values. remat: again, if the policy computes its arguments again. shard_map
    and pmap: once for each device.

    Cost: that of `hc.io_callback`.

    Source: JAX's guide "External callbacks".
    """
    options = {
        "ordered": ordered,
        "partitioned": partitioned,
        "arrays": arrays_of(arrays),
    }

    def call(callback: Callable[..., None], /, *args: object, **kwargs: object) -> None:
        if not callable(callback):
            raise TypeError(
                "first argument to jax.debug.callback must be callable, but got an"
                f" object of type {type(callback)}"
            )
        refuse_coroutines(callback)  # JAX would drop the coroutine without a word
        in_tree, operands, static = _jax.split_callback_args(args, kwargs)
        trees = template_of(in_tree, static), Results.flat(())
        params = make_params("debug", callback, trees, options)
        bind(*operands, params=params)

    return _now_or_later("debug_callback", call, callback, args, kwargs)


def print(
    fmt: str | None = None,
    *args: Any,
    ordered: bool = False,
    partitioned: bool = False,
    skip_format_check: bool = False,
    **kwargs: Any,
) -> Callable[..., None] | None:
    """`jax.debug.print` on hostcall's engine: writes `fmt.format(*args, **kwargs)`.

    Called without a format, it takes the options and returns a function that takes
    `fmt` and its arguments.

    Args:
        fmt: a format string with braces, or a text that the arguments follow.
        *args: pytrees, formatted as JAX's arrays are.
        ordered: as in `hostcall.debug.callback`.
        partitioned: as in `hostcall.debug.callback`.
        skip_format_check: does not check that `fmt` and the arguments fit.
        **kwargs: as `args`, by name.

    Raises:
        ValueError: arguments that `fmt` does not use.
        KeyError: `fmt` names an argument that is not there.
        IndexError: `fmt` has the number of one that is not there.

    NumPy's print options are those at the time when the program is traced.

    Under transformations: as `hostcall.debug.callback`.

    Cost: 1 us for the call, plus the formatting; JAX's takes 50.
    """
    options = {"ordered": ordered, "partitioned": partitioned}

    # `fmt` and the arguments are those of either call, so they are parameters.
    def call(fmt: str, /, *args: object, **kwargs: object) -> None:
        if not skip_format_check:
            _jax.print_checker.format(fmt, *args, **kwargs)
        in_tree, operands, static = _jax.split_callback_args(args, kwargs)
        params = print_params(
            fmt,
            in_tree,
            static,
            print_options=np.get_printoptions().items(),
            options=options,
        )
        bind(*operands, params=params)

    return _now_or_later("debug_print", call, fmt, args, kwargs)


def _now_or_later(
    name: str, call: Callable[..., None], first: object, args: Args, kwargs: Kwargs
) -> Callable[..., None] | None:
    """Makes the call; or returns it, in JAX's two-call form with the options first."""
    if first is not None:
        call(first, *args, **kwargs)
        return None
    if args or kwargs:
        raise TypeError(
            f"{name} received unexpected arguments in the two-call form:"
            f" {args=} {kwargs=}"
        )
    return call


def template_of(in_tree: _jax.TreeDef, static: Mapping[int, object]) -> Template:
    """How to rebuild (args, kwargs), in which the leaves of these numbers are static:
    the callback gets them as they are.
    """
    numbers = range(in_tree.num_leaves)
    marks = [Opaque(static[i]) if i in static else None for i in numbers]
    return Template(in_tree, tuple(marks))


def print_params(
    fmt: str,
    in_tree: _jax.TreeDef,
    static: Mapping[int, object],
    print_options: Iterable[tuple[str, Any]],
    options: Mapping[str, object],
    place: Place | None = None,
) -> DropInParams:
    """The parameters of an equation that prints `fmt` with arguments of this tree.

    `print_options` are NumPy's, `options` those of `jax.debug.print`.
    """
    has_fields = _has_fields(fmt)
    _, kwargs_tree = in_tree.children()
    _, names = kwargs_tree.node_data()
    if names and not has_fields:  # else they would be left out without a word
        raise ValueError(
            f"the format {fmt!r} has no fields for the keyword arguments {names} of"
            " jax.debug.print"
        )
    line = PrintLine(fmt, has_fields, tuple(print_options))
    # NumPy arrays are faster; JAX's are for what formats them in another way.
    is_plain = has_fields and _is_plain(fmt, in_tree)
    arrays = "numpy" if is_plain else "free"
    trees = template_of(in_tree, static), Results.flat(())
    return make_params("debug", line, trees, {**options, "arrays": arrays}, place)


@dataclass(frozen=True)
class PrintLine(HostCode):
    """One print statement. Equal lines compare equal, so that tracing a program again
    finds what was compiled.
    """

    fmt: str
    has_fields: bool
    options: tuple[tuple[str, Any], ...]

    @property
    def __name__(self) -> str:
        return f"debug.print({self.fmt!r})"

    def source(self) -> str:
        return PRINT

    def __call__(self, *args: object, **kwargs: object) -> None:
        if self.has_fields:
            bare_args = map(_bare, args)
            bare_kwargs = {name: _bare(value) for name, value in kwargs.items()}
            with self._numpys_options((*args, *kwargs.values())):
                text = self.fmt.format(*bare_args, **bare_kwargs)
        else:
            text = " ".join((self.fmt, *map(str, args)))
        stream.write(text + "\n")

    def _numpys_options(self, values: Args) -> AbstractContextManager[object]:
        """Sets NumPy's print options, unless all values are NumPy scalars, which no
        option changes: setting them takes three times as long as printing a line.
        """
        # NumPy's older ways of printing (legacy=) change scalars too.
        is_legacy = ("legacy", False) not in self.options
        if all(map(_is_scalar, values)) and not is_legacy:
            return nullcontext()
        return np.printoptions(**dict(self.options))


def _is_scalar(value: object) -> TypeGuard[np.ndarray]:
    return isinstance(value, np.ndarray) and value.ndim == 0


def _bare(value: object) -> object:
    """The value in the form in which a jax.Array formats itself."""
    return value[()] if _is_scalar(value) else value


def _has_fields(fmt: str) -> bool:
    """Whether any field is in `fmt`. Without one JAX prints it as it is.

    JAX looks at the first piece of text alone, and so prints a format that begins with
    an escaped brace (a line of JSON) without its values, or fails.
    """
    return any(field is not None for _, field, *_ in string.Formatter().parse(fmt))


def _is_plain(fmt: str, in_tree: _jax.TreeDef) -> bool:
    """Whether NumPy arrays would be formatted just as JAX's are.

    They are if all arguments are bare arrays, in fields without a conversion, an
    attribute or an index.
    """
    leaf = jax.tree.structure(0)
    args_tree, kwargs_tree = in_tree.children()
    if any(arg != leaf for arg in (*args_tree.children(), *kwargs_tree.children())):
        return False
    try:
        for field, spec, conversion in parsed(fmt):
            looks_inside = any(sign in field for sign in "{.[")
            if conversion is not None or looks_inside or "{" in spec:
                return False
    except ValueError:  # it can't be read; formatting it will say so
        return False
    return True
