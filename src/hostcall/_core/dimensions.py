"""Signatures of generalized ufuncs, as `result=`: "(m,n),(n)->(m)".

The grammar is NumPy's (NEP 20, which extends NEP 5):

    signature  = arguments "->" results
    arguments  = [ list { "," list } ]        each list is of one argument
    results    = list { "," list }
    list       = "(" [ dimension { "," dimension } ] ")"
    dimension  = (name | size) [ "?" ]

The last axes of an argument are its core dimensions, which make one item. A name has
one size in a call. The axes in front of the items broadcast. A dimension with "?" may
be missing, and is then missing wherever its name stands.

The story of a call of "(m,n),(n)->(m)" with arrays of shapes (5, 2, 3) and (3,):

  1. `_cores` says which dimensions are there: all, if none has a "?".
  2. `shapes` takes them off the right end of each shape, and gives names their sizes:
     m=2, n=3. What is left of the shapes, (5,) and (), broadcasts to (5,).
  3. The result has these axes and then its own dimensions: (5, 2).

Steps 1 and 2 are taken in each trace of a call, so they look dimensions up by text.
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
from hostcall._core.errors import SpecError, counted
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
Shape = tuple[Size, ...]
# The size of a dimension that stands in results only, or a function of other sizes.
ResultSize = int | Callable[..., int]


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

    @functools.cached_property
    def key(self) -> str:
        """By what its size is looked up: its name, or the digits of its fixed size.

        No name begins with a digit, so these are never equal.
        """
        return self.name if self.size is None else str(self.size)

    def __str__(self) -> str:
        return self.key + "?" * self.optional


Dimensions = tuple[Dimension, ...]
Keys = tuple[str, ...]


@dataclass(frozen=True)
class Cores:
    """The dimensions that are not missing in one call, by their keys.

    Attributes:
        arguments: those of each argument.
        results: those of each result.
    """

    arguments: tuple[Keys, ...]
    results: tuple[Keys, ...]


def shown(dimensions: Dimensions) -> str:
    return f"({','.join(map(str, dimensions))})"


# --- Reading --------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*(->|[(),?|]|[^\W\d]\w*|\d+)")
_FORM = "'(m,n),(n)->(m)': a list of dimensions for each argument, '->', and one for"
_FORM += " each result"
Lists = tuple[Dimensions, ...]


class _Reader:
    """Reads a signature from left to right: each method reads a rule of the grammar."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._position = 0
        # Of each name or size, whether it may be missing.
        self._optional: dict[str, bool] = {}

    def read(self) -> tuple[Lists, Lists]:
        arguments: list[Dimensions] = []
        if self._peek() != "->":
            arguments = self._lists()
        self._take("->", "',' or '->'")
        results = self._lists()
        if self._peek():
            self._fail("',' or the end")
        return tuple(arguments), tuple(results)

    def _lists(self) -> list[Dimensions]:
        lists = [self._list()]
        while self._peek() == ",":
            self._take(",", "','")
            lists.append(self._list())
        return lists

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
        self._take(word, "")  # it was seen, so that nothing else is expected
        optional = self._peek() == "?"
        # As in NumPy: a name that is missing in one place has no size in another.
        if self._optional.setdefault(word, optional) != optional:
            self._fail(
                "',' or ')'" if optional else "'?'",
                f" {word} has '?' in one place and none in another. Write it in all or"
                " in none",
            )
        if optional:
            self._take("?", "")
        # NEP 20 has "|1" too. NumPy alone can hand such an argument on as it is: here
        # it would have to be repeated, which the function around it does as well.
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
        token = _TOKEN.match(self._text, self._position)
        if token is None:
            return self._text[self._position :].strip()[:1]
        return token[1]

    def _take(self, wanted: str, expected: str) -> None:
        token = _TOKEN.match(self._text, self._position)
        if token is None or token[1] != wanted:
            self._fail(expected)
        self._position = token.end()

    def _fail(self, expected: str, advice: str = "") -> NoReturn:
        rest = self._text[self._position :]
        # Messages count columns from 1, and point behind blanks.
        blanks = len(rest) - len(rest.lstrip())
        column = self._position + blanks + 1
        got = repr(self._peek()) if rest.strip() else "the end"
        raise SpecError(
            f"hostcall: result={self._text!r} of `{self._name}` can't be read at column"
            f" {column}: expected {expected}, found"
            f" {got}.{advice or f' Write {_FORM}'}",
            code="hc-result-spec",
        )


