"""Threads of hostcall's own that call the user's functions.

From Python 3.14 on a thread may inherit the context variables of the thread that starts
it, and without the GIL it does so by default. Then everything that this thread calls
would belong to whatever started it: in a notebook, prints would go to that cell for
ever. So these threads start with no context variables set.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any


def daemon(name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
    """A daemon thread; not started yet."""
    options: dict[str, Any] = {"name": name, "daemon": True}
    if sys.version_info >= (3, 14):
        options["context"] = contextvars.Context()
    return threading.Thread(target=target, args=args, **options)


class Pool(futures.ThreadPoolExecutor):
    """A pool whose threads, which `submit` starts, have no context variables set."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        return contextvars.Context().run(super().submit, fn, *args, **kwargs)
