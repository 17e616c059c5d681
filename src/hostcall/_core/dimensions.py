"""Signatures of generalized ufuncs, as `result=`: "(m,n),(n)->(m)".

The last axes of an argument are its core dimensions, which make one item. A name has
one size in a call. The axes in front of the items broadcast. A dimension with "?" may
be missing, and is then missing wherever its name stands. (`signature_text` has the
grammar, and `signature_sizes` the sizes of dimensions that only results have.)

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
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np

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
from hostcall._core.signature_sizes import (
    ResultSize,
    ResultSizes,
    Size,
    checked_sizes,
    with_result_sizes,
)
from hostcall._core.signature_text import Dimensions, Lists, parsed, shown
from hostcall._core.signatures import positional

Shape: TypeAlias = tuple[Size, ...]
Keys: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Cores:
    """The dimensions that are not missing in one call, by their keys.

    Attributes:
        arguments: those of each argument.
        results: those of each result.
    """

    arguments: tuple[Keys, ...]
    results: tuple[Keys, ...]


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
    arguments, results = parsed(text, name)
    known = _names(arguments)
    result_sizes = checked_sizes(
        text=text,
        name=name,
        sizes={} if sizes is None else sizes,
        known=known,
        wanted=_names(results) - known,
    )
    if dtypes is not None:
        dtypes = one_for_each(dtypes, len(results), name, f"the signature {text!r}")
    return Signature(
        text=text,
        arguments=arguments,
        results=results,
        sizes=result_sizes,
        dtypes=dtypes,
        _takes_batches=takes_batches,
    )


def one_for_each(
    dtypes: tuple[np.dtype, ...], count: int, name: str, owner: str
) -> tuple[np.dtype, ...]:
    """`dtype=` as one dtype for each of so many results, which `owner` has."""
    if len(dtypes) == 1:
        return dtypes * count
    if len(dtypes) == count:
        return dtypes
    raise SpecError(
        f"hostcall: dtype= of `{name}` has {len(dtypes)} dtypes, and {owner} has"
        f" {counted(count, 'result')}. Give one for each, or one for all",
        code="hc-result-spec",
    )


def _all_in(lists: Lists) -> Dimensions:
    """The dimensions of all lists, one after the other."""
    return tuple(itertools.chain.from_iterable(lists))


def _names(lists: Lists) -> set[str]:
    return {dimension.name for dimension in _all_in(lists) if dimension.size is None}


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
    sizes: ResultSizes = ()
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
        dtypes = self.dtypes
        if dtypes is None:
            dtypes = (promoted(arrays),) * len(items)
        specs: list[Any] = []
        for item, dtype in zip(items, dtypes, strict=True):
            specs.append(struct(loop + item, dtype))
        # A signature with one result is not a tuple of one, as in `numpy.vectorize`.
        if len(specs) == 1:
            return specs[0], loop
        return tuple(specs), loop

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
        return any(dimension.optional for dimension in _all_in(self.arguments))

    @functools.cached_property
    def _fixed_sizes(self) -> dict[str, int]:
        """The sizes of dimensions that have a number in place of a name."""
        fixed_sizes: dict[str, int] = {}
        for dimension in _all_in((*self.arguments, *self.results)):
            if dimension.size is not None:
                fixed_sizes[dimension.key] = dimension.size
        return fixed_sizes

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
            sizes = with_result_sizes(sizes, self.sizes, name)
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
        size = known
        for key_here, size_here in zip(cores[number], core, strict=True):
            if key_here == key and size_here != known:
                size = size_here
                break
        assert size != known, "it was refused for a size that differs"
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
    keys: list[str] = []
    for dimension in dimensions:
        is_missing = dimension.optional and dimension.key in missing
        if not is_missing:
            keys.append(dimension.key)
    return tuple(keys)


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
        for number, parameter in enumerate(annotated):
            # An annotation of the user's stays.
            if parameter.annotation is parameter.empty:
                dimensions = shown(rule.arguments[number])
                annotated[number] = parameter.replace(annotation=dimensions)
    returned = parameters.return_annotation
    if returned is parameters.empty:
        returned = ",".join(map(shown, rule.results))
    return parameters.replace(parameters=annotated, return_annotation=returned)