@functools.lru_cache(maxsize=256)  # `hc.call` is given the text in each trace
def _parsed(text: str, name: str) -> tuple[Lists, Lists]:
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
    arguments: Lists
    results: Lists
    sizes: tuple[tuple[str, ResultSize], ...] = ()
    dtypes: tuple[np.dtype, ...] | None = None
    _takes_batches: bool = False  # type: ignore[misc]

    def __repr__(self) -> str:
        return repr(self.text)

    def _shown(self) -> str:
        return repr(self.text)

    def spec(self, avals: Trees, name: str) -> Any:
        spec, _ = self.bind(avals, name)
        return spec

    def bind(self, avals: Trees, name: str) -> tuple[Any, Shape]:
        """The spec of the results, and the axes in front of their items."""
        arrays = arrays_only(self, avals, name, len(self.arguments))
        loop, items = self._loop_and_items([array.shape for array in arrays], name)
        dtypes = self.dtypes or (promoted(arrays),) * len(items)
        # A signature with one result is not a tuple of one, as in `numpy.vectorize`.
        specs = tuple(
            [
                struct(loop + item, dtype)
                for item, dtype in zip(items, dtypes, strict=True)
            ]
        )
        return (specs if len(specs) > 1 else specs[0]), loop

    def _of_arrays(self) -> str:
        return f"a function with the signature {self.text!r}"

    def _core_axes(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(len, self._cores(axes).arguments))

    def _lines_up(self, axes: Sequence[int]) -> bool:
        # The function would take the axis of a batch for a dimension that is missing.
        return not self._missing(axes)

    # --- Which dimensions are there ---------------------------------------------------

    @functools.cached_property
    def _all(self) -> Cores:
        return self._without(frozenset())

    @functools.cached_property
    def _has_optional(self) -> bool:
        return any(dimension.optional for part in self.arguments for dimension in part)

    @functools.cached_property
    def _fixed_sizes(self) -> dict[str, int]:
        """The sizes of dimensions that have a number in place of a name."""
        return {
            dimension.key: dimension.size
            for part in (*self.arguments, *self.results)
            for dimension in part
            if dimension.size is not None
        }

    def _cores(self, axes: Sequence[int]) -> Cores:
        """The dimensions of a call with arguments of so many axes."""
        if not self._has_optional:  # as nearly always
            return self._all
        return self._without(self._missing(axes))

    def _without(self, missing: frozenset[str]) -> Cores:
        return Cores(
            arguments=tuple([_present(part, missing) for part in self.arguments]),
            results=tuple([_present(part, missing) for part in self.results]),
        )

    def _missing(self, axes: Sequence[int]) -> frozenset[str]:
        """The optional dimensions that arguments with so many axes leave out.

        As in NumPy, an argument with fewer axes than core dimensions leaves out as many
        of its optional ones as it lacks, the first ones first.
        """
        missing: set[str] = set()
        # `says_items` asks about no arguments at all.
        for count, dimensions in zip(axes, self.arguments, strict=False):
            lacking = len(dimensions) - count
            for dimension in dimensions:
                if dimension.optional and lacking > 0:
                    missing.add(dimension.key)
                    lacking -= 1
        return frozenset(missing)

    # --- Sizes of one call ------------------------------------------------------------

    def shapes(self, shapes: Sequence[Shape], name: str) -> list[Shape]:
        """The shapes of the results for arguments of these shapes."""
        loop, items = self._loop_and_items(shapes, name)
        return [loop + item for item in items]

    def _loop_and_items(
        self, shapes: Sequence[Shape], name: str
    ) -> tuple[Shape, list[Shape]]:
        """The axes in front of the items of all results, and the shape of each item."""
        cores = self._all
        if self._has_optional:
            cores = self._cores([len(shape) for shape in shapes])
        # A fixed size is bound before any argument is, by its digits: "3" is 3. One
        # comparison then finds both kinds of mistakes.
        sizes: dict[str, Size] = self._fixed_sizes.copy()
        loops: list[Shape] = []
        for keys, shape in zip(cores.arguments, shapes, strict=True):
            split = len(shape) - len(keys)
            if split < 0:
                self._refuse_axes(len(loops), shape, len(keys), name)
            for key, size in zip(keys, shape[split:], strict=True):
                if sizes.setdefault(key, size) != size:
                    self._refuse_size(len(loops), key, sizes[key], shapes, name)
            loops.append(shape[:split])
        loop = self._broadcast(loops, shapes, name) if any(loops) else ()
        if self.sizes:
            sizes = self._with_result_sizes(sizes, name)
        items = [tuple([sizes[key] for key in keys]) for keys in cores.results]
        return loop, items

    def _broadcast(
        self, loops: Sequence[Shape], shapes: Sequence[Shape], name: str
    ) -> Shape:
        """The axes in front of the items of the results."""
        try:
            return broadcast(loops)
        except ValueError:
            raise SpecError(
                f"hostcall: the arguments of `{name}` have the axes"
                f" {', '.join(map(str, loops))} in front of those of the signature"
                f" {self.text!r}, and these don't broadcast. The shapes are"
                f" {', '.join(map(str, shapes))}",
                code="hc-arguments",
            ) from None

    def _refuse_axes(
        self, number: int, shape: Shape, least: int, name: str
    ) -> NoReturn:
        raise SpecError(
            f"hostcall: argument {number} of `{name}` has the shape {shape},"
            f" and {shown(self.arguments[number])} in the signature {self.text!r} wants"
            f" at least {least} axes",
            code="hc-arguments",
        )

    def _refuse_size(
        self,
        number: int,
        key: str,
        known: Size,
        shapes: Sequence[Shape],
        name: str,
    ) -> NoReturn:
        """Refuses an argument whose dimension has another size than the one known."""
        shape = shapes[number]
        cores = self._cores([len(shape) for shape in shapes]).arguments
        core = shape[len(shape) - len(cores[number]) :]
        # An argument may have the dimension twice, as "(n,n)": the wrong one is meant.
        size = next(
            size
            for word, size in zip(cores[number], core, strict=True)
            if word == key and size != known
        )
        if key in self._fixed_sizes:
            raise SpecError(
                f"hostcall: argument {number} of `{name}` has {size} where the"
                f" signature {self.text!r} has {known}: its shape is {shape}",
                code="hc-arguments",
            )
        first = next(n for n, keys in enumerate(cores) if key in keys)
        raise SpecError(
            f"hostcall: argument {number} of `{name}` has {key}={size}, and argument"
            f" {first} has {key}={known}. The signature is {self.text!r}, and the"
            f" shapes are {', '.join(map(str, shapes))}",
            code="hc-arguments",
        )

    def _with_result_sizes(
        self, sizes: Mapping[str, Size], name: str
    ) -> dict[str, Size]:
        """All sizes, with those of names that stand in results only."""
        # What the arguments gave, for functions of the user's. Digits are no names.
        known = {key: size for key, size in sizes.items() if not key.isdigit()}
        computed: dict[str, Size] = {}
        for dimension, size in self.sizes:
            if isinstance(size, int):
                computed[dimension] = size
            else:
                computed[dimension] = _computed(dimension, size, known, name)
        return {**sizes, **computed}

    def with_sizes(self, avals: Trees, draw: Callable[[], int]) -> Trees:
        """Other arguments that fit, with drawn sizes of the names.

        The axes in front of the items stay as they are in `avals`.
        """
        axes = [len(aval.shape) for aval in avals if is_aval(aval)]
        cores = self._cores(axes)
        sizes: dict[str, int] = self._fixed_sizes.copy()
        for keys in cores.arguments:
            for key in keys:
                if key not in sizes:
                    sizes[key] = int(draw())
        remaining_keys = iter(cores.arguments)
        drawn: list[Any] = []
        for aval in avals:
            if not is_aval(aval):  # a static argument, which no list stands for
                drawn.append(aval)
                continue
            keys = next(remaining_keys)
            loop = aval.shape[: len(aval.shape) - len(keys)]
            item = tuple([sizes[key] for key in keys])
            drawn.append(struct(loop + item, aval.dtype, aval.weak_type))
        return tuple(drawn)


