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

Annotations are read once for each function (`array_hints` has the words of one); a call
only binds sizes. jaxtyping is looked for only among the modules that are imported:
without it nobody has such an annotation.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.array_hints import (
    ArrayHint,
    Hint,
    OneOf,
    Sizes,
    TreeHint,
    meant,
    mentions_arrays,
    read_hint,
    shown,
)
from hostcall._core.errors import SpecError
from hostcall._core.host_code import OfArguments, is_partial
from hostcall._core.result_rules import (
    Tree,
    Trees,
    aval_of,
    floating,
    is_aval,
    promoted,
    struct,
)
from hostcall._core.signatures import call_method
from hostcall._core.spec import widened

tree = jax.tree_util


# --- The annotations of a function ----------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """What the annotations of one Python function say.

    Attributes:
        names: of the parameters that may be given by position, in their order.
        hints: the annotation of each parameter; none for those that say nothing.
        rest: the name of `*args`; "" without.
        defaults: of parameters that have one.
        returned: the annotation of the result; None if it says nothing.
        annotation: the same, as the user wrote it.
    """

    names: tuple[str, ...]
    hints: Mapping[str, Hint]
    rest: str
    defaults: Mapping[str, Any]
    returned: Hint | None
    annotation: Any


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
            arrays=[leaf for leaf in tree.tree_leaves(avals) if is_aval(leaf)],
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
        sizes = Sizes(
            arguments={argument.parameter: argument.value for argument in arguments},
            objects=[
                argument.value
                for argument in arguments
                if argument.parameter not in hints
            ],
        )
        comparison = _Comparison(sizes, name, self.float64)
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
        comparison = _Comparison(fixed, "", self.float64)
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
        names = (*self.free, *(self.parameters.rest,) * len(avals))
        return tuple(
            [
                _resized(hints.get(name), aval, sizes)
                for name, aval in zip(names, avals, strict=False)
            ]
        )

    def _arguments(self, avals: Trees, name: str) -> list[Argument]:
        """Each argument, in the order of the parameters; those with a default too."""
        known = self.parameters
        rest = known.rest
        by_name = dict(zip(self.free, avals, strict=False))
        extra = avals[len(self.free) :]
        values = {**known.defaults, **self.preset, **by_name}
        if (extra and not rest) or not values.keys() >= set(known.names):
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
    inner = _python_function(fn)
    if inner is None:
        return None
    try:
        parameters = _parameters(inner.fn, name)
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


@dataclass(frozen=True)
class PythonFunction:
    """The Python function inside a callable.

    Attributes:
        fn: the function.
        args: arguments that it has already, by position: of partials, and the object
            of a method.
        keywords: the same by name.
    """

    fn: types.FunctionType
    args: tuple[Any, ...]
    keywords: dict[str, Any]


def _python_function(fn: Callable[..., Any]) -> PythonFunction | None:
    """What is inside partials, methods and objects with `__call__`.

    None for any other callable, which is asked nothing: it may be a proxy or a Mock.
    """
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while type(fn) is not types.FunctionType:
        if is_partial(fn):
            args = (*fn.args, *args)
            # As Python does: what a partial around it gives comes first.
            keywords = {**fn.keywords, **keywords}
            fn = fn.func
        elif type(fn) is types.MethodType:
            args = (fn.__self__, *args)
            fn = fn.__func__
        else:
            method = call_method(fn)
            if type(method) is not types.FunctionType:
                return None
            args = (fn, *args)
            fn = method
    try:
        inner = inspect.unwrap(fn)
    except ValueError:  # wrappers in a ring
        return None
    if type(inner) is not types.FunctionType:
        return None
    return PythonFunction(inner, args, keywords)


# Weak keys: a function that is defined anew has annotations of its own.
_known: weakref.WeakKeyDictionary[types.FunctionType, Parameters]
_known = weakref.WeakKeyDictionary()


def _parameters(fn: types.FunctionType, name: str) -> Parameters | None:
    """What a function's annotations say; None if they say nothing of its result."""
    if "return" not in fn.__annotations__:
        return None
    parameters = _known.get(fn)
    if parameters is None:
        # Two threads may both read them, and then keep what is equal.
        parameters = _read_parameters(fn, name)
        _known[fn] = parameters
    return parameters


