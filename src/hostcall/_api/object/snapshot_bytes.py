"""Snapshots of objects as bytes for the job's store, which holds nothing pickled.

JAX's coordination service asks nobody who he is: whoever reaches its port can write
what a process then reads. So a snapshot goes through it as a JSON text behind its
length, and behind that the states of the objects, one after the other. `decode` checks
each part, and looks into no state.
"""

from __future__ import annotations

import json
from typing import Any

from hostcall._core.errors import HostcallError

_LENGTH = 8  # bytes
_STATES = ("objects", "waiting")


def encode(snapshot: dict[str, Any]) -> bytes:
    """`snapshot` has a batch and states, or the text of an "error"."""
    if "error" in snapshot:
        parts: list[bytes] = []
        head: dict[str, Any] = {"error": snapshot["error"]}
    else:
        groups = {key: sorted(snapshot.get(key, {}).items()) for key in _STATES}
        parts = [state for states in groups.values() for _, state in states]
        head = {"batch": snapshot["batch"]}
        for key, states in groups.items():
            head[key] = [(index, len(state)) for index, state in states]
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *parts])


def decode(data: bytes, who: str) -> dict[str, Any]:
    """What `encode` was given, with empty states where it had none.

    Raises:
        HostcallError: these are other bytes. `who` says whose they should be.
    """
    try:
        begin = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        head = json.loads(data[_LENGTH:begin])
        if set(head) == {"error"}:
            return {"error": _of(str, head["error"])}
        found: dict[str, Any] = {"batch": tuple(map(_axis, _of(list, head["batch"])))}
        for key in _STATES:
            found[key] = states = {}
            for index, size in _of(list, head[key]):
                end = begin + _of(int, size)
                if not begin <= end <= len(data):
                    raise ValueError("a state is not there")
                states[tuple(_of(int, i) for i in index)] = data[begin:end]
                begin = end
        return found
    except Exception as error:
        raise HostcallError(
            f"hostcall: what the job's store holds for {who} was not written by a"
            f" process of this job with this version of hostcall"
            f" ({type(error).__name__}: {error}). Nothing of it was used. Anyone who"
            " reaches the coordinator's port can write there: keep that port inside the"
            " job's network, and restart the job",
            code="hc-process",
        ) from error


def _axis(axis: Any) -> Any:
    if type(axis) is int:
        return axis
    name, size = _of(list, axis)
    return _of(str, name), _of(int, size)


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} wanted, got {type(value).__name__}")
    return value
