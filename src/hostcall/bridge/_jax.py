"""`hc.bridge.jax`: a JAX function on another device than the program that calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.core import Jaxpr, jaxpr_as_fun

from hostcall._core import result_rules
from hostcall._core.errors import wrong
from hostcall._core.failures import original
from hostcall._core.host_code import Handle
from hostcall._core.mistakes import check_function
from hostcall._core.spec import Template
from hostcall._runtime import host_device
from hostcall._runtime.context import current
from hostcall.bridge._library import (
    MADE_BY_A_BRIDGE,
    Arrays,
    Code,
    OverOthers,
    TakesNoRules,
    along,
    is_operand,
    split,
)

# The other device knows nothing of the mesh around the calling program.
NO_MESH = jax.sharding.AbstractMesh((), ())


def on_device(
    fn: Callable[..., Any] | None = None,
    *,
    device: Any = None,
    timeout: float | None = None,
    name: str | None = None,
) -> Any:
    """Runs a JAX function on another device, from within a JAX program.

        evaluate = hc.bridge.jax(model, device=jax.devices("gpu")[0])
        jax.grad(lambda x: evaluate(params, x).sum())(x)     # in a program on the CPU

    The other device computes the derivatives too, by JAX's own rules for `fn`, of any
    order and in both modes.

    Args:
        fn: JAX code that takes and returns arrays, numbers and pytrees of them; other
            leaves (strings, functions) reach it as they are. Values of the program that
            `fn` closes over are sent like arguments and have derivatives; other arrays
            that it closes over are constants. Without it, `jax` returns a decorator.
        device: a `jax.Device` of this process; None for hostcall's own CPU device for
            host code. If the calling program is on a CPU, a CPU device of the process
            also stands for hostcall's own one: a CPU client runs a few dozen programs
            at a time, and if all of them wait for another on the same client, they wait
            forever. A CPU client that you made yourself is used as it is.
        timeout: as in `hc.host`: seconds for one run, compilation included.
        name: the function's name in messages.

    Returns:
        A `HostFunction`, called like `fn`, also with keyword arguments. Its results are
        those of `fn`, but weakly typed numbers become strongly typed.

    Raises:
        SpecError: `device` is not a device of this process.
        What `fn` raises while it is traced, when the program is traced. What a callback
        inside it raises, when the program runs: as `hc.call`; under `hc.reraise()` its
        own exception.

    Under transformations:
        jit, scan, while_loop, cond, remat, shard_map: as a pure `hc.call`; a shard
            sends its block.
        vmap: one run of `jax.vmap(fn)` for the batch.
        jvp, grad, jacobian, hessian, any order: one run of the derivative of `fn` for
            each derivative of the call. The forward pass of reverse mode keeps the
            arguments, and the backward pass computes on the other device what it needs.
        `fn` can't use collectives over axes of the calling program.

    Cost: a host call, the copies of arguments and results to the device and back, and
    the run. `fn` is traced as under `jax.jit`. It is compiled when it first runs, once
    for each combination of argument types, derivative and batch size; a program that is
    traced again finds what was compiled.

    Source: `call_jax_other_device` in the tests of JAX's former
    `jax.experimental.host_callback`, which had reverse mode.
    """
    if fn is None:
        options = {k: v for k, v in dict(locals()).items() if k != "fn"}
        return functools.partial(on_device, **options)
    shown = name or check_function(fn, "hc.bridge.jax(fn, device=...)").name
    is_here = (
        isinstance(device, jax.Device) and device.process_index == jax.process_index()
    )
    if device is not None and not is_here:
        wanted = (
            "a jax.Device, such as jax.devices('gpu')[0], of this process (one of"
            " jax.local_devices()), or None for a CPU device of hostcall's own"
        )
        raise wrong("device", f"`{shown}`", wanted, device)
    return JaxFunction(fn, device, name=name, timeout=timeout)


class JaxFunction(TakesNoRules):
    """A JAX function and its device. `hc.bridge.jax` makes it."""

    _callee = Handle._callee  # hc.call calls it as JAX code does

    def __init__(
        self, fn: Callable[..., object], device: jax.Device | None, **options: Any
    ) -> None:
        super().__init__(fn, result=None, **options)
        self._device = device
        self._given = options

        def flat(template: Template, *arrays: jax.Array) -> object:
            args, kwargs = template.unflatten(arrays)
            return fn(*args, **kwargs)

        flat.__name__ = self.__name__
        self._flat = flat
        self._jit = jax.jit(flat, static_argnums=0)
        # Weak keys: jax.clear_caches() drops what JAX traced, and with it these.
        self._programs: WeakKeyDictionary[Jaxpr, ProgramFunction] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        reduced = super().__reduce__()
        if isinstance(reduced, str):
            return reduced
        # Made again: what jit has traced, and compiled programs, can't be pickled.
        make = functools.partial(JaxFunction, **self._given)
        return make, (self.fn, self._device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its result."""
        template, arrays = split(args, kwargs)
        avals = tuple(map(result_rules.aval_of, arrays))
        with jax.sharding.use_abstract_mesh(NO_MESH):
            traced = self._jit.trace(template, *avals)
            out_tree = jax.tree.structure(traced.out_info)
            jaxpr = traced.jaxpr
            closed_over: Arrays = []
            if len(jaxpr.in_avals) > len(avals):
                # It closes over values of the program, which jit has made operands.
                # Their tracers are this program's, so nothing of it is kept.
                code = functools.partial(self._flat, template)
                program, closed_over = self._closed(jax.make_jaxpr(code)(*avals))
            elif jaxpr in self._programs:
                program = self._programs[jaxpr]
            else:
                program = self._programs[jaxpr] = self._compiled(jaxpr)
        return out_tree.unflatten(program(*closed_over, *arrays))

    def _closed(self, jaxpr: Jaxpr) -> tuple[ProgramFunction, Arrays]:
        """The program, if `fn` closes over values of the caller: they are operands."""
        traced = [isinstance(x, jax.core.Tracer) for x in jaxpr.consts]
        values, filled, _ = along(jaxpr.consts, traced, is_operand)

        def code(*operands: jax.Array) -> object:
            consts = filled(operands[: len(values)])
            return jax.core.eval_jaxpr(jaxpr.jaxpr, consts, *operands[len(values) :])

        operands = [*structs(values), *structs(jaxpr.in_avals)]
        opened = jax.make_jaxpr(code)(*operands)
        return self._compiled(opened), values

    def _compiled(self, jaxpr: Jaxpr) -> ProgramFunction:
        # NumPy arrays, so that constants don't stay on the device where they are now.
        consts = [np.asarray(x) if is_plain(x) else x for x in jaxpr.consts]
        jaxpr = jaxpr.replace(consts=consts)
        program = DeviceProgram(self.__name__, jaxpr, self._device)
        return ProgramFunction(program, self.policy.timeout)


