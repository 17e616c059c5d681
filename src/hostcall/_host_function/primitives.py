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

So no rule runs in vain. Each equation holds an object that says what to do: a `Value`,
a `Pair` (in host_jvp), or a `Linear`; vmap wraps it in a `Batched`. The rules below
call the object:

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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._core.errors import DerivativeError
from hostcall._jax.types import Aval, JaxprEquation, JaxprTrace, Primitive, Var
from hostcall._primitives.batching import Dims, size_of
from hostcall._primitives.eager import bind_or_call

T = TypeVar("T")

Arrays = list[jax.Array]  # flat
Tangents = list[jax.Array | None]  # one per array; None for a zero tangent
Moved = tuple[Arrays, Tangents]  # results and their tangents
Rows = tuple[Arrays, list[int | None]]  # results and the batch axis of each
Flags = Sequence[bool]

value_p = _jax.Primitive("host_function")
jvp_p = _jax.Primitive("host_jvp")


class Value(ABC):
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

    def shared(self, dims: Dims) -> Value:
        """The same function, given which operands have no axis in a batch."""
        del dims
        return self

    def narrowed(self, used: Flags) -> Value | None:
        """A cheaper function whose operands and results are the first of these, if it
        covers all results that are used; otherwise None.
        """
        del used
        return None


class Linear(Value):
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
        n = self.n
        dots = list[Tangents]()
        if there(tangents[n:]):
            moved = filled(operands[n:], tangents[n:])
            dots.append([*bind([*operands[:n], *moved], self)])
        if there(tangents[:n]):
            of_consts = [*tangents[:n], *(None,) * (len(tangents) - n)]
            dots.append(_jvp_of(self.run, operands, of_consts)[1])
        return bind(operands, self), [_sum(terms) for terms in zip(*dots, strict=True)]

    def transposed(self, operands: Tangents, cotangents: Arrays) -> Tangents:
        consts = known(operands[: self.n], self)
        return [*(None,) * len(consts), *self.back(consts, cotangents)]


class Pair(Value):
    """A function and its derivative along the tangents of some arguments.

    Its results are those of the function, then their tangents, by the forward rule.

    Attributes:
        value: the function.
        n: how many operands are arguments. The tangents follow.
    """

    primitive = jvp_p
    value: Value
    n: int

    @abstractmethod
    def start(self, args: Arrays, backward: bool) -> tuple[Arrays, Arrays, Value]:
        """The results, and the derivative: constants, and a function of these and the
        tangents, linear in the tangents.

        `backward` says that the linear function will be transposed.
        """

    def jvp(self, operands: Arrays, tangents: Tangents) -> Moved:
        """Takes f'(x) t apart into constants c(x) and a linear function L(c, t)."""

        def taken_apart(operands: Arrays) -> Arrays:
            outs, consts, linear = self.start(operands[: self.n], False)
            return [*outs, *bind([*consts, *operands[self.n :]], linear)]

        return _jvp_of(taken_apart, operands, tangents)

    def transposed(self, operands: Tangents, cotangents: Arrays) -> Tangents:
        """Of a jvp that is transposed as it stands: only the tangents are linear."""
        args = known(operands[: self.n], self.value)
        _, consts, linear = self.start(args, True)
        given = [*consts, *operands[self.n :]]
        back = linear.transposed(given, cotangents[len(self.value.avals) :])
        return [*(None,) * len(args), *back[len(consts) :]]

    def narrowed(self, used: Flags) -> Value | None:
        """The function itself, if nothing uses the tangents."""
        return None if any(used[len(self.value.avals) :]) else self.value


def known(operands: Tangents, what: Value) -> Arrays:
    """The operands in which a function isn't linear, which a transpose must know."""
    found = there(operands)
    if len(found) < len(operands):
        raise DerivativeError(
            f"hostcall: `{what}` is transposed with respect to an argument in which it"
            " isn't linear"
        )
    return found


def bind(operands: Arrays, what: Value) -> Arrays:
    return list(bind_or_call(what.primitive, operands, what=what))


def filled(like: Arrays, tangents: Tangents) -> Arrays:
    """The tangents, with zeros in place of None."""
    return [
        jnp.zeros_like(x) if t is None else t
        for x, t in zip(like, tangents, strict=True)
    ]


def there(values: Iterable[T | None]) -> list[T]:
    """Those that aren't None."""
    return [value for value in values if value is not None]


def _sum(terms: Sequence[jax.Array | None]) -> jax.Array | None:
    found = there(terms)
    return sum(found[1:], found[0]) if found else None


