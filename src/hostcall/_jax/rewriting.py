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

The first block has JAX ask this file about each program (patches.py).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from hostcall._jax import jaxprs
from hostcall._jax import types as _t
from hostcall._jax.devices import back_ends_started
from hostcall._jax.door import core as _core
from hostcall._jax.door import shard_map as _shard_map
from hostcall._jax.door import util as _util
from hostcall._jax.execution import ExecutionGuard
from hostcall._jax.fast_dispatch import is_for_export
from hostcall._jax.fragments import assigned, traced
from hostcall._jax.installing import install, lost
from hostcall._jax.jaxprs import LOOPS
from hostcall._jax.needs import Part
from hostcall._jax.patches import When
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


# --- Which programs -------------------------------------------------------------------

# A thread's open blocks, each with its uses.
_Blocks: TypeAlias = Sequence[Mapping[Hashable, Use]]


class _Rewriting(ExecutionGuard):
    """How the programs are rewritten that a thread lowers.

    It is the thread's value of `jax_no_execution`, which is part of the keys of JAX's
    caches. So programs that were compiled before are kept and found again after.

    JAX hashes and compares this value in each dispatch. Methods for that would cost a
    dispatch some microseconds, so blocks with equal keys share one object, and objects
    are equal if they are the same.
    """

    def __init__(self, uses: Mapping[Hashable, Use], hidden_value: object) -> None:
        super().__init__(hidden_value=hidden_value)
        self.uses = uses


# Those that a cache of JAX's or a thread has, by the hidden value and the uses' keys.
_shared = weakref.WeakValueDictionary[tuple[Hashable, ...], _Rewriting]()


class _Thread(threading.local):
    """The open blocks of a thread, for each value that they have made its own: a host
    function has another one, and its thread may be inside of other blocks.
    """

    def __init__(self) -> None:
        self.blocks: dict[_Rewriting, _Blocks] = {}


_thread = _Thread()


def _here() -> tuple[_Rewriting | None, object]:
    """How this thread rewrites programs, if it does, and its value without that."""
    value = jax.no_execution.get_local()
    if isinstance(value, _Rewriting):
        return value, value.hidden_value
    return None, value


def _blocks_here() -> _Blocks:
    rewriting, _ = _here()
    return () if rewriting is None else _thread.blocks.get(rewriting, ())


def _uses_here() -> Mapping[Hashable, Use]:
    rewriting, _ = _here()
    return {} if rewriting is None else rewriting.uses


def _set_blocks(blocks: _Blocks) -> None:
    before, hidden_value = _here()
    if before is not None:
        _thread.blocks.pop(before, None)
    if not blocks:
        jax.no_execution.set_local(hidden_value)
        return
    uses = {key: use for block in blocks for key, use in block.items()}
    key = hidden_value, *uses
    new = _shared.setdefault(key, _Rewriting(uses, hidden_value))
    _thread.blocks[new] = blocks
    jax.no_execution.set_local(new)


@contextlib.contextmanager
def rewritten_by(uses: Mapping[Hashable, Use]) -> Iterator[None]:
    """A block in which the programs that the calling thread lowers are rewritten, also
    by these uses. Uses with equal keys put the same into a program.

    Tasks or generators that interleave may leave blocks out of order.
    """
    install(When.OBSERVE)
    _set_blocks((*_blocks_here(), uses))
    try:
        yield
    finally:
        _set_blocks([b for b in _blocks_here() if b is not uses])


@contextlib.contextmanager
def not_rewritten() -> Iterator[None]:
    """A block in which the calling thread's programs are left alone."""
    blocks = _blocks_here()
    _set_blocks(())
    try:
        yield
    finally:
        _set_blocks(blocks)


def requiring_devices(needs: Callable[..., Any]) -> Callable[..., bool]:
    @functools.wraps(needs)
    def needs_devices(jaxpr: _t.Jaxpr) -> bool:
        # What is put into a program may need its devices, which JAX finds out before.
        # A program that is only lowered may have none.
        caller = sys._getframe(1)
        if _blocks_here() and caller.f_locals.get("device_assignment") is not None:
            return True
        return bool(needs(jaxpr))

    return needs_devices


