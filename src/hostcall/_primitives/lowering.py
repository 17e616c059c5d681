"""What the lowerings of all primitives share: the way in, the slot, the custom call.

The program's text can't hold a Python function. It holds the key of the call instead,
which says what the call is, and a count that tells it from other live calls with the
same key. Under these the engine keeps the plan (function, dtypes, shapes), in a slot
that is tied to the executable and freed with it. Live programs that make an equal call
of the same function share the slot.

So the text of a program depends on what it calls, not on what else was compiled, nor in
which order or process: JAX's compilation cache finds it again. (Functions of one code,
such as two closures of a factory, are counted in the order of their programs.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hostcall import _jax, _native
from hostcall._core.callback import CallSpec
from hostcall._core.errors import HostcallError, SpecError
from hostcall._core.identity import identity
from hostcall._core.registered import names
from hostcall._engine import targets
from hostcall._engine.params.equation import Equation
from hostcall._engine.placement import Placement, Reach
from hostcall._engine.plans import plan_in_program
from hostcall._jax.types import Aval, Effect, Emitted, LoweringContext, Primitive, Value
from hostcall._primitives.kept_alive import (
    BY_BLOCKS,
    KeptAlive,
    refuse_export,
    why_here,
)
from hostcall._primitives.outcome import OUTCOME_AVAL, share
from hostcall._primitives.refused import TOKEN_ALONE, in_reducer
from hostcall._primitives.some_axes import lower_once
from hostcall._primitives.through_jax import check_platform

if TYPE_CHECKING:
    from hostcall._job.after_failure import Failures

Lowering = Callable[..., list[Value]]  # (program, *operands, params=) -> results

# --- The way in -----------------------------------------------------------------------


def start_lowering(ctx: LoweringContext) -> _jax.Program:
    """The program whose equation is lowered, once the engine is ready for it."""
    program = _jax.program_of(ctx)
    targets.start()
    on_gpu = program.client is not None and program.client.platform in ("cuda", "gpu")
    if on_gpu and "cuda" in program.platforms:  # jaxlib says "gpu" on ROCm too
        targets.prepare_for_cuda()
    # From here on this process answers the others, whatever its program calls.
    job_of(program)
    return program


def job_of(program: _jax.Program) -> Failures | None:
    """Where failures of the program are noted, and told to the other processes that run
    it; None if this process runs it alone. The first time that a program asks, this
    process begins to answer the others.
    """
    if not program.across:
        return None
    from hostcall._job.job import job  # never in a job of one process

    return job().failures


def register(primitive: Primitive, by_engine: Lowering, through_jax: Lowering) -> None:
    """Registers the lowerings of a kind of equation, with what they begin with.

    Args:
        primitive: the primitive.
        by_engine: for the platforms that the engine serves.
        through_jax: for all others (through_jax.py).
    """

    def lowered(
        ctx: LoweringContext, *operands: Value, params: Equation
    ) -> list[Value]:
        program = start_lowering(ctx)
        rule = by_engine
        if not set(program.platforms) <= set(_jax.SERVED):
            check_platform(program, params)
            rule = through_jax
        if program.mesh is not None and params.options.sharding is not None:
            raise SpecError(
                f"hostcall: `{params.callback.name}` has on=device inside shard_map or"
                " pmap, where each device makes its own call. Drop on=",
                code="hc-device",
            )
        if program.automatic:
            return lower_once(program, operands, params, primitive)
        return rule(program, *operands, params=params)

    _jax.register_lowering(primitive, lowered)


# --- The slot -------------------------------------------------------------------------

# The attributes by which a program finds the slot of a call.
Attributes: TypeAlias = dict[str, str | int]


def make_slot(
    program: _jax.Program,
    equation: Equation,
    placement: Placement,
    avals: Sequence[Aval],
) -> Attributes:
    """Makes a plan, and puts it into a slot that lives as long as the program.

    An exported program has no slot: its attribute is a text, from which whoever loads
    it makes the plan.

    Args:
        program: the program.
        equation: the call or tap.
        placement: where the program makes it.
        avals: those of its operands; for a typed key, that of its uint32 block.
    """
    callback = equation.callback
    if program.in_reducer:
        raise in_reducer(callback)
    # Each device finds the plan of its own block by the slot of the whole.
    in_blocks = placement.plan_of_block is not None
    why: Callable[[], str] | str
    if in_blocks:
        why = BY_BLOCKS
    elif program.is_exported or _may_travel(callback):
        from hostcall._export import texts

        text, why = texts.written(program, equation, placement, avals)
        placement = replace(placement, text=text)
    else:  # most calls: only who serializes the program asks
        why = partial(why_here, equation, avals)
    if program.is_exported:
        assert isinstance(why, str), "the export has asked already"
        if why:
            refuse_export(callback, why)
        return {targets.TEXT: placement.text}
    _native.bury()  # frees the slots of programs that died since the last lowering
    key = equation.key(avals, program.name)

    make = partial(_new_slot, program, equation, placement, avals, key, why)
    # Plans over several devices name them, and programs differ in theirs. A plan that
    # counts, or has memory, does so for one call.
    on_one_device = placement.program_devices is None
    if on_one_device and not in_blocks and not equation.is_stateful:
        call_name = (key, placement.text, program.client, program.platforms)
        made_of = (equation, tuple(avals), placement.only)
        keeper = _shared(program, call_name, made_of, make)
    else:
        keeper = make()
    program.keep_alive(keeper)
    assert keeper.slot is not None, "only a pickled one has none"
    attributes: Attributes = {"key": key, "count": keeper.slot.count}
    if placement.text:
        attributes[targets.TEXT] = placement.text
    return attributes


def _new_slot(
    program: _jax.Program,
    equation: Equation,
    placement: Placement,
    avals: Sequence[Aval],
    key: int,
    why: Callable[[], str] | str,
) -> KeptAlive:
    plan = plan_in_program(
        equation, placement, avals, program.client, program.platforms
    )
    slot = _native.Slot(plan, key, program.across)
    return KeptAlive(slot, equation.callback.name, why)


def _may_travel(callback: CallSpec) -> bool:
    """A quick look: False if its function has no form in other processes."""
    function = callback.function
    owner = callback.policy.owner
    # A HostFunction has a name itself, or its function has.
    functions = (function,) if owner is None else (owner, owner.fn)
    is_named = bool(names.names) and any(map(names.of, functions))
    return is_named or callback.facts.host_code.travels_alone


# The slots of live programs that an equal call of another program may have too, by the
# name of the call and how many of this name stand before it in its program. If programs
# hold the same function, the text of each is the same in whatever order they are
# lowered: JAX's disk cache finds them again. No lock: of two threads that make a slot
# at the same time, each may keep its own.
_live = weakref.WeakValueDictionary[Hashable, KeptAlive]()


def _shared(
    program: _jax.Program,
    call_name: Hashable,
    made_of: tuple[object, ...],
    make: Callable[[], KeptAlive],
) -> KeptAlive:
    """The slot of an equal call of another program; else a new one.

    Two calls of one name in a program have two slots, numbered 0 and 1. The next
    program with two such calls finds both.
    """
    number = program.equal_calls.get(call_name, -1) + 1
    program.equal_calls[call_name] = number
    live = _live.get((call_name, number))
    # Equal keys may belong to two closures of one code, which have plans of their own.
    if live is not None and identity(live.made_of) == identity(made_of):
        return live
    keeper = make()
    keeper.made_of = made_of
    # A live one that differs keeps its entry, where programs with its function look.
    if live is None:
        _live[call_name, number] = keeper
    return keeper


# --- The custom call ------------------------------------------------------------------

# What the links of a call take and return (`EngineCall._linked`, blocks.py).
NUMBER = _jax.ShapedArray((), np.dtype(np.int32))


@dataclass
class EngineCall:
    """The custom call of an equation.

    In a program that the compiler partitions over several devices, every device makes
    the call on whole values; inside shard_map or pmap, every device makes it on its own
    block.

    Attributes:
        program: the program.
        target: the name of the handler.
        attributes: the numbers and texts that the handler decodes.
        has_side_effect: whether XLA may neither drop nor merge the call.
        aliases: operand number -> number of the result that may take its memory.
        reach: how the outcome of the call reaches all devices; None if it stays where
            it is.
        prepare: makes each device's operands from the whole ones, in a program that the
            compiler partitions.
    """

    program: _jax.Program
    target: str
    attributes: Attributes
    has_side_effect: bool
    aliases: dict[int, int] = field(default_factory=dict)
    reach: Reach | None = None
    prepare: Callable[[Sequence[Value]], Sequence[Value]] | None = None

    def emit(self, operands: Sequence[Value], effect: Effect | None) -> list[Value]:
        """Emits it with the tokens that its order needs; returns the results.

        `effect` puts it in order; None if it is pure.
        """
        # Without a token XLA may move a pure call, merge it with an equal one, drop it.
        if effect is None:
            results, _ = self.emit_with(None, operands, returns_token=False)
            return results
        token_in, leave = _jax.in_order(self.program.ctx, effect)
        results, token = self.emit_with(token_in, operands, returns_token=True)
        leave(token)
        return results

    def emit_with(
        self, token: Value | None, operands: Sequence[Value], returns_token: bool
    ) -> Emitted:
        """Emits it behind this token; returns (results, token)."""
        program = self.program
        if program.mesh is not None or program.size == 1:
            return self._one(token, operands, returns_token)
        if self.reach is not None and token is not None and not operands:
            # XLA (of jaxlib 0.12) ends the process while it compiles a region that a
            # token alone enters and an all-reduce leaves. Refused under those of 0.9.0
            # and 0.10.2 too, which compiled some.
            raise HostcallError(TOKEN_ALONE, code="hc-device")

        def in_region(token: Value | None, operands: Sequence[Value]) -> Emitted:
            if self.prepare is not None:
                operands = self.prepare(operands)
            return self._one(token, operands, returns_token)

        return _jax.on_each_device(program, in_region, token, operands, returns_token)

    def _one(
        self, token: Value | None, operands: Sequence[Value], returns_token: bool
    ) -> Emitted:
        """Emits the call of one device."""
        program = self.program
        reach = self.reach
        avals_out = list(program.ctx.avals_out)
        if reach is not None and reach.returns_outcome:
            avals_out.append(OUTCOME_AVAL)
        if returns_token and program.is_symbolic and _jax.has_symbolic(avals_out):
            results, token = self._linked(token, operands, avals_out)
        else:
            results, token = _jax.custom_call(
                program,
                self.target,
                token,
                operands,
                avals_out,
                returns_token=returns_token,
                has_side_effect=self.has_side_effect,
                attributes=self.attributes,
                aliases=self.aliases,
            )
        if reach is None:
            return results, token
        # Keys are their uint32 blocks in the reduction.
        avals = _jax.physical_avals(program.ctx.avals_out)
        shared, outcome = share(reach, program, results, avals)
        if outcome is None:
            return list(shared), token
        # The verdict (outcome.py): it passes the results on, or fails on this device if
        # the outcome says so.
        return _jax.custom_call(
            program,
            targets.VERDICT_TARGET,
            token,
            [outcome, *shared],
            avals,
            returns_token=token is not None,
            has_side_effect=self.has_side_effect,
            attributes=self.attributes,
            aliases={1 + i: i for i in range(len(avals))},  # behind the outcome
        )

    def _linked(
        self,
        token: Value | None,
        operands: Sequence[Value],
        avals_out: Sequence[Aval],
    ) -> Emitted:
        """Emits a call with results of symbolic shapes, beside which XLA has no token.

        In place of the token the call takes and returns a number, which carries no
        information. A link before it and one behind it, of known shapes, have the
        token: (token, 0) -> (token, number), and (token, number) -> (token, number).
        """
        program = self.program

        def link(token: Value | None, number: Value) -> Emitted:
            return _jax.custom_call(
                program,
                targets.LINK_TARGET,
                token,
                [number],
                [NUMBER],
                returns_token=True,
                has_side_effect=True,
                attributes={},
            )

        (zero,) = _jax.lower_traced(program.ctx, lambda: [np.int32(0)], (), ())
        (number,), token = link(token, zero)
        (number, *results), _ = _jax.custom_call(
            program,
            self.target,
            None,
            [number, *operands],
            [NUMBER, *avals_out],
            returns_token=False,
            has_side_effect=self.has_side_effect,
            attributes=self.attributes,
            aliases={1 + i: 1 + o for i, o in self.aliases.items()},  # behind it
        )
        _, token = link(token, number)
        return results, token
