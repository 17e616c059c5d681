"""`hc.testing.collect`: what tagged taps saw, as arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._api.barrier import barrier
from hostcall._core.dlpack import DLPackArray
from hostcall._runtime import delivery


class collect:
    """Gathers the values of tagged taps, without a change to the tapped code.

    As a context manager::

        with hc.testing.collect() as seen:
            train(params)
        seen["loss"]              # all losses, stacked along a first axis

    As a transformation of a function, `hc.testing.collect(f)(*args)` returns
    `(f(*args), seen)`.

    Args:
        fn: the function to transform; None for the context manager.

    Returns:
        A dict from each tag (`hc.tap(..., tag="loss")`) that was tapped to the values
        that were delivered under it, in the order of delivery. A delivery is the tap's
        argument, a tuple if there are several, and (args, kwargs) if there are keyword
        arguments. Deliveries are stacked leaf by leaf. If they differ in structure or
        shape, they stay a list. The context manager fills the dict at its end.

    Raises:
        BaseException: an error that `hc.barrier()` raises. It runs at the start, to
            leave out earlier taps, and at the end, to wait for the last ones.

    The taps' own functions still run. A collector gathers from all programs and
    threads: every tagged tap that is delivered while it is active.

    Under transformations: as for `hc.tap`. Under vmap the tap's `rows=` decides whether
    a delivery is a batch or a row.

    Cost: one copy of each value, made by the thread that delivers taps.
    """

    def __init__(self, fn: Callable[..., Any] | None = None) -> None:
        self._fn = fn
        self._deliveries: dict[str, list[object]] = {}
        self._out: dict[str, Any] = {}
        if fn is not None:
            functools.update_wrapper(self, fn, updated=())

    def __enter__(self) -> dict[str, Any]:
        barrier()  # what was tapped before is not collected
        self._deliveries = {}
        self._out = {}
        delivery.state.collectors.append(self._take)
        return self._out

    def __exit__(self, *_: object) -> None:
        try:
            barrier()
        finally:
            delivery.state.collectors.remove(self._take)
            # Copied: if Ctrl-C ended the barrier, the worker may still add values.
            for tag, values in self._deliveries.copy().items():
                self._out[tag] = _stacked(values.copy())

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self._fn is None:
            raise TypeError(
                "hostcall: hc.testing.collect() without a function is a context"
                " manager. Write `with hc.testing.collect() as seen:`"
            )
        with collect() as collected:
            out = self._fn(*args, **kwargs)
        return out, collected

    def _take(
        self, tag: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Called by the worker of taps with each delivery."""
        value: object = args
        if kwargs:
            value = (args, kwargs)
        elif len(args) == 1:
            (value,) = args
        # A copy: the tap's own function gets these arrays too, and may change them.
        copied = jax.tree.map(_copied, value)
        self._deliveries.setdefault(tag, []).append(copied)


def _copied(leaf: object) -> object:
    """Copies an array to a NumPy array. Keys and static leaves stay as they are."""
    if isinstance(leaf, DLPackArray):
        return leaf.to_numpy()
    if isinstance(leaf, jax.Array) and _jax.is_key_dtype(leaf.dtype):
        return leaf  # NumPy has no such dtype
    return np.array(leaf) if isinstance(leaf, (np.ndarray, jax.Array)) else leaf


def _stacked(values: list[object]) -> object:
    """The deliveries of one tag, stacked leaf by leaf if they are alike."""
    treedef = jax.tree.structure(values[0])
    if any(jax.tree.structure(value) != treedef for value in values):
        return values

    def stack(*column: object) -> object:
        are_arrays = all(isinstance(leaf, (np.ndarray, np.generic)) for leaf in column)
        return np.stack(column) if are_arrays else list(column)

    try:
        return jax.tree.map(stack, *values)
    except ValueError:  # other shapes
        return values
