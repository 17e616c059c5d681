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

Tuples, lists, dicts, NamedTuples, TypedDicts and dataclasses of annotations are trees.
jaxtyping is looked for only among the modules that are imported: without it nobody has
such an annotation.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.errors import SpecError
from hostcall._core.host_code import OfArguments, is_partial
from hostcall._core.result_rules import Tree, Trees, floating, is_aval, promoted

Size = Any  # an int, or a symbolic size of an exported program
tree = jax.tree_util


# --- One annotation -------------------------------------------------------------------


@dataclass(frozen=True)
class ArrayType:
    """jaxtyping's annotation of one array, read.

    Attributes:
        shown: how the user wrote it.
        dims: its words: names, sizes and expressions.
        dtypes: the names of the dtypes that it allows; None if it allows all.
    """

    shown: str
    dims: tuple[str, ...]
    dtypes: tuple[str, ...] | None

    @property
    def variadic(self) -> int | None:
        """The position of the word that stands for any number of axes."""
        found = [n for n, word in enumerate(self.dims) if _is_variadic(word)]
        return found[0] if found else None


def _is_variadic(word: str) -> bool:
    return word == "..." or word.lstrip("#").startswith("*")


def array_type(annotation: object) -> ArrayType | None:
    """Reads an annotation of jaxtyping's; None for any other."""
    annotation = _meant(annotation)
    jaxtyping = sys.modules.get("jaxtyping")
    if jaxtyping is None or not isinstance(annotation, type):
        return None
    if jaxtyping.AbstractArray not in type.mro(annotation):
        return None
    found: Any = annotation
    words = []
    for word in found.dim_str.split():
        _, _, size = word.partition("=")  # "rows=3": the name is for readers
        words.append(size if size and word.partition("=")[0].isidentifier() else word)
    allowed = found.dtypes
    dtypes = None
    if isinstance(allowed, (tuple, list)):
        # NumPy 1 and 2 have two names for one dtype.
        dtypes = tuple(
            dict.fromkeys("bool" if name == "bool_" else name for name in allowed)
        )
    return ArrayType(found.__name__, tuple(words), dtypes)


# --- Sizes ----------------------------------------------------------------------------


class Sizes:
    """The sizes that the names of an annotation have in one call.

    Attributes:
        one: the size of a name of one axis, and the argument that had it first.
        several: the sizes of a name such as `*batch`, and that argument.
    """

    def __init__(self) -> None:
        self.one: dict[str, tuple[Size, str]] = {}
        self.several: dict[str, tuple[tuple[Size, ...], str]] = {}

    def bind(self, kind: ArrayType, shape: tuple[Size, ...], of: str) -> str:
        """Compares a shape with an annotation; returns what does not fit, or ""."""
        at = kind.variadic
        fixed = len(kind.dims) - (at is not None)
        if len(shape) < fixed or (at is None and len(shape) != fixed):
            least = "at least " if at is not None else ""
            axes = "axis" if fixed == 1 else "axes"
            return f"it has {len(shape)} axes, and the annotation {least}{fixed} {axes}"
        if at is None:
            return self._bind_axes(kind.dims, shape, of)
        after = len(kind.dims) - at - 1
        end = len(shape) - after
        return (
            self._bind_axes(kind.dims[:at], shape[:at], of)
            or self._bind_several(kind.dims[at], shape[at:end], of)
            or self._bind_axes(kind.dims[at + 1 :], shape[end:], of)
        )

    def _bind_axes(self, words: Sequence[str], sizes: Sequence[Size], of: str) -> str:
        for word, size in zip(words, sizes, strict=True):
            name = word.lstrip("#")
            is_one = not _jax.is_symbolic(size) and size == 1
            broadcasts = word.startswith("#") and is_one
            if name == "_" or broadcasts:
                continue
            if not name.isidentifier():
                wanted = self.size(name)
                if wanted != size:
                    return f"it has {size} where {name} is {wanted}"
                continue
            known, first = self.one.setdefault(name, (size, of))
            if known != size:
                return f"it has {name}={size}, and {first} has {name}={known}"
        return ""

    def _bind_several(self, word: str, sizes: tuple[Size, ...], of: str) -> str:
        name = word.lstrip("#*")
        if word == "..." or name == "_":
            return ""
        known, first = self.several.setdefault(name, (sizes, of))
        if known == sizes:
            return ""
        if word.startswith("#"):
            try:
                broad = np.broadcast_shapes(known, sizes)
            except ValueError:
                broad = None
            if broad is not None:
                self.several[name] = (tuple(broad), first)
                return ""
        return f"it has *{name}={sizes}, and {first} has *{name}={known}"

    def size(self, word: str) -> Size:
        """The size that a word of an annotation stands for.

        Raises:
            LookupError: a name has no size.
            SyntaxError: the word is no expression of sizes.
        """
        if word.isdigit():
            return int(word)
        return _computed(ast.parse(word.strip("{}"), mode="eval").body, self.one)

    def shape(self, kind: ArrayType) -> tuple[Size, ...]:
        """The shape that an annotation of a result stands for; raises as `size`."""
        sizes: list[Size] = []
        for word in kind.dims:
            name = word.lstrip("#")
            if _is_variadic(word):
                sizes += self.several[name.lstrip("*")][0]
            elif name.isidentifier():
                sizes.append(self.one[name][0])
            else:
                sizes.append(self.size(name))
        return tuple(sizes)


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}
_FUNCTIONS: dict[str, Callable[..., Size]] = {"min": min, "max": max, "abs": abs}


