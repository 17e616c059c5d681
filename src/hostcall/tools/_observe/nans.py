"""`hc.observe(nans=True)`: looks for bad values, and finds the equation that made them.

What is looked at, on the device, is little: the results of the program, and of each
step of its outermost loops, and what these loops start with. If one is NaN or infinite,
and is not known to be innocent, one call hands the inputs of this level to the host,
which runs its equations again, one by one (`verdicts.py`, `replay.py`). So a bad value
that reaches no result is no error: a branch of `where` that is not chosen, for example.

In loops, bad values that were innocent in one step are most often there in the next one
too, as the infinities of a mask. So a loop keeps how many NaNs and infinities each
small value had in the last step, and asks if there are more. Then it pauses
(`_jax/pauses.py`): its steps have no call. The host runs the steps since the last pause
again from what the loop carried there. The rest is looked at in pauses alone, where
what is bad stays so: values that are large beside what a step does, buffers of which a
step writes a row, and the results of a scan's steps, which are stacked.

Some equations can't be run again: those with effects, those that communicate, kernels.
Their results are handed to the host too, and what is inside of them is a level of its
own. A loop that has one makes its call in the step. What it reads and writes there may
be large, and XLA changes it in place, so two kinds of equations are left out: slices of
a carried buffer, and updates of it. Their results and updates are looked at instead of
the buffer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall._jax import (
    Atom,
    Jaxpr,
    JaxprEquation,
    Var,
    fragments,
    jaxprs,
    pauses,
    tracing,
)
from hostcall._jax.pauses import Pause, Pausing
from hostcall._jax.rewriting import Insertion, Level, LoopState
from hostcall.tools._observe.bad_values import BadRecord as BadRecord
from hostcall.tools._observe.bad_values import OnBad, Reports
from hostcall.tools._observe.replay import (
    COLLECTIVES,
    devices_may_part,
    of_rows,
    runs_again,
)
from hostcall.tools._observe.verdicts import (
    COUNTS,
    Equations,
    Judge,
    StepsSincePause,
)
from hostcall.tools._observe.where import Where

_UPDATES = {  # operand 0 may be changed in place; the index of the operand that is new
    "dynamic_update_slice": 1,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul"), 2),
}
_READS = {"dynamic_slice", "gather"}


class Nans:
    """Puts the checks into programs.

    Attributes:
        infs: whether infinities are bad.
        scope: at which lines they are.
        reports: what is done with what they find.
    """

    def __init__(self, infs: bool, on_bad: OnBad, scope: Where) -> None:
        self.infs = infs
        self.scope = scope
        self.reports = Reports(on_bad)

    def look(self, level: Level) -> Iterator[Insertion | Pause]:
        if devices_may_part(level.inside):
            return
        if not level.loops:
            yield from self._starts_of_loops(level)
        is_outermost = level.kind in jaxprs.LOOPS and len(level.loops) == 1
        if is_outermost and not level.meshes and _can_pause(level):
            yield from _PausingLoop(self, level).look()
        elif level.inside is None or is_outermost or not runs_again(level.inside.eqn):
            yield from self._results(level, level.jaxpr.outvars)

    def _starts_of_loops(self, level: Level) -> Iterator[Insertion]:
        """Looks at what the level's loops start with, as far as the level has computed
        it: a loop takes for innocent what it starts with.
        """
        computed: set[Var] = set()
        for index, eqn in enumerate(level.jaxpr.eqns):
            operands = [x for x in eqn.invars if jaxprs.is_float(x) and x in computed]
            if operands and _has_loop(eqn):
                fills = {x: _fill_of(level, x) for x in operands}
                unknown = [x for x, fill in fills.items() if fill is None]
                infinite = [x for x, fill in fills.items() if fill and np.isinf(fill)]
                nans = [x for x, fill in fills.items() if fill and np.isnan(fill)]
                yield from self._results(level, [*unknown, *nans], infinite, index)
            computed |= set(eqn.outvars)

    def _results(
        self,
        level: Level,
        results: Sequence[Atom],
        infinite: Sequence[Atom] = (),
        upto: int | None = None,
    ) -> Iterator[Insertion]:
        """Looks at these results of the level's equations up to this one.

        `infinite`: further ones whose infinities are innocent.
        """
        jaxpr = level.jaxpr.replace(eqns=level.jaxpr.eqns[:upto])
        carried = _carried(level) if upto is None else {}
        buffers, updates, reads = _buffers(level, carried)
        not_computed = {*jaxpr.invars, *jaxpr.constvars, *buffers}
        # XLA's CPU drops a NaN that is compared with other devices' numbers.
        compared = [e for e in jaxpr.eqns if e.primitive.name in ("pmax", "pmin")]
        wanted = [*results, *infinite, *(x for eqn in compared for x in eqn.invars)]
        # What the level was given is innocent, whatever it is.
        floats = [x for x in wanted if jaxprs.is_float(x) and x not in not_computed]
        looked_at = list(dict.fromkeys([*floats, *updates]))
        if not looked_at:
            return
        needed = [v for v in _needed(jaxpr, reads) if v not in buffers]
        axes = tuple(axis for _, manual in level.meshes for axis in manual)
        collectives = [e for e in jaxpr.eqns if _can_hand_on(e)] if axes else []
        sent_to_others = [
            x for eqn in collectives for x in eqn.invars if jaxprs.is_float(x)
        ]
        operands = list(
            dict.fromkeys([*looked_at, *needed, *level.steps, *sent_to_others])
        )
        judge = Equations(
            level=level,
            infs=self.infs,
            scope=self.scope,
            reports=self.reports,
            looked_at=tuple(looked_at),
            at_hand=tuple(looked_at),
            row_axes=len(_rows_of(level)),
            jaxpr=jaxpr,
            operands=tuple(operands),
            collectives=tuple(collectives),
        )
        if axes:
            check = functools.partial(
                self._together, judge, frozenset(infinite), axes, carried
            )
        elif level.kind in jaxprs.LOOPS:
            yield self._in_each_step(judge)
            return
        else:
            check = functools.partial(self._at_once, judge, frozenset(infinite))
        yield Insertion(check, operands, None if upto is None else upto - 1)

    def _at_once(
        self, judge: Equations, infinite: frozenset[Atom], *values: jax.Array
    ) -> None:
        known = dict(zip(judge.operands, values, strict=True))
        flags = [
            _any_bad([known[x]], self.infs and x not in infinite)
            for x in judge.looked_at
        ]
        looked_at = [known[x] for x in judge.looked_at]

        def bad() -> None:
            _ask(judge, looked_at, [_NO_FLAGS, *values])

        jax.lax.cond(functools.reduce(jnp.logical_or, flags), bad, lambda: None)

    def _together(
        self,
        judge: Equations,
        infinite: frozenset[Atom],
        axes: tuple[str, ...],
        carried: dict[Atom, Var],
        *values: jax.Array,
    ) -> None:
        """All devices make the call, so that they fail together."""
        known = dict(zip(judge.operands, values, strict=True))
        new = [
            _newly_bad(known[x], known[carried[x]], self.infs)
            if x in carried
            else _any_bad([known[x]], self.infs and x not in infinite)
            for x in judge.looked_at
        ]
        flags = [functools.reduce(jnp.logical_or, new)]
        for eqn in judge.collectives:
            sent_to_others = [known[x] for x in eqn.invars if jaxprs.is_float(x)]
            flags.append(_any_bad(sent_to_others, self.infs))
        somewhere = jax.lax.pmax(jnp.stack(flags).astype(jnp.int32), axes) > 0
        hc.call(judge, None, somewhere, *values, where=somewhere[0], order="unordered")

    def _in_each_step(self, judge: Equations) -> Insertion:
        """Asks in the step itself, in a loop that can't pause."""
        level = judge.level
        condition = level.running[1] if level.running else []
        operands = list(dict.fromkeys([*judge.operands, *condition]))
        counts = _BadCounts(level, self.infs)
        counts_before = counts.variable(len(judge.looked_at))
        floor = counts.variable(len(judge.looked_at))
        counts_after = fragments.same_type(counts_before)
        floor_after = fragments.same_type(floor)

        def check(
            counts_before: jax.Array, floor: jax.Array, *values: jax.Array
        ) -> list[jax.Array]:
            known = dict(zip(operands, values, strict=True))
            looked_at = counts.without_stopped(judge.looked_at, known)
            now = counts.of_large(looked_at)

            def ask() -> jax.Array:
                handed_over = [known[x] for x in judge.operands]
                return _ask(judge, looked_at, [_NO_FLAGS, *handed_over], floor)

            is_more = _is_more(now, counts_before, floor).any()
            return [now, jax.lax.cond(is_more, ask, lambda: floor)]

        kept_values = [
            counts.start(counts_before, counts_after),
            counts.start(floor, floor_after),
        ]
        results = [counts_after, floor_after]
        return Insertion(
            check, [counts_before, floor, *operands], None, results, kept_values
        )


