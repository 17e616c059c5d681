"""`sizes=` of a signature: the sizes of dimensions that stand in results only.

A size is an integer, or a function of the sizes of other dimensions: for "(n)->(k)" one
writes sizes={"k": 3}, or sizes={"k": lambda n: 2 * n}. `checked_sizes` refuses what
can't be right when the signature is made; `with_result_sizes` computes the sizes of
each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.errors import SpecError

Size = Any  # an int, or a symbolic size of an exported program
# The size of a dimension that stands in results only, or a function of other sizes.
ResultSize: TypeAlias = int | Callable[..., int]
# `sizes=` as a signature keeps it, which has a hash.
ResultSizes: TypeAlias = tuple[tuple[str, ResultSize], ...]


# --- When the signature is made -------------------------------------------------------


def checked_sizes(
    text: str, name: str, sizes: object, known: set[str], wanted: set[str]
) -> ResultSizes:
    """`sizes=` as it was given, if it has all that the signature wants, and no more.

    Args:
        text: the signature.
        name: of the function.
        sizes: as the user gave it.
        known: the names that arguments have.
        wanted: those that results alone have.
    """
    if not isinstance(sizes, Mapping):
        raise SpecError(
            f"hostcall: sizes= of `{name}` is {sizes!r}. Give a dict from dimensions to"
            " sizes: sizes={'k': 3}",
            code="hc-result-spec",
        )
    for dimension in sizes:
        if dimension in wanted:
            continue
        why = "it has no such dimension"
        if dimension in known:
            why = "the arguments have its size"
        raise SpecError(
            f"hostcall: sizes= of `{name}` has {dimension!r}, and in the signature"
            f" {text!r} {why}. Leave it out",
            code="hc-result-spec",
        )
    lacking = sorted(wanted - set(sizes))
    if lacking:
        example = ", ".join([f"{dimension!r}: ..." for dimension in lacking])
        raise SpecError(
            f"hostcall: the signature {text!r} of `{name}` has {', '.join(lacking)} in"
            " a result and in no argument. Say its size:"
            f" sizes={{{example}}}, an integer or a function of other dimensions"
            " (lambda n: ...)",
            code="hc-result-spec",
        )
    check = _SizeCheck(text, name, known)
    for dimension, size in sizes.items():
        check.size(dimension, size)
    return tuple(sizes.items())


@dataclass(frozen=True)
class _SizeCheck:
    """Refuses what can't be a size.

    Attributes:
        text: the signature.
        name: of the function.
        known: the names that arguments have.
    """

    text: str
    name: str
    known: set[str]

    def size(self, dimension: str, size: object) -> None:
        # Tracers are integers to nobody, and would be refused in words about integers.
        if isinstance(size, jax.core.Tracer):
            raise SpecError(
                f"hostcall: sizes={{{dimension!r}: ...}} of `{self.name}` is a traced"
                " value, which has no number when the program is traced. Take it from a"
                " shape (x.shape[0]), or make it a static argument of jit",
                code="hc-traced",
            )
        if callable(size):
            self._parameters(dimension, size)
        elif type(size) is not int or size < 0:
            raise SpecError(
                f"hostcall: sizes={{{dimension!r}: {size!r}}} of `{self.name}`: a size"
                " is an integer of at least 0, or a function of other dimensions",
                code="hc-result-spec",
            )

    def _parameters(self, dimension: str, function: Callable[..., int]) -> None:
        for parameter in inspect.signature(function).parameters.values():
            has_default = parameter.default is not parameter.empty
            if parameter.name in self.known or has_default:
                continue
            raise SpecError(
                f"hostcall: sizes={{{dimension!r}: ...}} of `{self.name}` is a function"
                f" of {parameter.name!r}, which is no dimension of an argument in"
                f" {self.text!r}. Its parameters have the names of dimensions",
                code="hc-result-spec",
            )


# --- In each call ---------------------------------------------------------------------


def with_result_sizes(
    sizes: Mapping[str, Size], result_sizes: ResultSizes, name: str
) -> dict[str, Size]:
    """The sizes that the arguments gave, and those of `sizes=`.

    `name` is the function's, for messages.
    """
    # Fixed sizes are among them by their digits, which are no names.
    known = {key: size for key, size in sizes.items() if not key.isdigit()}
    complete = dict(sizes)
    for dimension, size in result_sizes:
        if not isinstance(size, int):
            size = _computed(dimension, size, known, name)
        complete[dimension] = size
    return complete


def _computed(
    dimension: str,
    function: Callable[..., int],
    known: Mapping[str, Size],
    name: str,
) -> Size:
    """The size that a user's function gives to a dimension of a result."""
    parameters = inspect.signature(function).parameters
    arguments = {key: known[key] for key in parameters if key in known}
    size = function(**arguments)
    if _jax.is_symbolic(size):
        return size
    # A bool is an int to Python, and is surely a mistake here.
    is_integer = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    if is_integer and size >= 0:
        return int(size)
    raise SpecError(
        f"hostcall: sizes={{{dimension!r}: ...}} of `{name}` gave {size!r} for"
        f" {known}. A size is an integer of at least 0",
        code="hc-result-spec",
    )
