"""Puts equations into programs where they are lowered.

There a program is as it will run: after derivatives, vmap and dead code. Its equations
stay as they are, and those of a function of the caller's are put between them:

    walk    `rewritten` shows each use all levels of a program. A level is a jaxpr: the
            program, the body of a loop, a branch, a function that it calls.
    insert  A use answers with insertions: functions, and the variables that they get.
            Where one of these is the number of a loop's step, the loop gets a counter.
            A loop may also pause now and then (`pauses.py`).
    label   The walk gives each equation its place (`places.py`): its lines of the
            user's, and the loops, calls and shards that it is in.

Not entered are loops over Refs, conditions of while loops whose rows differ, kernels,
custom calls, and the small functions inside reductions, sorts and scatters.

Which programs are rewritten is decided in rewritten_programs.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import numpy as np

from hostcall._jax import jaxprs
from hostcall._jax import types as _t
from hostcall._jax.door import core as _core
from hostcall._jax.door import shard_map as _shard_map
from hostcall._jax.fragments import assigned, traced
from hostcall._jax.jaxprs import LOOPS
from hostcall._jax.pauses import Pause, paused
from hostcall._jax.places import EqnPath, meshes_of
from hostcall._jax.versions import changed, open_jaxpr


@dataclass(frozen=True, eq=False)
class Level:
    """Equations that run one after another.

    Attributes:
        jaxpr: as it is in the program that nobody changed.
        kind: the primitive of the equation around it; "condition" of a while loop's; ""
            of the whole program.
        inside: the place of the equation around it; None of the whole program.
        steps: for each loop around, the outermost first, the number of its step. In a
            backward pass it is that of the step which is differentiated. Under vmap the
            rows of a while loop have one each.
        running: under vmap, which rows of a while loop still run: (condition, its
            operands). None: all do.
        outer: the level that the equation around it is in.
    """

    jaxpr: _t.Jaxpr
    kind: str = ""
    inside: EqnPath | None = None
    steps: tuple[_t.Var, ...] = ()
    running: tuple[_t.Jaxpr, list[_t.Var]] | None = None
    outer: Level | None = None

    @functools.cached_property
    def places(self) -> list[EqnPath]:
        """The place of each of its equations."""
        return [EqnPath(eqn, self.inside) for eqn in self.jaxpr.eqns]

    @property
    def around(self) -> tuple[_t.JaxprEquation, ...]:
        """The equations around it, the outermost first."""
        return self.inside.eqns if self.inside else ()

    @functools.cached_property
    def loops(self) -> list[EqnPath]:
        """The places of the loops around it, the outermost first."""
        if self.inside is None:
            return []
        innermost = [self.inside] if self.kind in LOOPS else []
        return [*self.inside.loops, *innermost]

    @functools.cached_property
    def meshes(self) -> list[tuple[_t.Mesh, frozenset[str]]]:
        """The mesh of each shard_map around it, and over which axes it is manual."""
        return meshes_of(self.around)

    @functools.cached_property
    def uses(self) -> dict[_t.Var, list[tuple[int, int]]]:
        """For each variable the equations that use it, and as which operand they do.

        Results of the level are operands of an equation -1, which is behind the others.
        """
        uses_by_var: dict[_t.Var, list[tuple[int, int]]] = {}
        operands = [*(eqn.invars for eqn in self.jaxpr.eqns), self.jaxpr.outvars]
        for index, atoms in enumerate(operands):
            for position, x in enumerate(atoms):
                if isinstance(x, _core.Var):
                    at = index if index < len(operands) - 1 else -1
                    uses_by_var.setdefault(x, []).append((at, position))
        return uses_by_var


class LoopState(NamedTuple):
    """A value that a loop keeps for an insertion into its body.

    Attributes:
        var: the value at the beginning of a step.
        start: what it is in the first step: a literal, or a variable of the level
            around.
        next: the variable that has it for the next step.
    """

    var: _t.Var
    start: _t.Atom
    next: _t.Var


class Insertion(NamedTuple):
    """Equations to put into a level: those of `fn(*operands)`.

    Attributes:
        position: the index of the equation that they come after; None: at the end,
            -1: at the beginning.
        results: variables that get the results of `fn`. One that is an input of the
            level is replaced: the equations after it get the result.
        states: what the loop keeps for it, if the level is a loop's body.
        outer: operands that are variables of the level around.
    """

    fn: Callable[..., Sequence[jax.Array] | None]
    operands: Sequence[_t.Atom]
    position: int | None = None
    results: Sequence[_t.Var] = ()
    states: Sequence[LoopState] = ()
    outer: Sequence[_t.Var] = ()


class Use(Protocol):
    """What someone wants to see of programs."""

    def look(self, level: Level) -> Iterable[Insertion | Pause]:
        """What to put into this level. Levels inside it are asked about later.

        The loop whose body the level is may pause, for one use.
        """


def rewritten(jaxpr: _t.Jaxpr, uses: Sequence[Use]) -> _t.Jaxpr:
    """The program with what these uses put into it; itself if that is nothing."""
    program = open_jaxpr(jaxpr)
    new = _rewritten(Level(program), uses)
    if new is None:
        return jaxpr
    assert not new.renamed, "only the inputs of inner levels are replaced"
    return _with(jaxpr, new.eqns, program.invars, program.outvars)


# --- Insert ---------------------------------------------------------------------------


@dataclass
class _Level:
    """What becomes of a level.

    Attributes:
        renamed: inputs that an insertion has replaced, with their new names.
        states: what the loop around keeps.
        outer: further variables of the level around.
        pause: how the loop around pauses, if it does.
    """

    eqns: list[_t.JaxprEquation]
    renamed: dict[_t.Var, _t.Var]
    states: list[LoopState]
    outer: list[_t.Var]
    pause: Pause | None = None


def _rewritten(level: Level, uses: Sequence[Use]) -> _Level | None:
    """The level with what is put into it and into levels inside it; None if that is
    nothing.
    """
    old = level.jaxpr.eqns
    inserted_after: dict[int, list[_t.JaxprEquation]] = {}
    new_level = _Level([], {}, [], [])
    with contextlib.ExitStack() as stack:
        for mesh, axes in level.meshes:
            stack.enter_context(_shard_map._extend_axis_env(mesh, axes))
            manual = _shard_map._as_manual_mesh(mesh, axes)
            stack.enter_context(jax.sharding.use_abstract_mesh(manual))
        for change in (i for use in uses for i in use.look(level)):
            if isinstance(change, Pause):
                assert new_level.pause is None, "a loop pauses for one use"
                new_level.pause = change
                continue
            at = len(old) - 1 if change.position is None else change.position
            new_level.states += change.states
            new_level.outer += change.outer
            inserted_after.setdefault(at, []).extend(
                _insertion(change, level, new_level.renamed)
            )
    new_level.eqns += inserted_after.get(-1, ())
    for index, place in enumerate(level.places):
        new_level.eqns += [*_inside(place, level, uses), *inserted_after.get(index, ())]
    return None if new_level.eqns == old else new_level


def _insertion(
    insertion: Insertion, level: Level, renamed: dict[_t.Var, _t.Var]
) -> list[_t.JaxprEquation]:
    inputs = [var for var in insertion.results if var in level.jaxpr.invars]
    assert not inputs or insertion.position == -1, (
        "only equations after it get the result"
    )
    # An input that is replaced comes in under another name, and its own is that of the
    # result. So only what is put before everything else may get the input.
    renamed |= {var: _core.Var(var.aval) for var in inputs}
    operands: list[_t.Atom] = []
    for operand in insertion.operands:
        is_input = isinstance(operand, _core.Var) and insertion.position == -1
        operands.append(renamed.get(operand, operand) if is_input else operand)
    eqns, outs = traced(insertion.fn, operands, is_apart=not inputs)
    return assigned(eqns, outs, insertion.results)


def _with(
    jaxpr: _t.Jaxpr,
    eqns: list[_t.JaxprEquation],
    invars: Sequence[_t.Var],
    outvars: Sequence[_t.Atom],
) -> _t.Jaxpr:
    """The same with these equations, inputs and results."""
    inner = open_jaxpr(jaxpr)
    names = inner.debug_info
    if len(invars) > len(inner.invars):
        names = names.with_unknown_names()
    changes = {"invars": invars, "outvars": outvars, "debug_info": names}
    return changed(jaxpr, eqns=eqns, **changes)


# --- Walk -----------------------------------------------------------------------------


def _inside(
    place: EqnPath, level: Level, uses: Sequence[Use]
) -> list[_t.JaxprEquation]:
    """The equation, with its inner levels rewritten. A loop that pauses is another one.

    A variable belongs to one level. So what an inner level needs of the levels around
    is one more constant of the equation, and one more input of the inner jaxpr:

        further constants   the numbers of all loops' steps around, and what insertions
                            need of this level
        in front of what    the number of the loop's own step, and what it keeps for
        a loop carries      insertions (`_Front`)

    For example a scan with the constant k that carries c, in a loop whose step is i:

        scan(k, c)        ->  scan(k, i, 0, c)
        body(k, c) -> c'  ->  body(k, i, n, c) -> n + 1, c'
    """
    eqn = place.eqn
    inners = jaxprs.inners(eqn)
    rows = _rows_of(eqn, inners)
    front = _front_of(eqn, rows)
    counter = tuple(front.at_begin)  # the loop keeps nothing yet
    operands = list(eqn.invars)
    is_same = True
    pause: Pause | None = None
    new_jaxprs = dict[str, list[_t.Jaxpr]]()
    n_further = dict[str, int]()
    # The last is first: the operands before it keep their positions, and the condition
    # of a loop gets what its body has put in front.
    for inner in reversed(inners):
        further, running = _further(eqn, inner, level, is_masked=bool(rows))
        new_level = None
        # JAX would compute a condition whose rows differ twice a step.
        if inner.is_body or not rows:
            kind = eqn.primitive.name if inner.is_body else "condition"
            steps = (*level.steps, *counter)
            inner_level = Level(inner.old, kind, place, steps, running, level)
            new_level = _rewritten(inner_level, uses)
        if new_level is not None:
            is_same = False
            further |= {var: var for var in new_level.outer}
            front.keep(new_level.states)
            pause = new_level.pause
        new_jaxpr = _with_further(inner, new_level, further, front)
        new_jaxprs.setdefault(inner.key, []).insert(0, new_jaxpr)
        # The branches of a cond share their operands.
        if inner.key not in n_further:
            n_further[inner.key] = len(further)
            starts = front.starts if inner.is_body else []
            operands[inner.end : inner.end] = [*further.values(), *starts]
    if is_same:
        return [eqn]
    new_eqn = jaxprs.replaced(eqn, new_jaxprs, n_further, len(front.at_begin))
    front_results = [_core.DropVar(var.aval) for var in front.at_begin]
    new_eqn = new_eqn.replace(invars=operands, outvars=[*front_results, *eqn.outvars])
    if pause is None:
        return [new_eqn]
    n_kept = len(front.at_begin) - len(counter)
    return paused(new_eqn, pause, n_kept)


def _rows_of(eqn: _t.JaxprEquation, inners: list[jaxprs.Inner]) -> tuple[int, ...]:
    """The rows of a while loop that stop one by one, as under vmap; () if all its rows
    stop together, and for any other equation.
    """
    if not inners or eqn.primitive.name != "while":
        return ()
    condition = inners[0].old
    goes_on = condition.outvars[0].aval
    return tuple(goes_on.shape)


@dataclass
class _Front:
    """What a loop carries in front of its own values; nothing of another equation.

    The number of its step is first, then what it keeps for insertions.

    Attributes:
        at_begin: the variables at the beginning of a step.
        starts: what each is in the first step.
        nexts: what each is in the next step.
        counting: the equations that make the number of the next step.
    """

    at_begin: list[_t.Var]
    starts: list[_t.Atom]
    nexts: list[_t.Atom]
    counting: list[_t.JaxprEquation]

    def keep(self, states: Sequence[LoopState]) -> None:
        for state in states:
            self.at_begin.append(state.var)
            self.starts.append(state.start)
            self.nexts.append(state.next)


def _front_of(eqn: _t.JaxprEquation, rows: tuple[int, ...]) -> _Front:
    """The number of a loop's step, one for each of these rows."""
    if eqn.primitive.name not in LOOPS:
        return _Front([], [], [], [])
    step = _core.Var(jax.core.ShapedArray(rows, np.dtype(np.int32)))
    is_reverse = eqn.params.get("reverse", False)
    start = np.full(rows, eqn.params["length"] - 1 if is_reverse else 0)
    first = _core.Literal(start.astype(np.int32)[()], step.aval)
    counting, nexts = traced(lambda i: [i - 1 if is_reverse else i + 1], [step])
    return _Front([step], [first], list(nexts), list(counting))


