"""Devices, clients, and arrays on them."""

from __future__ import annotations

import functools

import jax
import numpy as np

from hostcall._jax.door import guard_lib as _guard_lib
from hostcall._jax.door import jaxlib as _jaxlib
from hostcall._jax.door import missing_of
from hostcall._jax.door import mlir as _src_mlir
from hostcall._jax.door import xla_bridge as _xla_bridge
from hostcall._jax.door import xla_client as _xla_client
from hostcall._jax.dtypes import WIDE_DTYPES, able_to_hold, canonical_dtype
from hostcall._jax.needs import Part
from hostcall._jax.settings import default_device
from hostcall._jax.types import Client, Device, Sharding


def make_host_client() -> Client:
    """Makes a separate CPU client, which runs each program on the thread that calls it.

    The process's CPU client admits 32 programs at a time on a device. If all 32 waited
    for their callbacks, a callback that used the same client would wait forever.
    """
    return _xla_client.make_cpu_client(asynchronous=False, num_devices=1)


class explicit_transfer:
    """A block in which JAX's transfer guards see an explicit transfer, of this kind:
    "explicit_device_put" or "explicit_device_get". A context manager of contextlib's
    would take as long as a transfer.
    """

    __slots__ = ("before", "kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        self.state = _guard_lib.thread_local_state()
        self.before = getattr(self.state, self.kind)
        setattr(self.state, self.kind, True)

    def __exit__(self, *raised: object) -> None:
        setattr(self.state, self.kind, self.before)


def put_on_device(
    array: np.ndarray, device: Device, committed: bool = True
) -> jax.Array:
    """Makes a jax.Array of a NumPy array in 3 us; `jax.device_put` takes 20 to 50.

    The result may share the array's memory, so nobody may write to the array later.
    JAX's transfer guards see an explicit transfer, as they do for `jax.device_put`.

    The result has the array's dtype in 32-bit mode too (`able_to_hold`).
    """
    if array.dtype in WIDE_DTYPES and not jax.config.jax_enable_x64:
        with jax.enable_x64(True):
            return put_on_device(array, device, committed)
    aval = _aval(array.shape, array.dtype)
    sharding = _sharding_of(device)
    # As `explicit_transfer`, which would take 0.3 us: host code's arrays come this way.
    guard = _guard_lib.thread_local_state()
    was_allowed = guard.explicit_device_put
    guard.explicit_device_put = True
    try:
        return _xla_client.batched_device_put(
            aval, sharding, [array], [device], committed
        )
    finally:
        guard.explicit_device_put = was_allowed


def put_with_sharding(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """`jax.device_put`, whose result has the array's dtype, as for `put_on_device`."""
    with able_to_hold(array.dtype):
        return jax.device_put(array, sharding)


def release_arrays() -> None:
    """Drops the references to NumPy's arrays that dead jax.Arrays have left behind.

    A jax.Array that shares a NumPy array's memory may die on a thread without the GIL.
    So jaxlib puts its reference into a list, which JAX empties in each garbage
    collection, and by this call alone in less than a microsecond.
    """
    _jaxlib.collect_garbage()


def to_numpy(array: jax.Array) -> np.ndarray:
    """Fetches the values of an array.

    JAX's transfer guards see an explicit transfer, as they do for `jax.device_get`.
    """
    # As `explicit_transfer`, which would take 0.3 us: eager calls come this way.
    guard = _guard_lib.thread_local_state()
    was_allowed = guard.explicit_device_get
    guard.explicit_device_get = True
    try:
        return np.asarray(array)
    finally:
        guard.explicit_device_get = was_allowed


def to_host(operand: jax.typing.ArrayLike) -> np.ndarray:
    """The operand of an eager call as a NumPy array of the dtype that JAX gives it."""
    if isinstance(operand, jax.Array):
        return to_numpy(operand)
    if isinstance(operand, np.ndarray) and operand.dtype == jax.dtypes.float0:
        return np.zeros(operand.shape, np.bool_)
    dtype = canonical_dtype(jax.lax.dtype(operand))
    array = np.asarray(operand, dtype)
    # `ascontiguousarray` gives a scalar an axis.
    return np.ascontiguousarray(array).reshape(array.shape)


_aval = functools.lru_cache(1024)(jax.core.ShapedArray)
_sharding_of = functools.cache(jax.sharding.SingleDeviceSharding)


def guards_transfers_to_devices() -> bool:
    """Whether JAX logs or refuses implicit transfers to devices on this thread."""
    for state in (_guard_lib.thread_local_state(), _guard_lib.global_state()):
        level = state.host_to_device
        if level is not None:  # a thread's setting overrides the process's
            return bool(level != _guard_lib.TransferGuardLevel.ALLOW)
    return False


def here() -> Device:
    """The default device of the calling thread's computations."""
    default = default_device.value  # a device, or a platform's name, or None
    if isinstance(default, jax.Device):
        return default
    return jax.local_devices(backend=default)[0]


def back_ends_started() -> bool:
    """Whether JAX has started a back end, or may have, under a JAX that does not say.

    Reads the dictionary without JAX's lock: a forked child calls this, and a thread
    that held the lock at the fork does not exist there to release it.
    """
    return _hides_back_ends() or bool(_xla_bridge._backends)


def owners_of_threads() -> list[object]:
    """What joins threads in its destructor: the clients of the back ends that JAX has
    started in this process, and MLIR's pool, whose threads lower programs in jax 0.9.
    """
    clients = [] if _hides_back_ends() else [*_xla_bridge._backends.values()]
    return [*clients, _src_mlir.global_thread_pool]


def _hides_back_ends() -> bool:
    """Whether this JAX has not the dictionary that is read here."""
    return bool(missing_of(Part.STARTED))


def process_of(device: Device) -> int:
    """The number of this process, as the client of one of its job's devices counts."""
    return int(device.client.process_index())
