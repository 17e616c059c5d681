"""The primitives of a function with rules: the value, its derivative, the linear part.

    host_function   args -> outs
    host_jvp        args, tangents -> outs, tangents of outs
    host_linear     consts, tangents -> tangents of outs; linear in the tangents

The idea: one function can have rules for both modes, so the choice between them must
wait until JAX shows which mode it is in. JAX shows it in three steps:

  1. Differentiating host_function gives host_jvp. If nothing else happens (forward
     mode), it runs the forward rule.
  2. In reverse mode JAX first splits what is known from what is linear (partial
     evaluation). There host_jvp becomes the forward half of the reverse rule, which
     runs at once, and a host_linear.
  3. Transposing host_linear runs the backward half.

So no rule runs in vain. Each equation holds an object that says what to do (`Value`,
`Pair`, `Linear`; `site` tells which classes these are), and vmap wraps that object
(`batching`). The rules below call the object:

    lowering, and eager runs    `run`: the equation is the JAX code of its object
    JVP of host_function        `jvp`, which binds host_jvp if both modes may have rules
    partial eval of host_jvp    `start`, if the arguments are known and the tangents
                                unknown: the results, and a host_linear on the constants
                                that its transpose needs
    transpose of host_linear    `back`, which runs the backward rule
    JVP of host_jvp             `start` takes it apart into results and host_linear, and
                                both are differentiated as JAX code
    JVP of host_linear          binds it again on the tangents of its tangents, since it
                                is linear in those; differentiates the dependence on
                                its constants as JAX code
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core.errors import DerivativeError

Arrays = list[Any]  # flat
Tangents = list[Any]  # one per array; None for a zero tangent

value_p = _jax.Primitive("host_function")
jvp_p = _jax.Primitive("host_jvp")
linear_p = _jax.Primitive("host_linear")


class Value(ABC):
    """A function of flat arrays.

    Attributes:
        name: for messages.
        avals: the avals of the results.
    """

    name: str
    avals: tuple[Any, ...]

    @abstractmethod
    def run(self, args: Arrays) -> Arrays:
        """The results, by JAX code."""

    @abstractmethod
    def jvp(self, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        """The results and their tangents; called if not all tangents are zero."""

    def transposed(self, args: Arrays, cotangents: Arrays) -> Tangents:
        """The cotangents of the arguments that are None in `args`."""
        raise DerivativeError(
            f"hostcall: `{self.name}` can't be transposed: nothing says that it is"
            f" linear. If it is, say how with {self.name}.deftranspose(rule)"
        )

    def batch(self, size: int, args: Arrays, dims: Any) -> tuple[Arrays, Any] | None:
        """(results, their batch axes) by the user's own rule; None without one."""
        del size, args, dims
        return None

    def shared(self, dims: Sequence[int | None]) -> Value:
        """The same function, given which arguments have no axis in a batch."""
        del dims
        return self

    def narrowed(self, used: Sequence[bool]) -> Value | None:
        """A cheaper function whose results are the first of these, if it covers all
        that are used; otherwise None.
        """
        del used
        return None


class Linear(ABC):
    """A linear function of tangents, with its transpose.

    Attributes:
        avals: the avals of the results: tangents of the differentiable outs.
    """

    avals: tuple[Any, ...]

    @abstractmethod
    def run(self, consts: Arrays, tangents: Arrays) -> Arrays:
        """The linear function."""

    @abstractmethod
    def back(self, consts: Arrays, cotangents: Arrays) -> Arrays:
        """The transpose: one cotangent for each tangent."""


class Pair(ABC):
    """A function and its derivative along the tangents of some arguments.

    Attributes:
        value: the function.
        tangent_avals: the avals of the tangents of the differentiable outs.
    """

    value: Value
    tangent_avals: tuple[Any, ...]

    @property
    def avals(self) -> tuple[Any, ...]:
        return (*self.value.avals, *self.tangent_avals)

    @abstractmethod
    def run(self, args: Arrays, tangents: Arrays) -> Arrays:
        """The results, then their tangents, by the forward rule."""

    @abstractmethod
    def start(self, args: Arrays, backward: bool) -> tuple[Arrays, Arrays, Linear]:
        """The results, and the derivative as consts and a linear function.

        `backward` says that the linear function will be transposed.
        """


def bind(args: Arrays, what: Value) -> Arrays:
    return list(value_p.bind(*args, what=what))


def bind_jvp(args: Arrays, tangents: Arrays, what: Pair) -> tuple[Arrays, Arrays]:
    outs = jvp_p.bind(*args, *tangents, what=what, n=len(args))
    n = len(what.value.avals)
    return list(outs[:n]), list(outs[n:])


def bind_linear(consts: Arrays, tangents: Arrays, what: Linear) -> Arrays:
    return list(linear_p.bind(*consts, *tangents, what=what, n=len(consts)))


# --- impl, abstract eval, lowering ---------------------------------------------------


