"""Reads annotations of jaxtyping's: the words of an array's shape, and trees of arrays.

    Float[np.ndarray, "batch n"]    an `ArrayHint`, of two `Word`s
    tuple, TypedDict, dataclass     a `TreeHint`, whose parts are hints
    a union of arrays               `OneOf` these
    anything else                   None: it says nothing of arrays

A word is what jaxtyping's own reader makes of it:

    annotation = { word }                     divided by blanks
    word       = "..." | { sign } [ readers "=" ] ( name | number | expression )
    sign       = "#" | "*" | "_" | "?"

"#" broadcasts, "*" stands for any number of axes, and "_" gives no name. "..." is "*_".
An expression may have braces: "{2*n}", "{self.width}". Which sizes the words have in
one call is a matter of `hint_sizes`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.result_rules import Tree

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

    # Words in front of the variadic one line up with the axes of a shape from the left,
    # those behind it from the right, and the variadic one has what is left between:
    #
    #     words     "batch *middle n"       front: batch, behind: n
    #     shape     (5, 2, 2, 3)            batch=5, middle=(2, 2), n=3

    @functools.cached_property
    def variadic(self) -> Word | None:
        """The word that stands for any number of axes."""
        # jaxtyping refuses annotations with two of them.
        return next((word for word in self.words if word.variadic), None)

    @functools.cached_property
    def front(self) -> tuple[Word, ...]:
        """The words in front of that; all words if there is none."""
        if self.variadic is None:
            return self.words
        return self.words[: self.words.index(self.variadic)]

    @functools.cached_property
    def behind(self) -> tuple[Word, ...]:
        """The words behind that."""
        if self.variadic is None:
            return ()
        return self.words[self.words.index(self.variadic) + 1 :]

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
    if not isinstance(name, str):
        return None
    try:
        return np.dtype(name)
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
            members = typing.get_args(self.annotation)
            return {number: read_hint(member) for number, member in enumerate(members)}
        annotations = typing.get_type_hints(self.annotation)
        names = list(annotations)
        if dataclasses.is_dataclass(self.annotation):
            # `annotations` may have class variables too, which are no parts.
            names = [field.name for field in dataclasses.fields(self.annotation)]
        return {name: read_hint(annotations[name]) for name in names}

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
            keys = ", ".join(sorted(optional_keys))
            return f"whose keys {keys} may be missing. A result has all of them"
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
        # As JAX does where it unflattens such a class: its own __init__ may compute
        # with its fields, which are specs here, and a frozen class has no other way.
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
