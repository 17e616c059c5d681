"""Builds native plans, which tell the engine about calls, from their parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.dlpack import DLPackArray
from hostcall._core.spec import packed_bits
from hostcall._engine import targets
from hostcall._engine.callback import Callback
from hostcall._engine.counters import counters_of, note
from hostcall._engine.info import CallInfo
from hostcall._engine.params.equation import Equation
from hostcall._native import Inside, ResultForm
from hostcall._runtime import context, host_device, workers
from hostcall._runtime.workers import Bound, Row, run_with_timeout

if TYPE_CHECKING:
    from hostcall._job.failures import Failures

logger = logging.getLogger("hostcall")

# Most programs have no cache, merged calls, coroutines or parallel rows, so what these
# need is imported when a plan has one.

Converter = Callable[[Any], Any] | None
Runner = Callable[[list[Any], list[Any]], list[Any]]  # of rows, and their indices

# --- Plans -------------------------------------------------------------------------


class Team(NamedTuple):
    """How the devices of a program make a call together (native/base/team.h).

    Attributes:
        mode: the name of a `_native.TeamMode`.
        size: the number of this process's devices.
        leader: the ordinal of the device that calls; None for the first that comes.
    """

    mode: str
    size: int
    leader: int | None

    def settings(self) -> _native.TeamSettings:
        mode = _native.TeamMode[self.mode]
        return _native.TeamSettings(mode=mode, size=self.size, leader=self.leader)


@dataclass(frozen=True, kw_only=True)
class Entrance:
    """How the engine is entered for the calls of a plan.

    Attributes:
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

    device: Any = None
    packed: bool = False
    team: Team | None = None
    inside: Inside = Inside.NEVER
    tap: _native.TapSettings | None = None
    tells: bool = False
    elsewhere: bool = False
    text: str = ""

    def settings(self) -> dict[str, Any]:
        """What a native plan has of them; `packed` is in its leaves."""
        settings = {name: x for name, x in vars(self).items() if name != "packed"}
        settings["team"] = None if self.team is None else self.team.settings()
        return settings


class _Arguments(NamedTuple):
    """What the engine knows of a plan's arguments.

    Attributes:
        leaves: of each operand but a mask that the engine reads.
        mask: which axes of the grid that mask has; None if there is none.
        shapes: (shape, dtype) of each argument of one row.
        compressed: whether the function's batch has no rows that `where` drops.
        converters: how each argument becomes what the function gets, if a layer (a
            cache, a merged call, a batch without some rows) wants plain arrays before.
            Else the engine converts them.
    """

    leaves: list[_native.Leaf]
    mask: list[bool] | None
    shapes: list[Any]
    compressed: bool
    converters: list[Converter] | None


class _Called(NamedTuple):
    """What the engine calls, and the form of what it returns."""

    function: Callable[..., Any]
    form: ResultForm
    runner: Any = None
    buffers: _native.BufferSettings | None = None
    feed: _native.FeedSettings | None = None

    def until_failure(self, job: Failures | None) -> _Called:
        """The same, refused after a failure of a program over several processes."""
        if job is None:
            return self
        runner = self.runner and job.until_failure(self.runner)
        return self._replace(function=job.until_failure(self.function), runner=runner)


def make_plan(
    equation: Equation, operands: Sequence[Any], info: CallInfo, entry: Entrance
) -> _native.Plan:
    """Builds the native plan of a call or tap.

    Args:
        equation: the parameters of the equation.
        operands: the avals of its operands; the mask first if there is one.
        info: answers the engine's questions about the call.
        entry: how the engine is entered.
    """
    callback = equation.callback
    operands = equation.read(operands)
    arguments = _arguments(equation, operands, entry)
    together = None if entry.team is None else frozenset(info.devices.values())
    if together is not None:
        info.guard = host_device.of_several(together)
    asks = entry.inside is Inside.ASKED
    code = _code(equation, operands, arguments, info, entry).until_failure(info.job)
    traced = callback.traced
    note(equation)
    return _native.Plan(
        **code._asdict(),
        **entry.settings(),
        **equation.native,
        args=arguments.leaves,
        results=_results(equation, entry),
        grid=equation.grid,
        mask=arguments.mask,
        info=info,
        enter=None if traced is None else traced.enter,
        leave=None if traced is None else traced.leave,
        counters=counters_of(callback),
        place=info.number,
        sends=code.runner is not None and _sends(callback.policy.pool),
        guard=info.guard,
        scout=host_device.scout(together) if asks else None,
        keeps_mesh=equation.is_jaxs_own and not _jax.CALLBACKS_HIDE_MESHES,
    )


