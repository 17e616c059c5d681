"""The batching rule of a call.

`vmap_method` chooses between three ways:

rows (sequential, parallel)
    The call's grid gets one more batch axis, and the engine runs the rows: in row
    order, or all at once. The program keeps one call, whatever the batch size.
whole (expand_dims, broadcast_all, legacy_vectorized)
    The function gets the whole batch, as one more axis in front.
a function
    The user's own rule: JAX code that says what the batched call is.

Without a method the rows run one after the other, which is right for every function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core.errors import BatchingError
from hostcall._core.options import WHOLE
from hostcall._core.spec import Results, Template, wrap_keys
from hostcall._engine.params.equation import CallParams
from hostcall._jax.types import Aval, Primitive, TreeDef

Operands = Sequence[jax.Array]
Dims = Sequence[int | None]  # for each operand the index of its batch axis, if any
# What a batching rule returns: the results, and for each its batch axis.
Batched = tuple[Sequence[jax.Array], Sequence[int | None]]


def size_of(operands: Operands, dims: Dims) -> int:
    """The number of rows; symbolic in an export with symbolic shapes."""
    (size,) = {  # the operands that have a batch axis agree on its size
        operand.shape[dim]
        for operand, dim in zip(operands, dims, strict=True)
        if dim is not None
    }
    return size  # type: ignore[no-any-return]


def in_front(operands: Operands, dims: Dims) -> list[jax.Array]:
    """The operands with their batch axes moved to the front."""
    return [
        x if d is None else _jax.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]


def batch(
    primitive: Primitive,
    operands: Operands,
    dims: Dims,
    *,
    params: CallParams,
    innermost: bool = False,
) -> Batched:
    """The batching rule of any primitive whose equations have `CallParams`.

    With `innermost`, the rows of a vmap that is applied later vary fastest. JAX's own
    callbacks run in that order, since JAX batches them by a loop or by copies.
    """
    bind = primitive.bind
    method = params.options.vmap_method
    size = size_of(operands, dims)
    if callable(method):
        called = params.callback
        trees = called.name, called.template, called.results
        return batch_by_rule(method, trees, operands, dims, size)
    flags = [d is not None for d in dims]
    if method in WHOLE:
        outs = _batch_whole(bind, in_front(operands, dims), flags, size, params)
        outs = _jax.rows_sharded_alike(outs, operands, dims)
        return outs, (0,) * len(outs)
    # A vmap that is applied later is the outer one, so its axis is first in the grid.
    # An example: with a grid (5,), where x has that axis and y has not, a vmap over 3
    # rows of y makes the grid (3, 5), and `batched` (False, True) of x, (True, False)
    # of y. An operand has those axes of the grid in front that it is batched by.
    inner = params.batched or ((),) * len(operands)
    position = len(params.grid) if innermost else 0
    moved = []
    batched = []
    for operand, dim, axes in zip(operands, dims, inner, strict=True):
        axis = sum(axes[:position])
        moved.append(operand if dim is None else _jax.moveaxis(operand, dim, axis))
        batched.append((*axes[:position], dim is not None, *axes[position:]))
    grid = (*params.grid[:position], size, *params.grid[position:])
    outs = bind(*moved, params=replace(params, grid=grid, batched=tuple(batched)))
    outs = _jax.rows_sharded_alike(outs, operands, dims, position)
    return outs, (position,) * len(outs)


def _batch_whole(
    bind: Callable[..., list[jax.Array]],
    operands: list[jax.Array],
    flags: list[bool],
    size: int,
    params: CallParams,
) -> list[jax.Array]:
    method = params.options.vmap_method
    levels = params.levels
    if method == "legacy_vectorized" and params.masked and flags[0]:
        raise BatchingError(
            f"hostcall: `{params.callback.name}` has a where= that differs between"
            ' rows, and vmap_method="legacy_vectorized", which does not tell batched'
            ' arguments from others. Use "expand_dims", "broadcast_all" or "sequential"'
        )
    if params.masked and flags[0] and params.options.lend == "out":
        raise BatchingError(
            f"hostcall: `{params.callback.name}` has lend='out', and a where= that"
            " differs between the rows of its batch. It gets only the rows where the"
            " mask is True, and their results are not contiguous in memory. Use"
            ' lend=True, or vmap_method="sequential"'
        )
    widened = []
    for number, (operand, has_axis) in enumerate(zip(operands, flags, strict=True)):
        if params.masked and number == 0:
            widened.append(_widen_mask(operand, has_axis, levels))
        elif has_axis or method == "legacy_vectorized":
            widened.append(operand)
        elif method == "expand_dims":
            widened.append(jnp.expand_dims(operand, 0))
        else:
            assert method == "broadcast_all", "WHOLE has three methods"
            widened.append(jnp.broadcast_to(operand, (size, *jnp.shape(operand))))
    avals = tuple(aval.update(shape=(size, *aval.shape)) for aval in params.avals)
    return bind(*widened, params=replace(params, avals=avals, levels=levels + 1))


def _widen_mask(mask: jax.Array, has_axis: bool, levels: int) -> jax.Array:
    """The mask for one more level, whose axis is in front if `has_axis`.

    A mask is a scalar for the whole batch, or has one axis for each level, of size 1
    where it does not differ between the rows. With one level so far:

        has_axis   (3,)    ->  (3, 1)    it was a scalar
        has_axis   (3, 4)  ->  (3, 4)
        not        (4,)    ->  (1, 4)
        not        ()      ->  ()
    """
    if not has_axis:
        return jnp.expand_dims(mask, 0) if mask.ndim > 0 else mask
    was_scalar = mask.ndim == 1
    return mask.reshape(mask.shape + (1,) * levels) if was_scalar else mask


def batch_by_rule(
    rule: Callable[..., Any],
    trees: tuple[str, Template, Results],
    operands: Operands,
    dims: Dims,
    size: int,
) -> tuple[list[jax.Array], list[int | None]]:
    """What the user's rule makes of a batch of calls.

    `trees` has the function's name, how its arguments are put together, and what it
    returns.
    """
    name, template, results = trees
    is_masked = len(operands) > len(template.keys)
    if is_masked:
        raise BatchingError(
            f"hostcall: `{name}` has where= and a vmap_method of your own."
            " The mask could not reach your rule: give the rule to a call without"
            ' where=, or use one of the named methods ("sequential", "expand_dims")'
        )
    leaves = wrap_keys(in_front(operands, dims), template.keys)
    args, kwargs = template.unflatten(leaves)
    flags = [dim is not None for dim in dims]
    args_batched, kwargs_batched = template.unflatten(flags)
    # As JAX's custom_vmap gives it: a tree like the arguments, which are positional.
    # Keywords come as one dict behind them.
    in_batched = tuple(args_batched)
    if kwargs:
        in_batched = (*in_batched, kwargs_batched)
    answer = rule(size, in_batched, *args, **kwargs)
    rule_name = f"the vmap_method of `{name}`"
    outs, marks = batched_results(
        answer, size, results.treedef, results.avals, rule_name
    )
    return outs, [0 if mark else None for mark in marks]


def batched_results(
    answer: Any, size: int, treedef: TreeDef, avals: Sequence[Aval], rule_name: str
) -> tuple[list[jax.Array], list[bool]]:
    """The arrays that a user's vmap rule returned, and which of them are batched.

    Args:
        answer: what the rule returned; it should be (result, batched).
        size: the size of the batch, which is the first axis.
        treedef: the structure of the result.
        avals: the avals of one row of the result.
        rule_name: by which errors call the rule.
    """
    leaves, marks = _marked_leaves(answer, treedef, rule_name)
    outs = []
    for leaf, mark, aval in zip(leaves, marks, avals, strict=True):
        is_key = isinstance(leaf, jax.Array) and _jax.is_key_dtype(leaf.dtype)
        # A rule may return 64-bit arrays, which 32-bit mode would narrow unseen.
        with _jax.able_to_hold(aval.dtype):
            leaf = jax.random.key_data(leaf) if is_key else jnp.asarray(leaf)
        want = (size, *aval.shape) if mark else aval.shape
        if leaf.shape != want or leaf.dtype != aval.dtype:
            raise BatchingError(
                f"hostcall: {rule_name} returned {leaf.dtype}{list(leaf.shape)} for a"
                f" leaf that should be {aval.dtype}{list(want)}"
            )
        outs.append(leaf)
    return outs, marks


def _marked_leaves(
    answer: Any, treedef: TreeDef, rule_name: str
) -> tuple[list[Any], list[bool]]:
    """The leaves of what a rule returned, and for each whether it is batched."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise BatchingError(
            f"hostcall: {rule_name} should return (result, batched), got"
            f" {type(answer).__name__}. `batched` says for each leaf of the result"
            " whether it has the batch as its first axis: True for all of them, or a"
            " tree like the result"
        )
    out, batched = answer
    try:
        leaves = treedef.flatten_up_to(out)
        # `flatten_up_to` takes a container where the result has a leaf.
        if not all(jax.tree_util.all_leaves([leaf]) for leaf in leaves):
            raise ValueError(f"got {jax.tree_util.tree_structure(out)}")
        marks = [batched] * len(leaves)
        if not isinstance(batched, bool):
            marks = treedef.flatten_up_to(batched)
    except (ValueError, TypeError) as error:
        raise BatchingError(
            f"hostcall: {rule_name} should return (result, batched) in the structure of"
            f" the result, {treedef}: {error}"
        ) from error
    if not all(isinstance(mark, bool) for mark in marks):
        raise BatchingError(
            f"hostcall: {rule_name} should say with True or False which results are"
            f" batched, got {batched!r}"
        )
    return leaves, marks
