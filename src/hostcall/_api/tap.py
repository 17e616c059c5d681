"""`hc.tap` and its relatives: a program hands values to Python without waiting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import jax

from hostcall._core import mistakes
from hostcall._core.callback import CallSpec
from hostcall._core.errors import SpecError
from hostcall._core.mistakes import check_function, parse_mask
from hostcall._core.option_checks import check
from hostcall._core.options import (
    TAP,
    On,
    Remat,
    Rows,
    TapArrays,
    TapOptions,
    WhenFull,
)
from hostcall._core.order import Order
from hostcall._core.source import users_place
from hostcall._core.spec import Opaque, flatten_arguments, parse_result, wrap_keys
from hostcall._engine.params.tap import TapParams
from hostcall._primitives.tap import repeated
from hostcall._primitives.tap.primitive import bind

T = TypeVar("T")

_NO_RESULT = parse_result(None, "a tap")
# Options that do nothing by default, so that a value may have been for the function.
_NONE = [option.name for option in fields(TapOptions) if option.default is None]


def tap(
    fn: Callable[..., Any],
    *args: Any,
    order: Order = "unordered",
    where: Any = None,
    when_full: WhenFull = "block",
    rows: Rows = "batched",
    remat: Remat = "once",
    on: On | jax.Device = "once",
    arrays: TapArrays = "numpy",
    every: int | float | None = None,
    sample: float | None = None,
    always: Any = None,
    batch: int | None = None,
    tag: str | None = None,
    **kwargs: Any,
) -> None:
    """Hands values to a Python function, which runs later. The program does not wait.

    The device copies the values into a queue and goes on. One worker thread takes them,
    some milliseconds later, and calls `fn(*args, **kwargs)` with NumPy arrays that `fn`
    owns. It makes one call at a time, so a slow function delays all taps, but not the
    program. `hc.barrier()` waits until all taps are delivered, and raises what they
    raised; `jax.effects_barrier()` waits for programs only. A process ends after it has
    delivered its taps. Outside compiled programs a tap waits for its arrays.

    Args:
        fn: any callable except a generator function. A coroutine function runs on the
            event loop, and the next tap waits for it. Its return value is
            ignored. It may use JAX, and may tap and call again.
        *args: pytrees. Arrays and numbers reach `fn` as arrays, typed PRNG keys as
            keys, and all other leaves (strings, objects) unchanged.
        order: "unordered": the taps of one device are delivered in the order in which
            it reached them: the order of the program. "ordered": also in the order of
            the thread's programs, on whatever devices.
        where: a bool scalar. If it is False, nothing leaves the device. Under vmap each
            row has its own. In shard_map it can pick a shard, as in
            where=jax.lax.axis_index("x") == 0.
        when_full: what the device does if the queue holds
            `configure(tap_queue_bytes=)`. "block": it waits for the worker.
            "drop_newest": it drops this tap. "drop_oldest": it drops its oldest tap
            with this policy that is not being delivered. `hc.monitor.stats()` counts
            dropped taps. A tap inside a tap never blocks. If `fn` waits for a thread or
            program that taps, use a policy that drops there: a blocked tap would wait
            for the worker, which is busy with `fn`.
        rows: under vmap, "batched": one delivery with the batch axes in front, for the
            arrays that `hc.current().transforms` names. If `where` differs between
            rows, the remaining rows lie along one axis, and `hc.current().rows` has
            their indices. "each": one per row, in order; see `hc.current().row`.
        remat: under jax.checkpoint, "once": only the forward pass taps. "repeat": the
            backward pass taps again when it recomputes the values.
        on: in a jitted program over several devices, also of several processes: "once":
            one delivery of the whole value, in the process of the program's first
            device. All devices gather it, even if `where` or `every` drops the tap. A
            device: the same, in that device's process. "shards": each device delivers
            its block, without communication; equal blocks of a process are delivered
            once. See `hc.current().device`, `.process` and `.index`.
        arrays: as in `hc.call`, except "cuda".
        every: an int n lets the first of every n executions tap. A run of a program
            with more than n executions is counted separately: with every=100, a scan of
            1000 steps taps at steps 0, 100, ... 900 of each run. Other runs are counted
            together: a jitted step with one tap taps in 1 of 100 calls. A float is an
            interval in seconds, over all runs. Each place in a program is counted
            separately on each device, if `where` is True there. Outside of jax.jit, a
            place is a source line.
        sample: the share of executions that tap. A fixed sequence picks them, the same
            in each process.
        always: a bool scalar. If it is True, the execution taps even if `every` or
            `sample` would leave it out, such as the last step of a loop:
            always=i == n - 1. It still counts for `every`, whose later choices stay the
            same. `where` comes first. Under vmap one row is enough for the batch to
            tap, if `where` is True for it.
        batch: calls `fn` with up to this many taps of one place and device at once,
            stacked along a new axis in front: as many as are queued, but at most 256
            if several devices tap, or if `when_full` is "drop_oldest". They are in
            order, but taps of other places that lie between them may come before or
            after. `hc.current().runs` and `.steps` tell them apart. 4096 scalars in
            one call cost less than 100 alone.
        tag: the tap's name in `hc.monitor` (default: the function's) and in
            `hc.testing.collect` (default: not collected).
        **kwargs: arguments for `fn`, like `args`: all keywords that are not options.

    Raises:
        SpecError: an option or argument is invalid, `fn` can't take the arguments, or
            `fn` uses a traced value of an enclosing function instead of taking it as an
            argument.

    If `fn` raises, the program goes on. The exception is logged (the first three with
    tracebacks, further ones as counts), and the next `hc.barrier()` raises it.

    `fn` runs on a thread of hostcall's, and then does not see its context variables,
    np.errstate, tracing spans or thread-locals.
    The page "Call a simulator" says which thread it is.

    Under transformations:
        jit, scan, while_loop (also its condition), cond, map: taps each time the tap is
            reached. It is never removed as unused.
        vmap: see `rows`. For cond and while_loop, JAX computes all branches for all
            rows: pass the condition as `where=` too. In the condition of a batched
            while_loop, an unordered tap runs twice per iteration, an ordered one once.
        jvp, grad: taps primal values where they are computed; for derivatives, see
            `hc.derivatives`. JAX runs a linearized while_loop, with its taps, again for
            each tangent.
        shard_map, pmap: each shard taps its own value, even if psum made all equal,
            whatever `on` is; a device is refused. With `axis_names`, values are
            gathered along the other axes, and the first device there taps.
        jit over sharded arrays: see `on`.

    Cost: on a CPU 0.1 to 0.3 us and one copy on the device's thread, which never takes
    the GIL, and waits only if the queue is full and `when_full="block"`. On one CPU
    device, and with jaxlib 0.12 or later also on one GPU, and on several CPU devices
    unless a tap is ordered, the program keeps JAX's fast dispatch; elsewhere a dispatch
    takes about 65 us instead of 4, as with any effect (not with `hc.tap_through`). A
    product that is tapped is no longer fused into a multiply-add (FMA), so results may
    differ by about one rounding, 1 ulp of it. On a TPU or an AMD GPU, JAX's own
    callback brings the values to the queue at its own speed, `on` has no effect, and
    `hc.current()` knows no device.
    """
    options = FACE.given(locals())
    if not options and not kwargs and repeated.push(fn, args):
        return
    operands, params = prepare(fn, args, kwargs, options)
    bind(*operands, params=params)


def tap_through(
    fn: Callable[[T], Any],
    x: T,
    *,
    where: Any = None,
    when_full: WhenFull = "block",
    rows: Rows = "batched",
    remat: Remat = "once",
    arrays: TapArrays = "numpy",
    every: int | float | None = None,
    sample: float | None = None,
    tag: str | None = None,
) -> T:
    """Hands `x` to `fn(x)`, which runs later, and returns `x`.

    Like `hc.tap`, but the result ties the tap to the program, instead of an effect. The
    program keeps JAX's fast dispatch everywhere, and **the tap runs only if the result
    is used**. JAX may drop, merge or repeat it like any computation.

    Args:
        fn: as in `hc.tap`.
        x: a pytree of arrays and numbers.
        where: as in `hc.tap`, like all options below.
        when_full: what happens if the queue is full.
        rows: under vmap, one delivery for the batch or one per row.
        remat: under jax.checkpoint, "once" keeps the value for the backward pass.
        arrays: the kind of array that `fn` gets.
        every: taps one in so many executions, or one in so many seconds.
        sample: the share of executions that tap.
        tag: the tap's name in `hc.testing.collect` and `hc.monitor`.

    Returns:
        `x`. Use it in place of the argument. `hc.barrier` knows the program by its
        results only: keep them until it has returned. Reading them is not enough over
        several devices, since it does not wait for devices that hold copies.

    Under transformations: as `hc.tap`, where the result is used. grad, jvp: the
    derivative is that of the identity.

    Cost: that of `hc.tap`, and a copy of `x` unless XLA can reuse its memory. In a
    jitted program over sharded arrays, `x` is gathered and the result is replicated.
    """
    options = FACE.given(locals())
    options["order"] = "pure"
    operands, params = prepare(fn, (x,), {}, options, _FACE_OF_ONE)
    out: T = rebuilt(params, bind(*operands, params=replace(params, through=True)))
    return out


# --- Parts -------------------------------------------------------------------------


FACE = mistakes.Face(
    "hc.tap",
    "hc.tap({fn}, {args})",
    mistakes.options_of(tap, "fn"),
    {
        "ordered": 'order="ordered"',
        "partitioned": 'on="shards"',
        "vectorized": 'rows="batched"',
        "vmap_method": 'rows="batched", or "each"',
    },
)
_FACE_OF_ONE = mistakes.Face("hc.tap_through", "hc.tap_through({fn}, ({args}))")


@functools.cache
def _defaults(options: Callable[[], TapOptions]) -> TapOptions:
    """The options of a tap that is given none, which each eager one asks for."""
    return options()


def prepare(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Mapping[str, Any],
    face: mistakes.Face = FACE,
) -> tuple[list[jax.Array], TapParams]:
    """Checks a tap's arguments. Returns the operands and parameters of its equation.

    `options` are those of `hc.tap` that are given.
    """
    usage = "hc.tap(fn, *args)" if face is FACE else f"{face.name}(fn, x)"
    facts = check_function(fn, usage, awaits=True, returns=False)
    name = facts.name
    tap_options = _defaults(TapParams.takes)  # type: ignore[arg-type] # a class
    if options:
        check(f"the tap `{name}`", options, TAP)
        tap_options = TapParams.takes.of(options)
    # The result of hc.tap_through keeps a pure one in its program.
    if tap_options.order == "pure" and face is not _FACE_OF_ONE:
        raise SpecError(
            f"hostcall: order='pure' would drop the tap `{name}`: no result of the"
            " program depends on it. Leave out order=, or use hc.tap_through and its"
            " result",
            code="hc-dropped",
        )
    operands, template = flatten_arguments(args, kwargs)
    mistakes.check(face, fn, args, kwargs, template.leaves)
    if options:
        _warn_of_functions_own(face, fn, options)
    mask = options.get("where")
    always = options.get("always")
    # The mask stands in front of the operands, and the flag behind them.
    if mask is not None:
        operands.insert(0, parse_mask(mask, name))
    if always is not None:
        always = parse_mask(always, name, "always")
    # Of a tap that is not thinned no execution is left out, so the flag says nothing.
    is_flagged = always is not None and tap_options.thinned
    if is_flagged:
        operands.append(always)
    callback = CallSpec(
        Opaque(fn),
        template,
        _NO_RESULT,
        (),
        tap_options,
        users_place(),
        known=facts,
    )
    params = TapParams(callback=callback, masked=mask is not None, always=is_flagged)
    return operands, params


def _warn_of_functions_own(
    face: mistakes.Face, fn: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    """Warns of options that the function may have wanted for itself."""
    none_by_default = {
        option: value
        for option, value in options.items()
        if option in _NONE and value is not None
    }
    if none_by_default:
        mistakes.warn_of_own(face, fn, none_by_default)


def rebuilt(params: TapParams, arrays: list[jax.Array]) -> Any:
    """Rebuilds the one argument of a tap from its arrays."""
    template = params.callback.template
    (x,), _ = template.unflatten(wrap_keys(arrays, template.keys))
    return x
