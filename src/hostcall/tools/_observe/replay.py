"""Finds where a bad value comes from, by running equations again on the host.

Each equation is run alone, and each bad result (NaN or infinite) gets an origin: that
of a bad operand, or if the operands were finite, the equation itself. An infinity that
the program was given, as a literal or an input, has no origin.

A `where` hands on only what it has chosen: for a result's first bad element, operands
of the same shape are looked at in this element. Calls and loops are run as a whole, and
looked into only if a result of theirs is bad: a loop, step by step until the first bad
one, and only this step equation by equation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from hostcall._jax import Atom, Jaxpr, JaxprEquation, Var, jaxprs

Value: TypeAlias = Any  # of a variable: an array, a number, or typed keys


COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_to_all"),
    *("all_gather", "all_gather_invariant", "reduce_scatter", "ragged_all_to_all"),
}
# Equations that can't be run again alone, beside those with effects.
_ONCE = COLLECTIVES | {
    *("axis_index", "pvary", "pcast", "pbroadcast", "shard_map", "xla_pmap"),
    *("sharding_constraint", "mesh_cast", "reshard", "device_put", "copy_to_host"),
    *("pallas_call", "ffi_call", "custom_partitioning", "tpu_custom_call"),
    *("pure_callback", "io_callback", "debug_callback"),
    *("rng_bit_generator", "rng_uniform"),
}


def runs_again(eqn: JaxprEquation) -> bool:
    """Whether the host can run an equation again, and nobody notices."""
    return not eqn.effects and not any(
        each.primitive.name in _ONCE
        or jaxprs.is_host_call(each)
        or jaxprs.names_shardings(each)
        for each in jaxprs.within(eqn)
    )


class Origin(NamedTuple):
    """How a value became bad.

    Attributes:
        eqn: the equation that made it, or handed it on.
        spot: where that is.
        before: the origin of the operand that it was handed; None: it was made here.
        element: the index of the result's first bad element, whose value is `value`.
        operands: what the equation got; at this element if it has one there.
    """

    eqn: JaxprEquation
    spot: Spot
    before: Origin | None
    element: tuple[int, ...]
    value: Value
    operands: list[str]


class Spot(NamedTuple):
    """A place in a program: the equations around it, and the loops' steps."""

    around: tuple[JaxprEquation, ...]
    steps: tuple[np.ndarray | int, ...]

    def inside(self, eqn: JaxprEquation, *step: int) -> Spot:
        return Spot((*self.around, eqn), (*self.steps, *step))


Origins: TypeAlias = Sequence[Origin | None]


def is_bad(value: Value) -> bool:
    is_known = value is not None and _is_float(value)
    return is_known and not np.isfinite(np.asarray(value)).all()


def _is_float(value: Value) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


@dataclass
class Frame:
    """Equations that are run again, and what is known of their variables.

    Attributes:
        skipped: equations that the host can't run, with their errors; what follows from
            their results is not known.
    """

    jaxpr: Jaxpr
    spot: Spot
    values: dict[Var, Value]
    origins: dict[Var, Origin | None] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def run(self) -> None:
        for eqn in self.jaxpr.eqns:
            operands = [self.value(atom) for atom in eqn.invars]
            results = [self.values.get(var) for var in eqn.outvars]
            # Operands may be of a buffer that was left out.
            again = runs_again(eqn) and all(x is not None for x in operands)
            if again and any(x is None for x in results):
                try:
                    results = jaxprs.evaluate(eqn, operands)
                except Exception as error:  # made for another platform, for example
                    self.skipped.append(f"{eqn.primitive.name} ({error})")
                    continue
                self.values |= zip(eqn.outvars, results, strict=True)
            if not any(map(is_bad, results)):
                continue
            own = self._inside(eqn, operands) if again else []
            for n, (var, result) in enumerate(zip(eqn.outvars, results, strict=True)):
                if is_bad(result) and own:  # without an origin, it was given
                    self.origins[var] = own[n] or next(filter(None, own), None)
                elif is_bad(result):
                    self.origins[var] = self._origin(eqn, np.asarray(result))

    def value(self, atom: Atom) -> Value:
        if isinstance(atom, jex.Literal):
            return np.asarray(atom.val, atom.aval.dtype)  # some are Python's numbers
        return self.values.get(atom)

    def origins_of(self, atoms: Iterable[Atom]) -> Origins:
        return [
            None if isinstance(x, jex.Literal) else self.origins.get(x) for x in atoms
        ]

    def _inside(self, eqn: JaxprEquation, operands: list[Value]) -> Origins:
        """The origins of the results of a call, a branch or a loop; nothing if these
        are not known, or if it is something else.
        """
        inners, name = jaxprs.inners(eqn), eqn.primitive.name
        if not inners:
            return []
        inner = inners[int(operands[0]) if name == "cond" else -1]
        origins = self.origins_of(eqn.invars[inner.begin :])
        steps: _Steps = iter([((), True, operands[inner.begin :])])
        if name in jaxprs.LOOPS:
            steps = (_scan_steps if name == "scan" else _while_steps)(eqn, operands)
        body, consts = jaxprs.opened(inner.jaxpr)
        for step, is_new, values in steps:
            if not is_new:  # the first step that makes a bad value is looked into
                continue
            frame = Frame(body, self.spot.inside(eqn, *step), {})
            frame.values |= zip(body.constvars, consts, strict=True)
            frame.values |= zip(body.invars, values, strict=True)
            # Where a step begins with bad values, those came in with the operands.
            frame.origins |= zip(body.invars, origins, strict=True)
            frame.run()
            is_known = all(frame.value(x) is not None for x in body.outvars)
            found = frame.origins_of(body.outvars) if is_known else []
            if any(found) or name not in jaxprs.LOOPS:
                return found
        return []

    def _origin(self, eqn: JaxprEquation, result: np.ndarray) -> Origin | None:
        operands = [self.value(atom) for atom in eqn.invars]
        is_nan = np.isnan(result)
        bad_ones = np.argwhere(is_nan if is_nan.any() else ~np.isfinite(result))
        index = tuple(map(int, bad_ones[0]))
        value, chosen = result[index], list(range(len(operands)))
        # An element of another operation's result may depend on any of an operand.
        keeps_places = eqn.primitive.name in ("select_n", "convert_element_type")
        keeps_places |= jaxprs.is_elementwise(eqn)
        if eqn.primitive.name == "select_n":
            which = np.asarray(operands[0])
            chosen = [1 + int(which[index] if which.shape else which)]
        bad = []  # whether an operand has no NaN there, and its number
        for i in filter(lambda i: is_bad(operands[i]), chosen):
            x = np.asarray(operands[i])
            if x.shape == result.shape and keeps_places:
                x = x[index]
            if not np.isfinite(x).all():
                bad.append((not np.isnan(x).any(), i))
        at = index, value, [_shown(x, index, result.shape) for x in operands]
        for origin in self.origins_of(eqn.invars[i] for _, i in sorted(bad)):
            if origin is not None:
                return Origin(eqn, self.spot, origin, *at)
        are_bits = eqn.primitive.name == "bitcast_convert_type"
        if are_bits or (
            bad and not (all(no_nan for no_nan, _ in bad) and np.isnan(value))
        ):
            return None  # it was given
        return Origin(eqn, self.spot, None, *at)