def _read_parameters(fn: types.FunctionType, name: str) -> Parameters:
    try:
        annotations = typing.get_type_hints(fn)
    except Exception as error:
        raise SpecError(
            f"hostcall: the annotations of `{name}` can't be evaluated:"
            f" {type(error).__name__}: {error}. With `from __future__ import"
            " annotations` they are texts, whose names must stand in the module. Move"
            " what they name there, or say with result= what the function returns",
            code="hc-result-spec",
        ) from error
    annotation = annotations.pop("return", None)
    # A wrapper's own parameters are `*args`: `_python_function` has unwrapped it.
    names: list[str] = []
    rest = ""
    defaults: dict[str, Any] = {}
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = parameter.name
        elif parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        ):
            names.append(parameter.name)
        if parameter.default is not parameter.empty:
            defaults[parameter.name] = parameter.default
    hints = {word: read_hint(written) for word, written in annotations.items()}
    return Parameters(
        names=tuple(names),
        hints={word: hint for word, hint in hints.items() if hint is not None},
        rest=rest,
        defaults=defaults,
        returned=_returned(annotation, name),
        annotation=annotation,
    )


def _returned(annotation: Any, name: str) -> Hint | None:
    """The annotation of a result; None if it says nothing of arrays.

    Raises:
        SpecError: it mentions arrays, and does not say how many there are, or which
            shape one has.
    """
    hint = read_hint(annotation)
    why = ""
    # NDArray[np.float32] is an alias of np.ndarray[...], which has no axes either.
    if typing.get_origin(meant(annotation)) is np.ndarray:
        why = (
            "which has a dtype and no shape. Annotate it with jaxtyping, as in"
            " Float[np.ndarray, 'n']"
        )
    elif not mentions_arrays(annotation):
        return None
    elif isinstance(hint, OneOf):
        why = "which is one of several types. A result has one: annotate it"
    elif isinstance(hint, TreeHint):
        why = hint.unsaid("result")
    elif hint is None:
        why = (
            "which does not say how many arrays there are. Annotate a tuple with a"
            " type for each, a TypedDict, a NamedTuple or a dataclass"
        )
    if not why:
        return hint
    raise SpecError(
        f"hostcall: `{name}` is annotated to return {shown(annotation)}, {why}; or say"
        " with result= what it returns",
        code="hc-result-spec",
    )


# --- Arguments ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Comparison:
    """Compares arguments with their annotations, as far as these say something.

    Attributes:
        sizes: of names; each argument adds those that it has first.
        name: the function's, for messages.
        float64: whether floating arguments reach it as float64.
    """

    sizes: Sizes
    name: str
    float64: bool

    def compare(self, hint: Hint, value: Tree, words: str) -> None:
        """Compares one; `words` are what messages call it."""
        if isinstance(hint, TreeHint):
            for key, hint_of_part in hint.parts.items():
                inner = _part(value, key)
                if hint_of_part is not None and inner is not None:
                    self.compare(hint_of_part, inner, f"{words}, {key!r}")
            return
        aval = aval_of(value)  # a default is an array itself
        if not is_aval(aval):
            return  # a static argument
        kinds = hint.kinds if isinstance(hint, OneOf) else (hint,)
        reasons: list[str] = []
        for kind in kinds:
            # What one type of a union has bound must not hold for the next one.
            known = self.sizes.copied()
            why = self._why_not(kind, aval, words)
            if not why:
                return
            reasons.append(why)
            self.sizes.restore(known)
        raise SpecError(
            f"hostcall: {words} of `{self.name}` is {aval.dtype}{list(aval.shape)},"
            f" which is not {' or '.join(kind.shown for kind in kinds)}: {reasons[0]}",
            code="hc-arguments",
        )

    def _why_not(self, kind: ArrayHint, aval: jax.ShapeDtypeStruct, words: str) -> str:
        """What does not fit; "" if all does."""
        try:
            why = self.sizes.bind(kind, aval.shape, words)
        except Exception as error:  # of an expression, which may do anything
            _no_meaning(
                kind=kind,
                words=words,
                name=self.name,
                error=error,
                sizes=self.sizes,
            )
        dtype = aval.dtype
        # Typed PRNG keys have no NumPy dtype, and are never converted.
        if self.float64 and isinstance(dtype, np.dtype):
            dtype = widened(dtype) or dtype
        if not why and not kind.allows(dtype, aval.weak_type):
            why = f"its dtype is {dtype}"
        return why


