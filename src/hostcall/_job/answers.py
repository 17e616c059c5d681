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

import contextlib
import itertools
from collections.abc import Collection
from dataclasses import replace

from hostcall import _jax
from hostcall._core import codec
from hostcall._core.wait import until_true, wait
from hostcall._job.mailbox import BOARD
from hostcall._runtime.running import ProcessStatus, doing

_ANSWERS = "hostcall/answers/"
_LARGEST = 1 << 22  # characters of an answer

_CODEC = codec.Codec({})
_numbers = itertools.count()


def ask(seconds: float) -> list[ProcessStatus]:
    """Asks all processes; those that do not answer in time are in the list too."""
    this_process, processes = _jax.place_in_job()
    question = f"{this_process}.{next(_numbers)}"
    asked = [process for process in range(processes) if process != this_process]
    own_status = doing(this_process)
    _jax.job_put(f"{BOARD}asks/{question}", "")
    try:
        texts = _fetch(f"{_ANSWERS}{question}", asked, seconds)
        statuses = [_read(process, texts.get(process)) for process in asked]
        statuses.insert(this_process, own_status)  # they are in the order of numbers
        return statuses
    finally:
        # Also after Ctrl-C: a question that stays would be answered by all for ever.
        _jax.job_delete(f"{BOARD}asks/{question}")
        _jax.job_delete(f"{_ANSWERS}{question}/")


def answer(question: str) -> None:
    """Answers another process. Called on the job's thread."""
    status = doing(_jax.job_rank())
    text = codec.write(_CODEC.encode(status, "an answer"))
    _jax.job_put(f"{_ANSWERS}{question}/{status.process}", text)


def _fetch(folder: str, processes: Collection[int], seconds: float) -> dict[int, str]:
    """The texts in `folder`/<process>, of those that have put one there in time.

    Looks 20 times a second, so that Ctrl-C ends the wait.
    """
    texts: dict[int, str] = {}

    def all_are_there() -> bool:
        for process in processes:
            if process in texts:
                continue
            text = _jax.job_get(f"{folder}/{process}")
            if text is not None:  # it may be empty
                texts[process] = text
        return len(texts) == len(processes)

    wait(until_true(all_are_there), seconds)
    return texts


def _read(process: int, text: str | None) -> ProcessStatus:
    """What `answer` wrote; no answer if it is not there yet, or if these are other
    texts: anyone who reaches the service can write there.
    """
    if text is not None and len(text) <= _LARGEST:
        with contextlib.suppress(codec.Malformed, KeyError):
            json_status = codec.read(text)
            status: ProcessStatus = _CODEC.decode(json_status, ProcessStatus, "answer")
            # By the key, not by what the text says of itself.
            return replace(status, process=process, answered=True)
    return ProcessStatus(process, answered=False)
