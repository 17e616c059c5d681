"""`hc.bridge.jax`: a JAX function on another device than the program that calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.core import Jaxpr, jaxpr_as_fun

from hostcall._core import result_rules
from hostcall._core.errors import SpecError, wrong
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
    Function,
    MarkedArrays,
    OverOthers,
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
        return functools.partial(on_device, device=device, timeout=timeout, name=name)
    shown = name or check_function(fn, "hc.bridge.jax(fn, device=...)").name
    if device is not None and not _is_of_this_process(device):
        wanted = (
            "a jax.Device, such as jax.devices('gpu')[0], of this process (one of"
            " jax.local_devices()), or None for a CPU device of hostcall's own"
        )
        raise wrong("device", f"`{shown}`", wanted, device)
    return JaxFunction(fn, device, name=name, timeout=timeout)


def _is_of_this_process(device: object) -> bool:
    if not isinstance(device, jax.Device):
        return False
    return bool(device.process_index == jax.process_index())


class JaxFunction(Function):
    """A JAX function and its device. `hc.bridge.jax` makes it.

    A call traces the function to a jaxpr, which the other device runs:

        JaxFunction       called with pytrees: traces `fn` for these types, and calls
        ProgramFunction   with flat arrays: a HostFunction for one jaxpr, whose host
                          code is
        DeviceProgram     compiles the jaxpr for its device, and runs it

    A derivative of a ProgramFunction is a JaxFunction again, of JAX's derivative of
    the jaxpr.
    """

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
            jaxpr = traced.jaxpr
            closed_over: Arrays = []
            if len(jaxpr.in_avals) > len(avals):
                # It closes over values of the program, which jit has made operands.
                # Their tracers are this program's, so nothing of it is kept.
                trace = jax.make_jaxpr(functools.partial(self._flat, template))
                program, closed_over = self._opened(trace(*avals))
            elif jaxpr in self._programs:
                program = self._programs[jaxpr]
            else:
                program = self._programs[jaxpr] = self._program_of(jaxpr)
        results = program(*closed_over, *arrays)
        return jax.tree.structure(traced.out_info).unflatten(results)

    def _opened(self, jaxpr: Jaxpr) -> tuple[ProgramFunction, Arrays]:
        """The program of a jaxpr with values of the caller among its constants, and
        these values: they become operands, in front of the others.
        """
        are_of_caller = [isinstance(x, jax.core.Tracer) for x in jaxpr.consts]
        of_caller = MarkedArrays(jaxpr.consts, are_of_caller, is_operand)
        count = len(of_caller.arrays)

        def code(*operands: jax.Array) -> object:
            consts = of_caller.filled(operands[:count])
            return jax.core.eval_jaxpr(jaxpr.jaxpr, consts, *operands[count:])

        operands = [*structs(of_caller.arrays), *structs(jaxpr.in_avals)]
        opened = jax.make_jaxpr(code)(*operands)
        return self._program_of(opened), of_caller.arrays

    def _program_of(self, jaxpr: Jaxpr) -> ProgramFunction:
        # NumPy arrays, so that constants don't stay on the device where they are now.
        consts = [np.asarray(x) if is_plain(x) else x for x in jaxpr.consts]
        jaxpr = jaxpr.replace(consts=consts)
        program = DeviceProgram(self.__name__, jaxpr, self._device)
        return ProgramFunction(program, self.policy.timeout)

    # The def* methods of a HostFunction come to these two.

    def _where(self, usage: str, *_: object) -> NoReturn:
        self._add(usage.partition("(")[0].removeprefix("def"), None)

    def _add(self, kind: str, rule: object) -> NoReturn:
        del rule
        raise SpecError(
            f"hostcall: `{self.__name__}` is a bridge, whose rules come from the other"
            f" library, so it takes no def{kind}. To give a rule yourself, make the"
            " function with hc.host",
            code="hc-rule",
        )


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
                operands = []
                for array in arrays:
                    # jit puts NumPy arrays on the default device, and saves the 0.1 ms
                    # of device_put.
                    if not isinstance(array, np.ndarray):
                        array = jax.device_put(array, device)
                    operands.append(array)
                outs = self._jit(*operands)
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
        super().__init__(
            program, name=program.__name__, result=program.outs, timeout=timeout
        )
        self.set_rules()
        self.rules.batch = self._batch

    def _make(self, derivative: str, *flags: bytes) -> JaxFunction:
        name = self.__name__
        if derivative != "vmap":  # a batch has the name of one row
            name = f"{derivative} of {name}"
        run = self.fn.over(derivative, *flags)
        timeout = self.policy.timeout
        return JaxFunction(run, self.fn.device, name=name, timeout=timeout)

    def _batch(self, _: int, batched: list[bool], *args: object) -> tuple[Arrays, bool]:
        mapped = self.derivative("vmap", bytes(batched))
        return mapped(*args), True  # all results have the batch axis


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
    is_called_by_cpu = calling_device is None or calling_device.platform == "cpu"
    client = device.client
    # The process's own client, or one of those for host code. Any other client is the
    # user's, who may know that no program there waits for this one.
    process_client = jax.local_devices(backend="cpu")[0].client
    is_shared = client is process_client or host_device.nesting_level(client) > 0
    return host if is_called_by_cpu and is_shared else device


def structs(avals: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def is_plain(x: jax.Array) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
