"""Puts equations into programs where they are lowered.

There a program is as it will run: after derivatives, vmap and dead code. Its equations
stay as they are, and those of a function of the caller's are put between them:

    walk    `rewritten` shows each use all levels of a program. A level is a jaxpr: the
            program, the body of a loop, a branch, a function that it calls.
    insert  A use answers with insertions: functions, and the variables that they get.
            Where one of these is the number of a loop's step, the loop gets a counter.
    label   `user_lines.py` says where the user wrote an equation.

Not entered are loops over Refs, conditions of while loops whose rows differ, kernels,
custom calls, and the small functions inside reductions, sorts and scatters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import linear_util as _lu
from jax._src import mesh as _mesh
from jax._src import shard_map as _shard_map
from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.lib.mlir.dialects import sdy as _sdy

from hostcall._jax import types as _t
from hostcall._jax.jaxprs import CALLS, LOOPS, called, split_of
from hostcall._jax.versions import changed, open_jaxpr


@dataclass(frozen=True, eq=False)
class Level:
    """Equations that run one after another.

    Attributes:
        jaxpr: as it is in the program that nobody changed.
        kind: the primitive of the equation around it; "condition" of a while loop's; ""
            of the whole program.
        around: the equations around it, the outermost first.
        steps: for each loop around, the outermost first, the number of its step. In a
            backward pass it is that of the step which is differentiated. Under vmap the
            rows of a while loop have one each.
        running: under vmap, which rows of a while loop still run: (condition, its
            operands). None: all do.
    """

    jaxpr: _t.Jaxpr
    kind: str = ""
    around: tuple[_t.JaxprEquation, ...] = ()
    steps: tuple[_t.Var, ...] = ()
    running: tuple[_t.Jaxpr, list[_t.Atom]] | None = None

    @property
    def loops(self) -> list[_t.JaxprEquation]:
        return [eqn for eqn in self.around if eqn.primitive.name in LOOPS]

    @property
    def meshes(self) -> list[tuple[_t.Mesh, Any]]:
        """The mesh of each shard_map around it, and over which axes it is manual."""
        maps = (e.params for e in self.around if e.primitive.name == "shard_map")
        return [(each["mesh"], each["newly_manual_axes"]) for each in maps]


class Insertion(NamedTuple):
    """Equations to put into a level: those of `fn(*operands)`.

    Attributes:
        after: the index of the equation that they come after; None: at the end.
    """

    fn: Callable[..., None]
    operands: Sequence[_t.Atom]
    after: int | None = None


class Use(Protocol):
    """What someone wants to see of programs."""

    def look(self, level: Level) -> Iterable[Insertion]:
        """What to put into this level. Levels inside it are asked about later."""


def rewritten(jaxpr: _t.Jaxpr, uses: Sequence[Use]) -> _t.Jaxpr:
    """The program with what these uses put into it; itself if that is nothing."""
    program = open_jaxpr(jaxpr)
    eqns = _eqns_of(Level(program), uses)
    return jaxpr if eqns is program.eqns else _with(jaxpr, eqns)


# --- Insert ---------------------------------------------------------------------------

# Stands between a program and what is put into it: calls gather what they get, and the
# compiler would let a sharding that they ask for spread back into the program.
_looked_at_p = _core.Primitive("looked_at")
_looked_at_p.def_abstract_eval(lambda aval: aval)


def _lower_looked_at(ctx: _t.LoweringContext, x: _t.Value) -> list[_t.Value]:
    around = ctx.module_context.axis_context
    is_partitioned = isinstance(around, _sharding_impls.ShardingContext)
    if not is_partitioned or around.num_devices == 1:
        return [x]
    forward = _sdy.PropagationDirection.FORWARD
    return [_sdy.PropagationBarrierOp(x, forward).result]


_mlir.register_lowering(_looked_at_p, _lower_looked_at)


def _traced(
    fn: Callable[..., Any], operands: Sequence[_t.Atom]
) -> tuple[list[_t.JaxprEquation], list[_t.Atom]]:
    """The equations of `fn` on these variables, and its results."""

    def flat(*arrays: jax.Array) -> list[jax.Array]:
        return list(fn(*map(_looked_at_p.bind, arrays)) or ())

    avals = [_core.ShapedArray(x.aval.shape, x.aval.dtype) for x in operands]
    names = _core.DebugInfo("observe", "hostcall.observe", None, None)
    wrapped = _lu.wrap_init(flat, debug_info=names)
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(wrapped, avals)
    made = open_jaxpr(jaxpr)
    new: dict[Any, _t.Atom] = dict(zip(made.invars, operands, strict=True))
    for var, const in zip(made.constvars, consts, strict=True):
        new[var] = _core.Literal(np.asarray(const), var.aval)

    def renamed(atom: _t.Atom) -> _t.Atom:
        return atom if isinstance(atom, _core.Literal) else new.get(atom, atom)

    eqns = [e.replace(invars=list(map(renamed, e.invars))) for e in made.eqns]
    return eqns, list(map(renamed, made.outvars))


def _eqns_of(level: Level, uses: Sequence[Use]) -> list[_t.JaxprEquation]:
    """What the equations of a level become; the same list if nothing is put in."""
    old = level.jaxpr.eqns
    after: dict[int, list[_t.JaxprEquation]] = {}
    with contextlib.ExitStack() as stack:
        for mesh, axes in level.meshes:
            stack.enter_context(_shard_map._extend_axis_env(mesh, axes))
            manual = _shard_map._as_manual_mesh(mesh, axes)
            stack.enter_context(_mesh.use_abstract_mesh(manual))
        for fn, operands, at in (i for use in uses for i in use.look(level)):
            at = len(old) - 1 if at is None else at
            after.setdefault(at, []).extend(_traced(fn, operands)[0])
    new = list(after.get(-1, ()))
    for index, eqn in enumerate(old):
        new += [_inside(eqn, level, uses), *after.get(index, ())]
    return old if new == old else new


def _with(jaxpr: _t.Jaxpr, eqns: list[_t.JaxprEquation], **parts: Any) -> _t.Jaxpr:
    """The same with these equations and parts, and the effects that follow."""
    inner = open_jaxpr(jaxpr)
    ends = parts.get("invars", inner.invars), parts.get("outvars", inner.outvars)
    if parts:
        parts["debug_info"] = inner.debug_info.with_unknown_names()
    effects = _pe.make_jaxpr_effects(inner.constvars, *ends, eqns)
    return changed(jaxpr, eqns=eqns, effects=effects, **parts)


# --- Walk -----------------------------------------------------------------------------


@dataclass
class _Inner:
    """A jaxpr in an equation.

    Attributes:
        key: the parameter of the equation that has it.
        begin, at: of the equation's operands, the first that it gets, and the one
            before which further ones are put.
        eqns: what its equations become.
        extra: the further inputs that these use, with the variables around.
    """

    key: str
    jaxpr: _t.Jaxpr
    begin: int
    at: int
    eqns: list[_t.JaxprEquation] = field(default_factory=list)
    extra: dict[_t.Var, _t.Atom] = field(default_factory=dict)

    @property
    def old(self) -> _t.Jaxpr:
        return open_jaxpr(self.jaxpr)


def _inners(eqn: _t.JaxprEquation) -> list[_Inner]:
    """The jaxprs of an equation that are entered; a loop's body is the last."""
    params, n, name = eqn.params, len(eqn.invars), eqn.primitive.name
    if name in (*CALLS, "shard_map"):
        return [_Inner(called(eqn), params[called(eqn)], 0, n)]
    if name == "cond":
        return [_Inner("branches", branch, 1, n) for branch in params["branches"]]
    if any(isinstance(e, _effects.JaxprInputEffect) for e in eqn.effects):
        return []
    if name == "scan":
        return [_Inner("jaxpr", params["jaxpr"], 0, split_of(eqn)[0])]
    if name == "while":
        begin = params["cond_nconsts"]
        body = params["body_jaxpr"], begin, begin + params["body_nconsts"]
        condition = _Inner("cond_jaxpr", params["cond_jaxpr"], 0, begin)
        return [condition, _Inner("body_jaxpr", *body)]
    return []


