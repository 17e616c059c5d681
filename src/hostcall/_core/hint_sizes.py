"""The sizes that the names in annotations have in one call.

    sizes = Sizes(arguments, objects)
    sizes.bind(hint, shape, "argument `x`")     compares an argument with its annotation
    sizes.shape(hint)                           looks a result's words up

For `f(x: Float["batch n"], y: Float["n"]) -> Float["batch n-1"]` and arguments of the
shapes (5, 3) and (3,), the first `bind` gives the names batch=5 and n=3, the second one
finds n=3 again, and `shape` computes (5, 2). `array_hints` reads the words.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax

from hostcall import _jax
from hostcall._core.array_hints import (
    ArrayHint,
    TreeHint,
    Word,
    mentions_arrays,
    read_hint,
)
from hostcall._core.result_rules import broadcast

Size = Any  # an int, or a symbolic size of an exported program
Shape: TypeAlias = tuple[Size, ...]


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


class Bound(NamedTuple):
    """What the names of an annotation are bound to; see `Sizes`."""

    by_name: dict[str, tuple[Size, str]]
    several: dict[str, Axes]
    ones: set[str]


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

    def copied(self) -> Bound:
        """What is bound by now, for `restore`."""
        return Bound(self.by_name.copy(), self.several.copy(), self.ones.copy())

    def restore(self, bound: Bound) -> None:
        """Forgets what was bound since `copied`."""
        self.by_name = bound.by_name
        self.several = bound.several
        self.ones = bound.ones

    # --- Arguments --------------------------------------------------------------------

    def bind(self, kind: ArrayHint, shape: Shape, argument: str) -> str:
        """Compares a shape with an annotation; returns what does not fit, or ""."""
        front = len(kind.front)
        behind = len(kind.behind)
        is_fixed = kind.variadic is None
        least = front + behind
        if len(shape) < least or (is_fixed and len(shape) > least):
            return _wrong_count(len(shape), least, is_fixed)
        end = len(shape) - behind
        why = self._bind_axes(kind.front, shape[:front], argument)
        if not why and kind.variadic is not None:
            why = self._bind_several(kind.variadic, shape[front:end], argument)
        return why or self._bind_axes(kind.behind, shape[end:], argument)

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
        # Axes of arguments come before fields of objects, and these before values.
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
                    # A field that does not fit is no mistake of this call.
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
        front = len(kind.front)
        end = len(shape) - len(kind.behind)
        between = shape[front:end]
        word = kind.variadic
        if word is not None and not word.anonymous:
            # These line up from the right: an argument may have fewer of them.
            sizes = self.several[word.text].sizes
            sizes = sizes[len(sizes) - len(between) :]
            pairs = zip(between, sizes, strict=True)
            between = tuple([size if old != 1 else 1 for old, size in pairs])
        return (
            *self._resized_axes(kind.front, shape[:front]),
            *between,
            *self._resized_axes(kind.behind, shape[end:]),
        )

    def _resized_axes(self, words: Sequence[Word], shape: Shape) -> Shape:
        pairs = zip(words, shape, strict=True)
        return tuple([self._resized(word, size) for word, size in pairs])

    def _resized(self, word: Word, size: Size) -> Size:
        stays = word.anonymous or (word.broadcasts and size == 1)
        return size if stays else self.size(word.text)


def _wrong_count(count: int, least: int, is_fixed: bool) -> str:
    """Why so many axes do not fit an annotation of `least` axes, or of more."""
    have = "1 axis" if count == 1 else f"{count} axes"
    wanted = "1 axis" if least == 1 else f"{least} axes"
    at_least = "" if is_fixed else "at least "
    return f"it has {have}, and the annotation {at_least}{wanted}"


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