def _jvp_of(code: Callable[..., Arrays], primals: Arrays, tangents: Tangents) -> Moved:
    """`jax.jvp` along the tangents that aren't None."""
    # None is a pytree without leaves.
    pairs = list(zip(primals, tangents, strict=True))
    moving = [None if t is None else x for x, t in pairs]

    def moved(xs: Tangents) -> Arrays:
        return code([p if x is None else x for x, p in zip(xs, primals, strict=True)])

    outs, touts = jax.jvp(moved, (moving,), (tangents,))
    return list(outs), list(map(_present, touts))


# --- Batches -------------------------------------------------------------------------
#
# A batched object wraps the inner one and runs it under `jax.vmap`; every result has
# the batch as its first axis. A tangent that all rows share gets the sum of the rows'
# cotangents, since sharing is a broadcast and its transpose is a sum.


@dataclass(frozen=True, repr=False)
class Batched(Value):
    """A batch of calls of the same function.

    Attributes:
        inner: what each row does.
        size: the number of rows.
        dims: the batch axis of each operand, None if all rows share it.
    """

    inner: Value
    size: int
    dims: tuple[int | None, ...]

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def avals(self) -> tuple[Aval, ...]:  # type: ignore[override]
        return tuple(a.update(shape=(self.size, *a.shape)) for a in self.inner.avals)

    def run(self, operands: Arrays) -> Arrays:
        return list(self._each(self.inner.run, (operands, self.dims)))

    def jvp(self, operands: Arrays, tangents: Tangents) -> Moved:
        # None is a pytree without leaves, in what goes in and in what comes out.
        return self._each(self.inner.jvp, (operands, self.dims), (tangents, self.dims))

    def transposed(self, operands: Tangents, cotangents: Arrays) -> Tangents:
        pairs = (operands, self.dims), (cotangents, (0,) * len(cotangents))
        back = self._each(self.inner.transposed, *pairs)
        return list(map(_unbatched, back, self.dims))

    def shared(self, dims: Dims) -> Value:
        return replace(self, inner=self.inner.shared(dims))

    def narrowed(self, used: Flags) -> Value | None:
        inner = self.inner.narrowed(used)
        return None if inner is None else replace(self, inner=inner)

    def _each(self, f: Callable[..., T], *pairs: tuple[Tangents, Dims]) -> T:
        """`f` on each row of lists of arrays, which are given with their batch axes.

        JAX wants all of these sharded alike. Cotangents of the host's results are not.
        """
        lists = [[x if x is None else _jax.replicated(x) for x in p[0]] for p in pairs]
        dims = [list(p[1]) for p in pairs]
        rows: Callable[..., T] = jax.vmap(f, tuple(dims), axis_size=self.size)
        return rows(*lists)


def _unbatched(cotangent: jax.Array | None, dim: int | None) -> jax.Array | None:
    if cotangent is None:
        return None
    return cotangent.sum(0) if dim is None else _jax.moveaxis(cotangent, 0, dim)


@dataclass(frozen=True, repr=False)
class BatchedPair(Pair, Batched):
    inner: Pair
    n: int
    value: Value

    def start(self, args: Arrays, backward: bool) -> tuple[Arrays, Arrays, Value]:
        found: list[Value] = []

        def row(args: Arrays) -> tuple[Arrays, Arrays]:
            outs, consts, linear = self.inner.start(args, backward)
            found.append(linear)
            return outs, consts

        outs, consts = self._each(row, (args, self.dims[: self.n]))
        dims = (*(0,) * len(consts), *self.dims[self.n :])
        return outs, consts, Batched(found[-1], self.size, dims)


# --- JAX's rules ---------------------------------------------------------------------


def _run(*operands: jax.Array, what: Value) -> Arrays:
    return what.run(list(operands))


def _abstract_eval(*operands: Aval, what: Value) -> list[Aval]:
    return _jax.result_avals(what.avals, operands, pure=True)


def _jvp(primals: Arrays, tangents: Arrays, *, what: Value) -> tuple[Arrays, Arrays]:
    operands = list(primals)
    present = list(map(_present, tangents))
    if there(present):
        outs, touts = what.jvp(operands, present)
    else:
        outs = bind(operands, what)
        touts = [None] * len(what.avals)
    pairs = zip(outs, touts, strict=True)
    return outs, [_jax.zero_tangent(x) if t is None else t for x, t in pairs]


def _present(tangent: jax.Array) -> jax.Array | None:
    """The tangent; None if it is zero, or float0 as for an integer array."""
    if type(tangent) is _jax.Zero:
        return None
    if isinstance(tangent, (int, float, complex)):
        return jnp.asarray(tangent)  # jax.jvp lets Python numbers through
    return None if tangent.dtype == jax.dtypes.float0 else tangent


