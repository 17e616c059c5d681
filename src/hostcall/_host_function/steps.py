"""Host code of a HostFunction when it runs: the function itself, or one of its rules.

The engine calls a `Steps`. It puts the trees together, calls the user's function, takes
apart what that returned, and checks it. The call in the middle may run on another
thread, in another process or on another machine (`executor=`); see `sendable`. A
residual that it computes comes back here, since the next call may go to another worker.

Rules in JAX code take the same steps while a program is traced: `TracedSteps`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.host_code import HostCode, TakesMask
from hostcall._core.source import name_of, source_of
from hostcall._core.spec import Template, flatten_arguments, wrap_keys
from hostcall._host_function import sendable
from hostcall._host_function.primitive import Arrays, Tangents, bind
from hostcall._host_function.residuals import store
from hostcall._host_function.rules import (
    RULES,
    Function,
    Kind,
    Rule,
    Tree,
    forward_pair,
)
from hostcall._host_function.trees import RuleTrees, pick, spread
from hostcall._jax.types import Aval, TreeDef
from hostcall._policies.layer import same

# (function to run, its arguments, function that makes arrays of its value).
Parts: TypeAlias = tuple[Function, Sequence[Tree], Callable[[Tree], Iterable[Tree]]]

# An array of host code may be nested lists of numbers.
_add = partial(jax.tree.map, operator.add)


@dataclass(frozen=True)
class Steps(HostCode):
    """One piece of host code. It is compared by what it is made of, so that JAX's
    caches hit.

    The function itself gets its arguments as trees. A rule gets all arrays flat, which
    spares the engine the trees; here they are NumPy's, or as `arrays=` says.

    Attributes:
        site: the call of the HostFunction that it belongs to.
        kind: which of the function's codes is called.
        avals: of its results.
        nz: for each array of the arguments, whether it has a tangent here; for a
            transposition, whether the function is linear in it.
        take: whether a backward rule may take its residual out of the store, because
            this looks like the last use.
    """

    travels_as: ClassVar[str] = "host"

    site: RuleTrees
    kind: Kind
    avals: tuple[Aval, ...] = field(compare=False)
    nz: tuple[bool, ...] = ()
    take: bool = True

    def __post_init__(self) -> None:
        vars(self).update(__qualname__=name_of(self.code))

    def __repr__(self) -> str:
        return f"{'' if self.kind == 'value' else self.kind + ' of '}{self.site.name}"

    @cached_property
    def code(self) -> Function:
        """The user's function that names it in messages."""
        return self.site.function._code_of(self.kind)

    @property
    def words(self) -> str:
        """What messages about its value call it, with the function's name."""
        return RULES[self.kind][1]

    @cached_property
    def rule(self) -> Rule:
        """The rule that it belongs to. The function itself has none."""
        return self.site.function._rule_of(self.kind)

    @cached_property
    def keeps_objects(self) -> bool:
        """Whether it leaves its residual in the store, or looks there for it."""
        return self.kind in ("forward", "backward") and self.rule.keeps_objects

    @cached_property
    def n(self) -> int:
        """How many of the first operands are arrays of the function's arguments."""
        first = self.kind not in ("transpose", "backward") or self.keeps_objects
        return len(self.site.template.keys) if first else 0

    @property
    def fills(self) -> tuple[bytes | None, ...]:
        """For each result of a masked row, what it gets; None for zeros."""
        own = (self.kind in ("value", "both", "forward") and self.site.fills) or ()
        return (*own, *(None for _ in self.avals[len(own) :]))

    def unmasked(self, operands: Arrays) -> tuple[Arrays, jax.Array | None]:
        """(the operands without the mask, the mask or None)."""
        if not self.site.masked:
            return operands, None
        at = self.nz.count(False) - 1 if self.kind == "transpose" else self.n
        return [*operands[:at], *operands[at + 1 :]], operands[at]

    # --- What the engine asks ------------------------------------------------------

    def source(self) -> str:
        return source_of(self.code)

    def result_words(self, number: int) -> tuple[str, str]:
        if self.kind != "jacobian":
            return "", ""
        which = f"the Jacobian of {self.site.jacobian_paths[number]} that"
        rule = f"`{name_of(self.code)}`, a rule of `{self.site.name}`"
        return f"{which} {rule}, returned", (
            "A Jacobian has the axes of the result, then those of the argument"
        )

    def awaits(self) -> bool:
        return self.site.function._awaits(self.kind)

    def lane(self) -> Function:  # the function and its rules are one
        return self.site.function.fn

    def parts(self) -> tuple[Kind, Function]:
        return self.kind, self.code

    def __call__(self, *operands: Tree, **out: Tree) -> Tree:
        if self.kind == "value":
            return self._code("value")(*operands, **out)
        run, sent, finish = self.split(operands, {})
        return finish(run(*sent))

    def split(self, args: Sequence[Tree], kwargs: object) -> Parts:
        del kwargs
        if self.kind == "value":
            return self._code("value"), args, same
        run, sent, finish = getattr(self, f"_{self.kind}")(args)
        return run, sent, lambda value: tuple(finish(value))

    def _code(self, kind: Kind, index: int | None = None) -> Function:
        """One of the user's functions, in a form that the executor can send."""
        function = self.site.function
        if function.options["executor"] is None:
            return function._code_of(kind, index)
        return sendable.Sendable(function, kind, index)

    # --- What is different in JAX code ---------------------------------------------

    @staticmethod
    def zeros(like: jax.Array) -> jax.Array:
        return np.zeros(like.shape, like.dtype)

    def _arguments(self, arrays: Arrays) -> Sequence[Tree]:
        template = self.site.template
        return arrays if template.is_flat else template.fill(arrays)[0]

    def _linear(self, arrays: Arrays) -> Arrays:
        """Tangents or cotangents among the operands."""
        return arrays

    def _kept(self, residual: Tree) -> Arrays:
        """The arrays that a forward rule's residual becomes in the program."""
        if self.keeps_objects:
            return [store.put(residual)]
        structure = "residuals in the structure of residuals="
        return self.site.leaves_of(self._tree, residual, self.words, structure)

    def _residual(self, operands: Arrays) -> tuple[Tree, Arrays]:
        """(the residual in these operands of a backward rule, the cotangents)."""
        n = self._tree.num_leaves
        return self._tree.unflatten(operands[:n]), operands[n:]

    @property
    def _tree(self) -> TreeDef:
        """Of the residuals that are arrays of the program."""
        assert self.rule.residuals is not None
        return self.rule.residuals.treedef

    def _completed(self, leaves: Tangents, cotangents: Arrays) -> Tangents:
        """The cotangents of arguments, with zeros for None.

        If the rule works on whole batches, the batch axes come first, and the zeros
        need them too, as the cotangents of the results have them.
        """
        if not any(leaf is None for leaf in leaves):
            return leaves
        # All cotangents of the results have the same batch axes.
        ct, out = cotangents[-1], self.site.out_avals[-1]
        batch = ct.shape[: len(ct.shape) - len(out.shape)]
        return [
            np.zeros(batch + aval.shape, aval.dtype) if leaf is None else leaf
            for leaf, aval in zip(leaves, self.avals, strict=True)
        ]

    def _term(self, leaves: Tangents) -> Arrays:
        """One argument's share of the tangents."""
        return leaves

    # --- The steps of a rule -------------------------------------------------------
    #
    # Each takes the operands without the mask.

    def _several(self, calls: Function, *sent: Tree) -> tuple[Function, Sequence[Tree]]:
        return sendable.awaited if self.awaits() else sendable.driven, (calls, *sent)

    def _jvp(self, operands: Arrays) -> Parts:
        site, jvp, n = self.site, self.rule, self.n
        m = n + sum(self.nz)
        args = self._arguments(operands[:n])
        dots = spread(self._linear(operands[n:m]), self.nz)
        if jvp.flat:
            sent = args, site.unmasked(dots), site.out_diff
            return self._code("jvp"), sent, self._pushed
        whole = site.tangents(operands[:n], dots, self.zeros)
        if jvp.fn is None:
            outs = site.results.fill(operands[m:]) if operands[m:] else None
            fn = self._code("value") if outs is None else None
            positions = sorted(set(pick(site.positions, self.nz)))
            terms = [(self._code("jvp", p), whole[p]) for p in positions]
            several = self._several(sendable.push_each, terms, fn, outs, args)
        else:
            fn = self._code("value") if self.kind == "both" else None
            given = self._code("jvp"), fn, site.result_of_zeros, args, whole
            several = self._several(sendable.push_whole, *given)
        return *several, self._pushed

    _both = _jvp

    def _pushed(self, value: tuple[Tree, Tree]) -> Arrays:
        site, (outs, touts), both = self.site, value, self.kind == "both"
        if not self.rule.flat:
            outs = site.out_leaves(outs, self.words) if both else ()
            terms = [touts]
            if self.rule.fn is None:  # a rule may return None for zero
                terms = [term for term in touts if term is not None] or touts[:1]
            leaves = [
                self._term(pick(site.out_leaves(term, self.words), site.out_diff))
                for term in terms
            ]
            touts = [reduce(_add, column) for column in zip(*leaves, strict=True)]
        return [*outs, *touts] if both else touts

    def _forward(self, operands: Arrays) -> Parts:
        def finish(value: Tree) -> Arrays:
            outs, residual = forward_pair(value, self.site.name)
            return [*self.site.out_leaves(outs, self.words), *self._kept(residual)]

        return self._code("forward"), self._arguments(operands), finish

    def _backward(self, operands: Arrays) -> Parts:
        if self.keeps_objects:
            handle, given = operands[self.n], operands[self.n + 1 :]
            residual, there = store.get(handle, self.take)
            if not there:
                return self._both_halves(operands[: self.n], handle, given)
        else:
            residual, given = self._residual(operands)
        sent = (residual, *self._given(given))
        return self._code("backward"), sent, lambda value: self._pulled(value, given)

    def _both_halves(self, args: Arrays, handle: np.ndarray, given: Arrays) -> Parts:
        """The forward rule again, as the store has dropped its residual."""
        site, fn = self.site, self.site.function.fn
        store.say_that_it_runs_again(handle, site.name, source_of(fn), site.place)
        codes = self._code("forward"), self._code("backward")
        sent = (*codes, site.name, self._arguments(args), self._given(given))

        def finish(value: tuple[Tree, Tree]) -> Tangents:
            store.put_back(handle, value[0])
            return self._pulled(value[1], given)

        return *self._several(sendable.both_halves, *sent), finish

    def _given(self, cotangents: Arrays) -> tuple[Tree, ...]:
        """The arguments of the backward rule besides its residuals."""
        site = self.site
        if self.rule.flat:
            return spread(cotangents, site.out_diff), site.unmasked(self.nz)
        return (site.cotangents(cotangents),)

    def _pulled(self, value: Tree, given: Arrays) -> Tangents:
        if self.rule.flat:
            return self._completed(list(value), given)
        leaves = self.site.argument_leaves(value, self.words)
        return self._completed(pick(leaves, self.nz), given)

    def _transpose(self, operands: Arrays) -> Parts:
        site = self.site
        positions = site.diff_positions
        still = [not flag for flag in site.unmasked(self.nz)]
        n = sum(still)
        args = self._arguments(spread(operands[:n], still))
        given = self._linear(operands[n:])

        def finish(value: Tree) -> Tangents:
            whole = (value,) if len(positions) == 1 else value
            leaves = site.argument_leaves(whole, self.words, positions)
            return self._completed(pick(leaves, self.nz), given)

        others = [arg for i, arg in enumerate(args) if i not in positions]
        return self._code("transpose"), (site.cotangents(given), *others), finish

    def _jacobian(self, operands: Arrays) -> Parts:
        args = self._arguments(operands)
        return self._code("jacobian"), args, self.site.jacobian_leaves


