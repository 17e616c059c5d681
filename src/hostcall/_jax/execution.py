"""Settings that JAX reads before it runs a program, used to look at that program.

JAX has no hook that runs before a program does. It does read the truth of
`jax_no_execution` then, so an object in the place of that setting's value has its
`__bool__` called, and finds the program in the caller's frame.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import jax
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import dispatch as _dispatch
from jax._src import mesh as _mesh
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla

from hostcall._jax.devices import back_ends_started, default_device
from hostcall._jax.fast_dispatch import forget_fast_dispatches
from hostcall._jax.types import Device, Executable, Jaxpr
from hostcall._jax.versions import MESH_SETTINGS
from hostcall._native import Ambient

if TYPE_CHECKING:
    from hostcall._jax.rewriting import Level, Use


class AmbientSetting(NamedTuple):
    """A thread-local setting of JAX's, with the methods of its class."""

    kind: Ambient
    setting: object
    swap: Callable[..., object]
    set: Callable[..., object]
    get: Callable[..., object]
    value: object


def ambient_settings() -> list[AmbientSetting]:
    """The settings that a callback gets values of its own for.

    A callback may run on the thread that dispatched the program, inside that
    thread's `jax.default_device` and `jax.set_mesh`, which it must not inherit.

    Returns:
        (kind, setting, its swap, set and get functions, value) for each setting. For
        the kinds DEVICE and GUARD the value comes from the call's plan instead.
    """
    of = _config.State
    abstract, concrete = MESH_SETTINGS
    return [
        AmbientSetting(kind, setting, of.swap_local, of.set_local, of.get_local, value)
        for kind, setting, value in (
            (Ambient.DEVICE, default_device, None),
            (Ambient.FIXED, abstract, _mesh.empty_abstract_mesh),
            # JAX sets this one only together with the one before it, so the engine
            # skips it where that one is not set (native/plan/call_scope.cc).
            (Ambient.WITH, concrete, _mesh.empty_concrete_mesh),
            (Ambient.GUARD, _config.no_execution, None),
        )
    ]


# What `get_local` returns for a setting that the calling thread has not set.
UNSET = _config.config_ext.unset


class ExecutionGuard:
    """Checks the programs that a callback starts, before they are executed.

    It takes the place of the value of `jax_no_execution`. JAX reads the truth of that
    value before it executes a program, and before it puts one on its fast path. The
    value is part of the keys of JAX's caches, so a program that was on the fast path
    outside the callback is checked too. A program that has passed gets a fast path
    under this guard's key, and is not checked again.
    """

    def __init__(self, check: Callable[[Sequence[Device]], object]) -> None:
        """`check` gets a program's devices, and raises in order to refuse it."""
        self._check = check

    def __bool__(self) -> bool:
        self.examine(sys._getframe(1))
        return False

    def examine(self, frame: FrameType) -> None:
        """Checks the program that JAX is about to start in this frame."""
        _refuse_across(frame)
        program = _program_that_asks(frame)
        self._check(() if program is None else program._local_devices)


def _program_that_asks(frame: FrameType) -> Executable | None:
    """The program that JAX is about to execute or to put on its fast path, found in the
    frame that reads the setting.
    """
    executable, program = map(frame.f_locals.get, ("executable", "self"))
    if isinstance(executable, _pxla.MeshExecutable):
        program = executable.unsafe_call
    return program if isinstance(program, _pxla.ExecuteReplicated) else None


# --- A process that may take no further part in programs over several processes ------

_refusal_across: Callable[[], Exception] | None = None


class _AcrossGuard:
    """Takes the place of the process-wide values of two settings.

    JAX reads `jax_no_execution` where `ExecutionGuard` says. It reads `jax_no_tracing`
    when a jitted function is called that is not on the fast path. There the arguments
    show whether the program would span processes, so it is refused before it is
    compiled, which may take minutes.
    """

    def __init__(self, before: object) -> None:
        self.before = before

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "_get_fastpath_data":
            # JAX has just dispatched this program and asks whether its next calls may
            # take the fast path. True forbids that, so each of them is checked here.
            return True
        _refuse_across(frame)
        return bool(self.before)


def refuse_programs_across(refusal: Callable[[], Exception]) -> None:
    """From now on, a program over several processes raises instead of starting.

    Both settings are set for the whole process. `jax_no_execution` is part of the keys
    of JAX's caches, so every program is traced and compiled once more when it is next
    called.
    """
    global _refusal_across
    _refusal_across = refusal
    for setting in (_config.no_tracing, _config.no_execution):
        if not isinstance(setting.get_global(), _AcrossGuard):
            setting.set_global(_AcrossGuard(setting.get_global()))


def _refuse_across(frame: FrameType) -> None:
    if _refusal_across is None:
        return
    program = _program_that_asks(frame)
    if program is None:  # a function that is not traced yet: look at its arguments
        leaves = jax.tree.leaves([frame.f_locals.get(n) for n in ("args", "kwargs")])
        tracer = jax.core.Tracer
        parts = [
            x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, tracer)
        ]
    else:
        parts = [*program.in_handler.in_shardings, *program.out_handler.out_shardings]
    if not all(part.is_fully_addressable for part in parts):
        raise _refusal_across()


