"""`jax.experimental.host_callback`, which JAX removed, on hostcall's engine.

    import hostcall.host_callback as hcb

is the only line that an old program has to change; with `hostcall.patch_jax()` it runs
unchanged. The page "From `jax.experimental.host_callback`" shows the module by example.

    id_tap, id_print   hand values to the host and return them; the program goes on
    call               calls a host function with results
    barrier_wait       waits for programs and callbacks, raises CallbackException

The module's flags are still settings of JAX (`jax.config.update(name, value)`, or the
environment): jax_host_callback_inline, jax_host_callback_max_queue_byte_size,
jax_host_callback_ad_transforms, jax_host_callback_outfeed.
"""

from typing import Any

from hostcall._compat.removed_module import (
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
        f"hostcall.host_callback has no {name!r}. It has the documented names of"
        f" jax.experimental.host_callback: {', '.join(__all__)}"
    )