def _computed(node: ast.AST, known: Mapping[str, tuple[Size, str]]) -> Size:
    """The value of an expression of sizes: numbers, names, arithmetic, min and max."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return known[node.id][0]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand, known)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _computed(node.left, known)
        right = _computed(node.right, known)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        function = _FUNCTIONS.get(node.func.id)
        if function is not None and not node.keywords:
            return function(*[_computed(each, known) for each in node.args])
    raise SyntaxError(
        "an expression of sizes has numbers, names, + - * // % **, min, max and abs"
    )


# --- The annotations of a function ----------------------------------------------------


@dataclass(frozen=True)
class OfAnnotations(OfArguments):
    """The results that a function's annotations declare.

    Attributes:
        fn: the function.
        hints: the annotation of each parameter, and of the result as "return".
    """

    fn: Callable[..., Any]
    hints: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"-> {_shown(self.hints['return'])}"

    def spec(self, avals: Trees, name: str) -> Tree:
        sizes = Sizes()
        try:
            bound = inspect.signature(self.fn).bind(*avals)
        except TypeError as error:
            text = f"hostcall: `{name}`: {error}"
            raise SpecError(text, code="hc-arguments") from error
        for parameter, given in bound.arguments.items():
            hint = self.hints.get(parameter)
            if hint is not None:
                _compare(hint, given, f"argument `{parameter}`", sizes, name)
        arrays = [leaf for leaf in tree.tree_leaves(avals) if is_aval(leaf)]
        return _Result(sizes, arrays, name).made(self.hints["return"], "the result")


def of_annotations(fn: Callable[..., Any], name: str) -> OfAnnotations | None:
    """What the annotations of a function say of its results; None if they say nothing.

    Raises:
        SpecError: an annotation can't be evaluated, or does not say the shape.
    """
    if "jaxtyping" not in sys.modules:  # nothing is evaluated for nobody
        return None
    hints = _hints(fn, name)
    returned = hints.get("return")
    if returned is None or not _says(returned, name):
        return None
    return OfAnnotations(fn, hints)


def _hints(fn: Callable[..., Any], name: str) -> dict[str, Any]:
    """The annotations of a Python function, by their names; none of any other callable,
    which is asked nothing: it may be a proxy or a Mock.
    """
    while is_partial(fn):
        fn = fn.func
    if type(fn) is types.MethodType:
        fn = fn.__func__
    if type(fn) is not types.FunctionType:
        return {}
    try:
        fn = inspect.unwrap(fn)
    except ValueError:  # wrappers in a ring
        return {}
    if type(fn) is not types.FunctionType or "return" not in fn.__annotations__:
        return {}
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except Exception as error:
        raise SpecError(
            f"hostcall: the annotations of `{name}` can't be evaluated:"
            f" {type(error).__name__}: {error}. With `from __future__ import"
            " annotations` they are texts, whose names must stand in the module. Move"
            " what they name there, or say with result= what the function returns",
            code="hc-result-spec",
        ) from error


_ALIAS = getattr(typing, "TypeAliasType", ())  # since Python 3.12


def _meant(annotation: Any) -> Any:
    """What an alias stands for: `type Row = ...`, and NumPy's NDArray[...]."""
    origin = typing.get_origin(annotation)
    if isinstance(origin, _ALIAS):
        return _meant(origin.__value__[typing.get_args(annotation)])
    if isinstance(annotation, _ALIAS):
        return _meant(annotation.__value__)
    return annotation


