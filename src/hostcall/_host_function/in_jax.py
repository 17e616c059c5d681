"""Rules in JAX code, which run while a program is traced.

Their exchanges are those of host code. What is different is their `Side`: arrays are
traced, and may be typed keys; the function itself is a call in the program; and what a
rule returns may be anything that JAX takes for an array, so it is checked here.

A rule in JAX code runs for every row, whatever the mask is. So its operands have no
derivatives where the mask is False, and its results are filled there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core import failures
from hostcall._core.host_code import TakesMask
from hostcall._core.spec import Template, flatten_arguments, wrap_keys
from hostcall._host_function.exchanges import Exchange, ForwardRule, Side, Words
from hostcall._host_function.primitives import Arrays, Operands, Tangents, bind
from hostcall._host_function.rule_call import RuleCall, of_results, without_mask
from hostcall._host_function.rules import RULES, Function, Kind, Rule, Tree, Trees
from hostcall._host_function.trees import ArgumentLayout
from hostcall._jax.types import Aval

# What JAX raises if NumPy or Python's control flow wants the number of a traced value.
_OF_NUMPY = (
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
)


@dataclass(frozen=True)
class InJax(Side):
    """The side of JAX code.

    Attributes:
        layout, kind: as in the exchange.
        mask: an array of the program, or None.
        residual_tree: the tree of the residual that a forward rule left for the
            backward rule; None for other rules.
    """

    layout: ArgumentLayout
    kind: Kind
    mask: jax.Array | None
    residual_tree: Template | None = None

    def function(
        self, code: Function, kind: Kind, index: int | None = None
    ) -> Function:
        del index
        if kind == "value":
            return self._call_in_program
        rule: Tree = code
        # A rule that can take a mask, such as a HostFunction, gets it.
        if self.mask is not None and issubclass(type(rule), TakesMask):
            rule = rule.where(self.mask)
        function: Function = rule
        return function

    def _call_in_program(self, *args: Tree) -> Tree:
        # A rule of `defjvps` gets the result, and a `defjvp` may leave it out, so the
        # program calls the function for them, with its own derivative.
        operands, _ = flatten_arguments(args, {})
        if self.mask is not None:
            operands = [*operands, self.mask]
        outs = bind(operands, self.layout)
        return self.layout.results.unflatten(outs)

    def arguments(self, leaves: Sequence[jax.Array | None]) -> Sequence[Tree]:
        return _with_keys(self.layout.template, leaves)

    def residual(self, rule: Rule, leaves: Operands) -> Tree:
        del rule
        assert self.residual_tree is not None, "the forward rule has run before"
        return _with_keys(self.residual_tree, leaves)[0]

    def zeros_like(self, array: jax.Array) -> jax.Array:
        return jnp.zeros_like(array)

    def fitted(
        self, tangents: Tangents, avals: Sequence[Aval], words: Iterable[Words]
    ) -> Arrays:
        return self.layout.fitting(tangents, avals, self.kind, list(words))

    def with_zeros(
        self,
        cotangents: Tangents,
        avals: Sequence[Aval],
        result_cotangent: jax.Array,
        result_aval: Aval,
    ) -> Tangents:
        del avals, result_cotangent, result_aval
        return cotangents  # `_checked` makes zeros of None


# --- The driver ----------------------------------------------------------------------


def in_jax(
    call: RuleCall, operands: Arrays, residual_tree: Template | None = None
) -> Arrays:
    """The results of a rule in JAX code; for `residual_tree` see `InJax`."""
    exchange, mask, operands = _begin(call, operands, residual_tree)
    answer = _answer(exchange, operands)
    return _checked(exchange, mask, exchange.results(answer, operands))


def forward_in_jax(call: RuleCall, operands: Arrays) -> tuple[Arrays, Arrays, Template]:
    """(the results, the arrays of the residual, its tree) of a forward rule.

    JAX code may have any residual, so only its answer says how many arrays that has.
    """
    exchange, mask, operands = _begin(call, operands, None)
    assert isinstance(exchange, ForwardRule), "no other rule leaves a residual"
    answer = _answer(exchange, operands)
    outs, residual = exchange.halves(answer)
    residual_arrays, residual_tree = flatten_arguments((residual,), {})
    return _checked(exchange, mask, outs), residual_arrays, residual_tree


def _begin(
    call: RuleCall, operands: Arrays, residual_tree: Template | None
) -> tuple[Exchange, jax.Array | None, Arrays]:
    """(the exchange, the mask, the operands without it and without derivatives where it
    is False).
    """
    # The call's own exchange is for the host; only the side makes a difference.
    exchange = call.exchange
    mask = None
    if call.site.masked:
        operands, mask = without_mask(operands, exchange)
        operands = _gated(operands, mask, exchange.linear)
    side = InJax(call.site, call.kind, mask, residual_tree)
    return replace(exchange, side=side), mask, operands


def _answer(exchange: Exchange, operands: Arrays) -> Tree:
    """What the user's code returns."""
    function, arguments = exchange.request(operands)
    try:
        return function(*arguments)
    except _OF_NUMPY as error:
        failures.add_note(error, _is_jax_code(exchange))
        raise


