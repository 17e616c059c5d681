"""Tells whether this process waits in a collective for a process that does not come.

A process that is taken for stuck may be ended (peers.py), so being wrong costs a run.
It is asked only after another process has failed, died, or waits at its end, and ended
only if no other process of the job works. It is stuck while all of this holds, without
a break:

  1. The main thread does not move: same frame, same instruction (as for Ctrl-C,
     watcher.py). A program that works on its own moves.
  2. A Python thread is inside XLA, the same one at the same instruction. That is seen
     on its native stack: it waits for a futex, and of the newest eight return addresses
     that are neither in the C library nor in the dynamic linker, at least seven are in
     jaxlib. A thread in `time.sleep`, in a lock's `acquire` or in another extension is
     not inside XLA. (JAX shows no Python frame there: a small program runs inside the
     jitted function's own C++ call.)
  3. No thread of XLA's is in Python. If one is, a callback runs or waits, on its own.
  4. On CPUs, the process does not compute: its threads together use less than a fifth
     of a core. Python's own threads outside of XLA, except the main one, are not
     counted: a data loader says nothing about a collective. One that waits uses none.
     On GPUs, whose work this can't see: a value of a program over several processes is
     not ready, and that value stays the same.

A look that comes late (the process was stopped, swapped out, or its machine paused)
says nothing about the time before, so the count begins anew.

What can be wrong: a main thread that is inside jaxlib for `fail_grace` seconds without
computing, such as one in a barrier of the coordination service. That waits for the
failed process too, or for one that waits for it. A process whose other threads of C++
compute is not taken for stuck, and then ends as JAX ends it, when its heartbeats have
been missing for 100 s.

Without Linux's /proc, on x86-64 or AArch64, nothing is ever taken for stuck.
"""

from __future__ import annotations

import bisect
import os
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from hostcall import _jax

_BUSY = 0.2  # cores
_LATE = 3.0  # seconds between two looks, after which the count begins anew
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine)  # its system call
# What a thread has left on its stack looks like return addresses too: the place of a
# local variable that is not set yet may hold one of XLA's while Python waits for a
# lock, and one of Python's inside XLA. So no single address decides. Inside XLA, the
# newest ten or more are jaxlib's (in 13 kinds of waits), but for such leftovers. In a
# lock's wait, less than 160 bytes come before Python's own frames, which are close
# together.
_STACK = 1 << 14  # bytes of a stack that are searched
_NEWEST, _LEAST = 8, 7
_TICKS = os.sysconf("SC_CLK_TCK")
_TASKS = Path("/proc/self/task")
_WAITING = ("libc.so", "libc-", "libpthread", "libstdc++", "ld-", "[vdso]")


class Stuck:
    """For how long this process has been stuck. One thread uses it."""

    def __init__(self) -> None:
        self._where: Any = None
        self._since = time.monotonic()
        self._used = _cpu_seconds(())
        self._looked = self._since

    def seconds(self) -> float:
        """How long all looks so far have found it stuck, without a break."""
        now = time.monotonic()
        where = _where_it_waits()
        used = _cpu_seconds(() if where is None else where[2])
        gap = now - self._looked
        busy = used - self._used > _BUSY * gap and _on_cpus()
        if where is None or where != self._where or busy or gap > _LATE:
            self._since = now
        self._where, self._used, self._looked = where, used, now
        return now - self._since


def _where_it_waits() -> Any:
    """What has to stay the same while this process is stuck; None if it is not."""
    try:
        inside = _Inside()
    except OSError:  # no /proc, or it may not be read
        return None
    frames = sys._current_frames()
    threads = {t.ident: t for t in threading.enumerate() if _is_pythons(t)}
    if frames.keys() - threads.keys():
        return None
    main = threading.main_thread().ident
    waiting = {}
    for ident, thread in threads.items():
        frame = frames.get(ident or 0)
        own = thread.name.startswith("hostcall-")
        number = _native_id(thread)
        if frame is not None and not own and inside.xla(number):
            waiting[number] = (id(frame), frame.f_lasti)
    main_frame = frames.get(main or 0)
    if not waiting or main_frame is None:
        return None
    values: Any = None
    if not _on_cpus():
        values = _values_not_ready()
        if not values:
            return None
    return id(main_frame), main_frame.f_lasti, waiting, values


