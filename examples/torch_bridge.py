"""PyTorch in JAX: a module trained by a loop that JAX compiles, and a Hessian.

Without torch it says so and ends.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc

Params = dict[str, jax.Array]


def train() -> None:
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    net = hc.bridge.torch(module)
    x = np.linspace(-2, 2, 64, dtype=np.float32)[:, None]
    y = np.sin(2 * x)

    def loss(params: Params) -> jax.Array:
        out: jax.Array = net(params, x)
        return ((out - y) ** 2).mean()

    @jax.jit
    def descend(params: Params) -> tuple[Params, jax.Array]:
        def step(params: Params, _: None) -> tuple[Params, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return jax.lax.scan(step, params, length=500)

    params = net.parameters()
    grads = jax.jit(jax.grad(loss))(params)
    ((module(torch.tensor(x)) - torch.tensor(y)) ** 2).mean().backward()
    error = max(
        np.abs(grads[name] - p.grad.numpy()).max()
        for name, p in module.named_parameters()
    )
    print(f"gradient in {len(params)} parameters: differs from torch's by {error:.1e}")
    assert error < 1e-5

    _, losses = descend(params)
    print(f"500 steps in one program: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0] / 4


def second_derivatives() -> None:
    import torch

    f = hc.bridge.torch(lambda x: torch.logsumexp(x**2, 0), derivatives=2)
    x = jnp.array([0.1, 0.5, 0.9])
    got = jax.jit(jax.hessian(f))(x)
    want = jax.hessian(lambda x: jax.nn.logsumexp(x**2))(x)
    error = np.abs(got - want).max()
    print(f"Hessian of logsumexp: differs from JAX's by {error:.1e}")
    assert error < 1e-5


def main() -> None:
    if importlib.util.find_spec("torch") is None:
        print('torch is not installed: pip install "hostcall[torch]"')
        return
    train()
    second_derivatives()


if __name__ == "__main__":
    main()
