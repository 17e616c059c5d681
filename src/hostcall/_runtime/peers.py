"""What the processes of a job tell each other, and what one does when another failed.

The idea: JAX's coordination service keeps a store of texts. Each process has an inbox
in it, and a thread that waits there. A process that fails writes what failed into all
inboxes, and the others know it some ms later, wherever their main threads are.

The messages

    failed   a program over several processes failed there, or an exception ended it
    died     the process before it in the ring saw it end without a word (ring.py)
    waits    it is at its end, does not compute, and waits for the others
    stuck    it has been stuck (stuck.py) for `fail_grace` seconds
    moves    it is not stuck any more
    left     it has ended after a failure (told to process 0 only)

The threads, both daemons, started with the engine if the job has several processes

    hostcall-inbox   looks into the inbox twice a second (less often in jobs of more
                     than 250 processes), and logs what failed. From the first "failed",
                     "died" or "waits" on, it looks whether this process is stuck.
    hostcall-ring    waits for the next process's end (ring.py), and writes this one's
                     messages, so that a failing call waits for the service no longer
                     than `_TELLING`.

Who ends itself. A process that is stuck for `fail_grace` seconds says so, and ends with
exit code 70 if every other one has failed, ended, waits at its end, or is stuck too.
So one process that still works is waited for: a collective may need it only.

Guarantees
  * No message is lost, overwritten, or read twice (mail.py).
  * Nothing here changes what a job without failures computes, or when.

Both threads are told to stop and joined before the interpreter ends (watcher.py says
why): one by an event, the other through its socket. If the service
does not answer any more, the thread that waits for it stays behind in jaxlib's C++; the
process then ends without an answer to wait for, and the thread never comes back.

`_lock` protects `_known`, `_waits`, `_gone` and `_idle`; the threads, failing calls and
the main thread change them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

import jax

from hostcall import _jax
from hostcall._core import config, failures
from hostcall._core.counted import counted
from hostcall._runtime import delivery, mail
from hostcall._runtime.mail import Message
from hostcall._runtime.ring import ADDRESSES, Ring, run
from hostcall._runtime.stuck import Stuck

logger = logging.getLogger("hostcall")

EXIT_CODE = 70  # EX_SOFTWARE

_LOOK = 0.5  # seconds between two looks into the inbox, and whether this one is stuck
_LOOKS = 500.0  # looks of all processes together that the service gets in a second
_TELLING = 0.5  # seconds that a failing call waits until the others are told
_FLUSH = 5.0  # seconds for taps, when the process ends itself
_JOINING = 5.0  # seconds for a thread that waits for a service that does not answer


_lock = threading.Lock()
_threads: list[threading.Thread] = []
_known: Message | None = None  # the first failure
_waits: Message | None = None  # the first process that waits for the others
_gone: set[int] = set()
_idle: set[int] = set()  # those that have failed, wait at their end, or are stuck
_ring: Ring | None = None
_stopping = threading.Event()
_woken = threading.Event()  # the inbox's thread should look what is known now
_ending = False  # a thread is ending this process, which was stuck
_paused = False  # the end waits in the service, which must not count as stuck
_listeners: list[Callable[[Message], object]] = []


def on_failure(fn: Callable[[Message], object]) -> None:
    """Calls `fn(failure)` when this process learns that another one failed or died."""
    _listeners.append(fn)


def start() -> None:
    """Starts the threads, if the job has several processes."""
    global _ring
    if _jax.job_size() == 1 or _threads or _jax.job_outlives_processes():
        return
    _ring = Ring(_jax.job_rank(), _jax.job_size())
    for name, loop in (("inbox", _read_inbox), ("ring", _run_ring)):
        thread = threading.Thread(target=loop, daemon=True, name=f"hostcall-{name}")
        _threads.append(thread)
        thread.start()


def after_fork() -> None:
    """Forgets the threads, which do not exist in a forked child."""
    global _lock
    _lock = threading.Lock()
    mail.after_fork()
    _threads.clear()
    if _ring is not None:
        _ring.after_fork()


def started() -> bool:
    """Whether the job has several processes, and the engine is in use."""
    return bool(_threads)


def all_started() -> bool:
    """Whether all processes of the job have been here."""
    return len(_jax.job_folder(ADDRESSES)) == _jax.job_size()


def known() -> Message | None:
    """The first failure of the job that this process knows of."""
    return _known


def gone() -> set[int]:
    """The processes that have ended."""
    with _lock:
        return set(_gone)


# --- Telling -------------------------------------------------------------------------


def tell(text: str) -> None:
    """Tells all processes that this one failed; waits a moment until it is told."""
    if not _threads:
        return
    message = new("failed", failures.without_number(text))
    _learn(message)
    told = send(message, others())
    _woken.set()
    told.wait(_TELLING)


def new(kind: str, text: str = "", process: int | None = None) -> Message:
    """A message about this process, or another one."""
    about = _jax.job_rank() if process is None else process
    return Message(kind, about, text)


def send(message: Message, to: list[int]) -> threading.Event:
    """Sends a message; the event is set when it is in the inboxes."""
    posted = mail.send(message, to)
    if _ring is not None:
        _ring.wake()
    return posted


def others() -> list[int]:
    return [p for p in range(_jax.job_size()) if p != _jax.job_rank()]


# --- The ring ------------------------------------------------------------------------


def _run_ring() -> None:
    assert _ring is not None
    run(_ring, _stopping, mail.post_all, _next_died)


def _next_died() -> None:
    assert _ring is not None
    died = new("died", process=_ring.next)
    # To itself without the service, which may have died with that process.
    _learn(died)
    _woken.set()
    send(died, [p for p in others() if p != _ring.next])


# --- The inbox -----------------------------------------------------------------------


def _read_inbox() -> None:
    number, stuck, said = 0, None, False
    look = max(_LOOK, _jax.job_size() / _LOOKS)
    while not _stopping.is_set():
        try:
            message = mail.read(number)
        except jax.errors.JaxRuntimeError:  # the service is gone, or can't be reached
            if _jax.job_size() == 1:  # the program has left the job
                return
            message = None
        if message is not None:
            number += 1
            _learn(message)
            continue
        doomed = None if _paused else _known or _waits
        if doomed is None:
            stuck = None
        else:
            stuck = stuck or Stuck()
            grace = config.fail_grace()
            is_stuck = 0 < grace <= stuck.seconds()
            if is_stuck != said:
                said = is_stuck
                send(new("stuck" if said else "moves"), others())
            if is_stuck and _nobody_works():
                pause(True)  # decided; and this thread still reads who has left
                threading.Thread(
                    target=_end_the_process,
                    args=(doomed, grace),
                    daemon=True,
                    name="hostcall-ending",
                ).start()
        _woken.wait(look)
        _woken.clear()


def _nobody_works() -> bool:
    """Whether no other process may still come to a collective."""
    with _lock:
        return set(others()) <= _gone | _idle


def _learn(message: Message) -> None:
    """Notes a message, and logs the first failure."""
    global _known, _waits
    with _lock:
        if message.kind in ("died", "left"):
            _gone.add(message.process)
        if message.kind == "left":
            return
        if message.kind == "moves":
            _idle.discard(message.process)
            return
        _idle.add(message.process)
        if message.kind == "stuck":
            return
        if message.kind == "waits":
            _waits = _waits or message
            return
        is_first = _known is None
        if is_first:
            _known = message
    if not is_first:
        if message.kind == "died":  # what others report may only follow from it
            logger.error("%s", message)
        return
    if message.process == _jax.job_rank():
        return  # the error itself is raised here
    logger.error(
        "%s. This process may run no further program over several processes%s",
        message,
        _ends_too(),
    )
    for fn in list(_listeners):
        fn(message)


def _ends_too() -> str:
    grace = config.fail_grace()
    if not grace:
        return ""
    return f", and ends itself if it is stuck in a collective for {grace:g} s"


def _end_the_process(failure: Message, seconds: float) -> None:
    """Ends this process, which waits in a collective for a failed one."""
    global _ending
    _ending = True
    try:
        delivery.flush(min(_FLUSH, config.EXIT_TIMEOUT), "the end of a stuck process")
    except BaseException:
        logger.exception("the taps of a stuck process could not be delivered")
    try:
        send(new("failed", f"it was stuck, since {failure}"), others()).wait(_TELLING)
        take_leave(_FLUSH)
        # A pipe that nobody reads would keep the process. If the main thread is at its
        # end, no thread can be started, and it flushes the streams itself.
        with contextlib.suppress(RuntimeError):
            flushing = threading.Thread(target=delivery.flush_streams, daemon=True)
            flushing.start()
            flushing.join(_FLUSH)
        text = (
            f"hostcall: this process has waited {seconds:g} s in a collective for a"
            f" process that does not come, and ends with exit code {EXIT_CODE}"
            f" (hc.configure(fail_grace=)). Lost:"
            f" {counted(delivery.pending(), 'tap')}.\n"
            f"hostcall: {failure}\n"
        )
        os.write(2, text.encode("utf-8", "backslashreplace"))
    finally:
        os._exit(EXIT_CODE)


def wait_if_ending() -> None:
    """Waits for the end if another thread is ending this process.

    The main thread may come out of its collective meanwhile, when the others leave.
    """
    while _ending:
        time.sleep(_LOOK)


def take_leave(seconds: float) -> None:
    """Tells process 0 that this process ends now; process 0 waits for the others.

    It waits until their kernels have closed their sockets: jaxlib aborts a process
    whose service ends, even in the last moment before its own end.
    """
    assert _ring is not None
    try:
        if _jax.job_rank():
            _ring.take_leave(0)
            send(new("left"), [0]).wait(_TELLING)
            return
        until = time.monotonic() + seconds
        while set(others()) - gone() or _ring.those_before():
            if time.monotonic() >= until:
                return
            time.sleep(0.01)
    except (OSError, jax.errors.JaxRuntimeError) as error:
        logger.warning("process 0 can't be told that this process ends: %s", error)


def stop() -> None:
    """Ends both threads."""
    if not _threads:
        return
    _stopping.set()
    _woken.set()
    if _ring is not None:
        _ring.wake()
    for thread in _threads:
        thread.join(_JOINING)
    _threads.clear()


def pause(on: bool) -> None:
    """While on, this process does not count as stuck."""
    global _paused
    _paused = on
