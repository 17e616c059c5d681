"""Host code in place in XLA's memory: NumPy, PyTorch, Numba and C write the results.

The program takes four steps of a heat equation, u + k * (left - 2 u + right). Each
version works in the memory of XLA's arrays and copies nothing. Versions for packages
that are not installed are left out.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall.buffers import Buffer, ExecutionContext

N, K = 1000, np.float32(0.25)
SPEC = jax.ShapeDtypeStruct((N,), jnp.float32)
Step = Callable[[jax.Array], jax.Array]


def numpy_step(ctx: ExecutionContext, out: Buffer, u: Buffer) -> None:
    new, old = np.asarray(out), np.asarray(u)
    np.multiply(old, 1 - 2 * K, out=new)
    new[1:] += K * old[:-1]
    new[:-1] += K * old[1:]


def torch_step() -> Callable[..., None]:
    import torch

    def step(ctx: ExecutionContext, out: Buffer, u: Buffer) -> None:
        new, old = torch.from_dlpack(out), torch.from_dlpack(u)
        torch.mul(old, 1 - 2 * float(K), out=new)
        new[1:] += float(K) * old[:-1]
        new[:-1] += float(K) * old[1:]

    return step


def numba_step() -> Callable[..., None]:
    import numba
    from numba import types

    pointers = types.CPointer(types.voidptr)

    def step(outputs: Any, inputs: Any) -> None:
        new = numba.carray(outputs[0], (N,), numba.float32)
        old = numba.carray(inputs[0], (N,), numba.float32)
        for i in range(N):
            left = old[i - 1] if i > 0 else np.float32(0)
            right = old[i + 1] if i < N - 1 else np.float32(0)
            new[i] = old[i] + K * (left - 2 * old[i] + right)

    compiled = numba.cfunc(types.void(pointers, pointers))(step)
    return hc.buffers.native(compiled)  # runs without Python and without the GIL


def c_step() -> Callable[..., None]:
    """A ctypes callback, which stands for a function of a shared library."""
    floats = ctypes.POINTER(ctypes.c_float)
    pointers = ctypes.POINTER(floats)

    def step(outputs: Any, inputs: Any) -> None:
        new = np.ctypeslib.as_array(outputs[0], (N,))
        old = np.ctypeslib.as_array(inputs[0], (N,))
        new[:] = old * (1 - 2 * K)
        new[1:] += K * old[:-1]
        new[:-1] += K * old[1:]

    signature = ctypes.CFUNCTYPE(None, pointers, pointers)
    return hc.buffers.native(signature(step))


def in_place(ctx: ExecutionContext, out: Buffer, u: Buffer) -> None:
    """The step for an alias: `out` has the memory and the values of `u`."""
    values = np.asarray(out)
    inner = values.copy()
    values *= 1 - 2 * K
    values[1:] += K * inner[:-1]
    values[:-1] += K * inner[1:]


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def main() -> None:
    u = jnp.asarray(np.random.default_rng(0).normal(size=N), jnp.float32)

    def plain(u: jax.Array) -> jax.Array:
        padded = jnp.pad(u, 1)
        return u + K * (padded[:-2] - 2 * u + padded[2:])

    versions: dict[str, Step] = {
        "numpy": hc.buffers.buffer_callback(numpy_step, SPEC),
        "numpy, in place": hc.buffers.buffer_callback(
            in_place, SPEC, input_output_aliases={0: 0}
        ),
        "ctypes": hc.buffers.buffer_callback(c_step(), SPEC),
    }
    if has("torch"):
        versions["torch"] = hc.buffers.buffer_callback(torch_step(), SPEC)
    if has("numba"):
        versions["numba"] = hc.buffers.buffer_callback(numba_step(), SPEC)

    def four(step: Step) -> Step:
        return jax.jit(lambda u: jax.lax.fori_loop(0, 4, lambda i, u: step(u), u))

    wanted = four(plain)(u)
    for name, step in versions.items():
        got = four(step)(u)
        assert np.allclose(got, wanted, atol=1e-5), name
        print(f"{name}: as in JAX, to {np.abs(got - wanted).max():.0e}")


if __name__ == "__main__":
    main()
