"""An event loop of a user's that is closed while a coroutine of a call waits on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from limits import HANG_SECONDS


def close_under(
    loop: asyncio.AbstractEventLoop, call: Callable[[], object], begun: threading.Event
) -> None:
    """Runs the loop, and `call` on another thread; closes the loop once `begun` is set,
    and returns when the call has ended.
    """
    runs = threading.Thread(target=loop.run_forever)
    caller = threading.Thread(target=call)
    runs.start()
    caller.start()
    assert begun.wait(HANG_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    runs.join(HANG_SECONDS)
    tasks = asyncio.all_tasks(loop)
    loop.close()
    caller.join(HANG_SECONDS)
    assert not caller.is_alive()
    # asyncio warns of tasks that are dropped while they wait; the loop was closed under
    # them on purpose.
    for task in tasks:
        task._log_destroy_pending = False
