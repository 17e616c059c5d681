"""`hc.observe(nans=True)`: looks for bad values, and finds the equation that made them.

What is looked at, on the device, is little: the results of the program, and of each
step of its outermost loops, and what these loops start with. If one is NaN or infinite,
one call hands the inputs of this level to the host, which runs its equations again, one
by one (`replay.py`). So a bad value that reaches no result is no error: a branch of
`where` that is not chosen, for example.

Some equations can't be run again: those with effects, those that communicate, kernels.
Their results are handed to the host too, and what is inside of them is a level of its
own. Two kinds of equations are left out in loops, since what they read and write may be
large and XLA changes it in place: slices of a carried buffer, and updates of it. Their
results and updates are looked at instead of the buffer.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall._core.errors import ReplacesReport
from hostcall._core.host_code import HostCode
from hostcall._jax import Atom, Jaxpr, JaxprEquation, Var, jaxprs, rewriting, tracing
from hostcall._jax.places import Place
from hostcall._jax.rewriting import Insertion, Kept, Level
from hostcall.tools._observe import labels
from hostcall.tools._observe.replay import (
    COLLECTIVES,
    Frame,
    Origin,
    Search,
    Steps,
    Value,
    devices_may_part,
    kinds_of,
    of_rows,
    runs_again,
    worst,
)
from hostcall.tools._progress import drawing

_UPDATES = {  # operand 0 may be changed in place; the index of the operand that is new
    "dynamic_update_slice": 1,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul"), 2),
}
_READS = {"dynamic_slice", "gather"}


def _has_loop(eqn: JaxprEquation) -> bool:
    return any(each.primitive.name in jaxprs.LOOPS for each in jaxprs.within(eqn))


class BadValue(FloatingPointError, ReplacesReport):
    """The error of a bad value, which its users know as a FloatingPointError."""

    def __reduce__(self) -> tuple[type[FloatingPointError], tuple[object, ...]]:
        return FloatingPointError, self.args


BadValue.__name__ = BadValue.__qualname__ = "FloatingPointError"
BadValue.__module__ = "builtins"


class BadRecord(NamedTuple):
    """A bad value and what made it.

    Attributes:
        file, line, function, text: the user's line, and its source text.
        primitive: the name of JAX's operation.
        value, element: the bad value, and its index in the array.
        operands: what the operation got, as texts.
        backward: whether a backward pass made it.
        vmaps: how many vmaps are around it.
        loops: the line of each loop around it, outermost first.
        steps: for each of these, the number of its step.
        device: the device that made it, inside shard_map.
        message: what the error says.
    """

    file: str
    line: int
    function: str
    text: str
    primitive: str
    value: float
    element: tuple[int, ...]
    operands: tuple[str, ...]
    backward: bool
    vmaps: int
    loops: tuple[str, ...]
    steps: tuple[int | np.ndarray, ...]
    device: jax.Device | None
    message: str


OnBad: TypeAlias = "Literal['raise', 'report'] | Callable[[BadRecord], object]"


class Nans:
    """Puts the checks into programs, and does what is to be done with what they find.

    Attributes:
        infs: whether infinities are bad.
        on_bad: "raise", "report", or a function of a `BadRecord`.
    """

    def __init__(self, infs: bool = True, on_bad: OnBad = "raise") -> None:
        self.infs, self.on_bad = infs, on_bad
        self._lock = threading.Lock()  # between devices, and the block's end
        self._times: Counter[str] = Counter()
        self._latest: deque[object] = deque(maxlen=256)

    def found(self, chain: list[Origin]) -> str:
        """Tells of a value, by its way from what made it. Returns the place's name."""
        text = _text(chain)
        if self.on_bad == "raise":
            raise BadValue(text)
        made, here = chain[-1], hc.current()
        name = f"{made.place.eqn.primitive.name} at {labels.path_of(made.place)}"
        name += " (backward)" * made.place.is_backward
        # A bad value that a step has made may be a result of the program too.
        run = None if here is None else (here.run, here.device)
        with self._lock:
            event = run, name, str(_numbers(made.steps))
            is_known = event in self._latest
            self._latest.append(event)
        if is_known:
            return name
        if callable(self.on_bad):
            self.on_bad(_record_of(made, text))
            return name
        if self.count(name) == 1:
            drawing.write_line(text)
        return name

    def count(self, name: str) -> int:
        with self._lock:
            self._times[name] += 1
            return self._times[name]

    def report(self) -> None:
        """Says at the end of a block which places made bad values, how often."""
        with self._lock:
            times, self._times = self._times, Counter()
        if times and self.on_bad == "report":
            told = [f"  {name}: {n}" for name, n in times.most_common()]
            head = "hostcall: hc.observe found bad values made by"
            drawing.write_line("\n".join([head, *told]))

    def look(self, level: Level) -> Iterator[Insertion]:
        if devices_may_part(level.inside):
            return
        if not level.loops:
            made: set[Var] = set()
            for index, eqn in enumerate(level.jaxpr.eqns):
                start = [x for x in eqn.invars if jaxprs.is_float(x) and x in made]
                if start and _has_loop(eqn):
                    yield from _check(level, start, self, upto=index)
                made |= set(eqn.outvars)
        is_outermost = level.kind in jaxprs.LOOPS and len(level.loops) == 1
        if is_outermost and not level.meshes and (every := _steps_between(level)) > 1:
            yield from _in_chunks(level, every, self)
        elif level.inside is None or is_outermost or not runs_again(level.inside.eqn):
            yield from _check(level, level.jaxpr.outvars, self)


