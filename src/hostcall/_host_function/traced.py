"""Rules in JAX code, which run while a program is traced.

They take the same steps as rules on the host (`function_code`): what a rule is called
with and what becomes of its value does not depend on where it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.host_code import TakesMask
from hostcall._core.spec import Template, flatten_arguments, wrap_keys
from hostcall._host_function import sendable
from hostcall._host_function.function_code import FunctionCode
from hostcall._host_function.primitive import Arrays, bind


def bound(
    code: FunctionCode, operands: Arrays, template: Template | None = None
) -> Arrays:
    """The results of a rule in a program; for `template` see `JaxCode`."""
    if sendable.rule_of(code.site.function, code.kind).where == "jax":
        return JaxCode(code, template).run(operands)
    return bind(operands, code)


class JaxCode(FunctionCode):
    """A rule in JAX code. It runs for every row, whatever the mask is.

    Attributes:
        mask: an array of the program, or None.
        template: the tree of the residuals that a forward rule leaves for the backward
            rule.
    """

    _awaits = False

    def __init__(self, code: FunctionCode, template: Template | None = None) -> None:
        vars(self).update(vars(code), template=template)

    def run(self, args: Arrays) -> Arrays:
        operands, self.mask = self._unmasked(args)
        run, sent, finish = self.split(operands, {})
        values, n = finish(run(*sent)), len(self.avals)
        found = self.site.trees.fitting(values[:n], self.avals, self.words)
        return [*masking(self.mask, found, self._fills()), *values[n:]]

    def _code(self, which: str, index: int | None = None) -> Any:
        if which == "value":
            return self._value
        rule: Any = sendable.code_of(self.site.function, which, index)
        # A rule that can take a mask, such as a HostFunction, gets it.
        masked = self.mask is not None and issubclass(type(rule), TakesMask)
        return rule.where(self.mask) if masked else rule

    def _value(self, *args: Any) -> Any:
        """The function itself, as a call in the program."""
        arrays, _ = flatten_arguments(args, {})
        mask = [] if self.mask is None else [self.mask]
        return self.site.trees.results.fill(bind([*arrays, *mask], self.site))

    def _arguments(self, leaves: Any) -> Any:
        return self.site.trees.arguments(gated(self.mask, leaves))

    def _linear(self, arrays: Any) -> Any:
        return masking(self.mask, arrays, (None,) * len(arrays))

    def _term(self, leaves: Arrays) -> Arrays:
        trees = self.site.trees
        return trees.fitting(leaves, trees.out_avals, self.words)  # type: ignore[no-any-return]

    def _zeros(self, like: Any) -> Any:
        return jnp.zeros_like(like)

    def _kept(self, residual: Any) -> Arrays:
        kept, self.template = flatten_arguments((residual,), {})
        return kept

    def _residual(self, operands: Any) -> tuple[Any, Any]:
        assert self.template is not None
        keys = self.template.keys
        kept = wrap_keys(gated(self.mask, operands[: len(keys)]), keys)
        ((residual,), _) = self.template.fill(kept)
        return residual, self._linear(operands[len(keys) :])

    def _completed(self, leaves: Arrays, cotangents: Any) -> Arrays:
        del cotangents
        return leaves


def masking(mask: Any, values: Arrays, fills: Sequence[bytes | None]) -> Arrays:
    """Puts fills, or zeros, into results of JAX code; None stays zero."""
    if mask is None:
        return list(values)
    masked = []
    for value, fill in zip(values, fills, strict=True):
        if value is not None:
            other = np.zeros((), value.dtype)
            if fill is not None:
                # One element of it if its shape is symbolic.
                shape = () if _jax.has_symbolic([value]) else value.shape
                other = np.frombuffer(fill, value.dtype).reshape(shape)
            value = jnp.where(mask, value, other)
        masked.append(value)
    return masked


def gated(mask: Any, arrays: Arrays) -> Arrays:
    """The operands of JAX code, without derivatives where the mask is False.

    There a derivative of the rule may be infinite, and infinity times the zero
    cotangent of a masked result would be NaN.
    """
    if mask is None:
        return arrays
    return [
        jnp.where(mask, x, jax.lax.stop_gradient(x))
        if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
        else x
        for x in arrays
    ]
