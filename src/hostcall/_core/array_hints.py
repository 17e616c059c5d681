"""Annotations of jaxtyping's, read: the words of an array's shape, trees of arrays, and
the sizes that names have in one call.

A word is what jaxtyping's own reader makes of it: signs in front ("#" broadcasts, "*"
stands for any number of axes, "_" gives no name), then a name, a number or an
expression. "..." is "*_".
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.result_rules import Tree, broadcast

Size = Any  # an int, or a symbolic size of an exported program
tree = jax.tree_util


# --- One array ------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """One word of a shape.

    Attributes:
        text: a name, a number or an expression, without the signs in front.
        broadcasts: whether an axis of size 1 fits too ("#").
        variadic: whether it stands for any number of axes ("*", "...").
        anonymous: whether it says nothing of the size ("_", "...").
    """

    text: str
    broadcasts: bool = False
    variadic: bool = False
    anonymous: bool = False

    @classmethod
    def read(cls, word: str) -> Word:
        if word == "...":
            return cls("...", variadic=True, anonymous=True)
        signs = ""
        text = word
        while text and (text[0] in "#*_?" or text.count("=") == 1):
            if text[0] in "#*_?":
                signs += text[0]
                text = text[1:]
            else:
                text = text.partition("=")[2]  # "rows=3": the name is for readers
        # The size of "?n" is another one in each leaf of a tree.
        return cls(
            text=text or word,
            broadcasts="#" in signs,
            variadic="*" in signs,
            anonymous="_" in signs or "?" in signs,
        )

    @property
    def is_name(self) -> bool:
        return self.text.isidentifier()


@dataclass(frozen=True)
class ArrayHint:
    """The annotation of one array.

    Attributes:
        shown: how the user wrote it.
        words: of its shape.
        dtypes: the names of the dtypes that it allows, or patterns of such names; None
            if it allows all.
    """

    shown: str
    words: tuple[Word, ...]
    dtypes: tuple[str | re.Pattern[str], ...] | None

    @functools.cached_property
    def variadic(self) -> int | None:
        """The position of the word that stands for any number of axes."""
        found = [n for n, word in enumerate(self.words) if word.variadic]
        return found[0] if found else None

    @functools.cached_property
    def only_dtype(self) -> np.dtype | None:
        """The dtype that it says; None if it allows several."""
        if self.dtypes is None or len(self.dtypes) != 1:
            return None
        (name,) = self.dtypes
        return _dtype_of(name)

    def allows(self, dtype: Any, weak_type: bool = False) -> bool:
        """Whether an array of this dtype fits; a Python number becomes what the
        annotation asks for.
        """
        if self.dtypes is None:
            return True
        known = self._allowed.get((dtype, weak_type))
        if known is None:
            known = self._allowed[dtype, weak_type] = self._allows(dtype, weak_type)
        return known

    @functools.cached_property
    def _allowed(self) -> dict[tuple[Any, bool], bool]:
        """The answers that `allows` gave: NumPy takes microseconds for a name."""
        return {}

    def _allows(self, dtype: Any, weak_type: bool) -> bool:
        assert self.dtypes is not None, "`allows` knows that answer"
        if not isinstance(dtype, np.dtype):
            return "prng_key" in self.dtypes and _jax.is_key_dtype(dtype)
        name = dtype.name
        for each in self.dtypes:
            is_name = isinstance(each, str)
            if (each == name) if is_name else re.match(each, name) is not None:
                return True
            if weak_type and is_name and _becomes(dtype, each):
                return True
        return False


def _becomes(weak: np.dtype, name: str | re.Pattern[str]) -> bool:
    """Whether a Python number of this dtype becomes one of the dtype of this name."""
    dtype = _dtype_of(name)
    return dtype is not None and jnp.promote_types(dtype, weak) == dtype


def _dtype_of(name: str | re.Pattern[str]) -> np.dtype | None:
    """The dtype of this name; None for a pattern, and for what is no dtype of NumPy's,
    as "prng_key".
    """
    try:
        return np.dtype(name) if isinstance(name, str) else None
    except TypeError:
        return None


# --- Trees ----------------------------------------------------------------------------


@dataclass(frozen=True)
class OneOf:
    """The annotation of an argument that may be one of several types: a union, or
    jaxtyping's `Float[ArrayLike, "n"]`. Those that are no arrays say nothing.
    """

    kinds: tuple[ArrayHint, ...]


@dataclass(frozen=True)
class TreeHint:
    """The annotation of a tuple, TypedDict, NamedTuple or dataclass.

    Attributes:
        annotation: the class, or the tuple of types.
    """

    annotation: Any

    @functools.cached_property
    def parts(self) -> dict[Any, Hint | None]:
        """The annotation of each part, by its number or name; None for one that says
        nothing. Read when it is asked for: a class may name itself.
        """
        if typing.get_origin(self.annotation) is tuple:
            return dict(enumerate(map(read_hint, typing.get_args(self.annotation))))
        hints = typing.get_type_hints(self.annotation)
        if dataclasses.is_dataclass(self.annotation):
            names = [each.name for each in dataclasses.fields(self.annotation)]
            return {name: read_hint(hints[name]) for name in names}
        return {name: read_hint(hint) for name, hint in hints.items()}

    def unsaid(self, of: str, around: tuple[Any, ...] = ()) -> str:
        """What the annotation of a result leaves open, in words for a message; "" if it
        says all.
        """
        if self.annotation in around:
            return f"whose part {of} is of its own kind. A result has so many arrays"
        if missing := getattr(self.annotation, "__optional_keys__", None):
            return (
                f"whose keys {', '.join(sorted(missing))} may be missing. A result has"
                " all of them"
            )
        for key, part in self.parts.items():
            where = f"{of}[{key}]" if isinstance(key, int) else f"{of}.{key}"
            if isinstance(part, OneOf):
                return f"whose part {where} is one of several types. A result has one"
            if part is None and key not in self._defaults:
                return (
                    f"whose part {where} is annotated as no array, and has no default."
                    " Annotate it with jaxtyping"
                )
            if isinstance(part, TreeHint):
                why = part.unsaid(where, (*around, self.annotation))
                if why:
                    return why
        if self._is_leaf():
            name = self.annotation.__name__
            return (
                f"of which {name} is no pytree. Register it:"
                f" jax.tree_util.register_dataclass({name})"
            )
        return ""

    def _is_leaf(self) -> bool:
        """Whether this is a dataclass that JAX knows nothing of."""
        if not dataclasses.is_dataclass(self.annotation):
            return False
        made = self.put_together({})
        return any(leaf is made for leaf in tree.tree_leaves(made))

    @functools.cached_property
    def _defaults(self) -> Mapping[str, Any]:
        """The values of fields that have a default."""
        if not isinstance(self.annotation, type):
            return {}
        if not dataclasses.is_dataclass(self.annotation):
            return dict(getattr(self.annotation, "_field_defaults", {}))
        found: dict[str, Any] = {}
        for each in dataclasses.fields(self.annotation):
            if each.default is not dataclasses.MISSING:
                found[each.name] = each.default
            elif each.default_factory is not dataclasses.MISSING:
                found[each.name] = each.default_factory()
        return found

    def put_together(self, parts: Mapping[Any, Tree]) -> Tree:
        """The tree with these parts, and its defaults for what is no array."""
        if typing.get_origin(self.annotation) is tuple:
            return tuple(parts.values())
        whole = {**self._defaults, **parts}
        if typing.is_typeddict(self.annotation):
            return whole
        if issubclass(self.annotation, tuple):
            return self.annotation(**whole)
        # As unflattening does: the class's own __init__ may compute with its fields.
        made = object.__new__(self.annotation)
        for name in self.parts:
            object.__setattr__(made, name, whole.get(name))
        return made


Hint: TypeAlias = ArrayHint | TreeHint | OneOf


# --- Reading --------------------------------------------------------------------------

_ALIAS = getattr(typing, "TypeAliasType", ())  # since Python 3.12
_UNIONS = (typing.Union, types.UnionType)


def read_hint(annotation: Any) -> Hint | None:
    """Reads an annotation; None if it is neither an array's nor a tree's."""
    annotation = meant(annotation)
    array = _array_hint(annotation)
    if array is not None:
        return array
    origin = typing.get_origin(annotation)
    if origin in _UNIONS:
        kinds = [_array_hint(meant(each)) for each in typing.get_args(annotation)]
        arrays = tuple([kind for kind in kinds if kind is not None])
        return OneOf(arrays) if arrays else None
    if origin is tuple:
        of_any_length = Ellipsis in typing.get_args(annotation)
        return None if of_any_length else TreeHint(annotation)
    if not isinstance(annotation, type):
        return None
    is_named_tuple = issubclass(annotation, tuple) and hasattr(annotation, "_fields")
    is_tree = is_named_tuple or typing.is_typeddict(annotation)
    return TreeHint(annotation) if is_tree or _is_dataclass(annotation) else None


def _is_dataclass(annotation: type) -> bool:
    # Array types may have fields themselves, which are no arrays.
    return dataclasses.is_dataclass(annotation) and not issubclass(
        annotation, jax.ShapeDtypeStruct
    )


def mentions_arrays(annotation: Any, around: tuple[Any, ...] = ()) -> bool:
    """Whether jaxtyping's annotation of an array stands somewhere in another one."""
    annotation = meant(annotation)
    if annotation in around:
        return False
    hint = read_hint(annotation)
    if isinstance(hint, (ArrayHint, OneOf)):
        return True
    within = [*typing.get_args(annotation)]
    if isinstance(annotation, type):
        within += [getattr(annotation, "leaftype", None)]  # of jaxtyping's PyTree
    if isinstance(hint, TreeHint) and typing.get_origin(annotation) is not tuple:
        try:
            within += typing.get_type_hints(annotation).values()
        except Exception:  # a class of somebody who does not write jaxtyping's types
            return False
    return any(mentions_arrays(each, (*around, annotation)) for each in within)


