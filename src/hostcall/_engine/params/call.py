"""The equation of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import jax

from hostcall._core.options import CallOptions, PlaceOptions
from hostcall._core.portable import Malformed, Told
from hostcall._engine.params.equation import Equation
from hostcall._jax.types import Aval
from hostcall._native import Lend, ResultForm

_LENDS = {False: Lend.COPY, True: Lend.ARGS, "out": Lend.OUT}


@dataclass(frozen=True, kw_only=True, repr=False)
class CallParams(Equation):
    """The parameters of one equation of the call primitive.

    Attributes:
        results_as: "tree": the function returns the structure of `result`. "leaves": it
            returns the same leaves in any containers. "nothing": its return value is
            ignored.
        levels: as `Equation` says.
        literals: whether the function may return Python numbers for 32-bit arrays.
    """

    levels: int = 0
    results_as: Literal["tree", "leaves", "nothing"] = "tree"
    literals: bool = True

    takes = CallOptions
    name = "call"

    @cached_property
    def options(self) -> CallOptions:
        return cast(CallOptions, self.callback.options)

    @property
    def method(self) -> str:
        method = self.options.vmap_method or "sequential"
        return method if isinstance(method, str) else "own"

    @cached_property
    def native(self) -> dict[str, Any]:
        how, tree = self.options, self.callback.results.treedef
        return {
            "lend": _LENDS[how.lend],
            "out_tree": tree.unflatten if how.lend == "out" else None,
            "keep": how.keep,
            "literals": self.literals,
        }

    def form(self) -> ResultForm:
        treedef = self.callback.results.treedef
        n = treedef.num_leaves
        if self.results_as == "nothing":
            return ResultForm.IGNORED
        if self.results_as == "leaves":
            return ResultForm.LEAF if n == 1 else ResultForm.TREE
        structure = jax.tree_util.tree_structure
        if treedef == structure(0):
            return ResultForm.LEAF
        if treedef == structure(None):
            return ResultForm.NOTHING
        if n and treedef == structure((0,) * n):
            return ResultForm.TUPLE
        return ResultForm.TREE

    @classmethod
    def place_of_text(
        cls, place: PlaceOptions, told: Mapping[str, Told]
    ) -> PlaceOptions:
        whole = "expand_dims" if told["params"]["levels"] else None
        return replace(
            cast(CallOptions, place),
            vmap_method="parallel" if told["parallel"] else whole,
        )

    def check_text(self, operands: Sequence[Aval]) -> None:
        ndims = [aval.ndim for aval in (*operands, *self.avals)]
        if not 0 <= self.levels <= max(ndims, default=0):
            raise Malformed(f"the option levels={self.levels}")

    def _details(self) -> list[str]:
        rows = [f"rows={self.grid}"] if self.grid else []
        return super()._details() + rows
