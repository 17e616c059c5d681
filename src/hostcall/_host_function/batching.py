"""The batching rules of the three primitives: each binds itself on a batched object.

A batched object wraps the inner one and runs it under `jax.vmap`; every result has the
batch as its first axis. A tangent that all rows share gets the sum of the rows'
cotangents, since sharing is a broadcast and its transpose is a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from hostcall import _jax
from hostcall._host_function.primitive import (
    Arrays,
    Linear,
    Pair,
    Tangents,
    Value,
    bind,
    bind_linear,
    jvp_p,
    linear_p,
    value_p,
)
from hostcall._primitives.axes import size_of

Dims = tuple[int | None, ...]


def _wider(avals: Sequence[Any], size: int) -> tuple[Any, ...]:
    return tuple(aval.update(shape=(size, *aval.shape)) for aval in avals)


def _call(
    f: Callable[..., Any], size: int, *pairs: tuple[Arrays, Sequence[Any]]
) -> Any:
    """`f` on each row of lists of arrays, which are given with their batch axes."""
    lists, dims = [list(p[0]) for p in pairs], tuple(list(p[1]) for p in pairs)
    if any(d is not None for ds in dims for d in ds):
        return jax.vmap(f, dims, axis_size=size)(*lists)
    # jax.vmap wants at least one batched argument.
    alone = jax.vmap(lambda _, *xs: f(*xs), (0, *(None for _ in lists)))
    return alone(jnp.zeros(size), *lists)


def _unbatched(cotangent: Any, dim: int | None) -> Any:
    if cotangent is None:
        return None
    return cotangent.sum(0) if dim is None else _jax.moveaxis(cotangent, 0, dim)


@dataclass(frozen=True)
class _Batched:
    """What the batched objects have in common.

    Attributes:
        dims: the batch axes of the arguments, or of the constants.
        tangent_dims: those of the tangents.
    """

    inner: Any
    size: int
    dims: Dims
    tangent_dims: Dims = ()

    @property
    def avals(self) -> tuple[Any, ...]:
        return _wider(self.inner.avals, self.size)

    def run(self, args: Arrays, *tangents: Arrays) -> Arrays:
        pairs = zip((args, *tangents), (self.dims, self.tangent_dims), strict=False)
        return list(_call(self.inner.run, self.size, *pairs))

    def _back(self, f: Any, known: Arrays, cotangents: Arrays, dims: Dims) -> Tangents:
        """`dims` are the batch axes of what `f` gives the cotangents of."""
        pairs = (known, self.dims), (cotangents, [0] * len(cotangents))
        return list(map(_unbatched, _call(f, self.size, *pairs), dims))


class BatchedValue(_Batched, Value):  # type: ignore[override]
    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name  # type: ignore[no-any-return]

    def jvp(self, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        # None is a pytree without leaves, in what goes in and in what comes out.
        pairs = (args, self.dims), (tangents, self.dims)
        outs, touts = _call(self.inner.jvp, self.size, *pairs)
        return outs, touts

    def transposed(self, args: Arrays, cotangents: Arrays) -> Tangents:
        return self._back(self.inner.transposed, args, cotangents, self.dims)

    def shared(self, dims: Sequence[int | None]) -> Value:
        return replace(self, inner=self.inner.shared(dims))

    def narrowed(self, used: Sequence[bool]) -> Value | None:
        inner = self.inner.narrowed(used)
        return None if inner is None else replace(self, inner=inner)


class BatchedLinear(_Batched, Linear):  # type: ignore[override]
    def back(self, consts: Arrays, cotangents: Arrays) -> Arrays:
        return self._back(self.inner.back, consts, cotangents, self.tangent_dims)


class BatchedPair(_Batched, Pair):
    @property
    def value(self) -> Value:  # type: ignore[override]
        return BatchedValue(self.inner.value, self.size, self.dims)

    @property
    def tangent_avals(self) -> tuple[Any, ...]:  # type: ignore[override]
        return _wider(self.inner.tangent_avals, self.size)

    def start(self, args: Arrays, backward: bool) -> tuple[Arrays, Arrays, Linear]:
        found: list[Linear] = []

        def row(args: Arrays) -> tuple[Arrays, Arrays]:
            outs, consts, linear = self.inner.start(args, backward)
            found.append(linear)
            return outs, consts

        outs, consts = _call(row, self.size, (args, self.dims))
        dims = (0,) * len(consts)
        return (
            outs,
            consts,
            BatchedLinear(found[-1], self.size, dims, self.tangent_dims),
        )


# --- Rules -------------------------------------------------------------------------


def _batch_value(operands: Any, dims: Any, *, what: Value) -> tuple[Arrays, Any]:
    size, dims = size_of(operands, dims), tuple(dims)
    by_rule = what.batch(size, list(operands), dims)
    if by_rule is not None:
        return by_rule
    outs = bind(list(operands), BatchedValue(what.shared(dims), size, dims))
    return outs, (0,) * len(outs)


def _batch_jvp(operands: Any, dims: Any, *, what: Pair, n: int) -> tuple[Arrays, Any]:
    """If the rows differ only in their tangents (jax.jacfwd), they share one value."""
    size, dims = size_of(operands, dims), tuple(dims)
    if all(d is None for d in dims[:n]):
        outs, consts, linear = what.start(list(operands[:n]), False)
        wide = BatchedLinear(linear, size, (None,) * len(consts), dims[n:])
        touts = bind_linear(consts, list(operands[n:]), wide)
        return [*outs, *touts], [None] * len(outs) + [0] * len(touts)
    pair = BatchedPair(what, size, dims[:n], dims[n:])
    outs = jvp_p.bind(*operands, what=pair, n=n)
    return list(outs), (0,) * len(outs)


def _batch_linear(
    operands: Any, dims: Any, *, what: Linear, n: int
) -> tuple[Arrays, Any]:
    size, dims = size_of(operands, dims), tuple(dims)
    wide = BatchedLinear(what, size, dims[:n], dims[n:])
    outs = linear_p.bind(*operands, what=wide, n=n)
    return list(outs), (0,) * len(outs)


_jax.batchers[value_p] = _batch_value
_jax.batchers[jvp_p] = _batch_jvp
_jax.batchers[linear_p] = _batch_linear
for _type in (BatchedValue, BatchedLinear, BatchedPair):
    _jax.hold_weakly_in_caches(_type)