def _is_pythons(thread: threading.Thread) -> bool:
    """Whether Python started the thread, or it is the main one."""
    return not isinstance(thread, threading._DummyThread)


def _native_id(thread: threading.Thread) -> int:
    """The system's number of a thread.

    Before Python 3.13, the main thread of a forked process says its parent's.
    """
    main = thread is threading.main_thread()
    return os.getpid() if main else thread.native_id or 0


def _on_cpus() -> bool:
    return all(client.platform == "cpu" for client in _jax.clients())


def _values_not_ready() -> frozenset[int]:
    """The values of programs over several processes that are still computed."""
    return frozenset(id(array) for array in jax.live_arrays() if is_pending(array))


def is_pending(array: jax.Array) -> bool:
    """Whether a program over several processes still computes this value."""
    try:
        return not array.is_fully_addressable and not array.is_ready()
    except RuntimeError:  # another thread has just deleted or donated it
        return False


class _Inside:
    """Looks at the native stacks of this process's threads.

    Reads memory through /proc, which fails where a plain read would crash. The thread
    may run meanwhile: its stack is then any mixture of before and after, and the next
    look finds another place.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, str]] = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, rights, *rest = line.split(maxsplit=5)
            if "x" in rights:
                start, _, end = place.partition("-")
                name = os.path.basename(rest[-1]) if len(rest) == 4 else ""
                self._ranges.append((int(start, 16), int(end, 16), name))
        self._starts = [start for start, _, _ in self._ranges]

    def xla(self, native_id: int) -> bool:
        """Whether a thread waits inside jaxlib."""
        try:
            state = (_TASKS / str(native_id) / "syscall").read_text().split()
            if state[:1] != [_FUTEX]:  # it runs, sleeps, or waits for a file
                return False
            with open("/proc/self/mem", "rb", buffering=0) as memory:
                memory.seek(int(state[-2], 16))
                stack = memory.read(_STACK)
        except OSError:  # the thread has ended
            return False
        return self.is_xlas(stack)

    def is_xlas(self, stack: bytes) -> bool:
        """Whether XLA waits on this stack, of which the newest bytes are the first."""
        seen = xlas = 0
        for at in range(0, len(stack) - 7, 8):
            name = self._file_of(int.from_bytes(stack[at : at + 8], sys.byteorder))
            if name is not None and not name.startswith(_WAITING):
                seen += 1
                xlas += name.startswith(("libjax", "xla_extension", "_jax"))
                if seen == _NEWEST:
                    break
        return xlas >= _LEAST

    def _file_of(self, address: int) -> str | None:
        number = bisect.bisect(self._starts, address) - 1
        if number < 0 or address >= self._ranges[number][1]:
            return None
        return self._ranges[number][2]


def computes() -> bool:
    """Whether this process computes just now; takes half a second to find out.

    True if a value of a program over several processes is not ready.
    """
    if _values_not_ready():
        return True
    before, gap = _cpu_seconds(()), 0.5
    time.sleep(gap)
    return _on_cpus() and _cpu_seconds(()) - before > _BUSY * gap


def _cpu_seconds(inside: Collection[int]) -> float:
    """CPU time of this process's threads: the main one, those of C++, and Python's
    threads with these native ids, which are inside XLA.
    """
    main = threading.main_thread()
    others = {
        str(t.native_id)
        for t in threading.enumerate()
        if t is not main and _is_pythons(t) and t.native_id not in inside
    }
    ticks = 0
    for task in os.listdir(_TASKS) if _TASKS.is_dir() else ():
        if task in others:
            continue
        try:
            stat = (_TASKS / task / "stat").read_text()
        except OSError:  # it has ended
            continue
        user, system = stat.rpartition(")")[2].split()[11:13]
        ticks += int(user) + int(system)
    return ticks / _TICKS
