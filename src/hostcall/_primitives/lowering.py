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
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax, _native
from hostcall._core import errors
from hostcall._core.callback import CallSpec
from hostcall._core.errors import ExportError, HostcallError, SpecError
from hostcall._core.identity import identity
from hostcall._core.registered import names
from hostcall._engine import targets
from hostcall._engine.params.equation import Equation
from hostcall._engine.placement import Placement, Reach
from hostcall._engine.plans import plan_in_program
from hostcall._jax.types import (
    Aval,
    Device,
    Effect,
    Emitted,
    LoweringContext,
    Primitive,
    Sharding,
    Value,
)
from hostcall._primitives.outcome import OUTCOME_AVAL, bits, from_bits, share

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
    job_of(program)
    return program


def job_of(program: _jax.Program) -> Failures | None:
    """Where failures of the program are noted, and told to the other processes that run
    it; None if this process runs it alone. The first call makes this process answer
    the others.
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
        through_jax: through JAX's own callback, with its cost: it brings the arrays to
            the host, and the engine runs on them, so rows, masks, dtypes and errors are
            the same. Where JAX has no callback, the equation is refused.
    """

    def lowered(
        ctx: LoweringContext, *operands: Value, params: Equation
    ) -> list[Value]:
        program = start_lowering(ctx)
        rule = by_engine
        if not set(program.platforms) <= set(_jax.SERVED):
            _check_platform(program, params)
            rule = through_jax
        if program.mesh is not None and params.options.sharding is not None:
            raise SpecError(
                f"hostcall: `{params.callback.name}` has on=device inside shard_map or"
                " pmap, where each device makes its own call. Drop on=",
                code="hc-device",
            )
        if program.automatic:
            return _lower_once(program, operands, params, primitive)
        return rule(program, *operands, params=params)

    _jax.register_lowering(primitive, lowered)


_JAXS_OWN = ("oneapi", "rocm", "tpu")


def _check_platform(program: _jax.Program, params: Equation) -> None:
    """Refuses platforms for which JAX has no callback either."""
    platforms = program.platforms
    if len(platforms) != 1 or platforms[0] not in _JAXS_OWN:
        raise HostcallError(
            f"hostcall: {params.shown} is lowered for"
            f" {', '.join(platforms)}. The engine serves cpu and cuda, also in one"
            f" program, and JAX's own callback serves {', '.join(_JAXS_OWN)}, each in a"
            " program of its own. Lower it for these, or run that part on the CPU: give"
            ' it arrays that are there, jax.device_put(x, jax.devices("cpu")[0])',
            code="hc-device",
        )


# --- In a shard_map that is manual over some mesh axes only ---------------------------
#
# Along the other axes the compiler splits the values, and only it knows how. So the
# values are gathered along them, as for JAX's debug callbacks, and of the devices that
# differ only there the first makes the call: the others have a mask that is False. All
# of them come to the call, so that a failure reaches all of them. Then the first
# device's results go to the others, bit for bit.


def refuse_some_axes(program: _jax.Program, name: str, remedy: str = "") -> None:
    """Refuses a shard_map that is manual over some mesh axes only."""
    if program.automatic:
        axes = sorted(map(str, program.automatic))
        text = (
            f"hostcall: `{name}` is called inside a shard_map that is manual over some"
            f" mesh axes only. Make it manual over {axes} too{remedy}"
        )
        raise NotImplementedError(errors.with_code(text, "hc-device"))


def _lower_once(
    program: _jax.Program,
    operands: Sequence[Value],
    params: Equation,
    primitive: Primitive,
) -> list[Value]:
    """Lowers the equation to itself, inside a region that is manual over all axes."""
    if not params.runs_along_axes:
        refuse_some_axes(program, params.callback.name)
    if params.options.order == "ordered" and not _jax.SHARDS_TOKENS_OVER_SOME_AXES:
        remedy = ", or leave out order='ordered', or use jaxlib 0.11.2 or later"
        refuse_some_axes(program, params.callback.name, remedy)
    axes = sorted(program.automatic, key=str)
    # All devices come to the call, so that it is one team's, and one of them is let.
    masked = params if params.masked else params.with_mask()

    def once(*values: jax.Array) -> list[jax.Array]:
        first = jax.lax.axis_index(tuple(axes)) == 0
        mask, *rest = values if params.masked else (True, *values)
        both = jnp.logical_and(mask, first)
        results: list[jax.Array] = primitive.bind(both, *rest, params=masked)
        return results if params.through else [_firsts(x, first, axes) for x in results]

    return _jax.lower_by(
        program.ctx, lambda *values: _jax.manual_over(once, values), *operands
    )


