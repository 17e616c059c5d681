"""Loops that pause: what is looked at in a step, and what in a pause.

In each step it counts what is bad in small values that the loop carries. In pauses it
looks at the rest, where what is bad stays: at large values and buffers that it carries,
and at those rows of a scan's results that are new.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax import lax

from hostcall._jax import Atom, Jaxpr, Var, fragments, jaxprs, tracing
from hostcall._jax.pauses import Pause, Pausing
from hostcall._jax.rewriting import Insertion, Level
from hostcall.tools._observe.bad_values import Reports
from hostcall.tools._observe.level_facts import (
    UPDATES,
    compared_in_pauses,
    fill_of,
    is_copy,
    needs_no_look,
)
from hostcall.tools._observe.on_device import (
    BadCounts,
    any_of,
    any_row,
    ask_in_loop,
    has_marks,
    is_more,
    newly_bad,
    with_marks,
    without_marks,
    zeros_where,
)
from hostcall.tools._observe.verdicts import COUNTS, StepsSincePause
from hostcall.tools._observe.where import Where

_SMALL = 1 << 14  # bytes that may be looked at in each step
_PAUSE = 1 << 15  # what a pause costs by itself, in bytes that are copied meanwhile
_STEPS_MOST = 4096


class PausingLoop:
    """Looks at the results of a loop's steps, and has the loop pause.

    In each step it counts what is bad in small values that the loop carries. In pauses
    it looks at the rest, where what is bad stays: at large values and buffers that it
    carries, and at those rows of a scan's results that are new.
    """

    def __init__(
        self, level: Level, infs: bool, scope: Where, reports: Reports
    ) -> None:
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
        buffers = compared_in_pauses(level)
        most = max(_SMALL, _work(level.jaxpr) // 2)
        changing = self._changing(self.carried)
        self.small = [x for x in changing if x not in buffers and _bytes(x) <= most]
        self.buffers = [x for x in changing if x in buffers]
        self.large = [x for x in changing if x not in (*self.small, *self.buffers)]
        self.rows = [x for x in self._changing(self.stacked) if x not in self.small]
        self.counts = BadCounts(level, infs)
        self.judge = StepsSincePause(
            level=level,
            infs=infs,
            scope=scope,
            reports=reports,
            looked_at=(*self.small, *self.large, *self.rows, *self.buffers),
            at_hand=(*self.small, *self.large, *self.buffers),
            row_axes=len(self.counts.rows),
            other_operands=tuple(other_operands),
            outer=tuple(dict.fromkeys(variables)),
            first=self.first,
        )

    def _changing(self, results: Sequence[Atom]) -> list[Atom]:
        """The floats among these results that a step computes."""
        inputs = {*self.level.jaxpr.invars, *self.level.jaxpr.constvars}
        floats = (x for x in results if jaxprs.is_float(x) and x not in inputs)
        return [x for x in dict.fromkeys(floats) if not needs_no_look(self.level, x)]

    def look(self) -> Iterator[Insertion | Pause]:
        if not self.judge.looked_at:
            return
        counts = self.counts
        n_small = len(self.small)
        counts_before = counts.variable(len(self.judge.looked_at))
        floor = fragments.same_type(counts_before)
        yield self._check_of_steps(counts_before, floor)

        def pause(pausing: Pausing) -> list[jax.Array]:
            marked, floor = pausing.states
            in_pauses = self._looked_at_in_pauses(pausing)
            n_counted = n_small + len(in_pauses)
            new_in_pauses = counts.of_large(in_pauses)
            last_in_pauses = counts.of_values(marked, n_small, n_counted)
            floor_of_these = counts.of_values(floor, n_small, n_counted)
            has_more = is_more(new_in_pauses, last_in_pauses, floor_of_these)
            events = [has_marks(marked), any_row(has_more), *self._news(pausing)]

            def ask_host() -> jax.Array:
                begin, next_turn = pausing.turns
                small = [self._now(pausing, x) for x in self.small]
                buffers = [self._now(pausing, x) for x in self.buffers]
                looked_at = [*small, *in_pauses, *buffers]
                carried = pausing.at_last_pause
                handed_over = [begin, next_turn, *looked_at, *carried, *pausing.outer]
                return ask_in_loop(self.judge, floor, looked_at, handed_over)

            new_floor = lax.cond(any_of(events), ask_host, lambda: floor)
            small_now = without_marks(counts.of_values(marked, 0, n_small))
            not_counted = counts.of_values(marked, n_counted)
            now = counts.joined(counts.joined(small_now, new_in_pauses), not_counted)
            return [now, new_floor]

        yield Pause(
            fn=pause,
            is_time=lambda states: has_marks(states[0]),
            every=self._steps_between(),
            states=[counts_before, floor],
            outer=self.judge.outer,
        )

    def _check_of_steps(self, counts_before: Var, floor: Var) -> Insertion:
        """Counts what is bad in the small values of a step. Counts that are more than
        in the step before are marked, which is the event for which the loop pauses.
        """
        counts = self.counts
        n_small = len(self.small)
        condition = self.level.running[1] if self.level.running else []
        operands = list(dict.fromkeys([*self.small, *condition]))

        def check(
            counts_before: jax.Array, floor: jax.Array, *values: jax.Array
        ) -> list[jax.Array]:
            known = dict(zip(operands, values, strict=True))
            now = counts.of_small(counts.without_stopped(self.small, known))
            small_before = counts.of_values(counts_before, 0, n_small)
            small_floor = counts.of_values(floor, 0, n_small)
            in_pauses = counts.of_values(counts_before, n_small)
            return [
                counts.joined(with_marks(now, small_before, small_floor), in_pauses)
            ]

        counts_after = fragments.same_type(counts_before)
        at_first = self._first_counts()
        return Insertion(
            fn=check,
            operands=[counts_before, floor, *operands],
            results=[counts_after],
            states=[
                counts.start(counts_before, counts_after, at_first),
                counts.start(floor, floor),
            ],
        )

    def _first_counts(self) -> np.ndarray:
        """How many infinities the values have before the first step, as far as their
        fills say. The fills are innocent: they are literals.
        """
        values = self.judge.looked_at
        level = self.level.outer
        assert level is not None, "a loop's body is inside of a level"
        assert self.level.inside is not None, "and of the loop"
        starts = self.level.inside.eqn.invars[self.first :]
        rows = self.counts.rows
        counts = np.zeros((*rows, len(values), COUNTS), np.int32)
        for n, x in enumerate(values):
            if x not in self.carried:
                continue
            fill = fill_of(level, starts[self.carried.index(x)])
            if fill is not None and np.isinf(fill):
                counts[..., n, 1] = math.prod(x.aval.shape[len(rows) :])
        return counts

    def _now(self, pausing: Pausing, x: Atom) -> jax.Array:
        return pausing.now[self.carried.index(x)]

    def _news(self, pausing: Pausing) -> list[jax.Array]:
        """For each buffer whether an element is bad that was not so at the last pause.
        They need no counts, of which each row that is written changes some.
        """
        before = [pausing.at_last_pause[self.carried.index(x)] for x in self.buffers]
        now = [self._now(pausing, x) for x in self.buffers]
        pairs = zip(now, before, strict=True)
        return [newly_bad(new, old, self.counts.infs) for new, old in pairs]

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
        first = lax.clamp(np.int32(0), begin, np.int32(length - size))
        window = lax.dynamic_slice_in_dim(stacked, first, size)
        numbers = first + lax.iota(np.int32, size)
        is_old = (numbers < begin) | (numbers >= end)
        return zeros_where(is_old, window)

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
        elif name in UPDATES:
            total += _bytes(eqn.invars[UPDATES[name].new])
        elif not is_copy(eqn):
            arrays = (v for v in eqn.outvars if hasattr(v.aval, "dtype"))
            total += sum(_bytes(v) for v in arrays)
    return total
