"""From a call's parameters to the engine: handlers registered, plans built."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hostcall import (
    _config,
    _context,
    _delivery,
    _errors,
    _guards,
    _host_device,
    _interrupt,
    _jax,
    _native,
    _workers,
)
from hostcall._callback import CallInfo, CallParams, counters_of, executor_of
from hostcall._compress import CompressedCall
from hostcall._dlpack import DLPackArray
from hostcall._spec import Template, packed_bits
from hostcall._tap_info import TapParams

TARGET = "hostcall_call"
TAP_TARGET = "hostcall_tap"
LINK_TARGET = "hostcall_link"
RAW_TARGET = "hostcall_raw"  # benchmarks/: enters Python and nothing else

logger = logging.getLogger("hostcall")

_LEAF, _TUPLE, _LIST, _NOTHING, _TREE, _IGNORED = range(6)
_COPY, _ARGS, _OUT = range(3)

# How the devices of a program make a call (native/team.h).
ALONE = (0, 1, 0)
ONCE, EACH = 1, 2

_started = False
_lock = threading.Lock()


def start() -> None:
    """Makes the engine known to XLA. Called at the first lowering or eager call, never
    on import: it starts no back end, but it is not free.
    """
    global _started
    if _started:
        return
    with _lock:
        if _started:
            return
        handlers = _native.handlers()
        # The type before the targets that use it, and both before a program that
        # names them is compiled.
        jax.ffi.register_ffi_type("hostcall_plan", handlers["type"], platform="cpu")
        jax.ffi.register_ffi_target(TARGET, handlers["call"], platform="cpu")
        jax.ffi.register_ffi_target(TAP_TARGET, handlers["tap"], platform="cpu")
        jax.ffi.register_ffi_target(LINK_TARGET, handlers["link"], platform="cpu")
        jax.ffi.register_ffi_target(RAW_TARGET, handlers["raw"], platform="cpu")
        for setting in _jax.ambient_settings():
            _native.add_ambient_setting(*setting, _jax.UNSET)
        os.register_at_fork(after_in_child=_after_fork)
        _interrupt.watch()
        _native.set_report_converter(_errors.in_place_of)
        atexit.register(_stop)
        _started = True


def _stop() -> None:
    """Runs at exit, before JAX's own clean-up: what must run still runs."""
    if _native.closed():
        return  # forked child
    try:
        _delivery.watch_the_end()
        _end()
    except KeyboardInterrupt:
        os._exit(130)


def _end() -> None:
    try:
        for failure in _jax.wait_for_effects():
            logger.error("a program failed while the process was ending: %s", failure)
    except SystemExit as error:  # of a callback; the process ends anyway
        logger.error("a callback raised %r while the process was ending", error)
    _delivery.flush(None, "the end of the process")
    _native.close()
    under_way = _native.in_flight()
    if _native.wait_idle(_config.EXIT_TIMEOUT):
        if under_way:
            # A daemon thread that made one is on its way out of JAX's C++, where
            # Python must not stop it.
            time.sleep(0.1)
        _delivery.stop()
        return
    stuck = [f"{info.name} ({age:.0f} s)" for info, _, age, _ in _native.active()]
    logger.warning(
        "the process wants to end, and waits for these callbacks, which are interrupted"
        " (Ctrl-C ends it at once): %s",
        ", ".join(stuck),
    )
    # Ending anyway would take the interpreter from under a running function.
    _native.interrupt_calls()
    while not _native.wait_idle(0.2):
        pass
    _delivery.stop()


def _after_fork() -> None:
    _native.after_fork()
    _delivery.after_fork()


# --- Plans -------------------------------------------------------------------------


