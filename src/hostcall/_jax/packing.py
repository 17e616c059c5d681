"""Many small arrays kept as a few large ones.

XLA copies an array of a loop that is needed after a step has changed it in place. Each
copy is an operation, and XLA's CPU runtime hands operations to other threads if more
than a few are ready at once, which costs more than the copies. So small arrays of one
type are copied together, and are taken apart only where they are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import jax
from jax import lax

from hostcall._jax import jaxprs
from hostcall._jax import types as _t

_SMALL = 512  # bytes


@dataclass(frozen=True)
class Packing:
    """Which values of a sequence are packed.

    Attributes:
        shapes: those of all values.
        packs: for each pack the positions of its values.
        apart: the positions of the other values.
    """

    shapes: list[tuple[int, ...]]
    packs: list[list[int]]
    apart: list[int]

    @classmethod
    def of(cls, variables: Sequence[_t.Var]) -> Packing:
        by_type: dict[object, list[int]] = {}
        for position, variable in enumerate(variables):
            is_small = jaxprs.is_array(variable) and _bytes(variable) <= _SMALL
            group = variable.aval.dtype if is_small else object()
            by_type.setdefault(group, []).append(position)
        return cls(
            shapes=[tuple(variable.aval.shape) for variable in variables],
            packs=[group for group in by_type.values() if len(group) > 1],
            apart=[group[0] for group in by_type.values() if len(group) == 1],
        )

    def pack(self, *values: jax.Array) -> list[jax.Array]:
        """One array for each pack. The others stay as they are."""

        def flat(x: jax.Array) -> jax.Array:
            return lax.reshape(x, (x.size,))

        packs = [
            lax.concatenate([flat(values[n]) for n in pack], 0) for pack in self.packs
        ]
        # Otherwise XLA moves them into the branch that takes them apart, and so copies
        # the values.
        return list(lax.optimization_barrier(packs))


class Unpacked(Sequence[jax.Array]):
    """The values of a packing, each of which is taken out of its pack where it is read:
    inside a branch, if this is done there.

    `packed`: the packs, and the values that are apart.
    """

    def __init__(self, packing: Packing, packed: Sequence[jax.Array]) -> None:
        self._shapes = packing.shapes
        n_packs = len(packing.packs)
        assert len(packed) == n_packs + len(packing.apart), "each value has a place"
        self._apart = dict(zip(packing.apart, packed[n_packs:], strict=True))
        self._begins: dict[int, tuple[jax.Array, int]] = {}
        for positions, pack in zip(packing.packs, packed[:n_packs], strict=True):
            begin = 0
            for position in positions:
                self._begins[position] = pack, begin
                begin += math.prod(self._shapes[position])

    def __len__(self) -> int:
        return len(self._shapes)

    @overload
    def __getitem__(self, position: int) -> jax.Array: ...
    @overload
    def __getitem__(self, position: slice) -> list[jax.Array]: ...
    def __getitem__(self, position: int | slice) -> jax.Array | list[jax.Array]:
        if isinstance(position, slice):
            return [self[n] for n in range(*position.indices(len(self)))]
        position = range(len(self))[position]  # or an IndexError, which ends a loop
        if position in self._apart:
            return self._apart[position]
        pack, begin = self._begins[position]
        shape = self._shapes[position]
        flat = lax.slice_in_dim(pack, begin, begin + math.prod(shape))
        return lax.reshape(flat, shape)


def _bytes(variable: _t.Var) -> int:
    size: int = math.prod(variable.aval.shape)
    return size * int(variable.aval.dtype.itemsize)
