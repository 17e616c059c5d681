"""Questions to jaxprs and their equations, and ways to run them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core

from hostcall._jax import types as _t
from hostcall._jax.fast_dispatch import ENGINE_CALLS
from hostcall._jax.versions import open_jaxpr

LOOPS = ("scan", "while")
CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"),
    *("custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"),
)


def called(eqn: _t.JaxprEquation) -> str:
    """The parameter of a call that has what it calls."""
    return "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"


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


def contained(eqn: _t.JaxprEquation) -> list[_t.Jaxpr]:
    """The jaxprs in an equation, opened."""
    return [open_jaxpr(each) for each in _core.jaxprs_in_params(eqn.params)]


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


def is_float(atom: _t.Atom) -> bool:
    """Whether it is a variable that is an array of real or complex numbers."""
    is_variable = isinstance(atom, _core.Var) and is_array(atom)
    return is_variable and jax.numpy.issubdtype(atom.aval.dtype, np.inexact)


def is_host_call(eqn: _t.JaxprEquation) -> bool:
    return eqn.primitive in ENGINE_CALLS


def is_dropped(var: _t.Var) -> bool:
    return isinstance(var, _core.DropVar)


def inlined(jaxpr: _t.Jaxpr, operands: Iterable[jax.Array]) -> list[jax.Array]:
    """The results of a jaxpr, in a program that is being traced."""
    return _core.jaxpr_as_fun(jaxpr)(*operands)  # type: ignore[no-any-return]


def evaluate(eqn: _t.JaxprEquation, operands: Sequence[Any]) -> list[Any]:
    """Runs an equation alone, outside of programs."""
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, params = found if isinstance(found, tuple) else ((), found)
    results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


@functools.lru_cache(maxsize=64)
def _compiled(jaxpr: _t.Jaxpr) -> Callable[..., list[Any]]:
    return jax.jit(_core.jaxpr_as_fun(jaxpr))  # type: ignore[no-any-return]


def run_jaxpr(jaxpr: _t.Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr with its constants, compiled."""
    return _compiled(jaxpr)(*operands)