def _resized(hint: Hint | None, value: Tree, sizes: Sizes) -> Tree:
    """An argument with the sizes that its annotation has now."""
    if isinstance(hint, ArrayHint) and is_aval(value):
        shape = sizes.resized(hint, value.shape)
        return struct(shape, value.dtype, value.weak_type)
    if not isinstance(hint, TreeHint):
        return value
    # By JAX's paths, since a class of the user's is put together by JAX alone.
    leaves, treedef = tree.tree_flatten_with_path(value)
    resized: list[Any] = []
    for path, leaf in leaves:
        hint_of_leaf: Hint | None = hint
        for step in path:
            if not isinstance(hint_of_leaf, TreeHint):
                hint_of_leaf = None
                break
            hint_of_leaf = hint_of_leaf.parts.get(_key(step))
        resized.append(_resized(hint_of_leaf, leaf, sizes))
    return treedef.unflatten(resized)


def _key(step: Any) -> Any:
    """The number or name of a part in a path of JAX's."""
    for attribute in ("name", "key", "idx"):
        if hasattr(step, attribute):
            return getattr(step, attribute)
    return None


def _part(value: Tree, key: Any) -> Any:
    """The part of a tree; None if it has none such."""
    if isinstance(key, int):
        is_there = isinstance(value, tuple) and key < len(value)
        return value[key] if is_there else None
    if isinstance(value, Mapping):
        return value.get(key)
    return getattr(value, key, None)


# --- The result -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """Makes the spec of a result from its annotation.

    Attributes:
        sizes: of the names that arguments have.
        arrays: the arguments' arrays, which a dtype is promoted from.
        name: the function's, for messages.
        float64: whether floating arguments reach it as float64.
    """

    sizes: Sizes
    arrays: Sequence[jax.ShapeDtypeStruct]
    name: str
    float64: bool

    def spec_of(self, hint: Hint, words: str) -> Tree:
        """The spec of a result, or of a part of one; messages call it `words`."""
        assert not isinstance(hint, OneOf), "`_returned` refuses these"
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
            _no_meaning(
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
        dtype = promoted(self.arrays)
        only = hint.only_dtype
        if only is None and hint.allows(dtype):  # as nearly always
            return dtype
        assert hint.dtypes is not None, "it allows all, and so the arguments'"
        real: np.dtype = jnp.finfo(floating(dtype)).dtype
        if only is not None:
            # With float64=True the function says float64 whatever JAX's mode is.
            rounds = self.float64 and only in (np.float64, np.complex128)
            return _at_precision(only, real) if rounds else only
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


def _at_precision(dtype: np.dtype, real: np.dtype) -> np.dtype:
    """A floating or complex dtype at the precision of another floating one."""
    complexed: np.dtype = jnp.result_type(real, np.complex64)
    return complexed if dtype.kind == "c" else real


def _no_meaning(
    kind: ArrayHint, words: str, name: str, error: BaseException, sizes: Sizes
) -> NoReturn:
    """Refuses an annotation whose words could not be read or computed."""
    why = str(error).partition("\n")[0].rstrip(".")  # JAX's may be a page
    if isinstance(error, LookupError):
        why = f"{error} has no size"
    raise SpecError(
        f"hostcall: {words} of `{name}` is annotated {kind.shown}, which has no"
        f" meaning: {why}. The arguments name {sizes.names() or 'nothing'}. A result"
        " has names of arguments' axes, numbers, and expressions of both, as 'n-1' or"
        " '2*n'; or say with result= what the function returns",
        code="hc-result-spec",
    ) from error
