"""Which expression computes a part of a tuple.

In `(loss, aux), grads = f(w)` no statement computes the loss alone. The frames of an
equation say which functions were running when it was traced, and the syntax trees of
their files say what these return.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from hostcall._jax import JaxprEquation, jaxprs
from hostcall._jax.places import EqnPath, in_library
from hostcall._jax.user_lines import SourceLine
from hostcall.tools._observe.statements import (
    Span,
    Target,
    is_within,
    last_assigned,
    parsed_file,
    returned_by,
    span_of,
)


class Source(NamedTuple):
    """Where the value of a target is computed, among the frames of an equation.

    Attributes:
        depth: the number of the frame.
        span: the expression in this frame.
        side: the pass that computes it, "forward" or "backward"; "": all of it.
        results: which results of the equation it is; None: all.
    """

    depth: int
    span: Span
    side: str = ""
    results: tuple[int, ...] | None = None


_SIDES = {  # of the first index of what these return
    "value_and_grad_f": ("forward", "backward"),
    "grad_f_aux": ("backward", "forward"),
    "vjp": ("forward",),
}
_FOLLOWED_AT_MOST = 32  # names and calls


def source_of(
    target: Target, lines: Sequence[SourceLine], depth: int, at: EqnPath
) -> Source | None:
    """Follows a part of a tuple to the expression that computes it.

    From `(loss, aux), grads = f(w)` it goes to what `f` returns: the frames of an
    equation say which function the statement has called. There it goes on from a name
    to what is assigned to it, until all of an expression is the part. None: the
    equation computes something else, or that can't be told.
    """
    part = target.part
    if part is None:
        return None
    if not part:
        return Source(depth, target.span)
    node = parsed_file(lines[depth].file).expressions.get(target.span)
    for _ in range(_FOLLOWED_AT_MOST):
        if node is None or not (0 <= depth < len(lines)):
            return None
        line = lines[depth]
        if isinstance(node, (ast.Tuple, ast.List)) and part:
            if any(isinstance(x, ast.Starred) for x in node.elts):
                return None
            node = node.elts[part[0]] if part[0] < len(node.elts) else None
            part = part[1:]
        elif isinstance(node, ast.Name):
            node, inner_part = last_assigned(line, node)
            part = (*inner_part, *part)
        elif not is_within(line, span_of(node)):
            return None
        elif not part:
            return Source(depth, span_of(node))
        else:
            function = _function_called(lines, depth)
            if side := _SIDES.get(function.differentiates, ()):
                if part[0] >= len(side):
                    return None
                wanted = side[part[0]]
                part = part[1:]
                if at.is_backward != (wanted == "backward"):
                    return None
                if not part or wanted == "backward":
                    return Source(depth, span_of(node), wanted)
            if function.depth < 0:
                return _of_results(at.eqn, line, depth, node, part)
            depth = function.depth
            node = returned_by(lines[depth])
    return None


def _of_results(
    eqn: JaxprEquation,
    line: SourceLine,
    depth: int,
    node: ast.expr,
    part: tuple[int, ...],
) -> Source | None:
    """The results of an equation that are this part of what an expression returns."""
    if isinstance(node, ast.Call) and line[2:6] != span_of(node):
        return None  # a call inside it, such as an argument
    result_parts = jaxprs.parts_of_results(eqn, line.calls)
    if result_parts is None:
        return None
    indices = [
        n
        for n, result_part in enumerate(result_parts)
        if result_part is not None and result_part[: len(part)] == part
    ]
    if not indices:
        return None
    return Source(depth, span_of(node), results=tuple(indices))


class _FunctionCalled(NamedTuple):
    """The function whose results a frame has got.

    Attributes:
        depth: the number of its frame; -1 if there is none.
        differentiates: the function of JAX in between, if that differentiates it.
    """

    depth: int
    differentiates: str


def _function_called(lines: Sequence[SourceLine], depth: int) -> _FunctionCalled:
    """The function that a frame has called, if its source says what it returns. If not,
    and it is a library's, that for which the library stands: it hands on its results.
    """
    inner = depth - 1
    differentiates = lines[depth].differentiates
    if not differentiates:
        while inner >= 0 and in_library(lines[inner].file) is not None:
            if returned_by(lines[inner]) is not None:
                break
            differentiates = lines[inner].differentiates
            inner -= 1
            if differentiates:
                break
    return _FunctionCalled(inner, differentiates)


def derivative_called(lines: Sequence[SourceLine], depth: int) -> str:
    """The function of JAX that a frame has called, also through a library's."""
    for n in reversed(range(depth + 1)):
        if n < depth and in_library(lines[n].file) is None:
            break
        if lines[n].differentiates:
            return lines[n].differentiates
    return ""
