"""What several tools do with the values that a program hands them."""

from __future__ import annotations

from typing import TypeVar

import jax

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
