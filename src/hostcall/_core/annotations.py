"""Results that a function's annotations declare, in the words of jaxtyping.

    def f(x: Float[np.ndarray, "batch n"], w: Float[np.ndarray, "n"]) -> Float[
        np.ndarray, "batch"
    ]: ...

The story of a call:

  1. Each argument is compared with its annotation. A name gets the size that the first
     argument has there, and every later one must have the same.
  2. The annotation of the result is read with these sizes: names are looked up, and
     expressions are computed.
  3. The dtype is the one that the annotation allows. If it allows several (`Float`), it
     is the one to which JAX promotes the arguments.

Annotations are read once for each function (`function_hints`; `array_hints` has the
words of one), and a call only binds sizes (`argument_hints`, `hint_sizes`). jaxtyping
is looked for only among the modules that are imported: without it nobody has such an
annotation.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.argument_hints import Comparison, no_meaning, resized
from hostcall._core.array_hints import ArrayHint, Hint, OneOf, TreeHint, shown
from hostcall._core.errors import SpecError
from hostcall._core.function_hints import Parameters, parameters_of, python_function
from hostcall._core.hint_sizes import Sizes
from hostcall._core.host_code import OfArguments
from hostcall._core.result_rules import (
    Tree,
    Trees,
    at_precision,
    floating,
    is_aval,
    promoted,
    struct,
)

tree = jax.tree_util


class Argument(NamedTuple):
    """One argument of a call.

    Attributes:
        parameter: the name of its parameter.
        value: an aval, a tree of such, or a static object.
        words: what messages call it.
    """

    parameter: str
    value: Tree
    words: str


@dataclass(frozen=True)
class Unreadable(OfArguments):
    """Annotations that say something of arrays, and not what the function returns.

    It is an error only where that is asked for: `hc.call` may be given a result.

    Attributes:
        error: what is wrong with them.
    """

    error: SpecError

    def _shown(self) -> str:
        return ""

    def spec(self, avals: Trees, name: str) -> Tree:
        raise self.error


@dataclass(frozen=True)
class OfAnnotations(OfArguments):
    """The results that a function's annotations declare.

    Attributes:
        fn: the function as the user gave it.
        float64: whether floating arguments reach it as float64.
        preset: arguments that it has already, by name: of a partial, and a method's
            object.
        free: the names of the parameters that a call gives by position.
        parameters: of the Python function inside.
    """

    fn: Callable[..., Any]
    float64: bool
    preset: Mapping[str, Any] = field(compare=False)
    free: tuple[str, ...] = field(compare=False)
    parameters: Parameters = field(compare=False)

    def __repr__(self) -> str:
        return f"-> {shown(self.parameters.annotation)}"

    def _shown(self) -> str:
        return repr(self)

    def __reduce__(self) -> tuple[object, ...]:
        # Annotations may name classes that can't be pickled.
        return _read_again, (self.fn, self.float64)

    def spec(self, avals: Trees, name: str) -> Tree:
        returned = self.parameters.returned
        assert returned is not None, "`of_annotations` makes no other"
        result = _Result(
            sizes=self.bound(avals, name),
            avals=[leaf for leaf in tree.tree_leaves(avals) if is_aval(leaf)],
            name=name,
            float64=self.float64,
        )
        return result.spec_of(returned, "the result")

    def bound(self, avals: Trees, name: str) -> Sizes:
        """The sizes that these arguments give to names.

        Raises:
            SpecError: an argument is not what its annotation says.
        """
        arguments = self._arguments(avals, name)
        hints = self.parameters.hints
        by_name: dict[str, Tree] = {}
        without_hint: list[Tree] = []
        for argument in arguments:
            by_name[argument.parameter] = argument.value
            if argument.parameter not in hints:
                without_hint.append(argument.value)
        sizes = Sizes(by_name, without_hint)
        comparison = Comparison(sizes, name, self.float64)
        for argument in arguments:
            hint = hints.get(argument.parameter)
            if hint is not None:
                comparison.compare(hint, argument.value, argument.words)
        return sizes

    def with_sizes(self, avals: Trees, draw: Callable[[], int]) -> Trees:
        """Other arguments that fit, with drawn sizes of the names.

        Axes that the annotations leave open stay as they are in `avals`. So do sizes
        that a partial's arguments have, or a method's object.
        """
        hints = self.parameters.hints
        # Sizes of what no call gives can't be drawn: these arguments have them.
        fixed = Sizes({}, ())
        comparison = Comparison(fixed, "", self.float64)
        for argument in self._arguments(avals, "the function"):
            hint = hints.get(argument.parameter)
            if argument.parameter not in self.free and hint is not None:
                comparison.compare(hint, argument.value, argument.words)
        sizes = self.bound(avals, "the function")
        for name, (_, first) in sizes.by_name.items():
            if name not in fixed.by_name:
                sizes.by_name[name] = int(draw()), first
        for name, axes in sizes.several.items():
            if name not in fixed.several:
                drawn = [size if size == 1 else int(draw()) for size in axes.sizes]
                sizes.several[name] = replace(axes, sizes=tuple(drawn))
        # Arguments behind the parameters are those of `*args`, which share its hint.
        names = [*self.free, *[self.parameters.rest] * len(avals)]
        drawn_avals: list[Tree] = []
        for name, aval in zip(names, avals, strict=False):
            drawn_avals.append(resized(hints.get(name), aval, sizes))
        return tuple(drawn_avals)

    def _arguments(self, avals: Trees, name: str) -> list[Argument]:
        """Each argument, in the order of the parameters; those with a default too."""
        known = self.parameters
        rest = known.rest
        by_name = dict(zip(self.free, avals, strict=False))
        extra = avals[len(self.free) :]
        values = {**known.defaults, **self.preset, **by_name}
        has_too_many = bool(extra) and not rest
        has_too_few = not values.keys() >= set(known.names)
        if has_too_many or has_too_few:
            self._refuse(avals, name)
        arguments = [
            Argument(parameter, values[parameter], f"argument `{parameter}`")
            for parameter in known.names
        ]
        for number, value in enumerate(extra):
            arguments.append(Argument(rest, value, f"argument `{rest}[{number}]`"))
        # What a call can't give by position: of a partial, and keywords' defaults.
        for parameter, value in values.items():
            if parameter not in known.names:
                arguments.append(Argument(parameter, value, f"argument `{parameter}`"))
        return arguments

    def _refuse(self, avals: Trees, name: str) -> NoReturn:
        """Refuses arguments that the function can't take, in Python's words."""
        why = "its arguments don't fit its parameters"
        try:
            inspect.signature(self.fn).bind(*avals)
        except TypeError as error:
            why = str(error)
        raise SpecError(f"hostcall: `{name}`: {why}", code="hc-arguments")


def of_annotations(
    fn: Callable[..., Any], name: str, float64: bool = False
) -> OfAnnotations | Unreadable | None:
    """What a function's annotations say of its results; None if they say nothing."""
    if "jaxtyping" not in sys.modules:  # nothing is evaluated for nobody
        return None
    inner = python_function(fn)
    if inner is None:
        return None
    try:
        parameters = parameters_of(inner.fn, name)
    except SpecError as error:
        return Unreadable(error)
    if parameters is None or parameters.returned is None:
        return None
    by_position = dict(zip(parameters.names, inner.args, strict=False))
    behind = parameters.names[len(inner.args) :]
    return OfAnnotations(
        fn=fn,
        float64=float64,
        preset=by_position | inner.keywords,
        free=tuple([word for word in behind if word not in inner.keywords]),
        parameters=parameters,
    )