def plan_in_program(
    client: Any | None,
    platforms: tuple[str, ...],
    info: CallInfo,
    avals: Sequence[Any],
    entry: Entrance,
) -> _native.Plan:
    """Makes the plan of a call or tap in a program.

    Args:
        client: the client that runs the program.
        platforms: those for which the program was lowered.
        info: the call or tap.
        avals: the avals of its operands; for a typed key, the aval of its uint32 block.
        entry: how the engine is entered, without what the client says.
    """
    params = info.params
    inside = Inside.NEVER
    if entry.tap is None:
        inside = _calls_inside(platforms, params)
    if params.is_jaxs_own:
        # JAX's own host functions (Pallas' interpreter) must find the device that JAX
        # would give them. They hand their arrays to threads that run programs on the
        # process's own client, and they rely on each program having run when its
        # dispatch returns, as a program does whose arrays are on that client.
        device = jax.local_devices(backend="cpu")[0]
    else:
        device = host_device.above(client)
    entry = replace(entry, device=device, packed=True, inside=inside)
    return make_plan(params, avals, info, entry)


def _calls_inside(platforms: tuple[str, ...], params: Any) -> Inside:
    """Which calls of an equation run inside one of XLA's host callbacks."""
    if platforms != ("cpu",) or not targets.has_host_callbacks():
        return Inside.NEVER
    if not params.runs_where_dispatched:
        return Inside.ASKED
    if params.is_jaxs_own or params.options.arrays == "free":
        return Inside.EVERYWHERE
    return Inside.XLAS_THREADS


def _arguments(
    equation: Equation, operands: Sequence[Any], entry: Entrance
) -> _Arguments:
    callback, grid, batched = equation.callback, equation.grid, equation.batched
    compressed = equation.compresses(operands)
    mask = None
    if equation.masked and not compressed:  # the engine reads the mask
        mask = list(batched[0]) if grid else []
        operands, batched = operands[1:], batched[1:]
    converters = [
        _converter(equation.options.arrays, key, entry.device)
        for key in callback.template.keys
    ]
    later = bool(compressed or callback.policy.cache or callback.policy.coalesce)
    by_engine = [None] * len(operands) if later else converters
    leaves, shapes = [], []
    for i, (operand, convert) in enumerate(zip(operands, by_engine, strict=True)):
        flags = list(batched[i]) if grid else []
        dtype = np.dtype(operand.dtype)
        shape = operand.shape[sum(flags) :]
        shapes.append((shape, dtype))
        leaves.append(_leaf(dtype, shape, entry.packed, flags, convert=convert))
    return _Arguments(leaves, mask, shapes, compressed, converters if later else None)


def _results(equation: Equation, entry: Entrance) -> list[_native.Leaf]:
    every = [True] * len(equation.grid)
    leaves = []
    for aval, fill in zip(equation.avals, equation.callback.fills, strict=True):
        row_fill = _tile(fill, aval, equation.levels)
        dtype = np.dtype(aval.dtype)
        leaves.append(_leaf(dtype, aval.shape, entry.packed, every, fill=row_fill))
    return leaves


def _code(
    equation: Equation,
    operands: Sequence[Any],
    arguments: _Arguments,
    info: CallInfo,
    entry: Entrance,
) -> _Called:
    policy, device = equation.callback.policy, entry.device
    in_place = equation.in_place()
    buffers = None if in_place is None else in_place[1]
    if entry.elsewhere:
        return _Called(_nothing, ResultForm.NOTHING, buffers=buffers)
    if in_place is not None:
        return _Called(in_place[0], ResultForm.IGNORED, buffers=buffers)
    made = arguments.converters
    function = equation.seen(_function(equation, info, device))
    runner = _runner(equation, info, device)
    if made is not None:
        function = _converted(function, made)
        runner = runner and _converted_rows(runner, made)
    function, form = equation.finish(function, info, arguments.compressed)
    flat = arguments.compressed
    if policy.coalesce is not None:
        from hostcall._engine.coalescing import Coalesced

        function = Coalesced(equation, operands, info, function, device)
        form, flat = ResultForm.TUPLE, True
        runner = function.rows if equation.grid else None
    # Around merged calls: only what is not known is merged. A row that waits for
    # others has claimed its key, and no merged call waits for a key.
    if policy.cache is not None:
        from hostcall._engine import caching

        rows = caching.Rows(equation, info, arguments.shapes, flat, device)
        function, form = caching.cached(function, rows), ResultForm.TUPLE
        runner = runner and caching.cached_rows(runner, rows)
    return _Called(function, form, runner, feed=equation.fed())


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


