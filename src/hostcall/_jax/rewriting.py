"""Puts equations into programs where they are lowered.

There a program is as it will run: after derivatives, vmap and dead code. Its equations
stay as they are, and those of a function of the caller's are put between them:

    walk    `rewritten` shows each use all levels of a program. A level is a jaxpr: the
            program, the body of a loop, a branch, a function that it calls.
    insert  A use answers with insertions: functions, and the variables that they get.
            Where one of these is the number of a loop's step, the loop gets a counter.

`user_lines.py` says where the user wrote an equation.

Not entered are conditions of while loops, loops over Refs, kernels, custom calls, and
the small functions inside reductions, sorts and scatters.
"""

from __future__ import annotations

import contextlib
import functools
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
from hostcall._jax.fast_dispatch import ENGINE_CALLS
from hostcall._jax.versions import changed, open_jaxpr

# --- Levels and insertions ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Level:
    """Equations that run one after another.

    Attributes:
        jaxpr: as it is in the program that nobody changed.
        eqn: the equation around it; None: it is the whole program.
        parent: the level of that equation.
        steps: for each loop around, the outermost first, the number of its step. In a
            backward pass it is that of the step which is differentiated. Under vmap the
            rows of a while loop have one each.
        running: under vmap, which rows of a while loop still run: (condition, its
            operands). None: all do.
    """

    jaxpr: _t.Jaxpr
    eqn: _t.JaxprEquation | None = None
    parent: Level | None = None
    steps: tuple[_t.Var, ...] = ()
    running: tuple[_t.Jaxpr, list[_t.Atom]] | None = None
    _within: tuple[Any, ...] = ()
    _outer: dict[_t.Var, _t.Atom] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The primitive of the equation around it; "" of a program."""
        return "" if self.eqn is None else self.eqn.primitive.name

    @property
    def around(self) -> list[_t.JaxprEquation]:
        """The equations around it, the outermost first."""
        if self.parent is None or self.eqn is None:
            return []
        return [*self.parent.around, self.eqn]

    @property
    def loops(self) -> list[_t.JaxprEquation]:
        return [eqn for eqn in self.around if eqn.primitive.name in LOOPS]

    @property
    def is_sharded(self) -> bool:
        """Whether it is inside a shard_map."""
        return bool(self._within)

    def is_backward(self, eqn: _t.JaxprEquation) -> bool:
        """Whether an equation here belongs to a backward pass."""
        stacks = (str(e.source_info.name_stack) for e in (*self.around, eqn))
        return any("transpose(" in stack for stack in stacks)


LOOPS = ("scan", "while")


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
    level = Level(open_jaxpr(jaxpr))
    eqns = _Rewriter(uses).eqns_of(level)
    return jaxpr if eqns is None else _with(jaxpr, eqns)


def contained(eqn: _t.JaxprEquation) -> list[_t.Jaxpr]:
    """The jaxprs in an equation, opened."""
    return [open_jaxpr(each) for each in _core.jaxprs_in_params(eqn.params)]


def evaluate(eqn: _t.JaxprEquation, operands: Sequence[Any]) -> list[Any]:
    """Runs an equation alone, outside of programs."""
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, params = found if isinstance(found, tuple) else ((), found)
    results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def opened(jaxpr: _t.Jaxpr) -> tuple[_t.Jaxpr, Sequence[Any]]:
    """An inner jaxpr, and its constants; remat's and shard_map's have none."""
    inner = open_jaxpr(jaxpr)
    return inner, jaxpr.consts if inner.constvars else ()


def is_array(atom: _t.Atom) -> bool:
    """Whether a variable is an array of numbers, and no key, Ref, token or float0."""
    aval = atom.aval
    if not isinstance(aval, _core.ShapedArray) or aval.dtype == jax.dtypes.float0:
        return False
    return isinstance(aval.dtype, np.dtype)


def is_host_call(eqn: _t.JaxprEquation) -> bool:
    return eqn.primitive in ENGINE_CALLS


def is_dropped(var: _t.Var) -> bool:
    return isinstance(var, _core.DropVar)


def inlined(jaxpr: _t.Jaxpr, operands: Iterable[jax.Array]) -> list[jax.Array]:
    """The results of a jaxpr, in a program that is being traced."""
    return _core.jaxpr_as_fun(jaxpr)(*operands)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)
def _compiled(jaxpr: _t.Jaxpr) -> Callable[..., list[Any]]:
    return jax.jit(_core.jaxpr_as_fun(jaxpr))  # type: ignore[no-any-return]


def run_jaxpr(jaxpr: _t.Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr with its constants, compiled."""
    return _compiled(jaxpr)(*operands)


