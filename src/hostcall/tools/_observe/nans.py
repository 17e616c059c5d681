"""`hc.observe(nans=True)`: looks for bad values, and finds the equation that made them.

What is looked at, on the device, is little: the results of the program, and of each
step of its outermost loops, and what these loops start with. If one is NaN or infinite,
and is not known to be innocent, one call hands the inputs of this level to the host,
which runs its equations again, one by one (`verdicts.py`, `replay.py`). So a bad value
that reaches no result is no error: a branch of `where` that is not chosen, for example.

In loops, bad values that were innocent in one step are most often there in the next one
too, as the infinities of a mask. So a loop keeps how many NaNs and infinities each
value had in the last step, and asks if there are more. Then it pauses
(`_jax/pauses.py`): its steps have no call. The host runs the steps since the last pause
again from what the loop carried there. Values that are large beside what a step does,
such as a buffer of which it writes a row, are looked at in pauses alone: what is bad
stays so.

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
from collections.abc import Iterable, Iterator, Sequence

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
from hostcall._jax.rewriting import Insertion, Kept, Level
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
    NUMBERS,
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
        where: at which lines they are.
        reports: what is done with what they find.
    """

    def __init__(self, infs: bool, on_bad: OnBad, where: Where) -> None:
        self.infs = infs
        self.where = where
        self.reports = Reports(on_bad)

    def look(self, level: Level) -> Iterator[Insertion | Pause]:
        if devices_may_part(level.inside):
            return
        if not level.loops:
            made: set[Var] = set()
            for index, eqn in enumerate(level.jaxpr.eqns):
                start = [x for x in eqn.invars if jaxprs.is_float(x) and x in made]
                if start and _has_loop(eqn):
                    # What buffers are filled with is innocent.
                    fills = {x: _fill_of(level.jaxpr, x) for x in start}
                    start = [x for x, fill in fills.items() if not _is_number(fill)]
                    yield from self._results(level, start, upto=index)
                made |= set(eqn.outvars)
        is_outermost = level.kind in jaxprs.LOOPS and len(level.loops) == 1
        if is_outermost and not level.meshes and _can_pause(level):
            yield from _PausingLoop(self, level).look()
        elif level.inside is None or is_outermost or not runs_again(level.inside.eqn):
            yield from self._results(level, level.jaxpr.outvars)

    def _results(
        self, level: Level, results: Sequence[Atom], upto: int | None = None
    ) -> Iterator[Insertion]:
        """Looks at these results of the level's equations up to this one."""
        jaxpr = level.jaxpr.replace(eqns=level.jaxpr.eqns[:upto])
        carried = _carried(level) if upto is None else {}
        buffers, updates, read = _buffers(level, carried)
        own = {*jaxpr.invars, *jaxpr.constvars, *buffers}
        # XLA's CPU drops a NaN that is compared with other devices' numbers.
        compared = [e for e in jaxpr.eqns if e.primitive.name in ("pmax", "pmin")]
        results = [*results, *(x for eqn in compared for x in eqn.invars)]
        found = [x for x in results if jaxprs.is_float(x) and x not in own]
        looked_at = list(dict.fromkeys([*found, *updates]))
        if not looked_at:
            return
        given = [v for v in _given(jaxpr, read) if v not in buffers]
        axes = tuple(axis for _, manual in level.meshes for axis in manual)
        collectives = [e for e in jaxpr.eqns if _can_hand_on(e)] if axes else []
        sent = [x for eqn in collectives for x in eqn.invars if jaxprs.is_float(x)]
        operands = list(dict.fromkeys([*looked_at, *given, *level.steps, *sent]))
        judge = Equations(
            level=level,
            infs=self.infs,
            where=self.where,
            reports=self.reports,
            looked_at=tuple(looked_at),
            at_hand=tuple(looked_at),
            jaxpr=jaxpr,
            operands=tuple(operands),
            collectives=tuple(collectives),
        )
        if axes:
            check = functools.partial(self._together, judge, axes, carried)
        elif level.kind in jaxprs.LOOPS:
            yield self._in_each_step(judge)
            return
        else:
            check = functools.partial(self._at_once, judge)
        yield Insertion(check, operands, None if upto is None else upto - 1)

    def _at_once(self, judge: Equations, *values: jax.Array) -> None:
        known = dict(zip(judge.operands, values, strict=True))
        looked_at = [known[x] for x in judge.looked_at]

        def bad() -> None:
            _asked(judge, _digest(looked_at, self.infs), values)

        jax.lax.cond(_any_bad(looked_at, self.infs), bad, lambda: None)

    def _together(
        self,
        judge: Equations,
        axes: tuple[str, ...],
        carried: dict[Atom, Var],
        *values: jax.Array,
    ) -> None:
        """All devices make the call, so that they fail together."""
        known = dict(zip(judge.operands, values, strict=True))
        new = [
            _newly_bad(known[x], known[carried[x]], self.infs)
            if x in carried
            else _any_bad([known[x]], self.infs)
            for x in judge.looked_at
        ]
        flags = [functools.reduce(jnp.logical_or, new)]
        for eqn in judge.collectives:
            sent = [known[x] for x in eqn.invars if jaxprs.is_float(x)]
            flags.append(_any_bad(sent, self.infs))
        somewhere = jax.lax.pmax(jnp.stack(flags).astype(jnp.int32), axes) > 0
        hc.call(judge, None, somewhere, *values, where=somewhere[0], order="unordered")

    def _in_each_step(self, judge: Equations) -> Insertion:
        """Asks in the step itself, in a loop that can't pause."""
        level = judge.level
        condition = level.running[1] if level.running else []
        own = list(dict.fromkeys([*judge.operands, *judge.looked_at, *condition]))
        digests = _Digests(level, len(judge.looked_at), self.infs)
        before = digests.kept(NUMBERS)
        floor = digests.kept(COUNTS)
        unchanged = fragments.same_type(floor)

        def check(
            before: jax.Array, floor: jax.Array, *values: jax.Array
        ) -> list[jax.Array]:
            known = dict(zip(own, values, strict=True))
            goes_on = digests.running(known)
            digest = digests.of([known[x] for x in judge.looked_at], goes_on)
            sent = [known[x] for x in judge.operands]
            is_more = _is_more(digest, before, floor).any()
            ask = lambda: _asked(judge, digest, sent, floor)  # noqa: E731
            return [digest, jax.lax.cond(is_more, ask, lambda: floor)]

        after = fragments.same_type(before)
        kept = [digests.start(before, after), digests.start(floor, unchanged)]
        return Insertion(check, [before, floor, *own], None, [after, unchanged], kept)


