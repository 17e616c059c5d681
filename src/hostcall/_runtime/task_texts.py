"""What is said about coroutines: where one waits, and why one could not run."""

from __future__ import annotations

import os
import traceback
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

# The folder of the package. Frames of its code are skipped.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def stack_of(coroutine: Any) -> str:
    """Where a coroutine waits, in the user's code."""
    lines = []
    inner = coroutine
    while True:
        # By their types: a user's awaitable may have every attribute.
        if type(inner) is types.CoroutineType:
            frame, behind = inner.cr_frame, inner.cr_await
        elif type(inner) is types.GeneratorType:
            frame, behind = inner.gi_frame, inner.gi_yieldfrom
        else:
            break
        if frame is not None and not frame.f_code.co_filename.startswith(_HERE):
            lines += traceback.format_stack(frame, limit=1)
        if frame is not None and "awaited_in_steps" in frame.f_locals:
            inner = frame.f_locals["awaited_in_steps"]
            continue
        inner = behind
    if not lines:
        return "has not begun to wait"
    return "waits in:\n" + "".join(lines).rstrip()


def would_wait(name: str) -> str:
    return (
        f"hostcall: a program that calls the coroutine function `{name}` was run on the"
        " thread of the event loop that should run it, so it would wait for itself."
        " Run the program on another thread: await asyncio.to_thread(program, x)"
    )


def closed(name: str) -> str:
    return (
        f"hostcall: the event loop was closed before the coroutine function `{name}`"
        " had ended. Keep the loop of hc.configure(loop=) open until the programs have"
        " ended; hostcall's own closes at the end of the process"
    )


def cancelled(name: str) -> str:
    return (
        f"hostcall: `{name}` was cancelled, but not by hostcall: something cancelled"
        " its task, or it raised asyncio.CancelledError"
    )


def blocked(name: str, loop: asyncio.AbstractEventLoop, seconds: float) -> str:
    if not loop.is_running():
        return (
            f"hostcall: a program waits for the coroutine function `{name}`, but the"
            " event loop given by hc.configure(loop=) does not run. Run it on another"
            " thread, or leave out loop= for hostcall's own"
        )
    return (
        f"hostcall: a program has waited {seconds:g} s for the event loop to take up"
        f" `{name}`: something blocks the loop's thread. If it waits for the program"
        " itself, run that on another thread: await asyncio.to_thread(program, x). In"
        " coroutine functions, use await asyncio.sleep and the like in place of calls"
        " that block"
    )