def split_of(eqn: _t.JaxprEquation) -> tuple[int, int]:
    """How many constants and carried values a scan has, or a while loop's body."""
    params = eqn.params
    if eqn.primitive.name == "while":
        consts = params["body_nconsts"]
        return consts, len(eqn.invars) - consts - params["cond_nconsts"]
    if "ft_in" in params:  # since 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


# --- Insert ---------------------------------------------------------------------------


def _with(jaxpr: _t.Jaxpr, eqns: list[_t.JaxprEquation], **parts: Any) -> _t.Jaxpr:
    """The same with these equations and parts, and the effects that follow."""
    inner = open_jaxpr(jaxpr)
    invars, outvars = parts.get("invars", inner.invars), parts.get("outvars")
    ends = inner.constvars, invars, inner.outvars if outvars is None else outvars
    if parts:
        parts["debug_info"] = inner.debug_info.with_unknown_names()
    effects = _pe.make_jaxpr_effects(*ends, eqns)
    return changed(jaxpr, eqns=eqns, effects=effects, **parts)


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
    names = _core.DebugInfo("observe", "hostcall.tools.observe", None, None)
    wrapped = _lu.wrap_init(flat, debug_info=names)
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(wrapped, avals)
    made = open_jaxpr(jaxpr)
    new = dict(zip(made.invars, operands, strict=True))
    for var, const in zip(made.constvars, consts, strict=True):
        new[var] = _core.Literal(np.asarray(const), var.aval)

    def renamed(atom: _t.Atom) -> _t.Atom:
        return atom if isinstance(atom, _core.Literal) else new.get(atom, atom)

    eqns = [e.replace(invars=list(map(renamed, e.invars))) for e in made.eqns]
    return eqns, list(map(renamed, made.outvars))


class _Rewriter:
    def __init__(self, uses: Sequence[Use]) -> None:
        self._uses = uses

    def eqns_of(self, level: Level) -> list[_t.JaxprEquation] | None:
        """The new equations of a level; None if they are the old ones."""
        after: dict[int, list[Insertion]] = {}
        last = len(level.jaxpr.eqns) - 1
        for insertion in (i for use in self._uses for i in use.look(level)):
            at = last if insertion.after is None else insertion.after
            after.setdefault(at, []).append(insertion)
        new: list[_t.JaxprEquation] = []
        for insertion in after.get(-1, ()):
            new += self._eqns(level, insertion.fn, insertion.operands)
        for index, eqn in enumerate(level.jaxpr.eqns):
            new.append(self._inside(eqn, level))
            for insertion in after.get(index, ()):
                new += self._eqns(level, insertion.fn, insertion.operands)
        return None if new == level.jaxpr.eqns else new

    def _eqns(
        self, level: Level, fn: Callable[..., Any], operands: Sequence[_t.Atom]
    ) -> list[_t.JaxprEquation]:
        with contextlib.ExitStack() as stack:
            for mesh, axes in level._within:
                stack.enter_context(_shard_map._extend_axis_env(mesh, axes))
                manual = _shard_map._as_manual_mesh(mesh, axes)
                stack.enter_context(_mesh.use_abstract_mesh(manual))
            return _traced(fn, operands)[0]

    def _inside(self, eqn: _t.JaxprEquation, level: Level) -> _t.JaxprEquation:
        """The equation, with its inner levels rewritten."""
        rule = _RULES.get(eqn.primitive.name)
        effects = (isinstance(e, _effects.JaxprInputEffect) for e in eqn.effects)
        if rule is None or (any(effects) and eqn.primitive.name in LOOPS):
            return eqn
        return rule(self, eqn, level) or eqn

    def enter(
        self, jaxpr: _t.Jaxpr, eqn: _t.JaxprEquation, level: Level, **own: Any
    ) -> _Entered | None:
        """Rewrites an inner level. Of the steps around, it takes those that it uses as
        further inputs.

        `own`: of a loop, its counter `step`, and what Level.running needs.
        """
        outer = {_core.Var(v.aval): v for v in level.steps}
        steps = (*outer, *([own["step"]] if "step" in own else []))
        running = own.get("running")
        if running is not None:
            outer |= running[2]
            running = running[:2]
        within = own.get("within", level._within)
        inner = Level(open_jaxpr(jaxpr), eqn, level, steps, running, within, outer)
        eqns = self.eqns_of(inner)
        if eqns is None:
            return None
        taken: set[_t.Atom | None] = {
            x for e in eqns for x in e.invars if isinstance(x, _core.Var)
        }
        used = {v: x for v, x in outer.items() if v in taken}
        return _Entered(eqns, list(used), list(used.values()), own.get("step") in taken)


