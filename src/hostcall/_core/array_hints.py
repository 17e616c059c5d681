"""Annotations of jaxtyping's, read: the words of an array's shape, trees of arrays, and
the sizes that names have in one call.

A word is what jaxtyping's own reader makes of it:

    annotation = { word }                     divided by blanks
    word       = "..." | { sign } [ readers "=" ] ( name | number | expression )
    sign       = "#" | "*" | "_" | "?"

"#" broadcasts, "*" stands for any number of axes, and "_" gives no name. "..." is "*_".
An expression may have braces: "{2*n}", "{self.width}".

Three parts: the annotation of one array, trees of such, and `Sizes`, which binds the
names in arguments' annotations (`bind`) and looks them up in a result's (`shape`).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
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
Shape: TypeAlias = tuple[Size, ...]
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
        # "?n" has another size in each leaf of a tree, so it says as little as "_".
        return cls(
            text=text or word,  # "_" and "#" alone are their own text, for messages
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
        # jaxtyping refuses annotations with two of them.
        positions = [n for n, word in enumerate(self.words) if word.variadic]
        return positions[0] if positions else None

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
            known = self._allows(dtype, weak_type)
            self._allowed[dtype, weak_type] = known
        return known

    @functools.cached_property
    def _allowed(self) -> dict[tuple[Any, bool], bool]:
        """The answers that `allows` gave: NumPy takes microseconds for a name."""
        return {}

    def _allows(self, dtype: Any, weak_type: bool) -> bool:
        assert self.dtypes is not None, "`allows` knows that answer"
        if not isinstance(dtype, np.dtype):
            return "prng_key" in self.dtypes and _jax.is_key_dtype(dtype)
        for allowed in self.dtypes:
            if isinstance(allowed, re.Pattern):
                if allowed.match(dtype.name):
                    return True
            elif allowed == dtype.name or (weak_type and _becomes(dtype, allowed)):
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
            # `hints` may have class variables too, which are no parts.
            names = [field.name for field in dataclasses.fields(self.annotation)]
            return {name: read_hint(hints[name]) for name in names}
        return {name: read_hint(hint) for name, hint in hints.items()}

    def unsaid(self, path: str, outer: tuple[Any, ...] = ()) -> str:
        """What the annotation of a result leaves open, in words for a message; "" if it
        says all.

        `path` is how a reader would write this part, as "result[0].x"; `outer` are the
        annotations that this one stands in.
        """
        if self.annotation in outer:
            return f"whose part {path} is of its own kind. A result has so many arrays"
        optional_keys = getattr(self.annotation, "__optional_keys__", None)
        if optional_keys:
            return (
                f"whose keys {', '.join(sorted(optional_keys))} may be missing. A"
                " result has all of them"
            )
        for key, part in self.parts.items():
            path_of_part = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"
            why = self._unsaid_of_part(key, part, path_of_part, outer)
            if why:
                return why
        if self._is_leaf():
            name = self.annotation.__name__
            return (
                f"of which {name} is no pytree. Register it:"
                f" jax.tree_util.register_dataclass({name})"
            )
        return ""

    def _unsaid_of_part(
        self, key: Any, part: Hint | None, path: str, outer: tuple[Any, ...]
    ) -> str:
        if isinstance(part, OneOf):
            return f"whose part {path} is one of several types. A result has one"
        if part is None and key not in self._defaults:
            return (
                f"whose part {path} is annotated as no array, and has no default."
                " Annotate it with jaxtyping"
            )
        if isinstance(part, TreeHint):
            return part.unsaid(path, (*outer, self.annotation))
        return ""

    def _is_leaf(self) -> bool:
        """Whether this is a dataclass that JAX knows nothing of."""
        if not dataclasses.is_dataclass(self.annotation):
            return False
        # JAX can't be asked about a class: it takes an object apart, or returns it.
        value = self.put_together({})
        return any(leaf is value for leaf in tree.tree_leaves(value))

    @functools.cached_property
    def _defaults(self) -> Mapping[str, Any]:
        """The values of fields that have a default."""
        if not isinstance(self.annotation, type):
            return {}
        if not dataclasses.is_dataclass(self.annotation):
            return dict(getattr(self.annotation, "_field_defaults", {}))
        defaults: dict[str, Any] = {}
        for field in dataclasses.fields(self.annotation):
            if field.default is not dataclasses.MISSING:
                defaults[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                defaults[field.name] = field.default_factory()
        return defaults

    def put_together(self, specs: Mapping[Any, Tree]) -> Tree:
        """The tree with these parts, and its defaults for what is no array."""
        if typing.get_origin(self.annotation) is tuple:
            return tuple(specs.values())
        values = {**self._defaults, **specs}
        if typing.is_typeddict(self.annotation):
            return values
        if issubclass(self.annotation, tuple):
            return self.annotation(**values)
        # As unflattening does: the class's own __init__ may compute with its fields,
        # and a frozen one has no other way to set them.
        value = object.__new__(self.annotation)
        for name in self.parts:
            object.__setattr__(value, name, values.get(name))
        return value


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
        kinds = [_array_hint(meant(member)) for member in typing.get_args(annotation)]
        arrays = tuple([kind for kind in kinds if kind is not None])
        return OneOf(arrays) if arrays else None
    if origin is tuple:
        of_any_length = Ellipsis in typing.get_args(annotation)
        return None if of_any_length else TreeHint(annotation)
    return TreeHint(annotation) if _is_class_of_trees(annotation) else None


def _is_class_of_trees(annotation: Any) -> bool:
    """Whether this is a NamedTuple, a TypedDict or a dataclass."""
    if not isinstance(annotation, type):
        return False
    if typing.is_typeddict(annotation) or _is_dataclass(annotation):
        return True
    return issubclass(annotation, tuple) and hasattr(annotation, "_fields")


def _is_dataclass(annotation: type) -> bool:
    # Array types may have fields themselves, which are no arrays.
    return dataclasses.is_dataclass(annotation) and not issubclass(
        annotation, jax.ShapeDtypeStruct
    )


def mentions_arrays(annotation: Any, outer: tuple[Any, ...] = ()) -> bool:
    """Whether jaxtyping's annotation of an array stands somewhere in another one.

    `outer` are the annotations that this one stands in.
    """
    annotation = meant(annotation)
    if annotation in outer:  # a class that names itself
        return False
    hint = read_hint(annotation)
    if isinstance(hint, (ArrayHint, OneOf)):
        return True
    inner = [*typing.get_args(annotation)]
    if isinstance(annotation, type):
        inner += [getattr(annotation, "leaftype", None)]  # of jaxtyping's PyTree
    if isinstance(hint, TreeHint) and typing.get_origin(annotation) is not tuple:
        try:
            inner += typing.get_type_hints(annotation).values()
        except Exception:  # a class of somebody who does not write jaxtyping's types
            return False
    outer = (*outer, annotation)
    return any(mentions_arrays(member, outer) for member in inner)


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
    array_type: Any = annotation  # type checkers know none of jaxtyping's attributes
    dtypes = None
    if isinstance(array_type.dtypes, (tuple, list)):  # else it allows any
        # NumPy 1 and 2 have two names for one dtype.
        names = ["bool" if name == "bool_" else name for name in array_type.dtypes]
        dtypes = tuple(dict.fromkeys(names))
    words = tuple([Word.read(word) for word in array_type.dim_str.split()])
    return ArrayHint(array_type.__name__, words, dtypes)


def shown(annotation: Any) -> str:
    """How the user wrote an annotation."""
    array = _array_hint(annotation)
    if array is not None:
        return array.shown
    is_class = isinstance(annotation, type) and typing.get_origin(annotation) is None
    return annotation.__name__ if is_class else str(annotation)


# --- Sizes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Axes:
    """The axes of a name such as `*batch`.

    Attributes:
        sizes: of the axes.
        first: the argument that had them first, for messages.
        grow: whether they are of annotations that broadcast alone, as `*#batch`: a
            later argument may have more of them, or larger ones.
    """

    sizes: Shape
    first: str
    grow: bool


class Sizes:
    """The sizes that the names of an annotation have in one call.

    Attributes:
        arguments: of the call, by name, for expressions in braces: "{self.width}".
        by_name: the size of a name of one axis, and the argument that had it first.
        several: the axes of a name such as `*batch`.
        ones: names that broadcast, of which an argument had an axis of size 1.
        objects: arguments without an annotation, such as `self`. The annotations of
            their fields have the sizes of names that no other argument has.
    """

    def __init__(self, arguments: Mapping[str, Any], objects: Sequence[Any]) -> None:
        self.arguments = arguments
        self.objects = objects
        self.by_name: dict[str, tuple[Size, str]] = {}
        self.several: dict[str, Axes] = {}
        self.ones: set[str] = set()

    def names(self) -> str:
        """All names that have a size, for messages."""
        several = [f"*{name}" for name in self.several]
        return ", ".join(sorted({*self.by_name, *self.ones, *several}))

    def copied(self) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
        return dict(self.by_name), dict(self.several), set(self.ones)

    def restore(self, known: tuple[dict[str, Any], dict[str, Any], set[str]]) -> None:
        """Forgets what was bound since `copied`."""
        self.by_name, self.several, self.ones = known

    # --- Arguments --------------------------------------------------------------------

    def bind(self, kind: ArrayHint, shape: Shape, argument: str) -> str:
        """Compares a shape with an annotation; returns what does not fit, or ""."""
        position = kind.variadic
        fixed = len(kind.words) - (position is not None)
        if len(shape) < fixed or (position is None and len(shape) != fixed):
            least = "at least " if position is not None else ""
            axes = "axis" if fixed == 1 else "axes"
            have = "1 axis" if len(shape) == 1 else f"{len(shape)} axes"
            return f"it has {have}, and the annotation {least}{fixed} {axes}"
        if position is None:
            return self._bind_axes(kind.words, shape, argument)
        # Words in front line up from the left, words behind from the right; the one in
        # between has what is left of the axes.
        end = len(shape) - (len(kind.words) - position - 1)
        return (
            self._bind_axes(kind.words[:position], shape[:position], argument)
            or self._bind_several(kind.words[position], shape[position:end], argument)
            or self._bind_axes(kind.words[position + 1 :], shape[end:], argument)
        )

    def _bind_axes(
        self, words: Sequence[Word], sizes: Sequence[Size], argument: str
    ) -> str:
        """As `bind`, for words of one axis each."""
        for word, size in zip(words, sizes, strict=True):
            if word.anonymous:
                continue
            # Whether a symbolic size is 1 is not known, so that one is compared.
            if word.broadcasts and not _jax.is_symbolic(size) and size == 1:
                self.ones.add(word.text)
                continue
            if not word.is_name:
                wanted = self.size(word.text)
                if wanted != size:
                    return f"it has {size} where {word.text} is {wanted}"
                continue
            known, first = self.by_name.setdefault(word.text, (size, argument))
            if known != size:
                name = word.text
                return f"it has {name}={size}, and {first} has {name}={known}"
        return ""

    def _bind_several(self, word: Word, sizes: Shape, argument: str) -> str:
        """As `bind`, for a word of any number of axes."""
        if word.anonymous:
            return ""
        name = word.text
        known = self.several.get(name)
        if known is None:
            self.several[name] = Axes(sizes, argument, word.broadcasts)
            return ""
        try:
            both = broadcast([known.sizes, sizes])
        except ValueError:
            both = None
        # Each of the two may become what both broadcast to if it has "#"; else it has
        # to be that already.
        known_fits = known.grow or both == known.sizes
        this_fits = word.broadcasts or both == sizes
        if both is None or not known_fits or not this_fits:
            first = known.first
            return f"it has *{name}={sizes}, and {first} has *{name}={known.sizes}"
        self.several[name] = Axes(both, known.first, known.grow and word.broadcasts)
        return ""

    # --- Results ----------------------------------------------------------------------

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
        try:
            expression = ast.parse(plain, mode="eval")
        except SyntaxError as error:
            column = error.offset or len(plain) + 1  # 0: where the text ends
            raise SyntaxError(f"{text!r} can't be read at column {column}") from None
        return _computed(expression.body, self._named)

    def _named(self, name: str) -> Any:
        """What a name in an expression stands for."""
        if name in self.by_name:
            size, _ = self.by_name[name]
            return size
        if name in self.ones:  # all its axes broadcast
            return 1
        if name in self._fields:
            size, _ = self._fields[name]
            return size
        argument = self.arguments[name]
        # An array with axes may be asked for its shape: "{x.shape[0]}".
        if isinstance(argument, jax.ShapeDtypeStruct) and not argument.shape:
            raise ValueError(
                f"{name!r} is an argument whose value the program does not know yet"
            )
        return argument

    @functools.cached_property
    def _fields(self) -> Mapping[str, tuple[Size, str]]:
        """The sizes in the annotated fields of `objects`."""
        fields = Sizes({}, ())
        for owner in self.objects:
            hint = read_hint(type(owner))
            # An object of another kind is asked nothing: it may be a proxy or a Mock.
            if not isinstance(hint, TreeHint) or not mentions_arrays(type(owner)):
                continue
            for name, part in hint.parts.items():
                shape = getattr(getattr(owner, name, None), "shape", None)
                if isinstance(part, ArrayHint) and isinstance(shape, tuple):
                    fields.bind(part, shape, "a field")
        return fields.by_name

    def shape(self, kind: ArrayHint) -> Shape:
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

    # --- Drawn sizes ------------------------------------------------------------------

    def resized(self, kind: ArrayHint, shape: Shape) -> Shape:
        """Another shape of an argument, with these sizes where it had others.

        The argument was bound before, so that its shape has the axes of its words.
        """
        position = kind.variadic
        if position is None:
            return self._resized_axes(kind.words, shape)
        word = kind.words[position]
        end = len(shape) - (len(kind.words) - position - 1)
        between = shape[position:end]
        if not word.anonymous:
            # These line up from the right: an argument may have fewer of them.
            axes = self.several[word.text].sizes
            own_axes = axes[len(axes) - len(between) :]
            pairs = zip(between, own_axes, strict=True)
            between = tuple([size if old != 1 else 1 for old, size in pairs])
        in_front = self._resized_axes(kind.words[:position], shape[:position])
        behind = self._resized_axes(kind.words[position + 1 :], shape[end:])
        return in_front + between + behind

    def _resized_axes(self, words: Sequence[Word], shape: Shape) -> Shape:
        pairs = zip(words, shape, strict=True)
        return tuple([self._resized(word, size) for word, size in pairs])

    def _resized(self, word: Word, size: Size) -> Size:
        stays = word.anonymous or (word.broadcasts and size == 1)
        return size if stays else self.size(word.text)


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
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

    Not `eval`: an annotation is text, which may come from anywhere, and must call no
    function but these.
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
        compute = _OPERATORS[type(node.op)]
        return compute(_computed(node.left, named), _computed(node.right, named))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        function = _FUNCTIONS.get(node.func.id)
        if function is not None and not node.keywords:
            return function(*[_computed(argument, named) for argument in node.args])
    raise SyntaxError(
        "an expression of sizes has numbers, names, attributes of arguments,"
        " + - * // % **, min, max, abs and len"
    )