def _has_loop(eqn: JaxprEquation) -> bool:
    return any(inner.primitive.name in jaxprs.LOOPS for inner in jaxprs.within(eqn))


# --- Loops that pause -----------------------------------------------------------------

_SMALL = 1 << 14  # bytes that may be looked at in each step
_PAUSE = 1 << 15  # what a pause costs by itself, in bytes that are copied meanwhile
_STEPS_MOST = 4096


def _can_pause(level: Level) -> bool:
    assert level.inside is not None
    all_again = all(runs_again(eqn) for eqn in level.jaxpr.eqns)
    return all_again and pauses.can_pause(level.inside.eqn)


class _PausingLoop:
    """Looks at the results of a loop's steps, and has the loop pause.

    In each step it counts what is bad in small values that the loop carries. In pauses
    it looks at the rest, where what is bad stays: at large values and buffers that it
    carries, and at those rows of a scan's results that are new.
    """

    def __init__(self, nans: Nans, level: Level) -> None:
        assert level.inside is not None, "a loop's body is inside of the loop"
        self.level = level
        loop = level.inside.eqn
        n_consts, n_carry = jaxprs.split_of(loop)
        self.carry = list(level.jaxpr.invars[n_consts : n_consts + n_carry])
        self.first = len(loop.invars) - n_carry if level.kind == "while" else n_consts
        other_operands = [
            *loop.invars[: self.first],
            *loop.invars[self.first + n_carry :],
        ]
        variables = [x for x in other_operands if not tracing.is_literal(x)]

        # A value that is carried and stacked is looked at in each step, if it is small.
        results = level.jaxpr.outvars
        self.carried = results[:n_carry]
        self.stacked = results[n_carry:]
        buffers, _, _ = _buffers(level, _carried(level))
        most = max(_SMALL, _work(level.jaxpr) // 2)
        changing = self._changing(self.carried)
        self.small = [x for x in changing if x not in buffers and _bytes(x) <= most]
        self.large = [x for x in changing if x not in self.small]
        self.rows = [x for x in self._changing(self.stacked) if x not in self.small]
        self.counts = _BadCounts(level, nans.infs)
        self.judge = StepsSincePause(
            level=level,
            infs=nans.infs,
            scope=nans.scope,
            reports=nans.reports,
            looked_at=(*self.small, *self.large, *self.rows),
            at_hand=(*self.small, *self.large),
            row_axes=len(self.counts.rows),
            other_operands=tuple(other_operands),
            outer=tuple(dict.fromkeys(variables)),
            first=self.first,
        )

    def _changing(self, results: Sequence[Atom]) -> list[Atom]:
        """The floats among these results that a step computes."""
        inputs = {*self.level.jaxpr.invars, *self.level.jaxpr.constvars}
        floats = (x for x in results if jaxprs.is_float(x) and x not in inputs)
        return list(dict.fromkeys(floats))

    def look(self) -> Iterator[Insertion | Pause]:
        if not self.judge.looked_at:
            return
        counts = self.counts
        n_in_pauses = len(self.large) + len(self.rows)
        counts_before = counts.variable(len(self.small))
        floor = counts.variable(len(self.judge.looked_at))
        last_in_pauses = counts.variable(n_in_pauses)
        counts_after = fragments.same_type(counts_before)
        event = counts.flag()
        yield self._check_of_steps(
            counts_before, floor, [counts_after, event], last_in_pauses
        )

        def pause(pausing: Pausing) -> list[jax.Array]:
            now, floor, last_in_pauses = pausing.states
            in_pauses = self._looked_at_in_pauses(pausing)
            new_in_pauses = counts.of_large(in_pauses)
            floor_of_these = floor[..., len(self.small) :, :]
            is_more = _is_more(new_in_pauses, last_in_pauses, floor_of_these).any()

            def ask() -> jax.Array:
                begin, next_turn = pausing.turns
                small = [self._now(pausing, x) for x in self.small]
                looked_at = [*small, *in_pauses]
                turns = [begin, next_turn - 1]
                handed_over = [
                    *turns,
                    *looked_at,
                    *pausing.at_last_pause,
                    *pausing.outer,
                ]
                return _ask(self.judge, looked_at, handed_over, floor)

            # The event itself says that small values have more: their counts were
            # compared in the step, and are those of the last one by now.
            is_event = pausing.happened.any() | is_more
            new_floor = jax.lax.cond(is_event, ask, lambda: floor)
            return [now, new_floor, new_in_pauses]

        yield Pause(
            fn=pause,
            event=event,
            every=self._steps_between(),
            states=[counts_before, floor, last_in_pauses],
            outer=self.judge.outer,
        )

    def _check_of_steps(
        self,
        counts_before: Var,
        floor: Var,
        results: Sequence[Var],
        last_in_pauses: Var,
    ) -> Insertion:
        """Counts what is bad in the small values of a step: `results` are the counts,
        and whether there is more than in the step before.
        """
        counts = self.counts
        condition = self.level.running[1] if self.level.running else []
        operands = list(dict.fromkeys([*self.small, *condition]))

        def check(
            counts_before: jax.Array, floor: jax.Array, *values: jax.Array
        ) -> list[jax.Array]:
            known = dict(zip(operands, values, strict=True))
            now = counts.of_small(counts.without_stopped(self.small, known))
            return [now, _is_more(now, counts_before, floor[..., : len(self.small), :])]

        counts_after = results[0]
        first_small = self._first_counts(self.small)
        first_large = self._first_counts([*self.large, *self.rows])
        kept_values = [
            counts.start(counts_before, counts_after, first_small),
            counts.start(floor, floor),
            counts.start(last_in_pauses, last_in_pauses, first_large),
        ]
        return Insertion(
            check, [counts_before, floor, *operands], None, results, kept_values
        )

    def _first_counts(self, values: Sequence[Atom]) -> np.ndarray:
        """How many infinities these values have before the first step, as far as their
        fills say. The fills are innocent: they are literals.
        """
        level = self.level.outer
        assert level is not None, "a loop's body is inside of a level"
        assert self.level.inside is not None, "and of the loop"
        starts = self.level.inside.eqn.invars[self.first :]
        rows = self.counts.rows
        counts = np.zeros((*rows, len(values), COUNTS), np.int32)
        for n, x in enumerate(values):
            if x not in self.carried:
                continue
            fill = _fill_of(level, starts[self.carried.index(x)])
            if fill is not None and np.isinf(fill):
                counts[..., n, 1] = math.prod(x.aval.shape[len(rows) :])
        return counts

    def _now(self, pausing: Pausing, x: Atom) -> jax.Array:
        return pausing.now[self.carried.index(x)]

    def _looked_at_in_pauses(self, pausing: Pausing) -> list[jax.Array]:
        large = [self._now(pausing, x) for x in self.large]
        stacked = [pausing.stacked[self.stacked.index(x)] for x in self.rows]
        return [*large, *(self._new_rows(pausing, rows) for rows in stacked)]

    def _new_rows(self, pausing: Pausing, stacked: jax.Array) -> jax.Array:
        """The rows of a scan's result that are new since the last pause, and zeros.

        Their number is not known when the program is compiled, so this is a window of
        as many rows as there are at most. It may have older ones at its end, since it
        does not leave the array. These are made zeros: they were judged before.
        """
        assert self.level.inside is not None, "a loop's body is inside of the loop"
        length = stacked.shape[0]
        begin, end = pausing.turns
        if self.level.inside.eqn.params["reverse"]:
            begin, end = length - end, length - begin
        size = min(self._steps_between(), length)
        first = jnp.clip(begin, 0, length - size)
        window = jax.lax.dynamic_slice_in_dim(stacked, first, size)
        numbers = first + jax.lax.iota(jnp.int32, size)
        is_new = (numbers >= begin) & (numbers < end)
        return jnp.where(of_rows(is_new, window), window, jnp.zeros_like(window))

    def _steps_between(self) -> int:
        """The most steps between two pauses: so many that the copy of what the loop
        carries costs an eighth of what they do.
        """
        carried = sum(_bytes(v) for v in self.carry)
        work = max(_work(self.level.jaxpr), 1)
        return min(8 * math.ceil((carried + _PAUSE) / work), _STEPS_MOST)


def _bytes(atom: Atom) -> int:
    size: int = math.prod(atom.aval.shape)
    return size * int(getattr(atom.aval.dtype, "itemsize", 8))


def _work(jaxpr: Jaxpr) -> int:
    """About how many bytes the equations of a jaxpr write."""
    total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        work_inside = [_work(inner.old) for inner in jaxprs.inners(eqn)]
        if work_inside and name == "cond":
            total += max(work_inside)
        elif work_inside:
            total += sum(work_inside) * eqn.params.get("length", 1)
        elif name in _UPDATES:
            total += _bytes(eqn.invars[_UPDATES[name]])
        else:
            arrays = (v for v in eqn.outvars if hasattr(v.aval, "dtype"))
            total += sum(_bytes(v) for v in arrays)
    return total


# --- What is known of a level before it runs ------------------------------------------


def _can_hand_on(eqn: JaxprEquation) -> bool:
    return eqn.primitive.name in COLLECTIVES and any(map(jaxprs.is_float, eqn.invars))


def _needed(jaxpr: Jaxpr, read: Iterable[Var]) -> Iterator[Var]:
    """What the host needs to run these equations again."""
    once = [v for eqn in jaxpr.eqns if not runs_again(eqn) for v in eqn.outvars]
    for v in (*jaxpr.constvars, *jaxpr.invars, *once, *read):
        is_array = isinstance(v.aval, jax.core.ShapedArray)  # or a key
        if is_array and v.aval.dtype != jax.dtypes.float0 and not jaxprs.is_dropped(v):
            yield v


def _carried(level: Level) -> dict[Atom, Var]:
    """The input of each result that a loop carries to its next step."""
    if level.inside is None or level.kind not in jaxprs.LOOPS:
        return {}
    consts, carry = jaxprs.split_of(level.inside.eqn)
    inputs = level.jaxpr.invars[consts : consts + carry]
    pairs = zip(level.jaxpr.outvars, inputs, strict=False)
    return {result: x for result, x in pairs if not tracing.is_literal(result)}


def _buffers(
    level: Level, carried: dict[Atom, Var]
) -> tuple[set[Var], list[Atom], list[Var]]:
    """Carried values that are only read and updated in place: the variables; the
    updates that can be bad; and what is read.
    """
    buffers = set[Var]()
    updates = list[Atom]()
    read = list[Var]()
    for result, start in carried.items():
        chain = [start]
        new = list[Atom]()
        old = list[Var]()
        uses = (use for var in chain for use in level.uses.get(var, ()))  # which grows
        for at, position in uses:
            if at < 0:
                continue
            eqn = level.jaxpr.eqns[at]
            name = eqn.primitive.name
            if position == 0 and name in _UPDATES:
                chain += eqn.outvars
                new.append(eqn.invars[_UPDATES[name]])
            elif position == 0 and name in _READS:
                old += eqn.outvars
            else:
                break
        else:  # it has no other uses
            if len(chain) > 1 and result in chain:
                buffers |= set(chain)
                updates += filter(jaxprs.is_float, new)
                read += old
    return buffers, updates, read


_FILLS = {
    *("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "expand_dims"),
    *("copy", "copy_p", "stop_gradient", "optimization_barrier"),
}


def _fill_of(level: Level, atom: Atom) -> float | None:
    """The real number that all elements of a value are, if the program says so.

    Of an infinity the sign may be another one, and elements may be NaN: a solver has
    its buffers filled with an infinity times the direction of time.
    """

    def of_input(var: Atom) -> float | None:
        if level.outer is None or level.inside is None or var not in inputs:
            return None
        if level.kind not in jaxprs.CALLS:  # a step has another one each time
            return None
        return _fill_of(level.outer, level.inside.eqn.invars[inputs.index(var)])

    inputs = level.jaxpr.invars
    return _fill_in(level.jaxpr, atom, of_input)


def _fill_in(
    jaxpr: Jaxpr, atom: Atom, of_input: Callable[[Atom], float | None]
) -> float | None:
    if tracing.is_literal(atom):
        is_real = np.ndim(atom.val) == 0 and not np.iscomplexobj(atom.val)
        return float(atom.val) if is_real else None
    eqn = next((e for e in jaxpr.eqns if atom in e.outvars), None)
    if eqn is None:
        return of_input(atom)
    name = eqn.primitive.name
    if name in _FILLS:
        operand = eqn.invars[eqn.outvars.index(atom)]
        return _fill_in(jaxpr, operand, of_input)
    if name == "mul":
        factors = [_fill_in(jaxpr, x, of_input) for x in eqn.invars]
        infinite = (x for x in factors if x is not None and np.isinf(x))
        return next(infinite, None)
    if name not in jaxprs.CALLS:
        return None
    (inner,) = jaxprs.inners(eqn)

    def of_operand(var: Atom) -> float | None:
        if var not in inner.old.invars:
            return None
        operand = eqn.invars[inner.old.invars.index(var)]
        return _fill_in(jaxpr, operand, of_input)

    result = inner.old.outvars[eqn.outvars.index(atom)]
    return _fill_in(inner.old, result, of_operand)


# --- On the device --------------------------------------------------------------------


_NO_FLAGS = np.zeros(1, bool)  # of collectives, where there are no other devices


def _rows_of(level: Level) -> tuple[int, ...]:
    """The axes of rows that a while loop under vmap has in front."""
    if level.running is None:
        return ()
    condition, _ = level.running
    shape: tuple[int, ...] = jaxprs.opened(condition)[0].outvars[0].aval.shape
    return shape


class _BadCounts:
    """How many NaNs and infinities values have in a step of a loop.

    Attributes:
        rows: under vmap, the rows of a while loop are counted by themselves.
    """

    def __init__(self, level: Level, infs: bool) -> None:
        self.level = level
        self.infs = infs
        self.rows = _rows_of(level)

    def variable(self, n_values: int) -> Var:
        shape = *self.rows, n_values, COUNTS
        return fragments.variable(shape, np.dtype(np.int32))

    def flag(self) -> Var:
        return fragments.variable(self.rows, np.dtype(bool))

    def start(
        self, var: Var, next_var: Var, at_first: np.ndarray | None = None
    ) -> LoopState:
        if at_first is None:
            at_first = np.zeros(var.aval.shape, np.int32)
        return LoopState(var, fragments.literal(at_first), next_var)

    def without_stopped(
        self, atoms: Sequence[Atom], known: dict[Atom, jax.Array]
    ) -> list[jax.Array]:
        """These values, with zeros in rows that have stopped, which are not kept."""
        values = [known[x] for x in atoms]
        if self.level.running is None:
            return values
        condition, operands = self.level.running
        (goes_on,) = jaxprs.inlined(condition, [known[x] for x in operands])
        return [jnp.where(of_rows(goes_on, x), x, jnp.zeros_like(x)) for x in values]

    def of_large(self, values: Sequence[jax.Array]) -> jax.Array:
        """The counts of values of which most have nothing bad: these are read once, in
        a branch that is seldom taken twice more.
        """
        none = np.zeros((*self.rows, len(values), COUNTS), np.int32)
        if not values:
            return jnp.asarray(none)

        def count() -> jax.Array:
            axes = [tuple(range(len(self.rows), x.ndim)) for x in values]
            pairs = list(zip(map(_comparable, values), axes, strict=True))
            nans = [jnp.isnan(x).sum(at, dtype=jnp.int32) for x, at in pairs]
            infs = [jnp.isinf(x).sum(at, dtype=jnp.int32) for x, at in pairs]
            return self._stacked(nans, infs)

        return jax.lax.cond(
            _any_bad(values, self.infs), count, lambda: jnp.asarray(none)
        )

    def of_small(self, values: Sequence[jax.Array]) -> jax.Array:
        """The counts of values of at most 2**16 - 1 elements, without a branch.

        One sum counts both: NaNs by 2**16, infinities by 1.
        """
        sums = []
        for x in map(_comparable, values):
            weights = jnp.where(jnp.isnan(x), np.int32(1 << 16), np.int32(0))
            if self.infs:
                weights = jnp.where(jnp.isinf(x), np.int32(1), weights)
            axes = tuple(range(len(self.rows), x.ndim))
            sums.append(weights.sum(axes, dtype=jnp.int32))
        if not sums:
            return jnp.zeros((*self.rows, 0, COUNTS), jnp.int32)
        return self._stacked([n >> 16 for n in sums], [n & 0xFFFF for n in sums])

    def _stacked(
        self, nans: Sequence[jax.Array], infs: Sequence[jax.Array]
    ) -> jax.Array:
        counts = [jnp.stack(nans, -1), jnp.stack(infs, -1)]
        if not self.infs:
            counts[1] = jnp.zeros_like(counts[1])
        return jnp.stack(counts, -1)


def _comparable(x: jax.Array) -> jax.Array:
    """Some types of one byte have no infinity to compare with."""
    return x.astype(jnp.float32) if x.dtype.itemsize == 1 else x


def _any_bad(values: Sequence[jax.Array], infs: bool) -> jax.Array:
    """Whether one of these values has a bad element."""
    flags = [_is_bad(_comparable(x), infs) for x in values]
    return functools.reduce(jnp.logical_or, flags)


def _is_bad(x: jax.Array, infs: bool) -> jax.Array:
    if not infs:
        return jnp.isnan(x).any()
    if jnp.iscomplexobj(x):
        return ~jnp.isfinite(x).all()
    # Half of the time of isfinite(x).all() on CPUs: 0 times any finite number is 0, and
    # a sum keeps a NaN. A maximum does not: XLA's CPU drops NaNs from those of large
    # arrays.
    return jnp.isnan((x * 0).sum())


def _newly_bad(new: jax.Array, old: jax.Array, infs: bool) -> jax.Array:
    """Whether a carried value has bad elements that were not so before the step."""
    new_nans = jnp.isnan(new) & ~jnp.isnan(old)
    return (new_nans | (jnp.isinf(new) & jnp.isfinite(old) & infs)).any()


def _is_more(
    counts: jax.Array, counts_before: jax.Array, floor: jax.Array
) -> jax.Array:
    """Whether there are more bad values than before, in each row."""
    known = jnp.maximum(counts_before, floor)
    return (counts > known).any((-2, -1))


def _ask(
    judge: Judge,
    looked_at: Sequence[jax.Array],
    operands: Sequence[jax.Array | np.ndarray],
    floor: jax.Array | None = None,
) -> jax.Array:
    """Asks about bad values, and hands over these operands if they are not known.

    Returns the counts up to which a loop need not ask in this run.
    """
    counts = jax.ShapeDtypeStruct((len(looked_at), COUNTS), jnp.int32)
    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    new_floor, is_unknown = hc.call(
        judge.ask, (counts, flag), *looked_at, order="unordered"
    )

    # Only what is not known is handed over, since on a GPU that copies all inputs.
    def hand_over() -> None:
        hc.call(judge, None, *operands, order="unordered")

    jax.lax.cond(is_unknown, hand_over, lambda: None)
    return new_floor if floor is None else jnp.maximum(new_floor, floor)
