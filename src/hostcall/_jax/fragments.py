"""Equations that are made of functions, to stand between a program's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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

    Args:
        fn: a function of arrays.
        operands: the variables and literals that it gets.
        is_apart: whether the compiler lets no sharding spread from there into the
            program.
    """

    def flat(*inputs: jax.Array) -> list[jax.Array]:
        if is_apart:
            inputs = tuple([_looked_at_p.bind(array) for array in inputs])
        results = fn(*inputs)
        return [] if results is None else list(results)

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
    literals = [
        _core.Literal(np.asarray(const), var.aval)
        for var, const in zip(inputs[: len(consts)], consts, strict=True)
    ]
    new_names = dict(zip(inputs, [*literals, *operands], strict=True))
    eqns = [
        eqn.replace(invars=_renamed(eqn.invars, new_names)) for eqn in traced_jaxpr.eqns
    ]
    return eqns, _renamed(traced_jaxpr.outvars, new_names)


def _renamed(
    atoms: Sequence[_t.Atom], new_names: Mapping[_t.Atom, _t.Atom]
) -> list[_t.Atom]:
    """These variables under their new names, as far as they have some."""
    renamed: list[_t.Atom] = []
    for atom in atoms:
        if not isinstance(atom, _core.Literal):  # which has no name
            atom = new_names.get(atom, atom)
        renamed.append(atom)
    return renamed


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
    new_names = dict(zip(results, variables, strict=False))
    renamed: list[_t.JaxprEquation] = []
    for eqn in eqns:
        invars = _renamed(eqn.invars, new_names)
        outvars = _renamed(eqn.outvars, new_names)
        renamed.append(eqn.replace(invars=invars, outvars=outvars))
    return renamed
