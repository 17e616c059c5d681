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
from typing import Any, NoReturn

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
        given: arguments that it has already, by name: of a partial, and a method's
            object.
        free: the names of the parameters that a call gives by position.
        parameters: of the Python function inside.
    """

    fn: Callable[..., Any]
    float64: bool
    given: Mapping[str, Any] = field(compare=False)
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
        sizes = self.bound(avals, name)
        arrays = [leaf for leaf in tree.tree_leaves(avals) if is_aval(leaf)]
        returned = self.parameters.returned
        assert returned is not None, "`of_annotations` makes no other"
        return _Result(sizes, arrays, name, self.float64).made(returned, "the result")

    def bound(self, avals: Trees, name: str) -> Sizes:
        """The sizes that these arguments give to names.

        Raises:
            SpecError: an argument is not what its annotation says.
        """
        values = self._values(avals, name)
        hints = self.parameters.hints
        objects = [value for each, value, _ in values if each not in hints]
        sizes = Sizes({each: value for each, value, _ in values}, objects)
        for parameter, value, of in values:
            hint = hints.get(parameter)
            if hint is not None:
                _Argument(sizes, name, self.float64).compare(hint, value, of)
        return sizes

    def with_sizes(self, avals: Trees, draw: Callable[[], int]) -> Trees:
        """Other arguments that fit, with drawn sizes of the names.

        Axes that the annotations leave open stay as they are in `avals`. So do sizes
        that a partial's arguments have, or a method's object.
        """
        hints = self.parameters.hints
        values = self._values(avals, "the function")
        fixed = Sizes({}, ())
        for parameter, value, of in values:
            if parameter not in self.free and parameter in hints:
                _Argument(fixed, "", self.float64).compare(hints[parameter], value, of)
        sizes = self.bound(avals, "the function")
        for name, (_, of) in sizes.one.items():
            if name not in fixed.one:
                sizes.one[name] = int(draw()), of
        for name, known in sizes.several.items():
            if name not in fixed.several:
                drawn = [size if size == 1 else int(draw()) for size in known.sizes]
                sizes.several[name] = replace(known, sizes=tuple(drawn))
        names = (*self.free, *(self.parameters.rest,) * len(avals))
        return tuple(
            [
                _resized(hints.get(name), aval, sizes)
                for name, aval in zip(names, avals, strict=False)
            ]
        )

    def _values(self, avals: Trees, name: str) -> list[tuple[str, Any, str]]:
        """(parameter, value, what messages call it) of each argument, in the order of
        the parameters; of those with a default too.
        """
        found: list[tuple[str, Any, str]] = []
        by_name = dict(zip(self.free, avals, strict=False))
        extra = avals[len(self.free) :]
        for parameter in self.parameters.names:
            value = by_name.get(parameter, self.given.get(parameter, _MISSING))
            if value is _MISSING:
                value = self.parameters.defaults.get(parameter, _MISSING)
            if value is _MISSING:
                self._refuse(avals, name)
            found.append((parameter, value, f"argument `{parameter}`"))
        if extra and not self.parameters.rest:
            self._refuse(avals, name)
        for number, value in enumerate(extra):
            rest = self.parameters.rest
            found.append((rest, value, f"argument `{rest}[{number}]`"))
        named = [each for each in self.given if each not in self.parameters.names]
        found += [(each, self.given[each], f"argument `{each}`") for each in named]
        return found

    def _refuse(self, avals: Trees, name: str) -> NoReturn:
        """Refuses arguments that the function can't take, in Python's words."""
        why = "its arguments don't fit its parameters"
        try:
            inspect.signature(self.fn).bind(*avals)
        except TypeError as error:
            why = str(error)
        raise SpecError(f"hostcall: `{name}`: {why}", code="hc-arguments")


_MISSING = object()


def of_annotations(
    fn: Callable[..., Any], name: str, float64: bool = False
) -> OfAnnotations | Unreadable | None:
    """What a function's annotations say of its results; None if they say nothing."""
    if "jaxtyping" not in sys.modules:  # nothing is evaluated for nobody
        return None
    found = _python_function(fn)
    if found is None:
        return None
    inner, before, named = found
    try:
        parameters = _parameters(inner, name)
    except SpecError as error:
        return Unreadable(error)
    if parameters is None or parameters.returned is None:
        return None
    names = parameters.names
    given = dict(zip(names, before, strict=False)) | named
    free = tuple([each for each in names[len(before) :] if each not in named])
    return OfAnnotations(fn, float64, given, free, parameters)


