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
`Pair`, `Linear`), and vmap wraps that object (`batching`). An equation is lowered as
the JAX code of its object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

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

    @abstractmethod
    def run(self, args: Arrays, tangents: Arrays) -> Arrays:
        """The results, then their tangents, by the forward rule."""

    @abstractmethod
    def start(self, args: Arrays, backward: bool) -> tuple[Arrays, Arrays, Linear]:
        """The results, and the derivative as consts and a linear function.

        `backward` says that the linear function will be transposed.
        """


_STATIC = (value_p, jvp_p, linear_p)


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


def _avals(what: Any) -> tuple[Any, ...]:
    if isinstance(what, Pair):
        return (*what.value.avals, *what.tangent_avals)
    return what.avals  # type: ignore[no-any-return]


for _p in _STATIC:
    _run = _run_value if _p is value_p else _run_split

    def _abstract_eval(*operands: Any, what: Any, **_: Any) -> Any:
        return _jax.result_avals(_avals(what), operands, pure=True)

    def _lower(ctx: Any, *operands: Any, _run: Any = _run, **params: Any) -> Arrays:
        return _jax.lower_by(ctx, lambda *xs: _run(*xs, **params), *operands)

    _p.multiple_results = True
    _p.def_impl(_run)
    _p.def_abstract_eval(_abstract_eval)
    _jax.register_lowering(_p, _lower)
