"""Causes of bad elements: numbers that say where each of them comes from.

    0  nothing before it accounts for it: the equation itself has made it
    1  innocent: it was given, or is an infinity that the program has as a literal
    n  an origin of a search

The numbers of origins say where their chains have begun: of two numbers, the lesser is
of the chain that began earlier, whichever of the two is longer.

A cause goes on from operands to results. How precisely, depends on the operation:

  * one that works on each element alone hands on the causes of the same element; a
    `select` those of what it has chosen;
  * one that moves or adds up elements is run once more for each cause, with NaN where
    an operand has it and 0 elsewhere: the NaNs of its result show where it has gone;
  * of any other, each bad element of a result may come from each bad operand.

An infinity that was given does not account for a NaN, as in `inf - inf`. A NaN that is
a literal or a constant has no cause: the equation that gets it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from hostcall._jax import JaxprEquation, jaxprs
from hostcall._jax.places import EqnPath
from hostcall.tools._observe import in_numpy
from hostcall.tools._observe.running_again import Value

Causes: TypeAlias = np.ndarray  # of a value's elements
RuleCall: TypeAlias = tuple[np.ndarray | int, ...]  # of the loops around

INNOCENT = 1
# In the number of an origin, the bits above these say at which origin its chain began,
# counted from 1. So each is more than INNOCENT. These bits say which origin it is.
_BITS_OF_ORIGIN = 32
FIRST_ORIGIN = 1 << _BITS_OF_ORIGIN

_SPREADS = {
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "add_any"),
    *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
    *("reduce_window_sum", "reduce_window_max", "reduce_window_min"),
    *("select_and_scatter_add", "select_and_gather_add", "dot_general"),
    *("conv_general_dilated", "ragged_dot", "ragged_dot_general", "fft"),
    *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev"),
    *("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad"),
    *("gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "split"),
    *("scatter_add", "scatter_sub", "scatter_mul", "copy", "copy_p", "tile"),
    *("optimization_barrier", "name", "stack", "unstack"),
}
_ELEMENTS_MOST = 1 << 22  # of a value that is looked at cause by cause


class Origin(NamedTuple):
    """How a value became bad.

    Attributes:
        place: the equation that made it, or handed it on.
        steps: those of the loops around it.
        source: the origin of the operand that it was handed; None: it was made here.
        element: the index of the result's first such element, whose value is `value`.
        operands: what the equation got; at this element if it has one there.
    """

    place: EqnPath
    steps: RuleCall
    source: Origin | None
    element: tuple[int, ...]
    value: Value
    operands: list[str]

    @property
    def chain(self) -> list[Origin]:
        """The origins from this one back to the equation that made the value."""
        links = [self]
        while links[-1].source is not None:
            links.append(links[-1].source)
        return links


@dataclass
class Search:
    """A search for causes.

    Attributes:
        infs: whether infinities are bad.
        ignores: whether bad values that are made at a place are innocent.
        origins: those that were found. Those of operands are before those of results.
        skipped: equations that the host can't run, with their errors; what follows from
            their results is not known.
    """

    infs: bool = True
    ignores: Callable[[EqnPath], bool] = lambda place: False
    origins: list[Origin] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def bad(self, value: Value) -> np.ndarray:
        """Which elements of a value are bad."""
        if value is None or not is_float(value):
            return np.zeros((), bool)
        array = np.asarray(value)
        return np.asarray(~np.isfinite(array) if self.infs else np.isnan(array))

    def is_bad(self, value: Value) -> bool:
        return bool(np.any(self.bad(value)))

    def origin(self, cause: int) -> Origin | None:
        if cause < FIRST_ORIGIN:
            return None
        return self.origins[cause % FIRST_ORIGIN]

    def add(self, origin: Origin, cause: int) -> int:
        """Adds an origin to the chain of a cause, or begins one if that is 0, and
        returns its number.
        """
        assert (cause >= FIRST_ORIGIN) == (origin.source is not None), "one says both"
        if origin.source is None and self.ignores(origin.place):
            return INNOCENT
        index = len(self.origins)
        self.origins.append(origin)
        chain = cause >> _BITS_OF_ORIGIN if origin.source else index + 1
        return (chain << _BITS_OF_ORIGIN) + index

    def innocent(self, value: Value, is_constant: bool = False) -> Causes:
        """The causes of a value that was given. A constant may have infinities."""
        bad = self.bad(value)
        if is_constant and bad.any():
            bad = bad & ~np.isnan(np.asarray(value))
        return np.where(bad, INNOCENT, 0)


def is_float(value: Value) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def stronger(a: Causes, b: Causes) -> Causes:
    """Of two causes the origin; of two origins that whose chain began first."""
    both = (a >= FIRST_ORIGIN) & (b >= FIRST_ORIGIN)
    return np.asarray(np.where(both, np.minimum(a, b), np.maximum(a, b)))


def worst(causes: Iterable[Causes | None]) -> int:
    """The origin of the chain that began first; else whether a cause is innocent."""
    numbers_of_each = [np.unique(c) for c in causes if c is not None]
    numbers = np.concatenate([[0], *numbers_of_each])
    origins = numbers[numbers >= FIRST_ORIGIN]
    return int(origins.min() if origins.size else numbers.max())


def kinds_of(value: Value, infs: bool) -> np.ndarray:
    """For each element the kinds of bad values that it is: 1 for NaN, 2 for infinite.

    A complex number may be both.
    """
    if value is None or not is_float(value):
        return np.zeros((), np.uint8)
    array = np.asarray(value)
    kinds = np.isnan(array).astype(np.uint8)
    if infs:
        kinds |= np.isinf(array).astype(np.uint8) << 1
    return kinds


# --- One equation ---------------------------------------------------------------------


def handed_on(
    eqn: JaxprEquation,
    operands: list[Value],
    operand_causes: list[Causes | None],
    n: int,
    result: np.ndarray,
) -> Causes:
    """The causes of result number n, as far as operands have them."""
    name = eqn.primitive.name
    if name == "bitcast_convert_type":  # NaNs are numbers among others there
        return np.asarray(max(worst(operand_causes), INNOCENT))
    if not worst(operand_causes):
        return np.zeros(result.shape, int)
    if name == "select_n":
        return _of_chosen(operands[0], operand_causes[1:], result)
    shapes = {np.shape(x) for x in operands} - {()}
    keeps_places = name == "convert_element_type" or jaxprs.is_elementwise(eqn)
    if keeps_places and shapes <= {result.shape}:
        return _of_elements(operands, operand_causes, result)
    if name in _SPREADS and result.size <= _ELEMENTS_MOST:
        return _spread(eqn, operands, operand_causes, n, result)
    return mixed(operands, operand_causes, result)


def _of_chosen(
    which: Value, case_causes: list[Causes | None], result: np.ndarray
) -> Causes:
    """Of a `select`: those of the case that it has chosen for each element."""
    cases = np.broadcast_to(np.asarray(which), result.shape).astype(int)
    causes = np.zeros(result.shape, int)
    for case, causes_of_case in enumerate(case_causes):
        if causes_of_case is not None:
            causes = np.where(cases == case, causes_of_case, causes)
    return causes


def _of_elements(
    operands: list[Value], operand_causes: list[Causes | None], result: np.ndarray
) -> Causes:
    """Of an operation that works on each element alone: those of the same element."""
    causes = np.zeros(result.shape, int)
    for x, causes_of_x in zip(operands, operand_causes, strict=True):
        if causes_of_x is None:
            continue
        # An infinity that was given does not account for a NaN.
        is_nan = np.isnan(np.asarray(x)) if is_float(x) else np.False_
        accounts = (causes_of_x >= FIRST_ORIGIN) | is_nan | ~np.isnan(result)
        causes = stronger(causes, np.where(accounts, causes_of_x, 0))
    return causes


def _spread(
    eqn: JaxprEquation,
    operands: list[Value],
    operand_causes: list[Causes | None],
    n: int,
    result: np.ndarray,
) -> Causes:
    """Of an operation that moves elements or adds them up.

    It is run once more for each cause, with NaN where an operand has this cause, and 0
    elsewhere. NaNs of the result show where the cause has gone.
    """

    def reached_by(masks: list[np.ndarray | None]) -> np.ndarray:
        marked = [
            _marked(x, mask) if is_float(x) else x
            for x, mask in zip(operands, masks, strict=True)
        ]
        return np.isnan(np.asarray(in_numpy.evaluate(eqn, marked)[n]))

    # A gather puts NaN where an index is outside of what it reads.
    always_nan = reached_by([None] * len(operands))
    causes = np.zeros(result.shape, int)
    numbers = np.concatenate([np.unique(c) for c in operand_causes if c is not None])
    for number in sorted({*numbers.tolist()} - {0}):
        masks = [None if c is None else c == number for c in operand_causes]
        reached = reached_by(masks) & ~always_nan
        if number == INNOCENT and np.isnan(result[reached]).any():
            # An infinity that was given does not account for a NaN, but a NaN does.
            nans = [
                m if m is None or not is_float(x) else m & np.isnan(np.asarray(x))
                for x, m in zip(operands, masks, strict=True)
            ]
            reached &= ~np.isnan(result) | reached_by(nans)
        causes = stronger(causes, np.where(reached, number, 0))
    return causes


def _marked(x: Value, mask: np.ndarray | None) -> np.ndarray:
    """NaN where the mask is, and 0 elsewhere."""
    marked = np.zeros(np.shape(x), x.dtype)
    if mask is not None:
        marked[...] = np.where(mask, np.nan, 0)
    return marked


def mixed(
    operands: list[Value],
    operand_causes: list[Causes | None],
    result: np.ndarray,
) -> Causes:
    """Of any other operation: each bad element may come from each bad operand."""
    cause = worst(operand_causes)
    if cause != INNOCENT:
        return np.asarray(cause)
    pairs = zip(operands, operand_causes, strict=True)
    bad_operands = [x for x, causes in pairs if causes is not None and is_float(x)]
    if any(np.isnan(np.asarray(x)).any() for x in bad_operands):
        return np.asarray(INNOCENT)
    # An infinity that was given does not account for a NaN.
    return np.where(np.isnan(result), 0, INNOCENT)