def _read_again(fn: Callable[..., Any], float64: bool) -> OfAnnotations:
    """What a pickled rule was. Whoever unpickles the function has its annotations, and
    with them jaxtyping.
    """
    found = of_annotations(fn, getattr(fn, "__name__", "a function"), float64)
    assert isinstance(found, OfAnnotations), "it said so before it was pickled"
    return found


def _python_function(
    fn: Callable[..., Any],
) -> tuple[types.FunctionType, tuple[Any, ...], dict[str, Any]] | None:
    """The Python function inside partials, methods and objects with `__call__`, and the
    arguments that those give it, by position and by name.

    None for any other callable, which is asked nothing: it may be a proxy or a Mock.
    """
    before: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    while type(fn) is not types.FunctionType:
        if is_partial(fn):
            before = (*fn.args, *before)
            named = {**fn.keywords, **named}
            fn = fn.func
        elif type(fn) is types.MethodType:
            before = (fn.__self__, *before)
            fn = fn.__func__
        else:
            method = call_method(fn)
            if type(method) is not types.FunctionType:
                return None
            before = (fn, *before)
            fn = method
    try:
        inner = inspect.unwrap(fn)
    except ValueError:  # wrappers in a ring
        return None
    return (inner, before, named) if type(inner) is types.FunctionType else None


# Weak keys: a function that is defined anew has annotations of its own.
_known: weakref.WeakKeyDictionary[types.FunctionType, Parameters]
_known = weakref.WeakKeyDictionary()


