"""The primitives of a function with rules: a value, and a value with its derivative.

    host_function   operands -> results
    host_jvp        args, tangents -> outs, tangents of outs

The idea: one function can have rules for both modes, so the choice between them must
wait until JAX shows which mode it is in. JAX shows it in three steps:

  1. Differentiating host_function gives host_jvp. If nothing else happens (forward
     mode), it runs the forward rule.
  2. In reverse mode JAX first splits what is known from what is linear (partial
     evaluation). There host_jvp becomes the forward half of the reverse rule, which
     runs at once, and a host_function of constants and tangents, linear in these.
  3. Transposing that runs the backward half.

So no rule runs in vain. Each equation holds an object that says what to do: a
`DiffFunction`, which in host_jvp is a `ValueAndTangent`, and is a `LinearMap` where the
derivative is linear. vmap wraps it in another one (`batched`). The rules below call the
object:

    lowering, and eager runs    `run`: the equation is the JAX code of its object
    JVP                         `jvp`. A call binds host_jvp if both modes may have
                                rules. A pair is taken apart by `start`, and both parts
                                are differentiated as JAX code. A linear function is
                                bound again on the tangents of its tangents, and its
                                dependence on its constants is differentiated as JAX
                                code
    transpose                   `transposed`; a linear function's is its `back`, which
                                runs the backward rule
    partial eval of host_jvp    `start`, if the arguments are known and the tangents
                                unknown: the results, and a linear function with the
                                constants that its transpose needs
    dead code                   `narrowed`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core.errors import DerivativeError
from hostcall._jax.types import Aval, JaxprEquation, JaxprTrace, Primitive, Var
from hostcall._primitives.batching import Dims
from hostcall._primitives.eager import bind_or_call

T = TypeVar("T")

Arrays = list[jax.Array]  # flat
Operands = Sequence[jax.Array]  # the same, which nobody changes
Tangents = list[jax.Array | None]  # one per array; None for a zero tangent
Moved = tuple[Arrays, Tangents]  # results and their tangents
Rows = tuple[Arrays, list[int | None]]  # results and the batch axis of each
Flags = Sequence[bool]

value_p = _jax.Primitive("host_function")
jvp_p = _jax.Primitive("host_jvp")


class DiffFunction(ABC):
    """A function of flat arrays. Its `repr` is its name in messages.

    Attributes:
        avals: the avals of the results.
    """

    primitive: ClassVar[Primitive] = value_p

    avals: tuple[Aval, ...]

    def __init_subclass__(cls) -> None:
        _jax.hold_weakly_in_caches(cls)

    @abstractmethod
    def run(self, operands: Arrays) -> Arrays:
        """The results, by JAX code."""

    @abstractmethod
    def jvp(self, operands: Arrays, tangents: Tangents) -> Moved:
        """The results and their tangents; called if not all tangents are zero."""

    def transposed(self, operands: Tangents, cotangents: Arrays) -> Tangents:
        """The cotangents of the operands that are None here."""
        raise DerivativeError(
            f"hostcall: `{self}` can't be transposed: nothing says that it is linear."
            f" If it is, say how with {self}.deftranspose(rule)"
        )

    def batch(self, size: int, operands: Arrays, dims: Dims) -> Rows | None:
        """(results, their batch axes) by the user's own rule; None without one."""
        del size, operands, dims
        return None

    def shared(self, dims: Dims) -> DiffFunction:
        """The same function, given which operands have no axis in a batch."""
        del dims
        return self

    def narrowed(self, used: Flags) -> DiffFunction | None:
        """A cheaper function whose operands and results are the first of these, if it
        covers all results that are used; otherwise None.
        """
        del used
        return None


class LinearMap(DiffFunction):
    """A function that is linear in its last operands, the tangents.

    Attributes:
        n: how many operands are constants. They stand in front.
    """

    n: int

    def __repr__(self) -> str:
        return "a derivative"

    @abstractmethod
    def back(self, consts: Arrays, cotangents: Arrays) -> Arrays:
        """The transpose: one cotangent for each tangent."""

    def jvp(self, operands: Arrays, tangents: Tangents) -> Moved:
        # L(c, t) along (dc, dt) is L(c, dt) + (dL/dc) dc: the same function of the
        # tangents of the tangents, which can be transposed again by `back`, and a
        # derivative of its JAX code.
        n = self.n
        consts = operands[:n]
        const_tangents = tangents[:n]
        linear_tangents = tangents[n:]
        terms = list[Tangents]()
        if there(linear_tangents):
            moved = filled(operands[n:], linear_tangents)
            terms.append([*bind([*consts, *moved], self)])
        if there(const_tangents):
            none_linear = [None for _ in linear_tangents]
            along_consts = [*const_tangents, *none_linear]
            _, moved_by_consts = _jvp_of(self.run, operands, along_consts)
            terms.append(moved_by_consts)
        assert terms, "`jvp` is called if not all tangents are zero"
        outs = bind(operands, self)
        return outs, [_sum(of_result) for of_result in zip(*terms, strict=True)]

    def transposed(self, operands: Tangents, cotangents: Arrays) -> Tangents:
        consts = known(operands[: self.n], self)
        of_consts = [None for _ in consts]
        return [*of_consts, *self.back(consts, cotangents)]