def _inside(
    eqn: _t.JaxprEquation, level: Level, uses: Sequence[Use]
) -> _t.JaxprEquation:
    """The equation, with its inner levels rewritten."""
    inners, name = _inners(eqn), eqn.primitive.name
    rows = inners[0].old.outvars[0].aval.shape if name == "while" and inners else ()
    step = _core.Var(_core.ShapedArray(rows, np.dtype(np.int32)))
    for inner in inners:
        kind, running = name, None
        outer: dict[_t.Var, _t.Atom] = {_core.Var(v.aval): v for v in level.steps}
        steps = (*outer, step) if name in LOOPS else tuple(outer)
        inner.eqns = inner.old.eqns
        if inner.key == "cond_jaxpr":
            kind = "condition"
            if rows:  # JAX would compute it twice a step
                continue
        elif rows:  # under vmap, they stop one by one
            consts, carry = [], inner.old.invars[inner.at - inner.begin :]
            for x in eqn.invars[: inner.begin]:
                consts.append(x if isinstance(x, _core.Literal) else _core.Var(x.aval))
                outer |= {consts[-1]: x} if consts[-1] is not x else {}
            running = inners[0].jaxpr, [*consts, *carry]
        around = (*level.around, eqn)
        inner.eqns = _eqns_of(Level(inner.old, kind, around, steps, running), uses)
        used = {x for e in inner.eqns for x in e.invars if isinstance(x, _core.Var)}
        inner.extra = {v: x for v, x in outer.items() if v in used}
    if all(inner.eqns is inner.old.eqns for inner in inners):
        return eqn
    return _rebuilt(eqn, inners, step)


