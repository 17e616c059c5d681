"""`hc.monitor.events`: every call, tap and delivery while a block runs, for tools.

The engine has one buffer of events (native/base/event.h), and `with` blocks may
nest or run in several threads. So whoever takes gives to all: `_Source` empties the
engine's buffer and hands what it had to each open block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hostcall import _native
from hostcall._api.flight import RAW, STATES
from hostcall._core.process import Guarded
from hostcall._engine.info import places
from hostcall._runtime import waits

# Events that a block keeps until it takes them; more are dropped and counted.
_KEPT = 1 << 18


class _Source(Guarded):
    """The engine's buffer, which hands each event to all open blocks.

    Attributes:
        lock: guards the rest, and what each block holds.
        open: the blocks that get events.
        dropped: events that the engine has dropped so far.
    """

    def __init__(self) -> None:
        self.open: list[events] = []
        self.dropped = 0
        super().__init__()

    def share(self) -> None:
        """Hands the engine's events to all open blocks. The lock is held."""
        for _ in range(_KEPT // 4096):  # what comes meanwhile has to end some time
            raw = _native.take_events()
            lost = _native.events_dropped() - self.dropped
            self.dropped += lost
            for block in self.open:
                block._add(raw, lost)
            if not raw:
                return


_source = _Source()


class events:
    """Collects every call, tap and delivery while its `with` block runs.

    For tools that show what a program did, such as `hc.trace`::

        with hc.monitor.events() as events:
            step(x)
            hc.barrier()
            batch = events.take()
        batch["end"] - batch["start"]     # nanoseconds

    Memory is bounded: events that nobody takes in time are dropped and counted in
    `dropped`. Blocks may nest and run in several threads; each gets all events of the
    process.

    Attributes:
        dropped: events that were lost because nobody took them in time.

    Cost: on a device's thread, about 0.1 us for each event. Without an open block one
    load of a flag.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._parts: list[bytes] = []
        self._json = _native.TraceJson(0)

    def __enter__(self) -> events:
        with _source.lock:
            _source.share()  # what came before this block is not for it
            _source.open.append(self)
            self._json = _native.TraceJson(_native.tap_queue()["pending"])
            _native.switch_events(True)
        return self

    def __exit__(self, *_: object) -> None:
        with _source.lock:
            _source.share()
            _source.open.remove(self)
            _native.switch_events(bool(_source.open))

    def _add(self, raw: bytes, lost: int) -> None:
        room = _KEPT * RAW.itemsize - sum(map(len, self._parts))
        self.dropped += lost + max(len(raw) - room, 0) // RAW.itemsize
        if raw and room:
            self._parts.append(raw[:room])

    def _take(self) -> list[bytes]:
        with _source.lock:
            if self in _source.open:
                _source.share()
            parts, self._parts = self._parts, []
        return parts

    def take(self) -> np.ndarray:
        """The events that have ended since the last `take`, as a structured array.

        Fields:
            kind: "call", "tap", "delivery", "team" (a device in a call that several
                devices make together), "rows" (a worker runs rows of a call with
                vmap_method="parallel"), "wait" (a thread in `hc.barrier()`),
                or "feed" (a device waits for an item of a feed).
            state: "ended" or "failed"; a tap that failed was dropped.
            device: the ordinal, or -1.
            place: the number of the place, for `name`.
            start, entered, end: nanoseconds of `time.monotonic_ns()`. From `start` to
                `entered` a call waited for the GIL; 0 for the other kinds.
            nbytes: bytes of arguments and results.
            run: XLA's number of the execution, or -1.
            number: a tap and its delivery have the same; else -1 or the first row.
            count: rows of a call; taps of a delivery.
            thread: `threading.get_ident()` of the thread; for rows in another process,
                a small number.
        """
        raw = np.frombuffer(b"".join(self._take()), RAW)
        out = np.empty(len(raw), _READABLE)
        for name in set(RAW.names or ()) - {"kind", "state"}:
            out[name] = raw[name]
        out["kind"] = np.array(waits.KINDS)[raw["kind"]]
        out["state"] = np.array(STATES)[raw["state"]]
        # As TraceJson computes it: one straight line for all events. The long span
        # keeps the rounding of its ends out of the slope.
        base, span = int(raw["start"].min(initial=_native.ticks())), 10**12
        base_ns = self._json.ns(base)
        tick = (self._json.ns(base + span) - base_ns) / span
        for name in ("start", "entered", "end"):
            ns = base_ns + ((raw[name] - base) * tick).astype(np.int64)
            out[name] = np.where(raw[name] == 0, 0, ns)
        return out

    def lines(self, *, ending: bool = False) -> Iterator[bytes]:
        """The same as lines of JSON in Chrome's trace format, each ending in a comma.

        Takes the events as `take` does, and yields blocks of lines. Formatting needs no
        GIL, so a thread that writes the blocks to a file does not hold up callbacks.
        With `ending`, the last block has what is still under way.
        """
        parts = self._take()
        if ending:
            parts.append(b"")
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            pending = _native.tap_queue()["pending"] if last else -1
            with _source.lock:  # several threads may use `_json`
                block = self._json.lines(part, pending, ending and last)
            yield block

    @staticmethod
    def name(place: int) -> str:
        """The name of a place's tag or function, and the user's line."""
        known = places.named(place)
        return f"{known.name}, {known.place}" if known else ""


_READABLE = np.dtype(
    [(n, "U8" if n in ("kind", "state") else RAW[n]) for n in RAW.names or ()]
)