def _run_value(*args: Any, what: Value) -> Arrays:
    return what.run(list(args))


def _run_split(*operands: Any, what: Pair | Linear, n: int) -> Arrays:
    return what.run(list(operands[:n]), list(operands[n:]))


for _p in (value_p, jvp_p, linear_p):
    _run = _run_value if _p is value_p else _run_split

    def _abstract_eval(*operands: Any, what: Any, **_: Any) -> Any:
        return _jax.result_avals(what.avals, operands, pure=True)

    def _lower(ctx: Any, *operands: Any, _run: Any = _run, **params: Any) -> Arrays:
        return _jax.lower_by(ctx, lambda *xs: _run(*xs, **params), *operands)

    _p.multiple_results = True
    _p.def_impl(_run)
    _p.def_abstract_eval(_abstract_eval)
    _jax.register_lowering(_p, _lower)


# --- JVP ---------------------------------------------------------------------------


def _present(tangent: Any) -> Any:
    """The tangent; None if it is zero, or float0 as for an integer array."""
    if type(tangent) is _jax.Zero:
        return None
    if not hasattr(tangent, "dtype"):
        return jnp.asarray(tangent)  # jax.jvp lets Python numbers through
    return None if tangent.dtype == jax.dtypes.float0 else tangent


def _zeros(outs: Arrays, tangents: Tangents) -> Arrays:
    return [
        _jax.zero_tangent(out) if t is None else t
        for out, t in zip(outs, tangents, strict=True)
    ]


def _value_jvp(primals: Any, tangents: Any, *, what: Value) -> tuple[Arrays, Arrays]:
    present = [_present(t) for t in tangents]
    if all(t is None for t in present):
        outs = bind(list(primals), what)
        return outs, _zeros(outs, [None] * len(outs))
    outs, touts = what.jvp(list(primals), present)
    return outs, _zeros(outs, touts)


def _jvp_jvp(
    primals: Any, tangents: Any, *, what: Pair, n: int
) -> tuple[Arrays, Arrays]:
    """Takes f'(x) t apart into constants c(x) and a linear function L(c, t).

    L is linear in t, so the derivative along dt is L(c, dt). The rest, the dependence
    of c on x, is differentiated as JAX code.
    """
    present = [_present(t) for t in tangents]

    def taken_apart(*operands: Any) -> Arrays:
        outs, consts, linear = what.start(list(operands[:n]), False)
        return [*outs, *bind_linear(consts, list(operands[n:]), linear)]

    return _jvp_of(taken_apart, list(primals), present)


def _linear_jvp(
    primals: Any, tangents: Any, *, what: Linear, n: int
) -> tuple[Arrays, Arrays]:
    present = [_present(t) for t in tangents]
    outs = bind_linear(list(primals[:n]), list(primals[n:]), what)
    dots: list[Tangents] = []
    if any(t is not None for t in present[n:]):
        there = filled(primals[n:], present[n:])
        dots.append(list(bind_linear(list(primals[:n]), there, what)))
    if any(t is not None for t in present[:n]):
        of_consts = [*present[:n], *(None for _ in present[n:])]

        def code(*xs: Any) -> Arrays:
            return what.run(list(xs[:n]), list(xs[n:]))

        dots.append(_jvp_of(code, list(primals), of_consts)[1])
    if not dots:
        return outs, _zeros(outs, [None] * len(outs))
    return outs, [_add(*terms) for terms in zip(*dots, strict=True)]


def filled(like: Any, tangents: Tangents) -> Arrays:
    """The tangents, with zeros in place of None."""
    return [
        jnp.zeros_like(x) if t is None else t
        for x, t in zip(like, tangents, strict=True)
    ]


def _add(*terms: Any) -> Any:
    there = [t for t in terms if type(t) is not _jax.Zero]
    return sum(there[1:], there[0]) if there else terms[0]


def _jvp_of(code: Any, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Arrays]:
    """`jax.jvp` along the tangents that aren't None; float0 tangents become Zero."""
    at = [i for i, t in enumerate(tangents) if t is not None]
    if not at:
        outs = list(code(*primals))
        return outs, _zeros(outs, [None] * len(outs))

    def moving(*xs: Any) -> Arrays:
        whole = list(primals)
        for i, x in zip(at, xs, strict=True):
            whole[i] = x
        return list(code(*whole))

    outs, touts = jax.jvp(moving, [primals[i] for i in at], [tangents[i] for i in at])
    return list(outs), _zeros(outs, [_present(t) for t in touts])


_jax.jvps[value_p] = _value_jvp
_jax.jvps[jvp_p] = _jvp_jvp
_jax.jvps[linear_p] = _linear_jvp


# --- Transpose ---------------------------------------------------------------------


def _known(operands: Any) -> Arrays:
    return [None if _jax.is_undefined_primal(x) else x for x in operands]