def _rebuilt(
    eqn: _t.JaxprEquation, inners: list[_Inner], step: _t.Var
) -> _t.JaxprEquation:
    """The equation with new levels, and what these need: further operands, and if one
    uses the number of the step, a counter in front of what the loop carries.
    """
    is_counted = any(step in e.invars for inner in inners for e in inner.eqns)
    starts, count, nexts = _counter(eqn, step) if is_counted else ([], [], [])
    counter = [step] * is_counted
    operands: list[_t.Atom] = []
    jaxprs, more, done = dict[str, list[_t.Jaxpr]](), dict[str, int](), 0
    for inner in inners:
        key, old, at = inner.key, inner.old, inner.at - inner.begin
        if key not in jaxprs:
            same = [
                x for other in inners if other.key == key for x in other.extra.values()
            ]
            given = list(dict.fromkeys(same))
            operands += [*eqn.invars[done : inner.at], *given]
            jaxprs[key], more[key], done = [], len(given), inner.at
        names = {x: _core.Var(x.aval) for x in given}
        names |= {x: v for v, x in inner.extra.items()}
        invars = [*old.invars[:at], *names.values(), *counter, *old.invars[at:]]
        last = inner is inners[-1]
        eqns, outs = [*inner.eqns, *count * last], [*nexts * last, *old.outvars]
        new = _with(inner.jaxpr, eqns, invars=invars, outvars=outs)
        jaxprs[key].append(new)
    own = {e for some in jaxprs.values() for jaxpr in some for e in jaxpr.effects}
    effects = {e for e in own if not isinstance(e, _effects.JaxprInputEffect)}
    primitive, params = _params(eqn, jaxprs, more, len(counter))
    return eqn.replace(
        primitive=primitive,
        invars=[*operands, *starts, *eqn.invars[done:]],
        outvars=[*(_core.DropVar(v.aval) for v in counter), *eqn.outvars],
        params=params,
        effects={*eqn.effects, *effects},
    )


def _counter(
    eqn: _t.JaxprEquation, step: _t.Var
) -> tuple[list[_t.Atom], list[_t.JaxprEquation], list[_t.Atom]]:
    """The first number of a loop's steps, and how to compute the next."""
    is_reverse = eqn.params.get("reverse", False)
    start = np.full(step.aval.shape, eqn.params["length"] - 1 if is_reverse else 0)
    first = _core.Literal(start.astype(np.int32)[()], step.aval)
    return [first], *_traced(lambda i: [i - 1 if is_reverse else i + 1], [step])


def _params(
    eqn: _t.JaxprEquation,
    jaxprs: dict[str, list[_t.Jaxpr]],
    more: dict[str, int],
    counters: int,
) -> tuple[_t.Primitive, _t.Params]:
    """What an equation is with these jaxprs, which have so many more inputs."""
    new = {
        key: tuple(some) if key == "branches" else some[0]
        for key, some in jaxprs.items()
    }
    if eqn.primitive.name.startswith("custom_"):  # the rules have done their work
        return _core.closed_call_p, {"call_jaxpr": next(iter(new.values()))}
    params, n = {**eqn.params, **new}, next(iter(more.values()))
    longer: dict[str, Any] = {
        "in_shardings": (_sharding_impls.UNSPECIFIED,) * n,
        "in_layouts": (None,) * n,
        "donated_invars": (False,) * n,
        "in_specs": (jax.sharding.PartitionSpec(),) * n,
        "num_consts": n,
        "num_carry": counters,
        "cond_nconsts": n,
        "body_nconsts": more.get("body_jaxpr"),
    }
    params |= {key: params[key] + x for key, x in longer.items() if key in params}
    if "ft_in" in params:  # a scan's since 0.12
        from jax._src import flattree as _ft

        consts, carry, xs = params["ft_in"].unpack()
        results, ys = params["ft_out"].unpack()
        front = _ft.nones(counters)
        params["ft_in"] = _ft.pack(((consts, _ft.nones(n)), (front, carry), xs))
        params["ft_out"] = _ft.pack(((front, results), ys))
    return eqn.primitive, params
