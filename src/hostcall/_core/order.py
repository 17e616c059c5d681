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

import logging
from typing import Any, Literal

from hostcall import _jax
from hostcall._core import failures

logger = logging.getLogger("hostcall")

Order = Literal["pure", "unordered", "ordered"]
ORDERS: tuple[Order, ...] = ("pure", "unordered", "ordered")


class CallEffect(_jax.Effect):  # type: ignore[misc]
    """A host call that must run, and whose neighbours must stay where they are."""

    def __str__(self) -> str:
        return "HostCall"


class OrderedCallEffect(_jax.Effect):  # type: ignore[misc]
    """A host call that must run after the ordered call before it.

    JAX keeps the token of the last program in a dictionary with the effect as its key,
    and so asks for this hash whenever it dispatches an ordered program. If a callback
    has failed since, that token may be a failed program's, and would fail every later
    one: it is dropped first.
    """

    def __hash__(self) -> int:
        if failures.failures_so_far():
            _heal(self)
        return object.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __str__(self) -> str:
        return "OrderedHostCall"


def healing(effect: Any) -> Any:
    """An effect of JAX's own that heals as `OrderedCallEffect` does.

    It equals JAX's, so that JAX's rules find it where they look for theirs, and
    programs that have the one are in order with programs that have the other.
    """

    class Healing(type(effect)):  # type: ignore[misc]
        stands_for = effect

        def __hash__(self) -> int:
            if failures.failures_so_far():
                _heal(self)
            return hash(effect)

        def __eq__(self, other: object) -> bool:
            return other is self or other is effect

        def __repr__(self) -> str:
            return repr(effect)

    return Healing()


UNORDERED = CallEffect()
ORDERED = OrderedCallEffect()

_jax.register_effect(CallEffect, ordered=False)
_jax.register_effect(OrderedCallEffect, ordered=True)
_jax.lower_batched_conditions(OrderedCallEffect)


def _heal(effect: Any) -> None:
    with failures.looking():
        failure = _jax.drop_failed_token(effect)
    if failure is not None:
        logger.error("ordered calls go on after a program that failed: %s", failure)


def effects_of(order: Order) -> set[_jax.Effect]:
    """The effects of a call of this order."""
    if order == "pure":
        return set()
    # Both for an ordered call: a program that was compiled ahead of time takes JAX's
    # fast path, which passes no tokens, unless it has an unordered effect.
    return {ORDERED, UNORDERED} if order == "ordered" else {UNORDERED}