# --- Programs that are rewritten where they are lowered -------------------------------


class _Rewriting:
    """How the programs are rewritten that a thread lowers.

    It is the thread's value of `jax_no_execution`, which is part of the keys of JAX's
    caches. So programs that were compiled before are kept and found again after, and
    blocks with equal keys share programs.

    Attributes:
        blocks: the uses of each open block.
        before: the value that it stands in front of; in a callback that is its guard.
    """

    def __init__(
        self, blocks: Sequence[Mapping[Hashable, Use]], before: object
    ) -> None:
        self.blocks, self.before = blocks, before
        self.uses = {key: use for block in blocks for key, use in block.items()}
        self._key = before, *self.uses

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rewriting) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __bool__(self) -> bool:
        """Whether programs may not run, which JAX asks before each."""
        frame = sys._getframe(1)
        if isinstance(self.before, ExecutionGuard):
            self.before.examine(frame)
        _refuse_across(frame)  # this value hides that of the process
        asks_for_fast_path = frame.f_code.co_name == "_get_fastpath_data"
        return _refusal_across is not None and asks_for_fast_path


def _rewriting_here() -> _Rewriting:
    value = _config.no_execution.get_local()
    return value if isinstance(value, _Rewriting) else _Rewriting((), value)


def _set_blocks(blocks: Sequence[Mapping[Hashable, Use]]) -> None:
    before = _rewriting_here().before
    _config.no_execution.set_local(_Rewriting(blocks, before) if blocks else before)


@contextlib.contextmanager
def rewritten_by(uses: Mapping[Hashable, Use]) -> Iterator[None]:
    """A block in which the programs that the calling thread lowers are rewritten, also
    by these uses. Uses with equal keys put the same into a program.

    Tasks or generators that interleave may leave blocks out of order.
    """
    _set_blocks((*_rewriting_here().blocks, uses))
    try:
        yield
    finally:
        _set_blocks([b for b in _rewriting_here().blocks if b is not uses])


@contextlib.contextmanager
def not_rewritten() -> Iterator[None]:
    """A block in which the calling thread's programs are left alone."""
    blocks = _rewriting_here().blocks
    _set_blocks(())
    try:
        yield
    finally:
        _set_blocks(blocks)


def uses_here() -> Mapping[Hashable, Use]:
    """Those of the calling thread's open blocks."""
    value = _config.no_execution.get_local()  # for each program; most have none
    return value.uses if isinstance(value, _Rewriting) else {}


def _needs_devices(plain: Callable[[Jaxpr], bool]) -> Callable[[Jaxpr], bool]:
    """What is put into a program may need its devices, which JAX finds out before.

    A program that is only lowered may have none.
    """

    @functools.wraps(plain)
    def needs(jaxpr: Jaxpr) -> bool:
        if uses_here():
            caller = sys._getframe(1).f_locals
            if caller.get("device_assignment") is not None:
                return True
        return plain(jaxpr)

    return needs


_dispatch.jaxpr_has_prim_requiring_devices = _needs_devices(
    _dispatch.jaxpr_has_prim_requiring_devices
)


def rewritten_here(jaxpr: Jaxpr) -> Jaxpr:
    """A program that the calling thread lowers, as the block around it wants it."""
    uses = uses_here()
    if not uses:
        return jaxpr
    from hostcall._jax.rewriting import rewritten  # only where it is used

    return rewritten(jaxpr, list(uses.values()))


class _Looker:
    """A use that only notes whether it is shown a program."""

    is_shown = False

    def look(self, level: Level) -> tuple[()]:
        del level
        self.is_shown = True
        return ()


def shows_programs() -> bool:
    """Whether this JAX asks `rewritten_here` about the programs that it lowers.

    It is not asked to lower one before it has devices, which the caller may still
    choose. Till then, that it has the function which hostcall replaces has to do.
    """
    if not back_ends_started():
        return hasattr(_pxla, "_cached_lowering_to_hlo")
    return _shows_one()


@functools.cache
def _shows_one() -> bool:
    looker = _Looker()
    with rewritten_by({looker: looker}):
        jax.jit(lambda x: x).lower(0.0)
    return looker.is_shown


# --- A forked child ------------------------------------------------------------------


def refuse_programs(refusal: Callable[[], Exception]) -> None:
    """Refuses lowering, compiling and running in this process; tracing still works.

    This is for a forked child, in which they would wait for threads that do not exist
    there (MLIR's pool and XLA's). JAX's functions are replaced for good.
    """

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        del args, kwargs
        raise refusal()

    forget_fast_dispatches()
    _mlir.lower_jaxpr_to_module = refuse
    _compiler.compile_or_get_cached = refuse
    setting, guard = _config.no_execution, ExecutionGuard(refuse)
    setting.set_global(guard)
    if setting.get_local() is not UNSET:  # a callback's guard: the callback has forked
        setting.set_local(guard)
