"""A `while_loop` whose condition has an effect: a call that is not pure, or a tap.

XLA does not run the condition of a loop whose number of steps it knows, so unordered
effects in it would be lost. Under vmap, rows of a loop stop one by one. JAX's lowering
of a condition with an ordered effect (0.10.2, 0.12.0.1) ignores that, and lets every
row run on until the last one stops. All other loops keep JAX's lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax

from hostcall import _jax


def lower_effectful_conditions(chosen: Callable[[Collection[Any]], bool]) -> None:
    """Lowers loops as `_loop` whose conditions have chosen effects."""
    _jax.lower_while_loops_by(lambda condition: chosen(condition.effects), _loop)


def _loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    cond_nconsts: int,
    body_nconsts: int,
) -> Callable[..., list[Any]]:
    """The same loop with the condition computed in the body, so that rows can stop.

    The carry gets one more value: for each row, whether it goes on.
    """

    def chosen(goes_on: Any, new: Any, old: Any) -> Any:
        if goes_on.ndim == 0:  # the body runs only if the loop goes on
            return new
        rows = jax.lax.broadcast_in_dim(goes_on, new.shape, range(goes_on.ndim))
        return jax.lax.select(rows, new, old)

    def loop(*operands: Any) -> list[Any]:
        cond_consts = operands[:cond_nconsts]
        body_consts = operands[cond_nconsts : cond_nconsts + body_nconsts]
        start = operands[cond_nconsts + body_nconsts :]

        def again(state: Any) -> Any:
            goes_on, carry = state
            new = body(*body_consts, *carry)
            carry = [chosen(goes_on, n, c) for n, c in zip(new, carry, strict=True)]
            (still,) = condition(*cond_consts, *carry)
            return goes_on & still, carry

        (first,) = condition(*cond_consts, *start)
        _, carry = jax.lax.while_loop(
            lambda state: state[0].any(), again, (first, list(start))
        )
        return list(carry)

    return loop