def _is_jax_code(exchange: Exchange) -> str:
    name = exchange.facts.name
    rule = f"`{name}`, {RULES[exchange.kind].shown} of `{exchange.layout.name}`,"
    return (
        f'hostcall: {rule} has where="jax", so it is JAX code: it runs while the'
        " program is traced, on values that have no numbers yet. Write it with"
        " jax.numpy, or leave out where= for a rule that runs on the host with"
        " NumPy arrays"
    )


def _checked(
    exchange: Exchange, mask: jax.Array | None, values: Sequence[Tree]
) -> Arrays:
    """The results of an exchange, checked, and filled where the mask is False."""
    words = list(map(exchange.words, range(len(exchange.avals))))
    arrays = exchange.layout.fitting(
        values=values,
        avals=exchange.avals,
        kind=exchange.kind,
        words=words,
    )
    if mask is None:
        return arrays
    fills = of_results(exchange, exchange.layout.fills)
    return [
        _masked(mask, array, fill) for array, fill in zip(arrays, fills, strict=True)
    ]


# --- Masks ---------------------------------------------------------------------------


def _gated(operands: Arrays, mask: jax.Array, linear: slice) -> Arrays:
    """The operands, without derivatives where the mask is False.

    There a derivative of the rule may be infinite, and infinity times the zero
    cotangent of a masked result would be NaN. So tangents and cotangents, the `linear`
    operands, are zero there, and the others are constants.
    """
    linear_operands = range(len(operands))[linear]

    def gated(i: int, operand: jax.Array) -> jax.Array:
        # A tangent may be one of Python's numbers.
        with _jax.able_to_hold(getattr(operand, "dtype", None)):
            x = jnp.asarray(operand)
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x
            is_linear = i in linear_operands
            masked = 0 if is_linear else jax.lax.stop_gradient(x)
            return jnp.where(mask, x, masked)

    return [gated(i, operand) for i, operand in enumerate(operands)]


def _masked(mask: jax.Array, value: jax.Array, fill: bytes | None) -> jax.Array:
    """A result of JAX code, with its fill, or zeros, where the mask is False."""
    fills = np.zeros(1, value.dtype)
    if fill is not None:
        fills = np.frombuffer(fill, value.dtype)
    # One element stands for all, as it does if the shape is symbolic.
    shape = () if fills.size == 1 else value.shape
    elsewhere = fills.reshape(shape)
    with _jax.able_to_hold(value.dtype):
        return jnp.where(mask, value, elsewhere)


def _with_keys(template: Template, leaves: Sequence[jax.Array | None]) -> Trees:
    """The arguments that the first of these leaves are; typed keys among them."""
    keys = template.keys
    return template.unflatten(wrap_keys(leaves[: len(keys)], keys))[0]