def meant(annotation: Any) -> Any:
    """What stands behind names: `type Row = ...`, NDArray[...], Annotated[...]."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return meant(annotation.__origin__)
    if isinstance(origin, _ALIAS):
        return meant(origin.__value__[typing.get_args(annotation)])
    if isinstance(annotation, _ALIAS):
        return meant(annotation.__value__)
    return annotation


def _array_hint(annotation: Any) -> ArrayHint | None:
    """Reads jaxtyping's annotation of one array; None for any other."""
    jaxtyping = sys.modules.get("jaxtyping")
    if jaxtyping is None or not isinstance(annotation, type):
        return None
    if jaxtyping.AbstractArray not in type.mro(annotation):
        return None
    found: Any = annotation
    allowed = found.dtypes
    dtypes = None
    if isinstance(allowed, (tuple, list)):
        # NumPy 1 and 2 have two names for one dtype.
        names = ["bool" if name == "bool_" else name for name in allowed]
        dtypes = tuple(dict.fromkeys(names))
    words = tuple([Word.read(word) for word in found.dim_str.split()])
    return ArrayHint(found.__name__, words, dtypes)


def shown(annotation: Any) -> str:
    """How the user wrote an annotation."""
    found = _array_hint(annotation)
    if found is not None:
        return found.shown
    is_class = isinstance(annotation, type) and typing.get_origin(annotation) is None
    return annotation.__name__ if is_class else str(annotation)