def _check(
    level: Level, results: Sequence[Atom], nans: Nans, upto: int | None = None
) -> Iterator[Insertion]:
    """Looks at these results of the level's equations up to this one."""
    jaxpr = level.jaxpr.replace(eqns=level.jaxpr.eqns[:upto])
    carried = _carried(level) if upto is None else {}
    buffers, updates, read = _buffers(level, carried)
    own = {*jaxpr.invars, *jaxpr.constvars, *buffers}
    # XLA's CPU drops a NaN that is compared with other devices' numbers.
    compared = [e for e in jaxpr.eqns if e.primitive.name in ("pmax", "pmin")]
    results = [*results, *(x for eqn in compared for x in eqn.invars)]
    looked_at = [x for x in results if jaxprs.is_float(x) and x not in own]
    looked_at = list(dict.fromkeys([*looked_at, *updates]))
    if not looked_at:
        return
    given = [v for v in _given(jaxpr, read) if v not in buffers]
    axes = tuple(axis for _, manual in level.meshes for axis in manual)
    collectives = [e for e in jaxpr.eqns if _can_hand_on(e)] if axes else []
    sent = [x for eqn in collectives for x in eqn.invars if jaxprs.is_float(x)]
    operands = list(dict.fromkeys([*looked_at, *given, *level.steps, *sent]))
    of = tuple(looked_at), jaxpr, tuple(operands), tuple(collectives)
    tell = _Tell(level, nans, *of)
    at = None if upto is None else upto - 1
    if level.kind in jaxprs.LOOPS and not axes:
        yield _in_each_step(level, looked_at, operands, tell)
        return

    def check(*values: jax.Array) -> None:
        known = dict(zip(operands, values, strict=True))
        bad = [_bad_in(known[x], None, nans.infs) for x in looked_at]

        def there() -> None:
            new = [
                _newly_bad(known[x], known[carried[x]], nans.infs)
                if x in carried
                else is_one
                for x, is_one in zip(looked_at, bad, strict=True)
            ]
            flags = [functools.reduce(jnp.logical_or, new)]
            if axes:
                flags += [_any_bad(known, e.invars, nans.infs) for e in collectives]
                somewhere = jax.lax.pmax(jnp.stack(flags).astype(jnp.int32), axes)
                flags = list(somewhere > 0)
            sent = jnp.stack(flags), *values
            hc.call(tell, None, *sent, where=flags[0], order="unordered")

        if axes:  # all devices make the call, so that they fail together
            there()
        else:
            jax.lax.cond(functools.reduce(jnp.logical_or, bad), there, lambda: None)

    yield Insertion(check, operands, at)