def _says(annotation: Any, name: str) -> bool:
    """Whether all arrays of an annotation are declared."""
    annotation = _meant(annotation)
    if array_type(annotation) is not None:
        return True
    if typing.get_origin(annotation) is np.ndarray:
        raise SpecError(
            f"hostcall: `{name}` is annotated to return {_shown(annotation)}, which has"
            " a dtype and no shape. Annotate it with jaxtyping, as in"
            " Float[np.ndarray, 'n'], or say with result= what it returns",
            code="hc-result-spec",
        )
    parts = _parts(annotation)
    return bool(parts) and all(_says(part, name) for part in parts.values())


def _parts(annotation: Any) -> dict[Any, Any]:
    """The annotations of the parts of a tree; none for what is no tree."""
    annotation = _meant(annotation)
    origin = typing.get_origin(annotation)
    if origin is tuple:
        arguments = typing.get_args(annotation)
        return {} if Ellipsis in arguments else dict(enumerate(arguments))
    if not isinstance(annotation, type):
        return {}
    is_named_tuple = issubclass(annotation, tuple) and hasattr(annotation, "_fields")
    if is_named_tuple or typing.is_typeddict(annotation):
        return typing.get_type_hints(annotation, include_extras=True)
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation, include_extras=True)
        return {
            field.name: hints[field.name] for field in dataclasses.fields(annotation)
        }
    return {}


def _shown(annotation: Any) -> str:
    found = array_type(annotation)
    if found is not None:
        return found.shown
    is_class = isinstance(annotation, type) and typing.get_origin(annotation) is None
    return annotation.__name__ if is_class else str(annotation)


# --- Arguments ------------------------------------------------------------------------


def _compare(annotation: Any, given: Tree, of: str, sizes: Sizes, name: str) -> None:
    """Compares an argument with its annotation, as far as that says something."""
    kind = array_type(annotation)
    if kind is None:
        for key, part in _parts(annotation).items():
            if isinstance(key, int):
                inner = given[key] if isinstance(given, tuple) else None
            elif isinstance(given, dict):
                inner = given.get(key)
            else:
                inner = getattr(given, key, None)
            if inner is not None:
                _compare(part, inner, f"{of}, {key!r}", sizes, name)
        return
    if not is_aval(given):
        return  # a static argument, or one that has a default
    try:
        why = sizes.bind(kind, given.shape, of)
    except (LookupError, SyntaxError, TypeError, ZeroDivisionError) as error:
        _no_meaning(kind, of, name, error, sizes)
    if not why and kind.dtypes is not None and not _allows(kind.dtypes, given):
        why = f"its dtype is {given.dtype}"
    if why:
        shape = list(given.shape)
        raise SpecError(
            f"hostcall: {of} of `{name}` is {given.dtype}{shape}, which is not"
            f" {kind.shown}: {why}",
            code="hc-arguments",
        )


