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
from collections.abc import Iterable, Sequence
from typing import Any

from hostcall._api.object.entry import Entry
from hostcall._api.object.group import Group
from hostcall._api.object.handle import Object
from hostcall._core import portable, registry
from hostcall._core.portable import Malformed, NotPortable
from hostcall._engine.params.equation import Policy
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
            registry.why_nameless(declared["factory"])
            or f"the factory of the hc.Object `{group.name}` has no name in other"
            " processes. Register it, and in every process that loads the program:"
            f' @hc.register("my_package.{group.name}", version=1) at the class'
        )
    for hook in _HOOKS:
        if not _is_hook(declared[hook]):
            raise NotPortable(
                f"{hook}= of the hc.Object `{group.name}` is a function, or the name of"
                " a private method. Give the name of a public method of the object"
            )
    if declared["executor"] is not None:
        raise NotPortable(
            f"executor= of the hc.Object `{group.name}` is an object of this process"
        )
    with _lock:
        number = group.number = group.number or secrets.token_hex(8)
        _objects.setdefault(number, group)
    return {
        "registered": list(name),
        "object": number,
        "method": entry.name,
        "named": entry.named,
        "methods": {
            method: portable.tell_results(results)
            for method, results in declared["methods"].items()
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
        str(method): portable.read_results(results)
        for method, results in told["methods"].items()
    }
    declared = {key: told["declared"][key] for key in (*_HOOKS, *_PLAIN)}
    made = Object(factory, methods=methods, **declared)
    number = str(told["object"])
    with _lock:
        group = _objects.get(number)
        if group is None or group.ended:
            closed, group = group, made._group
            group.number = number
            group.generation = 0 if closed is None else closed.generation + 1
            _objects[number] = group
    made._attach(group)
    return made


def objects_of(told: Sequence[Any]) -> dict[str, Object]:
    """The `hc.Object` of each description, by its name; the second of a name is
    "name#2".
    """
    found: dict[str, Object] = {}
    for each in told:
        made = object_of(each)
        name, count = made._group.name, 1
        while name in found:
            count += 1
            name = f"{made._group.name}#{count}"
        found[name] = made
    return found


def descriptions(calls: Iterable[Any]) -> list[Any]:
    """What `objects_of` needs of these exported calls: each object once."""
    found: dict[str, Any] = {}
    for kind, told in calls:
        if kind == "object":
            shared = {key: told[key] for key in told if key not in ("method", "named")}
            found.setdefault(told["object"], shared)
    return list(found.values())


def _is_hook(given: Any) -> bool:
    """Whether a file may give this as close=, save= or restore=: methods are looked up
    on registered objects by these texts.
    """
    if given is None:
        return True
    return isinstance(given, str) and given.isidentifier() and given[0] != "_"


def _check(told: Any) -> None:
    # `hc.Object` checks the names of the methods that are declared.
    if told["method"] not in told["methods"]:
        raise Malformed(f"the method {told['method']!r}, which is not declared")
    for hook in _HOOKS:
        if not _is_hook(told["declared"][hook]):
            raise Malformed(f"the method {told['declared'][hook]!r} as {hook}=")


def _read(told: Any) -> tuple[Entry, dict[str, Any]]:
    group = object_of(told)._group
    # The object of this number may be one of this process, with other methods.
    if told["method"] not in group.methods:
        raise Malformed(
            f"the method {told['method']!r}, which the hc.Object `{group.name}` with"
            " this number does not declare here"
        )
    policy = Policy.of(concurrency=group.declared["concurrency"])
    return Entry(group, told["method"], bool(told["named"])), {"policy": policy}


add_kind("object", _tell, _read, _check)
