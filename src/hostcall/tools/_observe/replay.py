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
from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from hostcall._jax import jaxprs


class Origin(NamedTuple):
    """How a value became bad.

    Attributes:
        eqn: the equation that made it, or handed it on.
        spot: where that is.
        before: the origin of the operand that it was handed; None: it was made here.
        element: the index of the result's first bad element, whose value is `value`.
        operands: what the equation got; at this element if it has one there.
    """

    eqn: Any
    spot: Spot
    before: Origin | None
    element: tuple[int, ...]
    value: Any
    operands: list[str]


class Spot(NamedTuple):
    """A place in a program: the equations around it, and the loops' steps."""

    around: tuple[Any, ...]
    steps: tuple[Any, ...]

    def inside(self, eqn: Any, *step: Any) -> Spot:
        return Spot((*self.around, eqn), (*self.steps, *step))


def is_bad(value: Any) -> bool:
    return _is_float(value) and not np.isfinite(np.asarray(value)).all()


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


@dataclass
class Frame:
    """Equations that are run again, and what is known of their variables.

    Attributes:
        skipped: equations that the host can't run, with their errors; what follows from
            their results is not known.
    """

    jaxpr: Any
    spot: Spot
    values: dict[Any, Any]
    origins: dict[Any, Origin] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def run(self) -> None:
        for eqn in self.jaxpr.eqns:
            operands = [self.value(atom) for atom in eqn.invars]
            results = [self.values.get(var) for var in eqn.outvars]
            if any(x is None for x in results):
                if any(x is None for x in operands):
                    continue  # of a buffer that was left out
                if eqn.effects:
                    continue
                try:
                    results = jaxprs.evaluate(eqn, operands)
                except Exception as error:  # made for another platform, for example
                    self.skipped.append(f"{eqn.primitive.name} ({error})")
                    continue
                self.values |= zip(eqn.outvars, results, strict=True)
            if any(map(is_bad, results)):
                origins = [self.origins.get(x) for x in _keys(eqn.invars)]
                found = self._origins(eqn, operands, origins, results)
                pairs = zip(eqn.outvars, found, strict=True)
                self.origins |= {var: o for var, o in pairs if o is not None}

    def value(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else self.values.get(atom)

    def _origins(
        self, eqn: Any, operands: list[Any], origins: list[Any], results: list[Any]
    ) -> Iterator[Origin | None]:
        """For each result its origin, if it is bad and has one."""
        inside, own = None, list[Origin | None]()
        if all(x is not None for x in operands) and not eqn.effects:
            inside = _INSIDE.get(eqn.primitive.name)
        if inside is not None:
            own = inside(eqn, self.spot, operands, origins)
        known = [origin for origin in own if origin is not None]
        for position, result in enumerate(results):
            if not is_bad(result):
                yield None
            elif known:
                yield own[position] or known[0]
            else:
                yield self._origin(eqn, operands, origins, np.asarray(result))

    def _origin(
        self, eqn: Any, operands: list[Any], origins: list[Any], result: np.ndarray
    ) -> Origin | None:
        is_nan = np.isnan(result)
        index = _first(is_nan if is_nan.any() else ~np.isfinite(result))
        value = result[index]
        chosen = list(range(len(operands)))
        if eqn.primitive.name == "select_n":
            which = np.asarray(operands[0])
            chosen = [1 + int(which[index] if which.shape else which)]
        bad, given_nan = [], False
        for i in chosen:
            x = operands[i]
            if x is None or not _is_float(x):
                continue
            x = np.asarray(x)
            here = x[index] if x.shape == result.shape else x
            whole = eqn.primitive.name in _MOVES and not np.isfinite(x).all()
            if whole or not np.isfinite(here).all():
                bad.append(i)
                given_nan |= bool(np.isnan(x if whole else here).any())
        at = index, value, [_shown(x, index, result.shape) for x in operands]
        bad.sort(key=lambda i: not np.isnan(np.asarray(operands[i])).any())
        for i in bad:
            if origins[i] is not None:
                return Origin(eqn, self.spot, origins[i], *at)
        if bad and (given_nan or not np.isnan(value)):
            return None  # it was given
        return Origin(eqn, self.spot, None, *at)


# Elements of the result are elements of an operand at other places.
_MOVES = {
    *("rev", "transpose", "sort", "roll", "reshape", "gather", "dynamic_slice"),
    *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "dot_general"),
    *("dynamic_update_slice", "scatter", "scatter-add", "concatenate"),
}


def _keys(atoms: Sequence[Any]) -> list[Any]:
    return [None if isinstance(atom, jex.Literal) else atom for atom in atoms]


def _first(flags: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(flags)[0])


