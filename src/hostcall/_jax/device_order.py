"""Ordered programs of a thread in the order of their dispatches, over any devices.

XLA runs the programs of one thread on one CPU device in order, and JAX hands tokens
from program to program where it dispatches in Python. Between them they leave these
cases, which are put in order here:

  * An ordered program without tokens (fast_dispatch.py) after an ordered one on another
    device, or before one. Its dispatch waits until the thread's ordered programs before
    it have ended, and the taps of GPUs are in the queue. (JAX waits for the programs
    too, when it moves a token to another device.)
  * A program over several CPU devices. It is not behind the thread's last one, nor is
    the next one behind it. So its dispatch waits for those before it, and on each of
    its devices a program that does nothing is dispatched after its token.

A dispatch in JAX's C++ asks nobody. So long as all ordered programs of the process have
one CPU device in common, and those without tokens are for that device, none needs to:
`_Process.is_several` is False. From the first ordered program elsewhere on, JAX
dispatches ordered programs in Python, whose `__call__` is wrapped here (patches.py).

Programs that host code dispatches are left out: they have ended before the call that
they are in has.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from hostcall._jax.dispatch import (
    REPORTS,
    handlers,
    ordered_tokens_of,
    run_nothing,
    wait_for_programs,
)
from hostcall._jax.door import dispatch as _dispatch
from hostcall._jax.door import jaxlib as _jaxlib
from hostcall._jax.door import stages as _stages
from hostcall._jax.fast_dispatch import ORDERED_WITHOUT_TOKENS
from hostcall._jax.types import Device, Executable
from hostcall._native import await_taps_of_gpus, current

Devices = tuple[Device, ...]

_SHORT = 0.1  # seconds


class _Process:
    """What is known of the ordered programs of this process. Without a lock: each step
    adds something first, and then looks at all that is there.
    """

    def __init__(self) -> None:
        self.is_several = False
        # The devices of each ordered program, and of each one without tokens.
        self._all: set[Devices] = set()
        self._alone: set[Devices] = set()
        # Programs without tokens, by their identity.
        self._programs: dict[int, weakref.ref[Executable]] = {}

    def note(self, program: Executable, devices: Devices) -> None:
        """A program is about to be dispatched in Python. Every one is so at first."""
        self._all.add(devices)
        if not program.ordered_effects:
            self._alone.add(devices)
            forget = functools.partial(self._forget, id(program))
            self._programs.setdefault(id(program), weakref.ref(program, forget))
        # What was added above is seen by whichever of two threads looks last, so one of
        # them finds that there are several.
        if self.is_several:
            _keep_in_python(program)
        elif not self._have_one_in_common():
            self.is_several = True
            for reference in list(self._programs.values()):
                _keep_in_python(reference())
            _jaxlib.PjitFunctionCache.clear_all()  # of what C++ would dispatch

    def _have_one_in_common(self) -> bool:
        # Of a program without tokens XLA keeps the order on its one device. So a second
        # such device, or one with tokens that leaves it out, would be in no order.
        alone = list(self._alone)
        if not alone:  # JAX's tokens keep the others in order
            return True
        if len(alone) > 1:
            return False
        (common,) = alone
        return all(set(common) <= set(devices) for devices in list(self._all))

    def _forget(self, key: int, dead: object) -> None:
        # Another program may have the identity of the dead one by now.
        if self._programs.get(key) is dead:
            del self._programs[key]


def _keep_in_python(program: Executable | None) -> None:
    """JAX dispatches a program in Python if it has effects."""
    if program is not None and not program.ordered_effects:
        program.has_unordered_effects = True


_process = _Process()


class _Thread(threading.local):
    """The devices of the thread's last ordered program; None if that is not known."""

    devices: Devices | None = None


_last = _Thread()


def start_anew() -> None:
    """Forgets on which devices ordered programs have run. They must have ended."""
    global _process
    _process = _Process()
    _last.devices = None


def _is_without_tokens(program: Executable) -> bool:
    return ORDERED_WITHOUT_TOKENS in (program.keepalive or ())


def _is_behind(devices: Devices, last: Devices | None) -> bool:
    """Whether a program over these devices comes after all that the thread's last one
    does, without a wait.
    """
    if last is None:
        return False
    if devices[0].platform == "cpu":
        return set(devices) <= set(last)
    # Of several GPUs any one may have tapped.
    return devices == last


def _before(program: Executable) -> None:
    """Has a program that is about to be dispatched come after those before it."""
    devices = tuple(program._local_devices)
    _process.note(program, devices)
    last = _last.devices
    _last.devices = devices
    # XLA puts it behind no program over one device (see order.md).
    if len(devices) > 1 and devices[0].platform == "cpu":
        wait_for_programs()
    if _process.is_several and not _is_behind(devices, last):
        wait_for_programs()
        for token in list(_dispatch.runtime_tokens.current_tokens.values()):
            with contextlib.suppress(*REPORTS):  # told to whoever waits for it
                token.block_until_ready()
        # A GPU's taps may come after their program has ended, on a stream of their own.
        if last is None or last[0].platform != "cpu":
            while not await_taps_of_gpus(_SHORT, reached_only=False):
                pass  # where Ctrl-C may come


def _after(program: Executable) -> None:
    """Has what the thread dispatches next come after this program."""
    devices = program._local_devices
    if len(devices) > 1 and devices[0].platform == "cpu":
        for token in ordered_tokens_of(program):
            for part in token._buf.addressable_shards:
                run_nothing(part.device, part.data)


# --- What is replaced (patches.py) ----------------------------------------------------

Call: TypeAlias = Callable[..., list[jax.Array]]


def dispatch_in_order(plain: Call) -> Call:
    """Keeps ordered programs in order, as this file says."""

    @functools.wraps(plain)
    def call(self: Executable, *args: jax.Array) -> list[jax.Array]:
        is_ordered = bool(self.ordered_effects) or _is_without_tokens(self)
        if not is_ordered or current() is not None:
            return plain(self, *args)
        with handlers.quietly():
            _before(self)
        results = plain(self, *args)
        # Of a program that has failed already there is nothing to wait for.
        with handlers.quietly(), contextlib.suppress(*REPORTS):
            _after(self)
        return results

    return call


def cpp_call_in_order(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function (`jax.jit(f).lower().compile()`) has a dispatch in C++ of its
    own, which is given once and asks nothing later.
    """

    @functools.wraps(plain)
    def create_cpp_call(self: Any, params: _stages.CompiledCallParams) -> object:
        fast = plain(self, params)
        if fast is None or not _is_without_tokens(self.unsafe_call):
            return fast

        def call(*args: object, **kwargs: object) -> object:
            if _process.is_several:
                return jax.stages.Compiled.call(params, *args, **kwargs)[0]
            return fast(*args, **kwargs)

        return call

    return create_cpp_call