def _shown(x: Value, index: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """An operand, at the bad element of the result if it has this shape."""
    if x is None:
        return "?"
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # typed keys
        return str(x.dtype)
    array = np.asarray(x)
    if array.shape in ((), shape):
        one = array[index if array.shape else ()]
        return f"{one:.6g}" if _is_float(array) else str(one)
    kind = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    if array.size and _is_float(array) and not np.iscomplexobj(array):
        low, high = float(array.min()), float(array.max())
        return f"{kind} from {low:.6g} to {high:.6g}"
    return kind


# --- Loops ----------------------------------------------------------------------------


# For each step its number, whether it makes a bad value, and what it gets.
_Steps: TypeAlias = Iterator[tuple[tuple[int, ...], bool, list[Value]]]


def _scan_steps(eqn: JaxprEquation, operands: list[Value]) -> _Steps:
    n_consts, n_carry = jaxprs.split_of(eqn)
    at, order = n_consts + n_carry, range(eqn.params["length"])
    consts, carry, xs = operands[:n_consts], operands[n_consts:at], operands[at:]
    for i in reversed(order) if eqn.params["reverse"] else order:
        values = [*consts, *carry, *(x[i] for x in xs)]
        new = jaxprs.run_jaxpr(eqn.params["jaxpr"], values)
        is_new = _turns_bad(new[:n_carry], carry) or any(map(is_bad, new[n_carry:]))
        yield (i,), is_new, values
        carry = new[:n_carry]


def _while_steps(eqn: JaxprEquation, operands: list[Value]) -> _Steps:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    tests, consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
    carry = operands[n_cond + n_body :]
    for step in itertools.count():
        (goes_on,) = jaxprs.run_jaxpr(eqn.params["cond_jaxpr"], [*tests, *carry])
        if not np.any(goes_on):
            return
        values = [*consts, *carry]
        new = jaxprs.run_jaxpr(eqn.params["body_jaxpr"], values)
        if goes_on.shape:  # rows that have stopped stay as they are
            pairs = zip(new, carry, strict=True)
            new = [jnp.where(of_rows(goes_on, a), a, b) for a, b in pairs]
        yield (step,), _turns_bad(new, carry), values
        carry = new


def of_rows(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Flags of the rows of x, in a shape that broadcasts to its elements."""
    return flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))


def _turns_bad(new: Sequence[Value], old: Sequence[Value]) -> bool:
    return any(is_bad(a) and newly_bad(a, b) for a, b in zip(new, old, strict=True))


def newly_bad(new: Value, old: Value) -> jax.Array:
    """Whether a carried value has bad elements that were not so before the step."""
    made = jnp.isnan(new) & ~jnp.isnan(old)
    return (made | (jnp.isinf(new) & jnp.isfinite(old))).any()