class DeviceProgram(Code):
    """A traced function of flat arrays, compiled for its device when it first runs."""

    stays = MADE_BY_A_BRIDGE

    is_array = staticmethod(is_operand)
    vjp = staticmethod(jax.vjp)
    jvp = staticmethod(jax.jvp)
    vmap = staticmethod(jax.vmap)

    @staticmethod
    def leaves(value: Arrays) -> Arrays:
        return [x if is_plain(x) else jax.random.key_data(x) for x in value]

    def __init__(self, name: str, jaxpr: Jaxpr, device: jax.Device | None) -> None:
        super().__init__(jaxpr_as_fun(jaxpr), name, source="")
        self.outs = structs(jaxpr.out_avals)
        self.device = device
        self._jit = jax.jit(self.run)
        # The mode in which it was traced, whatever that of the thread that runs it.
        self._x64 = bool(jax.config.jax_enable_x64)

    def __call__(self, *arrays: np.ndarray | jax.Array) -> Arrays:
        device = device_now(self.device)
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
            # A callback inside it failed: its exception is that of this host call.
            raise original(report) or report from None


class ProgramFunction(OverOthers):
    """A program in JAX code: arrays in, a list of arrays out.

    The idea: JAX differentiates and batches a call by its rules, and here each rule is
    the call of another JAX function on the device, which is made from this one.
    """

    fn: DeviceProgram

    def __init__(self, program: DeviceProgram, timeout: float | None) -> None:
        name = program.__name__
        result = program.outs
        super().__init__(program, name=name, result=result, timeout=timeout)
        self.set_rules()
        self.rules.batch = self._batch

    def _make(self, derivative: str, *flags: bytes) -> JaxFunction:
        name = (
            self.__name__
            if derivative == "vmap"
            else f"{derivative} of {self.__name__}"
        )
        options = {"name": name, "timeout": self.policy.timeout}
        return JaxFunction(self.fn.over(derivative, *flags), self.fn.device, **options)

    def _batch(self, _: int, batched: list[bool], *args: object) -> tuple[Arrays, bool]:
        return self.derivative("vmap", bytes(batched))(*args), True


def device_now(device: jax.Device | None) -> jax.Device:
    """The device to use for this `device=`; called inside the host call of a program.

    A CPU client runs only a limited number of programs at a time on a device, and each
    of them may be one that waits for this one. With 20 programs in flight on each of
    four devices, each waiting for one on the next device, all would wait forever. So a
    program that a CPU calls never runs on the process's own CPU client.
    """
    host = jax.config.jax_default_device  # the host client's device
    if device is None or device.platform != "cpu":
        return device or host
    call = current()
    calling_device = None if call is None else call.device
    on_cpu = calling_device is None or calling_device.platform == "cpu"
    client = device.client
    process_client = jax.local_devices(backend="cpu")[0].client
    shared = client is process_client or host_device.nesting_level(client) > 0
    return host if on_cpu and shared else device


def structs(avals: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def is_plain(x: jax.Array) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
