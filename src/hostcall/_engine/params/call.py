"""The parameters of a call's equation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax

from hostcall._core.order import ORDERED
from hostcall._engine.info import CallInfo
from hostcall._engine.params.equation import Equation
from hostcall._native import ResultForm


@dataclass(frozen=True, kw_only=True, repr=False)
class CallParams(Equation):
    """The parameters of one equation of the call primitive.

    Attributes:
        results_as: "tree": the function returns the structure of `result`. "leaves": it
            returns the same leaves in any containers. "nothing": its return value is
            ignored.
        levels, literals: as `Equation` says.
    """

    levels: int = 0
    results_as: Literal["tree", "leaves", "nothing"] = "tree"
    literals: bool = True

    @property
    def ordered(self) -> Any:
        """The effect whose token an ordered call takes and returns."""
        return ORDERED

    def info(self, devices: dict[int, Any], mesh: Any) -> CallInfo:
        """Describes a call to the engine; see `CallInfo`."""
        return CallInfo(self, devices, mesh)

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

    def _details(self) -> list[str]:
        rows = [f"rows={self.grid}"] if self.grid else []
        return super()._details() + rows
