"""Snapshots of an `hc.Object` over all processes of a job.

Each process has the objects that its devices call. Where a device is, the next job
decides anew: it may have another number of processes, or another order of devices. So
`restore` gives each process the whole snapshot, and a process takes an object's state
out of it when the first call comes to that object (`Group.restore`). States that are
left belong to other processes' objects.

JAX's coordination service asks nobody who he is: whoever reaches its port can write
what a process then reads. So what goes through the job's store is never unpickled as it
comes: it is a text (_core/codec.py) that `decode` checks. The states in it are
pickles, and are unpickled by `restore`. A process that was given the snapshot unpickles
no other: it refuses one of the store that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hostcall import _jax
from hostcall._core import codec
from hostcall._core.errors import HostcallError

Snapshot = dict[str, Any]  # what hc.Object.save returns


def gather(name: str, part: Callable[[], Snapshot], limit: float) -> Snapshot:
    """One snapshot of the objects of all processes, the same in each.

    `part` makes this process's own, with its waiting states. If it raises, all raise.
    """
    own, failure = _told(part)
    from hostcall._job.exchange import exchange  # a job of one process does without

    who = f"save() of `{name}`"
    given = exchange(who, own, limit)
    if failure is not None:
        raise failure
    return _joined(name, [decode(one, who, n) for n, one in enumerate(given)])


def _told(make: Callable[[], Snapshot]) -> tuple[str, Exception | None]:
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
    states: dict[tuple[int, ...], bytes] = {}
    for key in ("waiting", "objects"):  # a state waits if nobody has called its object
        for part in parts:
            states |= part[key]
    for index in states:
        holders = [n for n, part in enumerate(parts) if index in part["objects"]]
        if len(holders) > 1:
            raise HostcallError(
                f"hostcall: processes {' and '.join(map(str, holders))} each have an"
                f" object {index} of `{name}`, since each ran a program of its own. One"
                " snapshot can't hold both: call save() without processes= in each"
                " process, and keep a file for each",
                code="hc-object",
            )
    batch = batches.pop() if batches else ()
    return {"batch": batch, "objects": dict(sorted(states.items()))}


def scatter(
    name: str, state: object, check: Callable[[object], Snapshot], limit: float
) -> Snapshot:
    """The state that process 0 has given. `check` raises if it is no snapshot."""
    own: str | None = None
    failure: Exception | None = None
    if state is not None or _jax.place_in_job()[0] == 0:
        own, failure = _told(lambda: check(state))
    from hostcall._job.exchange import exchange

    who = f"restore() of `{name}`"
    (given,) = exchange(who, own, limit, first=True)
    if failure is not None:
        raise failure
    found = decode(given, who, 0)
    if own is not None and own != given:
        raise HostcallError(
            f"hostcall: {who} was given another snapshot here than in process 0. Give"
            " each process the same one; or None, and it takes that of process 0 from"
            " the job's store",
            code="hc-object",
        )
    return found


# --- What goes through the store ------------------------------------------------------

_STATES = tuple[tuple[tuple[int, ...], bytes], ...]
_CODEC = codec.Codec({})


@dataclass(frozen=True)
class _Exchanged:
    """What a process gives the others: its states, or why it has none."""

    batch: tuple[int | tuple[str, int], ...] = ()
    objects: _STATES = ()
    waiting: _STATES = ()
    error: str = ""


def encode(snapshot: Snapshot) -> str:
    """`snapshot` has a batch and states, or the text of an "error"."""
    told: dict[str, Any] = {
        key: tuple(sorted(part.items())) if isinstance(part, dict) else part
        for key, part in snapshot.items()
    }
    return codec.write(_CODEC.encode(_Exchanged(**told), "a snapshot"))


def decode(data: str | bytes, who: str, process: int) -> Snapshot:
    """What `encode` was given by a process, with empty states where it had none.

    Raises:
        HostcallError: these are other bytes, or an error.
    """
    try:
        found = _CODEC.fields(codec.read(data), _Exchanged)
    except Exception as error:
        raise HostcallError(
            f"hostcall: what the job's store holds for {who}, process {process} was not"
            " written by a process of this job with this version of hostcall"
            f" ({type(error).__name__}: {error}). Nothing of it was used. Anyone who"
            " reaches the coordinator's port can write there: keep that port inside the"
            " job's network, and restart the job",
            code="hc-process",
        ) from error
    if why := found.pop("error"):
        raise HostcallError(
            f"hostcall: {who} failed in process {process}: {why}", code="hc-failed"
        )
    return found | {key: dict(found[key]) for key in ("objects", "waiting")}