def _all_zero(cotangents: Any) -> bool:
    return all(type(ct) is _jax.Zero for ct in cotangents)


def _value_transpose(cotangents: Any, *args: Any, what: Value) -> list[Any]:
    if _all_zero(cotangents):
        return [None] * len(args)
    whole = list(map(_jax.instantiate_zeros, cotangents))
    return _wanted(args, what.transposed(_known(args), whole))


def _split_transpose(
    cotangents: Any, *operands: Any, what: Pair | Linear, n: int
) -> list[Any]:
    """Of a linear part; or of a jvp that is transposed as it stands, in which only the
    tangents are linear.
    """
    pair = what if isinstance(what, Pair) else None
    cts = cotangents[len(pair.value.avals) :] if pair else cotangents
    if _all_zero(cts):
        return [None] * len(operands)
    known, name = list(operands[:n]), pair.value.name if pair else "a derivative"
    if any(map(_jax.is_undefined_primal, known)):
        raise DerivativeError(
            f"hostcall: `{name}` is transposed with respect to an argument in which"
            " it isn't linear"
        )
    consts, linear = known, what
    if pair:
        _, consts, linear = pair.start(known, True)
    assert isinstance(linear, Linear)
    back = linear.back(consts, list(map(_jax.instantiate_zeros, cts)))
    return [*(None for _ in known), *_wanted(operands[n:], back)]


def _wanted(operands: Any, back: Tangents) -> list[Any]:
    return [
        _jax.shard_alike(ct, x.aval) if _jax.is_undefined_primal(x) else None
        for x, ct in zip(operands, back, strict=True)
    ]


_jax.transposes[value_p] = _value_transpose
_jax.transposes[jvp_p] = _split_transpose
_jax.transposes[linear_p] = _split_transpose


# --- Partial evaluation --------------------------------------------------------------


def _split(trace: Any, *tracers: Any, what: Pair, n: int) -> Any:
    """Where reverse mode begins: the arguments are known and the tangents unknown.

    Computes the results now, and leaves the linear part to be transposed.
    """
    args, tangents = tracers[:n], tracers[n:]
    if not all(map(_jax.is_known, args)) or all(map(_jax.is_known, tangents)):
        return trace.default_process_primitive(jvp_p, tracers, {"what": what, "n": n})
    known = [arg.pval.get_known() for arg in args]
    outs, consts, linear = what.start(known, True)
    operands = [*map(trace.new_const, consts), *tangents]
    params = {"what": linear, "n": len(consts)}
    return [*outs, *trace.default_process_primitive(linear_p, operands, params)]


_jax.partial_eval_by_trace[jvp_p] = _split


# --- Equations that are finished: under remat, and where results are unused ---------
#
# Both can leave the derivative out of a program: what remains of a host_jvp whose
# tangents nobody needs is the function itself.


def _split_under_remat(saveable: Any, unknown: Any, inst: Any, eqn: Any) -> Any:
    """The forward pass computes only the results, by the function itself.

    The backward pass computes the whole equation again, and is split then.
    """
    del saveable
    n = eqn.params["n"]
    what: Pair = eqn.params["what"]
    n_outs = len(what.value.avals)
    residuals = [
        v
        for v, here in zip(eqn.invars, inst, strict=True)
        if not here and not _jax.is_literal(v)
    ]
    everything = [True] * len(eqn.outvars)
    if any(unknown[:n]):
        return None, eqn, everything, everything, residuals
    if not any(unknown):
        return eqn, eqn, [False] * len(everything), everything, residuals
    known = _value_of(eqn)
    outs_unknown = [i >= n_outs for i in range(len(everything))]
    return known, eqn, outs_unknown, everything, residuals


_jax.partial_eval_rules[jvp_p] = _split_under_remat


# --- Dead code ---------------------------------------------------------------------


def _drop_residuals(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    if not any(used):
        return [False] * len(eqn.invars), None
    smaller = eqn.params["what"].narrowed(used)
    if smaller is not None:
        outvars = eqn.outvars[: len(smaller.avals)]
        eqn = eqn.replace(params={"what": smaller}, outvars=outvars)
    return [True] * len(eqn.invars), eqn


def _drop_tangents(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    if not any(used):
        return [False] * len(eqn.invars), None
    n, value = eqn.params["n"], eqn.params["what"].value
    if any(used[len(value.avals) :]):
        return [True] * len(eqn.invars), eqn
    return [i < n for i in range(len(eqn.invars))], _value_of(eqn)


def _value_of(eqn: Any) -> Any:
    """The equation of the function itself, in place of its host_jvp."""
    n, value = eqn.params["n"], eqn.params["what"].value
    return eqn.replace(
        primitive=value_p,
        params={"what": value},
        invars=eqn.invars[:n],
        outvars=eqn.outvars[: len(value.avals)],
    )


_jax.register_dce(value_p, _drop_residuals)
_jax.register_dce(jvp_p, _drop_tangents)
