"""Gives each sink what the writer has written, on a thread of its own.

A feed is told where batches lie in the run's files, and reads them from there. So a
sink that is slow costs no memory and delays nobody, and loses nothing: the disk is its
queue. Batches are never changed once they are written.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

import numpy as np

from hostcall.tools._recorder.errors import Worker
from hostcall.tools._recorder.stream import Stream

Sink = Callable[[dict[str, np.ndarray]], object]


class Feed:
    def __init__(self, sink: Sink, owner: object) -> None:
        """`owner` is the recorder that raises the sink's error."""
        name = getattr(sink, "__name__", type(sink).__name__)
        self._sink, self._who = sink, f"the sink {name}"
        self._batches: queue.SimpleQueue[tuple[Stream, int] | None]
        self._batches = queue.SimpleQueue()
        self._thread = Worker(owner, f"hostcall-sink-{name}", self._who, self._run)

    def put(self, stream: Stream, begin: int) -> None:
        self._batches.put((stream, begin))

    def close(self) -> None:
        """Waits until the sink has everything, or has failed."""
        self._batches.put(None)
        self._thread.join()

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
                f"hostcall: {self._who} raised this, and got nothing more."
                " The run's folder has all rows"
            )
            raise