def _present(dimensions: Dimensions, missing: frozenset[str]) -> Keys:
    """The keys of the dimensions that are not missing."""
    return tuple(
        [
            dimension.key
            for dimension in dimensions
            if not (dimension.optional and dimension.key in missing)
        ]
    )


def _computed(
    dimension: str,
    function: Callable[..., int],
    known: Mapping[str, Size],
    name: str,
) -> Size:
    """The size that a user's function gives to a dimension of a result."""
    wanted = inspect.signature(function).parameters
    size = function(**{key: known[key] for key in wanted if key in known})
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
    annotated = list(parameters.parameters.values())
    if len(annotated) == len(rule.arguments):
        annotated = [
            # An annotation of the user's stays.
            parameter.replace(annotation=shown(dimensions))
            if parameter.annotation is parameter.empty
            else parameter
            for parameter, dimensions in zip(annotated, rule.arguments, strict=True)
        ]
    returned = parameters.return_annotation
    if returned is parameters.empty:
        returned = ",".join(map(shown, rule.results))
    return parameters.replace(parameters=annotated, return_annotation=returned)


# --- What stands beside the text ------------------------------------------------------


def read_signature(
    text: str,
    name: str,
    sizes: Mapping[str, ResultSize] | None = None,
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
    known = _names(arguments)
    checked_sizes = _check_sizes(
        text=text,
        name=name,
        sizes={} if sizes is None else sizes,
        known=known,
        wanted=_names(results) - known,
    )
    if dtypes is not None and len(dtypes) == 1:
        dtypes = dtypes * len(results)
    if dtypes is not None and len(dtypes) != len(results):
        raise SpecError(
            f"hostcall: dtype= of `{name}` has {len(dtypes)} dtypes, and the signature"
            f" {text!r} has {counted(len(results), 'result')}. Give one for each, or"
            " one for all",
            code="hc-result-spec",
        )
    return Signature(
        text=text,
        arguments=arguments,
        results=results,
        sizes=checked_sizes,
        dtypes=dtypes,
        _takes_batches=takes_batches,
    )


def _names(lists: Lists) -> set[str]:
    dimensions = [dimension for part in lists for dimension in part]
    return {dimension.name for dimension in dimensions if dimension.size is None}


def _check_sizes(
    text: str, name: str, sizes: Any, known: set[str], wanted: set[str]
) -> tuple[tuple[str, ResultSize], ...]:
    """`sizes=` as it was given, if it has all that the signature wants, and no more.

    `known` are the names that arguments have, `wanted` those of results alone.
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
    for dimension, size in sizes.items():
        _check_size(text, name, dimension, size, known)
    return tuple(sizes.items())


def _check_size(
    text: str, name: str, dimension: str, size: object, known: set[str]
) -> None:
    # Tracers are integers to nobody, and would be refused in words about integers.
    if isinstance(size, jax.core.Tracer):
        raise SpecError(
            f"hostcall: sizes={{{dimension!r}: ...}} of `{name}` is a traced value,"
            " which has no number when the program is traced. Take it from a shape"
            " (x.shape[0]), or make it a static argument of jit",
            code="hc-traced",
        )
    if callable(size):
        _check_parameters(text, name, dimension, size, known)
    elif type(size) is not int or size < 0:
        raise SpecError(
            f"hostcall: sizes={{{dimension!r}: {size!r}}} of `{name}`: a size is"
            " an integer of at least 0, or a function of other dimensions",
            code="hc-result-spec",
        )


def _check_parameters(
    text: str,
    name: str,
    dimension: str,
    function: Callable[..., int],
    known: set[str],
) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in known or parameter.default is not parameter.empty:
            continue
        raise SpecError(
            f"hostcall: sizes={{{dimension!r}: ...}} of `{name}` is a function of"
            f" {parameter.name!r}, which is no dimension of an argument in {text!r}."
            " Its parameters have the names of dimensions",
            code="hc-result-spec",
        )
