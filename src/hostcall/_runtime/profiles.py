"""What profiles of JAX's (`jax.profiler.trace`) show besides XLA's operations.

XLA shows calls and taps under their names and lines, but not those in loops on a CPU,
no delivery, and not how long a call has waited for the GIL. The engine asks now and
then whether a profile `is_taken` (native/invoke/profile.h).
"""

from __future__ import annotations

from typing import Any

from jax.profiler import TraceAnnotation

from hostcall import _native

is_taken = TraceAnnotation.is_enabled


class Shown:
    """A call, or the delivery of a tap, in a profile: from now on until `end`.

    Args:
        hooks: the `CallHooks` of the plan.
        tap: the number of the delivered tap; -1 for a call.
        waited: for how many microseconds a call has waited for the GIL.
    """

    def __init__(self, hooks: Any, tap: int, waited: float) -> None:
        self._is_delivery = tap >= 0
        label = hooks.callback.label
        place = str(hooks.place)
        if self._is_delivery:
            annotation = TraceAnnotation(f"delivery of {label}", place=place, tap=tap)
        else:
            waited = round(waited, 1)
            annotation = TraceAnnotation(
                f"call of {label}", place=place, waited_us=waited
            )
        # Not by `with`: the engine calls `end` when the function has returned.
        annotation.__enter__()
        self._annotation = annotation

    def end(self) -> None:
        if self._is_delivery:
            # How many devices wait with a tap for space, until this one has ended: a
            # profile then shows which tap is too slow.
            self._annotation.set_metadata(blocked=_native.tap_queue()["blocked"])
        self._annotation.__exit__(None, None, None)
