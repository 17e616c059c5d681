"""Builds native plans, which tell the engine about calls, from their parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.dlpack import DLPackArray
from hostcall._core.errors import SpecError
from hostcall._core.spec import Template, packed_bits
from hostcall._engine import caching
from hostcall._engine.coalescing import Coalesced
from hostcall._engine.counters import counters_of, note
from hostcall._engine.info import CallInfo
from hostcall._engine.masks import CompressedCall, CompressedTap
from hostcall._engine.params.call import CallParams, executor_of
from hostcall._engine.params.tap import TapParams
from hostcall._native import Inside, Lend, ResultForm
from hostcall._runtime import collectors, context, deadlocks, executors, workers
from hostcall._runtime.rows import run_rows
from hostcall._runtime.tasks import run_tasks

logger = logging.getLogger("hostcall")

_LENDS = {
    False: Lend.COPY,
    True: Lend.ARGS,
    "out": Lend.OUT,
    "buffers": Lend.BUFFERS,
}

# --- Plans -------------------------------------------------------------------------


def make_plan(
    params: CallParams | TapParams,
    operands: Sequence[Any],
    info: CallInfo,
    device: Any,
    *,
    packed: bool,
    team: _native.TeamSettings | None = None,
    inside: Inside = Inside.NEVER,
    tap: _native.TapSettings | None = None,
    tells: bool = False,
    elsewhere: bool = False,
    text: str = "",
) -> _native.Plan:
    """Builds the native plan of a call or tap.

    Args:
        params: the parameters of the equation.
        operands: the avals of its operands; the mask first if there is one.
        info: answers the engine's questions about the call.
        device: where JAX code inside the callback runs.
        packed: whether elements smaller than a byte are packed, as in XLA's buffers but
            not in NumPy's arrays.
        team: how the devices of a program make the call together; None if each device
            makes its own.
        inside: which of the calls run inside one of XLA's host callbacks.
        tap: the settings of a tap (`TapParams.settings`); None for a call.
        tells: whether one more result tells all processes whether the call failed
            (native/plan/outcome.h).
        elsewhere: whether another process makes the call; all take its results.
        text: describes the call in other processes (_primitives/travel.py), or "".
    """
    callback = params.callback
    grid = params.grid
    if isinstance(params, TapParams) and params.always:
        operands = operands[:-1]  # the engine reads the flag, and never queues it
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
    made = converters
    if compressed:
        converters = [None] * len(keys)
    args, shapes = [], []
    for i, operand in enumerate(arg_operands):
        flags = list(arg_flags[i]) if grid else []
        dtype = np.dtype(operand.dtype)
        shape = operand.shape[sum(flags) :]
        shapes.append((shape, dtype))
        # A cache converts what it does not find, and merged calls their stack.
        convert = None if callback.cache or callback.coalesce else converters[i]
        args.append(_leaf(dtype, shape, packed, flags, convert=convert))
    results = []
    for aval, fill in zip(params.avals, callback.fills, strict=True):
        dtype = np.dtype(aval.dtype)
        every = [True] * len(grid)
        row_fill = _tile(fill, aval, params.levels)
        results.append(_leaf(dtype, aval.shape, packed, every, fill=row_fill))
    together = None if team is None else frozenset(info.devices.values())
    if together is not None:
        info.guard = deadlocks.of_several(together)
    in_place = None if isinstance(params, TapParams) else params.in_place()
    function: Callable[..., Any]
    if elsewhere:
        function, form, runner = _nothing, ResultForm.NOTHING, None
    elif in_place is not None:
        function, form, runner = in_place[0], ResultForm.IGNORED, None
    else:
        function, form = _function(params, info, device, compressed)
        runner = _runner(params, info, device)
        if isinstance(params, CallParams) and callback.cache is not None:
            rows = caching.Rows(params, info, shapes, converters, compressed, device)
            function, form = caching.cached(function, rows), ResultForm.TUPLE
            runner = runner and caching.cached_rows(runner, rows)
        if isinstance(params, CallParams) and callback.coalesce is not None:
            function = Coalesced(params, operands, info, function, made, device)
            runner = function.rows if grid else None
    if info.job is not None:
        function = info.job.until_failure(function)
        runner = runner and info.job.until_failure(runner)
    lend = _LENDS[callback.lend]
    traced = callback.traced
    note(params)
    return _native.Plan(
        function=function,
        args=args,
        results=results,
        grid=grid,
        mask=mask_flags,
        form=form,
        lend=lend,
        runner=runner,
        out_tree=callback.results.treedef.unflatten if lend is Lend.OUT else None,
        info=info,
        device=device,
        enter=None if traced is None else traced.enter,
        leave=None if traced is None else traced.leave,
        counters=counters_of(callback),
        place=info.number,
        tells=tells,
        elsewhere=elsewhere,
        sends=runner is not None and executors.sends(executor_of(callback)),
        team=team,
        guard=info.guard,
        scout=deadlocks.scout(together) if inside is Inside.ASKED else None,
        inside=inside,
        keeps_mesh=params.is_jaxs_own and not _jax.CALLBACKS_HIDE_MESHES,
        literals=getattr(params, "literals", True),
        tap=tap,
        buffers=None if in_place is None else in_place[1],
        keep=getattr(params, "keep", None),
        feed=None if elsewhere or isinstance(params, TapParams) else params.fed(),
        text=text,
    )


def compresses(params: CallParams | TapParams, operands: Sequence[Any]) -> bool:
    """Whether the function gets a batch without the rows that `where` leaves out."""
    return params.masked and params.levels > 0 and operands[0].ndim > len(params.grid)


def _leaf(
    dtype: np.dtype,
    shape: Sequence[int],
    packed: bool,
    batched: Sequence[bool],
    convert: Callable[[Any], Any] | None = None,
    fill: bytes | None = None,
) -> _native.Leaf:
    bits, is_signed = packed_bits(dtype) if packed else (0, False)
    return _native.Leaf(
        dtype=dtype,
        shape=shape,
        bits=bits,
        is_signed=is_signed,
        batched=batched,
        convert=convert,
        fill=fill,
    )


def _tile(fill: bytes | None, aval: Any, levels: int) -> bytes | None:
    """The fill of one row, repeated for the batch axes that the function sees.

    The fill of one element, as `parse_fill` makes it for a symbolic shape, is repeated
    for all elements.
    """
    if fill is None:
        return None
    if len(fill) == np.dtype(aval.dtype).itemsize:
        return fill * int(np.prod(aval.shape, dtype=np.int64))
    batch = int(np.prod(aval.shape[:levels], dtype=np.int64))
    return fill * batch


def _converter(arrays: str, key: Any, device: Any) -> Callable[[Any], Any] | None:
    if key is not None:
        return lambda block: _jax.wrap_key(_jax.put_on_device(block, device), key)
    if arrays in ("jax", "free"):
        committed = arrays == "jax"
        return lambda array: _jax.put_on_device(array, device, committed)
    return DLPackArray if arrays == "dlpack" else None


def _nothing() -> None:
    """Stands for the function if another process calls it."""


def _result_form(params: CallParams) -> ResultForm:
    treedef = params.callback.results.treedef
    n = treedef.num_leaves
    if params.results_as == "nothing":
        return ResultForm.IGNORED
    if params.results_as == "leaves":
        return ResultForm.LEAF if n == 1 else ResultForm.TREE
    structure = jax.tree_util.tree_structure
    if treedef == structure(0):
        return ResultForm.LEAF
    if treedef == structure(None):
        return ResultForm.NOTHING
    if n and treedef == structure((0,) * n):
        return ResultForm.TUPLE
    return ResultForm.TREE


def _function(
    params: CallParams | TapParams, info: CallInfo, device: Any, compressed: bool
) -> tuple[Callable[..., Any], ResultForm]:
    """The function that the engine calls with one array per leaf, and its form."""
    callback = params.callback
    fn, template = callback.function, callback.template
    whole = fn if template.is_flat else _with_trees(fn, template)
    if callback.awaits:
        whole = _with_loop(params, info, device)
    converters = [_converter(callback.arrays, key, device) for key in template.keys]
    if isinstance(params, TapParams):
        if callback.tag is not None:
            whole = collectors.seen_by(callback.tag, template, whole)
        if compressed:  # one delivery for the batch, but `where` differs between rows
            if params.batch is not None:
                raise SpecError(
                    f"hostcall: the tap `{callback.name}` has batch= and a where= that"
                    " differs between the rows of a vmap, so its taps differ in size."
                    " Pass the mask as an argument instead of where=, or leave out"
                    " batch=",
                    code="hc-conflict",
                )
            whole = CompressedTap(params, whole, converters)
        return whole, ResultForm.IGNORED
    form = _result_form(params)
    if callback.timeout is not None and not callback.awaits:
        whole = _with_limit(whole, callback.timeout, info, device)
    if callback.lend == "out":
        whole = _with_own_results(whole)
    if not compressed:
        return whole, form
    return CompressedCall(params, info, whole, converters), ResultForm.TUPLE


def _with_trees(fn: Callable[..., Any], template: Template) -> Callable[..., Any]:
    def whole(*leaves: Any, **out: Any) -> Any:
        args, kwargs = template.fill(leaves)
        return fn(*args, **kwargs, **out)

    return whole


def _with_loop(
    params: CallParams | TapParams, info: CallInfo, device: Any
) -> Callable[..., Any]:
    """A function that runs a coroutine function on the event loop, and waits."""
    callback = params.callback

    def awaited(*leaves: Any) -> Any:
        here = context.current()
        row = callback.template.fill(leaves)
        (value,) = _run_tasks(callback, [row], lambda _: here, info, device, leaves)
        return value

    return awaited


def _run_tasks(
    callback: Any,
    rows: list[Any],
    current: Callable[[int], Any],
    info: CallInfo,
    device: Any,
    leaves: Sequence[Any],
) -> list[Any]:
    return run_tasks(
        callback.function,
        rows,
        current,
        workers.Settings(device, info.guard, callback.traced),
        concurrency=callback.concurrency,
        timeout=callback.timeout,
        describe=lambda stuck: _late(info, leaves, callback.timeout or 0.0, stuck),
    )


def _with_limit(
    whole: Callable[..., Any], seconds: float, info: CallInfo, device: Any
) -> Callable[..., Any]:
    settings = workers.Settings(device, info.guard, info.callback.traced)

    def limited(*leaves: Any) -> Any:
        return workers.run_with_timeout(
            lambda: whole(*leaves),
            seconds,
            settings,
            context.current(),
            lambda stack: _late(info, leaves, seconds, stack),
        )

    return limited


def _with_own_results(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Copies the results that a function with `out=` returns anyway.

    They may be views of `out`, and then storing one could overwrite another.
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
    """A function that runs all rows of a "parallel" call at once; else None."""
    if params.vmap_method != "parallel" or not params.grid:
        return None
    callback = params.callback

    def run(rows: list[Any], indices: list[Any]) -> list[Any]:
        try:
            return together(rows, indices)
        except BaseException as error:
            number = vars(error).pop("hostcall_row", None)
            if number is not None:
                vars(error)["hostcall_index"] = indices[number]
            raise

    def together(rows: list[Any], indices: list[Any]) -> list[Any]:
        here = context.current()

        def current(row: int) -> Any:
            return here and here.at_row(indices[row])

        filled = [callback.template.fill(row) for row in rows]
        if callback.awaits:
            return _run_tasks(callback, filled, current, info, device, rows[0])
        return run_rows(
            executor_of(callback),
            callback.function,
            filled,
            current,
            workers.Settings(device, info.guard, callback.traced),
            callback.timeout,
            lambda which: _late(info, rows[0], callback.timeout or 0.0, which),
            [
                a
                for row in rows[1:2]
                for a, b in zip(rows[0], row, strict=True)
                if a is b
            ],
            params.order != "pure",
        )

    return run
