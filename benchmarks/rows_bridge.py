"""Rows: torch in JAX, by hc.bridge.torch, by jax.pure_callback and by torch2jax.

"torch2jax" is the package wrap-torch2jax, which calls torch from a compiled program
too. (The package called torch2jax rewrites torch's operations in JAX.) Without torch
there are no rows; without wrap-torch2jax its cases are left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, Target, run_time, times_faster

SIZES = {"1 KiB": 256, "1 MiB": 1 << 18}
HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_TORCH2JAX = HAS_TORCH and importlib.util.find_spec("wrap_torch2jax") is not None


def by_callback(fn: Any) -> Any:
    """The usual way: torch autograd in a custom_vjp over jax.pure_callback."""
    import torch

    def tensors(args: Any) -> Any:
        return jax.tree.map(lambda x: torch.tensor(np.asarray(x)), args)

    def value(*args: Any) -> Any:
        return fn(*tensors(args)).numpy()

    def pulled(ct: Any, *args: Any) -> Any:
        _, pull = torch.func.vjp(fn, *tensors(args))
        return jax.tree.map(lambda x: x.numpy(), pull(torch.tensor(np.asarray(ct))))

    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)

    @jax.custom_vjp
    def f(*args: Any) -> Any:
        return jax.pure_callback(value, like(args[-1]), *args)

    f.defvjp(
        lambda *args: (f(*args), args),
        lambda args, ct: jax.pure_callback(pulled, jax.tree.map(like, args), ct, *args),
    )
    return f


def wave(size: int) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """x * tanh(x) in each way, and its arguments."""
    import torch

    fn = lambda x: x * torch.tanh(x)
    ways = {"hostcall": hc.bridge.torch(fn), "JAX": by_callback(fn)}
    if HAS_TORCH2JAX:
        from wrap_torch2jax import torch2jax

        ways["torch2jax"] = torch2jax(fn, torch.zeros(size), depth=1)
    return ways, (jnp.linspace(0, 1, size, dtype=jnp.float32),)


def network(size: int) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Two layers of width 64, on as many rows as `size` floats make."""
    import torch

    torch.manual_seed(0)
    width = 64
    module = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width)
    )
    f = hc.bridge.torch(module)
    functional = lambda p, x: torch.func.functional_call(module, p, (x,))
    ways = {"hostcall": f, "JAX": by_callback(functional)}
    if HAS_TORCH2JAX:
        from wrap_torch2jax import torch2jax

        given = dict(module.named_parameters()), torch.zeros(size // width, width)
        ways["torch2jax"] = torch2jax(functional, *given, depth=1)
    x = jnp.ones((size // width, width), jnp.float32)
    return ways, (f.parameters(), x)


Make = Callable[[int], tuple[dict[str, Any], tuple[Any, ...]]]


def forward(make: Make, size: int) -> Callable[[bool], dict[str, Case]]:
    def cases(quick: bool) -> dict[str, Case]:
        ways, args = make(size)
        return {name: run_time(jax.jit(f), *args) for name, f in ways.items()}

    return cases


def gradient(make: Make, size: int) -> Callable[[bool], dict[str, Case]]:
    def cases(quick: bool) -> dict[str, Case]:
        ways, args = make(size)

        def program(f: Any) -> Any:
            return jax.jit(jax.value_and_grad(lambda *args: f(*args).sum()))

        return {name: run_time(program(f), *args) for name, f in ways.items()}

    return cases


def targets() -> tuple[Target, ...]:
    both = (times_faster(1),)
    return (*both, times_faster(1, base="torch2jax")) if HAS_TORCH2JAX else both


ROWS: tuple[Row, ...] = ()
if HAS_TORCH:
    ROWS = tuple(
        Row(f"torch: {what} of {name}, {size}", targets(), of(make, elements))
        for name, make in {"x tanh x": wave, "two layers": network}.items()
        for size, elements in SIZES.items()
        for what, of in {"value": forward, "value and gradient": gradient}.items()
    )
