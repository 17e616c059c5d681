"""What a program does to notice bad values: flags and counts, and calls of the host.

All of it is written in the operations of `jax.lax`. Those of `jax.numpy` are functions
that JAX traces, lowers and compiles one by one, in each program that is observed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

import hostcall as hc
from hostcall._jax import Atom, Var, fragments, jaxprs
from hostcall._jax.rewriting import Level, LoopState
from hostcall.tools._observe.verdicts import COUNTS, Judge

NO_FLAGS = np.zeros(1, bool)  # of collectives, where there are no other devices


# --- Of one value ---------------------------------------------------------------------


def _parts(x: jax.Array) -> list[jax.Array]:
    """The real numbers that a value consists of, in a type that has infinities."""
    if np.issubdtype(x.dtype, np.complexfloating):
        return [lax.real(x), lax.imag(x)]
    # Some types of one byte have no infinity to compare with.
    return [lax.convert_element_type(x, np.float32) if x.dtype.itemsize == 1 else x]


def any_of(flags: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(lax.bitwise_or, flags)


def _is_nan(x: jax.Array) -> jax.Array:
    return any_of([lax.ne(part, part) for part in _parts(x)])


def _is_inf(x: jax.Array) -> jax.Array:
    parts = _parts(x)
    return any_of(
        [lax.eq(lax.abs(part), lax.full_like(part, np.inf)) for part in parts]
    )


def _has_any(flags: jax.Array) -> jax.Array:
    return lax.reduce_or(flags, range(flags.ndim))


_TOGETHER = 1 << 18  # bytes of a value that is added to others of its type
_FEW = 1 << 12  # elements that are reduced fast, whatever they are


def any_bad(values: Sequence[jax.Array], infs: bool) -> jax.Array:
    """Whether one of these values has a bad element.

    Values of the same type are put together first, so that each type has one reduction:
    a network, its gradient and the optimizer's moments have the same types.
    """
    groups: dict[object, list[jax.Array]] = {}
    for part in [part for x in values for part in _parts(x)]:
        is_small = part.size * part.dtype.itemsize <= _TOGETHER
        # Types have shardings too, as far as programs say them.
        groups.setdefault(jax.typeof(part) if is_small else object(), []).append(part)
    return any_of([_has_bad(parts, infs) for parts in groups.values()])


def _has_bad(parts: Sequence[jax.Array], infs: bool) -> jax.Array:
    """Whether one of these real values of one type has a bad element."""
    if not infs:
        return _has_any(any_of([lax.ne(part, part) for part in parts]))
    # 0 times any finite number is 0, and a sum keeps a NaN.
    zeros = [lax.mul(part, lax.full_like(part, 0)) for part in parts]
    total = functools.reduce(lax.add, zeros)
    if total.size > _FEW:
        # Half of the time of a reduction of flags on CPUs. A maximum would do as well,
        # but XLA's CPU drops NaNs from those of large arrays.
        total = lax.reduce_sum(total, range(total.ndim))
    return _has_any(lax.ne(total, total))


def newly_bad(new: jax.Array, old: jax.Array, infs: bool) -> jax.Array:
    """Whether a carried value has bad elements that were not so before the step."""
    flags = _is_nan(new) & ~_is_nan(old)
    if infs:
        flags |= _is_inf(new) & ~_is_inf(old) & ~_is_nan(old)
    return _has_any(flags)


def of_rows(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Flags of the rows of x, for all elements of each row."""
    return lax.broadcast_in_dim(flags, x.shape, range(flags.ndim))


def zeros_where(flags: jax.Array, x: jax.Array) -> jax.Array:
    """A value with zeros in the rows that these flags name."""
    return lax.select(of_rows(flags, x), lax.full_like(x, 0), x)


# --- Counts in a loop -----------------------------------------------------------------


def rows_of(level: Level) -> tuple[int, ...]:
    """The axes of rows that a while loop under vmap has in front."""
    if level.running is None:
        return ()
    condition, _ = level.running
    shape: tuple[int, ...] = jaxprs.opened(condition)[0].outvars[0].aval.shape
    return shape


_HALF = (1 << 16) - 1  # the greatest number that half of an integer holds


