"""The messages between the processes of a job: a numbered inbox for each of them.

JAX's coordination service keeps a store of texts (_jax/coordination.py). Text n of an
inbox is written once: a writer whose number is taken tries the next one. So no message
is lost or overwritten, and the reader reads without a gap.

`_lock` protects `_outbox`: any thread sends, and one posts (peers.py).
"""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any, NamedTuple

import jax

from hostcall import _jax


class Message(NamedTuple):
    """
    Attributes:
        kind: see peers.py.
        process: the process that it is about.
        text: what failed there.
    """

    kind: str
    process: int
    text: str

    def __str__(self) -> str:
        what = {
            "failed": f"failed: {self.text}",
            "died": "died without a word (killed, out of memory, or cut off)",
            "waits": "is at its end and waits for the others",
        }
        return f"process {self.process} {what.get(self.kind, self.kind)}"


_lock = threading.Lock()
_outbox: list[tuple[Message, list[int], threading.Event]] = []
_next: dict[int, int] = {}  # process -> the number in its inbox that may be free


def after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _outbox.clear()


def send(message: Message, to: list[int]) -> threading.Event:
    """Puts a message into the outbox; the event is set when it has been posted."""
    posted = threading.Event()
    with _lock:
        _outbox.append((message, to, posted))
    return posted


def post_all() -> None:
    """Writes all messages of the outbox into the inboxes."""
    while True:
        with _lock:
            if not _outbox:
                return
            message, to, posted = _outbox.pop(0)
        for process in to:
            # Without the service, nobody can be told; the ring or JAX tells them.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                post(message, process)
        posted.set()


def post(message: Message, process: int) -> None:
    text = json.dumps(message)
    number = _next.get(process, 0)
    while not _jax.job_put(_key(process, number), text):
        number += 1
    _next[process] = number + 1


def read(number: int) -> Message | None:
    """Message `number` to this process; None if there is none yet."""
    text = _jax.job_get(_key(_jax.job_rank(), number))
    if text is None:
        return None
    fields: list[Any] = json.loads(text)
    return Message(*fields)


def _key(process: int, number: int) -> str:
    return f"hostcall/inbox/{process}/{number}"