# --- In loops -------------------------------------------------------------------------
#
# What the host has found innocent in a step is most often there in the next one too, as
# the infinities of a mask. So a loop keeps how many NaNs and infinities each value had
# in the last step, and makes the call if there are more.


def _in_each_step(
    level: Level,
    looked_at: Sequence[Atom],
    operands: Sequence[Var],
    tell: _Judge,
    turn: Var | None = None,
    outer: Sequence[Var] = (),
) -> Insertion:
    """Looks at values of each step, or of those in which `turn` is True."""
    condition, infs = level.running[1] if level.running else [], tell.nans.infs
    own = list(dict.fromkeys([*operands, *looked_at, *condition]))
    # Under vmap, the rows of a while loop have counts of their own.
    rows: tuple[int, ...] = ()
    if level.running is not None:
        rows = jaxprs.opened(level.running[0])[0].outvars[0].aval.shape
    shape = *rows, 2 * len(looked_at)
    before = rewriting.variable(shape, np.dtype(np.int32))
    after = rewriting.variable(shape, np.dtype(np.int32))
    start = rewriting.literal(np.zeros(shape, np.int32))
    turns = [turn] if turn is not None else []

    def check(counts: jax.Array, *values: jax.Array) -> list[jax.Array]:
        known = dict(zip([*turns, *own], values, strict=True))
        goes_on = None
        if level.running is not None:
            inputs = [known[x] for x in condition]
            (goes_on,) = jaxprs.inlined(level.running[0], inputs)

        def is_any_bad() -> jax.Array:
            bad = [_bad_in(known[x], goes_on, infs) for x in looked_at]
            return functools.reduce(jnp.logical_or, bad)

        def count() -> jax.Array:
            found = [n for x in looked_at for n in _counts(known[x], goes_on, infs)]
            new = jnp.stack(found, axis=-1)
            sent = [known[x] for x in operands]

            def ask() -> jax.Array:
                shape = jax.ShapeDtypeStruct(new.shape, new.dtype)
                return hc.call(tell, shape, new, *sent, order="unordered")

            return jax.lax.cond((new > counts).any(), ask, lambda: new)

        def look() -> jax.Array:
            return jax.lax.cond(is_any_bad(), count, lambda: jnp.zeros_like(counts))

        if turn is None:
            return [look()]
        return [jax.lax.cond(known[turn], look, lambda: counts)]

    kept = [Kept(before, start, after)]
    return Insertion(check, [before, *turns, *own], None, [after], kept, outer)


def _counts(
    x: jax.Array, goes_on: jax.Array | None, infs: bool
) -> tuple[jax.Array, jax.Array]:
    """How many NaNs and infinities a value has, or each row that still runs."""
    if x.dtype.itemsize == 1:
        x = x.astype(jnp.float32)
    is_nan, is_inf, axes = jnp.isnan(x), jnp.isinf(x) & infs, None
    if goes_on is not None:
        runs, axes = of_rows(goes_on, x), tuple(range(goes_on.ndim, x.ndim))
        is_nan, is_inf = is_nan & runs, is_inf & runs
    return is_nan.sum(axes, dtype=jnp.int32), is_inf.sum(axes, dtype=jnp.int32)


# A loop's values may be large, and XLA changes them in place. To hand over what a step
# begins with, it would have to copy them in each step. So a copy is made only now and
# then, and the host runs the steps since then again.

_SMALL = 1 << 14  # bytes that may be copied in each step
_STEPS_MOST = 4096