def _firsts(value: jax.Array, first: jax.Array, axes: Sequence[Hashable]) -> jax.Array:
    """The value of the first device along these axes, on all of them."""
    with jax.enable_x64(True):  # without it JAX has no 64-bit integers
        # As in outcome.py: the maximum of one device's bits and zeros is its bits.
        masked = [jnp.where(first, array, 0) for array in bits(value)]
        maxima = [jax.lax.pmax(array, tuple(axes)) for array in masked]
        return from_bits(value.dtype, iter(maxima))


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
        raise SpecError(
            f"hostcall: `{callback.name}` is called in the function that a reduction or"
            " a scatter applies to single elements (lax.reduce, lax.reduce_window,"
            " x.at[...].apply), where XLA can run no host function. Call it in lax.scan"
            " or lax.map, or once with the whole arrays"
        )
    # Each device finds the plan of its own block by the slot of the whole.
    in_blocks = placement.plan_of_block is not None
    why: Callable[[], str] | str = _BY_BLOCKS
    if not in_blocks and (program.is_exported or _may_travel(callback)):
        from hostcall._export import texts

        text, why = texts.written(program, equation, placement, avals)
        placement = replace(placement, text=text)
    elif not in_blocks:  # most calls: only who serializes the program asks
        why = partial(_why_here, equation, avals)
    if program.is_exported:
        if isinstance(why, str) and why:
            refuse_export(callback, why)
        return {targets.TEXT: placement.text}
    _native.bury()  # frees the slots of programs that died since the last lowering
    key = equation.key(avals, program.name)

    def make() -> KeptAlive:
        plan = plan_in_program(
            equation, placement, avals, program.client, program.platforms
        )
        return KeptAlive(_native.Slot(plan, key, program.across), callback.name, why)

    # Programs over several devices differ in them. An equation that counts, or has
    # memory, has no plan but its own.
    one_device = placement.program_devices is None
    if one_device and not in_blocks and not equation.is_stateful:
        named = key, placement.text, program.client, program.platforms
        made_of = equation, tuple(avals), placement.only
        keeper = _shared(program, named, made_of, make)
    else:
        keeper = make()
    program.keep_alive(keeper)
    assert keeper.slot is not None, "only a pickled one has none"
    attributes: Attributes = {"key": key, "count": keeper.slot.count}
    if placement.text:
        attributes[targets.TEXT] = placement.text
    return attributes


def _may_travel(callback: CallSpec) -> bool:
    """A quick look: False if its function has no form in other processes."""
    function = callback.function
    owner = callback.policy.owner
    functions = (function,) if owner is None else (owner, owner.fn)
    is_named = bool(names.names) and any(map(names.of, functions))
    return is_named or callback.facts.host_code.travels_alone


def _why_here(params: Equation, operands: Sequence[Aval]) -> str:
    from hostcall._export import texts

    return texts.why_here(params, operands)


_BY_BLOCKS = (
    "each device calls it for its own block, and this process chooses the blocks when"
    " it compiles the program. Give the whole value (on='once', partitioned=False)"
)


def refuse_export(callback: CallSpec, reason: str) -> NoReturn:
    raise ExportError(
        f"hostcall: a program that calls `{callback.name}` (at {callback.place}) can't"
        f" be exported: {reason}"
    )


@dataclass(eq=False)
class KeptAlive:
    """Something that an executable keeps alive, and that can't leave the process.

    Attributes:
        slot: what is kept; None in another process.
        name: names the call in messages.
        why: why another process can't make the call, or a function that says it; ""
            if the program has its text.
        made_of: what its plan was made of, if other programs may share it.
    """

    slot: _native.Slot | None
    name: str
    why: Callable[[], str] | str
    made_of: tuple[object, ...] = ()

    def __reduce__(self) -> tuple[type[KeptAlive], tuple[None, str, str]]:
        why = self.why
        if callable(why):
            why = why() or "it got its name after the program was lowered; lower it now"
        if not why:
            return KeptAlive, (None, self.name, "")
        raise ExportError(
            f"hostcall: a compiled program that calls `{self.name}` can't be"
            f" serialized: {why}. (To compile a program only once, without"
            " serializing it, use JAX's compilation cache, jax_compilation_cache_dir)"
        )


# The slots of live programs that an equal call of another program may have too, by the
# key of the call and how many with this key stand before it in its program. If programs
# hold the same function, the text of each is the same in whatever order they are
# lowered: JAX's disk cache finds them again. No lock: of two threads that make a slot
# at the same time, each may keep its own.
_live = weakref.WeakValueDictionary[Hashable, KeptAlive]()


def _shared(
    program: _jax.Program,
    named: Hashable,
    made_of: tuple[object, ...],
    make: Callable[[], KeptAlive],
) -> KeptAlive:
    """The slot of an equal call of another program; else a new one."""
    number = program.equal_calls.get(named, -1) + 1
    program.equal_calls[named] = number
    live = _live.get((named, number))
    # Equal keys may belong to two closures of one code, which have plans of their own.
    if live is not None and identity(live.made_of) == identity(made_of):
        return live
    keeper = make()
    keeper.made_of = made_of
    # A live one that differs keeps its entry, where programs with its function look.
    if live is None:
        _live[named, number] = keeper
    return keeper


# --- The custom call ------------------------------------------------------------------


