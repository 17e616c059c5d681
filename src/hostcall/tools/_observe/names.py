"""Which equation computes a variable of the user's.

The frames of an equation say which expressions were evaluated when it was traced, and
the syntax tree of the file says which statement these belong to, and what the statement
assigns to. The value of a variable is what leaves the equations of its statement: it is
used by others, or is a result of the level.

Some statements run several times in one trace, in a Python loop or in a function that
is called twice. Then their equations form the same sequence again and again.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex

from hostcall._jax import user_lines
from hostcall._jax.rewriting import Level
from hostcall._jax.user_lines import SourceLine
from hostcall.tools._observe import labels


class Target(NamedTuple):
    """A name that a statement assigns to.

    Attributes:
        name: such as `loss` or `self.loss`.
        part: its index, if the statement assigns to a tuple; None: it is all.
        span: (line, column, end line, end column) of its expression, if that is known.
        first: the line on which the statement begins.
    """

    name: str
    part: int | None
    span: tuple[int, int, int, int]
    first: int


class Variable(NamedTuple):
    """A value of a variable in a level.

    Attributes:
        at: the index of the equation which computes it.
        part, parts: which leaf of the value it is, and how many there are.
    """

    name: str
    var: Any
    at: int
    line: SourceLine
    part: int
    parts: int


def targets(line: SourceLine) -> list[Target]:
    """What the statement of this frame assigns to."""
    if line.function.endswith(("<lambda>", "<genexpr>")):
        return []
    source = "".join(linecache.getlines(line.file))
    around = [
        statement
        for statement in _statements(source)
        if statement.lineno <= line.line <= (statement.end_lineno or 0)
    ]
    if not around:
        return []
    innermost = max(around, key=lambda s: (s.lineno, -(s.end_lineno or 0)))
    return _targets(innermost)


@functools.lru_cache(maxsize=256)
def _statements(source: str) -> list[ast.stmt]:
    """All simple statements of a file, at any depth."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a notebook's magics
        return []
    statements = (n for n in ast.walk(tree) if isinstance(n, ast.stmt))
    return [n for n in statements if "body" not in n._fields]


def _targets(statement: ast.stmt) -> list[Target]:
    if isinstance(statement, ast.Assign):
        left, value = statement.targets, statement.value
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)) and statement.value:
        left, value = [statement.target], statement.value
        if isinstance(statement, ast.AugAssign):  # the sum too
            return _named(left[0], None, statement, statement.lineno)
    else:
        return []
    found: list[Target] = []
    for each in left:
        if not isinstance(each, (ast.Tuple, ast.List)):
            found += _named(each, None, value, statement.lineno)
            continue
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else None
        starred = any(isinstance(x, ast.Starred) for x in (*each.elts, *(values or ())))
        for i, one in enumerate(each.elts):
            if values is not None and not starred and len(values) == len(each.elts):
                found += _named(one, None, values[i], statement.lineno)
            else:
                found += _named(one, -1 if starred else i, value, statement.lineno)
    return found


def _named(
    target: ast.expr, part: int | None, value: ast.AST, first: int
) -> list[Target]:
    at: Any = value
    span = at.lineno, at.col_offset, at.end_lineno, at.end_col_offset
    if isinstance(target, (ast.Name, ast.Attribute)):
        return [Target(ast.unparse(target), part, span, first)]
    if isinstance(target, (ast.Tuple, ast.List)):  # which part is which is not known
        inner = [_named(each, -1, value, first) for each in target.elts]
        return [each for some in inner for each in some]
    return []


# --- In a level -----------------------------------------------------------------------


class _Piece(NamedTuple):
    """An equation of a statement, with the frame of the statement."""

    at: int
    eqn: Any
    line: SourceLine
    is_backward: bool


