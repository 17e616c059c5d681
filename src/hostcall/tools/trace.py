"""`hc.trace`: writes what a program did as a trace for Chrome's and Perfetto's viewers.

The idea: the engine collects events (`hc.monitor.events`), and a thread takes them and
writes them to the file, a few times a second. Chrome's format is an array of objects in
JSON that needs no closing bracket, and a gzip file may consist of several members. So
the file can be read at any moment, also after the process was killed.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import os
import sys
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import jax.monitoring

from hostcall import errors, monitor
from hostcall._core.daemon import daemon
from hostcall._core.wait import SLICE, over, wait
from hostcall.tools._values import wrong

logger = logging.getLogger("hostcall")

# The process in the trace that shows compilation; the engine's are in
# native/base/trace_json.h.
_COMPILATION = 3

# JAX's names of the steps of a compilation, and what the trace calls them.
_STEPS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}

_open: list[trace] = []  # traces that write now; its methods are atomic


class trace:
    """Writes what happens in a block as a trace for a viewer.

    ::

        with hc.trace("run.json.gz"):
            train()

    Open the file in https://ui.perfetto.dev or chrome://tracing. It has a track for
    each device with its calls, taps and waits (name, place in your source, bytes), one
    for the worker that delivers taps with the number of queued taps, one for workers of
    parallel rows, and one for JAX's compilation. Arrows lead from taps to their
    deliveries.

    Args:
        path: the file, which is replaced; `.gz` at its end compresses it.

    Raises:
        SpecError: the path ends in neither `.json` nor `.json.gz`.
        OSError: the file can't be written. An error that comes later, such as a full
            disk, is raised at the end of the block.

    The file is complete up to the last tenth of a second at any time, also if the
    process is killed. If events come faster than they can be written, some are left
    out, and `dropped` and the trace say how many. Traces may be nested and run in
    several threads; each shows the whole process. A trace without a `with` block begins
    with `__enter__` and ends with the process.

    Attributes:
        path: the file.
        dropped: events that were left out.

    Under transformations: nothing changes, since a trace only watches.

    Cost: about 0.1 us for each event on a device's thread, and 0.5 us on a thread of
    its own. Without a trace, nothing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.name.endswith((".json", ".json.gz")):
            raise wrong(
                "hc.trace() writes JSON, and can't tell from the path"
                f" {str(path)!r} whether to compress it. End it in .json or .json.gz"
            )
        self._gz = self.path.suffix == ".gz"
        self._events = monitor.events()
        # Steps of compilations. Any thread appends; one writes the file, so that it
        # needs no lock.
        head = {"ph": "M", "name": "process_name", "pid": _COMPILATION, "tid": 0}
        head |= {"args": {"name": "compilation"}}
        self._compiled = deque[dict[str, object]]([head])
        self._stop = threading.Event()
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        return self._events.dropped

    def __enter__(self) -> trace:
        if self._thread is not None:
            raise errors.HostcallError(
                "hostcall: this hc.trace() has run already. Make a new one with another"
                " path for each block",
                code="hc-closed",
            )
        # Unbuffered: what is written is in the file, whatever happens to the process.
        self._file = open(self.path, "wb", buffering=0)
        self._write(b"[\n")
        self._process = os.getpid()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        self._thread = thread = daemon("hostcall-trace", self._run)
        self._events.__enter__()
        _open.append(self)
        thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._end()
        if self._error is not None:
            if error is None:
                raise self._error
            logger.error("the trace %s is not complete: %s", self.path, self._error)

    def _end(self) -> None:
        if self not in _open or self._thread is None:
            return  # the process is ending, and the block ended before
        _open.remove(self)
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        if os.getpid() != self._process:
            return  # a forked child: the file is the parent's
        self._stop.set()
        wait(over(self._thread))
        self._events.__exit__()
        self._take(ending=True)
        args = {"dropped": self.dropped}
        note = {"ph": "M", "name": "hostcall", "pid": 1, "tid": 0, "args": args}
        self._write(json.dumps(note).encode() + b"\n]\n")
        self._file.close()

    def _run(self) -> None:
        while not self._stop.wait(SLICE):  # what a killed process loses
            self._take()

    def _take(self, ending: bool = False) -> None:
        before = self.dropped
        for block in self._events.lines(ending=ending):
            self._write(block)
        events = [self._compiled.popleft() for _ in range(len(self._compiled))]
        if self.dropped > before:  # said where it happened, as a mark over all tracks
            mark = {"ph": "i", "s": "g", "cat": "dropped", "pid": 1, "tid": 1}
            name = f"{self.dropped - before} events are left out before this"
            events.append({**mark, "name": name, "ts": time.monotonic_ns() / 1000})
        self._write("".join(f"{json.dumps(event)},\n" for event in events).encode())

    def _write(self, block: bytes) -> None:
        """Writes lines at once, in a member of their own if they are compressed."""
        if not block or self._error is not None:
            return
        if self._gz:
            block = gzip.compress(block, compresslevel=1)
        view = memoryview(block)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._error = error

    def _on_duration(self, step: str, seconds: float, **about: object) -> None:
        """Adds a step of a compilation, which has just ended on this thread."""
        if step not in _STEPS:
            return
        what, function = _STEPS[step], about.get("fun_name")
        event = {
            "ph": "X",
            "cat": "compilation",
            "name": f"{what} {function}" if function else what,
            "pid": _COMPILATION,
            "tid": threading.get_native_id(),
            "ts": time.monotonic_ns() / 1000 - seconds * 1e6,
            "dur": seconds * 1e6,
            "args": {key: str(value) for key, value in about.items()},
        }
        self._compiled.append(event)


def _at_barrier(ending: bool) -> None:
    """Ends traces that nobody has ended when the process ends."""
    if ending and not sys.is_finalizing():
        for each in list(_open):
            each._end()


monitor.at_barrier(_at_barrier)


# --- Reading --------------------------------------------------------------------------


def read_trace(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a trace, also of one that is still written or was cut off.

    Args:
        path: a file that `hc.trace` wrote.

    Returns:
        The events as Chrome's format has them: `ph`, `ts` and `dur` in microseconds,
        `pid`, `tid`, `name`, `cat`, `args`.
    """
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = _unpacked(data)
    # Not splitlines(): a tag may have other characters that end lines, such as U+2028.
    lines = data.decode(errors="replace").split("\n")
    events = []
    for number, line in enumerate(lines):
        text = line.rstrip(",")
        if text in ("[", "]", ""):
            continue
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            events.append(event)
        elif number != len(lines) - 1:  # the last line may be cut off
            raise errors.LoadError(
                f"hostcall: line {number + 1} of {os.fspath(path)} is no event of a"
                f" trace: {text[:60]!r}. It was changed, or hc.trace did not write it"
            )
    return events


def _unpacked(data: bytes) -> bytes:
    """The text of all members, the last of which may be cut off."""
    out = []
    with contextlib.suppress(EOFError, OSError, zlib.error):
        file = gzip.GzipFile(fileobj=io.BytesIO(data))
        while text := file.read1():
            out.append(text)
    return b"".join(out)
