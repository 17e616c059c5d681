"""Threads of hostcall's own that call the user's functions."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any


def daemon(name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
    """A daemon thread with no context variables set; not started yet.

    From Python 3.14 on a thread may inherit those of the thread that starts it, and
    without the GIL it does so by default. Then everything that this thread calls would
    belong to whatever started it: in a notebook, prints would go to that cell for ever.
    """
    options: dict[str, Any] = {"name": name, "daemon": True}
    if sys.version_info >= (3, 14):
        options["context"] = contextvars.Context()
    return threading.Thread(target=target, args=args, **options)