class ValueAndTangent(DiffFunction):
    """A function and its derivative along the tangents of some arguments.

    Its results are those of the function, then their tangents, by the forward rule.

    Attributes:
        value: the function.
        n: how many operands are arguments. The tangents follow.
    """

    primitive = jvp_p
    value: DiffFunction
    n: int

    @abstractmethod
    def start(
        self, args: Arrays, backward: bool
    ) -> tuple[Arrays, Arrays, DiffFunction]:
        """The results, and the derivative: constants, and a function of these and the
        tangents, linear in the tangents.

        `backward` says that the linear function will be transposed.
        """

    def jvp(self, operands: Arrays, tangents: Tangents) -> Moved:
        """Takes f'(x) t apart into constants c(x) and a linear function L(c, t)."""

        def taken_apart(operands: Arrays) -> Arrays:
            args = operands[: self.n]
            own_tangents = operands[self.n :]
            outs, consts, linear = self.start(args, backward=False)
            return [*outs, *bind([*consts, *own_tangents], linear)]

        return _jvp_of(taken_apart, operands, tangents)

    def transposed(self, operands: Tangents, cotangents: Arrays) -> Tangents:
        """Of a jvp that is transposed as it stands: only the tangents are linear."""
        args = known(operands[: self.n], self.value)
        _, consts, linear = self.start(args, backward=True)
        # The first results are values, which do not depend on the tangents.
        of_tangents = cotangents[len(self.value.avals) :]
        back = linear.transposed([*consts, *operands[self.n :]], of_tangents)
        of_args = [None for _ in args]
        return [*of_args, *back[len(consts) :]]

    def narrowed(self, used: Flags) -> DiffFunction | None:
        """The function itself, if nothing uses the tangents."""
        return None if any(used[len(self.value.avals) :]) else self.value


def known(operands: Tangents, function: DiffFunction) -> Arrays:
    """The operands in which a function isn't linear, which a transpose must know."""
    arrays = there(operands)
    if len(arrays) < len(operands):
        raise DerivativeError(
            f"hostcall: `{function}` is transposed with respect to an argument in which"
            " it isn't linear"
        )
    return arrays


def bind(operands: Arrays, function: DiffFunction) -> Arrays:
    return list(bind_or_call(function.primitive, operands, function=function))


def filled(like: Arrays, tangents: Tangents) -> Arrays:
    """The tangents, with zeros in place of None."""
    return [
        jnp.zeros_like(x) if tangent is None else tangent
        for x, tangent in zip(like, tangents, strict=True)
    ]


def there(values: Iterable[T | None]) -> list[T]:
    """Those that aren't None."""
    return [value for value in values if value is not None]


def _sum(terms: Sequence[jax.Array | None]) -> jax.Array | None:
    arrays = there(terms)
    # From the first one, not from 0: a number would decide about the dtype.
    return sum(arrays[1:], arrays[0]) if arrays else None


def _jvp_of(code: Callable[..., Arrays], primals: Arrays, tangents: Tangents) -> Moved:
    """`jax.jvp` along the tangents that aren't None."""
    # None is a pytree without leaves, so jax.jvp does not see what stays.
    moving = [
        None if tangent is None else primal
        for primal, tangent in zip(primals, tangents, strict=True)
    ]

    def of_moving(moving: Tangents) -> Arrays:
        operands = [
            primal if moved is None else moved
            for moved, primal in zip(moving, primals, strict=True)
        ]
        return code(operands)

    outs, out_tangents = jax.jvp(of_moving, (moving,), (tangents,))
    return list(outs), list(map(_present, out_tangents))


# --- JAX's rules ---------------------------------------------------------------------


def _run(*operands: jax.Array, function: DiffFunction) -> Arrays:
    return function.run(list(operands))


def _abstract_eval(*operands: Aval, function: DiffFunction) -> list[Aval]:
    return _jax.result_avals(function.avals, operands, pure=True)


def _jvp(
    primals: Arrays, tangents: Arrays, *, function: DiffFunction
) -> tuple[Arrays, Arrays]:
    """JAX's rule of forward mode. Zero tangents are None to the objects."""
    operands = list(primals)
    present = list(map(_present, tangents))
    if there(present):
        outs, out_tangents = function.jvp(operands, present)
    else:
        outs = bind(operands, function)
        out_tangents = [None] * len(function.avals)
    return outs, [
        _jax.zero_tangent(out) if tangent is None else tangent
        for out, tangent in zip(outs, out_tangents, strict=True)
    ]


def _present(tangent: jax.Array) -> jax.Array | None:
    """The tangent; None if it is zero, or float0 as for an integer array."""
    if type(tangent) is _jax.Zero:
        return None
    if isinstance(tangent, (int, float, complex)):
        return jnp.asarray(tangent)  # jax.jvp lets Python numbers through
    return None if tangent.dtype == jax.dtypes.float0 else tangent