class _Entered(NamedTuple):
    """An inner level as it becomes.

    Attributes:
        extra: its further inputs.
        given: what it gets there, in the level around.
        counts: whether it needs its loop's counter.
    """

    eqns: list[_t.JaxprEquation]
    extra: list[_t.Var]
    given: list[_t.Atom]
    counts: bool


def _rebuilt(
    eqn: _t.JaxprEquation,
    inner: Sequence[_t.Jaxpr],
    params: _t.Params,
    invars: Sequence[_t.Atom],
    **changes: Any,
) -> _t.JaxprEquation:
    """An equation with other parameters and operands, and its new levels' effects."""
    new = {e for jaxpr in inner for e in jaxpr.effects}
    own = {e for e in new if not isinstance(e, _effects.JaxprInputEffect)}
    effects = {*eqn.effects, *own}
    return eqn.replace(
        invars=list(invars), params={**params}, effects=effects, **changes
    )


def _call(
    rewriter: _Rewriter, eqn: _t.JaxprEquation, level: Level, **own: Any
) -> _t.JaxprEquation | None:
    """Calls of a function, with and without rules for derivatives; remat."""
    key = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    jaxpr, params = eqn.params[key], eqn.params
    entered = rewriter.enter(jaxpr, eqn, level, **own)
    if entered is None:
        return None
    invars = [*open_jaxpr(jaxpr).invars, *entered.extra]
    new = _with(jaxpr, entered.eqns, invars=invars)
    n, primitive = len(entered.extra), eqn.primitive
    params = {**params, key: new}
    if "in_shardings" in params:
        params["in_shardings"] += (_sharding_impls.UNSPECIFIED,) * n
        params["in_layouts"] += (None,) * n
        params["donated_invars"] += (False,) * n
    elif "in_specs" in params:
        params["in_specs"] += (jax.sharding.PartitionSpec(),) * n
    elif primitive.name.startswith("custom_"):  # the rules have done their work
        primitive, params = _core.closed_call_p, {"call_jaxpr": new}
    operands = [*eqn.invars, *entered.given]
    return _rebuilt(eqn, [new], params, operands, primitive=primitive)


def _in_shards(
    rewriter: _Rewriter, eqn: _t.JaxprEquation, level: Level
) -> _t.JaxprEquation | None:
    here = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    return _call(rewriter, eqn, level, within=(*level._within, here))


def _branches(
    rewriter: _Rewriter, eqn: _t.JaxprEquation, level: Level
) -> _t.JaxprEquation | None:
    branches = eqn.params["branches"]
    entered = [rewriter.enter(branch, eqn, level) for branch in branches]
    if not any(entered):
        return None
    given = list({x: None for e in entered if e for x in e.given})
    new = []
    for branch, e in zip(branches, entered, strict=True):
        names = {x: _core.Var(x.aval) for x in given}
        names |= zip(e.given, e.extra, strict=True) if e else ()
        invars = [*open_jaxpr(branch).invars, *names.values()]
        eqns = e.eqns if e else open_jaxpr(branch).eqns
        new.append(_with(branch, eqns, invars=invars))
    params = {**eqn.params, "branches": tuple(new)}
    return _rebuilt(eqn, new, params, [*eqn.invars, *given])


def _aval(shape: tuple[int, ...]) -> _t.Aval:
    return _core.ShapedArray(shape, np.dtype(np.int32))


