"""A thread that tells the other processes of a job what this one is doing.

The idea: if a job hangs, the main thread of each process waits inside XLA, and nobody
can ask it anything. So each process has a thread that looks, twice a second, for
questions in the store that the job's processes share (_jax/coordination.py), and
answers them there.

    asker                                 each other process's thread
    put  questions/<id>
                                          sees a question that it has not answered
                                          put  answers/<id>/<its number>
    get  answers/<id>/<number>, of each
    delete both

Guarantees
  * The thread starts only in a job of several processes, with the first program that
    has a call or a tap. It needs the GIL for some 50 us each time that it looks.
  * It answers as long as Python runs in any thread: waits in XLA and in sleeping
    callbacks release the GIL. A process that is stopped, has ended, or whose C code
    keeps the GIL does not answer, and the asker says so.
  * Asking needs no device and no program, so it works while all devices wait.
  * A question is answered once. Questions and answers are deleted by the asker. If it
    dies first, they stay in the store, a few kilobytes.

The end. The thread is a daemon, since a program that ends must not wait for it, but it
is told to stop and is joined before the interpreter ends: Python would otherwise end it
inside C++ code, which aborts the process (as for _runtime/watcher.py). It sleeps on an
event between its looks, and a look takes a millisecond, so `stop` waits no longer. It
never uses the store's blocking requests: one that nobody answers could be ended by
nothing here, and each leaves a callback in the service. If the service itself does not
reply (the first process is stopped), a look takes as long as JAX's client waits. Then
`stop` leaves the thread behind after 2 s. JAX's own shutdown, which comes after, waits
for the same service, and ends the process if it does not reply.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import Any

import jax

from hostcall import _jax
from hostcall._runtime import running

_LOOK = 0.5  # seconds between two looks for questions
_FETCH = 0.02  # seconds between two looks for answers
_PATIENCE = 2.0  # seconds that `stop` waits at most

_QUESTIONS = "hostcall/questions/"
_ANSWERS = "hostcall/answers/"

_lock = threading.Lock()  # two programs may be lowered at once; start one thread only
_thread: threading.Thread | None = None
_stopped = threading.Event()
_numbers = itertools.count()


def start() -> None:
    """Starts the thread, once, if the job has several processes."""
    global _thread
    # Set once, and cleared in a forked child only: the first look needs no lock.
    if _thread is not None or _jax.job_size() == 1:
        return
    with _lock:
        if _thread is None and not _stopped.is_set():
            thread = threading.Thread(
                target=_answer, daemon=True, name="hostcall-answers"
            )
            thread.start()
            _thread = thread


def stop() -> None:
    """Ends the thread, for good."""
    _stopped.set()
    if _thread is not None:
        _thread.join(_PATIENCE)


def after_fork() -> None:
    """Forgets the thread, which does not exist in a forked child."""
    global _thread, _lock, _stopped
    _thread, _lock, _stopped = None, threading.Lock(), threading.Event()


def ask(seconds: float) -> dict[int, dict[str, Any] | None]:
    """Asks all processes what they are doing (`running.told`).

    Returns the answers by the number of the process; None where none came in time.
    """
    here, processes = _jax.place_in_job()
    if processes == 1:
        return {0: running.told()}
    start()
    question = f"{here}.{next(_numbers)}"
    end = time.monotonic() + seconds
    said: dict[int, dict[str, Any] | None]
    said = dict.fromkeys(range(processes))
    _jax.job_put(_QUESTIONS + question, str(seconds))
    try:
        said[here] = running.told()
        while True:
            for process in [p for p, answer in said.items() if answer is None]:
                answer = _jax.job_get(f"{_ANSWERS}{question}/{process}")
                said[process] = None if answer is None else json.loads(answer)
            if None not in said.values() or time.monotonic() >= end:
                return said
            time.sleep(_FETCH)
    finally:
        _jax.job_delete(_QUESTIONS + question)
        _jax.job_delete(f"{_ANSWERS}{question}/")


def _answer() -> None:
    done: set[str] = set()
    while not _stopped.wait(_LOOK):
        if _jax.job_size() == 1:
            return  # the job was left: jax.distributed.shutdown()
        try:
            done = _look(done)
        except jax.errors.JaxRuntimeError:
            # The service did not reply: it is gone, or the network is. JAX's client
            # notices the first and ends the process; the second passes.
            continue


def _look(done: set[str]) -> set[str]:
    """Answers new questions. Returns those that are there and answered."""
    here, there = _jax.job_rank(), set(_jax.job_folder(_QUESTIONS))
    for question in there - done:
        asker = int(question.partition(".")[0])
        if asker != here:
            answer = json.dumps(running.told())
            _jax.job_put(f"{_ANSWERS}{question}/{here}", answer)
    return there