def variables(
    level: Level, wanted: Callable[[str], bool], untold: set[str]
) -> Iterator[Variable]:
    """The values of the wanted variables in a level. Names that can't be told from
    others of a tuple are put into `untold`.
    """
    uses = _uses(level)
    for target, found in _statements_in(level, wanted):
        side = _side(target, found[0].line.differentiates)
        if side is None:
            untold.add(target.name)
            continue
        own = {each.at for each in found}
        runs = [found]
        if not found[0].line.differentiates:
            found = [each for each in found if not each.is_backward]
            runs = _runs(found)
        for run in runs:
            inside = {each.at for each in run}
            within = own - {each.at for each in found} | inside
            leaves = [
                (each, v)
                for each in run
                if side == "both" or each.is_backward == (side == "backward")
                for v in each.eqn.outvars
                if any(use not in within for use in uses.get(v, ()))
            ]
            leaves = _without_residuals(level, leaves, uses)
            for part, (each, v) in enumerate(leaves):
                yield Variable(target.name, v, each.at, each.line, part, len(leaves))


def _statements_in(
    level: Level, wanted: Callable[[str], bool]
) -> Iterator[tuple[Target, list[_Piece]]]:
    """The wanted targets of a level's statements, with these statements' equations."""
    groups: dict[Any, list[_Piece]] = {}
    known: dict[tuple[str, int, str], list[Target]] = {}  # files are read once a level
    for index, eqn in enumerate(level.jaxpr.eqns):
        lines = user_lines.lines_of(eqn)
        backward = labels.is_backward(*level.around, eqn)
        for depth, line in enumerate(lines):
            place = line.file, line.line, line.function
            if place not in known:
                known[place] = targets(line)
            for target in known[place]:
                if not wanted(target.name) or not _within(line, target.span):
                    continue
                outer = tuple((x.file, x.line, x.column) for x in lines[depth + 1 :])
                key = line.file, target, outer
                groups.setdefault(key, []).append(_Piece(index, eqn, line, backward))
    for (_, target, _), found in groups.items():
        yield target, found


_RESULT = -1  # the use as a result of the level


def _uses(level: Level) -> dict[Any, list[int]]:
    """For each variable the indices of the equations that use it."""
    uses: dict[Any, list[int]] = {}
    used = [(i, x) for i, eqn in enumerate(level.jaxpr.eqns) for x in eqn.invars]
    for index, x in (*used, *((_RESULT, x) for x in level.jaxpr.outvars)):
        if isinstance(x, jex.Var):
            uses.setdefault(x, []).append(index)
    return uses


def _within(line: SourceLine, span: tuple[int, int, int, int]) -> bool:
    begin, end = (line.line, line.column), (line.end_line, line.end_column)
    return begin >= span[:2] and end <= span[2:]


def _side(target: Target, differentiates: str) -> str | None:
    """Which pass computes a target: "forward", "backward", or "both"; None: that can't
    be told.
    """
    if target.part is None:
        return {"": "forward", "grad_f": "backward"}.get(differentiates, "both")
    sides = {
        "value_and_grad_f": ("forward", "backward"),
        "grad_f_aux": ("backward", "forward"),
    }.get(differentiates, ())
    return sides[target.part] if 0 <= target.part < len(sides) else None


def _runs(found: list[_Piece]) -> list[list[_Piece]]:
    """The runs of a statement, if they all have the same equations."""
    if not found:
        return []
    marks = [(each.line.inside, each.eqn.primitive) for each in found]
    starts = [i for i, mark in enumerate(marks) if mark == marks[0]]
    size, rest = divmod(len(found), len(starts))
    same = not rest and marks == marks[:size] * len(starts)
    return (
        [found[i : i + size] for i in range(0, len(found), size)] if same else [found]
    )


def _without_residuals(
    level: Level, leaves: list[tuple[_Piece, Any]], uses: dict[Any, list[int]]
) -> list[tuple[_Piece, Any]]:
    """Without what a level hands to its backward pass, behind its other results."""
    if len(leaves) < 2 or "jvp(" not in labels.transforms(*level.around):
        return leaves
    used = [leaf for leaf in leaves if any(u != _RESULT for u in uses[leaf[1]])]
    if used:
        return used
    results: Sequence[Any] = level.jaxpr.outvars
    order = {x: -i for i, x in enumerate(results) if isinstance(x, jex.Var)}
    return [max(leaves, key=lambda leaf: order[leaf[1]])]
