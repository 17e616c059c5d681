"""`hc.buffers.buffer_callback`: host code that works in the device's memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from hostcall import _jax
from hostcall._compat.pure_and_io import (
    check_vmap_method,
    raw_keys,
    trees_of,
)
from hostcall._core.array_values import canonical
from hostcall._core.callback import CallSpec
from hostcall._core.errors import SpecError, conflict, wrong
from hostcall._core.mistakes import check_function
from hostcall._core.option_checks import check
from hostcall._core.options import WHOLE, CallOptions
from hostcall._core.order import Order
from hostcall._core.signatures import accepts, signature_of, without_types
from hostcall._core.source import Place, users_place
from hostcall._core.spec import Opaque, Results, Template
from hostcall._engine.params.buffer import BufferParams, NativeFunction
from hostcall._primitives.buffer import bind


def buffer_callback(
    callback: Callable[..., None],
    result_shape_dtypes: Any,
    *,
    has_side_effect: bool = False,
    vmap_method: str | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    command_buffer_compatible: bool = False,
    order: Order | None = None,
) -> Callable[..., Any]:
    """Makes a function whose results `callback` writes in place into XLA's memory.

    Nothing is copied. `callback(ctx, out, *args, **kwargs)` gets an
    `hc.buffers.ExecutionContext`, a pytree of writeable `hc.buffers.Buffer`s like
    `result_shape_dtypes`, and its arguments with a read-only Buffer for each array:

        def add_one(ctx, out, x):
            np.asarray(out)[...] = np.asarray(x) + 1

        y = hc.buffers.buffer_callback(add_one, jax.ShapeDtypeStruct((), jnp.int32))(x)

    Args:
        callback: returns None. A Buffer is closed when the callback returns; keeping a
            view of one is an error. On a GPU it works on `ctx.stream`. With
            `hc.buffers.native` it is machine code, which runs without Python.
        result_shape_dtypes: a pytree of anything with `shape` and `dtype`. Dtypes of 64
            bits are kept in 32-bit mode too.
        has_side_effect: the callback runs once each time the program comes to it, in
            the order of straight-line code (order="unordered").
        vmap_method: "sequential", "sequential_unrolled", "expand_dims",
            "broadcast_all", "legacy_vectorized"; without one, vmap is refused.
        input_output_aliases: {number of an input leaf: number of an output leaf}, for
            pairs that share their memory: the output starts with the input's values,
            and XLA needs no second block. Leaves are counted as
            jax.tree.leaves((args, kwargs)) and jax.tree.leaves(result_shape_dtypes) do.
        command_buffer_compatible: on a GPU the callback may be recorded: it runs once,
            and what it put on `ctx.stream` runs every time.
        order: "pure", "unordered" or "ordered", as in `hc.call`; replaces
            `has_side_effect`.

    Returns:
        A function of pytrees of arrays and numbers, which returns jax.Arrays in the
        structure of `result_shape_dtypes`.

    Raises:
        SpecError: an argument or option is wrong.
        ValueError: aliases that do not fit; under jvp, grad and transposition.
        NotImplementedError: under vmap without a `vmap_method`.
        jax.errors.JaxRuntimeError: when the program runs and `callback` raises, returns
            a value (ValueError), keeps a view (EscapeError), or has written to an input
            (ResultError; the page "Work in place on XLA's memory" says when that is
            seen).
            `hc.reraise()` and `hc.errors.last_error()` give the exception itself.

    Memory: the part of an output that the callback does not write is zero in outputs of
    up to 4096 bytes, and undefined in larger ones. With HOSTCALL_DEBUG=1 in the
    environment, not writing it is an error (UnwrittenError).

    Under transformations: jit, scan, while_loop, cond, remat, shard_map: as `hc.call`
    of the same order. In a jitted program over sharded arrays one device calls, with
    the whole values.

    Cost: on a CPU 0.4 us, 0.25 for each numpy.asarray, and 1 if `out` or the arguments
    are trees; JAX's takes 1.4 and 0.5.

    Source: the documentation of jax.experimental.buffer_callback.
    """
    order = _order_of(order, has_side_effect)
    usage = (
        "hc.buffers.buffer_callback(callback, result_shape_dtypes), where machine code"
        " is hc.buffers.native(address)"
    )
    name = check_function(callback, usage).name
    described, out_tree = jax.tree.flatten(result_shape_dtypes)
    avals = _result_avals(described, name)
    check_vmap_method(vmap_method)
    _check_rows(callback, name, vmap_method)
    aliases = _read_aliases(input_output_aliases)
    # The line that makes the function stands for all its calls.
    place = users_place()
    options = CallOptions(order=order, vmap_method=vmap_method)

    def call(*args: object, **kwargs: object) -> object:
        leaves, in_tree = jax.tree.flatten((args, kwargs))
        operands = [_operand(leaf) for leaf in leaves]
        _check_arguments(callback, name, len(args), kwargs)
        # Only now is it known what the arguments are.
        _check_aliases(aliases, operands, avals)
        params = make_params(
            callback,
            trees=trees_of(in_tree, out_tree, avals),
            place=place,
            options=options,
            aliases=aliases,
            command_buffer=command_buffer_compatible,
        )
        results = bind(*operands, params=params)
        return out_tree.unflatten(results)

    call.__name__ = call.__qualname__ = name
    return call


def _order_of(order: Order | None, has_side_effect: bool) -> Order:
    """The order that the two options say together."""
    face = "hc.buffers.buffer_callback"
    if order is None:
        return "unordered" if has_side_effect else "pure"
    check(face, {"order": order})
    if has_side_effect and order == "pure":
        raise conflict(
            face, "order='pure' and has_side_effect=True, which contradict each other"
        )
    return order


def _check_rows(callback: object, name: str, vmap_method: str | None) -> None:
    """Refuses whole batches for machine code."""
    if isinstance(callback, NativeFunction) and vmap_method in WHOLE:
        raise SpecError(
            f"hostcall: `{name}` is machine code, which does not get shapes, and"
            f" vmap_method={vmap_method!r} would pass it a whole batch. Use"
            " 'sequential': the engine then loops over the rows",
            code="hc-conflict",
        )


def _result_avals(described: Sequence[Any], name: str) -> tuple[_jax.Aval, ...]:
    """The avals of the results, from anything with a shape and a dtype."""
    try:
        # As in JAX, also of 64 bits in 32-bit mode: the result then is such an array.
        return tuple(
            _jax.ShapedArray(leaf.shape, np.dtype(leaf.dtype)) for leaf in described
        )
    except AttributeError as error:
        raise SpecError(
            f"hostcall: result_shape_dtypes of `{name}` has the leaf {error.obj!r},"
            " which has no shape and dtype. Write jax.ShapeDtypeStruct(shape, dtype)",
            code="hc-result-spec",
        ) from None


def _check_arguments(
    callback: Callable[..., None], name: str, n: int, kwargs: Mapping[str, object]
) -> None:
    """Refuses a callback that can't take `ctx` and `out` before its n arguments."""
    if accepts(callback, n + 2, tuple(kwargs)):
        return
    takes = ""
    signature = signature_of(callback)
    if signature is not None:  # else Python does not know it
        takes = f", and it takes {without_types(signature)}"
    keywords = [f"{key}=" for key in kwargs]
    arguments = ", ".join(["ctx", "out", *["x"] * n, *keywords])
    # What the user may type: a lambda has no name of its own.
    short = name.rpartition(".")[2].replace("<lambda>", "f")
    raise SpecError(
        f"hostcall: hc.buffers.buffer_callback calls `{name}` with"
        f" ({arguments}){takes}. The first two are the context of the call, and the"
        " Buffers"
        f" of the results to write into: write def {short}(ctx, out, *args)",
        code="hc-arguments",
    )