def _transpose(cotangents: Arrays, *operands: jax.Array, what: Value) -> Tangents:
    # Those of a pair's values have no part in it.
    values = len(what.value.avals) if isinstance(what, Pair) else 0
    if not [ct for ct in cotangents[values:] if type(ct) is not _jax.Zero]:
        return [None] * len(operands)
    known = [None if _jax.is_undefined_primal(x) else x for x in operands]
    back = what.transposed(known, list(map(_jax.instantiate_zeros, cotangents)))
    return [
        _jax.shard_alike(ct, x.aval) if _jax.is_undefined_primal(x) else None
        for x, ct in zip(operands, back, strict=True)
    ]


def _batch(operands: Arrays, dims: Dims, *, what: Value) -> Rows:
    size = size_of(operands, dims)
    dims = tuple(dims)
    operands = list(operands)
    by_rule = what.batch(size, operands, dims)
    if by_rule is not None:
        return by_rule
    sharded = partial(_jax.rows_sharded_alike, operands=operands, dims=dims)
    if not isinstance(what, Pair):
        outs = bind(operands, Batched(what.shared(dims), size, dims))
        return sharded(outs), [0] * len(outs)
    args = operands[: what.n]
    tangents = operands[what.n :]
    n = what.n
    if any(d is not None for d in dims[:n]):
        value = Batched(what.value, size, dims[:n])
        outs = bind(operands, BatchedPair(what, size, dims, n, value))
        return sharded(outs), [0] * len(outs)
    # The rows differ only in their tangents (jax.jacfwd), and share one value.
    outs, consts, linear = what.start(args, False)
    wide = Batched(linear, size, (*(None,) * len(consts), *dims[n:]))
    touts = sharded(bind([*consts, *tangents], wide))
    return [*outs, *touts], [*(None,) * len(outs), *(0,) * len(touts)]


def _narrow(used: Flags, *given: Any) -> tuple[list[bool], JaxprEquation | None]:
    eqn: JaxprEquation = given[-1]
    if not any(used):
        return [False] * len(eqn.invars), None
    smaller = None if all(used) else eqn.params["what"].narrowed(used)
    narrow = eqn if smaller is None else _only(eqn, smaller)
    return [i < len(narrow.invars) for i in range(len(eqn.invars))], narrow


def _only(eqn: JaxprEquation, smaller: Value) -> JaxprEquation:
    """The equation of what `Value.narrowed` has given."""
    what = eqn.params["what"]
    return eqn.replace(
        primitive=smaller.primitive,
        params={"what": smaller},
        invars=eqn.invars[: what.n] if isinstance(what, Pair) else eqn.invars,
        outvars=eqn.outvars[: len(smaller.avals)],
    )


for _p in (value_p, jvp_p):
    _p.multiple_results = True
    _p.def_impl(_run)
    _p.def_abstract_eval(_abstract_eval)
    _jax.register_lowering(_p, _jax.lowering_as(_run))
    _jax.jvps[_p] = _jvp
    _jax.transposes[_p] = _transpose
    _jax.batchers[_p] = _batch
    _jax.dead_code_rules[_p] = _narrow


# --- Partial evaluation of host_jvp --------------------------------------------------


def _split(trace: JaxprTrace, *tracers: jax.Array, what: Pair) -> Arrays:
    """Where reverse mode begins: the arguments are known and the tangents unknown.

    Computes the results now, and leaves the linear part to be transposed.
    """
    args = tracers[: what.n]
    tangents = tracers[what.n :]
    if not all(map(_jax.is_known, args)) or all(map(_jax.is_known, tangents)):
        return list(trace.default_process_primitive(jvp_p, tracers, {"what": what}))
    outs, consts, linear = what.start([x.pval.get_known() for x in args], True)
    operands = [*map(trace.new_const, consts), *tangents]
    touts = trace.default_process_primitive(value_p, operands, {"what": linear})
    return [*outs, *touts]


def _split_under_remat(
    saveable: object, unknown: Flags, inst: Flags, eqn: JaxprEquation
) -> tuple[JaxprEquation | None, JaxprEquation, list[bool], list[bool], list[Var]]:
    """The forward pass computes only the results, by the function itself.

    The backward pass computes the whole equation again, and is split then.
    """
    del saveable
    what: Pair = eqn.params["what"]
    n_outs = len(what.value.avals)
    everything = [True] * len(eqn.outvars)
    pairs = zip(eqn.invars, inst, strict=True)
    residuals = [v for v, here in pairs if not here and not _jax.is_literal(v)]
    if any(unknown[: what.n]):
        return None, eqn, everything, everything, residuals
    if not any(unknown):
        return eqn, eqn, [False] * len(everything), everything, residuals
    outs_unknown = [i >= n_outs for i in range(len(everything))]
    return _only(eqn, what.value), eqn, outs_unknown, everything, residuals


_jax.partial_eval_by_trace[jvp_p] = _split
_jax.partial_eval_rules[jvp_p] = _split_under_remat
