"""Finds where a bad value comes from, by running equations again on the host.

Each equation is run alone. Each bad element of a result (NaN or infinite) gets a cause,
a number in an array of the value's shape:

    0  nothing before it accounts for it: the equation itself has made it
    1  innocent: it was given, or is an infinity that the program has as a literal
    n  the origin number n of this search

A cause goes on from operands to results. How precisely, depends on the operation:

  * one that works on each element alone hands on the causes of the same element; a
    `select` those of what it has chosen;
  * one that moves or adds up elements is run once more for each cause, with NaN where
    an operand has it and 0 elsewhere: the NaNs of its result show where it has gone;
  * of any other, each bad element of a result may come from each bad operand.

An infinity that was given does not account for a NaN, as in `inf - inf`. A NaN that is
a literal or a constant has no cause: the equation that gets it is named.

Calls and loops are run as a whole, and looked into only if a result of theirs is bad: a
loop, step by step, and only steps with bad values of a new kind equation by equation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._jax import Atom, Jaxpr, JaxprEquation, Var, jaxprs, tracing
from hostcall._jax.places import EqnPath, within_shard

Value: TypeAlias = Any  # of a variable: an array, a number, or typed keys
Causes: TypeAlias = np.ndarray  # of a value's elements
RuleCall: TypeAlias = tuple[np.ndarray | int, ...]  # of the loops around

INNOCENT = 1
_ORIGINS = 2  # the number of the first origin

COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_to_all"),
    *("all_gather", "all_gather_invariant", "reduce_scatter", "ragged_all_to_all"),
    *("all_gather_reduced", "unreduced_psum", "unreduced_reduce_scatter"),
}
# Equations that can't be run again alone, beside those with effects.
_ONCE = COLLECTIVES | {
    *("axis_index", "pvary", "pcast", "pbroadcast", "shard_map", "xla_pmap"),
    *("sharding_constraint", "mesh_cast", "reshard", "device_put", "copy_to_host"),
    *("pallas_call", "ffi_call", "custom_partitioning", "tpu_custom_call"),
    *("pure_callback", "io_callback", "debug_callback"),
    *("rng_bit_generator", "rng_uniform"),
}
# Equations that move elements, or add them up: an element of a result that depends on a
# NaN is NaN.
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


def runs_again(eqn: JaxprEquation) -> bool:
    """Whether the host can run an equation again, and nobody notices."""
    return not eqn.effects and not any(
        inner.primitive.name in _ONCE
        or jaxprs.is_host_call(inner)
        or jaxprs.names_shardings(inner)
        for inner in jaxprs.within(eqn)
    )


def devices_may_part(inside: EqnPath | None) -> bool:
    """Whether devices may reach what is inside of this equation separately, in their
    own branch or step.

    What fails there fails one device. Others would wait for it at the next check.
    """
    around = inside.eqns if inside else ()
    if not any(eqn.primitive.name == "shard_map" for eqn in around):
        return False
    return any(
        eqn.primitive.name in ("while", "cond")
        and COLLECTIVES.isdisjoint(e.primitive.name for e in jaxprs.within(eqn))
        for eqn in within_shard(around)
    )


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
        origins: those that were found, by their numbers minus 2. Those of operands are
            before those of results.
        skipped: equations that the host can't run, with their errors; what follows from
            their results is not known.
    """

    infs: bool = True
    ignores: Callable[[EqnPath], bool] = lambda place: False
    origins: list[Origin] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def bad(self, value: Value) -> np.ndarray:
        """Which elements of a value are bad."""
        if value is None or not _is_float(value):
            return np.zeros((), bool)
        array = np.asarray(value)
        return np.asarray(~np.isfinite(array) if self.infs else np.isnan(array))

    def is_bad(self, value: Value) -> bool:
        return bool(np.any(self.bad(value)))

    def origin(self, cause: int) -> Origin | None:
        return self.origins[cause - _ORIGINS] if cause >= _ORIGINS else None

    def add(self, origin: Origin) -> int:
        if origin.source is None and self.ignores(origin.place):
            return INNOCENT
        self.origins.append(origin)
        return len(self.origins) - 1 + _ORIGINS

    def innocent(self, value: Value, is_constant: bool = False) -> Causes:
        """The causes of a value that was given. A constant may have infinities."""
        bad = self.bad(value)
        if is_constant and bad.any():
            bad = bad & ~np.isnan(np.asarray(value))
        return np.where(bad, INNOCENT, 0)