def _steps_between(level: Level) -> int:
    """The steps of a loop for which one copy of its values is made: so many that it
    costs an eighth of what these steps do.
    """
    assert level.inside is not None
    eqn = level.inside.eqn
    carried = sum(_bytes(v) for v in _carry_of(level))
    all_again = all(runs_again(each) for each in level.jaxpr.eqns)
    are_arrays = all(isinstance(v.aval, jax.core.ShapedArray) for v in eqn.invars)
    work = max(_work(level.jaxpr), 1)
    if carried <= max(_SMALL, work) or not (all_again and are_arrays):
        return 1
    if level.running is not None:  # what is kept would be that of each row's last step
        return 1
    return min(8 * math.ceil(carried / work), _STEPS_MOST)


def _carry_of(level: Level) -> list[Var]:
    assert level.inside is not None
    consts, carry = jaxprs.split_of(level.inside.eqn)
    return list(level.jaxpr.invars[consts : consts + carry])


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


def _in_chunks(level: Level, every: int, nans: Nans) -> Iterator[Insertion]:
    """Looks at the results of a loop's steps, with a copy of its values now and then.

    Large values are looked at only when they are copied next: what is bad stays so.
    """
    assert level.inside is not None
    loop, carry = level.inside.eqn, _carry_of(level)
    consts, n_carry = jaxprs.split_of(loop)
    first = len(loop.invars) - n_carry if level.kind == "while" else consts
    starts = loop.invars[first : first + n_carry]
    others = [*loop.invars[:first], *loop.invars[first + n_carry :]]
    outer = list(dict.fromkeys(x for x in others if not tracing.is_literal(x)))
    i32 = np.dtype(np.int32)
    copies = [rewriting.variable(v.aval.shape, v.aval.dtype) for v in carry]
    copied = [rewriting.variable(v.aval.shape, v.aval.dtype) for v in carry]
    since, since_now, step, next_step = (rewriting.variable([], i32) for _ in range(4))
    turn = rewriting.variable([], np.dtype(bool))
    zero = rewriting.literal(np.zeros([], i32))

    def copy(
        step: jax.Array, since: jax.Array, *values: jax.Array
    ) -> Sequence[jax.Array]:
        old, now = values[:n_carry], values[n_carry:]
        is_turn = (step % every == 0) & (step > 0)
        new, at = jax.lax.cond(is_turn, lambda: (now, step), lambda: (old, since))
        # Else XLA would keep the values for the copy while it changes them.
        tied: Sequence[jax.Array] = jax.lax.optimization_barrier((at, *new, *now))
        return tied

    kept = [Kept(since, zero, since_now)]
    kept += [Kept(*each) for each in zip(copies, starts, copied, strict=True)]
    results = [since_now, *copied, *carry]
    yield Insertion(copy, [step, since, *copies, *carry], -1, results, kept)
    count = lambda step: [step + 1, (step + 1) % every == 0]  # noqa: E731
    kept = [Kept(step, zero, next_step)]
    yield Insertion(count, [step], None, [next_step, turn], kept)
    own = {*level.jaxpr.invars, *level.jaxpr.constvars}
    found = [x for x in level.jaxpr.outvars if jaxprs.is_float(x) and x not in own]
    found = list(dict.fromkeys(found))
    are_large = {x: _bytes(x) > max(_SMALL, _work(level.jaxpr) // 2) for x in found}
    for is_large in (False, True):
        some = [x for x in found if are_large[x] == is_large]
        operands = [step, since_now, *copied, *outer]
        if some:
            tell = _TellChunk(
                level, nans, tuple(some), tuple(others), tuple(outer), first
            )
            when = turn if is_large else None
            yield _in_each_step(level, some, [*operands, *some], tell, when, outer)


def _can_hand_on(eqn: JaxprEquation) -> bool:
    return eqn.primitive.name in COLLECTIVES and any(map(jaxprs.is_float, eqn.invars))


def _any_bad(
    known: dict[Var, jax.Array], atoms: Sequence[Atom], infs: bool
) -> jax.Array:
    bad = [_bad_in(known[x], None, infs) for x in atoms if jaxprs.is_float(x)]
    return functools.reduce(jnp.logical_or, bad)


def _given(jaxpr: Jaxpr, read: Iterable[Var]) -> Iterator[Var]:
    """What the host needs to run these equations again."""
    once = [v for eqn in jaxpr.eqns if not runs_again(eqn) for v in eqn.outvars]
    for v in (*jaxpr.constvars, *jaxpr.invars, *once, *read):
        is_array = isinstance(v.aval, jax.core.ShapedArray)  # or a key
        if is_array and v.aval.dtype != jax.dtypes.float0 and not jaxprs.is_dropped(v):
            yield v


def _bad_in(x: jax.Array, goes_on: jax.Array | None, infs: bool) -> jax.Array:
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
    buffers, updates, read = set[Var](), list[Atom](), list[Var]()
    for result, start in carried.items():
        chain, new, old = [start], list[Atom](), list[Var]()
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


def _is_constant(level: Level, atom: Atom) -> bool:
    """Whether a variable has the same value in each run of the program."""
    if tracing.is_literal(atom) or atom in level.jaxpr.constvars:
        return True
    if level.outer is None or level.inside is None:
        return False
    eqn = level.inside.eqn
    inner = next((x for x in jaxprs.inners(eqn) if x.old is level.jaxpr), None)
    if inner is None or atom not in level.jaxpr.invars:
        return False
    at = level.jaxpr.invars.index(atom)
    if level.kind in jaxprs.LOOPS and at >= inner.end - inner.begin:
        return False  # it differs from step to step
    return _is_constant(level.outer, eqn.invars[inner.begin + at])


# --- On the host ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Judge(HostCode):
    """The function of a call that a program makes if it has a bad value.

    Attributes:
        looked_at: the values that the device looks at.
        innocent: for each of them the kinds of bad values that were innocent so far, or
            told of, by their elements.
        told: the names of the places that were told of.
    """

    level: Level
    nans: Nans
    looked_at: tuple[Atom, ...]
    innocent: dict[Atom, np.ndarray] = field(default_factory=dict, init=False)
    told: list[str] = field(default_factory=list, init=False)
    stays = "hc.observe looks at programs of this process only"
    __name__ = "hc.observe(nans=True)"

    def place(self) -> tuple[str, int, str]:
        inside = [self.level.inside] if self.level.inside else []
        places = [*inside, *self.level.places]
        lines = (place.users_line for place in places)
        line = next(filter(None, lines), None)
        return (line.file, line.line, line.function) if line else ("a program", 0, "")

    def judge(self, known: dict[Any, Value], flags: np.ndarray) -> None:
        """Raises an error for what is bad, if that is not known to be innocent."""
        kinds = {v: kinds_of(known[v], self.nans.infs) for v in self.looked_at}
        none = np.zeros((), np.uint8)
        if not flags.any() and not any(
            np.any(kind & ~self.innocent.get(v, none)) for v, kind in kinds.items()
        ):
            for name in self.told:
                self.nans.count(name)
            return
        # The host's own programs make the bad value again, whatever the user's settings
        # say of such values, and have the types that the equations name.
        with (
            rewriting.not_rewritten(),
            jax.transfer_guard("allow"),
            jax.debug_nans(False),
            jax.debug_infs(False),
            jax.enable_x64(True),
        ):
            self.find(known, flags)
        for v, kind in kinds.items():
            self.innocent[v] = self.innocent.get(v, none) | kind

    def find(self, known: dict[Any, Value], flags: np.ndarray) -> None:
        raise NotImplementedError

    def tell(self, search: Search, causes: Sequence[int]) -> bool:
        """Tells of the origins of these causes, and whether there are any."""
        origins = [search.origin(cause) for cause in causes]
        chains = [origin.chain for origin in origins if origin is not None]
        chains.sort(key=lambda chain: search.origins.index(chain[-1]))
        for _, same in itertools.groupby(chains, key=lambda chain: id(chain[-1])):
            name = self.nans.found(next(same))
            if name and name not in self.told:
                self.told.append(name)
        return bool(chains)

    def not_again(self, place: Place, steps: Steps, search: Search) -> None:
        """Tells of a bad value whose origin is not found."""
        text = _not_again(place, steps, search)
        if self.nans.on_bad == "raise":
            raise BadValue(text)
        unknown = Origin(place, steps, None, (), np.nan, [])
        if callable(self.nans.on_bad):
            self.nans.on_bad(_record_of(unknown, text))
        else:
            drawing.write_line(text)


@dataclass(frozen=True, eq=False)
class _Tell(_Judge):
    """Judges the equations of a level by its inputs."""

    jaxpr: Jaxpr
    operands: tuple[Var, ...]
    collectives: tuple[JaxprEquation, ...]

    def __call__(self, flags: np.ndarray, *values: np.ndarray) -> np.ndarray | None:
        """`flags`: for each collective, whether operands are bad on some device. The
        device that has them tells. In a loop on one device, counts of bad values, which
        it gets back.
        """
        known = dict(zip(self.operands, values, strict=True))
        is_counted = flags.dtype == np.int32
        self.judge(known, np.zeros(0, bool) if is_counted else flags[1:])
        return flags if is_counted else None

    def find(self, known: dict[Any, Value], flags: np.ndarray) -> None:
        search = Search(self.nans.infs)
        pairs = zip(self.collectives, flags, strict=bool(flags.size))
        sent = [eqn for eqn, is_bad in pairs if is_bad]
        from_others = [v for eqn in sent for v in eqn.outvars]
        steps = tuple(known[v] for v in self.level.steps)
        frame = Frame(
            *(self.jaxpr, self.level.inside, steps, search),
            from_others=frozenset(from_others),
        )
        # What is computed again, or was handed over, gets its cause at its equation.
        computed = {v for eqn in self.jaxpr.eqns for v in eqn.outvars}
        again = {v for e in self.jaxpr.eqns if runs_again(e) for v in e.outvars}
        frame.values |= {
            v: x for v, x in known.items() if v not in again or v not in self.looked_at
        }
        for v in known.keys() - computed:
            is_constant = _is_constant(self.level, v)
            frame.causes[v] = search.innocent(known[v], is_constant)
        frame.run()
        bad = [v for v in self.looked_at if search.is_bad(known[v])]
        # What this device has handed to others may be bad there, and not here.
        bad += [v for e in sent for v in e.invars if search.is_bad(frame.value(v))]
        if self.tell(search, [worst([frame.cause(v)]) for v in bad]):
            return
        if bad and not any(search.is_bad(frame.value(v)) for v in bad):
            at = next(p for p in self.level.places if bad[0] in p.eqn.outvars)
            self.not_again(at, steps, search)


@dataclass(frozen=True, eq=False)
class _TellChunk(_Judge):
    """Judges a step of a loop by running it again from the last copy of its values.

    Attributes:
        others: the operands of the loop beside what it carries.
        outer: those that are variables.
        first: where what it carries is among its operands.
    """

    others: tuple[Atom, ...]
    outer: tuple[Var, ...]
    first: int

    def __call__(self, counts: np.ndarray, *values: np.ndarray) -> np.ndarray:
        n_carry = len(_carry_of(self.level))
        step, since, *rest = values
        known: dict[Any, Value] = {"step": int(step), "since": int(since)}
        known["carry"] = rest[:n_carry]
        names = [*self.outer, *self.looked_at]
        known |= zip(names, rest[n_carry:], strict=True)
        self.judge(known, np.zeros(0, bool))
        return counts

    def find(self, known: dict[Any, Value], flags: np.ndarray) -> None:
        del flags
        assert self.level.outer is not None
        assert self.level.inside is not None
        search = Search(self.nans.infs)
        level, loop = self.level.outer, self.level.inside
        frame = Frame(level.jaxpr, loop.outer, (), search, dict(known))
        for v in self.outer:
            frame.causes[v] = search.innocent(known[v], _is_constant(level, v))
        operands = [frame.value(x) for x in self.others]
        causes = [frame.cause(x) for x in self.others]
        carry = known["carry"]
        operands[self.first : self.first] = carry
        causes[self.first : self.first] = [search.innocent(x) for x in carry]
        n_results, first, last = len(loop.eqn.outvars), known["since"], known["step"]
        found = frame.in_loop(loop, operands, causes, n_results, first, last)
        if self.tell(search, [worst([each]) for each in found]):
            return
        if not any(np.any(each) for each in found):
            body = Place(loop.eqn, loop)
            bad = next(v for v in self.looked_at if search.is_bad(known[v]))
            at = next((p for p in self.level.places if bad in p.eqn.outvars), body)
            self.not_again(at, (last,), search)


def _not_again(place: Place, steps: Steps, search: Search) -> str:
    told = labels.steps_of(place, steps)
    why = (
        "It was finite when the host ran the equations again, since XLA rounds"
        " otherwise where it fuses them: the cause is near, such as a number close to 0"
        " in a division or a logarithm"
    )
    if skipped := search.skipped:
        why = f"What made it is not known: the host can't run {', '.join(skipped)}"
    return (
        f"hostcall: the result of {place.eqn.primitive.name} at"
        f" {labels.path_of(place)} is not finite{', in ' * bool(told)}{told}."
        f" {why}.\n    {labels.text_of(place)}"
    )


def _numbers(steps: Steps) -> Steps:
    return tuple(int(x) if not np.ndim(x) else np.asarray(x) for x in steps)


def _record_of(made: Origin, text: str) -> BadRecord:
    place, here = made.place, hc.current()
    line = place.users_line
    file, function, number = line[:3] if line else ("", "", 0)
    device = here.device if here is not None and here.mesh_shape else None
    return BadRecord(
        file=file,
        line=number,
        function=function,
        text=labels.text_of(place),
        primitive=place.eqn.primitive.name,
        value=made.value,
        element=made.element,
        operands=tuple(made.operands),
        backward=place.is_backward,
        vmaps=place.vmaps,
        loops=tuple(map(labels.line_of, place.loops)),
        steps=_numbers(made.steps),
        device=device,
        message=text,
    )


_LINES_AT_MOST = 12


def _text(chain: list[Origin]) -> str:
    """The text of the error for a chain that ends with what made the value."""
    *passed, made = chain
    place = made.place
    told = ["backward pass" if place.is_backward else "forward pass"]
    told.append("under vmap" * bool(place.vmaps))
    steps, here = labels.steps_of(place, made.steps), hc.current()
    told.append(f"in {steps}" * bool(steps))
    if here is not None and here.mesh_shape:
        told.append(f"on {here.device}")
    at = f" at [{', '.join(map(str, made.element))}]" * bool(made.element)
    got = f", from {', '.join(made.operands)}" * bool(made.operands)
    lines = [
        f"hostcall: {place.eqn.primitive.name} made the first bad value,"
        f" {made.value:.6g}{at}{got} ({', '.join(filter(None, told))})",
        *labels.shown(place),
    ]
    links = [_told(link) for link in reversed(passed) if link.place.lines]
    texts = [text for text, _ in itertools.groupby(links) if text != _told(made)]
    if texts:
        lines.append("  It went on through")
        lines += [f"    {text}" for text in texts[:_LINES_AT_MOST]]
        if len(texts) > _LINES_AT_MOST:
            lines.append(f"    and {len(texts) - _LINES_AT_MOST} more lines")
    return "\n".join(lines)


def _told(link: Origin) -> str:
    backward = "(backward) " * link.place.is_backward
    return f"{labels.path_of(link.place)} {backward} {labels.text_of(link.place)}"
