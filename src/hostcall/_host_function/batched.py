"""Batches of a function with rules: what its primitives are under vmap.

A batched object wraps the inner one and runs it under `jax.vmap`; every result has the
batch as its first axis. A tangent that all rows share gets the sum of the rows'
cotangents, since sharing is a broadcast and its transpose is a sum.

What vmap makes of the two primitives:

    host_function of f             host_function of `Batched(f)`
    host_jvp, its arguments vary   host_jvp of `BatchedValueAndTangent`
    host_jvp, its tangents alone   the value once, and host_function of `Batched` of
                                   the linear part

A function with a rule for batches (`defbatch`) has the code of that rule instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import jax

from hostcall import _jax
from hostcall._host_function.primitives import (
    Arrays,
    DiffFunction,
    Flags,
    Moved,
    Rows,
    Tangents,
    ValueAndTangent,
    bind,
    jvp_p,
    value_p,
)
from hostcall._jax.types import Aval
from hostcall._primitives.batching import Dims, size_of

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Batched(DiffFunction):
    """A batch of calls of the same function.

    Attributes:
        inner: what each row does.
        size: the number of rows.
        dims: the batch axis of each operand, None if all rows share it.
    """

    inner: DiffFunction
    size: int
    dims: tuple[int | None, ...]

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def avals(self) -> tuple[Aval, ...]:  # type: ignore[override]
        batched = [
            aval.update(shape=(self.size, *aval.shape)) for aval in self.inner.avals
        ]
        return tuple(batched)

    def run(self, operands: Arrays) -> Arrays:
        return list(self._each_row(self.inner.run, (operands, self.dims)))

    def jvp(self, operands: Arrays, tangents: Tangents) -> Moved:
        # None is a pytree without leaves, in what goes in and in what comes out.
        return self._each_row(
            self.inner.jvp, (operands, self.dims), (tangents, self.dims)
        )

    def transposed(self, operands: Tangents, cotangents: Arrays) -> Tangents:
        # Cotangents are of results, which have the batch in front.
        cotangent_dims = [0 for _ in cotangents]
        back = self._each_row(
            self.inner.transposed,
            (operands, self.dims),
            (cotangents, cotangent_dims),
        )
        return list(map(_unbatched, back, self.dims))

    def shared(self, dims: Dims) -> DiffFunction:
        return replace(self, inner=self.inner.shared(dims))

    def narrowed(self, used: Flags) -> DiffFunction | None:
        inner = self.inner.narrowed(used)
        return None if inner is None else replace(self, inner=inner)

    def _each_row(
        self, code: Callable[..., T], *arrays_and_dims: tuple[Tangents, Dims]
    ) -> T:
        """`code` on each row of lists of arrays, which come with their batch axes."""
        # JAX wants all of these sharded alike, and cotangents of the host's results are
        # not. So each device has all rows of each.
        lists = [
            [None if array is None else _jax.replicated(array) for array in arrays]
            for arrays, _ in arrays_and_dims
        ]
        axes = tuple([list(dims) for _, dims in arrays_and_dims])
        rows: Callable[..., T] = jax.vmap(code, axes, axis_size=self.size)
        return rows(*lists)


def _unbatched(cotangent: jax.Array | None, dim: int | None) -> jax.Array | None:
    """A cotangent with the batch in front, as one of the operand with it at `dim`."""
    if cotangent is None:
        return None
    if dim is None:  # an operand that all rows share: its transpose is a sum
        return cotangent.sum(0)
    return _jax.moveaxis(cotangent, 0, dim)


@dataclass(frozen=True, repr=False)
class BatchedValueAndTangent(ValueAndTangent, Batched):
    inner: ValueAndTangent
    n: int
    value: DiffFunction

    def start(
        self, args: Arrays, backward: bool
    ) -> tuple[Arrays, Arrays, DiffFunction]:
        # Rows differ in their arrays only, so they all have one linear function, which
        # is no array and leaves jax.vmap beside its results.
        linear_functions: list[DiffFunction] = []

        def row(args: Arrays) -> tuple[Arrays, Arrays]:
            outs, consts, linear = self.inner.start(args, backward)
            linear_functions.append(linear)
            return outs, consts

        arg_dims = self.dims[: self.n]
        tangent_dims = self.dims[self.n :]
        outs, consts = self._each_row(row, (args, arg_dims))
        # What jax.vmap returns has the batch in front.
        const_dims = [0 for _ in consts]
        dims = (*const_dims, *tangent_dims)
        assert linear_functions, "jax.vmap has traced one row"
        return outs, consts, Batched(linear_functions[-1], self.size, dims)


# --- JAX's rule -----------------------------------------------------------------------


def _batch(operands: Arrays, dims: Dims, *, function: DiffFunction) -> Rows:
    """JAX's rule of vmap for both primitives: see the table at the top."""
    size = size_of(operands, dims)
    dims = tuple(dims)
    operands = list(operands)
    by_rule = function.batch(size, operands, dims)
    if by_rule is not None:
        return by_rule
    sharded = partial(_jax.rows_sharded_alike, operands=operands, dims=dims)
    if not isinstance(function, ValueAndTangent):
        outs = bind(operands, Batched(function.shared(dims), size, dims))
        return sharded(outs), [0] * len(outs)
    n = function.n
    if any(dim is not None for dim in dims[:n]):
        batched = BatchedValueAndTangent(
            inner=function,
            size=size,
            dims=dims,
            n=n,
            value=Batched(function.value, size, dims[:n]),
        )
        outs = bind(operands, batched)
        return sharded(outs), [0] * len(outs)

    # The rows differ only in their tangents (jax.jacfwd), and share one value.
    args = operands[:n]
    tangents = operands[n:]
    outs, consts, linear = function.start(args, backward=False)
    const_dims = [None for _ in consts]
    batched_linear = Batched(linear, size, (*const_dims, *dims[n:]))
    out_tangents = sharded(bind([*consts, *tangents], batched_linear))
    out_dims = [None for _ in outs]
    tangent_dims = [0 for _ in out_tangents]
    return [*outs, *out_tangents], [*out_dims, *tangent_dims]


for _p in (value_p, jvp_p):
    _jax.batchers[_p] = _batch