def lowering_rewritten(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Has JAX lower programs as the block around wants them."""

    @_util.weakref_lru_cache
    def lowered(jaxpr: _t.Jaxpr, *args: object, **options: object) -> object:
        uses = _uses_here()
        if uses and not is_for_export(options):
            jaxpr = rewritten(jaxpr, list(uses.values()))
        return plain(jaxpr, *args, **options)

    return lowered  # type: ignore[no-any-return]


class _Looker:
    """A use that only notes whether it is shown a program."""

    is_shown = False

    def look(self, level: Level) -> tuple[()]:
        del level
        self.is_shown = True
        return ()


def shows_programs() -> bool:
    """Whether this JAX asks here about the programs that it lowers.

    It is not asked to lower one before it has devices, which the caller may still
    choose. Till then, that it has the function which is replaced has to do.
    """
    install(When.OBSERVE)
    if lost(Part.OBSERVE) or not back_ends_started():
        return not lost(Part.OBSERVE)
    return _shows_one()


@functools.cache
def _shows_one() -> bool:
    looker = _Looker()
    with rewritten_by({looker: looker}):
        jax.jit(lambda x: x).lower(0.0)
    return looker.is_shown


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
    renamed |= {var: _core.Var(var.aval) for var in inputs}
    operands = [
        renamed.get(x, x)
        if isinstance(x, _core.Var) and insertion.position == -1
        else x
        for x in insertion.operands
    ]
    return assigned(
        *traced(insertion.fn, operands, is_apart=not inputs), insertion.results
    )


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

    These get the numbers of all loops' steps around as further inputs, since each is
    one variable in all levels. A loop gets a counter in front of what it carries.
    """
    eqn = place.eqn
    inners = jaxprs.inners(eqn)
    name = eqn.primitive.name
    rows = inners[0].old.outvars[0].aval.shape if inners and name == "while" else ()
    step = _core.Var(jax.core.ShapedArray(rows, np.dtype(np.int32)))
    starts, count, nexts = _counter(eqn, step) if name in LOOPS else ([], [], [])
    counter = [step] * len(starts)
    operands = list(eqn.invars)
    is_same = True
    kept_values: list[LoopState] = []
    pause: Pause | None = None
    new = dict[str, list[_t.Jaxpr]]()
    n_further = dict[str, int]()
    for key, jaxpr, begin, end in reversed(inners):  # positions before it stay
        old = open_jaxpr(jaxpr)
        at = end - begin
        is_body = key != "cond_jaxpr"
        further: dict[_t.Var, _t.Atom] = {var: var for var in level.steps}
        running = None
        eqns = old.eqns
        outvars = old.outvars
        new_inner = None
        if rows and is_body:  # under vmap, they stop one by one
            tests = [_core.Var(x.aval) for x in eqn.invars[:begin]]
            further |= zip(tests, eqn.invars, strict=False)
            running = inners[0].jaxpr, [*tests, *old.invars[at:]]
        if is_body or not rows:  # JAX would compute that condition twice a step
            kind = name if is_body else "condition"
            steps = (*level.steps, *counter)
            new_inner = _rewritten(Level(old, kind, place, steps, running, level), uses)
        is_same &= new_inner is None
        invars = list(old.invars)
        if new_inner is not None:
            eqns = new_inner.eqns
            invars = [new_inner.renamed.get(x, x) for x in old.invars]
            further |= {var: var for var in new_inner.outer}
            kept_values += new_inner.states
            pause = new_inner.pause
        if is_body:
            eqns = [*eqns, *count]
            outvars = [
                *nexts,
                *(kept_value.next for kept_value in kept_values),
                *outvars,
            ]
        front = [*counter, *(kept_value.var for kept_value in kept_values)]
        invars = [*invars[:at], *further, *front, *invars[at:]]
        new.setdefault(key, []).insert(0, _with(jaxpr, eqns, invars, outvars))
        if key not in n_further:
            n_further[key] = len(further)
            first = (
                [*starts, *(kept_value.start for kept_value in kept_values)]
                if is_body
                else []
            )
            operands[end:end] = [*further.values(), *first]
    if is_same:
        return [eqn]
    front = [*counter, *(kept_value.var for kept_value in kept_values)]
    new_eqn = jaxprs.replaced(eqn, new, n_further, len(front))
    outvars = [*(_core.DropVar(x.aval) for x in front), *eqn.outvars]
    new_eqn = new_eqn.replace(invars=operands, outvars=outvars)
    return [new_eqn] if pause is None else paused(new_eqn, pause, len(kept_values))


def _counter(
    eqn: _t.JaxprEquation, step: _t.Var
) -> tuple[list[_t.Atom], list[_t.JaxprEquation], list[_t.Atom]]:
    """The first number of a loop's steps, and how to compute the next."""
    is_reverse = eqn.params.get("reverse", False)
    start = np.full(step.aval.shape, eqn.params["length"] - 1 if is_reverse else 0)
    first = _core.Literal(start.astype(np.int32)[()], step.aval)
    return [first], *traced(lambda i: [i - 1 if is_reverse else i + 1], [step])
