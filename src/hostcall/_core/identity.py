"""What tells two calls apart whose users' objects may say that they are equal.

It decides which calls of live programs share a slot: one of the four equalities
(docs/design/equalities.md), and the strictest.
"""

from __future__ import annotations

import types
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

# The metadata of a field of a dataclass that follows from its other fields.
FOLLOWS = types.MappingProxyType({"follows": True})


def identity(value: Any) -> Hashable:
    """Equal only for things that nobody can tell apart, while both are alive.

    What calls are made of (hostcall's dataclasses that don't change, tuples, structures
    of pytrees) is looked into, part by part in a row, since it may be deeper than
    Python's stack. JAX's avals, dtypes of keys and shardings are compared as JAX
    compares them. Anything else is a user's object, which is only itself: none of its
    code runs here. So is a dict or list, which may be large (the globals of a module)
    or hold itself.
    """
    identities = list[Hashable]()
    stack = [value]
    while stack:
        value = stack.pop()
        kind: type = type(value)
        if id(kind) in _PLAIN:
            identities.append((kind, value))  # with its type: True is not 1
        elif (components := _parts(value, kind)) is not None:
            # With their number: else (1, (2, 3)) and (1, (2,), 3) would be one row.
            identities.append((kind, len(components)))
            stack += components
        elif kind is float or kind is complex:
            identities.append((kind, repr(value)))  # -0.0 is not 0.0
        elif kind is MethodType:
            # Python makes a new object for each look at a method.
            identities.append((kind, id(value.__self__), id(value.__func__)))
        else:
            identities.append(value if issubclass(kind, _OF_JAX) else id(value))
    return tuple(identities)


_PACKAGE = __name__.partition(".")[0]
_attributes = type.__dict__["__dict__"].__get__  # runs nothing of a metaclass


def _parts(value: Any, kind: type) -> Sequence[Any] | None:
    """What a value is made of that calls are made of; None for others."""
    if kind is tuple:
        return value  # type: ignore[no-any-return]
    if kind is TreeDef:
        node_type, node_data = value.node_data() or (None, ())
        # Only the keys of a dict come as a list, which would count as a user's object.
        data = tuple(node_data) if node_type is dict else node_data
        return node_type, data, *value.children()
    if kind is Opaque:
        return (value.value,)
    # Dataclasses of hostcall's that have a hash by their fields: all that they are
    # follows from what they were made of. Functions and rules are among them.
    attributes = _attributes(kind)
    dataclass = attributes.get("__dataclass_params__")
    package, _, _ = str(attributes.get("__module__")).partition(".")
    if dataclass is None or package != _PACKAGE:
        return None
    if not dataclass.frozen and not dataclass.unsafe_hash:
        return None
    return [
        getattr(value, field.name)
        for field in fields(kind)
        if field.init and "follows" not in field.metadata
    ]