class BadCounts:
    """How many NaNs and infinities values have in a step of a loop.

    They are arrays of integers: rows x values x (NaNs, infinities).

    Attributes:
        rows: under vmap, the rows of a while loop are counted by themselves.
    """

    def __init__(self, level: Level, infs: bool) -> None:
        self.level = level
        self.infs = infs
        self.rows = rows_of(level)

    def variable(self, n_values: int) -> Var:
        shape = *self.rows, n_values, COUNTS
        return fragments.variable(shape, np.dtype(np.int32))

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
        return [zeros_where(~goes_on, x) for x in values]

    def of_large(self, values: Sequence[jax.Array]) -> jax.Array:
        """The counts of values of which most have nothing bad: these are read once, in
        a branch that is seldom taken twice more.
        """
        none = np.zeros((*self.rows, len(values), COUNTS), np.int32)
        if sum(x.size for x in values) <= _FEW:
            return self.of_small(values)

        def count() -> jax.Array:
            nans = self._of_each([self._number(_is_nan(x)) for x in values])
            if not self.infs:
                return self._in_columns(nans, lax.full_like(nans, 0))
            infs = self._of_each([self._number(_is_inf(x)) for x in values])
            return self._in_columns(nans, infs)

        return lax.cond(
            any_bad(values, self.infs), count, lambda: lax.full_like(none, 0)
        )

    def of_small(self, values: Sequence[jax.Array]) -> jax.Array:
        """The counts of values, without a branch."""
        if not values:
            return lax.full((*self.rows, 0, COUNTS), np.int32(0))
        pairs = [self._nans_and_infs(x) for x in values]
        nans = [n for n, _ in pairs]
        infs = [n for _, n in pairs]
        return self._in_columns(self._of_each(nans), self._of_each(infs))

    def _nans_and_infs(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_nan = _is_nan(x)
        if not self.infs:
            nans = self._number(is_nan)
            return nans, lax.full_like(nans, 0)
        is_inf = _is_inf(x)
        if math.prod(x.shape[len(self.rows) :]) > _HALF:
            return self._number(is_nan), self._number(is_inf)
        # One sum counts both: NaNs in the upper half of a number, infinities in the
        # lower one.
        ones = lax.full_like(is_inf, 1, np.int32)
        zeros = lax.full_like(ones, 0)
        weights = lax.select(is_nan, lax.full_like(ones, 1 << 16), zeros)
        total = self._sum(lax.select(is_inf, ones, weights))
        nans = lax.shift_right_logical(total, lax.full_like(total, 16))
        return nans, lax.bitwise_and(total, lax.full_like(total, _HALF))

    def of_values(
        self, counts: jax.Array, first: int, end: int | None = None
    ) -> jax.Array:
        """The counts of some of the values."""
        return lax.slice_in_dim(counts, first, end, axis=len(self.rows))

    def joined(self, counts: jax.Array, others: jax.Array) -> jax.Array:
        """The counts of these values, and behind them those of others."""
        return lax.concatenate([counts, others], len(self.rows))

    def _sum(self, numbers: jax.Array) -> jax.Array:
        return lax.reduce_sum(numbers, range(len(self.rows), numbers.ndim))

    def _number(self, flags: jax.Array) -> jax.Array:
        return self._sum(lax.convert_element_type(flags, np.int32))

    def _of_each(self, numbers: Sequence[jax.Array]) -> jax.Array:
        """The numbers of all values as one array."""
        column = len(self.rows)
        return lax.concatenate([lax.expand_dims(n, [column]) for n in numbers], column)

    def _in_columns(self, nans: jax.Array, infs: jax.Array) -> jax.Array:
        """The counts as one array, from the numbers of all values."""
        columns = [lax.expand_dims(n, [n.ndim]) for n in (nans, infs)]
        return lax.concatenate(columns, nans.ndim)


def is_more(counts: jax.Array, counts_before: jax.Array, floor: jax.Array) -> jax.Array:
    """Whether there are more bad values than before, in each row."""
    more = lax.gt(counts, lax.max(counts_before, floor))
    return lax.reduce_or(more, [more.ndim - 2, more.ndim - 1])


def any_row(flags: jax.Array) -> jax.Array:
    """Whether one of these rows has more; without rows the flag itself."""
    return _has_any(flags)


# A count that is more than in the step before is marked: it is negative. So one value
# that the loop carries, which one kernel computes, has the counts and the event.


def with_marks(
    counts: jax.Array, counts_before: jax.Array, floor: jax.Array
) -> jax.Array:
    more = lax.gt(counts, lax.max(counts_before, floor))
    return lax.select(more, lax.bitwise_not(counts), counts)


def has_marks(marked: jax.Array) -> jax.Array:
    return _has_any(lax.lt(marked, lax.full_like(marked, 0)))


def without_marks(marked: jax.Array) -> jax.Array:
    return lax.max(marked, lax.bitwise_not(marked))


# --- Calls of the host ----------------------------------------------------------------


def ask(
    judge: Judge,
    looked_at: Sequence[jax.Array],
    operands: Sequence[jax.Array | np.ndarray],
) -> None:
    """Asks whether bad values are known, and if not, hands over these operands."""
    flag = jax.ShapeDtypeStruct((), np.bool_)
    is_unknown = hc.call(judge.ask, flag, *looked_at, order="unordered")
    _hand_over(judge, is_unknown, operands)


def ask_in_loop(
    judge: Judge,
    floor: jax.Array,
    looked_at: Sequence[jax.Array],
    operands: Sequence[jax.Array | np.ndarray],
) -> jax.Array:
    """The same in a loop. Returns the counts up to which it need not ask again."""
    results = floor, jax.ShapeDtypeStruct((), np.bool_)
    new_floor, is_unknown = hc.call(
        judge.ask_in_loop, results, floor, *looked_at, order="unordered"
    )
    _hand_over(judge, is_unknown, operands)
    return new_floor


def _hand_over(
    judge: Judge, is_unknown: jax.Array, operands: Sequence[jax.Array | np.ndarray]
) -> None:
    # Only what is not known is handed over, since that copies all inputs.
    def hand_over() -> None:
        hc.call(judge, None, *operands, order="unordered")

    lax.cond(is_unknown, hand_over, lambda: None)
