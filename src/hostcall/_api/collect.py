"""`hc.testing.collect`: what tagged taps saw, as arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hostcall._api.barrier import barrier
from hostcall._core.dlpack import DLPackArray
from hostcall._runtime import collectors


class collect:
    """Gathers what tagged taps are given, without touching the tapped code.

    As a context manager::

        with hc.testing.collect() as seen:
            train(params)
        seen["loss"]              # all losses, stacked along a first axis

    As a transformation of a function, `hc.testing.collect(f)(*args)` gives
    `(f(*args), seen)`.

    Args:
        fn: the function to transform; None for the context manager.

    For each tag (`hc.tap(..., tag="loss")`) the deliveries are stacked leaf by leaf,
    in the order of delivery: of one argument that argument's tree, of several a tuple
    of them, with keyword arguments (args, kwargs). Deliveries that do not fit together
    (another tree or shape) stay a list.

    The taps' own functions run as ever. Seen are taps of all programs and threads that
    are delivered meanwhile; entering and leaving wait for those that were queued
    before, and raise what they raised (`hc.barrier`). `seen` is filled when the block
    is left, and has the tags that were tapped.

    Cost: a copy of each value, on the worker.
    """

    def __init__(self, fn: Callable[..., Any] | None = None) -> None:
        self._fn = fn
        self._seen: dict[str, list[Any]] = {}
        if fn is not None:
            functools.update_wrapper(self, fn, updated=())

    def __enter__(self) -> dict[str, Any]:
        barrier()
        self._seen = {}
        self._out: dict[str, Any] = {}
        collectors.add(self)
        return self._out

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            barrier()
        finally:
            collectors.remove(self)
            # Copies: after Ctrl-C the worker may still be at it.
            self._out.update(
                {k: _stacked(list(v)) for k, v in dict(self._seen).items()}
            )

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self._fn is None:
            raise TypeError(
                "hc.testing.collect() without a function is a context manager"
            )
        with collect() as seen:
            out = self._fn(*args, **kwargs)
        return out, seen

    def take(self, tag: str, args: Any, kwargs: Any) -> None:
        if kwargs:
            value: Any = (args, kwargs)
        else:
            value = args[0] if len(args) == 1 else args
        self._seen.setdefault(tag, []).append(jax.tree.map(_of_its_own, value))


def _of_its_own(leaf: Any) -> Any:
    """A NumPy array that nobody else has; keys and static leaves as they are."""
    if isinstance(leaf, DLPackArray):
        return leaf.to_numpy()
    if isinstance(leaf, np.ndarray) or (
        isinstance(leaf, jax.Array)
        and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ):
        return np.array(leaf)
    return leaf


def _stacked(values: list[Any]) -> Any:
    leaves, treedefs = zip(*(jax.tree.flatten(value) for value in values), strict=True)
    if any(treedef != treedefs[0] for treedef in treedefs):
        return values
    columns: list[Any] = []
    for column in zip(*leaves, strict=True):
        if not all(isinstance(leaf, (np.ndarray, np.generic)) for leaf in column):
            columns.append(list(column))
        elif any(leaf.shape != column[0].shape for leaf in column):
            return values
        else:
            columns.append(np.stack(column))
    return treedefs[0].unflatten(columns)
