"""The thread that reads what the other processes of a job say, and writes for this one.

JAX's coordination service keeps a store of texts (_jax/coordination.py). One folder of
it is the job's board. All processes look at it, twice a second, and less often in jobs
of more than 250 processes:

    failed/<process>   the text of that process's first failure
    ends/0             process 0, and with it the store, is about to end (job.py)
    asks/<question>    a question what all processes are doing (answers.py)

So the news of a failure is one write for the process that failed, and one read of a
small folder for each other process. A look needs the GIL for some 50 us. It never
blocks in the service, where each wait that finds nothing would leave 35 KB for ever.

The thread works as long as Python runs in any thread: waits in XLA and in sleeping
callbacks release the GIL. It also writes, so that a failing call waits for the service
no longer than it wants to. It is a daemon, and is joined before the interpreter ends:
Python would otherwise end it inside C++, which aborts the process. If the service does
not answer any more, it is left behind there.

Whoever reaches the service's port can write there. So names are taken apart by fixed
patterns, texts are cut, and nothing is looked up by what they say.
"""

from __future__ import annotations

import contextlib
import queue
import re
from concurrent.futures import Future
from typing import Protocol

import jax

from hostcall import _jax
from hostcall._core.daemon import Service
from hostcall._core.errors import HostcallError
from hostcall._core.wait import until_result, wait

BOARD = "hostcall/board/"
LEFT = "hostcall/left/"  # a key for each process that ends after a failure

_LOOKS = 500.0  # looks of all processes together that the service gets in a second
_NAME = re.compile(r"(failed|ends|asks)/([0-9]{1,9})(\.[0-9]{1,18})?", re.ASCII)


class Reader(Protocol):
    """Gets what others have put on the board, each once, on the mailbox's thread."""

    def failed_there(self, process: int, text: str) -> None: ...
    def service_ends(self) -> None: ...
    def asked(self, question: str) -> None: ...
    def looked(self) -> None:
        """Called after each look."""


class Mailbox:
    """The thread. `post`, `send` and `stop` may be called by any other one.

    Attributes:
        pause: seconds between two looks.
        patience: seconds that a failing call waits until the others are told.
    """

    patience = 0.5

    def __init__(self, reader: Reader) -> None:
        self.pause = max(0.5, _jax.job_size() / _LOOKS)
        self._reader = reader
        self._seen: set[str] = set()  # the names on the board that it has been told of
        # The letters (key, text, when it is there).
        self._outbox = queue.SimpleQueue[tuple[str, str, Future[None]]]()
        self._stopping = False  # set before the last one is put there
        self._thread = Service("hostcall-job", self._run, "a job")

    def start(self) -> None:
        # Python starts no thread in handlers of atexit: nobody is told anything then.
        with contextlib.suppress(HostcallError, RuntimeError):
            self._thread.start()

    def post(self, key: str, text: str = "") -> Future[None]:
        """Stores a text (none without a key), after one more look at what the others
        say.
        """
        posted: Future[None] = Future()
        self._outbox.put((key, text, posted))
        return posted

    def send(self, key: str, text: str = "") -> None:
        """Posts a text, and waits until it is there, but not for long."""
        wait(until_result(self.post(key, text)), self.patience)

    def stop(self) -> None:
        """Ends the thread, after what has been posted. A thread that waits for a
        service that does not answer is left behind.
        """
        self._stopping = True
        self.post("")
        self._thread.join(4 * self.patience)

    def _run(self) -> None:
        """The thread: looks at the board, writes a letter if there is one; again."""
        while not (self._stopping and self._outbox.empty()):
            # If nothing is posted in time, there is only the look, for which nobody
            # waits.
            key = ""
            text = ""
            posted = Future[None]()
            with contextlib.suppress(queue.Empty):
                key, text, posted = self._outbox.get(timeout=self.pause)
            # A look comes before each letter: what is written may follow from another
            # process's failure, which must be known then.
            try:
                if _jax.job_size() == 1:  # jax.distributed.shutdown()
                    return
                # The service is gone, or the network is. JAX ends the process for the
                # first, and the second passes.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._look()
                    self._reader.looked()
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    if key:
                        _jax.job_put(key, text)
            finally:
                posted.set_result(None)

    def _look(self) -> None:
        """Tells the reader of what is new on the board."""
        this_process, size = _jax.place_in_job()
        board = _jax.job_folder(BOARD)
        self._seen &= board.keys()  # what was asked is deleted by who asked
        # Failures first: an answer may fail.
        for name in sorted(board.keys() - self._seen, reverse=True):
            self._seen.add(name)
            match = _NAME.fullmatch(name)
            if match is None:  # somebody else has written it
                continue
            kind, digits, _ = match.groups()
            process = int(digits)
            if process == this_process or process >= size:
                continue
            if kind == "failed":
                self._reader.failed_there(process, board[name])
            elif kind == "asks":
                self._reader.asked(name.removeprefix("asks/"))
            elif process == 0:  # only its end takes the store along
                self._reader.service_ends()
