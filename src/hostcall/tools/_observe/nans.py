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
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall._core.host_code import HostCode
from hostcall._jax import Atom, Jaxpr, JaxprEquation, Var, jaxprs, rewriting
from hostcall._jax.rewriting import Insertion, Level
from hostcall.tools._observe import labels
from hostcall.tools._observe.replay import (
    COLLECTIVES,
    Frame,
    Origin,
    Spot,
    is_bad,
    newly_bad,
    of_rows,
    runs_again,
)

_UPDATES = {  # operand 0 may be changed in place; the index of the operand that is new
    "dynamic_update_slice": 1,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul"), 2),
}
_READS = {"dynamic_slice", "gather"}


def _may_part(level: Level) -> bool:
    """Whether devices may reach this level separately, in their own branch or step.

    What fails there fails one device. Others would wait for it at the next check.
    """
    outwards = reversed(level.around if level.meshes else ())
    inside = itertools.takewhile(lambda e: e.primitive.name != "shard_map", outwards)
    return any(
        eqn.primitive.name in ("while", "cond")
        and COLLECTIVES.isdisjoint(e.primitive.name for e in jaxprs.within(eqn))
        for eqn in inside
    )


def _has_loop(eqn: JaxprEquation) -> bool:
    return any(each.primitive.name in jaxprs.LOOPS for each in jaxprs.within(eqn))


class Nans:
    """Puts the checks into programs."""

    def look(self, level: Level) -> Iterator[Insertion]:
        if _may_part(level):
            return
        if not level.loops:
            made: set[Var] = set()
            for index, eqn in enumerate(level.jaxpr.eqns):
                start = [x for x in eqn.invars if jaxprs.is_float(x) and x in made]
                if start and _has_loop(eqn):
                    yield from _check(level, start, upto=index)
                made |= set(eqn.outvars)
        is_outermost = level.kind in jaxprs.LOOPS and len(level.loops) == 1
        if not level.kind or is_outermost or not runs_again(level.around[-1]):
            yield from _check(level, level.jaxpr.outvars)


def _check(
    level: Level, results: Sequence[Atom], upto: int | None = None
) -> Iterator[Insertion]:
    """Looks at these results of the level's equations up to this one."""
    jaxpr = level.jaxpr.replace(eqns=level.jaxpr.eqns[:upto])
    carried = _carried(level) if upto is None else {}
    buffers, updates, read = _buffers(level, carried)
    own = {*jaxpr.invars, *jaxpr.constvars, *buffers}
    looked_at = [x for x in results if jaxprs.is_float(x) and x not in own]
    looked_at = list(dict.fromkeys([*looked_at, *updates]))
    if not looked_at:
        return
    given = [v for v in _given(jaxpr, read) if v not in buffers]
    condition = level.running[1] if level.running else []
    names = [*looked_at, *given, *level.steps, *condition]
    operands = list(dict.fromkeys(names))
    tell = _Tell(level, jaxpr, tuple(looked_at), tuple(operands))

    def check(*values: jax.Array) -> None:
        known = dict(zip(operands, values, strict=True))
        goes_on = None
        if level.running is not None:
            inputs = [known[x] for x in condition]
            (goes_on,) = jaxprs.inlined(level.running[0], inputs)
        bad = [_bad_in(known[x], goes_on) for x in looked_at]

        def there() -> None:
            new = [
                newly_bad(known[x], known[carried[x]]) if x in carried else is_one
                for x, is_one in zip(looked_at, bad, strict=True)
            ]
            where = functools.reduce(jnp.logical_or, new)
            hc.call(tell, None, *values, where=where, order="unordered")

        if level.meshes:  # all devices make the call, so that they fail together
            there()
        else:
            jax.lax.cond(functools.reduce(jnp.logical_or, bad), there, lambda: None)

    yield Insertion(check, operands, None if upto is None else upto - 1)


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


def _carried(level: Level) -> dict[Atom, Var]:
    """The input of each result that a loop carries to its next step."""
    if level.kind not in jaxprs.LOOPS:
        return {}
    consts, carry = jaxprs.split_of(level.around[-1])
    inputs = level.jaxpr.invars[consts : consts + carry]
    pairs = zip(level.jaxpr.outvars, inputs, strict=False)
    return {result: x for result, x in pairs if isinstance(result, jex.Var)}


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