_TOKEN_ALONE = (
    "hostcall: a call with results and without array arguments, which comes after"
    " another effect or has order='ordered', can't be compiled for a program over"
    " several processes, since XLA would crash. Give it where=, which may be"
    " jnp.array(True), or an array that the function ignores; to a feed,"
    " feed(where=jnp.array(True))"
)
NUMBER = _jax.ShapedArray((), np.dtype(np.int32))


def _in_branch(equation: dict[str, Equation]) -> HostcallError:
    params = equation["params"]
    return HostcallError(
        f"hostcall: {params.shown} (at {params.callback.place}) is in a shard_map that"
        " uses no array, in a branch of lax.cond or lax.switch, where XLA would end the"
        " process. Give the shard_map an array that the call gets, such as"
        " jnp.zeros(()) with in_specs=jax.P(); or put the cond into the shard_map",
        code="hc-device",
    )


_jax.refuse_tokens_alone(_in_branch)


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
            return self.emit_with(None, operands, False)[0]
        token_in, leave = _jax.in_order(self.program.ctx, effect)
        results, token = self.emit_with(token_in, operands, True)
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
            # XLA (of jaxlib 0.10 to 0.12) ends the process while it compiles a region
            # that a token alone enters and an all-reduce leaves.
            raise HostcallError(_TOKEN_ALONE, code="hc-device")

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
        outs = list(program.ctx.avals_out)
        if reach is not None and reach.returns_outcome:
            outs.append(OUTCOME_AVAL)
        if returns_token and program.is_symbolic and _jax.has_symbolic(outs):
            results, token = self._linked(token, operands, outs)
        else:
            results, token = _jax.custom_call(
                program,
                self.target,
                token,
                operands,
                outs,
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
        # Passes the results on, or fails on this device if the outcome says so.
        return _jax.custom_call(
            program,
            targets.VERDICT_TARGET,
            token,
            [outcome, *shared],
            avals,
            returns_token=token is not None,
            has_side_effect=self.has_side_effect,
            attributes=self.attributes,
            aliases={1 + i: i for i in range(len(avals))},
        )

    def _linked(
        self,
        token: Value | None,
        operands: Sequence[Value],
        avals_out: Sequence[Aval],
    ) -> Emitted:
        """Emits a call with a token and symbolic shapes, which XLA does not put
        together.

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
            aliases={i + 1: o + 1 for i, o in self.aliases.items()},
        )
        return results, link(token, number)[1]


# --- Platforms that the engine does not serve -----------------------------------------


PARTITION = _jax.ShapedArray((), np.dtype(np.uint32))


def _by_number(
    run: Callable[..., list[np.ndarray]],
    devices: Sequence[Device],
    number: np.ndarray,
    *arrays: np.ndarray,
) -> list[np.ndarray]:
    return run(devices[int(number)], *arrays)


def emit_through_jax(
    program: _jax.Program,
    run: Callable[..., list[np.ndarray]],
    operands: Sequence[Value],
    *,
    params: Equation,
    sharding: Sharding | None,
    **options: Any,
) -> list[Value]:
    """Emits JAX's own callback, for platforms that the engine does not serve.

    `run` gets the device that calls (None if that is not known) and one array for each
    operand, and returns one array for each result. JAX does not tell which device
    calls, so where each of several does, its number is one more operand.

    On a TPU an effect has a token, ordered or not: without one, a callback without
    results is a send that nothing answers, so the program may end, and a barrier
    return, before the host has the values. (Elsewhere JAX makes a token only of
    another.) `options` are the other parameters of JAX's function.
    """
    if program.is_exported:
        refuse_export(params.callback, _THROUGH_JAX.format(*program.platforms))
    ctx = program.ctx
    avals = program.ctx.avals_in
    if not _jax.CALLBACKS_TAKE_SMALL_ELEMENTS:
        for aval in (*avals, *ctx.avals_out):
            if _jax.is_smaller_than_a_byte(aval.dtype):
                _jax.refuse(_jax.Part.CALLS, _NO_SMALL_ELEMENTS.format(aval.dtype))
    devices = program.devices if program.mesh is not None else None
    place = _jax.place_of_callback(ctx, sharding)
    called: Callable[..., list[np.ndarray]]
    # JAX calls back from one device, or from each without saying which it is.
    if not devices:
        called = partial(run, _jax.caller(program, sharding, **options))
    else:
        operands = [_jax.partition_id(), *operands]
        avals = [PARTITION, *avals]
        called = partial(_by_number, run, devices)

    effect = params.effect
    token_in, leave = (None, None) if effect is None else _jax.in_order(ctx, effect)
    results, token, _ = _jax.emit_python_callback(
        ctx,
        called,
        token_in,
        list(operands),
        avals,
        ctx.avals_out,
        returns_token=effect is not None,
        sharding=place,
        **options,
    )
    if leave is not None:
        leave(token)
    return list(results)


_NO_SMALL_ELEMENTS = (
    "callback that reads {0} right: on this platform calls go through JAX's own. Pass"
    " the values as int8, x.astype(jnp.int8)"
)
_THROUGH_JAX = (
    "on {} calls go through JAX's own callback, which holds on to this process. Export"
    ' it for platforms=("cpu", "cuda"), or compile the function itself where it runs'
)
