"""Which equation computes a variable of the user's.

The frames of an equation and the syntax tree of their file say which statement has
computed it, and what the statement assigns to (`statements.py`). The value of a
variable is what leaves the equations of its statement: it is used by others, or is a
result of the level.

Some statements run several times in one trace, in a Python loop or in a function that
is called in one. Then their equations form the same sequence again and again. Without a
loop around, such a sequence has the leaves of one value, as `jax.tree.map` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from hostcall._jax import JaxprEquation, Var, jaxprs, user_lines
from hostcall._jax.places import EqnPath
from hostcall._jax.rewriting import Level
from hostcall._jax.user_lines import SourceLine
from hostcall.tools._observe.parts import Source, derivative_called, source_of
from hostcall.tools._observe.statements import (
    Place,
    Target,
    is_in_loop,
    is_within,
    targets,
)


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


Wanted: TypeAlias = Callable[[str], bool]  # whether a name is


class _Statement(NamedTuple):
    """A statement in one of its calls.

    Attributes:
        place: (file, function, line) of the statement.
        target: its target, and where the value is computed.
        places: where the frames around that are.
    """

    place: tuple[str, str, int]
    target: Target
    places: tuple[Place, ...]


class _Piece(NamedTuple):
    """An equation of a statement, with the frame that computes the value.

    Attributes:
        side: the pass that computes it; "" if no derivative does.
        results: the results of the equation that belong to it.
    """

    at: int
    eqn: JaxprEquation
    line: SourceLine
    is_backward: bool
    side: str
    results: Sequence[Var]


def variables(level: Level, wanted: Wanted, untold: set[str]) -> Iterator[Variable]:
    """The values of the wanted variables in a level. Names that can't be told from
    others of a tuple are put into `untold`.
    """
    for statement, pieces in _statements_in(level, wanted, untold).items():
        target = statement.target
        places = statement.places
        is_repeated = any(map(is_in_loop, places))
        side = pieces[0].side
        backward = set[int]()
        if not side:
            backward = {piece.at for piece in pieces if piece.is_backward}
            pieces = [piece for piece in pieces if not piece.is_backward]
        in_turn = pieces and is_repeated and not side
        for run in _runs(pieces) if in_turn else filter(None, [pieces]):
            within = backward | {piece.at for piece in run}
            if not is_repeated and not side:
                # What was traced meanwhile, such as branches from elsewhere, is inside.
                within |= {*range(run[0].at, run[-1].at)}
            leaves = [
                (piece, v)
                for piece in run
                if side in ("", "both") or piece.is_backward == (side == "backward")
                if not (side and _is_differentiated(level, piece))
                for v in piece.results
                if _Users(level, target, places, within).has(v)
            ]
            for part, (piece, v) in enumerate(leaves):
                yield Variable(
                    target.name, v, piece.at, statement.place, part, len(leaves)
                )


def _statements_in(
    level: Level, wanted: Wanted, untold: set[str]
) -> dict[_Statement, list[_Piece]]:
    """The equations of each statement that assigns to a wanted target."""
    groups: dict[_Statement, list[_Piece]] = {}
    known: dict[tuple[object, ...], list[Target]] = {}  # files are read once a level
    names_of_parts = set[str]()
    names_followed = set[str]()
    for index, at in enumerate(level.places):
        lines = user_lines.lines_of(at.eqn)
        for depth, line in enumerate(lines):
            place = line[:6]
            if place not in known:
                known[place] = targets(line)
            for target in known[place]:
                if not wanted(target.name) or not is_within(line, target.span):
                    continue
                names_of_parts |= {target.name} if target.part != () else set()
                source = source_of(target, lines, depth, at)
                if source is None:
                    continue
                names_followed.add(target.name)
                key, piece = _piece(target, source, lines, depth, index, at)
                groups.setdefault(key, []).append(piece)
    untold |= names_of_parts - names_followed
    return groups


def _piece(
    target: Target,
    source: Source,
    lines: Sequence[SourceLine],
    depth: int,
    index: int,
    at: EqnPath,
) -> tuple[_Statement, _Piece]:
    target_of_source = Target(target.name, (), source.span)
    place = lines[depth][:3]
    places = _places(target_of_source, lines[source.depth :])
    statement = _Statement(place, target_of_source, places)
    side = source.side
    if not side:
        differentiates = derivative_called(lines, source.depth)
        side = {"": "", "grad_f": "backward"}.get(differentiates, "both")
    results = at.eqn.outvars
    if source.results is not None:
        results = [results[n] for n in source.results]
    line = lines[source.depth]
    return statement, _Piece(index, at.eqn, line, at.is_backward, side, results)


def _places(target: Target, lines: Sequence[SourceLine]) -> tuple[Place, ...]:
    outer = [(x.file, x.line, x.column) for x in lines[1:]]
    return (lines[0].file, *target.span[:2]), *outer


def _runs(pieces: list[_Piece]) -> list[list[_Piece]]:
    """The runs of a statement, if they all have the same equations."""
    marks = [
        (piece.line[2:6], piece.line.inside, piece.eqn.primitive) for piece in pieces
    ]
    times = marks.count(marks[0])
    size = len(pieces) // times
    if marks != marks[:size] * times:
        return [pieces]
    return [pieces[i : i + size] for i in range(0, len(pieces), size)]


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
        visited: the variables that were looked at, with their jaxprs.
    """

    level: Level
    target: Target
    places: tuple[Place, ...]
    within: set[int]
    visited: set[tuple[int, Var]] = field(default_factory=set)

    def has(self, var: Var, level: Level | None = None, has_left: bool = False) -> bool:
        """Whether a value of a level, by default the statement's, has other users.

        `has_left`: the value has left this run of the statement, as the result of a
        call or a step. Where the statement's equations get it forward, it runs again.
        """
        level = level or self.level
        if (key := (id(level.jaxpr), var)) in self.visited:
            return False
        self.visited.add(key)
        own_equations: Collection[int] = self.within if level is self.level else ()
        if has_left:
            own_equations = [at for at in own_equations if level.places[at].is_backward]
        return any(
            self._goes_on(level, at, position, has_left)
            for at, position in level.uses.get(var, ())
            if at not in own_equations
        )

    def _goes_on(self, level: Level, at: int, position: int, has_left: bool) -> bool:
        if at >= 0:
            return self._is_user(level, level.jaxpr.eqns[at], position, has_left)
        if level.outer is None or level.kind == "condition":
            return True
        loop = level.around[-1]
        if loop.primitive.name in jaxprs.LOOPS:
            consts, carry = jaxprs.split_of(loop)
            carried = level.jaxpr.invars[consts : consts + carry]
            next_inputs = carried[position : position + 1]
            if any(self.has(v, level, has_left=True) for v in next_inputs):
                return True
        return self.has(loop.outvars[position], level.outer, has_left=True)

    def _is_user(
        self, level: Level, eqn: JaxprEquation, position: int, has_left: bool
    ) -> bool:
        lines = user_lines.lines_of(eqn)
        # The backward pass of the statement needs more of the forward pass than the
        # value. JAX also computes parts of a statement before the loop that it is in.
        is_same_run = not has_left or EqnPath(eqn, level.inside).is_backward
        if level is self.level:  # those of the same run are not asked about
            is_same_run = EqnPath(eqn, level.inside).is_backward
        if is_same_run and any(
            is_within(line, self.target.span)
            and _places(self.target, lines[depth:]) == self.places
            for depth, line in enumerate(lines)
        ):
            return False
        name = eqn.primitive.name
        inners = jaxprs.inners(eqn)
        if name == "cond":
            position -= 1  # behind the number of the branch
        if inners and name != "while" and position >= 0:
            place = EqnPath(eqn, level.inside)
            levels = [Level(x.old, name, place, outer=level) for x in inners]
            return any(self.has(x.jaxpr.invars[position], x, has_left) for x in levels)
        if lines or eqn.effects or inners:
            return True
        # Some step of JAX's.
        return any(self.has(v, level, has_left) for v in eqn.outvars)
