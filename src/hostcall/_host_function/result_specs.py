"""What `result=` of a host function says that needs the function itself: "infer", and
how batches of a function for items line up.
"""

from __future__ import annotations

import jax
import numpy as np

from hostcall._core.errors import SpecError
from hostcall._core.options import VmapMethod
from hostcall._core.result_rules import (
    aval_of,
    core_axes,
    is_aval,
    lines_up,
    with_axes,
)
from hostcall._core.said_results import lined_up
from hostcall._core.spec import widened
from hostcall._host_function.primitives import Arrays
from hostcall._host_function.ruled import call_here
from hostcall._host_function.rules import Function, Tree, Trees
from hostcall._host_function.trees import ArgumentLayout

tree = jax.tree_util


def says_items(result: Tree) -> bool:
    """Whether `result=` says what an item is: an array's element, or a signature's."""
    return core_axes(result, ()) is not None


def inferred(fn: Function, avals: Trees, name: str, float64: bool) -> Tree:
    """The spec of what the function returns for zeros."""

    def zeros(leaf: Tree) -> Tree:
        if not is_aval(leaf):
            return leaf
        wide = widened(leaf.dtype) if float64 else None
        return np.zeros(leaf.shape, wide or leaf.dtype)

    try:
        # A run of the user's function while a program is traced: "infer" asks for it.
        value = call_here(fn, tree.tree_map(zeros, avals))
    except Exception as error:
        raise SpecError(
            f"hostcall: `{name}` has result='infer', and failed on zeros:"
            f" {type(error).__name__}: {error}. Say what it returns with result=",
            code="hc-result-spec",
        ) from error
    return tree.tree_map(lambda leaf: aval_of(np.asarray(leaf)), value)


def aligned(
    operands: Arrays,
    layout: ArgumentLayout,
    *,
    is_value: bool,
    is_elementwise: bool,
    method: VmapMethod,
) -> tuple[Arrays, VmapMethod]:
    """Gives the operands of a function for items as many axes in front of these as its
    results have; an item of an elementwise function is a number.

    A batch is one more axis in front of each operand. Without this, a batch of 16
    scalars beside one row of 9 would be (16,) beside (1, 9), which does not
    broadcast, and a batch of 9 scalars beside 9 rows of 9 would be taken for a row.
    The operands and results of the other rules have axes of their own; if those
    differ in number from the result's, the rows run one by one.

    Args:
        operands: without a mask.
        layout: of the call.
        is_value: whether the function itself takes them, rather than a rule.
        is_elementwise: as `Exchange.is_elementwise`.
        method: how batches are called.

    Returns:
        The operands, and how batches of these are called.
    """
    avals = layout.unmasked(layout.in_avals)
    axes = [len(aval.shape) for aval in avals]
    if not lines_up(layout.function.result, axes):
        return operands, "sequential"
    if is_value and len(axes) == 1:  # there is nothing that it could line up with
        return operands, method
    item_axes = core_axes(layout.function.result, axes)
    assert item_axes is not None, "`result=` says what an item is"
    leading_axes = [n - of_item for n, of_item in zip(axes, item_axes, strict=True)]
    if is_value:
        return lined_up(operands, leading_axes), method
    if any(item_axes) or not is_elementwise:
        # The axes in front can't be made equal here. If they are, the batch is one more
        # for all of them.
        line_up = len(set(leading_axes)) <= 1
        return operands, method if line_up else "sequential"
    if method == "expand_dims":
        # A rule may ignore the very argument that has the batch.
        method = "broadcast_all"
    return with_axes(operands, len(layout.avals[0].shape)), method