def _operand(leaf: object) -> jax.Array | np.ndarray:
    """The operand of the primitive; refuses integers that JAX would truncate."""
    leaf = raw_keys(leaf)
    _jax.check_arg(leaf)  # with JAX's own message, which users know
    return leaf if isinstance(leaf, jax.Array) else canonical(leaf)


def make_params(
    callback: Callable[..., object],
    trees: tuple[Template, Results],
    place: Place,
    options: CallOptions,
    **settings: Any,
) -> BufferParams:
    """The parameters of an equation that calls `callback`; `settings` are the rest."""
    template, results = trees
    spec = CallSpec(
        fn=Opaque(callback),
        template=template,
        results=results,
        fills=(None,) * len(results.avals),
        options=options,
        place=place,
    )
    return BufferParams(callback=spec, avals=results.avals, masked=False, **settings)


# (number of an input leaf, number of the output leaf that shares its memory), sorted.
Aliases: TypeAlias = tuple[tuple[int, int], ...]


def _read_aliases(aliases: Mapping[int, int] | None) -> Aliases:
    try:
        pairs = (aliases or {}).items()
        numbers = [(operator.index(i), operator.index(o)) for i, o in pairs]
    except (AttributeError, TypeError):
        wanted = (
            "a dict of numbers, {number of an input leaf: number of an output leaf}"
        )
        face = "hc.buffers.buffer_callback"
        raise wrong("input_output_aliases", face, wanted, aliases) from None
    return tuple(sorted(numbers))


def _check_aliases(
    aliases: Aliases,
    operands: list[jax.Array | np.ndarray],
    avals: tuple[_jax.Aval, ...],
) -> None:
    """Refuses pairs that can't share memory: they need one shape and dtype."""
    taken = set[int]()  # the outputs of the pairs before
    for i, o in aliases:
        says = f"input_output_aliases contains the mapping '{i}:{o}'"
        _check_leaf_number(says, "input", i, len(operands))
        _check_leaf_number(says, "output", o, len(avals))
        input_aval = _jax.aval_of(operands[i])
        output_aval = avals[o]
        fits = input_aval.shape == output_aval.shape
        if not fits or input_aval.dtype != output_aval.dtype:
            raise ValueError(
                f"{says} referring to an input with abstract value {input_aval} and an"
                f" output with a different abstract value {output_aval}."
            )
        if o in taken:
            raise ValueError(
                f"{says}, and another input is mapped to output {o} too. Only one input"
                " can share an output's memory."
            )
        taken.add(o)


def _check_leaf_number(says: str, side: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise ValueError(
            f"{says} with {side} index {number} outside the range [0, {count})."
            " Leaves of trees are counted one by one."
        )
