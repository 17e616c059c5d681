"""Snapshots of an `hc.Object` over all processes of a job.

Each process has the objects that its devices call. Where a device is, the next job
decides anew: it may have another number of processes, or another order of devices. So
`restore` gives each process the whole snapshot, and a process takes an object's state
out of it when the first call comes to that object (`Group.wait_for`). States that are
left belong to other processes' objects.

What goes through the job's store is never unpickled as it comes (snapshot_bytes.py).
The states in a snapshot are pickles, and are unpickled by `restore`. A process that was
given the snapshot unpickles no other: it refuses one of the store that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostcall import _jax
from hostcall._api.object.snapshot_bytes import decode, encode
from hostcall._core.errors import HostcallError

Snapshot = dict[str, Any]


def gather(name: str, part: Callable[[], Snapshot], limit: float) -> Snapshot:
    """One snapshot of the objects of all processes, the same in each.

    `part` makes this process's own, with its waiting states. If it raises, all raise.
    """
    own, failure = _told(part)
    from hostcall._job import exchange  # asked for: a job of one process does without

    who = f"save() of `{name}`"
    given = exchange.of_all(who, own, limit)
    if failure is not None:
        raise failure
    parts = [decode(one, f"{who}, process {n}") for n, one in enumerate(given)]
    for process, one in enumerate(parts):
        if "error" in one:
            raise HostcallError(
                f"hostcall: save() of `{name}` failed in process {process}:"
                f" {one['error']}",
                code="hc-failed",
            )
    return _joined(name, parts)


def _told(make: Callable[[], Snapshot]) -> tuple[bytes, Exception | None]:
    """What this process gives the others; if `make` fails, they get the reason."""
    try:
        return encode(make()), None
    except Exception as error:
        return encode({"error": f"{type(error).__name__}: {error}"}), error


def _joined(name: str, parts: list[Snapshot]) -> Snapshot:
    batches = {part["batch"] for part in parts if part["objects"] or part["waiting"]}
    if len(batches) > 1:
        raise HostcallError(
            f"hostcall: the processes' objects of `{name}` belong to different batches:"
            f" {sorted(map(str, batches))}. Save them in each process, with save()",
            code="hc-object",
        )
    objects: dict[Any, bytes] = {}
    holders: dict[Any, int] = {}
    for process, part in enumerate(parts):
        for index, state in part["objects"].items():
            if index in objects:
                raise HostcallError(
                    f"hostcall: processes {holders[index]} and {process} each have an"
                    f" object {index} of `{name}`, since each ran a program of its own."
                    " One snapshot can't hold both: call save() without processes= in"
                    " each process, and keep a file for each",
                    code="hc-object",
                )
            objects[index], holders[index] = state, process
    for part in parts:
        for index, state in part["waiting"].items():
            objects.setdefault(index, state)  # nobody has called this object since
    ordered = dict(sorted(objects.items()))
    return {"batch": batches.pop() if batches else (), "objects": ordered}


def scatter(
    name: str, state: Any, check: Callable[[Any], Snapshot], limit: float
) -> Snapshot:
    """The state that process 0 has given. `check` raises if it is no snapshot."""
    own: bytes | None = None
    failure: Exception | None = None
    if state is not None or _jax.place_in_job()[0] == 0:
        own, failure = _told(lambda: check(state))
    from hostcall._job import exchange

    who = f"restore() of `{name}`"
    given = exchange.of_first(who, own, limit)
    if failure is not None:
        raise failure
    found = decode(given, f"{who}, process 0")
    if "error" in found:
        raise HostcallError(
            f"hostcall: {who} failed in process 0, which gives all processes its"
            f" snapshot: {found['error']}",
            code="hc-failed",
        )
    if own is not None and own != given:
        raise HostcallError(
            f"hostcall: {who} was given another snapshot here than in process 0. Give"
            " each process the same one; or None, and it takes that of process 0 from"
            " the job's store",
            code="hc-object",
        )
    return found
