"""`hc.call`: a host function with results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from hostcall._core import mistakes
from hostcall._core.arguments import (
    check_function,
    check_tag,
    parse_mask,
    parse_on,
)
from hostcall._core.order import Order
from hostcall._core.source import users_place
from hostcall._core.spec import (
    Static,
    flatten_arguments,
    parse_fill,
    parse_result,
)
from hostcall._engine.params.call import Arrays, Callback, Lend
from hostcall._primitives.buffer import lowering as _  # noqa: F401  (it registers)
from hostcall._primitives.call import batching, lowering  # noqa: F401  (they register)
from hostcall._primitives.call.make import as_tree, make
from hostcall._primitives.call.options import check_options


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
    tag: str | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a Python function from a JAX program, and brings its results back.

    `fn(*args, **kwargs)` runs on the host each time the program comes to this place,
    with NumPy arrays for the arrays.

    Args:
        fn: any callable but a generator or coroutine function. It may use JAX, start
            threads, and be part of programs that call it again.
        result: a pytree of anything with `shape` and `dtype`, in the structure that
            `fn` returns; None where it returns nothing, which needs another `order`
            than "pure". A Python number is a scalar of the dtype that it has as an
            argument under jit. 64-bit dtypes need x64 mode.
        *args: pytrees. Arrays and numbers are handed over as arrays, typed PRNG keys
            as such; all other leaves (strings, objects) reach `fn` as they are.
        order: what JAX may do with the call. "pure": run it as often as the results
            need, or not at all. "unordered": exactly once, in program order within
            straight-line code. "ordered": exactly once, after the ordered call
            before it, across loops, conditionals, jitted functions and dispatches,
            on each device.
        vmap_method: see *Under transformations*.
        where: a bool scalar. Where it is False `fn` is not called, and the results
            are `fill`. Under vmap each row has its own.
        fill: numbers for the results where `where` is False: one for all, or a pytree
            like `result` whose leaves broadcast to it. Default: zeros.
        on: in a jitted program over several devices, "once": the program's first device
            makes the call, with the whole value; a device: this one does.
        arrays: "numpy"; "jax" for jax.Arrays on a CPU device of hostcall's own, on
            which `fn` may compute; "dlpack" for objects that any DLPack consumer
            takes (torch.from_dlpack), all dtypes included; "cuda" for
            `hc.buffers.Buffer`s of the GPU's own memory (cupy.asarray, torch.as_tensor;
            read-only, not to be kept), on `hc.current().stream`: `fn` returns arrays on
            the GPU, and nothing goes through the host.
        lend: False: `fn` owns its arguments. True: it gets read-only views of XLA's
            memory, without a copy, and must not keep them. "out": also a keyword
            argument `out`, arrays in the structure of `result` to write the results
            into; then `fn` returns None.
        timeout: seconds. `fn` runs on a thread of its own; when it is late the
            program fails, and the thread is left to its end.
        executor: for vmap_method="parallel": where rows run, by default a pool of
            threads of this process. A `concurrent.futures.Executor` (of processes
            too), a Dask client, `multiprocessing.Pool` or Ray's pool. Rows go in
            chunks, four for each worker; an argument that all share goes once.
        tag: the name under which `hc.monitor.stats()` and `status()` know this call.
            Default: the function's name, for `stats()` with its source line.
        **kwargs: as `args`. What is no option above is the function's.

    Returns:
        A pytree of arrays as `result` describes.

    Raises:
        SpecError: the call is written wrong; `fn` can't take the arguments, or uses a
            traced value that it is not given (a variable of the functions around it).
        jax.errors.JaxRuntimeError: when the program runs and `fn` fails. Its text
            has the type and message, the function's name, and this line of yours;
            `hostcall.reraise()` and `hostcall.last_error()` give the exception
            itself. An eager call raises it directly. Also for a result of another
            structure, shape or dtype, or with masked elements (`ResultError`), a kept
            view (`EscapeError`), a late function (`CallTimeoutError`).

    Under transformations:
        jit, scan, while_loop, cond, map: once for each time the place is reached.
        vmap: "sequential" (the default), "sequential_unrolled": once a row, in row
            order, looped by the engine. "parallel": once a row, all at once on
            `executor`. "expand_dims", "broadcast_all", "legacy_vectorized": once for
            the batch, whose axis is in front; an argument without it gets an axis of
            size 1, is repeated, or is left alone. A function
            `rule(axis_size, in_batched, *args, **kwargs) -> (result, batched)` of JAX
            code replaces the call, as in `jax.custom_batching.custom_vmap`; with
            keyword arguments their flags are the last entry of `in_batched`.
        vmap of cond, of while_loop: JAX computes every branch for every row. Give
            the condition as `where=` too, and only rows that are meant to, call.
        jvp, grad, transposition: refused; put jax.custom_jvp or custom_vjp around.
        remat: a pure call runs again in the backward pass, others do not.
        shard_map, pmap: once a shard; `hostcall.current()` tells which.
        jit over sharded arrays: once, on the whole value.
        jax.export: for this process; others refuse the program. With a lambda, a
            partial or a function inside another refused at once (`ExportError`).

    Cost: on a CPU 0.4 us for a scalar in a compiled loop, two copies of each array
    (none with `lend`); a pure call keeps JAX's fast dispatch, any other does not. A
    program with one that is not pure runs on the thread that dispatches it, as programs
    with JAX's callbacks do; with pure ones alone XLA may run it on a thread of its own.

    Source: the guide "External callbacks" of JAX, whose three kinds of callback this
    one function covers.
    """
    name = check_function(fn, "hc.call(fn, result, *args)")
    check_options(name, order, vmap_method, arrays, lend, timeout, executor)
    check_tag(tag, name)
    operands, template = flatten_arguments(args, kwargs)
    also = ("out",) if lend == "out" else ()
    mistakes.check(_FACE, fn, args, kwargs, template.leaves, also)
    results = parse_result(result, name)
    if order == "pure" and not results.avals:
        mistakes.refuse_unneeded("hc.call", name)
    mask = None if where is None else parse_mask(where, name)
    callback = Callback(
        fn=Static(fn),
        template=template,
        results=results,
        fills=parse_fill(fill, results, name),
        arrays=arrays,
        lend=lend,
        timeout=timeout,
        executor=None if executor is None else Static(executor),
        tag=tag,
        place=users_place(),
    )
    leaves = make(
        callback,
        operands,
        order=order,
        vmap_method=vmap_method,
        sharding=parse_on(on, name),
        mask=mask,
    )
    return as_tree(results, leaves)


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
)
