"""`hc.pure_callback`, `hc.io_callback`: drop-ins for JAX's functions of these names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.mistakes import check_callable, refuse_coroutines
from hostcall._core.options import WHOLE
from hostcall._core.spec import Results, Template
from hostcall._engine.params.drop_in import Kind, arrays_of, make_params
from hostcall._primitives.drop_in import bind

_VMAP_METHODS = ["sequential", "sequential_unrolled", *WHOLE, None]


def pure_callback(
    callback: Callable[..., Any],
    result_shape_dtypes: Any,
    *args: Any,
    sharding: Any = None,
    vmap_method: str | None = None,
    vectorized: bool | None = None,
    arrays: str = "jax",
    **kwargs: Any,
) -> Any:
    """`jax.pure_callback`, as its guide describes it, on hostcall's engine.

    New code may prefer `hc.call`: it is faster (NumPy arrays), checks what the function
    returns, and has more options.

    Args:
        callback: a function without side effects; it may be called more often than
            the program says, or not at all.
        result_shape_dtypes: a pytree of anything with `shape` and `dtype`, with as many
            leaves as `callback` returns.
        *args: pytrees of arrays and numbers.
        sharding: in a jitted program over several devices, the single-device sharding
            of the device that calls.
        vmap_method: "sequential" (the default), "sequential_unrolled", "expand_dims",
            "broadcast_all" or "legacy_vectorized".
        vectorized: the older form of `vmap_method`: True for "legacy_vectorized",
            False for "sequential".
        arrays: what `callback` gets: "jax" for jax.Arrays on hostcall's own CPU device,
            on which it may compute; "numpy" for NumPy arrays, ten times faster.
        **kwargs: like `args`.

    Returns:
        jax.Arrays in the structure of `result_shape_dtypes`.

    Raises:
        ValueError: 64-bit types outside of 64-bit mode; an unknown `vmap_method`;
            under jvp, grad and transposition.
        jax.errors.JaxRuntimeError: when the program runs and `callback` fails, or
            returns a different number of leaves, shape or dtype. `hostcall.reraise()`
            and `hostcall.errors.last_error()` give the exception itself.

    Under transformations: as `hc.call` with order="pure".

    Cost: on a CPU 6 us for a call with a scalar, 1 us with arrays="numpy"; JAX's takes
    45. The program runs on the thread that dispatches it, as JAX's does.

    Source: JAX's guide "External callbacks". Today's JAX refuses vmap without a
    `vmap_method`, and has no `vectorized`; `hc.patch_jax()` installs that form.
    """
    if vectorized is not None:  # translated to the option that has taken its place
        if vmap_method is not None:
            raise ValueError(
                "the vectorized and vmap_method arguments of pure_callback cannot be"
                " used together. Please use the vmap_method argument."
            )
        vmap_method = "legacy_vectorized" if vectorized else "sequential"
    # The older default: today's JAX refuses vmap without a method.
    method = "sequential" if vmap_method is None else vmap_method
    options = {"sharding": sharding, "vmap_method": method, "arrays": arrays_of(arrays)}
    return _call("pure", callback, result_shape_dtypes, (args, kwargs), options)


def io_callback(
    callback: Callable[..., Any],
    result_shape_dtypes: Any,
    *args: Any,
    sharding: Any = None,
    ordered: bool = False,
    arrays: str = "jax",
    **kwargs: Any,
) -> Any:
    """`jax.experimental.io_callback` on hostcall's engine.

    If the callback returns nothing, prefer `hc.tap`, for which programs do not wait.
    `hc.call` with an `order` has none of the restrictions below.

    Args:
        callback: any function; it runs once each time the program reaches it.
        result_shape_dtypes: as in `hc.pure_callback`; None for no results.
        *args: pytrees of arrays and numbers.
        sharding: as in `hc.pure_callback`.
        ordered: runs it after the previous ordered callback or call, across programs
            and devices.
        arrays: as in `hc.pure_callback`.
        **kwargs: like `args`.

    Returns:
        jax.Arrays in the structure of `result_shape_dtypes`.

    Raises:
        ValueError: 64-bit types outside of 64-bit mode; under jvp and transposition;
            under vmap if ordered.
        NotImplementedError: under vmap of cond and of while_loop, and under remat.
        jax.errors.JaxRuntimeError: as from `hc.pure_callback`.

    Under transformations: jit, scan, while_loop, cond, shard_map, pmap: once each time
        (and on each device). vmap: once for each row, in row order.

    Cost: as `hc.pure_callback`. The program keeps JAX's fast dispatch where that of an
    `hc.call` with an order does.

    Source: JAX's guide "External callbacks".
    """
    options = {"sharding": sharding, "ordered": ordered, "arrays": arrays_of(arrays)}
    return _call("io", callback, result_shape_dtypes, (args, kwargs), options)


def _call(
    kind: Kind,
    callback: Callable[..., object],
    result_shape_dtypes: Any,
    args_and_kwargs: object,
    options: dict[str, Any],
) -> Any:
    check_vmap_method(options.get("vmap_method"))
    usage = f"hc.{kind}_callback(callback, result_shape_dtypes, *args)"
    check_callable(callback, usage)
    refuse_coroutines(callback)
    leaves, in_tree = jax.tree.flatten(args_and_kwargs)
    described, out_tree = jax.tree.flatten(result_shape_dtypes)
    avals = tuple(map(result_aval, described))
    params = make_params(kind, callback, trees_of(in_tree, out_tree, avals), options)
    results = bind(*map(raw_keys, leaves), params=params)
    return out_tree.unflatten(results)


def trees_of(
    in_tree: _jax.TreeDef, out_tree: _jax.TreeDef, avals: tuple[_jax.Aval, ...]
) -> tuple[Template, Results]:
    """The trees of a callback whose arguments are arrays alone."""
    # None marks an array that is no typed key: of a key, callbacks get the block.
    template = Template(in_tree, (None,) * in_tree.num_leaves)
    return template, Results(out_tree, avals, (None,) * len(avals))


def check_vmap_method(method: object) -> None:
    if method not in _VMAP_METHODS:
        # JAX's text, with its misspelling.
        raise ValueError(
            f"vmap_method must be on of the allowed methods {_VMAP_METHODS}, but got:"
            f" {method}"
        )


def raw_keys(leaf: object) -> object:
    """Replaces a typed PRNG key by its block, which is what JAX's callbacks get."""
    if isinstance(leaf, jax.Array) and _jax.is_key_dtype(leaf.dtype):
        return jax.random.key_data(leaf)
    return leaf


def result_aval(described: Any) -> _jax.Aval:
    """The aval of a result, from anything with a shape and a dtype."""
    dtype = np.dtype(described.dtype)
    if _jax.canonical_dtype(dtype) != dtype:
        raise ValueError(
            "result_shape_dtypes cannot specify 64-bit types when `jax_enable_x64` is"
            " disabled"
        )
    return _jax.ShapedArray(described.shape, dtype)
