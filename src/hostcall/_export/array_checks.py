"""Refuses equations from a file whose arrays are not as the primitives make them.

The engine trusts the numbers of an equation when it reads and writes XLA's buffers: how
many operands and results there are, which of them have the axes of rows, and how many
bytes a fill has. Programs that are traced here can't get them wrong, and a file may say
anything. So they are checked once, before a plan is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hostcall._core.codec import Malformed
from hostcall._engine.params.equation import Equation
from hostcall._export.structures import decode_aval
from hostcall._jax.types import Aval


def check_operands(params: Equation, operands: Sequence[Aval]) -> None:
    """Refuses operands that the primitives never have."""
    masks = params.mask(operands)
    arguments = params.arguments(operands)
    array_count = len(params.callback.template.keys)
    wanted = params.masked + array_count + params.always
    fits = (
        len(masks) == params.masked
        and len(arguments) == array_count
        and len(operands) == wanted
    )
    if not fits:
        raise Malformed(f"{len(operands)} operands where {wanted} belong")
    _check_grid(params, operands)
    _check_axes(params.axes, operands)
    if params.masked:
        _check_mask(params, masks[0])
    if params.always:
        always = operands[-1]
        if always.dtype != bool or always.shape:
            raise Malformed(f"always= of {always}")


def _check_grid(params: Equation, operands: Sequence[Aval]) -> None:
    """Refuses a grid of rows that its operands don't have.

    `batched` has for each operand one flag for each axis of the grid; it is empty
    without a grid:

        grid (4, 2)    batched ((True, True), (False, True))
        operands       float32[4,2,3]         float32[2]
    """
    flags = params.batched
    grid = params.grid
    rows_of_flags = len(operands) if grid else 0
    fits = len(flags) == rows_of_flags
    if not fits or any(len(row) != len(grid) for row in flags):
        raise Malformed(f"batched={flags!r}")
    # A call's function can't see more batch axes than some array has. How many a tap's
    # sees follows from `axes`, which `check_operands` compares.
    axis_counts = [aval.ndim for aval in (*operands, *params.avals)]
    most_axes = max(axis_counts, default=0)
    if not params.ignores_results and not 0 <= params.levels <= most_axes:
        raise Malformed(f"the option levels={params.levels}")
    axes = []
    for number, size in enumerate(grid):
        axes.append(([row[number] for row in flags], size))
    _check_axes(axes, operands)


def _check_mask(params: Equation, mask: Aval) -> None:
    # One bool for each row; or with axes of its own, by which rows are dropped.
    row_axes = sum(params.batched[0]) if params.grid else 0
    has_rows = params.compresses(mask) or mask.ndim == row_axes
    if mask.dtype != bool or not has_rows:
        raise Malformed(f"where= of {mask}")


def _check_axes(
    axes: Sequence[tuple[Sequence[bool], int]], operands: Sequence[Aval]
) -> None:
    """Refuses axes that no operand has, and operands with other leading sizes.

    `axes` are whether each operand has it, and its size; the outermost is first.
    """
    sizes = [size for _, size in axes]
    decode_aval(["bool", *sizes])  # which refuses what is no shape
    for flags, size in axes:
        if len(flags) != len(operands) or not any(flags):
            raise Malformed(f"an axis of {size} that no operand has")
    for number, operand in enumerate(operands):
        leading = tuple(size for flags, size in axes if flags[number])
        if operand.shape[: len(leading)] != leading:
            raise Malformed(f"an operand {operand} in rows of {tuple(sizes)}")


def check_results(params: Equation) -> None:
    """Refuses results that the primitives never have."""
    avals = params.avals
    fills = params.callback.fills
    results = params.callback.results
    levels = params.levels
    counts = [len(results.avals), len(results.keys), len(fills)]
    are_alike = all(count == len(avals) for count in counts)
    if not are_alike or (avals and params.ignores_results):
        raise Malformed(f"{len(avals)} results with {len(fills)} fills for {counts}")
    for fill, aval in zip(fills, avals, strict=True):
        if levels > aval.ndim:
            raise Malformed(f"levels={levels} of a result {aval}")
        if fill is None:
            continue
        element = aval.dtype.itemsize
        row = element * math.prod(aval.shape[levels:])
        if len(fill) not in (element, row):
            raise Malformed(f"a fill of {len(fill)} bytes for {aval}")
        # One element stands for all. A file of a few bytes may not ask for memory that
        # no machine has.
        if len(fill) == element and element * math.prod(aval.shape) >= 2**48:
            raise Malformed(f"a fill for {aval}")
