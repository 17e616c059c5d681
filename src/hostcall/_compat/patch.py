"""`hc.patch_jax`: runs every program's callbacks on hostcall's engine.

The idea: callbacks reach a program in three ways, and each is redirected where it
passes.

  * Functions looked up under JAX's names at the time of the call. The functions of
    `_REPLACEMENTS` stand there while a patch is active.
  * JAX's primitives, bound by code that imported JAX's functions before the patch, and
    `emit_python_callback`. `lowerings` replaces how they are lowered.
  * Programs that were compiled before. Their caches are dropped at each change.

Patches nest: the last active one says which arrays callbacks get. When none is left,
everything that still bears the patch is put back.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental

from hostcall import _jax
from hostcall._compat import debugging, lowerings, pure_and_io
from hostcall._compat.buffer_callback import buffer_callback
from hostcall._core.suggestions import suggests
from hostcall._engine.params import buffer
from hostcall._engine.params.drop_in import arrays_of
from hostcall._runtime import delivery

# --- What stands under JAX's names ----------------------------------------------------


def _drop_in(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """What stands under JAX's name. `function` gets what callbacks get, and the rest.

    In Pallas kernels, jax.debug's functions are JAX's own.
    """
    kernels = not name.startswith("jax.debug.")
    original = _get(name)

    @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__"))
    def drop_in(*args: object, **kwargs: object) -> object:
        if not kernels and _jax.in_pallas_kernel():
            return original(*args, **kwargs)
        return function(lowerings.chosen or "jax", *args, **kwargs)

    return drop_in


def _print(_: str, /, *args: Any, _use_logging: bool = False, **kwargs: Any) -> object:
    """A format takes either kind of arrays."""
    if _use_logging:
        return _print_of_jax(*args, _use_logging=True, **kwargs)  # type: ignore[no-any-return]
    return debugging.print(*args, **kwargs)


def _effects_barrier(_: str, /) -> None:
    """Also waits until queued taps are delivered."""
    _effects_barrier_of_jax()
    delivery.refuse_inside_a_tap("jax.effects_barrier()")
    delivery.flush()


def _get(name: str) -> Callable[..., object]:
    module, attribute = name.rsplit(".", 1)
    found: Callable[..., object] = getattr(importlib.import_module(module), attribute)
    return found


# Saved once at import, so that no replacement wraps another one.
_print_of_jax, _effects_barrier_of_jax = jax.debug.print, jax.effects_barrier
_BUFFERS = "jax.experimental.buffer_callback"
_DROP_INS: dict[str, Callable[..., object]] = {
    "jax.pure_callback": functools.partial(pure_and_io.call_back, "pure"),
    "jax.experimental.io_callback": functools.partial(pure_and_io.call_back, "io"),
    "jax.debug.callback": debugging.call_back,
    "jax.debug.print": _print,
    "jax.effects_barrier": _effects_barrier,
}
_REPLACEMENTS: dict[str, object] = {
    **{name: _drop_in(name, function) for name, function in _DROP_INS.items()},
    f"{_BUFFERS}.buffer_callback": buffer_callback,
    f"{_BUFFERS}.Buffer": buffer.Buffer,
    f"{_BUFFERS}.ExecutionContext": buffer.ExecutionContext,
    **{
        f"{module}.emit_python_callback": lowerings.emit_python_callback
        for module in _jax.MODULES_WITH_EMIT
    },
}


# --- Patching ------------------------------------------------------------------------

_lock = threading.RLock()  # guards the names below, and what stands under JAX's names
_active: list[Patch] = []  # the last one counts; empty if JAX is not patched
_undo: list[Callable[[], None]] = []  # puts back what is replaced now


class Patch:
    """What `patch_jax` returns. As a context manager it ends the patch with its block.

    The patch that was active before it, and still is, counts again then.
    """

    def __init__(self, arrays: str) -> None:
        self.arrays = arrays
        self.blocks = 0  # that it has been entered for, and that have not ended

    def __enter__(self) -> Patch:
        with _lock:
            self.blocks += 1
            if self not in _active:
                _active.append(self)
            _apply()
        return self

    def __exit__(self, *raised: object) -> None:
        with _lock:
            self.blocks -= 1
            if self in _active and not self.blocks:
                _active.remove(self)
            _apply()

    def __repr__(self) -> str:
        state = "" if self in _active else ", ended"
        return f"<hostcall.patch_jax(arrays={self.arrays!r}){state}>"


@suggests("hc.patch_jax")
def patch_jax(arrays: str = "jax") -> Patch:
    """Runs every program's callbacks on hostcall's engine.

    `jax.pure_callback`, `jax.experimental.io_callback`, `jax.debug.callback`,
    `jax.debug.print`, `jax.experimental.buffer_callback` and `jax.effects_barrier`
    become hostcall's. Callbacks of code that imported JAX's functions before, and JAX's
    own callbacks (Pallas in interpret mode, checkify), are redirected when their
    programs are lowered. On platforms that the engine does not serve, and inside Pallas
    kernels, callbacks stay JAX's. `jax.experimental.host_callback`, which JAX has
    removed, can be imported again (`hostcall.host_callback`).

    Patch before the first program is traced, if you can. If a back end runs already,
    JAX's caches are cleared, so that programs are compiled again; an executable that
    was compiled ahead of time stays as it is. No back end is started. Calling it again
    is fine, also from several threads. To patch without changing a program:
    `python -m hostcall run script.py`, or HOSTCALL_PATCH=1 in the environment.

    Args:
        arrays: what callbacks get. "jax": jax.Arrays, as from JAX. "numpy": NumPy
            arrays, which is faster, and helps functions that fail on jax.Arrays.

    Returns:
        A context manager that ends this patch, and no other, with its block:
        `with hc.patch_jax(): ...` The newest patch that has not ended decides what
        callbacks get; JAX is as it was when all have ended. A patch that was made
        without a block lasts until `hc.testing.unpatch_jax()`, which ends all of them.

    Raises:
        SpecError: `arrays` has another value.
    """
    arrays_of(arrays)
    _jax.need(_jax.Part.DROP_INS)
    with _lock:
        while len(_active) > 1 and all(
            not patch.blocks and patch.arrays == arrays for patch in _active[-2:]
        ):
            _active.pop()  # repeated equal patches take up no room
        patch = Patch(arrays)
        _active.append(patch)
        _apply()
        return patch


def unpatch_jax() -> None:
    """Puts back everything that `patch_jax` replaced. Does nothing without a patch."""
    with _lock:
        _active.clear()
        _apply()


def _apply() -> None:
    """Makes JAX as the last active patch says. The caller holds the lock."""
    before, choice = lowerings.chosen, _active[-1].arrays if _active else None
    if choice == before:
        return
    lowerings.chosen = choice
    if before is None:
        for primitive, rule in lowerings.LOWERINGS.items():
            _undo.append(_jax.replace_lowering(primitive, rule))
        _undo.extend(_replace(*each) for each in _REPLACEMENTS.items())
        _undo.append(_revive())
    elif choice is None:
        while _undo:
            _undo.pop()()
    if _jax.back_ends_started():  # else there are no compiled programs yet
        jax.clear_caches()


def _revive() -> Callable[[], None]:
    """Makes `jax.experimental.host_callback` importable; returns what ends that."""
    # Imported here because that module imports this wing.
    module = importlib.import_module("hostcall.host_callback")
    name = "jax.experimental.host_callback"
    if name not in sys.modules:
        sys.modules[name] = jax.experimental.host_callback = module

    def end() -> None:
        if sys.modules.get(name) is module:
            del sys.modules[name]
            del jax.experimental.host_callback

    return end


def _replace(name: str, function: object) -> Callable[[], None]:
    """Puts `function` under `name`; returns what puts the old one back."""
    module, attribute = name.rsplit(".", 1)
    home, before = importlib.import_module(module), _get(name)
    setattr(home, attribute, function)

    def restore() -> None:
        if _get(name) is function:  # else replaced again since the patch
            setattr(home, attribute, before)

    return restore
