"""Signatures of generalized ufuncs, as `result=`: "(m,n),(n)->(m)".

The grammar is NumPy's (NEP 20, which extends NEP 5):

    signature  = arguments "->" results
    arguments  = [ list { "," list } ]        each list is of one argument
    results    = list { "," list }
    list       = "(" [ dimension { "," dimension } ] ")"
    dimension  = (name | size) [ "?" ]

The last axes of an argument are its core dimensions. A name has one size in a call.
The axes in front of them broadcast. A dimension with "?" may be missing, and is then
missing wherever its name stands.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.errors import SpecError
from hostcall._core.host_code import OfArguments
from hostcall._core.result_rules import (
    Trees,
    arrays_only,
    broadcast,
    is_aval,
    promoted,
    struct,
)
from hostcall._core.signatures import positional

Size = Any  # an int, or a symbolic size of an exported program
# The size of a dimension that stands in results only, or a function of other sizes.
Given = int | Callable[..., int]


@dataclass(frozen=True)
class Dimension:
    """One dimension of a list.

    Attributes:
        name: "" if it has a fixed size.
        size: the fixed size; None if it has a name.
        optional: whether it may be missing.
    """

    name: str
    size: int | None
    optional: bool

    def __str__(self) -> str:
        word = self.name if self.size is None else str(self.size)
        return word + "?" * self.optional


Dimensions = tuple[Dimension, ...]
_NONE = frozenset[str]()


def shown(dimensions: Dimensions) -> str:
    return f"({','.join(map(str, dimensions))})"


# --- Reading --------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*(->|[(),?|]|[^\W\d]\w*|\d+)")
_FORM = "'(m,n),(n)->(m)': a list of dimensions for each argument, '->', and one for"
_FORM += " each result"


class _Reader:
    """Reads a signature from left to right."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._at = 0

    def read(self) -> tuple[tuple[Dimensions, ...], tuple[Dimensions, ...]]:
        arguments: list[Dimensions] = []
        if self._peek() != "->":
            arguments = self._lists()
        self._take("->", "',' or '->'")
        results = self._lists()
        if self._peek():
            self._fail("',' or the end")
        return tuple(arguments), tuple(results)

    def _lists(self) -> list[Dimensions]:
        found = [self._list()]
        while self._peek() == ",":
            self._take(",", "','")
            found.append(self._list())
        return found

    def _list(self) -> Dimensions:
        self._take("(", "'('")
        dimensions: list[Dimension] = []
        if self._peek() != ")":
            dimensions.append(self._dimension())
            while self._peek() == ",":
                self._take(",", "','")
                dimensions.append(self._dimension())
        self._take(")", "',' or ')'")
        return tuple(dimensions)

    def _dimension(self) -> Dimension:
        word = self._peek()
        if not re.fullmatch(r"\w+", word):
            self._fail("a dimension's name or size")
        self._take(word, "")
        optional = self._peek() == "?"
        if optional:
            self._take("?", "")
        if self._peek() == "|":
            self._fail(
                "',' or ')'",
                " A dimension that broadcasts, as in (n|1), is read by NumPy alone:"
                " broadcast that argument yourself, in a function around this one",
            )
        if word.isdigit():
            return Dimension("", int(word), optional)
        return Dimension(word, None, optional)

    def _peek(self) -> str:
        """The next token; "" at the end; the next character if that starts none."""
        found = _TOKEN.match(self._text, self._at)
        return found[1] if found else self._text[self._at :].strip()[:1]

    def _take(self, token: str, expected: str) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found is None or found[1] != token:
            self._fail(expected)
        self._at = found.end()

    def _fail(self, expected: str, advice: str = "") -> NoReturn:
        rest = self._text[self._at :]
        column = self._at + len(rest) - len(rest.lstrip()) + 1
        got = repr(self._peek()) if rest.strip() else "the end"
        raise SpecError(
            f"hostcall: result={self._text!r} of `{self._name}` can't be read at column"
            f" {column}: expected {expected}, found"
            f" {got}.{advice or f' Write {_FORM}'}",
            code="hc-result-spec",
        )


