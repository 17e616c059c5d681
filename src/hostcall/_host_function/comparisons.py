"""How `hc.testing.check` compares what two ways of computing a result give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._host_function.primitives import Arrays
from hostcall._host_function.rules import Tree


class Ended(Exception):
    """A check ended early: (status, detail)."""


# --- What must agree ------------------------------------------------------------------


def same(got: Arrays, wanted: Tree, mismatch: str) -> None:
    wanted_leaves = jax.tree.leaves(wanted)
    for a, b in zip(map(np.asarray, got), wanted_leaves, strict=True):
        is_equal = np.array_equal(a, b, equal_nan=inexact(a))
        _expect(is_equal, mismatch, a, b)


def close(
    got: Arrays,
    wanted: Arrays,
    mismatch: str,
    rtol: float,
    errors: Sequence[float] = (),
) -> None:
    """`errors` says how wrong each leaf of `wanted` may be itself; else none is."""
    exact = [0.0] * len(got)
    for a, b, error in zip(got, wanted, errors or exact, strict=True):
        # Twice the error, which is itself an estimate.
        atol = rtol * largest(b) + 2 * error + 1e-6
        # Integers may be rounded values.
        is_close = not inexact(a) or np.allclose(a, b, rtol, atol, equal_nan=True)
        _expect(is_close, mismatch, a, b)


def _expect(holds: bool, mismatch: str, got: jax.Array, wanted: jax.Array) -> None:
    if holds:
        return
    values = f"{_short(got)} where {_short(wanted)} was expected"
    raise Ended("failed", f"{mismatch}: {values}")


def agree(products: tuple[float, float], error: float, mismatch: str) -> None:
    """Compares two numbers; `mismatch` has a place for each."""
    first, second = products
    is_close = abs(first - second) <= error  # not if one is NaN
    if not is_close:
        raise Ended("failed", mismatch.format(first, second))


def stacked(rows: Iterable[Arrays]) -> list[np.ndarray]:
    return [np.stack(column) for column in zip(*rows, strict=True)]


def inexact(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def inner(a: Arrays, b: Arrays) -> float:
    """The real part of the sum of products, without conjugation.

    By JAX's rules a derivative J and its transpose have equal <ct, J t> and <J^T ct, t>
    in this product, whether or not the function is holomorphic (JAX, Autodiff Cookbook,
    "Complex numbers and differentiation").
    """
    products = [
        np.vdot(np.conj(x), y)  # which conjugates its first argument again
        for x, y in zip(a, b, strict=True)
    ]
    return float(sum(map(np.real, products)))


def size(a: Arrays) -> float:
    """The length of a vector that has these parts."""
    squares = [np.sum(np.abs(np.asarray(x)) ** 2) for x in a]
    return float(np.sqrt(sum(squares)))


def largest(x: jax.Array) -> float:
    return float(np.max(np.abs(x), initial=0.0))


def _short(x: jax.Array) -> str:
    text = np.array2string(np.asarray(x), threshold=6, precision=6, edgeitems=2)
    return " ".join(text.split())