def _transpose(
    cotangents: Arrays, *operands: jax.Array, function: DiffFunction
) -> Tangents:
    """JAX's rule of transposition, whose result is None for the known operands."""
    # Values do not depend on tangents, so their cotangents have no part in it.
    values = len(function.value.avals) if isinstance(function, ValueAndTangent) else 0
    if all(type(cotangent) is _jax.Zero for cotangent in cotangents[values:]):
        return [None] * len(operands)
    # JAX marks the operands by which it transposes.
    is_linear = list(map(_jax.is_undefined_primal, operands))
    known_operands = [
        None if linear else operand
        for operand, linear in zip(operands, is_linear, strict=True)
    ]
    nonzero_cotangents = list(map(_jax.instantiate_zeros, cotangents))
    back = function.transposed(known_operands, nonzero_cotangents)
    of_linear: Tangents = []
    for operand, cotangent, linear in zip(operands, back, is_linear, strict=True):
        if linear:
            of_linear.append(_jax.shard_alike(cotangent, operand.aval))
        else:
            of_linear.append(None)
    return of_linear


def _narrow(
    used: Flags, *versioned: JaxprEquation
) -> tuple[list[bool], JaxprEquation | None]:
    """JAX's rule of dead code: which operands are needed for the results that are used,
    and the equation that remains. A pair whose tangents nobody uses is a value alone.
    """
    # The equation is the last argument; versions of JAX differ in what is before it.
    eqn = versioned[-1]
    if not any(used):
        return [False] * len(eqn.invars), None
    smaller = None if all(used) else eqn.params["function"].narrowed(used)
    narrow = eqn if smaller is None else _only(eqn, smaller)
    n_used = len(narrow.invars)  # the first ones: see `_only`
    used_operands = [i < n_used for i, _ in enumerate(eqn.invars)]
    return used_operands, narrow


def _only(eqn: JaxprEquation, smaller: DiffFunction) -> JaxprEquation:
    """The equation of what `DiffFunction.narrowed` returned."""
    function = eqn.params["function"]
    is_pair = isinstance(function, ValueAndTangent)
    return eqn.replace(
        primitive=smaller.primitive,
        params={"function": smaller},
        # Its operands and results are the first ones; see `DiffFunction.narrowed`.
        invars=eqn.invars[: function.n] if is_pair else eqn.invars,
        outvars=eqn.outvars[: len(smaller.avals)],
    )


for _p in (value_p, jvp_p):
    _p.multiple_results = True
    _p.def_impl(_run)
    _p.def_abstract_eval(_abstract_eval)
    _jax.register_lowering(_p, _jax.lowering_as(_run))
    _jax.jvps[_p] = _jvp
    _jax.transposes[_p] = _transpose
    _jax.dead_code_rules[_p] = _narrow


# --- Partial evaluation of host_jvp --------------------------------------------------


def _split(trace: JaxprTrace, *tracers: jax.Array, function: ValueAndTangent) -> Arrays:
    """Where reverse mode begins: the arguments are known and the tangents unknown.

    Computes the results now, and leaves the linear part to be transposed.
    """
    args = tracers[: function.n]
    tangents = tracers[function.n :]
    is_reverse_mode = all(map(_jax.is_known, args)) and not all(
        map(_jax.is_known, tangents)
    )
    if not is_reverse_mode:  # the equation stays whole, known or unknown
        whole_params = {"function": function}
        return list(trace.default_process_primitive(jvp_p, tracers, whole_params))
    known_args = [arg.pval.get_known() for arg in args]
    outs, consts, linear = function.start(known_args, backward=True)
    operands = [*map(trace.new_const, consts), *tangents]
    linear_params = {"function": linear}
    out_tangents = trace.default_process_primitive(value_p, operands, linear_params)
    return [*outs, *out_tangents]


def _split_under_remat(
    saveable: object, unknown: Flags, inst: Flags, eqn: JaxprEquation
) -> tuple[JaxprEquation | None, JaxprEquation, list[bool], list[bool], list[Var]]:
    """The forward pass computes only the results, by the function itself.

    The backward pass computes the whole equation again, and is split then.
    """
    del saveable
    function: ValueAndTangent = eqn.params["function"]
    n_outs = len(function.value.avals)
    everything = [True] * len(eqn.outvars)
    # What the backward pass needs and has not yet.
    residuals = [
        var
        for var, is_there in zip(eqn.invars, inst, strict=True)
        if not is_there and not _jax.is_literal(var)
    ]
    if any(unknown[: function.n]):
        return None, eqn, everything, everything, residuals
    if not any(unknown):
        return eqn, eqn, [False] * len(everything), everything, residuals
    outs_unknown = [i >= n_outs for i in range(len(everything))]
    forward_pass = _only(eqn, function.value)
    return forward_pass, eqn, outs_unknown, everything, residuals


_jax.partial_eval_by_trace[jvp_p] = _split
_jax.partial_eval_rules[jvp_p] = _split_under_remat