@functools.lru_cache(maxsize=256)  # `hc.call` is given the text in each trace
def _parsed(
    text: str, name: str
) -> tuple[tuple[Dimensions, ...], tuple[Dimensions, ...]]:
    return _Reader(text, name).read()


# --- A signature as result= -----------------------------------------------------------


@dataclass(frozen=True)
class Signature(OfArguments):
    """`result="(m,n),(n)->(m)"`: what the function takes and returns for one item.

    Attributes:
        text: the signature as the user wrote it.
        arguments: the core dimensions of each argument.
        results: the core dimensions of each result.
        sizes: of dimensions that stand in results only.
        dtypes: of the results; None for that to which JAX promotes the arguments'.
        _takes_batches: whether the function itself takes axes in front of its items.
    """

    text: str
    arguments: tuple[Dimensions, ...]
    results: tuple[Dimensions, ...]
    sizes: tuple[tuple[str, Given], ...] = ()
    dtypes: tuple[np.dtype, ...] | None = None
    _takes_batches: bool = False  # type: ignore[misc]

    def __repr__(self) -> str:
        return repr(self.text)

    def _shown(self) -> str:
        return repr(self.text)

    def spec(self, avals: Trees, name: str) -> Any:
        arrays = arrays_only(self, avals, name, len(self.arguments))
        shapes = self.shapes([array.shape for array in arrays], name)
        dtypes = self.dtypes or (promoted(arrays),) * len(shapes)
        specs = tuple(map(struct, shapes, dtypes))
        return specs if len(specs) > 1 else specs[0]

    def _of_arrays(self) -> str:
        return f"a function with the signature {self.text!r}"

    def _core_axes(self, axes: Sequence[int]) -> tuple[int, ...]:
        missing = self._missing(axes)
        return tuple([len(_present(part, missing)) for part in self.arguments])

    def _lines_up(self, axes: Sequence[int]) -> bool:
        # The function would take the axis of a batch for a dimension that is missing.
        return not self._missing(axes)

    def shapes(
        self, shapes: Sequence[tuple[Size, ...]], name: str
    ) -> list[tuple[Size, ...]]:
        """The shapes of the results for arguments of these shapes."""
        missing = self._missing([len(shape) for shape in shapes])
        bound = self._bind(shapes, missing, name)
        loops = [
            shape[: len(shape) - len(_present(part, missing))]
            for shape, part in zip(shapes, self.arguments, strict=True)
        ]
        try:
            loop = broadcast(loops)
        except ValueError:
            raise SpecError(
                f"hostcall: the arguments of `{name}` have the axes"
                f" {', '.join(map(str, loops))} in front of those of the signature"
                f" {self.text!r}, and these don't broadcast. The shapes are"
                f" {', '.join(map(str, shapes))}",
                code="hc-arguments",
            ) from None
        self._add_given(bound, name)
        return [
            loop + tuple([_size(one, bound) for one in _present(part, missing)])
            for part in self.results
        ]

    def with_sizes(self, avals: Trees, draw: Callable[[], int]) -> Trees:
        """Other arguments that fit, with drawn sizes of the names.

        The axes in front of the items stay as they are in `avals`.
        """
        arrays = [aval for aval in avals if is_aval(aval)]
        missing = self._missing([len(array.shape) for array in arrays])
        names = dict.fromkeys(
            one.name for part in self.arguments for one in part if one.size is None
        )
        drawn = {name: int(draw()) for name in names}
        parts = iter(self.arguments)
        found: list[Any] = []
        for aval in avals:
            if not is_aval(aval):
                found.append(aval)
                continue
            present = _present(next(parts), missing)
            loop = aval.shape[: len(aval.shape) - len(present)]
            item = tuple([_size(one, drawn) for one in present])
            found.append(struct(loop + item, aval.dtype, aval.weak_type))
        return tuple(found)

    @functools.cached_property
    def _has_optional(self) -> bool:
        return any(one.optional for part in self.arguments for one in part)

    def _missing(self, axes: Sequence[int]) -> frozenset[str]:
        """The optional dimensions that arguments with so many axes leave out.

        As in NumPy, an argument with fewer axes than core dimensions leaves out as many
        of its optional ones as it lacks, the first ones first.
        """
        if not self._has_optional:
            return _NONE
        missing: set[str] = set()
        for number, part in zip(axes, self.arguments, strict=False):
            lacking = len(part) - number
            for one in part:
                if one.optional and lacking > 0:
                    missing.add(str(one))
                    lacking -= 1
        return frozenset(missing)

    def _bind(
        self,
        shapes: Sequence[tuple[Size, ...]],
        missing: frozenset[str],
        name: str,
    ) -> dict[str, Size]:
        """The size of each name, with the argument that has it first in messages."""
        bound: dict[str, Size] = {}
        for number, shape in enumerate(shapes):
            part = self.arguments[number]
            present = _present(part, missing)
            if len(shape) < len(present):
                raise SpecError(
                    f"hostcall: argument {number} of `{name}` has the shape {shape},"
                    f" and {shown(part)} in the signature {self.text!r} wants at least"
                    f" {len(present)} axes",
                    code="hc-arguments",
                )
            core = shape[len(shape) - len(present) :]
            for one, size in zip(present, core, strict=True):
                if one.size is not None and one.size != size:
                    raise SpecError(
                        f"hostcall: argument {number} of `{name}` has {size} where the"
                        f" signature {self.text!r} has {one.size}: its shape is"
                        f" {shape}",
                        code="hc-arguments",
                    )
                if one.size is not None:
                    continue
                if bound.setdefault(one.name, size) != size:
                    first = self._first(one.name, missing)
                    raise SpecError(
                        f"hostcall: argument {number} of `{name}` has"
                        f" {one.name}={size}, and argument {first} has"
                        f" {one.name}={bound[one.name]}. The signature is"
                        f" {self.text!r}, and the shapes are"
                        f" {', '.join(map(str, shapes))}",
                        code="hc-arguments",
                    )
        return bound

    def _first(self, name: str, missing: frozenset[str]) -> int:
        """The first argument that has a dimension of this name."""
        having = [
            number
            for number, part in enumerate(self.arguments)
            if any(one.name == name for one in _present(part, missing))
        ]
        return having[0]

    def _add_given(self, bound: dict[str, Size], name: str) -> None:
        """Adds the sizes of names that stand in results only."""
        known = dict(bound)
        for dimension, given in self.sizes:
            bound[dimension] = given if isinstance(given, int) else None
            if not isinstance(given, int):
                bound[dimension] = self._computed(dimension, given, known, name)

    def _computed(
        self,
        dimension: str,
        given: Callable[..., int],
        known: dict[str, Size],
        name: str,
    ) -> Size:
        wanted = inspect.signature(given).parameters
        size = given(**{each: known[each] for each in wanted if each in known})
        if _jax.is_symbolic(size):
            return size
        if (
            isinstance(size, (int, np.integer))
            and not isinstance(size, bool)
            and size >= 0
        ):
            return int(size)
        raise SpecError(
            f"hostcall: sizes={{{dimension!r}: ...}} of `{name}` gave {size!r} for"
            f" {known}. A size is an integer of at least 0",
            code="hc-result-spec",
        )


