"""`hc.tap` and its relatives: values leave a program, which does not wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from hostcall import _jax
from hostcall._core import mistakes
from hostcall._core.arguments import (
    check_function,
    check_on_of_tap,
    check_tag,
    parse_mask,
)
from hostcall._core.errors import SpecError
from hostcall._core.order import Order
from hostcall._core.source import users_place
from hostcall._core.spec import Static, flatten_arguments, parse_result
from hostcall._engine.params.call import Arrays, Callback
from hostcall._engine.params.tap import (
    WHEN_FULL,
    On,
    Remat,
    Rows,
    TapParams,
    WhenFull,
)
from hostcall._primitives.tap import derivatives, lowering  # noqa: F401  (registers)
from hostcall._primitives.tap.primitive import bind

T = TypeVar("T")

_NO_RESULT = parse_result(None, "a tap")


def tap(
    fn: Callable[..., Any],
    *args: Any,
    order: Order = "unordered",
    where: Any = None,
    when_full: WhenFull = "block",
    rows: Rows = "batched",
    remat: Remat = "once",
    on: On = "once",
    arrays: Arrays = "numpy",
    every: int | float | None = None,
    sample: float | None = None,
    tag: str | None = None,
    **kwargs: Any,
) -> None:
    """Hands values to a Python function, some time later. The program does not wait.

    The device copies the values into a queue and goes on. One worker thread calls
    `fn(*args, **kwargs)` with NumPy arrays that `fn` owns, one call at a time, some
    milliseconds later: a slow function delays all taps, not the program.
    `hc.barrier()` waits until everything has been delivered, and raises what taps
    raised (`jax.effects_barrier()` waits for programs only). What is queued when the
    process ends is delivered first. Outside of a compiled program a tap waits for its
    arrays.

    Args:
        fn: any callable but a generator or coroutine function; what it returns is
            ignored. It may use JAX, and may tap and call again.
        *args: pytrees. Arrays and numbers arrive as arrays, typed PRNG keys as such;
            all other leaves (strings, objects) reach `fn` as they are.
        order: "unordered": taps of one device are delivered in the order in which it
            came to them, which is program order within straight-line code. "ordered":
            program order, across loops, conditionals and programs, on each device.
        where: a bool scalar. Where it is False nothing leaves the device. Under vmap
            each row has its own. In shard_map it can pick a shard:
            where=jax.lax.axis_index("x") == 0.
        when_full: what the device does where the queue holds
            `configure(tap_queue_bytes=)`: "block" waits for the worker, "drop_newest"
            drops this tap, "drop_oldest" the oldest one of this device that has the
            same policy and is not being delivered yet. `hc.monitor.stats()` counts
            them. A tap inside a tap is let in; what a tap waits for (a thread that
            taps, a program over the process's devices) must not block on a full queue.
        rows: under vmap, "batched": one delivery with the batch axes in front,
            `hc.current().transforms` says of which arrays (where `where` differs
            between rows, those that are left lie along one axis, `hc.current().rows`
            says which they are); "each": one a row, in row order, `hc.current().row`
            says which.
        remat: under jax.checkpoint, "once": values of the forward pass are tapped
            there alone; "repeat": again where the backward pass computes them again.
        on: in a jitted program over several devices, "once": one delivery of the
            whole value, which is gathered (whatever `where` and `every` say);
            "shards": one of each block, from the device that has it, with no
            communication. `hc.current().device` and `.index` say which; equal blocks
            are delivered once.
        arrays: as in `hc.call`.
        every: an int: lets one of so many executions through, the first of them. A run
            of the program that comes here more often than that is counted by itself:
            with every=100 a scan of 1000 steps taps steps 0, 100, ... 900 each time it
            runs. Other runs are counted together: of calls of a jitted step, one in 100
            taps. A float: one in so many seconds, over all runs. Each place of a
            program counts by itself, on each device, where `where` is True. Outside of
            a program (jax.jit) a place is a line of yours.
        sample: lets this share of the executions through, chosen by a fixed sequence,
            the same each time the process runs.
        tag: the name under which `hc.testing.collect` gathers what this tap is given,
            and `hc.monitor` shows it. Default: the function's, and not collected.
        **kwargs: as `args`. What is no option above is the function's.

    Raises:
        SpecError: the tap is written wrong; `fn` can't take the arguments, or uses a
            traced value that it is not given (a variable of the functions around it).
            What `fn` raises does not stop the program: the log has its traceback (of
            one that fails often the first three, then counts), and the next
            `hc.barrier()` raises it.

    Under transformations:
        jit, scan, while_loop (its condition too), cond, map: once for each time the
            place is reached; never removed as unused.
        vmap: see `rows`. Of cond and while_loop JAX computes all branches for all
            rows: give the condition as `where=` too. In a while_loop's condition that
            vmap batches an unordered tap comes twice a round, an ordered one once.
        jvp, grad: primal values, where they are computed. `hc.derivatives.tap_tangent`
            and `tap_cotangent` there see derivatives. A linearized while_loop is run
            again for each tangent, as JAX does it, and so are its taps.
        shard_map, pmap: each shard its own; a value that psum has made the same
            everywhere arrives once from each.
        jit over sharded arrays: see `on`.

    Cost: on a CPU 0.1 to 0.3 us and one copy on the device's thread, which never takes
    Python's lock, and waits only where the queue is full and `when_full` is "block". A
    program with a tap leaves JAX's fast dispatch, as with any effect (some 50 us a
    dispatch in place of 4): `hc.tap_through` does not. On a GPU or TPU JAX's own
    callback brings the values to the queue, as slow as that; there `on` has no
    meaning, and `hc.current()` knows no device.
    """
    operands, params = prepare(
        fn,
        args,
        kwargs,
        order=order,
        where=where,
        when_full=when_full,
        rows=rows,
        remat=remat,
        on=on,
        arrays=arrays,
        every=every,
        sample=sample,
        tag=tag,
    )
    _refuse_pure(params, "it has no result that could need it")
    bind(*operands, params=params)


def tap_through(
    fn: Callable[[T], Any],
    x: T,
    *,
    where: Any = None,
    when_full: WhenFull = "block",
    rows: Rows = "batched",
    remat: Remat = "once",
    arrays: Arrays = "numpy",
    every: int | float | None = None,
    sample: float | None = None,
    tag: str | None = None,
) -> T:
    """Hands `x` to `fn(x)` some time later, and gives `x` back.

    As `hc.tap`, but tied to its result instead of an effect: the program keeps JAX's
    fast dispatch (4 us in place of some 50), and **runs the tap only if something uses
    the result**. JAX may drop, merge or repeat it as it may any computation.

    Args:
        fn: as in `hc.tap`.
        x: a pytree of arrays and numbers.
        where: as in `hc.tap`, as all that follow.
        when_full: what happens where the queue is full.
        rows: under vmap, one delivery of the batch or one a row.
        remat: under jax.checkpoint, "once" keeps the value for the backward pass.
        arrays: what `fn` gets for an array.
        every: lets one of so many executions through, or one in so many seconds, as in
            `hc.tap`.
        sample: lets this share of the executions through.
        tag: for `hc.testing.collect` and `hc.monitor`.

    Returns:
        `x`, to be used in place of it.

    Cost: that of `hc.tap`, and a copy of `x` where XLA can't give its memory on. In a
    jitted program over sharded arrays `x` is gathered, and the result replicated.
    """
    operands, params = prepare(
        fn,
        (x,),
        {},
        order="pure",
        where=where,
        when_full=when_full,
        rows=rows,
        remat=remat,
        arrays=arrays,
        every=every,
        sample=sample,
        tag=tag,
        face=_FACE_OF_ONE["tap_through"],
    )
    out: T = _rebuilt(params, bind(*operands, params=replace(params, through=True)))
    return out


def tap_tangent(fn: Callable[..., Any], x: T, **options: Any) -> T:
    """Gives `x` back; where it is differentiated forward, taps its tangent.

    Args:
        fn: called with the tangent, a pytree like `x`; None for what has no tangent
            (integers, strings).
        x: a pytree.
        **options: those of `hc.tap`.

    Returns:
        `x`, to be used in place of it.

    Under transformations: jvp, jacfwd: taps; a linearized function taps when it is
    given a tangent. grad, jacrev: a tangent that only stands for its transpose has no
    value, and nothing is tapped; `tap_cotangent` is for those. Of nested derivatives
    the innermost is seen.
    """

    return _seen_in_derivatives("tap_tangent", fn, x, options)


def tap_cotangent(fn: Callable[..., Any], x: T, **options: Any) -> T:
    """Gives `x` back; where it is differentiated in reverse, taps its cotangent.

    Args:
        fn: called with the cotangent, a pytree like `x`; None for what has none
            (integers, strings).
        x: a pytree.
        **options: those of `hc.tap`.

    Returns:
        `x`, to be used in place of it.

    Under transformations: grad, vjp, jacrev: taps in the backward pass, once for each
    time it comes through. jvp: nothing is tapped. Of nested derivatives the innermost
    is seen; the others are as right as without.
    """
    return _seen_in_derivatives("tap_cotangent", fn, x, options)


# --- Parts -------------------------------------------------------------------------


_OPTIONS = mistakes.options_of(tap, "fn")
_FACE = mistakes.Face(
    "hc.tap",
    "hc.tap({fn}, {args})",
    _OPTIONS,
    {
        "ordered": 'order="ordered"',
        "partitioned": 'on="shards"',
        "vectorized": 'rows="batched"',
        "vmap_method": 'rows="batched", or "each"',
    },
)
_FACE_OF_ONE = {
    name.rpartition(".")[2]: mistakes.Face(
        f"hc.{name}", f"hc.{name}({{fn}}, ({{args}}))"
    )
    for name in ("tap_through", "derivatives.tap_tangent", "derivatives.tap_cotangent")
}


_IN_DERIVATIVES = {
    "tap_tangent": derivatives.tangent_tap_p,
    "tap_cotangent": derivatives.cotangent_tap_p,
}


def _seen_in_derivatives(face: str, fn: Any, x: T, options: Any) -> T:
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise TypeError(
            f"hostcall: {', '.join(unknown)} is no option of hc.tap; they are"
            f" {', '.join(sorted(_OPTIONS))}"
        )
    inexact, rest = derivatives.split(x)
    operands, params = prepare(fn, (inexact,), {}, face=_FACE_OF_ONE[face], **options)
    _refuse_pure(params, "it is tied to no result")
    outs = _IN_DERIVATIVES[face].bind(*operands, params=params)
    out: T = derivatives.joined(_rebuilt(params, outs), rest)
    return out


def _refuse_pure(params: TapParams, why: str) -> None:
    if params.order == "pure":
        raise SpecError(
            f"hostcall: order='pure' would drop the tap `{params.callback.name}`:"
            f" {why}. Leave order= out, or use hc.tap_through, whose result is used"
        )


def prepare(
    fn: Any,
    args: Any,
    kwargs: Any,
    *,
    order: Any = "unordered",
    where: Any = None,
    when_full: Any = "block",
    rows: Any = "batched",
    remat: Any = "once",
    on: Any = "once",
    arrays: Any = "numpy",
    every: Any = None,
    sample: Any = None,
    tag: Any = None,
    face: mistakes.Face = _FACE,
) -> tuple[list[Any], TapParams]:
    """What to bind the primitive with."""
    called = check_function(fn, "hc.tap(fn, *args)")
    _check_options(called, order, when_full, rows, remat, arrays, every, sample)
    check_tag(tag, called)
    check_on_of_tap(on, called)
    operands, template = flatten_arguments(args, kwargs)
    mistakes.check(face, fn, args, kwargs, template.leaves)
    if where is not None:
        operands.insert(0, parse_mask(where, called))
    callback = Callback(
        fn=Static(fn),
        template=template,
        results=_NO_RESULT,
        fills=(),
        arrays=arrays,
        lend=False,
        timeout=None,
        executor=None,
        tag=tag,
        place=users_place(),
    )
    return operands, TapParams(
        callback=callback,
        order=order,
        masked=where is not None,
        rows=rows,
        when_full=when_full,
        remat=remat,
        on=on,
        every=every,
        sample=sample,
    )


def _check_options(
    called: str,
    order: Any,
    when_full: Any,
    rows: Any,
    remat: Any,
    arrays: Any,
    every: Any,
    sample: Any,
) -> None:
    choices = {
        "order": (order, ("unordered", "ordered", "pure")),
        "when_full": (when_full, WHEN_FULL),
        "rows": (rows, ("batched", "each")),
        "remat": (remat, ("once", "repeat")),
        "arrays": (arrays, ("numpy", "jax", "dlpack")),
    }
    for option, (value, allowed) in choices.items():
        if value not in allowed:
            raise SpecError(
                f"hostcall: {option}= of the tap `{called}` should be one of"
                f" {', '.join(map(repr, allowed))}, got {value!r}"
            )
    number = isinstance(every, (int, float)) and not isinstance(every, bool)
    if every is not None and not (number and every > 0):
        raise SpecError(
            f"hostcall: every= of the tap `{called}` should be a number of executions"
            f" (an int) or of seconds (a float) above 0, got {every!r}"
        )
    if sample is not None and not (isinstance(sample, float) and 0 < sample <= 1):
        raise SpecError(
            f"hostcall: sample= of the tap `{called}` should be a share above 0 and up"
            f" to 1.0, got {sample!r}"
        )


def _rebuilt(params: TapParams, arrays: list[Any]) -> Any:
    """The one argument of a tap, from its arrays."""
    template = params.callback.template
    keys = template.keys
    leaves = [
        array if key is None else _jax.wrap_key(array, key)
        for array, key in zip(arrays, keys, strict=True)
    ]
    (x,), _ = template.fill(leaves)
    return x