def _allows(dtypes: Sequence[str], given: jax.ShapeDtypeStruct) -> bool:
    dtype = given.dtype
    # A Python number becomes what the annotation asks for.
    weak = given.weak_type and any(
        jnp.promote_types(np.dtype(each), dtype) == np.dtype(each)
        for each in dtypes
        if each in _NUMPYS
    )
    return str(dtype) in dtypes or weak


_NUMPYS = frozenset(np.dtype(code).name for code in "?bBhHiIqQefdFD")


# --- The result -----------------------------------------------------------------------


class _Result:
    """Makes the spec of a result from its annotation."""

    def __init__(
        self, sizes: Sizes, arrays: Sequence[jax.ShapeDtypeStruct], name: str
    ) -> None:
        self._sizes = sizes
        self._arrays = arrays
        self._name = name

    def made(self, annotation: Any, of: str) -> Tree:
        kind = array_type(annotation)
        if kind is None:
            parts = {
                key: self.made(part, f"{of}, {key!r}")
                for key, part in _parts(annotation).items()
            }
            return self._put_together(annotation, parts)
        try:
            shape = self._sizes.shape(kind)
        except (LookupError, SyntaxError, TypeError, ZeroDivisionError) as error:
            _no_meaning(kind, of, self._name, error, self._sizes)
        for size in shape:
            if not _jax.is_symbolic(size) and size < 0:
                raise SpecError(
                    f"hostcall: {of} of `{self._name}` is {kind.shown}, which is"
                    f" {shape} for these arguments. A size is at least 0",
                    code="hc-result-spec",
                )
        return jax.ShapeDtypeStruct(shape, self._dtype(kind, of))

    def _put_together(self, annotation: Any, parts: dict[Any, Tree]) -> Tree:
        annotation = _meant(annotation)
        if typing.get_origin(annotation) is tuple:
            return tuple(parts.values())
        if typing.is_typeddict(annotation):
            return parts
        if issubclass(annotation, tuple):
            return annotation(**parts)
        # As unflattening does: the class's own __init__ may compute with its fields.
        made = object.__new__(annotation)
        for key, part in parts.items():
            object.__setattr__(made, key, part)
        return made

    def _dtype(self, kind: ArrayType, of: str) -> np.dtype:
        dtype = promoted(self._arrays)
        if kind.dtypes is None:
            return dtype
        if len(kind.dtypes) == 1 and kind.dtypes[0] in _NUMPYS:
            return np.dtype(kind.dtypes[0])
        candidates: list[np.dtype] = [
            dtype,
            floating(dtype),
            np.dtype(jnp.result_type(int)),
        ]
        real: np.dtype = jnp.finfo(floating(dtype)).dtype
        candidates += [real, np.dtype(jnp.result_type(real, np.complex64))]
        for each in candidates:
            if str(each) in kind.dtypes:
                return each
        raise SpecError(
            f"hostcall: {of} of `{self._name}` is {kind.shown}, which allows"
            f" {', '.join(kind.dtypes)}. Annotate one dtype, as Float32 does, or say"
            " with result= what the function returns",
            code="hc-result-spec",
        )


def _no_meaning(
    kind: ArrayType, of: str, name: str, error: BaseException, sizes: Sizes
) -> NoReturn:
    known = ", ".join(sorted({*sizes.one, *(f"*{each}" for each in sizes.several)}))
    why = str(error)
    if isinstance(error, LookupError):
        why = f"{error} has no size"
    raise SpecError(
        f"hostcall: {of} of `{name}` is annotated {kind.shown}, which has no meaning:"
        f" {why}. The arguments name {known or 'nothing'}. A result has names of"
        " arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or say"
        " with result= what the function returns",
        code="hc-result-spec",
    ) from error
