"""Questions to jaxprs and their equations, and ways to run them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters import batching as _batching

from hostcall._jax import types as _t
from hostcall._jax.door import array as _array
from hostcall._jax.door import batching as _src_batching
from hostcall._jax.door import core as _core
from hostcall._jax.door import effects as _effects
from hostcall._jax.door import sharding_impls as _sharding_impls
from hostcall._jax.tracing import ENGINE_CALLS
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


def within(eqn: _t.JaxprEquation) -> Iterator[_t.JaxprEquation]:
    """The equation, and all in its jaxprs, at any depth."""
    yield eqn
    for jaxpr in _core.jaxprs_in_params(eqn.params):
        for inner in open_jaxpr(jaxpr).eqns:
            yield from within(inner)


def opened(jaxpr: _t.Jaxpr) -> tuple[_t.Jaxpr, Sequence[Any]]:
    """An inner jaxpr, and its constants; remat's and shard_map's have none."""
    inner = open_jaxpr(jaxpr)
    return inner, jaxpr.consts if inner.constvars else ()


class Inner(NamedTuple):
    """A jaxpr in an equation.

    Attributes:
        key: the parameter of the equation that has it.
        begin, end: which operands of the equation are its constants. Further ones come
            after these.
    """

    key: str
    jaxpr: _t.Jaxpr
    begin: int
    end: int

    @property
    def old(self) -> _t.Jaxpr:
        return open_jaxpr(self.jaxpr)

    @property
    def is_body(self) -> bool:
        """Whether it is no condition of a while loop."""
        return self.key != "cond_jaxpr"


def inners(eqn: _t.JaxprEquation) -> list[Inner]:
    """The jaxprs of an equation that can be changed; a loop's body is the last."""
    params = eqn.params
    n = len(eqn.invars)
    name = eqn.primitive.name
    if name in (*CALLS, "shard_map"):
        return [Inner(called(eqn), params[called(eqn)], 0, n)]
    if name == "cond":
        return [Inner("branches", branch, 1, n) for branch in params["branches"]]
    if any(map(_is_of_input, eqn.effects)):
        return []  # the effects have the numbers of operands
    if name == "scan":
        n_consts, _ = split_of(eqn)
        return [Inner("jaxpr", params["jaxpr"], 0, n_consts)]
    if name == "while":
        begin = params["cond_nconsts"]
        end = begin + params["body_nconsts"]
        condition = Inner("cond_jaxpr", params["cond_jaxpr"], 0, begin)
        return [condition, Inner("body_jaxpr", params["body_jaxpr"], begin, end)]
    return []


def replaced(
    eqn: _t.JaxprEquation,
    jaxprs: dict[str, list[_t.Jaxpr]],
    more_consts: dict[str, int],
    carried: int,
) -> _t.JaxprEquation:
    """The equation with these jaxprs, which have so many more constants. A loop also
    carries so many more values, in front of the others.
    """
    params = {**eqn.params}
    primitive = eqn.primitive
    if primitive.name.startswith("custom_"):  # the rules have done their work
        primitive = _core.closed_call_p
        params = {}
    new_effects = set[_t.Effect]()
    for key, inner_jaxprs in jaxprs.items():
        params[key] = tuple(inner_jaxprs) if key == "branches" else inner_jaxprs[0]
        for jaxpr in inner_jaxprs:
            # Effects on inputs have the numbers of inner operands: those of the
            # equation itself, which have its own numbers, stay as they are.
            new_effects |= {e for e in jaxpr.effects if not _is_of_input(e)}
    _lengthen(params, more_consts, carried)
    effects = eqn.effects | new_effects
    return eqn.replace(primitive=primitive, params=params, effects=effects)


def _is_of_input(effect: _t.Effect) -> bool:
    return isinstance(effect, _effects.JaxprInputEffect)


def _lengthen(params: _t.Params, more_consts: dict[str, int], carried: int) -> None:
    """Says in the parameters of an equation that it has more constants, by the key of
    each inner jaxpr, and that a loop carries more values.
    """
    # Those of one jaxpr: of an equation with two, a while loop, the other one's are
    # named apart.
    n = next(iter(more_consts.values()))
    longer: dict[str, int | tuple[object, ...]] = {
        "in_shardings": (_sharding_impls.UNSPECIFIED,) * n,
        "in_layouts": (None,) * n,
        "donated_invars": (False,) * n,
        "in_specs": (jax.sharding.PartitionSpec(),) * n,
        "num_consts": n,
        "num_carry": carried,
        "prevent_cse": (False,) * n,  # or a bool
        "cond_nconsts": more_consts.get("cond_jaxpr", 0),
        "body_nconsts": more_consts.get("body_jaxpr", 0),
    }
    for key, more in longer.items():
        # Only if it is of this type: one bool as `prevent_cse` holds for all operands.
        if isinstance(params.get(key), type(more)):
            params[key] += more
    if "ft_in" in params:  # a scan's since 0.12
        from hostcall._jax.door import flattree as _ft

        consts, carry, xs = params["ft_in"].unpack()
        results, ys = params["ft_out"].unpack()
        front = _ft.nones(carried)
        params["ft_in"] = _ft.pack(((consts, _ft.nones(n)), (front, carry), xs))
        params["ft_out"] = _ft.pack(((front, results), ys))


