"""Awaits what a user's function returned, with the settings of host code in each step.

A coroutine runs in steps: it runs until it waits for something, and is resumed when
that is there. Between its steps other tasks run on the same thread, the user's own
among them. So the settings are set before each step, and put back after it.
"""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Callable, Generator
from typing import Any

from hostcall._core.source import PACKAGE
from hostcall._policies.layer import Value
from hostcall._runtime import workers


async def awaited(call: Callable[[], Any], settings: workers.ThreadSettings) -> Value:
    """Makes a call, and awaits what it returns if that can be awaited."""
    awaitable = settings.run(call)
    if not inspect.isawaitable(awaitable):
        return awaitable  # a plain function of a HostFunction's or an object's
    if not inspect.iscoroutine(awaitable):
        return await awaitable  # a future, which runs no code of its own
    return await _stepped(awaitable, settings.run)


@types.coroutine
def _stepped(
    awaited_in_steps: Any, run: Callable[..., Any]
) -> Generator[Any, Any, Value]:
    """Awaits, with the settings of host code during each step, not between them."""
    # What a coroutine yields goes out to asyncio, and what asyncio answers goes in: a
    # value is sent, an error (of what it waits for, or CancelledError) is thrown.
    step: Callable[[Any], Any] = awaited_in_steps.send
    answer: Any = None
    try:
        while True:
            try:
                waits_for = run(step, answer)
            except StopIteration as end:
                return end.value
            try:
                step = awaited_in_steps.send
                answer = yield waits_for
            except GeneratorExit:
                raise
            except BaseException as error:
                step = awaited_in_steps.throw
                answer = error
    finally:
        awaited_in_steps.close()


def stack_of(coroutine: Any) -> str:
    """Where a coroutine waits, in the user's code; completes a sentence."""
    lines = []
    inner = coroutine
    while True:
        # By their types: a user's awaitable may have every attribute.
        if type(inner) is types.CoroutineType:
            frame = inner.cr_frame
            behind = inner.cr_await
        elif type(inner) is types.GeneratorType:
            frame = inner.gi_frame
            behind = inner.gi_yieldfrom
        else:
            break
        if frame is not None:
            if not frame.f_code.co_filename.startswith(PACKAGE):
                lines += traceback.format_stack(frame, limit=1)
            # `_stepped` awaits nothing that Python knows of: it drives the coroutine.
            behind = frame.f_locals.get("awaited_in_steps", behind)
        inner = behind
    if not lines:
        return "has not begun to wait"
    return "waits in:\n" + "".join(lines).rstrip()
