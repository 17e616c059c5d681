"""CuPy and PyTorch on a GPU, in place in XLA's memory and on XLA's stream.

Without a GPU, or without CuPy and torch, it says so and ends.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall.buffers import Buffer, ExecutionContext

SPEC = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)


def cupy_version() -> Callable[..., None]:
    import cupy

    def square(ctx: ExecutionContext, out: Buffer, x: Buffer) -> None:
        with cupy.cuda.Stream.from_external(ctx):
            cupy.square(cupy.asarray(x), out=cupy.asarray(out))

    return square


def torch_version() -> Callable[..., None]:
    import torch

    def square(ctx: ExecutionContext, out: Buffer, x: Buffer) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(ctx.stream)):
            torch.square(torch.from_dlpack(x), out=torch.as_tensor(out))

    return square


def main() -> None:
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        print("no GPU here")
        return
    x = jax.device_put(jnp.arange(SPEC.shape[0], dtype=jnp.float32) / 1e6, device)
    for name, version in (("cupy", cupy_version), ("torch", torch_version)):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed")
            continue
        for graph in (False, True):  # True: recorded into a CUDA graph, and replayed
            square = hc.buffers.buffer_callback(
                version(), SPEC, command_buffer_compatible=graph
            )
            f = jax.jit(lambda x, square=square: square(x) + 1)
            for _ in range(3):
                np.testing.assert_allclose(f(x), x**2 + 1, rtol=1e-6)
        print(f"{name}: as in JAX, with and without a graph")


if __name__ == "__main__":
    main()