def _converter(arrays: str, key: Any, device: Any) -> Converter:
    if key is not None:
        return lambda block: _jax.wrap_key(_jax.put_on_device(block, device), key)
    if arrays in ("jax", "free"):
        committed = arrays == "jax"
        return lambda array: _jax.put_on_device(array, device, committed)
    return DLPackArray if arrays == "dlpack" else None


def _nothing() -> None:
    """Stands for the function if another process calls it."""


def _converted(whole: Callable[..., Any], made: list[Converter]) -> Any:
    """`whole` with plain arrays, which become what the function gets."""

    def call(*arrays: Any) -> Any:
        pairs = zip(arrays, made, strict=True)
        return whole(*(x if convert is None else convert(x) for x, convert in pairs))

    return call


def _converted_rows(run: Runner, made: list[Converter]) -> Runner:
    each = _converted(lambda *arrays: arrays, made)
    return lambda rows, indices: run([each(*row) for row in rows], indices)


def _function(equation: Equation, info: CallInfo, device: Any) -> Callable[..., Any]:
    """The function with one array per leaf, of the kind that it gets."""
    callback = equation.callback
    whole, fill = callback.function, callback.template.fill
    if callback.awaits or callback.policy.timeout is not None:
        bound = _bound(info, device)
        run: Callable[..., list[Any]] = partial(run_with_timeout, bound)
        if callback.awaits:
            run = _on_loop(callback, bound)

        def elsewhere(*leaves: Any) -> Any:
            here = context.current()
            (value,) = run([fill(leaves)], lambda _: here)
            return value

        whole = elsewhere
    elif not callback.template.is_flat:
        whole = _with_trees(whole, fill)
    if equation.native["out_tree"] is not None:
        whole = _with_own_results(whole)
    return whole


def _bound(info: CallInfo, device: Any) -> Bound:
    callback = info.callback
    settings = workers.Settings(device, info.guard, callback.traced)
    return Bound(callback.function, settings, callback.policy.timeout, info.name)


def _on_loop(callback: Callback, bound: Bound) -> Callable[..., list[Any]]:
    from hostcall._runtime.tasks import run_tasks

    limit = callback.policy.concurrency
    return lambda rows, current: run_tasks(bound, rows, current, limit)


def _sends(pool: Any) -> bool:
    if pool is None:
        return False
    from hostcall._runtime import executors

    return executors.sends(pool)


def _with_trees(fn: Callable[..., Any], fill: Callable[..., Row]) -> Any:
    def whole(*leaves: Any, **out: Any) -> Any:
        args, kwargs = fill(leaves)
        return fn(*args, **kwargs, **out)

    return whole


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


def _runner(equation: Equation, info: CallInfo, device: Any) -> Runner | None:
    """A function that runs all rows of a "parallel" call at once; else None."""
    if not equation.parallel:
        return None
    callback, bound = equation.callback, _bound(info, device)
    if callback.awaits:
        together = _on_loop(callback, bound)
    else:
        from hostcall._runtime.rows import run_rows

        how = {"executor": callback.policy.pool, "once": equation.effect is not None}
        together = partial(run_rows, bound, **how)

    def run(rows: list[Any], indices: list[Any]) -> list[Any]:
        here = context.current()

        def current(row: int) -> Any:
            return here and here.at_row(indices[row])

        try:
            return together([callback.template.fill(row) for row in rows], current)
        except BaseException as error:
            number = vars(error).pop("hostcall_row", None)
            if number is not None:
                vars(error)["hostcall_index"] = indices[number]
            raise

    return run