def _parameters(fn: types.FunctionType, name: str) -> Parameters | None:
    """What a function's annotations say; None if they say nothing of its result."""
    if "return" not in fn.__annotations__:
        return None
    found = _known.get(fn)
    if found is None:
        found = _known[fn] = _read_parameters(fn, name)
    return found


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
    hints = {each: read_hint(annotations[each]) for each in annotations}
    return Parameters(
        names=tuple(names),
        hints={each: hint for each, hint in hints.items() if hint is not None},
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
class _Argument:
    """Compares an argument with its annotation, as far as that says something."""

    sizes: Sizes
    name: str
    float64: bool

    def compare(self, hint: Hint, value: Tree, of: str) -> None:
        if isinstance(hint, TreeHint):
            for key, part in hint.parts.items():
                inner = _part(value, key)
                if part is not None and inner is not None:
                    self.compare(part, inner, f"{of}, {key!r}")
            return
        given = aval_of(value)  # a default is an array itself
        if not is_aval(given):
            return  # a static argument
        kinds = hint.kinds if isinstance(hint, OneOf) else (hint,)
        reasons = []
        for kind in kinds:
            known = self.sizes.copied()
            why = self._why_not(kind, given, of)
            if not why:
                return
            reasons.append(why)
            self.sizes.restore(known)
        raise SpecError(
            f"hostcall: {of} of `{self.name}` is {given.dtype}{list(given.shape)},"
            f" which is not {' or '.join(kind.shown for kind in kinds)}: {reasons[0]}",
            code="hc-arguments",
        )

    def _why_not(self, kind: ArrayHint, given: jax.ShapeDtypeStruct, of: str) -> str:
        """What does not fit; "" if all does."""
        try:
            why = self.sizes.bind(kind, given.shape, of)
        except Exception as error:  # of an expression, which may do anything
            _no_meaning(kind, of, self.name, error, self.sizes)
        dtype = given.dtype
        if self.float64 and isinstance(dtype, np.dtype):
            dtype = widened(dtype) or dtype
        if not why and not kind.allows(dtype, given.weak_type):
            why = f"its dtype is {dtype}"
        return why


def _resized(hint: Hint | None, value: Tree, sizes: Sizes) -> Tree:
    """An argument with the sizes that its annotation has now."""
    if isinstance(hint, ArrayHint) and is_aval(value):
        shape = sizes.resized(hint, value.shape)
        return struct(shape, value.dtype, value.weak_type)
    if not isinstance(hint, TreeHint):
        return value
    leaves, treedef = tree.tree_flatten_with_path(value)
    found: list[Any] = []
    for path, leaf in leaves:
        part: Hint | None = hint
        for step in path:
            within = isinstance(part, TreeHint)
            part = part.parts.get(_key(step)) if within else None  # type: ignore[union-attr]
        found.append(_resized(part, leaf, sizes))
    return treedef.unflatten(found)


def _key(step: Any) -> Any:
    """The number or name of a part in a path of JAX's."""
    for attribute in ("name", "key", "idx"):
        if hasattr(step, attribute):
            return getattr(step, attribute)
    return None


def _part(value: Tree, key: Any) -> Any:
    """The part of a tree; None if it has none such."""
    if isinstance(key, int):
        return value[key] if isinstance(value, tuple) and key < len(value) else None
    if isinstance(value, Mapping):
        return value.get(key)
    return getattr(value, key, None)


# --- The result -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """Makes the spec of a result from its annotation."""

    sizes: Sizes
    arrays: Sequence[jax.ShapeDtypeStruct]
    name: str
    float64: bool

    def made(self, hint: Hint, of: str) -> Tree:
        assert not isinstance(hint, OneOf), "`_returned` refuses these"
        if isinstance(hint, TreeHint):
            parts = {
                key: self.made(part, f"{of}, {key!r}")
                for key, part in hint.parts.items()
                if part is not None
            }
            return hint.put_together(parts)
        try:
            shape = self.sizes.shape(hint)
        except Exception as error:  # of an expression, which may do anything
            _no_meaning(hint, of, self.name, error, self.sizes)
        for size in shape:
            if not _jax.is_symbolic(size) and size < 0:
                raise SpecError(
                    f"hostcall: {of} of `{self.name}` is {hint.shown}, which is"
                    f" {shape} for these arguments. A size is at least 0",
                    code="hc-result-spec",
                )
        return struct(shape, self._dtype(hint, of))

    def _dtype(self, hint: ArrayHint, of: str) -> np.dtype:
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
        for each in candidates:
            if hint.allows(each):
                return each
        raise SpecError(
            f"hostcall: {of} of `{self.name}` is {hint.shown}, which allows"
            f" {', '.join(map(str, hint.dtypes))}. Annotate one dtype, as Float32 does,"
            " or say with result= what the function returns",
            code="hc-result-spec",
        )


def _at_precision(dtype: np.dtype, real: np.dtype) -> np.dtype:
    """A floating or complex dtype at the precision of another floating one."""
    complexed: np.dtype = jnp.result_type(real, np.complex64)
    return complexed if dtype.kind == "c" else real


def _no_meaning(
    kind: ArrayHint, of: str, name: str, error: BaseException, sizes: Sizes
) -> NoReturn:
    why = str(error).partition("\n")[0].rstrip(".")  # JAX's may be a page
    if isinstance(error, LookupError):
        why = f"{error} has no size"
    raise SpecError(
        f"hostcall: {of} of `{name}` is annotated {kind.shown}, which has no meaning:"
        f" {why}. The arguments name {sizes.names() or 'nothing'}. A result has names"
        " of arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or"
        " say with result= what the function returns",
        code="hc-result-spec",
    ) from error
