"""`hc.monitor.flight`: the newest calls and taps, as the flight recorder kept them."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple

import numpy as np

from hostcall import _native
from hostcall._core.source import Place
from hostcall._engine.place_numbers import places

# The C++ enums EventKind and EventState (native/base/event.h).
KINDS = ("call", "tap", "delivery", "team", "feed")
STATES = ("waiting", "running", "ended", "failed")

# The struct Event of native/base/event.h.
RAW = np.dtype(
    [
        ("kind", "u1"),
        ("state", "u1"),
        ("device", "i2"),
        ("place", "u4"),
        ("start", "i8"),
        ("entered", "i8"),
        ("end", "i8"),
        ("nbytes", "i8"),
        ("run", "i8"),
        ("number", "i8"),
    ]
)


class FlightRecord(NamedTuple):
    """One call or tap, as the flight recorder has it.

    Attributes:
        kind: "call"; "tap", a device that hands values to the queue; "delivery" of a
            tap to its function; or "team", a device in a call that several devices make
            together.
        state: "waiting" for the GIL, or of a tap for space in the queue; "running";
            "ended"; or "failed", which of a tap means that it was dropped.
        name: the tag, or the function's name.
        place: the user's line that wrote the call, or None if it is not known.
        device: the ordinal of the device, or None outside of programs.
        start: when it began, as `time.time()`.
        seconds: how long it took, or has taken so far.
        waited: seconds of it that a call waited for the GIL.
        nbytes: bytes of the arguments and results of all rows.
        run: XLA's number of the execution, or None outside of programs. Devices of one
            execution have the same.
        number: the number of a tap among all taps of the process, which its delivery
            has too (`hc.current().step`); None for other kinds.
    """

    kind: Literal["call", "tap", "delivery", "team"]
    state: Literal["waiting", "running", "ended", "failed"]
    name: str
    place: Place | None
    device: int | None
    start: float
    seconds: float
    waited: float
    nbytes: int
    run: int | None
    number: int | None


class Flight(list[FlightRecord]):
    """A list of records that prints as a table."""

    def __str__(self) -> str:
        if not self:
            return "no call or tap has been recorded"
        now = time.time()
        lines = [
            f"{'seconds ago':>12} {'for seconds':>12} {'GIL wait':>10}  {'state':8}"
            f" {'what':9} {'device':>6} {'bytes':>10}  function, place"
        ]
        for record in self:
            device = "-" if record.device is None else record.device
            place = record.place or "(place not known)"
            lines.append(
                f"{now - record.start:12.6f} {record.seconds:12.6f}"
                f" {record.waited:10.6f}  {record.state:8} {record.kind:9}"
                f" {device:>6} {record.nbytes:10}  {record.name}, {place}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def flight() -> Flight:
    """The last 1,000 calls and taps, oldest first; printed, a table.

    The recorder is always on. It holds no values. What is under way stays in it until
    it ends, so a call that hangs is shown however much has happened since. Masked calls
    and taps are not recorded, nor are those that `every=` left out, nor machine code
    (`hc.buffers.native`).

    Cost: the recorder takes about 30 ns of a call and 50 ns of a tap; this function
    about 2 ms.
    """
    events = np.frombuffer(_native.read_flight(), RAW)
    # Behind the reading: no event begins in the future then.
    now = _Now(
        seconds=time.time(),
        ticks=_native.ticks(),
        tick_seconds=_native.tick_ns() * 1e-9,
    )
    # Nearly in order already: events that have long been under way lie anywhere.
    events = events[np.argsort(events["start"], kind="stable")]
    return Flight(_record(row, now) for row in events.tolist())


class _Now(NamedTuple):
    """One moment on both clocks, and how many seconds a tick of the engine's takes."""

    seconds: float
    ticks: int
    tick_seconds: float


def _record(row: Any, now: _Now) -> FlightRecord:
    """The record of an event, whose fields are those of `RAW`."""
    kind, state, device, place, start, entered, end, nbytes, run, number = row
    known = places.named(place)
    waited = 0
    if KINDS[kind] == "call":
        # `entered` is 0 while a call waits, and for one that never got the GIL.
        is_waiting = STATES[state] == "waiting"
        waited = (entered or (now.ticks if is_waiting else start)) - start
    lasted = (end or now.ticks) - start  # `end` is 0 while it is under way
    # Cores' counters differ by some ticks, so a difference may be below zero.
    return FlightRecord(
        kind=KINDS[kind],  # type: ignore[arg-type]
        state=STATES[state],  # type: ignore[arg-type]
        name=known.name if known else "(gone)",
        place=known.place if known else None,
        device=None if device < 0 else device,
        start=now.seconds - (now.ticks - start) * now.tick_seconds,
        seconds=max(lasted, 0) * now.tick_seconds,
        waited=max(waited, 0) * now.tick_seconds,
        nbytes=nbytes,
        run=None if run == -1 else run,
        number=number if KINDS[kind] in ("tap", "delivery") else None,
    )
