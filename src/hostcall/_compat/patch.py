"""`hc.patch_jax`: runs every program's callbacks on hostcall's engine.

The idea: JAX's functions for callbacks stay what they are. What they all come to is
replaced (`redirects`): what JAX's primitives do when they are bound, and how they are
lowered. So it does not matter when a program took a function. Programs that were
compiled before are in caches, which are dropped at each change.

Patches nest: the last active one says which arrays callbacks get. When none is left,
everything that still bears the patch is put back.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable

import jax
import jax.experimental
from jax.experimental import buffer_callback as buffers

from hostcall import _jax
from hostcall._compat import redirects
from hostcall._core.suggestions import suggests
from hostcall._engine.params import buffer
from hostcall._engine.params.drop_in import arrays_of
from hostcall._runtime import delivery

# --- What is replaced -----------------------------------------------------------------

_effects_barrier_of_jax = jax.effects_barrier


def _effects_barrier() -> None:
    """Also waits until queued taps are delivered."""
    _effects_barrier_of_jax()
    delivery.refuse_inside_a_tap("jax.effects_barrier()")
    delivery.flush()


# (an object of JAX's, the name of its attribute) -> what stands there in a patch.
REPLACEMENTS: dict[tuple[object, str], object] = {
    **{(redirect.primitive, "bind"): redirect.bind for redirect in redirects.REDIRECTS},
    **{
        (module, "emit_python_callback"): redirects.emit_python_callback
        for module in _jax.MODULES_WITH_EMIT
    },
    (jax, "effects_barrier"): _effects_barrier,
    # Names by which programs annotate and recognize what their callbacks get.
    (buffers, "Buffer"): buffer.Buffer,
    (buffers, "ExecutionContext"): buffer.ExecutionContext,
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

    def _is_like(self, arrays: str) -> bool:
        """Whether it is a patch with this option outside of any block."""
        return self.blocks == 0 and self.arrays == arrays

    def __enter__(self) -> Patch:
        with _lock:
            self.blocks += 1
            if self not in _active:  # it has ended before, and counts again
                _active.append(self)
            _apply()
        return self

    def __exit__(self, *raised: object) -> None:
        with _lock:
            self.blocks -= 1
            # The outermost of its blocks ends it, unless `unpatch_jax` has.
            if self in _active and not self.blocks:
                _active.remove(self)
            _apply()

    def __repr__(self) -> str:
        state = "" if self in _active else ", ended"
        return f"<hostcall.patch_jax(arrays={self.arrays!r}){state}>"


@suggests("hc.patch_jax")
def patch_jax(arrays: str = "jax") -> Patch:
    """Runs every program's callbacks on hostcall's engine.

    The calls of `jax.pure_callback`, `jax.experimental.io_callback`,
    `jax.debug.callback`, `jax.debug.print` and `jax.experimental.buffer_callback`
    become hostcall's, whenever a program took these functions, and so do JAX's own
    callbacks (Pallas in interpret mode, checkify). On platforms that the engine does
    not serve, and inside Pallas kernels, callbacks stay JAX's. `jax.effects_barrier`
    waits for taps too. `jax.experimental.host_callback`, which JAX has removed, can be
    imported again (`hostcall.host_callback`).

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
        # Repeated equal patches take up no room.
        while len(_active) > 1 and all(p._is_like(arrays) for p in _active[-2:]):
            _active.pop()
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
    former_choice = redirects.chosen
    choice = _active[-1].arrays if _active else None
    if choice == former_choice:
        return
    redirects.chosen = choice
    if former_choice is None:  # JAX was as it is
        for redirect in redirects.REDIRECTS:
            _undo.append(_jax.replace_lowering(redirect.primitive, redirect.lower))
        for (holder, name), new in REPLACEMENTS.items():
            _undo.append(_jax.put_attribute(holder, name, new))
        _undo.append(_revive())
    elif choice is None:
        while _undo:
            put_back = _undo.pop()
            put_back()
    # Programs in JAX's caches have the former callbacks.
    if _jax.back_ends_started():  # else there are no compiled programs yet
        jax.clear_caches()


def _revive() -> Callable[[], None]:
    """Makes `jax.experimental.host_callback` importable; returns what ends that."""
    # Imported here because that module imports this wing.
    module = importlib.import_module("hostcall.host_callback")
    name = "jax.experimental.host_callback"
    if name not in sys.modules:  # else somebody else has put one there
        sys.modules[name] = jax.experimental.host_callback = module

    def end() -> None:
        if sys.modules.get(name) is module:
            del sys.modules[name]
            del jax.experimental.host_callback

    return end
