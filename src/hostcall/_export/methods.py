"""Calls of a `hc.Object` in exported programs (_export/records.py).

The factory goes by its registered name, and the declaration by value. A number that is
drawn when the object is first exported stands for its identity: programs that share an
`hc.Object` share one where they are loaded too. The host objects themselves stay; their
states travel by `save` and `restore`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from typing import Any

from hostcall._api.object.objects import Entry, Group, Object
from hostcall._core.options import Policy
from hostcall._core.process import living
from hostcall._core.spec import Results
from hostcall._export import codec, registry
from hostcall._export.codec import Malformed, NotPortable
from hostcall._export.records import name_of

_lock = threading.Lock()  # no two programs make the objects of one number

_HOOKS = ("close", "save", "restore")
_DECLARED = {
    "name": str,
    "order": str,
    "vmap_method": str,
    "concurrency": int | None,
    **dict.fromkeys(_HOOKS, str | None),
}
_TEXT = {
    "registered": tuple[str, int],
    "object": str,
    "method": str,
    "methods": dict[str, Results],
    "declared": Any,
}


def tell(entry: Entry, exported: bool) -> dict[str, object]:
    group = entry.group
    declared = {"name": group.name, **group.options}
    if not exported:
        raise NotPortable(
            "its objects are in this process, and only an exported program makes others"
            " elsewhere. Export it (hc.export)"
        )
    name = name_of(
        group.factory,
        f"the factory of the hc.Object `{group.name}` has no name in other processes."
        " Register it, and in every process that loads the program:"
        f' @hc.register("my_package.{group.name}", version=1) at the class',
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
        group.number = group.number or secrets.token_hex(8)
    told = {
        "registered": tuple(name),
        "object": group.number,
        "method": entry.name,
        "methods": group.methods,
        "declared": {each: declared[each] for each in _DECLARED},
    }
    return {each: codec.tell_value(value, f"{each}=") for each, value in told.items()}


def _object_of(told: Any) -> Object:
    """The `hc.Object` of an exported call; its host objects are made when called."""
    found = codec.read_record(told, _TEXT)
    declared = codec.read_record(found["declared"], _DECLARED)
    if found["method"] not in found["methods"]:
        raise Malformed(f"the method {found['method']!r}, which is not declared")
    for hook in _HOOKS:
        if not _is_hook(declared[hook]):
            raise Malformed(f"the method {declared[hook]!r} as {hook}=")
    factory = registry.find(*found["registered"])
    # It checks the names of the methods.
    made = Object(factory, methods=found["methods"], **declared)
    with _lock:
        same = (g for g in living(Group) if g.number == found["object"] and not g.ended)
        group = next(same, made._group)
        group.number = found["object"]
        made._attach(group)
    return made


def objects_of(functions: Iterable[Any]) -> dict[str, Object]:
    """Each `hc.Object` whose methods are among the functions of these calls, by its
    name; the second of a name is "name#2".
    """
    found: dict[str, Object] = {}
    told_of = {told["object"]: told for kind, told in functions if kind == "object"}
    for told in told_of.values():
        made = _object_of(told)
        name, count = made._group.name, 1
        while name in found:
            count += 1
            name = f"{made._group.name}#{count}"
        found[name] = made
    return found


def _is_hook(given: object) -> bool:
    """Whether a file may give this as close=, save= or restore=: methods are looked up
    on registered objects by these texts.
    """
    if given is None:
        return True
    return isinstance(given, str) and given.isidentifier() and given[0] != "_"


def read(told: Any) -> tuple[Entry, Policy]:
    group, method = _object_of(told)._group, told["method"]
    # The object of this number may be one of this process, with other methods.
    if method not in group.methods:
        raise Malformed(
            f"the method {method!r}, which the hc.Object `{group.name}` with this"
            " number does not declare here"
        )
    policy = Policy.of({"concurrency": group.options["concurrency"]})
    return Entry(group, method), policy
