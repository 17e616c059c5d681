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
from collections.abc import Collection, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax import lax

import hostcall as hc
from hostcall._jax import (
    Atom,
    Jaxpr,
    JaxprEquation,
    Var,
    fragments,
    jaxprs,
    tracing,
)
from hostcall._jax.pauses import Pause
from hostcall._jax.rewriting import Insertion, Level
from hostcall.tools._observe.bad_values import OnBad, Reports
from hostcall.tools._observe.constants import constants_of
from hostcall.tools._observe.level_facts import (
    buffers_of,
    can_hand_on,
    can_pause,
    carried_of,
    fill_of,
    is_constant,
    needed_of,
    needs_no_look,
    operands_of,
)
from hostcall.tools._observe.on_device import (
    NO_FLAGS,
    BadCounts,
    any_bad,
    any_of,
    any_row,
    ask,
    ask_in_loop,
    is_more,
    newly_bad,
    rows_of,
)
from hostcall.tools._observe.pausing_loops import PausingLoop
from hostcall.tools._observe.running_again import devices_may_part, runs_again
from hostcall.tools._observe.verdicts import Equations
from hostcall.tools._observe.where import Where


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
        if is_outermost and not level.meshes and can_pause(level):
            loop = PausingLoop(level, self.infs, self.scope, self.reports)
            yield from loop.look()
        elif level.inside is None or is_outermost or not runs_again(level.inside.eqn):
            yield from self._results(level, level.jaxpr.outvars)

    def _starts_of_loops(self, level: Level) -> Iterator[Insertion]:
        """Looks at what the level's loops start with, as far as the level has computed
        it: a loop takes for innocent what it starts with. Of finite constants, and of
        infinities that are literals, it is known before.
        """
        constants = constants_of(level) if any(map(_has_loop, level.jaxpr.eqns)) else {}
        computed: set[Var] = set()
        for index, eqn in enumerate(level.jaxpr.eqns):
            operands = [x for x in eqn.invars if jaxprs.is_float(x) and x in computed]
            if operands and _has_loop(eqn):
                fills = {x: fill_of(level, x) for x in operands}
                for x in constants.keys() & fills.keys():
                    is_filled = fills[x] is not None and np.isinf(fills[x])
                    is_good = np.isfinite(constants[x]).all()
                    if is_good or (is_filled and not np.isnan(constants[x]).any()):
                        del fills[x]
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
        carried = carried_of(level) if upto is None else {}
        buffers, updates, reads = buffers_of(level, carried)
        # What the level was given is innocent, whatever it is.
        not_computed = {*jaxpr.invars, *jaxpr.constvars, *buffers}
        not_computed |= _judged_inside(level)
        # XLA's CPU drops a NaN that is compared with other devices' numbers.
        compared = [e for e in jaxpr.eqns if e.primitive.name in ("pmax", "pmin")]
        wanted = [*results, *infinite, *(x for eqn in compared for x in eqn.invars)]
        floats = [x for x in wanted if jaxprs.is_float(x) and x not in not_computed]
        distinct = dict.fromkeys([*floats, *updates])
        looked_at = [x for x in distinct if not needs_no_look(level, x)]
        if not looked_at:
            return
        needed = [v for v in needed_of(jaxpr, reads) if v not in buffers]
        judge = self._judge(level, jaxpr, looked_at, needed)
        innocents = frozenset(infinite)
        if _manual_axes(level):
            check = functools.partial(self._together, judge, innocents, carried)
        elif level.kind in jaxprs.LOOPS:
            yield self._in_each_step(judge)
            return
        else:
            check = functools.partial(self._at_once, judge, innocents)
        position = None if upto is None else upto - 1
        yield Insertion(check, judge.operands, position)

    def _judge(
        self,
        level: Level,
        jaxpr: Jaxpr,
        looked_at: Sequence[Atom],
        needed: Sequence[Var],
    ) -> Equations:
        """`needed`: what the host needs to run the level's equations again."""
        has_devices = bool(_manual_axes(level))
        collectives = [e for e in jaxpr.eqns if has_devices and can_hand_on(e)]
        sent = [x for e in collectives for x in e.invars if jaxprs.is_float(x)]
        operands = dict.fromkeys([*looked_at, *needed, *level.steps, *sent])
        return Equations(
            level=level,
            infs=self.infs,
            scope=self.scope,
            reports=self.reports,
            looked_at=tuple(looked_at),
            at_hand=tuple(looked_at),
            row_axes=len(rows_of(level)),
            jaxpr=jaxpr,
            operands=tuple(operands),
            collectives=tuple(collectives),
        )

    def _at_once(
        self, judge: Equations, infinite: frozenset[Atom], *values: jax.Array
    ) -> None:
        known = dict(zip(judge.operands, values, strict=True))
        looked_at = [known[x] for x in judge.looked_at]
        is_bad = self._is_any_bad(known, judge.looked_at, infinite)

        def bad() -> None:
            ask(judge, looked_at, [NO_FLAGS, *values])

        lax.cond(is_bad, bad, lambda: None)

    def _is_any_bad(
        self,
        known: dict[Var, jax.Array],
        looked_at: Iterable[Atom],
        infinite: Collection[Atom],
    ) -> jax.Array:
        """Whether one of these is bad; of some, infinities are innocent."""
        flags = []
        with_nans = [known[x] for x in looked_at if x in infinite]
        with_any = [known[x] for x in looked_at if x not in infinite]
        if with_nans:
            flags.append(any_bad(with_nans, infs=False))
        if with_any:
            flags.append(any_bad(with_any, self.infs))
        return any_of(flags)

    def _together(
        self,
        judge: Equations,
        infinite: frozenset[Atom],
        carried: dict[Atom, Var],
        *values: jax.Array,
    ) -> None:
        """All devices make the call, so that they fail together."""
        axes = _manual_axes(judge.level)
        known = dict(zip(judge.operands, values, strict=True))
        given = [x for x in judge.looked_at if x in carried]
        computed = [x for x in judge.looked_at if x not in carried]
        new = [newly_bad(known[x], known[carried[x]], self.infs) for x in given]
        if computed:
            new.append(self._is_any_bad(known, computed, infinite))
        flags = [any_of(new)]
        for eqn in judge.collectives:
            sent_to_others = [known[x] for x in eqn.invars if jaxprs.is_float(x)]
            flags.append(any_bad(sent_to_others, self.infs))
        numbers = [lax.convert_element_type(x, np.int32) for x in flags]
        counts = lax.concatenate([lax.expand_dims(x, [0]) for x in numbers], 0)
        somewhere = lax.pmax(counts, axes) > 0
        hc.call(judge, None, somewhere, *values, where=somewhere[0], order="unordered")

    def _in_each_step(self, judge: Equations) -> Insertion:
        """Asks in the step itself, in a loop that can't pause."""
        level = judge.level
        condition = level.running[1] if level.running else []
        operands = list(dict.fromkeys([*judge.operands, *condition]))
        counts = BadCounts(level, self.infs)
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

            def ask_host() -> jax.Array:
                handed_over = [known[x] for x in judge.operands]
                return ask_in_loop(judge, floor, looked_at, [NO_FLAGS, *handed_over])

            has_more = any_row(is_more(now, counts_before, floor))
            return [now, lax.cond(has_more, ask_host, lambda: floor)]

        kept_values = [
            counts.start(counts_before, counts_after),
            counts.start(floor, floor_after),
        ]
        results = [counts_after, floor_after]
        return Insertion(
            check, [counts_before, floor, *operands], None, results, kept_values
        )


