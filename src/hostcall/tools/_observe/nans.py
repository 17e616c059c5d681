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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall._core.host_code import HostCode
from hostcall._jax import execution, jaxprs
from hostcall._jax.rewriting import Insertion, Level
from hostcall.tools._observe import labels
from hostcall.tools._observe.replay import (
    Frame,
    Origin,
    Spot,
    is_bad,
    newly_bad,
    of_rows,
)

# Equations that can't be run again alone, beside those with effects.
_ONCE = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_to_all"),
    *("all_gather", "all_gather_invariant", "reduce_scatter", "ragged_all_to_all"),
    *("axis_index", "pvary", "pcast", "pbroadcast", "shard_map", "xla_pmap"),
    *("sharding_constraint", "mesh_cast", "reshard", "device_put", "copy_to_host"),
    *("pallas_call", "ffi_call", "custom_partitioning", "tpu_custom_call"),
    *("pure_callback", "io_callback", "debug_callback", "rng_bit_generator"),
}
_UPDATES = {  # operand 0 may be changed in place; the index of the operand that is new
    "dynamic_update_slice": 1,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_max"), 2
    ),
}
_READS = {"dynamic_slice", "gather"}


def _runs_again(eqn: Any) -> bool:
    if eqn.effects or eqn.primitive.name in _ONCE or jaxprs.is_host_call(eqn):
        return False
    return all(_runs_again(e) for j in jaxprs.contained(eqn) for e in j.eqns)


def _has_loop(eqn: Any) -> bool:
    return eqn.primitive.name in jaxprs.LOOPS or any(
        _has_loop(e) for j in jaxprs.contained(eqn) for e in j.eqns
    )


class Nans:
    """Puts the checks into programs."""

    def look(self, level: Level) -> Iterator[Insertion]:
        if not level.loops:
            made: set[Any] = set()
            for index, eqn in enumerate(level.jaxpr.eqns):
                start = [x for x in eqn.invars if jaxprs.is_float(x) and x in made]
                if start and _has_loop(eqn):
                    yield from _check(level, start, upto=index)
                made |= {v for v in eqn.outvars if jaxprs.is_float(v)}
        is_outermost = level.kind in jaxprs.LOOPS and len(level.loops) == 1
        if not level.kind or is_outermost or not _runs_again(level.around[-1]):
            yield from _check(level, level.jaxpr.outvars)


def _check(
    level: Level, results: Sequence[Any], upto: int | None = None
) -> Iterator[Insertion]:
    """Looks at these results of the level's equations up to this one."""
    jaxpr = level.jaxpr
    eqns = jaxpr.eqns if upto is None else jaxpr.eqns[:upto]
    buffers, updates, read = _buffers(level) if upto is None else (set(), [], [])
    own = {*jaxpr.invars, *jaxpr.constvars}
    looked_at = [x for x in results if jaxprs.is_float(x) and x not in {*own, *buffers}]
    looked_at = list(dict.fromkeys([*looked_at, *updates]))
    if not looked_at:
        return
    given = [v for v in _given(jaxpr, eqns, read) if v not in buffers]
    before = dict(_carried(level)) if upto is None else {}
    condition = level.running[1] if level.running else []
    names = [*looked_at, *given, *level.steps, *condition]
    operands = list(dict.fromkeys(x for x in names if isinstance(x, jex.Var)))
    at = {var: i for i, var in enumerate(operands)}
    tell = _Tell(level, jaxpr.replace(eqns=eqns), tuple(looked_at), tuple(operands))

    def check(*values: jax.Array) -> None:
        def value(x: Any) -> Any:
            return x.val if isinstance(x, jex.Literal) else values[at[x]]

        goes_on = None
        if level.running is not None:
            (goes_on,) = jaxprs.inlined(level.running[0], map(value, condition))
        bad = [_bad_in(value(x), goes_on) for x in looked_at]

        def there() -> None:
            new = [
                newly_bad(value(x), value(before[x])) if x in before else is_one
                for x, is_one in zip(looked_at, bad, strict=True)
            ]
            where = functools.reduce(jnp.logical_or, new)
            hc.call(tell, None, *values, where=where, order="unordered")

        if level.meshes:  # all devices make the call, so that they fail together
            there()
        else:
            jax.lax.cond(functools.reduce(jnp.logical_or, bad), there, lambda: None)

    yield Insertion(check, operands, None if upto is None else upto - 1)


def _given(jaxpr: Any, eqns: Sequence[Any], read: Sequence[Any]) -> Iterator[Any]:
    """What the host needs to run these equations again."""
    once = [v for eqn in eqns if not _runs_again(eqn) for v in eqn.outvars]
    for v in dict.fromkeys([*jaxpr.constvars, *jaxpr.invars, *once, *read]):
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


def _carried(level: Level) -> Iterator[tuple[Any, Any]]:
    """(result, input) of each value that a loop carries."""
    if level.kind not in jaxprs.LOOPS:
        return
    consts, carry = jaxprs.split_of(level.around[-1])
    inputs = level.jaxpr.invars[consts : consts + carry]
    for result, before in zip(level.jaxpr.outvars, inputs, strict=False):
        if isinstance(result, jex.Var):
            yield result, before


