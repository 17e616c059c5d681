"""Operations that NumPy computes as XLA does.

The host runs a program's equations one by one to find what has made a bad value. XLA
compiles each operation for each type that it gets, which takes some 20 ms: a solver's
step has a hundred of them. NumPy has the same results for those that round correctly,
compare, choose or move elements. XLA's CPU takes numbers that are not normal for zeros,
so they are made zeros here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostcall._jax import JaxprEquation, jaxprs


def _max(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    # Of two zeros NumPy takes any, and XLA 0.0 unless both are -0.0: so is their sum.
    larger: np.ndarray = np.where((x == 0) & (y == 0), x + y, np.maximum(x, y))
    return larger


def _min(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return -_max(-x, -y)


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "square": np.square,
    "sub": np.subtract,
    # Tests, whose results are flags.
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "ne": np.not_equal,
}
_OF_FLOATS: dict[str, Callable[..., Any]] = {
    **_ARITHMETIC,
    # Of integers these are others.
    "div": np.divide,
    "is_finite": np.isfinite,
    "max": _max,
    "min": _min,
    "sqrt": np.sqrt,
}
# Their results may be rounded up to the smallest normal number. The processor, which
# makes zeros for XLA, takes some of these for zeros, as they are below it with all the
# digits of a normal number.
_ROUNDED = {"convert_element_type", "div", "mul", "square"}
_FLAGS: dict[str, Callable[..., Any]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "reduce_and": lambda x, axes, **_: np.all(x, axes),
    "reduce_or": lambda x, axes, **_: np.any(x, axes),
}


def _in_dim(
    x: np.ndarray, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any
) -> np.ndarray:
    with_axes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        with_axes[axis] = size
    return np.broadcast_to(x.reshape(with_axes), shape)


def _slice(
    x: np.ndarray,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
) -> np.ndarray:
    steps = strides or [1] * x.ndim
    bounds = zip(start_indices, limit_indices, steps, strict=True)
    return x[tuple(slice(*bound) for bound in bounds)]


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    # For XLA a number that is out of range stands for the first case, or the last.
    return np.choose(which.astype(np.intp), cases, mode="clip")


_MOVES: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "broadcast_in_dim": _in_dim,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "expand_dims": lambda x, dimensions: np.expand_dims(x, tuple(dimensions)),
    "neg": np.negative,
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "rev": lambda x, dimensions: np.flip(x, dimensions),
    "select_n": _select,
    "slice": _slice,
    "stop_gradient": lambda x, **_: x,
    "squeeze": lambda x, dimensions: np.squeeze(x, tuple(dimensions)),
    "transpose": lambda x, permutation: x.transpose(permutation),
}
_OF_BITS: dict[str, Callable[..., Any]] = {  # numbers that are not normal stay so
    "nextafter": np.nextafter,
}
_SELECTED_MOST = 30  # operands of `np.choose`, which takes no more than 32
_SHARDINGS = ("sharding", "out_sharding")


def evaluate(eqn: JaxprEquation, operands: Sequence[Any]) -> list[Any]:
    """Runs an equation alone: by NumPy, if that is known to have the same result."""
    results = evaluate_by_numpy(eqn, operands)
    return jaxprs.evaluate(eqn, operands) if results is None else results


def evaluate_by_numpy(eqn: JaxprEquation, operands: Sequence[Any]) -> list[Any] | None:
    """The results of an equation; None if NumPy's are not known to be the same."""
    function = _function_of(eqn, {_type_of(x) for x in operands}, len(operands))
    if function is None:
        return None
    arrays = [np.asarray(x) for x in operands]
    with np.errstate(all="ignore"):
        result = np.asarray(function(*arrays))
    if eqn.primitive.name in _ROUNDED and _may_be_zero(result):
        return None
    return [result]


def _function_of(
    eqn: JaxprEquation, types: set[str | None], n_operands: int
) -> Callable[..., Any] | None:
    """What computes an equation of operands of these types; None: XLA does."""
    name = eqn.primitive.name
    if None in types:
        return None
    if types == {"float"} and name in _OF_FLOATS:
        return _of_normal_numbers(_OF_FLOATS[name])
    if types == {"float"} and name in _OF_BITS:
        return _OF_BITS[name]
    if types == {"integer"} and name in _ARITHMETIC:
        return _ARITHMETIC[name]
    params = {k: v for k, v in eqn.params.items() if k not in _SHARDINGS}
    if name == "convert_element_type":
        new_type = eqn.params["new_dtype"]
        is_float = new_type in (np.float32, np.float64)
        return _of_normal_numbers(lambda x: x.astype(new_type)) if is_float else None
    if params.get("dimensions") and name == "reshape":  # it is transposed too
        return None
    function = _FLAGS.get(name) if types == {"flag"} else None
    if function is None and n_operands <= _SELECTED_MOST:
        function = _MOVES.get(name)
    return function and functools.partial(function, **params)


def _type_of(x: Any) -> str | None:
    """What kind of numbers an array has, if they are the same for NumPy."""
    if not jaxprs.is_numpy(x):
        return None
    if x.dtype in (np.float32, np.float64):
        return "float"
    if x.dtype == np.bool_:
        return "flag"
    is_integer = x.dtype.kind in "iu" and x.dtype.isbuiltin == 1
    return "integer" if is_integer else None


def _of_normal_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, for which numbers that are not normal are zeros."""

    def of_normal(*operands: np.ndarray) -> np.ndarray:
        return _normal(np.asarray(function(*map(_normal, operands))))

    return of_normal


def _may_be_zero(result: np.ndarray) -> bool:
    """Whether XLA may have zeros for smallest normal numbers of a rounded result."""
    if result.dtype.kind != "f":
        return False
    return bool((np.abs(result) == np.finfo(result.dtype).tiny).any())


def _normal(x: np.ndarray) -> np.ndarray:
    if x.dtype.kind != "f":
        return x
    is_subnormal = (np.abs(x) < np.finfo(x.dtype).tiny) & (x != 0)
    return np.where(is_subnormal, np.copysign(0, x), x) if is_subnormal.any() else x
