"""The parameters of a buffer callback's equation, and the hooks for its calls."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import ExecutionStage

from hostcall import _native
from hostcall._core import config, errors
from hostcall._engine import targets
from hostcall._engine.hooks import CallHooks
from hostcall._engine.params.equation import CallParams, Function
from hostcall._engine.placement import Placement
from hostcall._jax.types import Device

__all__ = ["Buffer", "ExecutionContext", "ExecutionStage", "native"]

Buffer = _native.Buffer
ExecutionContext = _native.ExecutionContext

_native.set_hook(_native.Hook.STAGE, ExecutionStage.EXECUTE)
_native.set_hook(_native.Hook.ENDED_ERROR, errors.EscapeError)
_native.set_hook(_native.Hook.STREAM_ERROR, jax.errors.JaxRuntimeError)


_CFunction: Any = ctypes.CFUNCTYPE(None).mro()[1]  # base class of all ctypes functions


@dataclass(unsafe_hash=True, repr=False)
class NativeFunction:
    """Machine code that runs in place of a Python function, without the GIL."""

    keep: object = field(compare=False)  # the object that owns the machine code
    address: int
    status: bool
    name: str = field(compare=False)

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = self.name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            f"hostcall: {self!r} is for hc.buffers.buffer_callback, which gives it the"
            " addresses of XLA's memory; Python can't call it"
        )

    def __repr__(self) -> str:
        return f"<native function {self.__name__} at {self.address:#x}>"


def native(
    function: Any, *, status: bool = False, name: str | None = None
) -> NativeFunction:
    """Wraps machine code, which runs without the GIL, for `hc.buffers.buffer_callback`.

    The code has the C signature::

        void f(void **outputs, void **inputs, void *stream)

    `outputs` and `inputs` hold the addresses of the results and of the arguments, in
    the order of jax.tree.leaves(result_shape_dtypes) and jax.tree.leaves((args,
    kwargs)), where keyword arguments are sorted by name. The arrays are row-major. The
    code gets no shapes or dtypes; they are those of the traced arrays. `stream` is
    XLA's stream on a GPU, and NULL on a CPU; code for CPUs only may omit the parameter.
    Elements smaller than a byte are packed on a GPU. On a CPU, each takes the low bits
    of one byte.

    The code must not write to its inputs. Several threads may run it at the same time,
    for several devices or for several programs in flight. Python does not see it run:
    `hc.monitor.status()` does not list it. An exception in a Numba or ctypes function
    is printed and lost, unless the function returns a status.

    Args:
        function: the address as an int, a ctypes function, or an object with an
            `address`, such as the result of numba.cfunc. The object is kept alive.
        status: whether the code returns an int32 (`int32_t f(...)`). A value other than
            0 then fails the program with a HostcallError (hc-buffer) that shows it.
        name: the name in errors and `hc.monitor.stats()`. Default: the function's.

    Returns:
        An object to pass as `callback` to `hc.buffers.buffer_callback`.

    Raises:
        SpecError: `function` has no valid address.

    Under transformations: with vmap_method="sequential", vmap runs the rows natively.
    Other methods are refused, since the code could not tell the size of the batch.
    Other transformations are as for `hc.buffers.buffer_callback`.

    Cost: 0.15 us for each call in a compiled loop.
    """
    if isinstance(function, NativeFunction):
        return function
    address = getattr(function, "address", function)
    if isinstance(function, (_CFunction, ctypes.c_void_p)):
        address = ctypes.cast(function, ctypes.c_void_p).value
    if isinstance(address, bool) or not isinstance(address, (int, np.integer)):
        raise errors.SpecError(
            "hostcall: native() takes an address: an int, a ctypes function, or an"
            f" object with `.address` (numba.cfunc), got {function!r}. A cffi pointer"
            ' becomes one by int(ffi.cast("uintptr_t", f))'
        )
    if not 0 < address < 2**64:
        raise errors.SpecError(
            f"hostcall: native() got the address {address}, where no function can be"
        )
    its_name = getattr(function, "__name__", None) or f"native {int(address):#x}"
    return NativeFunction(function, int(address), bool(status), name or str(its_name))


class BufferHooks(CallHooks):
    """The hooks of a buffer callback's call, with the errors about Buffers."""

    def eager_error(self, error: Exception) -> Exception:
        return self.error_of_programs(error)

    def device_at(self, ordinal: int) -> Device | None:
        return self.placement.devices.get(ordinal)

    def _how_kept(self) -> str:
        return (
            "(a NumPy array, memoryview, DLPack capsule or tensor made from the Buffer,"
            " also by another thread, or by autograd for a backward pass). The memory"
            " is XLA's, which reuses it now: keep a copy (numpy.array(buffer))"
        )

    def on_changed(self, number: int) -> None:
        raise errors.ResultError(
            f"hostcall: `{self.name}` wrote to {self._name_of(number, False)}, which is"
            " an input (its values have been restored). JAX's arrays are immutable, and"
            " the caller may hold this one. Write to the output, which can share the"
            " input's memory and values (input_output_aliases). PyTorch's tensors can"
            " always be written, so avoid its in-place operations on inputs",
            code="hc-buffer",
        )

    def on_status(self, number: int, row: str) -> None:
        """Raises the error for a status of machine code; `row` says in which row."""
        raise errors.HostcallError(
            f"hostcall: native code returned {number}{row}; it must return 0 for"
            " success",
            code="hc-buffer",
        )

    def on_unwritten(self, number: int) -> None:
        aval = self.equation.avals[number]
        raise errors.UnwrittenError(
            f"hostcall: `{self.name}` did not write all of"
            f" {self._name_of(number, True)} ({aval.dtype}{list(aval.shape)}; seen by"
            " HOSTCALL_DEBUG=1). Elements that are not written hold zeros or arbitrary"
            " values: write numpy.asarray(out)[...] = value"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class BufferParams(CallParams):
    """The parameters of one equation of the buffer callback's primitive.

    Attributes:
        aliases: (input, output) pairs of leaf numbers that share memory.
        command_buffer: whether a GPU's command buffer may record the call.
    """

    aliases: tuple[tuple[int, int], ...] = ()
    command_buffer: bool = False

    on_buffers = True
    hooks = BufferHooks
    name = ""
    stays = (
        "it is a buffer callback, which names memory of this process. Use hc.call,"
        " hc.tap or hc.host"
    )

    @property
    def checked_as(self) -> str:
        return f"buffer_callback of {super().checked_as}"

    @cached_property
    def runs_where_dispatched(self) -> bool:  # type: ignore[override]
        is_native = isinstance(self.callback.function, NativeFunction)
        return not is_native or super().runs_where_dispatched

    @property
    def target(self) -> str:  # type: ignore[override]
        graph = self.command_buffer
        return targets.GRAPH_TARGET if graph else targets.BUFFER_TARGET

    def native_kind(self, placement: Placement) -> _native.Kind:
        del placement
        shared = {output: number for number, output in self.aliases}
        fn = self.callback.function
        code = fn if isinstance(fn, NativeFunction) else None
        return _native.BufferKind(
            aliases=[shared.get(i, -1) for i in range(len(self.avals))],
            debug=config.debug(),
            address=0 if code is None else code.address,
            status=code is not None and code.status,
        )

    def bare(self) -> Function:
        """What the engine calls with the context and a Buffer for each leaf."""
        callback = self.callback
        fn = callback.function
        template = callback.template
        results = callback.results
        if template.is_flat and results.treedef == jax.tree.structure(0):
            return fn
        n = len(results.avals)

        def whole(ctx: Any, *buffers: Any) -> Any:
            out = results.treedef.unflatten(buffers[:n])
            args, kwargs = template.unflatten(buffers[n:])
            return fn(ctx, out, *args, **kwargs)

        return whole
