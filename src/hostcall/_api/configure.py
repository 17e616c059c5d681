"""`hc.configure`: settings of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Never

from hostcall import _native
from hostcall._core import config, mistakes
from hostcall._core.option_checks import check
from hostcall._core.options import Option, choice
from hostcall._runtime import flights

if TYPE_CHECKING:
    import asyncio


def configure(
    *,
    tap_queue_bytes: int | None = None,
    pinned_bytes: int | None = None,
    residuals: int | None = None,
    flight: Literal["sigterm", "signals", "off"] | None = None,
    loop: asyncio.AbstractEventLoop | Literal["own"] | None = None,
    fail: Literal["together", "alone"] | None = None,
    **unknown: Never,
) -> None:
    """Changes settings of this process. Settings that are None stay as they are.

    Args:
        tap_queue_bytes: how many bytes queued taps may hold until they are delivered. A
            single value above the limit is queued when the queue is empty. On GPUs,
            taps may hold as many bytes of pinned memory in addition. Default: 256e6, or
            the environment variable HOSTCALL_TAP_QUEUE_BYTES.
        pinned_bytes: how many bytes of pinned memory calls on GPUs may hold. Default:
            1e9, or the environment variable HOSTCALL_PINNED_BYTES.
        residuals: how many Python objects, returned as residuals by the forward rules
            of `defvjp`, are kept for their backward rules. When one more is added, the
            oldest are dropped. If a backward rule finds its residuals dropped, the
            forward rule runs again, which is logged once per function. 0 keeps none.
            Default: 1024, or the environment variable HOSTCALL_RESIDUALS.
        flight: when the flight recorder (`hc.monitor.flight()`) is printed. "sigterm":
            to the log when a callback would deadlock, and to stderr when SIGTERM comes
            and the program has no handler for it. When a call takes longer than its
            `timeout=`, the running calls are logged, once. "signals": also to stderr
            when the process dies of SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL. This
            installs handlers, which call those before them. faulthandler may be enabled
            before or after. "off": never. Default: "sigterm", or the environment
            variable HOSTCALL_FLIGHT.
        loop: the event loop on which coroutine functions run. It must run on another
            thread than the one that waits for the program. "own": a loop on a thread of
            hostcall's, made when it is first needed (uvloop's, if that is installed).
            Default: "own".
        fail: the default of `hc.call(fail=)`, which counts when a program is compiled.
            It also holds for the drop-ins, HostFunctions and objects. Default: "alone".
        **unknown: no other setting exists. One that is gone says what to write.

    Raises:
        SpecError: a value is not valid. No setting has changed then.
    """
    arguments = locals()
    _FACE.refuse(unknown, "setting")
    changes = {
        name: arguments[name] for name in _SETTINGS if arguments[name] is not None
    }
    check("hc.configure", changes, _SETTINGS)  # all of them before one is changed
    for name, value in changes.items():
        if _SETTINGS[name] is _SIZE:
            changes[name] = int(value)  # 256e6 is a float, and the engine takes none
    if isinstance(loop, str):  # "own", for which the setting is None
        changes["loop"] = None
    config.settings.change(changes)
    if flight is not None:
        flights.apply()
    # A forked child's engine is closed, and may hold locks of the parent's threads.
    if not _native.forked():
        tap_queue_bytes = config.settings.tap_queue_bytes
        _native.set_tap_limit(tap_queue_bytes)
        _native.limit_pinned(config.settings.pinned_bytes, tap_queue_bytes)


_FACE = mistakes.Face(
    "hc.configure",
    "hc.configure({args})",
    mistakes.options_of(configure, "unknown"),
    gone={
        "cache_bytes": "it was the limit of hc.host(cache=), which is gone."
        " functools.lru_cache(maxsize) has a limit of its own",
        "fail_grace": "no process of a job ends itself any more. The launcher ends the"
        " others when one ends (srun --kill-on-bad-exit), and"
        " jax.distributed.initialize(heartbeat_timeout_seconds=10) notices the dead",
    },
)


def _is_loop(value: object) -> bool:
    import asyncio  # most programs need none, and it takes long to import

    is_own = isinstance(value, str) and value == "own"
    return is_own or isinstance(value, asyncio.AbstractEventLoop)


def _is_size(value: Any) -> bool:
    """Whether it is a whole number, of any type, that the engine can take."""
    if isinstance(value, bool):
        return False
    try:
        size = int(value)
    except (TypeError, ValueError, OverflowError):  # a text, or infinite
        return False
    return bool(size == value) and 0 < size < 1 << 63  # of 64 bits, with a sign


_SIZE = Option("a number of bytes above 0, such as 256e6 for 256 MB", _is_size)
_SETTINGS = {
    "tap_queue_bytes": _SIZE,
    "pinned_bytes": _SIZE,
    "residuals": Option(
        "a number of objects, 0 or more",
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0,
    ),
    "flight": choice(*config.FLIGHTS, or_none=True),
    "loop": Option(
        "an event loop, as asyncio.get_running_loop() returns it, or 'own' for"
        " hostcall's",
        _is_loop,
    ),
    "fail": choice(*config.FAILS, or_none=True),
}
