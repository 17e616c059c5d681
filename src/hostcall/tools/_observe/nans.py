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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall._core.errors import ReplacesReport
from hostcall._core.host_code import HostCode
from hostcall._jax import Atom, Jaxpr, JaxprEquation, Var, jaxprs, rewriting, tracing
from hostcall._jax.places import Place
from hostcall._jax.rewriting import Insertion, Level
from hostcall.tools._observe import labels
from hostcall.tools._observe.replay import (
    COLLECTIVES,
    Frame,
    Origin,
    Search,
    Value,
    devices_may_part,
    of_rows,
    runs_again,
    worst,
)

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


class Nans:
    """Puts the checks into programs."""

    def look(self, level: Level) -> Iterator[Insertion]:
        if devices_may_part(level.inside):
            return
        if not level.loops:
            made: set[Var] = set()
            for index, eqn in enumerate(level.jaxpr.eqns):
                start = [x for x in eqn.invars if jaxprs.is_float(x) and x in made]
                if start and _has_loop(eqn):
                    yield from _check(level, start, upto=index)
                made |= set(eqn.outvars)
        is_outermost = level.kind in jaxprs.LOOPS and len(level.loops) == 1
        if level.inside is None or is_outermost or not runs_again(level.inside.eqn):
            yield from _check(level, level.jaxpr.outvars)


def _check(
    level: Level, results: Sequence[Atom], upto: int | None = None
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
    condition = level.running[1] if level.running else []
    axes = tuple(axis for _, manual in level.meshes for axis in manual)
    collectives = [e for e in jaxpr.eqns if _can_hand_on(e)] if axes else []
    sent = [x for eqn in collectives for x in eqn.invars if jaxprs.is_float(x)]
    names = [*looked_at, *given, *level.steps, *condition, *sent]
    operands = list(dict.fromkeys(names))
    tell = _Tell(level, jaxpr, tuple(looked_at), tuple(operands), tuple(collectives))

    def check(*values: jax.Array) -> None:
        known = dict(zip(operands, values, strict=True))
        goes_on = None
        if level.running is not None:
            inputs = [known[x] for x in condition]
            (goes_on,) = jaxprs.inlined(level.running[0], inputs)
        bad = [_bad_in(known[x], goes_on) for x in looked_at]

        def there() -> None:
            new = [
                _newly_bad(known[x], known[carried[x]]) if x in carried else is_one
                for x, is_one in zip(looked_at, bad, strict=True)
            ]
            flags = [functools.reduce(jnp.logical_or, new)]
            if axes:
                flags += [_any_bad(known, eqn.invars) for eqn in collectives]
                somewhere = jax.lax.pmax(jnp.stack(flags).astype(jnp.int32), axes)
                flags = list(somewhere > 0)
            sent = jnp.stack(flags), *values
            hc.call(tell, None, *sent, where=flags[0], order="unordered")

        if axes:  # all devices make the call, so that they fail together
            there()
        else:
            jax.lax.cond(functools.reduce(jnp.logical_or, bad), there, lambda: None)

    yield Insertion(check, operands, None if upto is None else upto - 1)


def _can_hand_on(eqn: JaxprEquation) -> bool:
    return eqn.primitive.name in COLLECTIVES and any(map(jaxprs.is_float, eqn.invars))


def _any_bad(known: dict[Var, jax.Array], atoms: Sequence[Atom]) -> jax.Array:
    bad = [_bad_in(known[x], None) for x in atoms if jaxprs.is_float(x)]
    return functools.reduce(jnp.logical_or, bad)


def _given(jaxpr: Jaxpr, read: Iterable[Var]) -> Iterator[Var]:
    """What the host needs to run these equations again."""
    once = [v for eqn in jaxpr.eqns if not runs_again(eqn) for v in eqn.outvars]
    for v in (*jaxpr.constvars, *jaxpr.invars, *once, *read):
        is_array = isinstance(v.aval, jax.core.ShapedArray)  # or a key
        if is_array and v.aval.dtype != jax.dtypes.float0 and not jaxprs.is_dropped(v):
            yield v


def _bad_in(x: jax.Array, goes_on: jax.Array | None) -> jax.Array:
    if x.dtype.itemsize == 1:  # some have no infinity to compare with
        x = x.astype(jnp.float32)
    if goes_on is None and x.size and not jnp.iscomplexobj(x):
        # A third of the time of isfinite(x).all() on CPUs. NaN is not below infinity.
        return ~(jnp.abs(x).max() < jnp.inf)
    bad = ~jnp.isfinite(x)
    if goes_on is not None:  # rows that have stopped are not kept
        bad &= of_rows(goes_on, x)
    return bad.any()


def _newly_bad(new: jax.Array, old: jax.Array) -> jax.Array:
    """Whether a carried value has bad elements that were not so before the step."""
    made = jnp.isnan(new) & ~jnp.isnan(old)
    return (made | (jnp.isinf(new) & jnp.isfinite(old))).any()


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
class _Tell(HostCode):
    """The function of the call, which a program makes if it has a bad value."""

    level: Level
    jaxpr: Jaxpr
    looked_at: tuple[Atom, ...]
    operands: tuple[Var, ...]
    collectives: tuple[JaxprEquation, ...]
    stays = "hc.observe looks at programs of this process only"
    __name__ = "hc.observe(nans=True)"

    def place(self) -> tuple[str, int, str]:
        inside = [self.level.inside] if self.level.inside else []
        places = [*inside, *self.level.places]
        lines = (place.users_line for place in places)
        line = next(filter(None, lines), None)
        return (line.file, line.line, line.function) if line else ("a program", 0, "")

    def __call__(self, flags: np.ndarray, *values: np.ndarray) -> None:
        """`flags`: for each collective, whether operands are bad on some device. The
        device that has them tells.
        """
        known = dict(zip(self.operands, values, strict=True))
        # The host's own programs make the bad value again, whatever the user's settings
        # say of such values, and have the types that the equations name.
        with (
            rewriting.not_rewritten(),
            jax.transfer_guard("allow"),
            jax.debug_nans(False),
            jax.debug_infs(False),
            jax.enable_x64(True),
        ):
            self._find(known, flags[1:])

    def _find(self, known: dict[Var, Value], flags: np.ndarray) -> None:
        search = Search()
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
        origins = [search.origin(_worst_of(frame, v)) for v in bad]
        chains = [origin.chain for origin in origins if origin is not None]
        if chains:
            first = min(chains, key=lambda chain: search.origins.index(chain[-1]))
            raise BadValue(_text(first))
        if bad and not any(search.is_bad(frame.value(v)) for v in bad):
            at = next(p for p in self.level.places if bad[0] in p.eqn.outvars)
            raise BadValue(_not_again(at, frame))


def _worst_of(frame: Frame, var: Atom) -> int:
    return worst([frame.cause(var)])


def _not_again(place: Place, frame: Frame) -> str:
    told = labels.steps_of(place, frame.steps)
    why = (
        "It was finite when the host ran the equations again, since XLA rounds"
        " otherwise where it fuses them: the cause is near, such as a number close to 0"
        " in a division or a logarithm"
    )
    if skipped := frame.search.skipped:
        why = f"What made it is not known: the host can't run {', '.join(skipped)}"
    return (
        f"hostcall: the result of {place.eqn.primitive.name} at"
        f" {labels.path_of(place)} is not finite{', in ' * bool(told)}{told}."
        f" {why}.\n    {labels.text_of(place)}"
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
