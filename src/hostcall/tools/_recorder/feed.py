"""Gives each sink what the writer has written, on a thread of its own.

A feed is told where batches lie in the run's files, and reads them from there. So a
sink that is slow costs no memory and delays nobody, and loses nothing: the disk is its
queue. Batches are never changed once they are written.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable

import numpy as np

from hostcall.tools._recorder import errors
from hostcall.tools._recorder.stream import Stream

Sink = Callable[[dict[str, np.ndarray]], object]


def wait_for(event: threading.Event) -> None:
    """Waits in slices: Python misses a Ctrl-C that comes just before a wait begins."""
    while not event.wait(0.1):
        pass


class Feed:
    def __init__(self, sink: Sink, owner: object) -> None:
        """`owner` is the recorder that raises the sink's error."""
        self._name = getattr(sink, "__name__", type(sink).__name__)
        self._sink = sink
        self._owner = owner
        self._batches: queue.SimpleQueue[tuple[Stream, int] | None]
        self._batches = queue.SimpleQueue()
        # An event, not Thread.join: after Ctrl-C in a join, Python before 3.13 believes
        # that the thread has ended.
        self._ended = threading.Event()
        name = f"hostcall-sink-{self._name}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        # It may inherit context variables, but not from whoever made the recorder.
        contextvars.Context().run(thread.start)

    def put(self, stream: Stream, begin: int) -> None:
        self._batches.put((stream, begin))

    def close(self) -> None:
        """Waits until the sink has everything, or has failed."""
        self._batches.put(None)
        wait_for(self._ended)

    def _run(self) -> None:
        try:
            try:
                while (batch := self._batches.get()) is not None:
                    self._sink(batch[0].columns_at(batch[1]))
            finally:
                close = getattr(self._sink, "close", None)
                if close is not None:
                    close()  # on the thread that called the sink, as SQLite demands
        except BaseException as error:
            error.add_note(
                f"hostcall: the sink {self._name} raised this, and got nothing more."
                " The run's folder has all rows"
            )
            errors.tell(self._owner, f"the sink {self._name}", error)
        finally:
            self._ended.set()
