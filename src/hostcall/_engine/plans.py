"""Builds native plans, which tell the engine about calls, from their parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.dlpack import DLPackArray
from hostcall._core.spec import packed_bits
from hostcall._engine import targets
from hostcall._engine.counters import costs
from hostcall._engine.info import CallInfo
from hostcall._engine.params.equation import Equation
from hostcall._native import Inside, ResultForm
from hostcall._policies.layer import Choices
from hostcall._policies.stack import Entries, entries
from hostcall._runtime import host_device

if TYPE_CHECKING:
    from hostcall._job.failures import Failures

logger = logging.getLogger("hostcall")

Converter = Callable[[Any], Any] | None

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
    """What a plan says of the operands that it has as arguments.

    Attributes:
        mask: which axes of the grid the mask has, if the engine reads it; else None.
        batched: the same for each argument.
        shapes: (shape, dtype) of each argument of one row.
        compressed: whether the function's batch has no rows that `where` drops. Then
            the mask is an argument.
    """

    mask: list[bool] | None
    batched: list[list[bool]]
    shapes: list[tuple[tuple[int, ...], np.dtype[Any]]]
    compressed: bool


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
    arguments = _arguments(equation, operands)
    together = None if entry.team is None else frozenset(info.devices.values())
    if together is not None:
        info.guard = host_device.guard(together)
    choices = _choices(equation, info, entry.device, arguments)
    traced = callback.traced
    costs.note(equation)
    return _native.Plan(
        **_called(equation, choices, entry.elsewhere, info.job),
        **entry.settings(),
        **equation.native,
        args=_leaves(arguments, choices, entry),
        results=_results(equation, entry),
        grid=equation.grid,
        mask=arguments.mask,
        info=info,
        enter=None if traced is None else traced.enter,
        leave=None if traced is None else traced.leave,
        counters=costs.counters_of(callback),
        place=info.number,
        guard=info.guard,
        scout=(
            host_device.guard(together, scouts=True)
            if entry.inside is Inside.ASKED
            else None
        ),
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
    if platforms != ("cpu",) or not targets.start():
        return Inside.NEVER
    if not params.runs_where_dispatched:
        return Inside.ASKED
    if params.is_jaxs_own or params.options.arrays == "free":
        return Inside.EVERYWHERE
    return Inside.XLAS_THREADS


def _arguments(equation: Equation, operands: Sequence[Any]) -> _Arguments:
    operands = equation.read(operands)
    flags: Sequence[Sequence[bool]] = equation.batched if equation.grid else ()
    batched = [list(flags[i]) if flags else [] for i in range(len(operands))]
    compressed, mask = equation.compresses(operands), None
    if equation.masked and not compressed:  # the engine reads the mask
        mask, *batched = batched
        operands = operands[1:]
    shapes = [
        (operand.shape[sum(axes) :], np.dtype(operand.dtype))
        for operand, axes in zip(operands, batched, strict=True)
    ]
    return _Arguments(mask, batched, shapes, compressed)


def _choices(
    equation: Equation, info: CallInfo, device: Any, arguments: _Arguments
) -> Choices:
    callback = equation.callback
    cached = callback.policy.cache is not None
    return Choices(
        callback=callback,
        results=info,
        device=device,
        guard=info.guard,
        shapes=arguments.shapes,
        converters=[
            _converter(equation.options.arrays, key, device)
            for key in callback.template.keys
        ],
        avals=equation.avals,
        levels=equation.levels,
        grid=bool(equation.grid),
        parallel=equation.parallel,
        once=equation.effect is not None,
        compressed=arguments.compressed,
        form=equation.form(),
        tap=equation.delivers,
        batch=equation.axes(),
        count=costs.tally_of(callback).add if cached else None,
    )


def _leaves(
    arguments: _Arguments, choices: Choices, entry: Entrance
) -> list[_native.Leaf]:
    # A layer that reads arrays converts them afterwards.
    converters = [None] * len(arguments.shapes) if choices.plain else choices.converters
    each = zip(arguments.shapes, arguments.batched, converters, strict=True)
    return [
        _native.Leaf(
            dtype=dtype,
            shape=shape,
            batched=flags,
            convert=convert,
            fill=None,
            **_bits(dtype, entry),
        )
        for (shape, dtype), flags, convert in each
    ]


def _results(equation: Equation, entry: Entrance) -> list[_native.Leaf]:
    each = zip(equation.avals, equation.callback.fills, strict=True)
    return [
        _native.Leaf(
            dtype=np.dtype(aval.dtype),
            shape=aval.shape,
            batched=[True] * len(equation.grid),
            convert=None,
            fill=_tile(fill, aval, equation.levels),
            **_bits(np.dtype(aval.dtype), entry),
        )
        for aval, fill in each
    ]


def _called(
    equation: Equation, choices: Choices, elsewhere: bool, job: Failures | None
) -> dict[str, Any]:
    """What the engine calls, and what it needs in place of arguments or results."""
    in_place, feed = equation.in_place(), None
    if elsewhere:
        called = Entries(_nothing, ResultForm.NOTHING)
    elif in_place is not None:
        called = Entries(in_place[0], ResultForm.IGNORED)
    else:
        called, feed = entries(choices), equation.fed()
    if job is not None:  # refused after a failure of a program over several processes
        runner = called.runner and job.until_failure(called.runner)
        function = job.until_failure(called.function)
        called = called._replace(function=function, runner=runner)
    buffers = None if in_place is None else in_place[1]
    return {**called._asdict(), "buffers": buffers, "feed": feed}


def _bits(dtype: np.dtype, entry: Entrance) -> dict[str, Any]:
    """How a leaf's elements are packed."""
    bits, is_signed = packed_bits(dtype) if entry.packed else (0, False)
    return {"bits": bits, "is_signed": is_signed}


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
