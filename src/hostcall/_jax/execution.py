"""What looks at each program before JAX runs it.

JAX has no hook that runs before a program does. It does read the truth of
`jax_no_execution` then, so an object in the place of that setting's value has its
`__bool__` called, and finds the program in the caller's frame. The value is part of the
keys of JAX's caches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import jax

from hostcall._jax.dispatch import forget_all_tokens
from hostcall._jax.door import pxla as _pxla
from hostcall._jax.installing import install
from hostcall._jax.patches import When
from hostcall._jax.settings import UNSET
from hostcall._jax.types import Device, Executable


class ExecutionGuard:
    """Looks at the programs that a thread, or the process, starts.

    It takes the place of the value of `jax_no_execution`. JAX reads the truth of that
    value before it executes a program, and before it puts one on its fast path. A
    program that was on the fast path outside a callback is looked at there too, since
    it has another key. A program that has passed gets a fast path under this guard's
    key, and is not looked at again.

    Attributes:
        hidden_value: the value that it stands in front of; UNSET: that of the process.
    """

    def __init__(
        self,
        check: Callable[[Sequence[Device]], object] | None = None,
        hidden_value: object = UNSET,
    ) -> None:
        """`check` gets a program's devices, and raises in order to refuse it."""
        self._check = check
        self.hidden_value = hidden_value

    def __bool__(self) -> bool:
        # JAX asks with no arguments, so its frame is the only thing that says which
        # program it is about. Wrapping what JAX calls with the program is no other way:
        # a wrapper around ExecuteReplicated.__call__ is there for every program of the
        # process, and none is passed on the fast path. tests/inside/test_door.py holds
        # that each JAX asks in these two functions, and has the program there.
        return self.forbids(sys._getframe(1))

    def forbids(self, frame: FrameType) -> bool:
        """Looks at the program that JAX is about to start in this frame. Returns what
        JAX takes for the value of its setting.
        """
        if self._check is not None:
            program = _program_that_asks(frame)
            self._check(() if program is None else program._local_devices)
        hidden_value = self.hidden_value
        if hidden_value is UNSET:
            hidden_value = jax.no_execution.get_global()
        # Not by its truth: that would look at this frame.
        if isinstance(hidden_value, ExecutionGuard):
            return hidden_value.forbids(frame)
        return bool(hidden_value)


def _program_that_asks(frame: FrameType) -> Executable | None:
    """The program that JAX is about to execute or to put on its fast path, found in the
    frame that reads the setting.
    """
    # JAX asks in two functions: the one that runs a program has it as `self`, the one
    # that decides about the fast path has what holds it as `executable`.
    executable, program = map(frame.f_locals.get, ("executable", "self"))
    if isinstance(executable, _pxla.MeshExecutable):
        program = executable.unsafe_call
    return program if isinstance(program, _pxla.ExecuteReplicated) else None


# --- A process that may take no further part in programs over several processes ------

_refusal_across: Callable[[], Exception] | None = None


class _AcrossGuard(ExecutionGuard):
    """Looks at the programs of the whole process.

    It also takes the place of the value of `jax_no_tracing`, which JAX reads when a
    jitted function is called that is not on the fast path. There the arguments show
    whether the program would span processes, so it is refused before it is compiled,
    which may take minutes.
    """

    def forbids(self, frame: FrameType) -> bool:
        if frame.f_code.co_name == "_get_fastpath_data":
            # JAX has just dispatched this program and asks whether its next calls may
            # take the fast path. True forbids that, so each of them is looked at here.
            # The same value means "raise" where a program is executed, and only the
            # function that asks tells one from the other (see `__bool__`).
            return True
        _refuse_across(frame)
        return super().forbids(frame)


def refuse_programs_across(refusal: Callable[[], Exception]) -> None:
    """From now on, a program over several processes raises instead of starting.

    Every program is traced and compiled once more when it is next called.
    """
    global _refusal_across
    _refusal_across = refusal
    for setting in (jax.no_tracing, jax.no_execution):
        # A second failure finds the guards in their place.
        if not isinstance(setting.get_global(), _AcrossGuard):
            guard = _AcrossGuard(hidden_value=setting.get_global())
            setting.set_global(guard)


def _refuse_across(frame: FrameType) -> None:
    addressed: Sequence[jax.Array | jax.sharding.Sharding]
    program = _program_that_asks(frame)
    if program is None:  # a function that is not traced yet: look at its arguments
        arguments = [frame.f_locals.get(name) for name in ("args", "kwargs")]
        addressed = [
            leaf
            for leaf in jax.tree.leaves(arguments)
            if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        ]
    else:
        in_shardings = program.in_handler.in_shardings
        addressed = [*in_shardings, *program.out_handler.out_shardings]
    is_local = all(sharded.is_fully_addressable for sharded in addressed)
    if _refusal_across is not None and not is_local:
        raise _refusal_across()


# --- A forked child ------------------------------------------------------------------

_refuse: list[Callable[..., NoReturn]] = []


def refusing(plain: Callable[..., Any]) -> Callable[..., NoReturn]:
    """What a forked child has in place of JAX's functions (patches.py)."""
    del plain
    return _refuse[0]


def refuse_programs(refusal: Callable[[], Exception]) -> None:
    """Refuses lowering, compiling and running in this process; tracing still works.

    This is for a forked child, in which they would wait for threads that do not exist
    there (MLIR's pool and XLA's).
    """

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        del args, kwargs
        raise refusal()

    # The parent's tokens never become ready here: a wait at the child's end would hang.
    forget_all_tokens()
    _refuse[:] = [refuse]
    install(When.FORK)
    setting = jax.no_execution
    guard = ExecutionGuard(refuse, hidden_value=False)
    setting.set_global(guard)
    if setting.get_local() is not UNSET:  # a callback's guard: the callback has forked
        setting.set_local(guard)