# --- In JAX code ---------------------------------------------------------------------
#
# What a rule is called with and what becomes of its value does not depend on where it
# runs. Rules in JAX code run while a program is traced.


class TracedSteps(Steps):
    """A rule in JAX code. It runs for every row, whatever the mask is.

    Attributes:
        mask: an array of the program, or None.
        template: the tree of the residuals that a forward rule leaves for the backward
            rule.
    """

    mask: jax.Array | None
    template: Template | None

    @staticmethod
    def zeros(like: jax.Array) -> jax.Array:
        return jnp.zeros_like(like)

    def __init__(self, steps: Steps, template: Template | None = None) -> None:
        vars(self).update(vars(steps), template=template)

    def awaits(self) -> bool:
        return False

    def run(self, operands: Arrays) -> Arrays:
        operands, mask = self.unmasked(operands)
        vars(self).update(mask=mask)
        run, sent, finish = self.split(operands, {})
        values, n = list(finish(run(*sent))), len(self.avals)
        found = self.site.fitting(values[:n], self.avals, self.words)
        return [*masking(mask, found, self.fills), *values[n:]]

    def _code(self, kind: Kind, index: int | None = None) -> Function:
        if kind == "value":
            return self._value
        rule: Tree = self.site.function._code_of(kind, index)
        # A rule that can take a mask, such as a HostFunction, gets it.
        masked = self.mask is not None and issubclass(type(rule), TakesMask)
        found: Function = rule.where(self.mask) if masked else rule
        return found

    def _value(self, *args: Tree) -> Tree:
        """The function itself, as a call in the program."""
        arrays, _ = flatten_arguments(args, {})
        mask = [] if self.mask is None else [self.mask]
        return self.site.results.fill(bind([*arrays, *mask], self.site))

    def _arguments(self, arrays: Arrays) -> Sequence[Tree]:
        return self.site.arguments(gated(self.mask, arrays))

    def _linear(self, arrays: Arrays) -> Arrays:
        return masking(self.mask, arrays, (None,) * len(arrays))

    def _term(self, leaves: Arrays) -> Arrays:
        return self.site.fitting(leaves, self.site.out_avals, self.words)

    def _kept(self, residual: Tree) -> Arrays:
        kept, template = flatten_arguments((residual,), {})
        vars(self).update(template=template)
        return kept

    def _residual(self, operands: Arrays) -> tuple[Tree, Arrays]:
        assert self.template is not None
        keys = self.template.keys
        kept = wrap_keys(gated(self.mask, operands[: len(keys)]), keys)
        ((residual,), _) = self.template.fill(kept)
        return residual, self._linear(operands[len(keys) :])

    def _completed(self, leaves: Tangents, cotangents: Arrays) -> Tangents:
        del cotangents
        return leaves


def masking(
    mask: jax.Array | None, values: Arrays, fills: Sequence[bytes | None]
) -> Arrays:
    """Puts fills, or zeros, into results of JAX code."""
    if mask is None:
        return values
    masked = []
    for value, fill in zip(values, fills, strict=True):
        other = np.zeros((), value.dtype)
        if fill is not None:
            # One element of it if its shape is symbolic.
            shape = () if _jax.has_symbolic([value]) else value.shape
            other = np.frombuffer(fill, value.dtype).reshape(shape)
        masked.append(jnp.where(mask, value, other))
    return masked


def gated(mask: jax.Array | None, arrays: Tangents) -> Tangents:
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
