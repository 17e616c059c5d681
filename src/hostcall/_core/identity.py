"""What tells two calls apart whose users' objects may say that they are equal."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields
from types import MethodType, NoneType
from typing import Any

import jax

from hostcall._core.spec import Opaque
from hostcall._jax.types import Aval, KeyDtype, TreeDef

# By their numbers: the metaclass of a user's class may hash in a way of its own.
_PLAIN = frozenset(map(id, (int, bool, str, bytes, NoneType)))
_OF_JAX = Aval, KeyDtype, jax.sharding.Sharding


def identity(thing: Any) -> Hashable:
    """Equal only for things that nobody can tell apart, while both are alive.

    What calls are made of (hostcall's frozen dataclasses, tuples, structures of
    pytrees) is looked into, part by part in a row, since it may be deeper than Python's
    stack. JAX's avals, dtypes of keys and shardings are compared as JAX compares them.
    Anything else is a user's object, which is only itself: none of its code runs here.
    So is a dict or list, which may be large (the globals of a module) or hold itself.
    """
    told = list[Hashable]()
    left = [thing]
    while left:
        one = left.pop()
        kind: type = type(one)
        if id(kind) in _PLAIN:
            told.append((kind, one))  # with its type: True is not 1
        elif (parts := _parts(one, kind)) is not None:
            told.append((kind, len(parts)))
            left += parts
        elif kind is float or kind is complex:
            told.append((kind, repr(one)))  # -0.0 is not 0.0
        elif kind is MethodType:
            told.append((kind, id(one.__self__), id(one.__func__)))
        else:
            told.append(one if issubclass(kind, _OF_JAX) else id(one))
    return tuple(told)


_PACKAGE = __name__.partition(".")[0]
_attributes = type.__dict__["__dict__"].__get__  # runs nothing of a metaclass


def _parts(thing: Any, kind: type) -> Sequence[Any] | None:
    """What a thing is made of that calls are made of; None for others."""
    if kind is tuple:
        return thing  # type: ignore[no-any-return]
    if kind is TreeDef:
        of, more = thing.node_data() or (None, ())
        keys_or_more = tuple(more) if of is dict else more
        return of, keys_or_more, *thing.children()
    if kind is Opaque:
        return (thing.value,)
    # Frozen dataclasses of hostcall's: all that they are follows from what they were
    # made of. Functions and rules are among them.
    its = _attributes(kind)
    how = its.get("__dataclass_params__")
    package, _, _ = str(its.get("__module__")).partition(".")
    if how is None or package != _PACKAGE or not how.frozen:
        return None
    return [getattr(thing, f.name) for f in fields(kind) if f.init]
