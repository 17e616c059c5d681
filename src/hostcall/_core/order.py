"""Order: what JAX and XLA may do to a call, and the JAX effects that express it.

| order | how often it runs | what orders it | JAX effect |
|---|---|---|---|
| pure | as results are needed | data | none: JAX may drop, merge or repeat it |
| unordered | exactly once | its program | `CallEffect` |
| ordered | exactly once | all of a thread's programs | `OrderedCallEffect` |

A program with effects takes JAX's fast dispatch on one CPU device or GPU, where XLA
keeps programs in order by itself, and on several CPU devices if none is ordered
(_jax/fast_dispatch.py). Elsewhere a dispatch costs 3 us without effects, 35 us with
one, 94 us with an ordered one. So a pure call has none.
"""

from __future__ import annotations

import functools
import logging
from typing import ClassVar, Literal

from hostcall import _jax
from hostcall._core import failures
from hostcall._jax.types import Effect, Token

logger = logging.getLogger("hostcall")

Order = Literal["pure", "unordered", "ordered"]
ORDERS: tuple[Order, ...] = ("pure", "unordered", "ordered")


class CallEffect(_jax.Effect):  # type: ignore[misc]
    """The effect of a host call that must run, in order with those beside it.

    A class has one object. jax.export, which calls the class when it loads a program,
    and copies and pickles, which do too, get the same.
    """

    _only: ClassVar[dict[type, CallEffect]] = {}

    def __new__(cls) -> CallEffect:
        if cls in cls._only:  # a program with host calls is being loaded
            _jax.install(_jax.When.CALLS)
        return cls._only.setdefault(cls, super().__new__(cls))

    def __str__(self) -> str:
        return "HostCall"


class OrderedCallEffect(CallEffect):
    """The effect of a host call that must run after the ordered call before it."""

    def __str__(self) -> str:
        return "OrderedHostCall"


UNORDERED = CallEffect()
ORDERED = OrderedCallEffect()

# Both by name, though one is a subclass: jax.export looks for the very type.
_jax.register_effect(CallEffect, ordered=False)
_jax.register_effect(OrderedCallEffect, ordered=True)


def _heal(effect: Effect, token: Token | None) -> None:
    """Forgets this thread's token of an effect if the program that left it has failed.

    JAX passes the newest token of each ordered effect to the next program. That of a
    failed program would therefore fail every later ordered program. A program that is
    still running is not waited for.
    """
    if not failures.failures_so_far() or not _jax.is_token_ready(token):
        return
    failure = failures.failure_of(token)
    if failure is None:
        return
    number = failures.number_in(failure)
    if not failures.is_reported(number):
        # KeyboardInterrupt, SystemExit and the like end the thread here: it would never
        # look at the results of the failed program.
        raised_instead = failures.replacement(number)
        if raised_instead is not None:
            failures.mark_reported(number)
            raise raised_instead
    # JAX's own effects are those of drop-ins, and of JAX's own callbacks.
    if isinstance(effect, CallEffect) or number:
        _jax.forget_tokens([token])
        # As text: a handler may keep what it gets, and an error holds frames.
        logger.error("ordered calls continue after a failed program: %s", str(failure))


_jax.handlers.before_token = _heal


EFFECTS: dict[Order, Effect | None] = {
    "pure": None,
    "unordered": UNORDERED,
    "ordered": ORDERED,
}


def effects_with(effect: Effect | None) -> frozenset[Effect]:
    """The effects of an equation, given that which puts it in order, if any.

    An ordered one has UNORDERED too: JAX runs a program that was compiled ahead of time
    on its fast path, which passes no tokens, unless it has an unordered effect.

    Each host call is asked for them when it is traced. So here JAX gets what such
    programs need of it, and they are refused if it can't.
    """
    _jax.install(_jax.When.CALLS)
    _jax.need(_jax.Part.CALLS)
    if effect is not None:
        _jax.need(_jax.Part.SCANS)
        _jax.need(_jax.Part.LOOPS)
        if _jax.is_ordered(effect):  # else one that failed would end all later ones
            _jax.need(_jax.Part.TOKENS)
    return _effects_with(effect)


@functools.cache
def _effects_with(effect: Effect | None) -> frozenset[Effect]:
    if effect is None:
        return frozenset()
    return frozenset((effect, UNORDERED) if _jax.is_ordered(effect) else (effect,))
