"""Programs that are JAX functions, and the device on which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from hostcall._core.failures import original
from hostcall._runtime import host_device
from hostcall._runtime.context import current
from hostcall.bridge._programs import HostProgram, Struct, has_tangent, pick_moving

# The other device knows nothing of the mesh around the calling program.
NO_MESH = jax.sharding.AbstractMesh((), ())


class Compiled(HostProgram):
    """A traced JAX function, compiled for its device when it first runs."""

    def __init__(
        self,
        name: str,
        jaxpr: Any,
        x64: bool,
        place: ProgramDevice,
        options: dict[str, Any],
    ) -> None:
        self.name, self.options = name, options
        self.in_avals = structs(jaxpr.in_avals)
        self.out_avals = structs(jaxpr.out_avals)
        self._code = jaxpr_as_fun(jaxpr)
        self._x64, self._place = x64, place

    @cached_property
    def _jit(self) -> Any:
        return jax.jit(self._code)

    def run(self, *arrays: Any) -> list[Any]:
        device = self._place.find()
        try:
            with jax.enable_x64(self._x64), jax.default_device(device):
                # jit puts NumPy arrays on the default device; device_put costs 0.1 ms.
                arrays = tuple(
                    x if isinstance(x, np.ndarray) else jax.device_put(x, device)
                    for x in arrays
                )
                outs = self._jit(*arrays)
                return [np.asarray(x) if is_plain(x) else x for x in outs]
        except jax.errors.JaxRuntimeError as report:
            raise original(report) or report from None

    def push(self) -> HostProgram:
        n, moving = len(self.in_avals), self._moving

        def code(*operands: Any) -> list[Any]:
            along, values = self._along(operands[:n])
            outs, touts = jax.jvp(along, values, operands[n:])
            return [*outs, *pick_moving(touts, self.out_avals)]

        tangents = [self.in_avals[i] for i in moving]
        return self._derived(f"jvp of {self.name}", code, (*self.in_avals, *tangents))

    def pull(self) -> HostProgram:
        n = len(self.in_avals)

        def code(*operands: Any) -> list[Any]:
            along, values = self._along(operands[:n])
            rest = iter(operands[n:])
            cotangents = [
                next(rest)
                if has_tangent(aval)
                else np.zeros(aval.shape, jax.dtypes.float0)
                for aval in self.out_avals
            ]
            return list(jax.vjp(along, *values)[1](cotangents))

        coming = [aval for aval in self.out_avals if has_tangent(aval)]
        return self._derived(f"vjp of {self.name}", code, (*self.in_avals, *coming))

    def batch(self, size: int, batched: tuple[bool, ...]) -> HostProgram:
        axes = [0 if flag else None for flag in batched]
        avals = [
            Struct((size, *aval.shape), aval.dtype) if flag else aval
            for aval, flag in zip(self.in_avals, batched, strict=True)
        ]
        return self._derived(self.name, jax.vmap(self._code, in_axes=axes), avals)

    @property
    def _moving(self) -> list[int]:
        return [i for i, aval in enumerate(self.in_avals) if has_tangent(aval)]

    def _along(self, args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function of the arguments that have tangents, and their values."""
        moving = self._moving

        def along(*values: Any) -> list[Any]:
            whole = list(args)
            for i, x in zip(moving, values, strict=True):
                whole[i] = x
            return list(self._code(*whole))

        return along, tuple(args[i] for i in moving)

    def _derived(self, name: str, code: Any, avals: Sequence[Struct]) -> HostProgram:
        with jax.enable_x64(self._x64), jax.sharding.use_abstract_mesh(NO_MESH):
            jaxpr = jax.make_jaxpr(code)(*avals)
        return Compiled(name, jaxpr, self._x64, self._place, self.options)


class ProgramDevice:
    """The device on which programs run.

    A CPU client runs only a limited number of programs at a time on a device, and each
    of them may be one that waits for this one. With 20 programs in flight on each of
    four devices, each waiting for one on the next device, all would wait forever. So a
    program that a CPU calls never runs on the process's own CPU client.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._shared = False
        if device is not None and device.platform == "cpu":
            own = jax.local_devices(backend="cpu")[0].client
            self._shared = device.client is own or host_device.is_host(device.client)

    def find(self) -> Any:
        """The device to use; called inside the host call of a program."""
        here = current()
        caller = None if here is None else here.device
        on_cpu = caller is None or caller.platform == "cpu"
        if self._device is None or (self._shared and on_cpu):
            return jax.config.jax_default_device  # the host client's device
        return self._device


def structs(avals: Sequence[Any]) -> tuple[Struct, ...]:
    return tuple(Struct(x.shape, x.dtype) for x in avals)


def is_plain(x: Any) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