def _has_loop(eqn: JaxprEquation) -> bool:
    return any(each.primitive.name in jaxprs.LOOPS for each in jaxprs.within(eqn))


# --- Loops that pause -----------------------------------------------------------------

_SMALL = 1 << 14  # bytes that may be looked at in each step
_PAUSE = 1 << 15  # what a pause costs by itself, in bytes that are copied meanwhile
_STEPS_MOST = 4096


def _can_pause(level: Level) -> bool:
    assert level.inside is not None
    all_again = all(runs_again(eqn) for eqn in level.jaxpr.eqns)
    return all_again and pauses.can_pause(level.inside.eqn)


class _PausingLoop:
    """Looks at the results of a loop's steps, and has the loop pause."""

    def __init__(self, nans: Nans, level: Level) -> None:
        assert level.inside is not None
        self.nans = nans
        self.level = level
        loop = level.inside.eqn
        consts, n_carry = jaxprs.split_of(loop)
        self.carry = list(level.jaxpr.invars[consts : consts + n_carry])
        self.first = len(loop.invars) - n_carry if level.kind == "while" else consts
        others = [*loop.invars[: self.first], *loop.invars[self.first + n_carry :]]
        self.others = tuple(others)
        variables = (x for x in others if not tracing.is_literal(x))
        self.outer = tuple(dict.fromkeys(variables))

    def look(self) -> Iterator[Insertion | Pause]:
        level = self.level
        infs = self.nans.infs
        buffers, updates, _ = _buffers(level, _carried(level))
        own = {*level.jaxpr.invars, *level.jaxpr.constvars, *buffers}
        found = [x for x in level.jaxpr.outvars if jaxprs.is_float(x) and x not in own]
        found = list(dict.fromkeys([*found, *updates]))
        most = max(_SMALL, _work(level.jaxpr) // 2)
        results = level.jaxpr.outvars[: len(self.carry)]
        large = [x for x in found if x in results and _bytes(x) > most]
        small = [x for x in found if x not in large]
        if not found:
            return
        judge = StepsSincePause(
            level=level,
            infs=infs,
            where=self.nans.where,
            reports=self.nans.reports,
            looked_at=(*small, *large),
            at_hand=tuple(x for x in (*small, *large) if x in level.jaxpr.outvars),
            others=self.others,
            outer=self.outer,
            first=self.first,
        )
        digests = _Digests(level, len(small), infs)
        before = digests.kept(NUMBERS)
        floor = digests.kept(COUNTS, len(found))
        of_large = digests.kept(COUNTS, len(large))
        event = digests.flag()
        condition = level.running[1] if level.running else []
        operands = list(dict.fromkeys([*small, *condition]))

        def check(
            before: jax.Array, floor: jax.Array, *values: jax.Array
        ) -> list[jax.Array]:
            known = dict(zip(operands, values, strict=True))
            goes_on = digests.running(known)
            digest = digests.of([known[x] for x in small], goes_on)
            return [digest, _is_more(digest, before, floor[..., : len(small), :])]

        after = fragments.same_type(before)
        kept = [
            digests.start(before, after),
            digests.start(floor, floor),
            digests.start(of_large, of_large, self._first_counts(large, digests)),
        ]
        yield Insertion(check, [before, floor, *operands], None, [after, event], kept)

        def pause(here: Pausing) -> list[jax.Array]:
            digest, floor, last_of_large = here.kept
            now = [here.now[results.index(x)] for x in large]
            new_of_large = digests.of(now, None, numbers=COUNTS)
            floor_of_large = floor[..., len(small) :, :]
            is_more = _is_more(new_of_large, last_of_large, floor_of_large).any()

            def ask() -> jax.Array:
                begin, next_turn = here.turns
                at_hand = [self._last(here, x) for x in judge.at_hand]
                digest_of_large = digests.of(now, None)
                all_digests = jnp.concatenate([digest, digest_of_large], axis=-2)
                sent = [begin, next_turn - 1, *here.before, *here.outer, *at_hand]
                return _asked(judge, all_digests, sent, floor)

            is_event = here.happened.any() | is_more
            new_floor = jax.lax.cond(is_event, ask, lambda: floor)
            return [digest, new_floor, new_of_large]

        yield Pause(
            fn=pause,
            event=event,
            every=self._steps_between(),
            kept=[before, floor, of_large],
            outer=self.outer,
        )

    def _first_counts(self, large: Sequence[Atom], digests: _Digests) -> np.ndarray:
        """How many NaNs and infinities large values have before the first step, as far
        as their fills say.
        """
        level = self.level.outer
        assert level is not None
        assert self.level.inside is not None
        starts = self.level.inside.eqn.invars[self.first :]
        counts = np.zeros((*digests.rows, len(large), COUNTS), np.int32)
        for n, x in enumerate(large):
            start = starts[self.level.jaxpr.outvars.index(x)]
            fill = _fill_of(level.jaxpr, start)
            if fill is not None and np.isinf(fill):
                elements = math.prod(x.aval.shape[len(digests.rows) :])
                counts[..., n, 1] = elements
        return counts

    def _last(self, here: Pausing, x: Atom) -> jax.Array:
        """The value of a result of the last step."""
        at = self.level.jaxpr.outvars.index(x)
        if at < len(self.carry):
            return here.now[at]
        rows = here.stacked[at - len(self.carry)]
        return jax.lax.dynamic_index_in_dim(rows, here.row, keepdims=False)

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
        inner = [_work(each.old) for each in jaxprs.inners(eqn)]
        if inner and name == "cond":
            total += max(inner)
        elif inner:
            total += sum(inner) * eqn.params.get("length", 1)
        elif name in _UPDATES:
            total += _bytes(eqn.invars[_UPDATES[name]])
        else:
            arrays = (v for v in eqn.outvars if hasattr(v.aval, "dtype"))
            total += sum(_bytes(v) for v in arrays)
    return total


# --- What is known of a level before it runs ------------------------------------------


def _can_hand_on(eqn: JaxprEquation) -> bool:
    return eqn.primitive.name in COLLECTIVES and any(map(jaxprs.is_float, eqn.invars))


def _given(jaxpr: Jaxpr, read: Iterable[Var]) -> Iterator[Var]:
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


def _is_number(fill: float | None) -> bool:
    return fill is not None and not np.isnan(fill)


_FILLS = "broadcast_in_dim", "convert_element_type", "reshape", "copy"


def _fill_of(jaxpr: Jaxpr, atom: Atom) -> float | None:
    """The real number that all elements of a value are, if the program says so."""
    if tracing.is_literal(atom):
        is_real = np.ndim(atom.val) == 0 and not np.iscomplexobj(atom.val)
        return float(atom.val) if is_real else None
    eqn = next((e for e in jaxpr.eqns if atom in e.outvars), None)
    if eqn is None:
        return None
    if eqn.primitive.name in _FILLS:
        return _fill_of(jaxpr, eqn.invars[0])
    if eqn.primitive.name not in jaxprs.CALLS:
        return None
    (inner,) = jaxprs.inners(eqn)
    result = inner.old.outvars[eqn.outvars.index(atom)]
    found = _fill_of(inner.old, result)
    if found is None and result in inner.old.invars:
        return _fill_of(jaxpr, eqn.invars[inner.old.invars.index(result)])
    return found


# --- On the device --------------------------------------------------------------------


class _Digests:
    """Digests of the values that a loop looks at in each step. Under vmap, the rows of
    a while loop have one each.
    """

    def __init__(self, level: Level, count: int, infs: bool) -> None:
        self.level = level
        self.count = count
        self.infs = infs
        self.rows: tuple[int, ...] = ()
        if level.running is not None:
            self.rows = jaxprs.opened(level.running[0])[0].outvars[0].aval.shape

    def kept(self, numbers: int, count: int | None = None) -> Var:
        """A variable with so many numbers of each value."""
        count = self.count if count is None else count
        shape = *self.rows, count, numbers
        return fragments.variable(shape, np.dtype(np.int32))

    def flag(self) -> Var:
        return fragments.variable(self.rows, np.dtype(bool))

    def start(self, var: Var, after: Var, at_first: np.ndarray | None = None) -> Kept:
        if at_first is None:
            at_first = np.zeros(var.aval.shape, np.int32)
        return Kept(var, fragments.literal(at_first), after)

    def running(self, known: dict[Atom, jax.Array]) -> jax.Array | None:
        """Which rows still run; None: all do."""
        if self.level.running is None:
            return None
        condition, operands = self.level.running
        (goes_on,) = jaxprs.inlined(condition, [known[x] for x in operands])
        return goes_on

    def of(
        self,
        values: Sequence[jax.Array],
        goes_on: jax.Array | None,
        numbers: int = NUMBERS,
    ) -> jax.Array:
        """The digest of these values, or its first numbers; zeros, at little cost, if
        none is bad.
        """
        none = np.zeros((*self.rows, len(values), numbers), np.int32)
        if not values:
            return jnp.asarray(none)

        def digest() -> jax.Array:
            n_axes = len(self.rows)
            return _digest(values, self.infs, goes_on, n_axes)[..., :numbers]

        is_bad = _any_bad(values, self.infs, goes_on)
        return jax.lax.cond(is_bad, digest, lambda: jnp.asarray(none))


def _any_bad(
    values: Sequence[jax.Array], infs: bool, goes_on: jax.Array | None = None
) -> jax.Array:
    """Whether one of these values is bad, in a row that goes on."""
    flags = [_is_bad(x, infs, goes_on) for x in values]
    return functools.reduce(jnp.logical_or, flags)


def _is_bad(x: jax.Array, infs: bool, goes_on: jax.Array | None) -> jax.Array:
    if x.dtype.itemsize == 1:  # some have no infinity to compare with
        x = x.astype(jnp.float32)
    if goes_on is None and x.size and not jnp.iscomplexobj(x):
        # A third of the time of isfinite(x).all() on CPUs. NaN is not below infinity.
        return ~(jnp.abs(x).max() < jnp.inf) if infs else jnp.isnan(x.max())
    bad = ~jnp.isfinite(x) if infs else jnp.isnan(x)
    if goes_on is not None:  # rows that have stopped are not kept
        bad &= of_rows(goes_on, x)
    return bad.any()


def _newly_bad(new: jax.Array, old: jax.Array, infs: bool) -> jax.Array:
    """Whether a carried value has bad elements that were not so before the step."""
    made = jnp.isnan(new) & ~jnp.isnan(old)
    return (made | (jnp.isinf(new) & jnp.isfinite(old) & infs)).any()


def _digest(
    values: Sequence[jax.Array],
    infs: bool,
    goes_on: jax.Array | None = None,
    n_axes: int = 0,
) -> jax.Array:
    """The numbers of each value, or of each row if the first axes are rows."""
    found = []
    for x in values:
        if x.dtype.itemsize == 1:
            x = x.astype(jnp.float32)
        is_nan = jnp.isnan(x)
        is_inf = jnp.isinf(x) & infs
        if goes_on is not None:
            runs = of_rows(goes_on, x)
            is_nan = is_nan & runs
            is_inf = is_inf & runs
        axes = tuple(range(n_axes, x.ndim))
        mixed = _mixed_positions(x.shape[n_axes:])
        kinds = is_nan, is_inf
        counts = [kind.sum(axes, dtype=jnp.int32) for kind in kinds]
        where = [jnp.where(kind, mixed, 0).sum(axes, dtype=jnp.int32) for kind in kinds]
        found.append(jnp.stack([*counts, *where], axis=-1))
    return jnp.stack(found, axis=-2)


def _mixed_positions(shape: tuple[int, ...]) -> jax.Array:
    """A number for each position, such that sums of a few are most often different."""
    n = jax.lax.iota(jnp.uint32, math.prod(shape)) + np.uint32(1)
    n = n * np.uint32(0x9E3779B1)
    n = (n ^ (n >> 15)) * np.uint32(0x85EBCA77)
    n = (n ^ (n >> 13)) * np.uint32(0xC2B2AE3D)
    return jax.lax.bitcast_convert_type(n, jnp.int32).reshape(shape)


def _is_more(digest: jax.Array, before: jax.Array, floor: jax.Array) -> jax.Array:
    """Whether there are more bad values than before, in each row."""
    known = jnp.maximum(before[..., :COUNTS], floor)
    return (digest[..., :COUNTS] > known).any((-2, -1))


def _asked(
    judge: Judge,
    digest: jax.Array,
    operands: Sequence[jax.Array],
    floor: jax.Array | None = None,
) -> jax.Array:
    """Asks about bad values, and hands over these operands if they are not known.

    Returns the counts up to which a loop need not ask in this run.
    """
    counts = jax.ShapeDtypeStruct((*digest.shape[:-1], COUNTS), jnp.int32)
    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    new_floor, is_unknown = hc.call(
        judge.ask, (counts, flag), digest, order="unordered"
    )

    def hand_over() -> None:
        hc.call(judge, None, digest, *operands, order="unordered")

    jax.lax.cond(is_unknown, hand_over, lambda: None)
    return new_floor if floor is None else jnp.maximum(new_floor, floor)