def _shown(x: Any, index: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """An operand, at the bad element of the result if it has this shape."""
    if x is None:
        return "?"
    try:
        array = np.asarray(x)
    except TypeError:  # typed keys
        return str(x.dtype)
    if not array.shape:
        return f"{array[()]:.6g}" if _is_float(array) else f"{array[()]}"
    if array.shape == shape:
        return f"{array[index]:.6g}" if _is_float(array) else f"{array[index]}"
    kind = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    if array.size and _is_float(array) and not np.iscomplexobj(array):
        low, high = float(array.min()), float(array.max())
        return f"{kind} from {low:.6g} to {high:.6g}"
    return kind


# --- Calls and loops ------------------------------------------------------------------


def _within(
    jaxpr: Any, spot: Spot, operands: Iterable[Any], origins: Iterable[Any]
) -> list[Origin | None]:
    """The origins of an inner jaxpr's results."""
    inner, consts = jaxprs.opened(jaxpr)
    frame = Frame(inner, spot, dict(zip(inner.constvars, consts, strict=True)))
    frame.values |= zip(inner.invars, operands, strict=True)
    known = zip(inner.invars, origins, strict=True)
    frame.origins |= {var: origin for var, origin in known if origin is not None}
    frame.run()
    return [frame.origins.get(x) for x in _keys(inner.outvars)]


def _of_call(
    eqn: Any, spot: Spot, operands: list[Any], origins: list[Any]
) -> list[Origin | None]:
    return _within(eqn.params[jaxprs.called(eqn)], spot.inside(eqn), operands, origins)


def _of_branch(
    eqn: Any, spot: Spot, operands: list[Any], origins: list[Any]
) -> list[Origin | None]:
    branches = eqn.params["branches"]
    chosen = branches[min(max(int(operands[0]), 0), len(branches) - 1)]
    return _within(chosen, spot.inside(eqn), operands[1:], origins[1:])


def _of_loop(
    eqn: Any, spot: Spot, operands: list[Any], origins: list[Any]
) -> list[Origin | None]:
    """Those of the first step that makes a bad value."""
    steps, skipped, body = _scan_steps, 0, eqn.params.get("jaxpr")
    if eqn.primitive.name == "while":
        steps, skipped = _while_steps, eqn.params["cond_nconsts"]
        body = eqn.params["body_jaxpr"]
    for step, is_new, values in steps(eqn, operands):
        if is_new:
            # Where a step begins with bad values, those came in with the operands.
            found = _within(body, spot.inside(eqn, step), values, origins[skipped:])
            if any(found):
                return found
    return [None] * len(eqn.outvars)


def _scan_steps(eqn: Any, operands: list[Any]) -> Iterator[tuple[int, bool, list[Any]]]:
    """For each step its number, whether it makes a bad value, and what it gets."""
    n_consts, n_carry = jaxprs.split_of(eqn)
    at, order = n_consts + n_carry, range(eqn.params["length"])
    consts, carry, xs = operands[:n_consts], operands[n_consts:at], operands[at:]
    for i in reversed(order) if eqn.params["reverse"] else order:
        values = [*consts, *carry, *(x[i] for x in xs)]
        new = jaxprs.run_jaxpr(eqn.params["jaxpr"], values)
        is_new = _turns_bad(new[:n_carry], carry) or any(map(is_bad, new[n_carry:]))
        yield i, is_new, values
        carry = new[:n_carry]


def _while_steps(
    eqn: Any, operands: list[Any]
) -> Iterator[tuple[int, bool, list[Any]]]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    tests, consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
    carry = operands[n_cond + n_body :]
    for step in itertools.count():
        (goes_on,) = jaxprs.run_jaxpr(eqn.params["cond_jaxpr"], [*tests, *carry])
        if not np.any(goes_on):
            return
        values = [*consts, *carry]
        made = jaxprs.run_jaxpr(eqn.params["body_jaxpr"], values)
        pairs = zip(made, carry, strict=True)
        new = [select_rows(goes_on, a, b) for a, b in pairs]
        yield step, _turns_bad(new, carry), values
        carry = new


def select_rows(goes_on: Any, new: Any, old: Any) -> Any:
    """What a step of a batched loop leaves: rows that have stopped stay as they are."""
    rows = np.asarray(goes_on)
    if not rows.shape:
        return new
    return jnp.where(of_rows(rows, new), new, old)


def of_rows(flags: Any, x: Any) -> Any:
    """Flags of the rows of x, in a shape that broadcasts to its elements."""
    return flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))


def _turns_bad(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return any(is_bad(a) and newly_bad(a, b) for a, b in zip(new, old, strict=True))


def newly_bad(new: Any, old: Any) -> Any:
    """Whether a carried value has bad elements that were not so before the step."""
    made = jnp.isnan(new) & ~jnp.isnan(old)
    return (made | (jnp.isinf(new) & jnp.isfinite(old))).any()


_INSIDE = {
    "cond": _of_branch,
    "scan": _of_loop,
    "while": _of_loop,
    **dict.fromkeys(jaxprs.CALLS, _of_call),
}
