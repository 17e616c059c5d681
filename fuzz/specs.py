"""Results, returned values, arguments and fills of hc.call: trees of any leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import hostcall as hc
from fuzz.draw import Draw


class Pair(NamedTuple):
    a: Any
    b: Any


class Odd:
    """Has a shape and a dtype, of any kind."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype


SHAPES = [(), (1,), (2,), (3, 2), (0,), (2, 0, 1), (1,) * 9]
DTYPES = ["float32", "int32", "bool", "uint8", "complex64", "float16", "int8", "uint32"]
DTYPES += [ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3fn]
LATER = ["float64", "int64", "object", "U3", "M8[s]", "V4", ">f4", "longdouble"]
KEY = jax.random.key(0)
LEAVES: list[Any] = [1, 2.5, True, 1j, "text", object(), np.str_("x"), KEY, jnp.ones(2)]
LEAVES += [2**31, -(2**63), 2**70, float("nan"), np.float64(1e300), np.ones(2, ">f4")]
LEAVES += [Odd((2,), "float32"), Odd((-1,), "int32"), Odd(None, int), Odd((2.0,), "f4")]
LEAVES += [Odd((2**40,), "f4"), Odd((2,), "nonsense"), Odd((2,), None), Odd("ab", "f4")]
LEAVES += [np.ma.masked_array([1.0, 2.0], [False, True]), np.array([1, "x"], object)]
LEAVES += [
    hc.results.like(0),
    np.zeros((2, 2))[:, ::-1],
    np.array("2020", "M8[D]"),
    10**400,
]
LARGE = 2**28  # results of more elements are not asked for: the machine lacks them


def seeds() -> list[bytes]:
    starts = range(0, 220, 31)
    return [bytes([k, *range(n, n + 30)]) for k in range(7) for n in starts]


def tree_of(draw: Draw, leaf: Any, depth: int = 3, keys: Any = ("a", "b")) -> Any:
    kind = draw.int(0, 6) if depth else 0
    inner = lambda: tree_of(draw, leaf, depth - 1, keys)
    if kind == 1:
        return [inner() for _ in range(draw.int(0, 3))]
    if kind == 2:
        return tuple(inner() for _ in range(draw.int(0, 3)))
    if kind == 3:
        return {draw.choice(keys): inner() for _ in range(draw.int(0, 2))}
    if kind == 4:
        return Pair(inner(), inner())
    return None if kind == 5 else leaf()


def spec(draw: Draw) -> Any:
    if draw.int(0, 3) == 3:
        return draw.choice(LEAVES)
    if draw.int(0, 7) == 7:
        return Odd(draw.choice(SHAPES), draw.choice(LATER))
    return jax.ShapeDtypeStruct(draw.choice(SHAPES), draw.choice(DTYPES))


def value_for(draw: Draw, leaf: Any) -> Any:
    """What a function returns for a leaf: mostly what was declared."""
    if draw.int(0, 3) == 3:
        return draw.choice(LEAVES)
    try:
        value = np.full(leaf.shape, draw.int(0, 1), np.dtype(leaf.dtype))
    except (AttributeError, TypeError, ValueError, MemoryError):
        return leaf
    kinds = [value, value.T, value.tolist(), value[None], value[..., None]]
    if value.dtype in map(np.dtype, DTYPES):
        kinds.append(jnp.asarray(value))
    return draw.choice(kinds)


def too_large(leaf: Any) -> bool:
    try:
        return bool(np.prod(leaf.shape, dtype=float) > LARGE)
    except (AttributeError, TypeError, ValueError):
        return False


def one(data: bytes) -> None:
    draw = Draw(data)
    result = tree_of(draw, lambda: spec(draw))
    args = [tree_of(draw, lambda: draw.choice(LEAVES)) for _ in range(draw.int(0, 2))]
    more: dict[str, Any] = {}
    if draw.bool():
        more = {"where": draw.choice([True, False, jnp.array(True), 3, None])}
        if draw.bool():
            more["fill"] = tree_of(draw, lambda: draw.choice(LEAVES), 1)
    if any(map(too_large, jax.tree.leaves(result))):
        return
    if draw.bool():
        value = tree_of(draw, lambda: draw.choice(LEAVES), 3, ["a", "b", 1, (2,)])
    else:
        value = jax.tree.map(lambda leaf: value_for(draw, leaf), result)
    try:
        got = hc.call(lambda *_: value, result, *args, **more)
    except hc.errors.HostcallError:
        return

    def said(leaf):
        if not hasattr(leaf, "dtype"):
            return (), jnp.result_type(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf.shape, leaf.dtype
        return leaf.shape, np.dtype(leaf.dtype).newbyteorder("=")

    wanted, have = jax.tree.map(said, result), jax.tree.map(said, got)
    assert wanted == have, (wanted, have)
