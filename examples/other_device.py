"""A training step that calls a JAX model on another device and differentiates it.

The model runs on another client (on the GPU, if there is one); the loss and the update
run on the CPU. The gradient passes through the call, and is compared with that of the
same step on a single device.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc

Params = dict[str, jax.Array | np.ndarray]
Model = Callable[[Params, np.ndarray], jax.Array]
Step = Callable[[Params, np.ndarray, np.ndarray], tuple[Params, jax.Array, Params]]


def model(params: Params, x: np.ndarray) -> jax.Array:
    """Two layers; x has shape (batch, features)."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def make_step(model: Model) -> Step:
    @jax.jit
    def step(
        params: Params, x: np.ndarray, y: np.ndarray
    ) -> tuple[Params, jax.Array, Params]:
        def loss(params: Params) -> jax.Array:
            return jnp.mean((model(params, x) - y) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value, gradient

    return step


def data(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(256, 8)).astype(np.float32)
    return x, np.sin(x.sum(1, keepdims=True))


def first_params(rng: np.random.Generator) -> Params:
    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)

    return {
        "w1": draw(8, 64),
        "b1": np.zeros(64, np.float32),
        "w2": draw(64, 1),
        "b2": np.zeros(1, np.float32),
    }


def train(
    step: Step, params: Params, x: np.ndarray, y: np.ndarray, steps: int
) -> tuple[Params, list[jax.Array], float]:
    """The parameters after these steps, the losses, and microseconds per step."""
    step(params, x, y)[1].block_until_ready()  # compiles on both devices
    losses, start = [], time.perf_counter()
    for _ in range(steps):
        params, value, _ = step(params, x, y)
        losses.append(value)
    jax.block_until_ready(losses)
    return params, losses, (time.perf_counter() - start) / steps * 1e6


def main() -> None:
    rng = np.random.default_rng(0)
    (x, y), params = data(rng), first_params(rng)
    here = jax.local_devices(backend="cpu")[0]
    # Without another device the model runs on hostcall's own CPU device: device=None.
    others = [d for d in jax.local_devices() if d.platform != "cpu"]
    with jax.default_device(here):
        there = make_step(hc.bridge.jax(model, device=others[0] if others else None))
        alone = make_step(model)

        gradients = there(params, x, y)[2], alone(params, x, y)[2]
        errors = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), *gradients)
        error = max(jax.tree.leaves(errors))
        print(f"gradient through the other device: differs by {error:.1e}")
        assert error < 1e-5

        _, losses, took = train(there, params, x, y, 100)
        _, wanted, took_alone = train(alone, params, x, y, 100)
    print(f"loss after 100 steps: {losses[-1]:.4f}, at first {losses[0]:.4f}")
    print(f"a step: {took:.0f} us with the call, {took_alone:.0f} us on one device")
    assert losses[-1] < losses[0] / 2
    assert abs(losses[-1] - wanted[-1]) < 1e-3


if __name__ == "__main__":
    main()
