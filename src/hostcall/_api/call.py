"""`hc.call`: a host function with results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, overload

import jax

from hostcall._core import mistakes
from hostcall._core.arguments import (
    check_function,
    check_tag,
    parse_mask,
    parse_on,
)
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.host_code import HostCode
from hostcall._core.order import Order
from hostcall._core.source import users_place
from hostcall._core.spec import (
    Static,
    flatten_arguments,
    parse_fill,
    parse_result,
)
from hostcall._engine.params.call import Arrays, Callback, Fail, Lend
from hostcall._primitives.call.make import make
from hostcall._primitives.call.options import (
    check_fail,
    check_options,
    parse_coalesce,
    refuse_no_arrays,
)

# A `result` that is one array; type checkers see any other tree as Any.
OneArray: TypeAlias = jax.ShapeDtypeStruct | jax.typing.ArrayLike


@overload
def call(
    fn: Callable[..., Any],
    result: None,
    *args: Any,
    order: Order = ...,
    vmap_method: str | Callable[..., Any] | None = ...,
    where: Any = ...,
    fill: Any = ...,
    on: Literal["once"] | jax.Device = ...,
    arrays: Arrays = ...,
    lend: Lend = ...,
    timeout: float | None = ...,
    executor: Any = ...,
    concurrency: int | None = ...,
    coalesce: int | None = ...,
    wait: float | None = ...,
    fail: Fail | None = ...,
    tag: str | None = ...,
    **kwargs: Any,
) -> None: ...


@overload
def call(
    fn: Callable[..., Any],
    result: OneArray,
    *args: Any,
    order: Order = ...,
    vmap_method: str | Callable[..., Any] | None = ...,
    where: Any = ...,
    fill: Any = ...,
    on: Literal["once"] | jax.Device = ...,
    arrays: Arrays = ...,
    lend: Lend = ...,
    timeout: float | None = ...,
    executor: Any = ...,
    concurrency: int | None = ...,
    coalesce: int | None = ...,
    wait: float | None = ...,
    fail: Fail | None = ...,
    tag: str | None = ...,
    **kwargs: Any,
) -> jax.Array: ...


@overload
def call(  # type: ignore[overload-cannot-match]  # JAX is Any in `make check`
    fn: Callable[..., Any],
    result: Any,
    *args: Any,
    order: Order = ...,
    vmap_method: str | Callable[..., Any] | None = ...,
    where: Any = ...,
    fill: Any = ...,
    on: Literal["once"] | jax.Device = ...,
    arrays: Arrays = ...,
    lend: Lend = ...,
    timeout: float | None = ...,
    executor: Any = ...,
    concurrency: int | None = ...,
    coalesce: int | None = ...,
    wait: float | None = ...,
    fail: Fail | None = ...,
    tag: str | None = ...,
    **kwargs: Any,
) -> Any: ...


def call(
    fn: Callable[..., Any],
    result: Any,
    *args: Any,
    order: Order = "pure",
    vmap_method: str | Callable[..., Any] | None = None,
    where: Any = None,
    fill: Any = None,
    on: Literal["once"] | jax.Device = "once",
    arrays: Arrays = "numpy",
    lend: Lend = False,
    timeout: float | None = None,
    executor: Any = None,
    concurrency: int | None = None,
    coalesce: int | None = None,
    wait: float | None = None,
    fail: Fail | None = None,
    tag: str | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a Python function from a JAX program, and returns its results to it.

    `fn(*args, **kwargs)` runs on the host each time the program reaches this call. It
    gets NumPy arrays in place of JAX's.

    Args:
        fn: any callable except a generator function. It may use JAX, start threads, and
            run programs that call it again. A coroutine function (`async def`) runs on
            hostcall's event loop (see `concurrency`).
        result: describes what `fn` returns: a pytree of the same structure, whose
            leaves have `shape` and `dtype`. A Python number stands for a scalar of the
            dtype that jit would give it. None if `fn` returns nothing, which needs an
            `order` other than "pure". 64-bit dtypes need x64 mode.
        *args: pytrees. Arrays and numbers reach `fn` as arrays, and typed PRNG keys as
            keys. All other leaves (strings, objects) reach it unchanged.
        order: what JAX may do with the call. "pure": run it as often as the results are
            needed, or not at all. "unordered": run it exactly once, in program order
            within straight-line code. "ordered": run it exactly once, after the
            previous ordered call on the same device, across loops, conditionals, jitted
            functions and dispatches.
        vmap_method: see *Under transformations*.
        where: a bool scalar. If it is False, `fn` is not called, and the results are
            `fill`. Under vmap each row has its own.
        fill: the results if `where` is False: one number for all of them, or a pytree
            like `result` whose leaves broadcast to it. Default: zeros.
        on: which device makes the call, with the whole value, in a jitted program over
            several devices: "once", the program's first device; or the given device.
        arrays: the kind of array that `fn` gets. "numpy". "jax": jax.Arrays on a CPU
            device of hostcall's own, on which `fn` may compute. "dlpack": objects of
            any dtype that every DLPack consumer accepts (torch.from_dlpack). "cuda":
            read-only `hc.buffers.Buffer`s of GPU memory (cupy.asarray,
            torch.from_dlpack), on `hc.current().stream`; `fn` must not keep them, and
            returns arrays on the GPU. Nothing is copied through the host.
        lend: False: `fn` owns its arguments. True: `fn` gets read-only views of XLA's
            memory, without a copy, and must not keep them. "out": like True, but `fn`
            also gets a keyword argument `out`, arrays in the structure of `result`. It
            writes the results into them and returns None.
        timeout: a limit in seconds. `fn` then runs on a separate thread. If it takes
            longer, the program fails, and the thread runs on until `fn` returns. A
            coroutine is cancelled.
        executor: where the rows of vmap_method="parallel" run: a
            `concurrent.futures.Executor` (also of processes), a Dask client,
            `multiprocessing.Pool` or Ray's pool. Default: threads of this process. Rows
            are sent in chunks, four for each worker. An argument that all rows share is
            sent once.
        concurrency: of a coroutine function: how many of its calls (rows of a batch
            with vmap_method="parallel", devices, programs) wait at the same time.
            Default: 32. The first row that fails cancels the others of its batch.
        coalesce: merges up to so many calls of `fn` (of devices, threads, programs and
            rows of a batch) that come within `wait` seconds into one. `fn` gets all
            arguments with a new axis in front, one entry for each call, and returns
            results with that axis. An error goes to all of them, `timeout` limits the
            merged call, and `hc.current()` answers for one of them. Pure calls only.
        wait: with `coalesce=`: how many seconds a call waits for others at most. When
            `coalesce` calls have come, they are made at once. Default: 0.002.
        fail: where the call raises in a program over several processes. "together": in
            all of them, with the name, type, message and process of the first failure.
            Every device of the program must reach such a call, which costs a small
            collective. "alone": in the process where it failed; the others wait in
            their next collective. A call with results in a jitted program over sharded
            arrays always raises in all. Default: `hc.configure(fail=)`.
        tag: the name of this call in `hc.monitor.stats()` and `status()`. Default: the
            function's name, in `stats()` with its source line.
        **kwargs: arguments for `fn`, like `args`: all keywords that are not options.

    Returns:
        A pytree of arrays as described by `result`.

    Raises:
        SpecError: an option or argument is invalid, `fn` can't take the arguments, or
            `fn` uses a traced value of an enclosing function instead of taking it as an
            argument.
        jax.errors.JaxRuntimeError: `fn` failed while the program ran. The text has the
            type and message of its exception, the function's name, and the line of this
            call. `hc.reraise()` and `hc.errors.last_error()` give the exception
            itself; an eager call raises it directly. The same holds if a result has the
            wrong structure, shape or dtype or has masked elements (`ResultError`), if
            `fn` kept a lent view (`EscapeError`) or exceeded `timeout`
            (`CallTimeoutError`).

    `fn` may run on another thread than the caller's, and then does not see its context
    variables, np.errstate, tracing spans or thread-locals.
    The page "Call a simulator" says which thread it is.

    Under transformations:
        jit, scan, while_loop, cond, map: `fn` runs each time the call is reached.
        vmap: depends on `vmap_method`. "sequential" (the default): `fn` runs once per
            row, in row order, in the engine's loop. "parallel": once per
            row, all rows at once on `executor` (of a coroutine function: on the event
            loop).
            "expand_dims", "broadcast_all", "legacy_vectorized": once for the batch,
            with the batch axis in front; an argument without that axis gets one of size
            1, is repeated, or is passed as it is. A function `rule(axis_size,
            in_batched, *args, **kwargs) -> (result, batched)` of JAX code replaces the
            call, as in `jax.custom_batching.custom_vmap`; with keyword arguments, their
            flags are the last entry of `in_batched`.
        vmap of cond, of while_loop: JAX computes every branch for every row. Pass the
            condition as `where=` too; then `fn` runs only for the rows that need it.
        jvp, grad, transposition: refused. Use `hc.host` with a rule, or put
            jax.custom_jvp or custom_vjp around it.
        remat: a pure call runs again in the backward pass; other calls do not.
        shard_map, pmap: `fn` runs once per shard; `hostcall.current()` says for which.
            With `axis_names`, once per shard along these axes, on the whole block.
        jit over sharded arrays: `fn` runs once, on the whole value.
        jax.export, hc.export: `fn` must be registered (`hc.register`), else
            `ExportError`; arguments that are not arrays must be numbers or texts.

    Cost: on a CPU 0.4 us for a scalar in a compiled loop, and two copies of each array
    (none with `lend`). A pure call keeps JAX's fast dispatch; any other call loses it.
    A program with a call that is not pure runs on the thread that dispatches it, like
    programs with JAX's callbacks. If all calls are pure, XLA may run the program on a
    thread of its own.

    Source: JAX's guide "External callbacks", whose three kinds of callback this
    function combines.
    """
    name = check_function(fn, "hc.call(fn, result, *args)", awaits=True)
    how = (arrays, lend, timeout, executor, concurrency, is_coroutine_function(fn))
    check_options(name, order, vmap_method, *how, fn=fn)
    others = {"lend=": bool(lend), "executor=": executor is not None}
    others |= {"arrays='cuda'": arrays == "cuda"}
    merged = parse_coalesce(name, coalesce, wait, order, vmap_method, others)
    check_tag(tag, name)
    check_fail(name, fail)
    operands, template = flatten_arguments(args, kwargs)
    also = ("out",) if lend == "out" else ()
    mistakes.check(_FACE, fn, args, kwargs, template.leaves, also, result)
    mistakes.warn_of_own(
        _FACE, fn, timeout=timeout, wait=wait, concurrency=concurrency, tag=tag
    )
    if merged is not None and not operands:
        refuse_no_arrays(name)
    results = parse_result(result, name)
    if order == "pure" and not results.avals:
        mistakes.refuse_unneeded("hc.call", name)
    mask = None if where is None else parse_mask(where, name, fn=fn)
    callback = Callback(
        fn=Static(fn),
        template=template,
        results=results,
        fills=parse_fill(fill, results, name),
        arrays=arrays,
        lend=lend,
        timeout=timeout,
        executor=None if executor is None else Static(executor),
        concurrency=concurrency,
        coalesce=merged,
        fail=fail,
        tag=tag,
        place=users_place(fn),
    )
    leaves = make(
        callback,
        operands,
        order=order,
        vmap_method=vmap_method,
        sharding=parse_on(on, name),
        mask=mask,
    )
    return results.fill(leaves)


