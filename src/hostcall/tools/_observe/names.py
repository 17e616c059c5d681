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
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from hostcall._jax import JaxprEquation, Var, user_lines
from hostcall._jax.rewriting import Level
from hostcall._jax.user_lines import SourceLine
from hostcall.tools._observe import labels


class Target(NamedTuple):
    """A name that a statement assigns to.

    Attributes:
        name: such as `loss` or `self.loss`.
        part: its index, if the statement assigns to a tuple; None: it is all.
        span: (line, column, end line, end column) of its expression.
    """

    name: str
    part: int | None
    span: tuple[int, int, int, int]


class Variable(NamedTuple):
    """A value of a variable in a level.

    Attributes:
        at: the index of the equation which computes it.
        part, parts: which leaf of the value it is, and how many there are.
    """

    name: str
    var: Var
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
    if isinstance(statement, ast.AugAssign):
        return _named(statement.target, None, statement)  # the sum too
    if isinstance(statement, ast.Assign):
        left, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value:
        left, value = [statement.target], statement.value
    else:
        return []
    values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
    found: list[Target] = []
    for each in left:
        if not isinstance(each, (ast.Tuple, ast.List)):
            found += _named(each, None, value)
            continue
        starred = any(isinstance(x, ast.Starred) for x in (*each.elts, *values))
        for i, one in enumerate(each.elts):
            if len(values) == len(each.elts) and not starred:
                found += _named(one, None, values[i])
            else:
                found += _named(one, -1 if starred else i, value)
    return found


def _named(
    target: ast.expr, part: int | None, value: ast.expr | ast.stmt
) -> list[Target]:
    if isinstance(target, (ast.Tuple, ast.List)):  # which part is which is not known
        return [one for each in target.elts for one in _named(each, -1, value)]
    if not isinstance(target, (ast.Name, ast.Attribute)):
        return []
    end = value.end_lineno or 0, value.end_col_offset or 0
    span = value.lineno, value.col_offset, *end
    return [Target(ast.unparse(target), part, span)]


# --- In a level -----------------------------------------------------------------------


class _Piece(NamedTuple):
    """An equation of a statement, with the frame of the statement."""

    at: int
    eqn: JaxprEquation
    line: SourceLine
    is_backward: bool


def variables(
    level: Level, wanted: Callable[[str], bool], untold: set[str]
) -> Iterator[Variable]:
    """The values of the wanted variables in a level. Names that can't be told from
    others of a tuple are put into `untold`.
    """
    for target, found in _statements_in(level, wanted):
        side = _side(target, found[0].line.differentiates)
        if side is None:
            untold.add(target.name)
            continue
        runs, backward = [found], set[int]()
        if not found[0].line.differentiates:
            forward = [each for each in found if not each.is_backward]
            backward = {each.at for each in found if each.is_backward}
            runs = _runs(forward) if forward else []
        for run in runs:
            within = backward | {each.at for each in run}
            leaves = [
                (each, v)
                for each in run
                if side == "both" or each.is_backward == (side == "backward")
                for v in each.eqn.outvars
                if any(use not in within for use, _ in level.uses.get(v, ()))
            ]
            leaves = _without_residuals(level, leaves)
            for part, (each, v) in enumerate(leaves):
                yield Variable(target.name, v, each.at, each.line, part, len(leaves))


def _statements_in(
    level: Level, wanted: Callable[[str], bool]
) -> Iterator[tuple[Target, list[_Piece]]]:
    """The wanted targets of a level's statements, with these statements' equations."""
    groups: dict[tuple[Target, Hashable], list[_Piece]] = {}
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
                outer = [(x.file, x.line, x.column) for x in lines[depth + 1 :]]
                group = groups.setdefault((target, (line.file, *outer)), [])
                group.append(_Piece(index, eqn, line, backward))
    for (target, _), found in groups.items():
        yield target, found


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
    marks = [(each.line.inside, each.eqn.primitive) for each in found]
    times = marks.count(marks[0])
    size = len(found) // times
    if marks != marks[:size] * times:
        return [found]
    return [found[i : i + size] for i in range(0, len(found), size)]


def _without_residuals(
    level: Level, leaves: list[tuple[_Piece, Var]]
) -> list[tuple[_Piece, Var]]:
    """Without what a level hands to its backward pass, behind its other results."""
    if len(leaves) < 2 or "jvp(" not in labels.transforms(*level.around):
        return leaves
    used = [leaf for leaf in leaves if any(at >= 0 for at, _ in level.uses[leaf[1]])]
    first = min(leaves, key=lambda leaf: level.uses[leaf[1]])  # as which result
    return used or [first]