# --- On the host ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Tell(HostCode):
    """The function of the call, which a program makes if it has a bad value."""

    level: Level
    jaxpr: Jaxpr
    looked_at: tuple[Atom, ...]
    operands: tuple[Var, ...]
    stays = "hc.observe looks at programs of this process only"
    __name__ = "hc.observe(nans=True)"

    def place(self) -> tuple[str, int, str]:
        eqns = [*self.level.around[-1:], *self.jaxpr.eqns]
        places = map(labels.place_of, eqns)
        file, function, line = next(filter(None, places), ("a program", "", 0))
        return file, line, function

    def __call__(self, *values: np.ndarray) -> None:
        with rewriting.not_rewritten(), jax.transfer_guard("allow"):
            self._find(dict(zip(self.operands, values, strict=True)))

    def _find(self, known: dict[Var, np.ndarray]) -> None:
        again = {v for e in self.jaxpr.eqns if runs_again(e) for v in e.outvars}
        computed = again.intersection(self.looked_at)
        given = {v: x for v, x in known.items() if v not in computed}
        spot = Spot(self.level.around, tuple(known[v] for v in self.level.steps))
        frame = Frame(self.jaxpr, spot, given)
        frame.run()
        bad = [v for v in self.looked_at if is_bad(known[v])]
        for origin in filter(None, frame.origins_of(bad)):
            raise FloatingPointError(_text(origin))
        if bad and not any(is_bad(frame.value(v)) for v in bad):
            makers = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
            raise FloatingPointError(_not_again(makers[bad[0]], frame))


def _not_again(eqn: JaxprEquation, frame: Frame) -> str:
    told = labels.steps_of(*frame.spot)
    why = (
        "It was finite when the host ran the equations again, since XLA rounds"
        " otherwise where it fuses them: the cause is near, such as a number close to 0"
        " in a division or a logarithm"
    )
    if frame.skipped:
        why = (
            f"What made it is not known: the host can't run {', '.join(frame.skipped)}"
        )
    return (
        f"hostcall: the result of {eqn.primitive.name} at {labels.line_of(eqn)} is not"
        f" finite{', in ' * bool(told)}{told}. {why}.\n    {labels.text_of(eqn)}"
    )


_LINES_AT_MOST = 12


def _text(origin: Origin) -> str:
    """The text of the error."""
    chain = [origin]
    while chain[-1].before is not None:
        chain.append(chain[-1].before)
    made = chain.pop()
    eqns = *made.spot.around, made.eqn
    direction = "backward" if labels.is_backward(*eqns) else "forward"
    told = [f"{direction} pass", "under vmap" * bool(labels.vmaps_of(*eqns))]
    steps, here = labels.steps_of(*made.spot), hc.current()
    told.append(f"in {steps}" * bool(steps))
    if here is not None and here.mesh_shape:
        told.append(f"on {here.device}")
    at = f" at [{', '.join(map(str, made.element))}]" * bool(made.element)
    lines = [
        f"hostcall: {made.eqn.primitive.name} made the first bad value,"
        f" {made.value:.6g}{at}, from {', '.join(made.operands)}"
        f" ({', '.join(filter(None, told))})",
        *labels.shown(made.eqn),
    ]
    passed = [_told(link) for link in reversed(chain) if labels.place_of(link.eqn)]
    texts = [text for text, _ in itertools.groupby(passed) if text != _told(made)]
    if texts:
        lines.append("  It went on through")
        lines += [f"    {text}" for text in texts[:_LINES_AT_MOST]]
        if len(texts) > _LINES_AT_MOST:
            lines.append(f"    and {len(texts) - _LINES_AT_MOST} more lines")
    return "\n".join(lines)


def _told(link: Origin) -> str:
    backward = labels.is_backward(*link.spot.around, link.eqn)
    text = labels.text_of(link.eqn)
    return f"{labels.line_of(link.eqn)} {'(backward) ' * backward} {text}"
