"""Host code of a HostFunction: the function itself and its rules in Python.

`HostCode` is the value of one such call on flat arrays; `Part` (see `steps`) is the
Python object that the call runs. Both are compared by what they are made of, so that
JAX's caches hit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from hostcall._core.source import Place
from hostcall._core.spec import Results, Template
from hostcall._host_function import rules
from hostcall._host_function.primitive import Arrays, Tangents, Value
from hostcall._host_function.results import elementwise
from hostcall._host_function.steps import Part, code_of
from hostcall._host_function.trees import Trees, pick
from hostcall._primitives.call.batching import WHOLE
from hostcall._primitives.call.make import make_with

# value: the function itself.
# jvp: the tangents of the results. both: the results and their tangents.
# forward, backward: the two rules of defvjp.
# jacobian, transpose: the rules of those names.
Kind = Literal["value", "jvp", "both", "forward", "backward", "jacobian", "transpose"]


class OfFunction(Value):
    """A value that belongs to a HostFunction and takes its name and rules from it."""

    function: Any

    @property
    def name(self) -> str:  # type: ignore[override]
        return str(self.function.__name__)

    @property
    def rules(self) -> rules.Rules:
        return self.function.rules  # type: ignore[no-any-return]


@dataclass(frozen=True)
class HostCode(OfFunction):
    """One call of host code, as a function of flat arrays.

    Attributes:
        function: the HostFunction, compared by identity.
        trees: the trees of this way of calling it.
        kind: which of the function's codes is called.
        place: the user's line.
        nz: for each array of the arguments, whether it has a tangent here; for a
            transposition, whether the function is linear in it.
        take: whether a backward rule may take its residual out of the store, because
            this looks like the last use.
    """

    function: Any
    trees: Trees
    kind: Kind
    place: Place = field(compare=False)
    nz: tuple[bool, ...] = ()
    take: bool = True

    @property
    def code(self) -> Callable[..., Any]:
        """The user's Python function that runs."""
        if self.kind in ("jvp", "both"):
            jvp = self.rules.jvp
            assert jvp is not None
            return jvp.rule or next(filter(None, jvp.each))
        return code_of(self.function, self.kind)

    @property
    def avals(self) -> tuple[Any, ...]:  # type: ignore[override]
        trees, results = self.trees, self.trees.results.avals
        if self.kind == "value":
            return results
        if self.kind == "forward":
            return (*results, *self.function.residual_avals)
        if self.kind == "jacobian":
            return trees.jacobian_avals
        if self.kind in ("backward", "transpose"):
            return tuple(pick(trees.in_avals, self.nz))
        return (*results, *trees.out_avals) if self.kind == "both" else trees.out_avals

    @property
    def keeps_objects(self) -> bool:
        vjp = self.rules.vjp
        return (
            self.kind in ("forward", "backward")
            and vjp is not None
            and (vjp.keeps_objects)
        )

    def run(self, args: Arrays) -> Arrays:
        trees, mask = self.trees, None
        options = self.function.call_options(self.kind, self.keeps_objects)
        if trees.masked:
            args = list(args)
            mask = args.pop(self._mask_at)
        if self.function.result is elementwise and options["vmap_method"] in WHOLE:
            args = self._aligned(args, options)
        template, results = self._form(len(args))
        fills, code = self._fills(), Part(self)
        return make_with(
            options, code, template, results, fills, self.place, args, mask
        )

    def _form(self, n: int) -> tuple[Template, Results]:
        """The trees of the call: the function has its own, a rule `n` flat arrays."""
        trees = self.trees
        if self.kind == "value":
            return trees.template, trees.results
        keys = trees.results.keys if self.kind in ("both", "forward") else ()
        keys = (*keys, *(None for _ in self.avals[len(keys) :]))
        marks = trees.template.keys if self.takes_arguments else ()
        template = Template.flat(*marks, *(None for _ in range(n - len(marks))))
        return template, Results.flat(self.avals, keys)

    def _fills(self) -> tuple[bytes | None, ...]:
        fills: tuple[bytes | None, ...] = ()
        if self.kind in ("value", "both", "forward"):
            fills = self.trees.fills or ()
        return (*fills, *(None for _ in self.avals[len(fills) :]))

    @property
    def _mask_at(self) -> int:
        """The index of the mask among the operands."""
        if self.takes_arguments:
            return len(self.trees.in_avals) - 1
        return 0 if self.kind == "backward" else self.nz.count(False) - 1

    def _aligned(self, args: Arrays, options: dict[str, Any]) -> Arrays:
        """Gives the operands of an elementwise function as many axes as the result.

        A batch is one more axis in front of each operand. Without this, a batch of 16
        scalars beside one row of 9 would be (16,) beside (1, 9), which does not
        broadcast, and a batch of 9 scalars beside 9 rows of 9 would be taken for a row.
        The operands and results of the other rules have axes of their own; if those
        differ in number from the result's, the rows run one by one.
        """
        axes = len(self.trees.results.avals[0].shape)
        if self.kind not in ("value", "jvp", "both"):
            avals = self.trees.in_avals[: len(self.trees.template.keys)]
            if any(len(aval.shape) != axes for aval in avals):
                options["vmap_method"] = "sequential"
            return args
        if self.kind != "value" and options["vmap_method"] == "expand_dims":
            # A rule may ignore the very argument that has the batch.
            options["vmap_method"] = "broadcast_all"
        shapes = [np.shape(x) for x in args]
        return [
            x
            if len(shape) == axes
            else jnp.reshape(x, (1,) * (axes - len(shape)) + shape)
            for x, shape in zip(args, shapes, strict=True)
        ]

    @property
    def takes_arguments(self) -> bool:
        """Whether the first operands are the function's arguments."""
        return self.kind != "transpose" and (
            self.kind != "backward" or self.keeps_objects
        )

    def jvp(self, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        del args, tangents
        if self.kind == "value":
            raise rules.no_derivative(self.name, self.place, self.function.advice)
        raise rules.not_again(self.name, self.code, self.place, self.function.advice)

    def shared(self, dims: Sequence[int | None]) -> Value:
        """A backward rule does not take out a residual that the rows share."""
        if self.kind != "backward" or not self.keeps_objects or not self.take:
            return self
        handle = dims[len(self.trees.in_avals)]
        return replace(self, take=False) if handle is None else self

    def narrowed(self, used: Sequence[bool]) -> Value | None:
        """The function itself, if nothing uses the forward rule's residuals."""
        n = len(self.trees.results.avals)
        if self.kind != "forward" or any(used[n:]):
            return None
        return self.function.site(self.trees, self.place)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self.name if self.kind == "value" else f"{self.kind} of {self.name}"
