"""Two identities: one taps its tangent, the other the cotangent that comes back to it.

Neither has an effect, and each lowers to its operands: without differentiation nothing
is tapped. The JVP rule of the first taps the tangent. The JVP rule of the second binds
the same primitive on the tangent, and its transpose rule taps the cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax

from hostcall import _jax
from hostcall._engine.params.tap import TapParams
from hostcall._jax.types import LoweringContext, Primitive, Value
from hostcall._primitives.batching import Dims, Operands
from hostcall._primitives.tap.primitive import batched, bind

T = TypeVar("T")

tangent_tap_p = _jax.Primitive("host_tangent_tap")
cotangent_tap_p = _jax.Primitive("host_cotangent_tap")


def _identity(*operands: T, params: TapParams) -> list[T]:
    return list(params.arguments(operands))


def _batch(
    identity: Primitive, operands: Operands, dims: Dims, *, params: TapParams
) -> tuple[list[jax.Array], Dims]:
    moved, params, axes = batched(operands, dims, params)
    return identity.bind(*moved, params=params), axes


def _lower(ctx: LoweringContext, *operands: Value, params: TapParams) -> list[Value]:
    del ctx
    return _identity(*operands, params=params)


for _p in (tangent_tap_p, cotangent_tap_p):
    _p.multiple_results = True
    _p.def_impl(_identity)
    _p.def_abstract_eval(_identity)
    _jax.batchers[_p] = partial(_batch, _p)
    _jax.register_lowering(_p, _lower)


# --- Derivatives ---------------------------------------------------------------------


def _jvp(
    binds: Callable[..., list[jax.Array]],
    primals: Sequence[jax.Array],
    tangents: Sequence[jax.Array],
    *,
    params: TapParams,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Leaves the primals alone, and binds a tap or the second primitive on the
    tangents, whose transpose taps the cotangents.
    """
    dots = list(params.arguments(tangents))
    if any(type(dot) is not _jax.Zero for dot in dots):
        mask = params.mask(primals)
        dots = binds(*mask, *map(_jax.instantiate_zeros, dots), params=params) or dots
    return list(params.arguments(primals)), dots


def _cotangent_transpose(
    cotangents: Sequence[jax.Array], *operands: jax.Array, params: TapParams
) -> list[jax.Array | None]:
    mask = params.mask(operands)
    back = list(map(_jax.instantiate_zeros, cotangents))
    bind(*mask, *back, params=params)
    return [*(None for _ in mask), *back]


_jax.jvps[tangent_tap_p] = partial(_jvp, bind)
_jax.jvps[cotangent_tap_p] = partial(_jvp, cotangent_tap_p.bind)
_jax.transposes[cotangent_tap_p] = _cotangent_transpose


# --- The leaves of a value that have derivatives --------------------------------------


def _is_inexact(leaf: Any) -> bool:
    kind = getattr(leaf, "dtype", type(leaf))
    return bool(jax.numpy.issubdtype(kind, jax.numpy.inexact))


def split(x: Any) -> Any:
    """`x` with None for each leaf without a derivative."""
    return jax.tree.map(lambda leaf: leaf if _is_inexact(leaf) else None, x)


def joined(inexact: Any, x: Any) -> Any:
    """The inverse of `split`: takes the other leaves from `x`."""
    return jax.tree.map(
        lambda leaf, some: leaf if some is None else some,
        x,
        inexact,
        is_leaf=lambda leaf: leaf is None,
    )
