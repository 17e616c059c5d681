"""`jax.experimental.host_callback`, which JAX removed, on hostcall's engine.

    import hostcall.host_callback as hcb

is all that a program of the old days changes; with `hostcall.patch_jax()` it need not
change that. docs/migrating/host_callback.md goes through the module by example.

    id_tap, id_print   values leave; the program gets them back, and goes on
    call               a host function with results
    barrier_wait       waits for programs and callbacks, raises CallbackException

The flags of old are settings of JAX's still (`jax.config.update(name, value)`, or the
environment): jax_host_callback_inline, jax_host_callback_max_queue_byte_size,
jax_host_callback_ad_transforms, jax_host_callback_outfeed.
"""

from typing import Any

from hostcall._compat.host_callback import (
    CallbackException,
    TapFunctionException,
    barrier_wait,
    call,
    id_print,
    id_tap,
    stop_outfeed_receiver,
)

__all__ = [
    "CallbackException",
    "TapFunctionException",
    "barrier_wait",
    "call",
    "id_print",
    "id_tap",
    "stop_outfeed_receiver",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"hostcall.host_callback has no {name!r}. It has what was documented of"
        f" jax.experimental.host_callback: {', '.join(__all__)}"
    )
