"""Devices, clients and arrays on them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import xla_bridge as _xla_bridge
from jax._src.lib import guard_lib as _guard_lib
from jax._src.lib import xla_client as _xla_client

# --- Host code's own device (_host_device) -----------------------------------------

default_device = _config.default_device


def make_host_client() -> Any:
    """A CPU client of its own that runs programs on the thread that calls it.

    The process's CPU client admits 32 programs at a time on a device; while they
    all wait for their callbacks, a callback that used it would wait for ever.
    """
    return _xla_client.make_cpu_client(asynchronous=False, num_devices=1)


def put_on_device(array: np.ndarray, device: Any, committed: bool = True) -> jax.Array:
    """NumPy to jax.Array in 3 us, where `jax.device_put` takes 20 to 50.

    The result may share the array's memory: nobody may write to that any more. To
    JAX's transfer guards it is an explicit transfer, as `jax.device_put` is.
    """
    aval = _core.ShapedArray(array.shape, array.dtype)
    sharding = _single_device_sharding(device)
    guard = _guard_lib.thread_local_state()
    before = guard.explicit_device_put
    guard.explicit_device_put = True
    try:
        return _xla_client.batched_device_put(
            aval, sharding, [array], [device], committed
        )
    finally:
        guard.explicit_device_put = before


def guards_transfers_to_devices() -> bool:
    """Whether an implicit transfer to a device may be logged or refused here."""
    for state in (_guard_lib.thread_local_state(), _guard_lib.global_state()):
        level = state.host_to_device
        if level is not None:  # the thread's own setting hides the process's
            return bool(level != _guard_lib.TransferGuardLevel.ALLOW)
    return False


_shardings: dict[Any, Any] = {}


def _single_device_sharding(device: Any) -> Any:
    sharding = _shardings.get(device)
    if sharding is None:
        sharding = _shardings[device] = jax.sharding.SingleDeviceSharding(device)
    return sharding


def here() -> Any:
    """The device where the calling thread's computations go by default."""
    default = default_device.value
    if hasattr(default, "client"):
        return default
    return jax.local_devices(backend=default)[0]


def is_committed(array: jax.Array) -> bool:
    return bool(getattr(array, "_committed", False))


def back_ends_started() -> bool:
    """Takes no lock: a forked child asks, where nobody may be left to release it."""
    return bool(_xla_bridge._backends)


def clients() -> list[Any]:
    """Those of the process's back ends that have been started."""
    return list(_xla_bridge._backends.values())
