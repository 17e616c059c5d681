"""A pool that is made anew when one of its workers has died."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Retrying:
    """What `hc.retrying` returns, which describes it.

    Attributes:
        retries: how often the rows of one call are sent again.
    """

    def __init__(self, make: Callable[[], Any], retries: int) -> None:
        self._make, self.retries = make, retries
        # Held while a pool is made, so that calls at the same time share one.
        self._lock = threading.Lock()
        self._pool: Any = None

    def __repr__(self) -> str:
        return f"<hc.retrying({self._make!r}, retries={self.retries})>"

    def pool(self) -> Any:
        """The pool that works now; made if there is none."""
        with self._lock:
            if self._pool is None:
                self._pool = self._make()
            return self._pool

    def drop(self, pool: Any = None) -> None:
        """Ends this pool, or the one that works now; the next call makes another."""
        with self._lock:
            ended = self._pool if pool is None else pool
            if self._pool is ended:
                self._pool = None
        if ended is None:
            return
        if hasattr(ended, "shutdown"):
            ended.shutdown(wait=False, cancel_futures=True)
        else:
            ended.terminate()

    def close(self) -> None:
        """Ends the pool. A later call makes a new one."""
        self.drop()

    def __enter__(self) -> Retrying:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def now(executor: Any) -> Any:
    """The executor that is meant: of a `Retrying`, the pool that works now."""
    return executor.pool() if isinstance(executor, Retrying) else executor