def signature(params: CallParams | TapParams, operands: Sequence[Any]) -> int:
    """A number of the avals and the function's name, equal in all processes.

    A program that was compiled elsewhere names a slot of this process; if another
    function sits there, the numbers differ and the program is refused.
    """
    text = repr(
        (
            params.callback.name,
            [(a.shape, str(a.dtype)) for a in (*operands, *params.avals)],
            params.grid,
            params.batched,
            params.masked,
            params.order,
            params.levels,
            params.callback.lend,
            params.callback.arrays,
        )
    )
    return zlib.crc32(text.encode()) + 1


def make_plan(
    params: CallParams | TapParams,
    operands: Sequence[Any],
    info: CallInfo,
    device: Any,
    *,
    packed: bool,
    number: int,
    team: tuple[int, int, int] = ALONE,
    tap: tuple[Any, ...] | None = None,
) -> Any:
    """A native plan.

    Args:
        params: of the equation.
        operands: their avals, the mask first where there is one.
        info: gets the engine's questions.
        device: where JAX code inside the callback runs.
        packed: whether small elements are packed, as XLA has them and NumPy hasn't.
        number: the call's `signature`; 0 for an eager call, which nobody looks up.
        team: (mode, size, leader's ordinal) of the devices that make the call.
        tap: what makes it a tap (`TapParams.settings`).
    """
    callback = params.callback
    grid = params.grid
    compressed = compresses(params, operands)
    native_mask = params.masked and not compressed
    mask_flags = list(params.batched[0]) if native_mask and grid else None
    if native_mask and not grid:
        mask_flags = []
    arg_operands = operands[1:] if native_mask else operands
    arg_flags = params.batched[1:] if native_mask else params.batched
    keys = callback.template.keys
    if compressed:
        keys = (None, *keys)
    converters = [_converter(callback.arrays, key, device) for key in keys]
    if compressed:
        converters = [None] * len(keys)
    args = []
    for i, operand in enumerate(arg_operands):
        flags = list(arg_flags[i]) if grid else []
        dtype = np.dtype(operand.dtype)
        shape = operand.shape[sum(flags) :]
        args.append((dtype, shape, *_bits(dtype, packed), flags, converters[i]))
    results = []
    for aval, fill in zip(params.avals, callback.fills, strict=True):
        dtype = np.dtype(aval.dtype)
        every = [True] * len(grid)
        row_fill = _tile(fill, aval, params.levels)
        results.append((dtype, aval.shape, *_bits(dtype, packed), every, row_fill))
    if team != ALONE:
        info.guard = _guards.of_several(frozenset(info.devices.values()))
    elif callback.arrays == "free":
        info.guard = _guards.WITNESS
    function, form = _function(params, info, device, compressed)
    lend = {False: _COPY, True: _ARGS, "out": _OUT}[callback.lend]
    return _native.make_plan(
        function=function,
        args=args,
        results=results,
        grid=list(grid),
        mask=mask_flags,
        form=form,
        lend=lend,
        runner=_runner(params, info, device),
        hooks=info,
        out_tree=callback.results.treedef.unflatten if lend == _OUT else None,
        info=info,
        device=device,
        counters=counters_of(callback.function),
        signature=number,
        team_mode=team[0],
        team_size=team[1],
        team_leader=team[2],
        guard=info.guard,
        literals=getattr(params, "literals", True),
        tap=tap,
    )


def compresses(params: CallParams | TapParams, operands: Sequence[Any]) -> bool:
    """Whether the function sees a batch from which `where` removes rows."""
    return params.masked and params.levels > 0 and operands[0].ndim > len(params.grid)


def _bits(dtype: np.dtype, packed: bool) -> tuple[int, bool]:
    return packed_bits(dtype) if packed else (0, False)


def _tile(fill: bytes | None, aval: Any, levels: int) -> bytes | None:
    """The fill of one row, repeated for the batch axes the function itself sees."""
    if fill is None:
        return None
    batch = int(np.prod(aval.shape[:levels], dtype=np.int64))
    return fill * batch


