"""What each process of a job is doing, asked and answered through the job's store.

The idea: if a job hangs, the main thread of each process waits inside XLA, and nobody
can ask it anything. So the thread of _job/mailbox.py answers questions.

    asker                                each other process's thread
    put  board/asks/<id>
                                         put  answers/<id>/<its number>, once
    get  answers/<id>/<number>, of each
    delete both

Asking needs no device and no program, so it works while all devices wait. A process
that is stopped, has ended, has run no program over several processes, or whose C code
keeps the GIL does not answer, and the asker says so. If the asker dies first, a few
kilobytes stay in the store.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from typing import Any, NamedTuple

from hostcall import _jax, _native
from hostcall._core.source import Place
from hostcall._job.mailbox import BOARD
from hostcall._runtime import running

_FETCH = 0.02  # seconds between two looks for answers
_LARGEST = 1 << 22  # characters of an answer

_numbers = itertools.count()


class Answer(NamedTuple):
    """What a process is doing."""

    pid: int
    taps: int
    main: str
    calls: list[running.Running]


def ask(seconds: float) -> dict[int, Answer | None]:
    """Asks all processes.

    Returns the answers by the number of the process; None where none came in time.
    """
    here, processes = _jax.place_in_job()
    answers: dict[int, Answer | None] = dict.fromkeys(range(processes))
    answers[here] = _own()
    if processes == 1:
        return answers
    question = f"{here}.{next(_numbers)}"
    end = time.monotonic() + seconds
    _jax.job_put(f"{BOARD}asks/{question}", "")
    try:
        while True:
            for process in [p for p, answer in answers.items() if answer is None]:
                answers[process] = _read(_jax.job_get(_key(question, process)))
            if None not in answers.values() or time.monotonic() >= end:
                return answers
            time.sleep(_FETCH)
    finally:
        _jax.job_delete(f"{BOARD}asks/{question}")
        _jax.job_delete(_key(question))


def answer(question: str) -> None:
    """Answers another process. Called on the job's thread."""
    pid, taps, main, calls = _own()
    said = [[c.name, *_line(c.place), *c[2:]] for c in calls]
    text = json.dumps([pid, taps, main, said])
    _jax.job_put(_key(question, _jax.job_rank()), text)


def _line(place: Place) -> tuple[str, int, str]:
    return place.file, place.line, place.function


def _own() -> Answer:
    main = running.stack_of(threading.main_thread().ident or 0)
    taps = _native.tap_queue()["pending"]
    return Answer(os.getpid(), taps, main, running.running())


def _read(text: str | None) -> Answer | None:
    """What `answer` wrote; None if it is not there yet, or if these are other texts:
    anyone who reaches the service can write there.
    """
    if text is None or len(text) > _LARGEST:
        return None
    try:
        pid, taps, main, said = _typed(json.loads(text), int, int, str, list)
        return Answer(pid, taps, main, [_call(one) for one in said])
    except (TypeError, ValueError, RecursionError):
        return None


def _call(said: Any) -> running.Running:
    name, file, line, function, seconds, row, thread, stack = _typed(
        said, str, str, int, str, float, list, int, str
    )
    place = Place(file, line, function)
    index = tuple(_typed(row, *[int] * len(row)))
    return running.Running(name, place, seconds, index, thread, stack)


def _typed(values: Any, *types: type) -> list[Any]:
    if type(values) is not list or tuple(map(type, values)) != types:
        raise TypeError("not what a process of this job writes")
    return values


def _key(question: str, process: int | str = "") -> str:
    return f"hostcall/answers/{question}/{process}"
