"""Order: what may happen to a call, and the JAX effects that say so.

| order | runs | kept | JAX effect |
|---|---|---|---|
| pure | as results need | by data | none: JAX may drop, merge, repeat |
| unordered | exactly once | in straight-line code | `CallEffect` |
| ordered | exactly once | on each device, across programs | `OrderedCallEffect` |

Any effect closes JAX's fast dispatch (3 us without, 35 with, 94 when ordered), so a
pure call has none.
"""

from __future__ import annotations

from typing import Literal

from hostcall import _jax

Order = Literal["pure", "unordered", "ordered"]
ORDERS: tuple[Order, ...] = ("pure", "unordered", "ordered")


class CallEffect(_jax.Effect):  # type: ignore[misc]
    """A host call that must run, and whose neighbours must stay where they are."""

    def __str__(self) -> str:
        return "HostCall"


class OrderedCallEffect(_jax.Effect):  # type: ignore[misc]
    """A host call that must run after the ordered call before it."""

    def __str__(self) -> str:
        return "OrderedHostCall"


UNORDERED = CallEffect()
ORDERED = OrderedCallEffect()

_jax.register_effect(CallEffect, ordered=False)
_jax.register_effect(OrderedCallEffect, ordered=True)


def effects_of(order: Order) -> set[_jax.Effect]:
    """The effects of a call of this order."""
    if order == "pure":
        return set()
    return {ORDERED if order == "ordered" else UNORDERED}
