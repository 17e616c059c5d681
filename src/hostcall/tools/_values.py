"""What several tools do with the values that a program hands them."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import jax
import numpy as np

from hostcall.errors import HostcallError, SpecError

T = TypeVar("T")


def without_derivative(tree: T) -> T:
    """The same values, through which no derivative flows.

    A call that has no derivative can then take them: it needs none if nothing comes
    back from it.
    """

    def stop(leaf: object) -> object:
        return jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf

    stopped: T = jax.tree.map(stop, tree)
    return stopped


def with_all_axes(
    arrays: Sequence[np.ndarray],
    transforms: tuple[tuple[str, dict[str, Any]], ...],
    first: int = 0,
) -> list[np.ndarray]:
    """Adds an axis of size 1 to each array for each vmap that did not batch it.

    The axes of vmaps lie behind the `first` ones, the outermost vmap in front;
    `transforms`, as in `hc.current()`, names them from the innermost on.
    """
    spread = list(arrays)
    # From the outermost on: an axis that is added pushes back those of inner vmaps
    # only, which come later.
    for axis, (_, batched) in enumerate(reversed(transforms), first):
        for i, dim in enumerate(batched["batch_dims"]):
            if dim is None:
                spread[i] = np.expand_dims(spread[i], axis)
    return spread


def wrong(what: str, code: str = "hc-option") -> SpecError:
    return SpecError(f"hostcall: {what}", code=code)


def failed(what: str) -> HostcallError:
    """The error for a run of a recorder that can't be written or read."""
    return HostcallError(f"hostcall: {what}", code="hc-record")


def need(is_right: bool, wanted: str, got: Any, code: str = "hc-option") -> None:
    """Raises a SpecError that says what was wanted, and what came."""
    if is_right:
        return
    shown = repr(got)
    if isinstance(got, (np.ndarray, jax.Array)):
        shown = f"{got.dtype}{list(got.shape)}"  # a tracer has no value to show
    raise wrong(f"{wanted}, got {shown}", code)


def refuse_misspelt(
    face: Callable[..., Any], name: str, values: Mapping[str, Any]
) -> None:
    """Refuses a constant whose name is nearly that of an option, such as `evry=10`.

    Keywords that are not options are values. Those that a program computes may have any
    name; a constant is hardly worth to be shown or recorded.

    Args:
        face: a public function that takes options and values.
        name: its name.
        values: the keywords that are not its options.
    """
    for key, value in values.items():
        near = _nearest(face, key)
        if near is None or any(map(is_array, jax.tree.leaves(value))):
            continue
        instead = f"write {key}=jnp.asarray(...)"
        if isinstance(value, str):
            instead = "use another name"
        raise wrong(
            f"{name} has no option {key}=. Did you mean {near}=? If"
            f" {reprlib.repr(value)} is a value with this name, {instead}"
        )


@functools.lru_cache  # asked at each trace, for names that mostly stay the same
def _nearest(face: Callable[..., Any], key: str) -> str | None:
    """The option whose name is nearly this one; None if there is none."""
    parameters = inspect.signature(face).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    near = get_close_matches(key, options, n=1, cutoff=0.8)
    return near[0] if near else None


ARRAYS = (jax.Array, np.ndarray, np.generic)


def is_array(leaf: object) -> bool:
    return isinstance(leaf, ARRAYS) or hasattr(leaf, "__jax_array__")


def dtype_of(leaf: object) -> np.dtype | None:
    """The dtype of an array or a number of Python's; None for anything else."""
    if isinstance(leaf, ARRAYS):
        return leaf.dtype
    if isinstance(leaf, (bool, int, float, complex)):
        return np.dtype(type(leaf))
    return None