def _counted(
    entered: _Entered, step: _t.Var, start: int, by: int
) -> tuple[list[_t.Var], list[_t.Atom], list[_t.Atom], list[_t.JaxprEquation]]:
    """A loop's counter, if it needs one: the variable, its first and next value; and
    the equations of the body.
    """
    if not entered.counts:
        return [], [], [], entered.eqns
    shape = step.aval.shape
    first = np.full(shape, start, np.int32) if shape else np.int32(start)
    count, nexts = _traced(lambda i: [i + by], [step])
    return [step], [_core.Literal(first, step.aval)], nexts, [*entered.eqns, *count]


def _scan(
    rewriter: _Rewriter, eqn: _t.JaxprEquation, level: Level
) -> _t.JaxprEquation | None:
    jaxpr, params, inner = (
        eqn.params["jaxpr"],
        eqn.params,
        open_jaxpr(eqn.params["jaxpr"]),
    )
    step = _core.Var(_aval(()))
    entered = rewriter.enter(jaxpr, eqn, level, step=step)
    if entered is None:
        return None
    reverse, at = params["reverse"], split_of(eqn)[0]
    start = params["length"] - 1 if reverse else 0
    counters, starts, nexts, eqns = _counted(entered, step, start, -1 if reverse else 1)
    front = [*entered.extra, *counters]
    invars = [*inner.invars[:at], *front, *inner.invars[at:]]
    new = _with(jaxpr, eqns, invars=invars, outvars=[*nexts, *inner.outvars])
    operands = [*eqn.invars[:at], *entered.given, *starts, *eqn.invars[at:]]
    results = [*(_core.DropVar(v.aval) for v in counters), *eqn.outvars]
    params = {**params, "jaxpr": new}
    _lengthen(params, len(entered.extra), len(counters))
    return _rebuilt(eqn, [new], params, operands, outvars=results)


def _lengthen(params: _t.Params, consts: int, counters: int) -> None:
    """Tells a scan that it has more constants and, in front, more carried values."""
    if "ft_in" not in params:
        params["num_consts"] += consts
        params["num_carry"] += counters
        return
    from jax._src import flattree as _ft  # since 0.12

    own, carry, xs = params["ft_in"].unpack()
    results, ys = params["ft_out"].unpack()
    more = _ft.nones(counters)
    params["ft_in"] = _ft.pack(((own, _ft.nones(consts)), (more, carry), xs))
    params["ft_out"] = _ft.pack(((more, results), ys))


def _while(
    rewriter: _Rewriter, eqn: _t.JaxprEquation, level: Level
) -> _t.JaxprEquation | None:
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    tests, inner = open_jaxpr(cond), open_jaxpr(body)
    of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    rows = tests.outvars[0].aval.shape  # under vmap, rows stop one by one
    step, running = _core.Var(_aval(rows)), None
    if rows:
        consts = {_core.Var(x.aval): x for x in eqn.invars[:of_cond]}
        running = cond, [*consts, *inner.invars[of_body:]], consts
    entered = rewriter.enter(body, eqn, level, step=step, running=running)
    if entered is None:
        return None
    counters, starts, nexts, eqns = _counted(entered, step, 0, 1)
    if counters:
        unused = [_core.Var(v.aval) for v in counters]
        taken = [*tests.invars[:of_cond], *unused, *tests.invars[of_cond:]]
        cond = _with(cond, tests.eqns, invars=taken)
    front = [*entered.extra, *counters]
    invars = [*inner.invars[:of_body], *front, *inner.invars[of_body:]]
    new = _with(body, eqns, invars=invars, outvars=[*nexts, *inner.outvars])
    at = of_cond + of_body
    operands = [*eqn.invars[:at], *entered.given, *starts, *eqn.invars[at:]]
    results = [*(_core.DropVar(v.aval) for v in counters), *eqn.outvars]
    params = {**eqn.params, "cond_jaxpr": cond, "body_jaxpr": new}
    params["body_nconsts"] += len(entered.extra)
    return _rebuilt(eqn, [new], params, operands, outvars=results)


_Rule = Callable[[_Rewriter, Any, Level], "Any | None"]
_RULES: dict[str, _Rule] = {
    "cond": _branches,
    "scan": _scan,
    "shard_map": _in_shards,
    "while": _while,
    **dict.fromkeys(
        (
            *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"),
            *("custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"),
        ),
        _call,
    ),
}
