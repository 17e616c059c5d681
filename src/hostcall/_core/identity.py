"""What tells two calls apart whose users' objects may say that they are equal."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from dataclasses import fields
from types import MethodType, NoneType
from typing import Any

import jax

from hostcall._core.spec import Static
from hostcall._jax.types import Aval, KeyDtype, TreeDef

_PLAIN = frozenset((int, bool, str, bytes, NoneType))  # True is not 1: with their types
_OF_JAX = Aval, KeyDtype, jax.sharding.Sharding


def identity(thing: Any) -> Hashable:
    """Equal only for things that nobody can tell apart, while both are alive.

    What calls are made of (hostcall's frozen dataclasses, containers, structures of
    pytrees) is looked into. JAX's avals, dtypes of keys and shardings are compared as
    JAX compares them. Anything else is a user's object, which is only itself: none of
    its code runs here.
    """
    kind: type = type(thing)
    if kind in _PLAIN:
        return kind, thing
    if kind is Aval:
        return thing  # type: ignore[no-any-return]
    if kind is tuple or kind is list:
        return kind, *map(identity, thing)
    if kind is TreeDef:
        return kind, *_nodes(thing)
    if kind is Static:
        return kind, identity(thing.value)
    if (names := _fields(kind)) is not None:
        # Of functions and rules, too, which are compared by what they hold.
        return kind, *[identity(getattr(thing, name)) for name in names]
    if kind is float or kind is complex:
        return kind, repr(thing)  # -0.0 is not 0.0
    if kind is dict:
        return kind, *((identity(k), identity(v)) for k, v in thing.items())
    if kind is MethodType:
        return kind, id(thing.__self__), id(thing.__func__)
    return thing if issubclass(kind, _OF_JAX) else id(thing)


def _nodes(structure: TreeDef) -> Iterator[Hashable]:
    """Its nodes in a row, since it may be deeper than Python's stack."""
    left = [structure]
    while left:
        node = left.pop()
        children = node.children()
        left += children
        yield len(children), identity(node.node_data())


_PACKAGE = __name__.partition(".")[0]
_attributes = type.__dict__["__dict__"].__get__  # runs nothing of a metaclass


@functools.lru_cache
def _fields(kind: type) -> tuple[str, ...] | None:
    """Those of a frozen dataclass of hostcall's, which hold all that it is."""
    its = _attributes(kind)
    how = its.get("__dataclass_params__")
    package, _, _ = str(its.get("__module__")).partition(".")
    if how is None or package != _PACKAGE or not how.frozen:
        return None
    return tuple(f.name for f in fields(kind))
