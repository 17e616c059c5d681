"""`hc.bridge.jax`: a JAX function on another device than the program that calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from hostcall._core.arguments import check_function
from hostcall._core.errors import SpecError
from hostcall._core.spec import Static, Template
from hostcall._host_function import results
from hostcall.bridge._jax_programs import (
    NO_MESH,
    DeviceProgram,
    ProgramDevice,
    is_plain,
    structs,
)
from hostcall.bridge._library import PLAIN, TakesNoRules, is_operand


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
        options = {k: v for k, v in locals().items() if k != "fn"}
        return functools.partial(on_device, **options)
    shown = name or check_function(fn, "hc.bridge.jax(fn, device=...)")
    if device is not None and not isinstance(device, jax.Device):
        raise SpecError(
            f"hostcall: device= of `{shown}` should be a jax.Device, such as"
            f" jax.devices('gpu')[0], or None for a CPU device of hostcall's own, got"
            f" {device!r}",
            code="hc-option",
        )
    if device is not None and device.process_index != jax.process_index():
        raise SpecError(
            f"hostcall: device= of `{shown}` is {device}, which belongs to process"
            f" {device.process_index}, but this is process {jax.process_index()}. Pass"
            " one of jax.local_devices()",
            code="hc-device",
        )
    return JaxFunction(fn, device=device, name=name, timeout=timeout)


class JaxFunction(TakesNoRules):
    """A JAX function and its device. `hc.bridge.jax` makes it."""

    def __init__(self, fn: Callable[..., Any], *, device: Any, **options: Any) -> None:
        super().__init__(fn, **{**PLAIN, "result": None, **options})
        self.device = device
        self._given = {"device": device, **options}
        self._place = ProgramDevice(device)

        def flat(template: Template, *arrays: Any) -> Any:
            args, kwargs = template.fill(arrays)
            return fn(*args, **kwargs)

        flat.__name__ = self.__name__
        self._flat = flat
        self._jit = jax.jit(flat, static_argnums=0)
        # Weak keys: jax.clear_caches() drops what JAX traced, and with it these.
        self._programs: WeakKeyDictionary[Any, DeviceProgram] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        found = super().__reduce__()
        again = functools.partial(JaxFunction, **self._given)
        return found if isinstance(found, str) else (again, (self.fn,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its result."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = [x for x in leaves if is_operand(x)]
        marks = tuple(None if is_operand(x) else Static(x) for x in leaves)
        template, avals = Template(treedef, marks), results.avals_of(tuple(arrays))
        with jax.sharding.use_abstract_mesh(NO_MESH):
            traced = self._jit.trace(template, *avals)
            out_tree = jax.tree.structure(traced.out_info)
            jaxpr = traced.jaxpr
            more: list[Any] = []
            if len(jaxpr.in_avals) > len(avals):  # it closes over the program's values
                code = functools.partial(self._flat, template)
                program, more = self._closed(jax.make_jaxpr(code)(*avals))
            elif jaxpr in self._programs:
                program = self._programs[jaxpr]
            else:
                program = self._programs[jaxpr] = self._compiled(jaxpr)
        return out_tree.unflatten(program.host(*more, *arrays))

    def _closed(self, jaxpr: Any) -> tuple[DeviceProgram, list[Any]]:
        """The program, if `fn` closes over values of the caller: they are operands."""
        consts = list(jaxpr.consts)
        at = [i for i, x in enumerate(consts) if isinstance(x, jax.core.Tracer)]
        values = [consts[i] for i in at]
        for i in at:
            consts[i] = None

        def code(*operands: Any) -> Any:
            whole = list(consts)
            for i, x in zip(at, operands, strict=False):
                whole[i] = x
            return jax.core.eval_jaxpr(jaxpr.jaxpr, whole, *operands[len(at) :])

        avals = (*structs(values), *structs(jaxpr.in_avals))
        opened = jax.make_jaxpr(code)(*avals)
        return self._compiled(opened), values

    def _compiled(self, jaxpr: Any) -> DeviceProgram:
        # NumPy arrays, so that constants don't stay on the device where they are now.
        consts = [np.asarray(x) if is_plain(x) else x for x in jaxpr.consts]
        jaxpr = jaxpr.replace(consts=consts)
        x64, timeout = bool(jax.config.jax_enable_x64), self.options["timeout"]
        return DeviceProgram(self.__name__, jaxpr, x64, self._place, timeout)