def _further(
    eqn: _t.JaxprEquation, inner: jaxprs.Inner, level: Level, is_masked: bool
) -> tuple[dict[_t.Var, _t.Atom], tuple[_t.Jaxpr, list[_t.Var]] | None]:
    """(the further constants of an inner jaxpr, by its variables; `Level.running`).

    `is_masked`: the rows of a while loop stop one by one. Its condition tells in its
    body which of them still run. The body has no constants of the condition, so they
    are among the further ones.
    """
    further: dict[_t.Var, _t.Atom] = {var: var for var in level.steps}
    if not (is_masked and inner.is_body):
        return further, None
    condition, body = jaxprs.inners(eqn)
    consts = eqn.invars[: body.begin]
    tests = [_core.Var(const.aval) for const in consts]
    carried = body.old.invars[body.end - body.begin :]
    further |= zip(tests, consts, strict=True)
    return further, (condition.jaxpr, [*tests, *carried])


def _with_further(
    inner: jaxprs.Inner,
    new_level: _Level | None,
    further: Iterable[_t.Var],
    front: _Front,
) -> _t.Jaxpr:
    """An inner jaxpr with its new equations, if it has any, and with further inputs."""
    eqns = inner.old.eqns
    invars = list(inner.old.invars)
    outvars = inner.old.outvars
    if new_level is not None:
        eqns = new_level.eqns
        invars = [new_level.renamed.get(var, var) for var in invars]
    if inner.is_body:
        eqns = [*eqns, *front.counting]
        outvars = [*front.nexts, *outvars]
    n_consts = inner.end - inner.begin
    consts = invars[:n_consts]
    carried = invars[n_consts:]
    inputs = [*consts, *further, *front.at_begin, *carried]
    return _with(inner.jaxpr, eqns, inputs, outvars)