def _converter(arrays: str, key: Any, device: Any) -> Callable[[Any], Any] | None:
    if key is not None:
        return lambda block: _jax.wrap_key(_jax.put_on_device(block, device), key)
    if arrays in ("jax", "free"):
        committed = arrays == "jax"
        return lambda array: _jax.put_on_device(array, device, committed)
    return DLPackArray if arrays == "dlpack" else None


def _result_form(params: CallParams) -> int:
    treedef = params.callback.results.treedef
    n = treedef.num_leaves
    if params.results_as == "nothing":
        return _IGNORED
    if params.results_as == "leaves":
        return _LEAF if n == 1 else _TREE
    structure = jax.tree_util.tree_structure
    if treedef == structure(0):
        return _LEAF
    if treedef == structure(None):
        return _NOTHING
    if n and treedef == structure((0,) * n):
        return _TUPLE
    return _TREE


def _function(
    params: CallParams | TapParams, info: CallInfo, device: Any, compressed: bool
) -> tuple[Callable[..., Any], int]:
    """What the engine calls with one array a leaf, and what it gives back."""
    callback = params.callback
    fn, template = callback.function, callback.template
    whole = fn if template.is_flat else _with_trees(fn, template)
    converters = [_converter(callback.arrays, key, device) for key in template.keys]
    if isinstance(params, TapParams):
        return params.function(whole, converters if compressed else None), _IGNORED
    form = _result_form(params)
    if callback.timeout is not None:
        whole = _with_limit(whole, callback.timeout, info, device)
    if callback.lend == "out":
        whole = _with_own_results(whole)
    if not compressed:
        return whole, form
    return CompressedCall(params, info, whole, converters), _TUPLE


def _with_trees(fn: Callable[..., Any], template: Template) -> Callable[..., Any]:
    def whole(*leaves: Any, **out: Any) -> Any:
        args, kwargs = template.fill(leaves)
        return fn(*args, **kwargs, **out)

    return whole


def _with_limit(
    whole: Callable[..., Any], seconds: float, info: CallInfo, device: Any
) -> Callable[..., Any]:
    def limited(*leaves: Any) -> Any:
        return _workers.run_with_timeout(
            lambda: whole(*leaves),
            seconds,
            (device, info.guard),
            _context.current(),
            lambda stack: _late(info, leaves, seconds, stack),
        )

    return limited


def _with_own_results(whole: Callable[..., Any]) -> Callable[..., Any]:
    """With `out=`, results that are returned all the same may be views of it, and
    storing one could overwrite the next: they are copied first.
    """

    def call(*leaves: Any, out: Any) -> Any:
        value = whole(*leaves, out=out)
        if value is None:
            return None
        return jax.tree.map(
            lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value
        )

    return call


def _late(info: CallInfo, leaves: Sequence[Any], seconds: float, stuck: str) -> str:
    shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in leaves)
    return (
        f"hostcall: `{info.name}`({shapes}) took longer than timeout={seconds} s;"
        f" {stuck}"
    )


def _runner(
    params: CallParams | TapParams, info: CallInfo, device: Any
) -> Callable[[list[Any], list[Any]], list[Any]] | None:
    """Runs all rows of a "parallel" call at once; None for the other methods."""
    if params.vmap_method != "parallel" or not params.grid:
        return None
    callback = params.callback

    def run(rows: list[Any], indices: list[Any]) -> list[Any]:
        here = _context.current()
        currents = [None if here is None else here.at_row(i) for i in indices]
        return _workers.run_rows(
            executor_of(callback),
            callback.function,
            [callback.template.fill(row) for row in rows],
            currents,
            (device, info.guard),
            callback.timeout,
            lambda which: _late(info, rows[0], callback.timeout or 0.0, which),
        )

    return run


def is_host_client(client: Any | None) -> bool:
    """Whether programs on this client are run by host code."""
    return _host_device.is_host(client)


def host_device(client: Any | None) -> Any:
    return _host_device.above(client)
