"""Calls of a `hc.Object` in exported programs (_engine/portable.py).

The factory goes by its registered name, and the declaration by value. A number that is
drawn when the object is first exported stands for its identity: programs that share an
`hc.Object` share one where they are loaded too. The host objects themselves stay; their
states travel by `save` and `restore`.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp

from hostcall._api.object.entry import Entry
from hostcall._api.object.group import Group
from hostcall._api.object.handle import Object
from hostcall._core import portable, registry
from hostcall._core.portable import NotPortable
from hostcall._core.spec import parse_result
from hostcall._engine.portable import add_kind

# The objects of this process that programs name, by number. Guards itself by the lock.
_objects: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
_lock = threading.Lock()

_HOOKS = ("close", "save", "restore")
_PLAIN = ("order", "name", "vmap_method", "concurrency")


def _tell(entry: Entry, exported: bool) -> Any:
    group = entry.group
    declared = group.declared
    if not exported:
        raise NotPortable(
            "its objects are in this process, and only an exported program makes others"
            " elsewhere. Export it (hc.export)"
        )
    name = registry.name_of_held(declared["factory"])
    if name is None:
        raise NotPortable(
            f"the factory of the hc.Object `{group.name}` has no name in other"
            " processes. Register it, and in every process that loads the program:"
            f' @hc.register("my_package.{group.name}", version=1) at the class'
        )
    for hook in _HOOKS:
        if callable(declared[hook]):
            raise NotPortable(
                f"{hook}= of the hc.Object `{group.name}` is a function. Give the name"
                " of a method of the object"
            )
    if declared["executor"] is not None:
        raise NotPortable(
            f"executor= of the hc.Object `{group.name}` is an object of this process"
        )
    with _lock:
        number = group.number = group.number or secrets.token_hex(8)
        _objects[number] = group
    return {
        "registered": list(name),
        "object": number,
        "method": entry.name,
        "named": entry.named,
        "methods": {
            method: portable.tell_results(parse_result(result, method))
            for method, result in declared["methods"].items()
        },
        "declared": {
            key: portable.tell_plain(declared[key], f"{key}= of `{group.name}`")
            for key in (*_HOOKS, *_PLAIN)
        },
    }


def object_of(told: Any) -> Object:
    """The `hc.Object` of an exported call; its host objects are made when called."""
    factory = registry.find(*told["registered"])
    methods = {
        str(method): _spec(portable.read_results(results))
        for method, results in told["methods"].items()
    }
    declared = {key: told["declared"][key] for key in (*_HOOKS, *_PLAIN)}
    made = Object(factory, methods=methods, **declared)
    number = str(told["object"])
    with _lock:
        group = _objects.setdefault(number, made._group)
        group.number = number
    made._attach(group)
    return made


def _spec(results: Any) -> Any:
    def zeros() -> Any:
        return results.fill([jnp.zeros(a.shape, a.dtype) for a in results.avals])

    return jax.eval_shape(zeros)


def _read(told: Any) -> tuple[Entry, dict[str, Any]]:
    group = object_of(told)._group
    return Entry(group, str(told["method"]), bool(told["named"])), {}


add_kind("object", _tell, _read)