def _is_float(value: Value) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _stronger(a: Causes, b: Causes) -> Causes:
    """Of two causes the origin, and of two origins the first."""
    both = (a >= _ORIGINS) & (b >= _ORIGINS)
    return np.asarray(np.where(both, np.minimum(a, b), np.maximum(a, b)))


def worst(causes: Iterable[Causes | None]) -> int:
    """The first origin among these causes; else whether one is innocent."""
    numbers_of_each = [
        np.unique(causes_of_value)
        for causes_of_value in causes
        if causes_of_value is not None
    ]
    numbers = np.concatenate([[0], *numbers_of_each])
    origins = numbers[numbers >= _ORIGINS]
    return int(origins.min() if origins.size else numbers.max())


@dataclass
class Frame:
    """Equations that are run again, and what is known of their variables.

    Attributes:
        inside: the place of the equation that they are in.
        steps: those of the loops around.
        values: of variables, as far as they are known.
        causes: of variables that have bad elements.
        from_others: results of collectives whose operands were bad on some device.
    """

    jaxpr: Jaxpr
    inside: EqnPath | None
    steps: RuleCall
    search: Search
    values: dict[Var, Value] = field(default_factory=dict)
    causes: dict[Var, Causes] = field(default_factory=dict)
    from_others: frozenset[Var] = frozenset()

    def run(self) -> None:
        bad = self.search.is_bad
        for eqn in self.jaxpr.eqns:
            place = EqnPath(eqn, self.inside)
            operands = [self.value(atom) for atom in eqn.invars]
            results = [self.values.get(var) for var in eqn.outvars]
            again = runs_again(eqn)
            if again and any(x is None for x in results):
                if any(x is None for x in operands):
                    continue  # it follows from what is not known
                try:
                    results = jaxprs.evaluate(eqn, operands)
                except Exception as error:  # made for another platform, for example
                    self.search.skipped.append(f"{eqn.primitive.name} ({error})")
                    continue
                self.values |= zip(eqn.outvars, results, strict=True)
            if any(map(bad, results)):
                self._find_causes(place, operands, results, again)

    def value(self, atom: Atom) -> Value:
        if tracing.is_literal(atom):
            return np.asarray(atom.val, atom.aval.dtype)  # some are Python's numbers
        return self.values.get(atom)

    def cause(self, atom: Atom) -> Causes | None:
        if tracing.is_literal(atom):
            return self.search.innocent(self.value(atom), is_constant=True)
        return self.causes.get(atom)

    # --- One equation -----------------------------------------------------------------

    def _find_causes(
        self, place: EqnPath, operands: list[Value], results: list[Value], again: bool
    ) -> None:
        eqn = place.eqn
        operand_causes = [self.cause(atom) for atom in eqn.invars]
        is_known = all(x is not None for x in operands)
        is_entered = again and is_known and bool(jaxprs.inners(eqn))
        if is_entered:
            causes_inside = self._inside(place, operands, operand_causes, results)
        for n, (var, result) in enumerate(zip(eqn.outvars, results, strict=True)):
            bad = self.search.bad(result)
            if not bad.any():
                continue
            if again and not is_known:  # of a buffer, left out
                causes = np.asarray(max(worst(operand_causes), INNOCENT))
            elif is_entered:
                causes = causes_inside[n]
            elif again:
                causes = self._handed_on(
                    eqn, operands, operand_causes, n, np.asarray(result)
                )
            else:
                causes = self._of_once(
                    place, var, operands, operand_causes, np.asarray(result)
                )
            causes = np.where(bad, np.broadcast_to(causes, bad.shape), 0)
            self.causes[var] = self._linked(
                place, causes, np.asarray(result), operands, is_entered
            )

    def _linked(
        self,
        place: EqnPath,
        causes: Causes,
        result: np.ndarray,
        operands: list[Value],
        is_entered: bool,
    ) -> Causes:
        """Causes of a result as further links of their chains. Bad elements that have
        none were made here.
        """
        bad = self.search.bad(result)
        new = np.where(causes == INNOCENT, INNOCENT, 0)
        for cause in np.unique(causes[bad]).tolist():
            if cause == INNOCENT:
                continue
            which = bad & (causes == cause)
            if cause >= _ORIGINS and is_entered:  # equations inside are the links
                new = np.where(which, cause, new)
                continue
            nans = which & np.isnan(result)
            first = np.argwhere(nans if nans.any() else which)[0]
            at = tuple(map(int, first))
            texts = [_shown(x, at, result.shape) for x in operands]
            cause_origin = self.search.origin(cause)
            origin = Origin(place, self.steps, cause_origin, at, result[at], texts)
            new = np.where(which, self.search.add(origin), new)
        return new

    def _handed_on(
        self,
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
        if all(
            causes_of_operand is None or not causes_of_operand.any()
            for causes_of_operand in operand_causes
        ):
            return np.zeros(result.shape, int)
        if name == "select_n":
            which = np.broadcast_to(np.asarray(operands[0]), result.shape).astype(int)
            causes = np.zeros(result.shape, int)
            for case, cause in enumerate(operand_causes[1:]):
                if cause is not None:
                    causes = np.where(which == case, cause, causes)
            return causes
        shapes = {np.shape(x) for x in operands} - {()}
        keeps_places = name == "convert_element_type" or jaxprs.is_elementwise(eqn)
        if keeps_places and shapes <= {result.shape}:
            causes = np.zeros(result.shape, int)
            for x, cause in zip(operands, operand_causes, strict=True):
                if cause is not None:
                    causes = _stronger(causes, self._of_element(x, cause, result))
            return causes
        if name in _SPREADS and result.size <= _ELEMENTS_MOST:
            return self._spread(eqn, operands, operand_causes, n, result)
        return self._mixed(operands, operand_causes, result)

    def _of_element(self, x: Value, cause: Causes, result: np.ndarray) -> Causes:
        is_nan = np.isnan(np.asarray(x)) if _is_float(x) else np.False_
        accounts = (cause >= _ORIGINS) | is_nan | ~np.isnan(result)
        return np.where(accounts, cause, 0)

    def _spread(
        self,
        eqn: JaxprEquation,
        operands: list[Value],
        operand_causes: list[Causes | None],
        n: int,
        result: np.ndarray,
    ) -> Causes:
        def reached(masks: list[np.ndarray | None]) -> np.ndarray:
            marked = [
                _marked(x, mask) if _is_float(x) else x
                for x, mask in zip(operands, masks, strict=True)
            ]
            return np.isnan(np.asarray(jaxprs.evaluate(eqn, marked)[n]))

        always = reached([None] * len(operands))  # outside of what is gathered from
        causes = np.zeros(result.shape, int)
        numbers = np.concatenate(
            [np.unique(c) for c in operand_causes if c is not None]
        )
        for number in sorted({*numbers.tolist()} - {0}):
            masks = [
                None if causes_of_operand is None else causes_of_operand == number
                for causes_of_operand in operand_causes
            ]
            touched = reached(masks) & ~always
            if number == INNOCENT and np.isnan(result[touched]).any():
                nans = [
                    m if m is None or not _is_float(x) else m & np.isnan(np.asarray(x))
                    for x, m in zip(operands, masks, strict=True)
                ]
                touched &= ~np.isnan(result) | reached(nans)
            causes = _stronger(causes, np.where(touched, number, 0))
        return causes

    def _mixed(
        self,
        operands: list[Value],
        operand_causes: list[Causes | None],
        result: np.ndarray,
    ) -> Causes:
        cause = worst(operand_causes)
        if cause == INNOCENT and not any(
            causes_of_operand is not None
            and _is_float(x)
            and np.isnan(np.asarray(x)).any()
            for x, causes_of_operand in zip(operands, operand_causes, strict=True)
        ):
            return np.where(np.isnan(result), 0, INNOCENT)
        return np.asarray(cause)

    def _of_once(
        self,
        place: EqnPath,
        var: Var,
        operands: list[Value],
        operand_causes: list[Causes | None],
        result: np.ndarray,
    ) -> Causes:
        """The causes of a result that the device has handed over."""
        if jaxprs.inners(place.eqn):
            # Where what is inside has been looked at, it has told what it made.
            cause = worst(operand_causes)
            if cause >= _ORIGINS or not devices_may_part(place):
                return np.asarray(max(cause, INNOCENT))
            has_infinity = any(map(_is_infinite, _literals(place.eqn)))
            innocent = np.where(np.isnan(result), cause, INNOCENT)
            return innocent if has_infinity else np.asarray(cause)
        if var in self.from_others and not worst(operand_causes):
            return np.asarray(INNOCENT)  # the device that made it tells
        return self._mixed(operands, operand_causes, result)

    # --- Calls, branches and loops ----------------------------------------------------

    def _inside(
        self,
        place: EqnPath,
        operands: list[Value],
        operand_causes: list[Causes | None],
        results: list[Value],
    ) -> list[Causes]:
        """The causes of the results of a call, a branch or a loop."""
        eqn = place.eqn
        inners = jaxprs.inners(place.eqn)
        if eqn.primitive.name in jaxprs.LOOPS:
            return self.in_loop(place, operands, operand_causes, len(results))
        inner = inners[int(operands[0]) if eqn.primitive.name == "cond" else -1]
        values = operands[inner.begin :]
        causes = operand_causes[inner.begin :]
        frame = self._entered(place, inner.jaxpr, values, causes, self.steps)
        result_causes = []
        for atom in frame.jaxpr.outvars:
            cause = frame.cause(atom)
            if frame.value(atom) is None:  # not known: any operand may be the cause
                cause = np.asarray(worst(operand_causes))
            result_causes.append(np.asarray(0) if cause is None else cause)
        return result_causes

    def _entered(
        self,
        place: EqnPath,
        jaxpr: Jaxpr,
        values: Sequence[Value],
        causes: Sequence[Causes | None],
        steps: RuleCall,
    ) -> Frame:
        """The equations of an inner jaxpr, after they were run with these inputs."""
        body, consts = jaxprs.opened(jaxpr)
        frame = Frame(body, place, steps, self.search)
        for var, const in zip(body.constvars, consts, strict=True):
            frame.values[var] = const
            frame.causes[var] = self.search.innocent(const, is_constant=True)
        frame.values |= zip(body.invars, values, strict=True)
        pairs = zip(body.invars, causes, strict=True)
        frame.causes |= {var: cause for var, cause in pairs if cause is not None}
        frame.run()
        return frame

    def in_loop(
        self,
        place: EqnPath,
        operands: list[Value],
        operand_causes: list[Causes | None],
        n_results: int,
        first: int = 0,
        last: int | None = None,
    ) -> list[Causes]:
        """The causes of a loop's results: those of its first step that makes a bad
        value, between these steps.

        `operands` are those of the loop, with what it carries at the first step.
        """
        eqn = place.eqn
        name = place.eqn.primitive.name
        inner = jaxprs.inners(eqn)[-1]
        n_consts, n_carry = jaxprs.split_of(eqn)
        cause_before = worst(operand_causes)
        known_kinds = [np.zeros((), np.uint8)] * n_results
        was_looked_into = False
        all_steps = _scan_steps if name == "scan" else _while_steps
        steps = all_steps(eqn, operands, first)
        if last is not None:
            steps = itertools.islice(steps, last - first + 1)
        for count, (step, values, new) in enumerate(steps):
            carry = values[n_consts : n_consts + n_carry]
            kinds = [self._kinds(x) for x in new]
            old = [self._kinds(x) for x in carry] + known_kinds[n_carry:]
            is_known = [
                not np.any(kind & ~(past | known))
                for kind, past, known in zip(kinds, old, known_kinds, strict=True)
            ]
            if all(is_known):
                continue
            causes = operand_causes[inner.begin :]
            if count:  # these were given, or came from the steps before
                bad = [self.search.bad(x) for x in carry]
                now = [np.where(flags, max(cause_before, INNOCENT), 0) for flags in bad]
                causes = [*causes[:n_consts], *now, *causes[n_consts + n_carry :]]
            if name == "scan":
                rows = causes[n_consts + n_carry :]
                # The causes of integers are one number.
                xs = [c[step] if np.ndim(c) else c for c in rows]  # type: ignore[index]
                causes = [*causes[: n_consts + n_carry], *xs]
            around = (*self.steps, step)
            frame = self._entered(place, inner.jaxpr, values, causes, around)
            result_causes = [frame.cause(atom) for atom in frame.jaxpr.outvars]
            result_causes = [np.asarray(0) if c is None else c for c in result_causes]
            bad = [self.search.bad(x) for x in new]  # without rows that have stopped
            result_causes = [
                np.where(b, c, 0) for b, c in zip(bad, result_causes, strict=True)
            ]
            if (first_origin := worst(result_causes)) >= _ORIGINS:
                worst_of_each = [worst([flags]) for flags in result_causes]
                return [
                    np.asarray(c if c >= _ORIGINS else first_origin)
                    for c in worst_of_each
                ]
            if any(
                (b & (c == 0)).any() for b, c in zip(bad, result_causes, strict=True)
            ):
                # A step has handed out a NaN that is a literal, or what it computed
                # from is not known.
                return [np.asarray(0)] * n_results
            was_looked_into = True
            known_kinds = [a | b for a, b in zip(known_kinds, kinds, strict=True)]
        cause = max(cause_before, INNOCENT) if was_looked_into else cause_before
        return [np.asarray(cause)] * n_results

    def _kinds(self, value: Value) -> np.ndarray:
        """For each element a bit if it is NaN, and others if it is infinite."""
        return kinds_of(value, self.search.infs)


def kinds_of(value: Value, infs: bool) -> np.ndarray:
    if value is None or not _is_float(value):
        return np.zeros((), np.uint8)
    array = np.asarray(value)
    nan = np.isnan(array).astype(np.uint8)
    return nan | (np.isinf(array).astype(np.uint8) << 1) if infs else nan


def _marked(x: Value, mask: np.ndarray | None) -> np.ndarray:
    """NaN where the mask is, and 0 elsewhere."""
    marked = np.zeros(np.shape(x), x.dtype)
    if mask is not None:
        marked[...] = np.where(mask, np.nan, 0)
    return marked


def _literals(eqn: JaxprEquation) -> Iterator[Value]:
    for inner in jaxprs.within(eqn):
        for atom in inner.invars:
            if tracing.is_literal(atom):
                yield atom.val


def _is_infinite(value: Value) -> bool:
    try:
        return bool(np.isinf(value).any())
    except TypeError:
        return False


def _shown(x: Value, index: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """An operand, at the bad element of the result if it has this shape."""
    if x is None:
        return "?"
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # typed keys
        return str(x.dtype)
    array = np.asarray(x)
    if array.shape in ((), shape):
        element = array[index if array.shape else ()]
        return f"{element:.6g}" if _is_float(array) else str(element)
    kind = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    if array.size and _is_float(array) and not np.iscomplexobj(array):
        low = float(array.min())
        high = float(array.max())
        return f"{kind} from {low:.6g} to {high:.6g}"
    return kind


# --- Loops ----------------------------------------------------------------------------


# For each step its number, what it gets, and what it makes.
_Steps: TypeAlias = Iterator[tuple[int, list[Value], list[Value]]]


def _scan_steps(eqn: JaxprEquation, operands: list[Value], first: int) -> _Steps:
    n_consts, n_carry = jaxprs.split_of(eqn)
    at = n_consts + n_carry
    length = eqn.params["length"]
    consts = operands[:n_consts]
    carry = operands[n_consts:at]
    xs = operands[at:]
    for turn in range(first, length):
        i = length - 1 - turn if eqn.params["reverse"] else turn
        values = [*consts, *carry, *(x[i] for x in xs)]
        new = jaxprs.run_jaxpr(eqn.params["jaxpr"], values)
        yield i, values, new
        carry = new[:n_carry]


def _while_steps(eqn: JaxprEquation, operands: list[Value], first: int) -> _Steps:
    n_cond = eqn.params["cond_nconsts"]
    n_body = eqn.params["body_nconsts"]
    tests = operands[:n_cond]
    consts = operands[n_cond : n_cond + n_body]
    carry = operands[n_cond + n_body :]
    for step in itertools.count(first):
        (goes_on,) = jaxprs.run_jaxpr(eqn.params["cond_jaxpr"], [*tests, *carry])
        if not np.any(goes_on):
            return
        values = [*consts, *carry]
        new = jaxprs.run_jaxpr(eqn.params["body_jaxpr"], values)
        if goes_on.shape:  # rows that have stopped stay as they are
            pairs = zip(new, carry, strict=True)
            new = [jnp.where(of_rows(goes_on, a), a, b) for a, b in pairs]
        yield step, values, new
        carry = new


def of_rows(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Flags of the rows of x, in a shape that broadcasts to its elements."""
    return flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))