def call_kept(fn: HostCode, where: Any, keep: int, *args: Any) -> None:
    """`hc.watch`'s call: `fn(*args)` runs where `where` is True, exactly once.

    `hc.current()` then has the arguments of the last `keep` executions of this place on
    its device, whether or not `where` was True (`history`), and the number of all
    executions (`execution`). Each execution costs a copy of the arguments; 0 only
    counts.
    """
    name = check_function(fn, "hc.watch(x)")
    operands, template = flatten_arguments(args, {})
    mistakes.check(_FACE, fn, args, {}, template.leaves)
    callback = Callback(
        fn=Static(fn),
        template=template,
        results=parse_result(None, name),
        fills=(),
        place=users_place(fn),
    )
    mask = parse_mask(where, name, fn=fn)
    make(callback, operands, order="unordered", mask=mask, keep=keep)


_FACE = mistakes.Face(
    "hc.call",
    "hc.call({fn}, result, {args})",
    mistakes.options_of(call, "fn", "result"),
    {
        "ordered": 'order="ordered"',
        "vectorized": 'vmap_method="expand_dims"',
        "has_side_effect": 'order="unordered"',
        "sharding": "on=device",
        "result_shape_dtypes": "the second argument, result",
    },
    {"keep": "hc.watch(x, keep=...) keeps the executions before a bad value"},
)