def with_dimensions(
    parameters: inspect.Signature | None, rule: Signature
) -> inspect.Signature:
    """A function's parameters, annotated by the dimensions of arguments and results, as
    `help` shows them.

    `parameters` is None for a function that does not tell them. If the function has
    others beside its arrays, it is not known which those are.
    """
    if parameters is None:
        parameters = positional(len(rule.arguments))
    found = list(parameters.parameters.values())
    if len(found) == len(rule.arguments):
        found = [
            each.replace(annotation=shown(part))
            if each.annotation is each.empty
            else each
            for each, part in zip(found, rule.arguments, strict=True)
        ]
    returned = parameters.return_annotation
    if returned is parameters.empty:
        returned = ",".join(map(shown, rule.results))
    return parameters.replace(parameters=found, return_annotation=returned)


def _present(part: Dimensions, missing: frozenset[str]) -> Dimensions:
    if not missing:
        return part
    return tuple([one for one in part if str(one) not in missing])


def _size(dimension: Dimension, bound: Mapping[str, Size]) -> Size:
    return bound[dimension.name] if dimension.size is None else dimension.size


def read_signature(
    text: str,
    name: str,
    sizes: Mapping[str, Given] | None = None,
    dtypes: tuple[np.dtype, ...] | None = None,
    takes_batches: bool = False,
) -> Signature:
    """Reads a signature.

    Args:
        text: the signature.
        name: of the function, for messages.
        sizes: of dimensions that stand in results only: an integer, or a function whose
            parameters have names of dimensions.
        dtypes: one for each result, or one for all of them.
        takes_batches: whether the function takes axes in front of its items.

    Raises:
        SpecError: the text is no signature, or a size or dtype is missing or wrong.
    """
    arguments, results = _parsed(text, name)
    known = {one.name for part in arguments for one in part if one.name}
    wanted = {one.name for part in results for one in part if one.name} - known
    given = _check_sizes(text, name, {} if sizes is None else sizes, known, wanted)
    if dtypes is not None and len(dtypes) == 1:
        dtypes = dtypes * len(results)
    if dtypes is not None and len(dtypes) != len(results):
        raise SpecError(
            f"hostcall: dtype= of `{name}` has {len(dtypes)} dtypes, and the signature"
            f" {text!r} has {len(results)} results. Give one for each, or one for all",
            code="hc-result-spec",
        )
    return Signature(text, arguments, results, given, dtypes, takes_batches)


