"""Programs that are JAX functions, and the device on which they run.

The idea: JAX differentiates and batches a call by its rules, and here each rule is the
call of another program. From a program of f two others are made:

    push    (x, t)  -> (f(x), f'(x) t)       the jvp rule calls it
    pull    (x, ct) -> f'(x)^T ct            the backward rule calls it

These are programs too, with rules made in the same way. So every order and both modes
work, and no program is made before JAX asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from hostcall._core.failures import original
from hostcall._core.host_code import HostCode
from hostcall._host_function.function import HostFunction
from hostcall._host_function.trees import pick, spread
from hostcall._runtime import host_device
from hostcall._runtime.context import current
from hostcall.bridge._library import PLAIN

Struct: TypeAlias = jax.ShapeDtypeStruct

# The other device knows nothing of the mesh around the calling program.
NO_MESH = jax.sharding.AbstractMesh((), ())


class DeviceProgram(HostCode):
    """A traced JAX function of flat arrays, compiled for its device when it first runs.

    Attributes:
        host: the function that JAX code calls: arrays in, a list of arrays out.
    """

    stays = (
        "a bridge makes it when the program is traced, so it can have no name. Register"
        " a hc.host function that calls the library, with rules of its own"
    )

    def __init__(
        self,
        name: str,
        jaxpr: Any,
        x64: bool,
        place: ProgramDevice,
        timeout: float | None,
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self._in, self._out = structs(jaxpr.in_avals), structs(jaxpr.out_avals)
        # Which of them have a tangent.
        self._in_moves, self._out_moves = map(_moves, (self._in, self._out))
        self._code = jaxpr_as_fun(jaxpr)
        self._x64, self._place, self._timeout = x64, place, timeout
        self._batches: dict[Any, DeviceProgram] = {}

    @cached_property
    def host(self) -> HostFunction[..., Any]:
        given = {"name": self.__name__, "result": list(self._out)}
        host: HostFunction[..., Any]
        host = HostFunction(self, **{**PLAIN, **given, "timeout": self._timeout})
        host.defjvp(self._jvp, where="jax")
        host.defvjp(self._forward, self._backward, where="jax")
        host.defbatch(self._batch)
        return host

    # --- When the calling program runs ----------------------------------------------

    @cached_property
    def _jit(self) -> Any:
        return jax.jit(self._code)

    def __call__(self, *arrays: Any) -> list[Any]:
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

    # --- Rules, in JAX code ---------------------------------------------------------

    def _jvp(self, primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        found = self._push.host(*primals, *pick(tangents, self._in_moves))
        n = len(self._out)
        return found[:n], spread(found[n:], self._out_moves)

    def _forward(self, *args: Any) -> tuple[list[Any], Any]:
        return self.host(*args), args

    def _backward(self, args: Any, cotangents: Any) -> tuple[Any, ...]:
        back = self._pull.host(*args, *pick(cotangents, self._out_moves))
        return tuple(spread(back, self._in_moves))

    def _batch(self, size: int, batched: Any, *args: Any) -> tuple[list[Any], Any]:
        key = size, tuple(batched)
        if key not in self._batches:
            avals = [
                Struct((size, *aval.shape), aval.dtype) if flag else aval
                for aval, flag in zip(self._in, batched, strict=True)
            ]
            axes = [0 if flag else None for flag in batched]
            code = jax.vmap(self._code, in_axes=axes)
            self._batches[key] = self._derived(self.__name__, code, avals)
        return self._batches[key].host(*args), True

    # --- Programs of derivatives ----------------------------------------------------

    @cached_property
    def _push(self) -> DeviceProgram:
        n = len(self._in)

        def code(*operands: Any) -> list[Any]:
            along, values = self._along(operands[:n])
            outs, touts = jax.jvp(along, values, operands[n:])
            return [*outs, *pick(touts, self._out_moves)]

        avals = (*self._in, *pick(self._in, self._in_moves))
        return self._derived(f"jvp of {self.__name__}", code, avals)

    @cached_property
    def _pull(self) -> DeviceProgram:
        n = len(self._in)

        def code(*operands: Any) -> list[Any]:
            along, values = self._along(operands[:n])
            _, pull = jax.vjp(lambda *xs: pick(along(*xs), self._out_moves), *values)
            return list(pull(list(operands[n:])))

        avals = (*self._in, *pick(self._out, self._out_moves))
        return self._derived(f"vjp of {self.__name__}", code, avals)

    def _along(self, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        """The function of the arguments that have tangents, and their values."""

        def along(*values: Any) -> list[Any]:
            found = spread(values, self._in_moves)
            whole = [a if x is None else x for a, x in zip(args, found, strict=True)]
            return list(self._code(*whole))

        return along, tuple(pick(args, self._in_moves))

    def _derived(self, name: str, code: Any, avals: Sequence[Struct]) -> DeviceProgram:
        with jax.enable_x64(self._x64), jax.sharding.use_abstract_mesh(NO_MESH):
            jaxpr = jax.make_jaxpr(code)(*avals)
        return DeviceProgram(name, jaxpr, self._x64, self._place, self._timeout)


def _moves(avals: Sequence[Struct]) -> tuple[bool, ...]:
    return tuple(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)


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