# Where the results of a function of JAX are among those of the branch or body of its
# equation, by the name of both. A loop that counts carries its numbers beside them.
_RESULTS_OF: dict[tuple[str, str], tuple[int, ...]] = {
    ("cond", "cond"): (),
    ("switch", "cond"): (),
    ("scan", "scan"): (),
    ("while_loop", "while"): (),
    ("fori_loop", "scan"): (0, 1),
    ("fori_loop", "while"): (2,),
}


def parts_of_results(
    eqn: _t.JaxprEquation, function: str
) -> list[tuple[int, ...] | None] | None:
    """For each result of an equation which part of a function's result it is, by the
    indices of the tuples that it is in; None if it is none. All of it is None if JAX
    does not say.

    `function`: the name of JAX's function which has made the equation, if it is one of
    control flow. A call has the results of what it calls.
    """
    name = eqn.primitive.name
    front = () if name in CALLS else _RESULTS_OF.get((function, name))
    if front is None or not (jaxprs := inners(eqn)):
        return None
    names = open_jaxpr(jaxprs[-1].jaxpr).debug_info.result_paths
    if not isinstance(names, tuple) or len(names) != len(eqn.outvars):
        return None
    paths: list[tuple[int, ...] | None] = []
    for path in names:
        found_path = re.match(r"result((?:\[\d+\])*)", str(path))  # "result[0][2]"
        if found_path is None:
            return None
        indices = [int(index) for index in re.findall(r"\d+", found_path[1])]
        is_part = tuple(indices[: len(front)]) == front
        paths.append(tuple(indices[len(front) :]) if is_part else None)
    return paths


def is_array(atom: _t.Atom) -> bool:
    """Whether a variable is an array of numbers, and no key, Ref, token or float0."""
    aval = atom.aval
    if not isinstance(aval, jax.core.ShapedArray) or aval.dtype == jax.dtypes.float0:
        return False
    return isinstance(aval.dtype, np.dtype)


def is_float(atom: _t.Atom) -> bool:
    """Whether it is a variable that is an array of real or complex numbers."""
    is_variable = isinstance(atom, _core.Var) and is_array(atom)
    return is_variable and jax.numpy.issubdtype(atom.aval.dtype, np.inexact)


def is_host_call(eqn: _t.JaxprEquation) -> bool:
    return eqn.primitive in ENGINE_CALLS


def names_shardings(eqn: _t.JaxprEquation) -> bool:
    """Whether a call says where its operands or results are."""
    shardings = [
        *eqn.params.get("in_shardings", ()),
        *eqn.params.get("out_shardings", ()),
    ]
    return any(sharding is not _sharding_impls.UNSPECIFIED for sharding in shardings)


def is_dropped(var: _t.Var) -> bool:
    return isinstance(var, _core.DropVar)


def inlined(jaxpr: _t.Jaxpr, operands: Iterable[jax.Array]) -> list[jax.Array]:
    """The results of a jaxpr, in a program that is being traced."""
    return _core.jaxpr_as_fun(jaxpr)(*operands)  # type: ignore[no-any-return]


def is_elementwise(eqn: _t.JaxprEquation) -> bool:
    """Whether each element of the result depends on one element of each operand.

    JAX has two rules of vmap for such operations, which no others have.
    """
    rule = _batching.fancy_primitive_batchers.get(eqn.primitive)
    rules = _src_batching.vectorized_batcher, _src_batching.broadcast_batcher
    return isinstance(rule, functools.partial) and rule.func in rules


def is_numpy(x: object) -> bool:
    """Whether it is an array that JAX takes as one of NumPy's."""
    return isinstance(getattr(x, "dtype", None), np.dtype) and not isinstance(
        x, jax.core.Tracer
    )


def evaluate(eqn: _t.JaxprEquation, operands: Sequence[Any]) -> list[Any]:
    """Runs an equation alone, outside of programs."""
    arrays: list[Any] = []
    for operand in operands:
        if is_numpy(operand) and not isinstance(operand, _array.ArrayImpl):
            # A library's primitive may know no arrays but JAX's.
            operand = jax.numpy.asarray(operand)
        arrays.append(operand)
    functions = ()
    params = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):  # of a primitive that calls functions
        functions, params = params
    results = eqn.primitive.bind(*functions, *arrays, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


@functools.lru_cache(maxsize=64)
def _compiled(jaxpr: _t.Jaxpr) -> Callable[..., list[Any]]:
    return jax.jit(_core.jaxpr_as_fun(jaxpr))  # type: ignore[no-any-return]


def run_jaxpr(jaxpr: _t.Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr with its constants, compiled."""
    return _compiled(jaxpr)(*operands)


def while_loop(
    eqn: _t.JaxprEquation,
    operands: Sequence[_t.Atom],
    results: Sequence[_t.Var],
    params: _t.Params,
) -> _t.JaxprEquation:
    """A while loop in the place of this equation."""
    avals = [operand.aval for operand in operands]
    _, effects = jax.lax.while_p.abstract_eval(*avals, **params)
    return eqn.replace(
        invars=list(operands),
        outvars=list(results),
        primitive=jax.lax.while_p,
        params=params,
        effects=effects,
    )
