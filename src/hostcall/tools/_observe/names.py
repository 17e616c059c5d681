"""Which equation computes a variable of the user's.

The frames of an equation say which expressions were evaluated when it was traced, and
the syntax tree of the file says which statement these belong to, and what the statement
assigns to. The value of a variable is what leaves the equations of its statement: it is
used by others, or is a result of the level.

Some statements run several times in one trace, in a Python loop or in a function that
is called in one. Then their equations form the same sequence again and again. Without a
loop around, such a sequence has the leaves of one value, as `jax.tree.map` makes them.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from hostcall._jax import JaxprEquation, Var, jaxprs, user_lines
from hostcall._jax.places import Place
from hostcall._jax.rewriting import Level
from hostcall._jax.user_lines import SourceLine

_Span: TypeAlias = tuple[int, int, int, int]  # line, column, end line, end column


class Target(NamedTuple):
    """A name that a statement assigns to.

    Attributes:
        name: such as `loss` or `self.loss`.
        part: its index, if the statement assigns to a tuple; None: it is all.
        span: of its expression.
    """

    name: str
    part: int | None
    span: _Span


class Variable(NamedTuple):
    """A value of a variable in a level.

    Attributes:
        name: "" if it is not known.
        at: the index of the equation which computes it.
        place: (file, function, line) of its statement.
        part, parts: which leaf of the value it is, and how many there are.
    """

    name: str
    var: Var
    at: int
    place: tuple[str, str, int]
    part: int
    parts: int


# Functions that are part of a statement. From Python 3.12 on comprehensions are none.
_PARTS = "<lambda>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"


def targets(line: SourceLine) -> list[Target]:
    """What the statement of this frame assigns to. What is inside of a `:=` belongs to
    that, and to the statement only if it is all of its value.
    """
    if line.function.endswith(_PARTS):
        return []
    code = _code(line.file)
    around = [s for s in code.statements if _within(line, _span(s))]
    found = _targets(max(around, key=_span)) if around else []
    for span, one in code.walruses:
        if _within(line, one.span):
            found = [outer for outer in found if outer.span == span] + [one]
    return found


class _Parsed(NamedTuple):
    """All simple statements of a file, at any depth; where each `:=` is, the outer ones
    first, and what it assigns to; and where loops are.
    """

    statements: list[ast.stmt]
    walruses: list[tuple[_Span, Target]]
    loops: list[_Span]


def _code(file: str) -> _Parsed:
    return _parsed("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=256)
def _parsed(source: str) -> _Parsed:
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except SyntaxError:  # a notebook's magics
        nodes = []
    statements = (n for n in nodes if isinstance(n, ast.stmt))
    walruses = (n for n in nodes if isinstance(n, ast.NamedExpr))
    return _Parsed(
        [n for n in statements if "body" not in n._fields],
        [(_span(n), Target(n.target.id, None, _span(n.value))) for n in walruses],
        [_span(n) for n in nodes if isinstance(n, _LOOPS)],
    )


_LOOPS = (
    *(ast.For, ast.AsyncFor, ast.While),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def _span(node: ast.expr | ast.stmt) -> _Span:
    end = node.end_lineno or 0, node.end_col_offset or 0
    return node.lineno, node.col_offset, *end


_Place: TypeAlias = tuple[str, int, int]  # file, line, column


def _is_in_loop(place: _Place) -> bool:
    """Whether this is inside of a loop, and not its beginning."""
    file, *at = place
    return any(span[:2] < tuple(at) <= span[2:] for span in _code(file).loops)


def _targets(statement: ast.stmt) -> list[Target]:
    if isinstance(statement, ast.AugAssign):
        return [*_named(statement.target, statement)]  # the sum too
    if isinstance(statement, ast.Assign):
        left, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value:
        left, value = [statement.target], statement.value
    else:
        return []
    return [one for each in left for one in _named(each, value)]


def _named(
    target: ast.expr, value: ast.expr | ast.stmt, part: int | None = None
) -> Iterator[Target]:
    """The names in a target which gets a value, or that part of it; -1: some part."""
    if isinstance(target, (ast.Name, ast.Attribute)):
        yield Target(ast.unparse(target), part, _span(value))
    if not isinstance(target, (ast.Tuple, ast.List)):
        return
    is_display = part is None and isinstance(value, (ast.Tuple, ast.List))
    values = value.elts if is_display else []  # type: ignore[union-attr]
    starred = any(isinstance(x, ast.Starred) for x in (*target.elts, *values))
    for i, one in enumerate(target.elts):
        if len(values) == len(target.elts) and not starred:
            yield from _named(one, values[i])
        else:
            yield from _named(one, value, -1 if starred or part is not None else i)


# --- In a level -----------------------------------------------------------------------


Wanted: TypeAlias = Callable[[str], bool]  # whether a name is

# A target, where its value is computed, and where the frames around that are.
_Statement: TypeAlias = tuple[Target, tuple[_Place, ...]]


class _Piece(NamedTuple):
    """An equation of a statement, with the frame of the statement."""

    at: int
    eqn: JaxprEquation
    line: SourceLine
    is_backward: bool


def variables(level: Level, wanted: Wanted, untold: set[str]) -> Iterator[Variable]:
    """The values of the wanted variables in a level. Names that can't be told from
    others of a tuple are put into `untold`.
    """
    for (target, places), found in _statements_in(level, wanted).items():
        is_in_loop = any(map(_is_in_loop, places))
        differentiates = found[0].line.differentiates
        side = _side(target, differentiates)
        if side is None:
            untold.add(target.name)
            continue
        backward = set[int]()
        if not differentiates:
            backward = {each.at for each in found if each.is_backward}
            found = [each for each in found if not each.is_backward]
        in_turn = found and is_in_loop and not differentiates
        for run in _runs(found) if in_turn else filter(None, [found]):
            within = backward | {each.at for each in run}
            if not is_in_loop and not differentiates:
                # What was traced meanwhile, such as branches from elsewhere, is inside.
                within |= {*range(run[0].at, run[-1].at)}
            leaves = [
                (each, v)
                for each in run
                if side == "both" or each.is_backward == (side == "backward")
                if not (differentiates and _is_differentiated(level, each))
                for v in each.eqn.outvars
                if _Users(level, target, places, within).has(v)
            ]
            for part, (each, v) in enumerate(leaves):
                place = each.line[:3]
                yield Variable(target.name, v, each.at, place, part, len(leaves))


def _statements_in(level: Level, wanted: Wanted) -> dict[_Statement, list[_Piece]]:
    """The equations of each statement that assigns to a wanted target."""
    groups: dict[_Statement, list[_Piece]] = {}
    known: dict[tuple[object, ...], list[Target]] = {}  # files are read once a level
    for index, at in enumerate(level.places):
        eqn, backward = at.eqn, at.is_backward
        lines = user_lines.lines_of(eqn)
        for depth, line in enumerate(lines):
            place = line[:6]
            if place not in known:
                known[place] = targets(line)
            for target in known[place]:
                if not wanted(target.name) or not _within(line, target.span):
                    continue
                places = _places(target, lines[depth:])
                group = groups.setdefault((target, places), [])
                group.append(_Piece(index, eqn, line, backward))
    return groups


def _places(target: Target, lines: Sequence[SourceLine]) -> tuple[_Place, ...]:
    outer = [(x.file, x.line, x.column) for x in lines[1:]]
    return (lines[0].file, *target.span[:2]), *outer


def _within(line: SourceLine, span: _Span) -> bool:
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
    marks = [(each.line[2:6], each.line.inside, each.eqn.primitive) for each in found]
    times = marks.count(marks[0])
    size = len(found) // times
    if marks != marks[:size] * times:
        return [found]
    return [found[i : i + size] for i in range(0, len(found), size)]


def _is_differentiated(level: Level, piece: _Piece) -> bool:
    """Whether the backward pass of a derivative around its own has made a piece."""
    names = level.places[piece.at].transforms
    return "transpose" in [name for name in names if name != "vmap"][:-2]


@dataclass
class _Users:
    """Looks for users of a value that are not the statement itself.

    The forward pass also hands the backward pass of a statement what this needs beside
    the value, such as the slope of a `tanh`. So users are looked for in other levels
    too: inside of calls and loops, and behind the results of the level.

    Attributes:
        level, target, places: those of the statement.
        within: the equations of the level that are the statement's in this run.
        seen: the variables that were looked at, with their jaxprs.
    """

    level: Level
    target: Target
    places: tuple[_Place, ...]
    within: set[int]
    seen: set[tuple[int, Var]] = field(default_factory=set)

    def has(self, var: Var, level: Level | None = None) -> bool:
        """Whether a value of a level, by default the statement's, has other users."""
        level = level or self.level
        if (key := (id(level.jaxpr), var)) in self.seen:
            return False
        self.seen.add(key)
        own = self.within if level is self.level else ()
        found = level.uses.get(var, ())
        return any(self._goes_on(level, *use) for use in found if use[0] not in own)

    def _goes_on(self, level: Level, at: int, position: int) -> bool:
        if at >= 0:
            return self._is_user(level, level.jaxpr.eqns[at], position)
        if level.outer is None or level.kind == "condition":
            return True
        loop = level.around[-1]
        if loop.primitive.name == "scan":
            consts, carry = jaxprs.split_of(loop)
            carried = level.jaxpr.invars[consts : consts + carry]
            if any(self.has(v, level) for v in carried[position : position + 1]):
                return True
        return self.has(loop.outvars[position], level.outer)

    def _is_user(self, level: Level, eqn: JaxprEquation, position: int) -> bool:
        lines = user_lines.lines_of(eqn)
        if level is not self.level and any(
            _within(line, self.target.span)
            and _places(self.target, lines[depth:]) == self.places
            for depth, line in enumerate(lines)
        ):
            return False
        name, inners = eqn.primitive.name, jaxprs.inners(eqn)
        if name == "cond":
            position -= 1  # behind the number of the branch
        if inners and name != "while" and position >= 0:
            place = Place(eqn, level.inside)
            levels = [Level(x.old, name, place, outer=level) for x in inners]
            return any(self.has(x.jaxpr.invars[position], x) for x in levels)
        if lines or eqn.effects or inners:
            return True
        return any(self.has(v, level) for v in eqn.outvars)  # some step of JAX's
