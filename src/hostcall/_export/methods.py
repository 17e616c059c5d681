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
from dataclasses import dataclass
from typing import Any

from hostcall._api.object.entries import Entry
from hostcall._api.object.groups import Group
from hostcall._api.object.objects import Object, handle_of
from hostcall._core.codec import Json, Malformed, NotPortable
from hostcall._core.options import Policy
from hostcall._core.process import living
from hostcall._core.spec import Results
from hostcall._export import registry
from hostcall._export.records import name_of
from hostcall._export.structures import CODEC

_lock = threading.Lock()  # no two programs make the objects of one number

_HOOKS = ("close", "save", "restore")


@dataclass(frozen=True)
class MethodCall:
    """A method that a program calls.

    Attributes:
        registered: the name of the factory.
        object: the number of the `hc.Object`.
        method: the name of the method.
        methods: what its methods return.
        declared: how the `hc.Object` was declared otherwise.
    """

    registered: tuple[str, int]
    object: str
    method: str
    methods: dict[str, Results]
    declared: dict[str, str | int | None]


def record_of(entry: Entry, exported: bool) -> MethodCall:
    group = entry.group
    if not exported:
        raise NotPortable(
            "its objects are in this process, and only an exported program makes others"
            " elsewhere. Export it (hc.export)"
        )
    name = name_of(
        group.factory,
        remedy=(
            f"the factory of the hc.Object `{group.name}` has no name in other"
            " processes. Register it, and in every process that loads the program:"
            f' @hc.register("my_package.{group.name}", version=1) at the class'
        ),
    )
    for hook in _HOOKS:
        if not _is_hook(group.options[hook]):
            raise NotPortable(
                f"{hook}= of the hc.Object `{group.name}` is a function, or the name of"
                " a private method. Give the name of a public method of the object"
            )
    if group.options["executor"] is not None:
        raise NotPortable(
            f"executor= of the hc.Object `{group.name}` is an object of this process"
        )
    with _lock:  # two threads may export the object for the first time
        group.number = group.number or secrets.token_hex(8)
    declared = {"name": group.name, **group.options}
    del declared["executor"]  # None, as was checked
    return MethodCall(
        registered=name,
        object=group.number,
        method=entry.name,
        methods=dict(group.methods),
        declared=declared,
    )


def read(json: Json) -> tuple[Entry, Policy]:
    """The method; its host object is made when it is called."""
    record: MethodCall = CODEC.decode(json, MethodCall, "a method")
    declared: dict[str, Any] = record.declared
    method = record.method
    if method not in record.methods:
        raise Malformed(f"the method {method!r}, which is not declared")
    for hook in _HOOKS:
        if not _is_hook(declared[hook]):
            raise Malformed(f"the method {declared[hook]!r} as {hook}=")
    factory = registry.find(*record.registered)
    # It checks the names of the methods.
    declared_group = Object(factory, methods=record.methods, **declared)._group
    with _lock:
        # The first program that is loaded makes the objects, and others share them.
        group = declared_group
        for living_group in living(Group):
            if living_group.number == record.object and not living_group.ended:
                group = living_group
                break
        group.number = record.object
    # The object of this number may be one of this process, with other methods.
    if method not in group.methods:
        raise Malformed(
            f"the method {method!r}, which the hc.Object `{group.name}` with this"
            " number does not declare here"
        )
    return Entry(group, method), Policy.of(group.options)


def objects_of(functions: Iterable[object]) -> dict[str, Object]:
    """Each `hc.Object` whose methods are among these functions, by its name; the second
    of a name is "name#2".
    """
    objects: dict[str, Object] = {}
    for group in dict.fromkeys(fn.group for fn in functions if isinstance(fn, Entry)):
        name = group.name
        count = 1
        while name in objects:
            count += 1
            name = f"{group.name}#{count}"
        objects[name] = handle_of(group)
    return objects


def _is_hook(hook: object) -> bool:
    """Whether a file may give this as close=, save= or restore=: methods are looked up
    on registered objects by these texts.
    """
    if hook is None:
        return True
    return isinstance(hook, str) and hook.isidentifier() and hook[0] != "_"