def _buffers(level: Level) -> tuple[set[Any], list[Any], list[Any]]:
    """Carried values that are only read and updated in place: the variables; the
    updates that can be bad; and what is read.
    """
    uses: dict[Any, list[tuple[Any, int]]] = {}
    for eqn in level.jaxpr.eqns:
        for position, x in enumerate(eqn.invars):
            if isinstance(x, jex.Var):
                uses.setdefault(x, []).append((eqn, position))
    buffers, updates, read = set[Any](), list[Any](), list[Any]()
    for result, start in _carried(level):
        chain, new, old = [start], [], []
        for var in chain:  # which grows
            for eqn, position in uses.get(var, ()):
                name = eqn.primitive.name
                if position == 0 and name in _UPDATES:
                    chain += eqn.outvars
                    new.append(eqn.invars[_UPDATES[name]])
                elif position == 0 and name in _READS:
                    old += eqn.outvars
                else:
                    chain = []
                    break
            if not chain:
                break
        if len(chain) > 1 and result in chain:
            buffers |= set(chain)
            updates += [x for x in new if jaxprs.is_float(x)]
            read += old
    return buffers, updates, read


# --- On the host ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Tell(HostCode):
    """The function of the call, which a program makes if it has a bad value."""

    level: Level
    jaxpr: Any
    looked_at: tuple[Any, ...]
    operands: tuple[Any, ...]
    stays = "hc.observe looks at programs of this process only"
    __name__ = "hc.observe(nans=True)"

    def place(self) -> tuple[str, int, str]:
        eqns = [*self.level.around[-1:], *self.jaxpr.eqns]
        places = map(labels.place_of, eqns)
        place = next((place for place in places if place), ("a program", "", 0))
        return place[0], place[2], place[1]

    def __call__(self, *values: np.ndarray) -> None:
        with execution.rewritten_by({}):
            self._find(values)

    def _find(self, values: tuple[np.ndarray, ...]) -> None:
        known = dict(zip(self.operands, values, strict=True))
        steps = tuple(known[v] for v in self.level.steps)
        seen = {v: known[v] for v in self.looked_at}
        again = {v for e in self.jaxpr.eqns if _runs_again(e) for v in e.outvars}
        given = {v: x for v, x in known.items() if v not in again or v not in seen}
        frame = Frame(self.jaxpr, Spot(self.level.around, steps), given)
        frame.run()
        bad = [v for v, x in seen.items() if is_bad(x)]
        found = [frame.origins[v] for v in bad if v in frame.origins]
        if found:
            raise FloatingPointError(_text(found[0]))
        if bad and not any(is_bad(frame.values[v]) for v in bad if v in frame.values):
            raise FloatingPointError(_not_again(self, bad[0], steps, frame.skipped))


def _not_again(
    tell: _Tell, bad: Any, steps: tuple[Any, ...], skipped: Sequence[str]
) -> str:
    makers = {v: eqn for eqn in tell.jaxpr.eqns for v in eqn.outvars}
    eqn = makers[bad]
    told = labels.steps_of(tell.level.around, steps)
    why = (
        "It was finite when the host ran the equations again, since XLA rounds"
        " otherwise where it fuses them: the cause is near, such as a number close to 0"
        " in a division or a logarithm"
    )
    if skipped:
        why = f"What made it is not known: the host can't run {', '.join(skipped)}"
    return (
        f"hostcall: the result of {eqn.primitive.name} at {labels.line_of(eqn)} is not"
        f" finite{', in ' * bool(told)}{told}. {why}.\n    {labels.text_of(eqn)}"
    )


def _text(origin: Origin) -> str:
    """The text of the error."""
    chain = [origin]
    while chain[-1].before is not None:
        chain.append(chain[-1].before)
    made = chain[-1]
    around, steps = made.spot
    eqns = *around, made.eqn
    told = labels.steps_of(around, steps)
    at = f"[{', '.join(map(str, made.element))}]" if made.element else ""
    here = hc.current()
    shard = ""
    if here is not None and here.mesh_shape:
        shard = f", on {here.device}"
    lines = [
        f"hostcall: {made.eqn.primitive.name} made the first bad value,"
        f" {made.value:.6g}{' at ' * bool(at)}{at}, from {', '.join(made.operands)}"
        f" ({'backward' if labels.is_backward(*eqns) else 'forward'} pass"
        f"{', under vmap' * bool(labels.vmaps_of(*eqns))}"
        f"{', in ' * bool(told)}{told}{shard})",
        *labels.shown(made.eqn),
    ]
    links = [link for link in reversed(chain[:-1]) if labels.place_of(link.eqn)]
    passed = list(map(_told, links))
    passed = [t for i, t in enumerate(passed) if i == 0 or t != passed[i - 1]]
    passed = [t for t in passed if t != _told(made)]
    if passed:
        lines.append("  It went on through")
        lines += [f"    {text}" for text in passed[:_LINES_AT_MOST]]
        if len(passed) > _LINES_AT_MOST:
            lines.append(f"    and {len(passed) - _LINES_AT_MOST} more lines")
    return "\n".join(lines)


_LINES_AT_MOST = 12


def _told(link: Origin) -> str:
    backward = labels.is_backward(*link.spot.around, link.eqn)
    text = labels.text_of(link.eqn)
    return f"{labels.line_of(link.eqn)} {'(backward) ' * backward} {text}"