# --- Sizes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Axes:
    """The axes of a name such as `*batch`.

    Attributes:
        sizes: of the axes.
        of: the argument that had them first, for messages.
        grow: whether they are of annotations that broadcast alone, as `*#batch`: a
            later argument may have more of them, or larger ones.
    """

    sizes: tuple[Size, ...]
    of: str
    grow: bool


class Sizes:
    """The sizes that the names of an annotation have in one call.

    Attributes:
        arguments: of the call, by name, for expressions in braces: "{self.width}".
        one: the size of a name of one axis, and the argument that had it first.
        several: the axes of a name such as `*batch`.
        ones: names that broadcast, of which an argument had an axis of size 1.
        objects: arguments without an annotation, such as `self`. The annotations of
            their fields have the sizes of names that no other argument has.
    """

    def __init__(self, arguments: Mapping[str, Any], objects: Sequence[Any]) -> None:
        self.arguments = arguments
        self.objects = objects
        self.one: dict[str, tuple[Size, str]] = {}
        self.several: dict[str, Axes] = {}
        self.ones: set[str] = set()

    def names(self) -> str:
        """All names that have a size, for messages."""
        one = {*self.one, *self.ones}
        return ", ".join(sorted({*one, *(f"*{each}" for each in self.several)}))

    def copied(self) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
        return dict(self.one), dict(self.several), set(self.ones)

    def restore(self, known: tuple[dict[str, Any], dict[str, Any], set[str]]) -> None:
        """Forgets what was bound since `copied`."""
        self.one, self.several, self.ones = known

    def bind(self, kind: ArrayHint, shape: tuple[Size, ...], of: str) -> str:
        """Compares a shape with an annotation; returns what does not fit, or ""."""
        at = kind.variadic
        fixed = len(kind.words) - (at is not None)
        if len(shape) < fixed or (at is None and len(shape) != fixed):
            least = "at least " if at is not None else ""
            axes = "axis" if fixed == 1 else "axes"
            have = "1 axis" if len(shape) == 1 else f"{len(shape)} axes"
            return f"it has {have}, and the annotation {least}{fixed} {axes}"
        if at is None:
            return self._bind_axes(kind.words, shape, of)
        after = len(kind.words) - at - 1
        end = len(shape) - after
        return (
            self._bind_axes(kind.words[:at], shape[:at], of)
            or self._bind_several(kind.words[at], shape[at:end], of)
            or self._bind_axes(kind.words[at + 1 :], shape[end:], of)
        )

    def _bind_axes(self, words: Sequence[Word], sizes: Sequence[Size], of: str) -> str:
        for word, size in zip(words, sizes, strict=True):
            if word.anonymous:
                continue
            if word.broadcasts and not _jax.is_symbolic(size) and size == 1:
                self.ones.add(word.text)
                continue
            if not word.is_name:
                wanted = self.size(word.text)
                if wanted != size:
                    return f"it has {size} where {word.text} is {wanted}"
                continue
            known, first = self.one.setdefault(word.text, (size, of))
            if known != size:
                name = word.text
                return f"it has {name}={size}, and {first} has {name}={known}"
        return ""

    def _bind_several(self, word: Word, sizes: tuple[Size, ...], of: str) -> str:
        if word.anonymous:
            return ""
        name = word.text
        known = self.several.get(name)
        if known is None:
            self.several[name] = Axes(sizes, of, word.broadcasts)
            return ""
        try:
            both = broadcast([known.sizes, sizes])
        except ValueError:
            both = None
        fits = (known.grow or both == known.sizes) and (
            word.broadcasts or both == sizes
        )
        if both is None or not fits:
            return f"it has *{name}={sizes}, and {known.of} has *{name}={known.sizes}"
        self.several[name] = Axes(both, known.of, known.grow and word.broadcasts)
        return ""

    def size(self, text: str) -> Size:
        """The size that a name, a number or an expression stands for.

        Raises:
            LookupError: a name has no size.
            SyntaxError: the text is no expression of sizes.
            Exception: an expression fails.
        """
        if text.isdigit():
            return int(text)
        if text.isidentifier():
            return self._named(text)
        # jaxtyping puts the values of braces into the text, and reads it then.
        plain = text.replace("{", "(").replace("}", ")")
        return _computed(ast.parse(plain, mode="eval").body, self._named)

    def _named(self, name: str) -> Any:
        """What a name in an expression stands for."""
        if name in self.one:
            return self.one[name][0]
        if name in self.ones:
            return 1
        of_fields = self._fields
        if name in of_fields:
            return of_fields[name][0]
        found = self.arguments[name]
        if isinstance(found, jax.ShapeDtypeStruct) and not found.shape:
            raise ValueError(
                f"{name!r} is an argument whose value the program does not know yet"
            )
        return found

    @functools.cached_property
    def _fields(self) -> Mapping[str, tuple[Size, str]]:
        """The sizes in the annotated fields of `objects`."""
        found = Sizes({}, ())
        for each in self.objects:
            hint = read_hint(type(each))
            if not isinstance(hint, TreeHint) or not mentions_arrays(type(each)):
                continue
            for name, part in hint.parts.items():
                shape = getattr(getattr(each, name, None), "shape", None)
                if isinstance(part, ArrayHint) and isinstance(shape, tuple):
                    found.bind(part, shape, "a field")
        return found.one

    def shape(self, kind: ArrayHint) -> tuple[Size, ...]:
        """The shape that an annotation of a result stands for; raises as `size`."""
        sizes: list[Size] = []
        for word in kind.words:
            if word.anonymous:
                raise LookupError(word.text)
            if word.variadic:
                sizes += self.several[word.text].sizes
            else:
                sizes.append(self.size(word.text))
        return tuple(sizes)

    def resized(self, kind: ArrayHint, shape: tuple[Size, ...]) -> tuple[Size, ...]:
        """Another shape of an argument, with these sizes where it had others."""
        at = len(kind.words) if kind.variadic is None else kind.variadic
        after = len(kind.words) - at - 1
        end = len(shape) - max(after, 0)
        sizes: list[Size] = []
        for number, size in enumerate(shape):
            if number < at:
                sizes.append(self._resized(kind.words[number], size))
            elif number >= end:
                word = kind.words[number - len(shape)]
                sizes.append(self._resized(word, size))
            else:
                word = kind.words[at]
                stays = word.anonymous or size == 1
                known = () if stays else self.several[word.text].sizes
                sizes.append(size if stays else known[number - end])
        return tuple(sizes)

    def _resized(self, word: Word, size: Size) -> Size:
        stays = word.anonymous or (word.broadcasts and size == 1)
        return size if stays else self.size(word.text)


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}
_FUNCTIONS: dict[str, Callable[..., Size]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "len": len,
}


def _computed(node: ast.AST, named: Callable[[str], Any]) -> Any:
    """The value of an expression of sizes: numbers, names, attributes and items of
    arguments, arithmetic, min, max, abs and len.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, str)):
        return node.value
    if isinstance(node, ast.Name):
        return named(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_computed(node.value, named), node.attr)
    if isinstance(node, ast.Subscript):
        return _computed(node.value, named)[_computed(node.slice, named)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand, named)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _computed(node.left, named)
        right = _computed(node.right, named)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        function = _FUNCTIONS.get(node.func.id)
        if function is not None and not node.keywords:
            return function(*[_computed(each, named) for each in node.args])
    raise SyntaxError(
        "an expression of sizes has numbers, names, attributes of arguments,"
        " + - * // % **, min, max, abs and len"
    )
