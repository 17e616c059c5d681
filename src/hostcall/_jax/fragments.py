"""Equations that are made of functions, to stand between a program's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir as _mlir
from jax.interpreters import partial_eval as _pe
from jaxlib.mlir.dialects import sdy as _sdy

from hostcall._jax import types as _t
from hostcall._jax.door import config as _config
from hostcall._jax.door import core as _core
from hostcall._jax.door import linear_util as _lu
from hostcall._jax.versions import open_jaxpr


def variable(shape: Sequence[int], dtype: _t.Dtype) -> _t.Var:
    """A new variable for results of insertions, and for what loops keep."""
    return _core.Var(jax.core.ShapedArray(tuple(shape), dtype))


def same_type(atom: _t.Atom) -> _t.Var:
    """A new variable of the type of another."""
    return _core.Var(atom.aval)


def literal(value: np.ndarray) -> _t.Atom:
    return _core.Literal(value, jax.core.ShapedArray(value.shape, value.dtype))


# Stands between a program and what is put into it: calls gather what they get, and the
# compiler would let a sharding that they ask for spread back into the program.
_looked_at_p = _core.Primitive("looked_at")
_looked_at_p.def_abstract_eval(lambda aval: aval)


def _lower_looked_at(ctx: _t.LoweringContext, x: _t.Value) -> list[_t.Value]:
    around = ctx.module_context.axis_context
    is_partitioned = isinstance(around, _mlir.ShardingContext)
    if not is_partitioned or around.num_devices == 1:
        return [x]
    forward = _sdy.PropagationDirection.FORWARD
    return [_sdy.PropagationBarrierOp(x, forward).result]


_mlir.register_lowering(_looked_at_p, _lower_looked_at)


def traced(
    fn: Callable[..., Sequence[jax.Array] | None],
    operands: Sequence[_t.Atom],
    is_apart: bool = True,
) -> tuple[list[_t.JaxprEquation], list[_t.Atom]]:
    """The equations of `fn` on these variables, and its results.

    `is_apart`: the compiler lets no sharding spread from there into the program.
    """

    def flat(*arrays: jax.Array) -> list[jax.Array]:
        inputs_apart = map(_looked_at_p.bind, arrays) if is_apart else arrays
        return list(fn(*inputs_apart) or ())

    avals = [jax.core.ShapedArray(x.aval.shape, x.aval.dtype) for x in operands]
    names = _core.DebugInfo("observe", "hostcall.observe", None, None)
    wrapped = _lu.wrap_init(flat, debug_info=names)
    # A program may be lowered while another one is traced that computes constants
    # (`jax.ensure_compile_time_eval`). What is put in is no constant.
    with _config.eager_constant_folding(False):
        jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(wrapped, avals)
    traced_jaxpr = open_jaxpr(jaxpr)
    # Where the constants have no variables of their own, they are the first inputs.
    inputs = [*traced_jaxpr.constvars, *traced_jaxpr.invars]
    known = inputs[: len(consts)]
    new: dict[_t.Atom, _t.Atom] = dict(
        zip(inputs[len(consts) :], operands, strict=True)
    )
    for var, const in zip(known, consts, strict=True):
        new[var] = _core.Literal(np.asarray(const), var.aval)

    def renamed(atoms: Sequence[_t.Atom]) -> list[_t.Atom]:
        return [x if isinstance(x, _core.Literal) else new.get(x, x) for x in atoms]

    eqns = [eqn.replace(invars=renamed(eqn.invars)) for eqn in traced_jaxpr.eqns]
    return eqns, renamed(traced_jaxpr.outvars)


def assigned(
    eqns: Sequence[_t.JaxprEquation],
    results: Sequence[_t.Atom],
    variables: Sequence[_t.Var],
) -> list[_t.JaxprEquation]:
    """The equations, with these variables as the names of their first results."""
    results = list(results[: len(variables)])
    # A constant, which no equation makes, gets one.
    constants = [i for i, x in enumerate(results) if isinstance(x, _core.Literal)]
    if constants:
        literals = [results[i] for i in constants]
        copying, copies = traced(lambda *xs: list(map(jnp.copy, xs)), literals, False)
        eqns = [*eqns, *copying]
        for i, copied in zip(constants, copies, strict=True):
            results[i] = copied
    assert all(isinstance(x, _core.Var) for x in results), "an equation makes each"
    names = dict(zip(results, variables, strict=False))

    def new(atoms: Sequence[_t.Atom]) -> list[_t.Atom]:
        return [x if isinstance(x, _core.Literal) else names.get(x, x) for x in atoms]

    return [e.replace(invars=new(e.invars), outvars=new(e.outvars)) for e in eqns]