def _judged_inside(level: Level) -> set[Var]:
    """Results of calls and branches that need no second look.

    What is inside of an equation that can't run again is looked at there. Its results
    are bad only by what it has made, which was told of there, or by what it was given.
    That needs no look either if this level was given it, if another such equation has
    returned it, if equations have only moved it, or if it is looked at because a loop
    starts with it. So of nested calls around a callback only the innermost looks.
    """
    if level.meshes:
        return set()
    innocent = {x for x in level.jaxpr.invars if not is_constant(level, x)}
    judged = set[Var]()

    def is_innocent(x: Atom) -> bool:
        if not tracing.is_literal(x) and (x in innocent or x in judged):
            return True
        fill = fill_of(level, x)
        is_finite = fill is not None and np.isfinite(fill)
        return is_finite or needs_no_look(level, x)

    computed = set[Var]()
    for eqn in level.jaxpr.eqns:
        is_call = eqn.primitive.name in (*jaxprs.CALLS, "cond")
        if is_call and jaxprs.inners(eqn) and not runs_again(eqn):
            starts = computed if not level.loops and _has_loop(eqn) else set[Var]()
            for n, result in enumerate(eqn.outvars):
                floats = [x for x in operands_of(eqn, n) if _may_be_bad(x)]
                if all(
                    is_innocent(x)
                    for x in floats
                    if tracing.is_literal(x) or x not in starts
                ):
                    judged.add(result)
        computed |= set(eqn.outvars)
    return judged


def _may_be_bad(atom: Atom) -> bool:
    is_array = jaxprs.is_array(atom)
    return is_array and jax.dtypes.issubdtype(atom.aval.dtype, np.inexact)


def _manual_axes(level: Level) -> tuple[str, ...]:
    return tuple(axis for _, manual in level.meshes for axis in manual)


def _has_loop(eqn: JaxprEquation) -> bool:
    return any(inner.primitive.name in jaxprs.LOOPS for inner in jaxprs.within(eqn))
