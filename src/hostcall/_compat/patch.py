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

import importlib
import sys
import threading
from types import TracebackType
from typing import Any

import jax
import jax.experimental

from hostcall import _jax
from hostcall._compat import debug, lowerings
from hostcall._compat.buffer_callback import buffer_callback
from hostcall._compat.callbacks import call_back, check_vmap_method
from hostcall._engine.params import buffer
from hostcall._engine.params.drop_in import arrays_of
from hostcall._runtime import delivery

# --- What stands under JAX's names ----------------------------------------------------


def _pure_callback(
    callback: Any,
    result_shape_dtypes: Any,
    *args: Any,
    sharding: Any = None,
    vmap_method: str | None = None,
    **kwargs: Any,
) -> Any:
    """`jax.pure_callback` on hostcall's engine (`hostcall.patch_jax`)."""
    return call_back(
        "pure",
        callback,
        result_shape_dtypes,
        args,
        kwargs,
        sharding=sharding,
        vmap_method=check_vmap_method(vmap_method),
        arrays=_arrays(),
    )


def _io_callback(
    callback: Any,
    result_shape_dtypes: Any,
    *args: Any,
    sharding: Any = None,
    ordered: bool = False,
    **kwargs: Any,
) -> Any:
    """`jax.experimental.io_callback` on hostcall's engine (`hostcall.patch_jax`)."""
    return call_back(
        "io",
        callback,
        result_shape_dtypes,
        args,
        kwargs,
        sharding=sharding,
        ordered=ordered,
        arrays=_arrays(),
    )


def _debug_callback(
    callback: Any = None,
    *args: Any,
    ordered: bool = False,
    partitioned: bool = False,
    **kwargs: Any,
) -> Any:
    """`jax.debug.callback` on hostcall's engine (`hostcall.patch_jax`)."""
    options = {"ordered": ordered, "partitioned": partitioned}
    if _jax.in_pallas_kernel():
        return _ORIGINALS["jax.debug.callback"](callback, *args, **options, **kwargs)
    if callback is None:  # JAX's two-call form
        return debug.two_calls(args, kwargs, arrays=_arrays(), **options)
    debug.call_back(callback, args, kwargs, arrays=_arrays(), **options)
    return None


def _debug_print(
    fmt: str | None = None,
    *args: Any,
    ordered: bool = False,
    partitioned: bool = False,
    skip_format_check: bool = False,
    _use_logging: bool = False,
    **kwargs: Any,
) -> Any:
    """`jax.debug.print` on hostcall's engine (`hostcall.patch_jax`)."""
    options: dict[str, Any] = {
        "ordered": ordered,
        "partitioned": partitioned,
        "skip_format_check": skip_format_check,
    }
    if _use_logging or _jax.in_pallas_kernel():
        return _ORIGINALS["jax.debug.print"](
            fmt, *args, **options, _use_logging=_use_logging, **kwargs
        )
    return debug.print(fmt, *args, **options, **kwargs)


def _buffer_callback(
    callback: Any,
    result_shape_dtypes: Any,
    *,
    has_side_effect: bool = False,
    vmap_method: str | None = None,
    input_output_aliases: Any = None,
    command_buffer_compatible: bool = False,
) -> Any:
    """`jax.experimental.buffer_callback.buffer_callback` on hostcall's engine
    (`hostcall.patch_jax`).
    """
    return buffer_callback(
        callback,
        result_shape_dtypes,
        has_side_effect=has_side_effect,
        vmap_method=vmap_method,
        input_output_aliases=input_output_aliases,
        command_buffer_compatible=command_buffer_compatible,
    )


def _effects_barrier() -> None:
    """`jax.effects_barrier`, which also waits until queued taps are delivered."""
    _ORIGINALS["jax.effects_barrier"]()
    delivery.flush(None, "jax.effects_barrier()")


_BUFFERS = "jax.experimental.buffer_callback"
_REPLACEMENTS: dict[str, Any] = {
    "jax.pure_callback": _pure_callback,
    "jax.experimental.io_callback": _io_callback,
    "jax.debug.callback": _debug_callback,
    "jax.debug.print": _debug_print,
    "jax.effects_barrier": _effects_barrier,
    f"{_BUFFERS}.buffer_callback": _buffer_callback,
    f"{_BUFFERS}.Buffer": buffer.Buffer,
    f"{_BUFFERS}.ExecutionContext": buffer.ExecutionContext,
}
# JAX's own functions, saved once at import, so that no replacement wraps another one.
_ORIGINALS = {
    "jax.debug.callback": jax.debug.callback,
    "jax.debug.print": jax.debug.print,
    "jax.effects_barrier": jax.effects_barrier,
}
for _name, _function in _REPLACEMENTS.items():
    if isinstance(_function, type):
        continue
    _function.__name__ = _function.__qualname__ = _name.rsplit(".", 1)[1]


# --- Patching ------------------------------------------------------------------------

_lock = threading.RLock()  # guards the names below, and what stands under JAX's names
_active: list[Patch] = []  # the last one counts; empty if JAX is not patched
_replaced: dict[str, Any] = {}  # what stood under JAX's names before the patch
_hooks_held: lowerings.Hooks | None = None


def _arrays() -> str:
    return lowerings.chosen or "jax"


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _lock:
            self.blocks -= 1
            if self in _active and not self.blocks:
                _active.remove(self)
            _apply()

    def __repr__(self) -> str:
        state = "" if self in _active else ", ended"
        return f"<hostcall.patch_jax(arrays={self.arrays!r}){state}>"


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
    global _hooks_held
    before, choice = lowerings.chosen, _active[-1].arrays if _active else None
    if choice == before:
        return
    lowerings.chosen = choice
    if before is None:
        _hooks_held = lowerings.Hooks()
        _revive(True)
        for name, function in _REPLACEMENTS.items():
            _replaced[name] = _replace(name, function)
    elif choice is None:
        for name, function in _replaced.items():
            if _get(name) is _REPLACEMENTS[name]:  # else replaced again since the patch
                _replace(name, function)
        _revive(False)
        assert _hooks_held is not None
        _hooks_held.release()
        _hooks_held = None
    lowerings.forget_programs()


_OLD_MODULE = "jax.experimental.host_callback"


def _revive(there: bool) -> None:
    """Makes `jax.experimental.host_callback` importable, or removes it again."""
    # Imported here because that module imports this wing.
    host_callback = importlib.import_module("hostcall.host_callback")
    if there and _OLD_MODULE not in sys.modules:
        sys.modules[_OLD_MODULE] = host_callback
        jax.experimental.host_callback = host_callback
    elif not there and sys.modules.get(_OLD_MODULE) is host_callback:
        del sys.modules[_OLD_MODULE]
        del jax.experimental.host_callback


def _get(name: str) -> Any:
    module, attribute = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), attribute)


def _replace(name: str, function: Any) -> Any:
    """Puts `function` under `name`; returns what stood there."""
    module, attribute = name.rsplit(".", 1)
    home = importlib.import_module(module)
    before = getattr(home, attribute)
    setattr(home, attribute, function)
    return before