def _read_again(fn: Callable[..., Any], float64: bool) -> OfAnnotations:
    """What a pickled rule was. Whoever unpickles the function has its annotations, and
    with them jaxtyping.
    """
    rule = of_annotations(fn, getattr(fn, "__name__", "a function"), float64)
    assert isinstance(rule, OfAnnotations), "it said so before it was pickled"
    return rule


# --- The result -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """Makes the spec of a result from its annotation.

    Attributes:
        sizes: of the names that arguments have.
        avals: of the arguments' arrays, which a dtype is promoted from.
        name: the function's, for messages.
        float64: whether floating arguments reach it as float64.
    """

    sizes: Sizes
    avals: Sequence[jax.ShapeDtypeStruct]
    name: str
    float64: bool

    def spec_of(self, hint: Hint, words: str) -> Tree:
        """The spec of a result, or of a part of one; messages call it `words`."""
        assert not isinstance(hint, OneOf), "`function_hints` refuses these"
        if isinstance(hint, TreeHint):
            specs = {
                key: self.spec_of(hint_of_part, f"{words}, {key!r}")
                for key, hint_of_part in hint.parts.items()
                if hint_of_part is not None
            }
            return hint.put_together(specs)
        try:
            shape = self.sizes.shape(hint)
        except Exception as error:  # of an expression, which may do anything
            no_meaning(
                kind=hint,
                words=words,
                name=self.name,
                error=error,
                sizes=self.sizes,
            )
        for size in shape:
            # Whether a symbolic size is below 0 is known where the program is called.
            if not _jax.is_symbolic(size) and size < 0:
                raise SpecError(
                    f"hostcall: {words} of `{self.name}` is {hint.shown}, which is"
                    f" {shape} for these arguments. A size is at least 0",
                    code="hc-result-spec",
                )
        return struct(shape, self._dtype(hint, words))

    def _dtype(self, hint: ArrayHint, words: str) -> np.dtype:
        """The dtype that the annotation says, or the first that it allows of: the one
        promoted from the arguments, the floating, integer, real and complex one that
        goes with that.
        """
        dtype = promoted(self.avals)
        only = hint.only_dtype
        if only is None and hint.allows(dtype):  # as nearly always
            return dtype
        assert hint.dtypes is not None, "it allows all, and so the arguments'"
        real: np.dtype = jnp.finfo(floating(dtype)).dtype
        if only is not None:
            # With float64=True the function says float64 whatever JAX's mode is.
            rounds = self.float64 and only in (np.float64, np.complex128)
            return at_precision(only, real) if rounds else only
        candidates: list[np.dtype] = [
            floating(dtype),
            np.dtype(jnp.result_type(int)),
            real,
            np.dtype(jnp.result_type(real, np.complex64)),
        ]
        for candidate in candidates:
            if hint.allows(candidate):
                return candidate
        raise SpecError(
            f"hostcall: {words} of `{self.name}` is {hint.shown}, which allows"
            f" {', '.join(map(str, hint.dtypes))}. Annotate one dtype, as Float32 does,"
            " or say with result= what the function returns",
            code="hc-result-spec",
        )