def _check_sizes(
    text: str, name: str, sizes: Any, known: set[str], wanted: set[str]
) -> tuple[tuple[str, Given], ...]:
    if not isinstance(sizes, Mapping):
        raise SpecError(
            f"hostcall: sizes= of `{name}` is {sizes!r}. Give a dict from dimensions to"
            " sizes: sizes={'k': 3}",
            code="hc-result-spec",
        )
    for dimension in sizes:
        if dimension not in wanted:
            why = (
                "the arguments have its size"
                if dimension in known
                else "it has no such"
            )
            raise SpecError(
                f"hostcall: sizes= of `{name}` has {dimension!r}, and in the signature"
                f" {text!r} {why}"
                + ("" if dimension in known else " dimension")
                + ". Leave it out",
                code="hc-result-spec",
            )
    if lacking := sorted(wanted - set(sizes)):
        example = ", ".join(f"{each!r}: ..." for each in lacking)
        raise SpecError(
            f"hostcall: the signature {text!r} of `{name}` has {', '.join(lacking)} in"
            " a result and in no argument. Say its size:"
            f" sizes={{{example}}}, an integer or a function of other dimensions"
            " (lambda n: ...)",
            code="hc-result-spec",
        )
    for dimension, given in sizes.items():
        _check_size(text, name, dimension, given, known)
    return tuple(sizes.items())


def _check_size(
    text: str, name: str, dimension: str, given: object, known: set[str]
) -> None:
    if isinstance(given, jax.core.Tracer):
        raise SpecError(
            f"hostcall: sizes={{{dimension!r}: ...}} of `{name}` is a traced value,"
            " which has no number when the program is traced. Take it from a shape"
            " (x.shape[0]), or make it a static argument of jit",
            code="hc-traced",
        )
    if callable(given):
        _check_parameters(text, name, dimension, given, known)
    elif type(given) is not int or given < 0:
        raise SpecError(
            f"hostcall: sizes={{{dimension!r}: {given!r}}} of `{name}`: a size is"
            " an integer of at least 0, or a function of other dimensions",
            code="hc-result-spec",
        )


def _check_parameters(
    text: str, name: str, dimension: str, given: Callable[..., int], known: set[str]
) -> None:
    parameters = inspect.signature(given).parameters.values()
    for one in parameters:
        if one.name not in known and one.default is one.empty:
            raise SpecError(
                f"hostcall: sizes={{{dimension!r}: ...}} of `{name}` is a function of"
                f" {one.name!r}, which is no dimension of an argument in {text!r}. Its"
                " parameters have the names of dimensions",
                code="hc-result-spec",
            )
