"""A NaN hunt: which step of a training run goes wrong, and why.

A logistic regression is fitted by gradient descent, with a rate that grows from step to
step. Its loss has a mistake that shows after some hundred steps only: it takes the
logarithm of a probability, which rounds to 0 once a sample is far on the wrong side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

import hostcall as hc

keys = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(keys[0], (200, 5)) * 20
y = (x @ jnp.array([1.0, -2, 3, 0, 1]) > 0) ^ jax.random.bernoulli(
    keys[1], 0.02, (200,)
)


def careless(margin: jax.Array) -> jax.Array:
    return -jnp.log(1 / (1 + jnp.exp(-margin)))


def careful(margin: jax.Array) -> jax.Array:
    return jax.nn.softplus(-margin)


def fit(loss_of: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def loss(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        margin = (x @ weights) * jnp.where(y, 1.0, -1.0)
        return loss_of(margin).mean(), margin

    def step(weights: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        (value, margin), slope = jax.value_and_grad(loss, has_aux=True)(weights)
        # The last three states before the first bad one are kept, with the margins.
        hc.watch({"loss": value, "slope": slope}, also=margin, keep=3, name="step")
        return weights - 1e-3 * 1.02**i * slope, value

    return jax.jit(lambda w: jax.lax.scan(step, w, jnp.arange(500))[1])


try:
    jax.block_until_ready(fit(careless)(jnp.zeros(5)))
    raise SystemExit("the mistake did not show")
except hc.errors.WatchError as error:
    print(error)
    found = error

print("step", found.step, "loss", found.values["loss"])
for before in found.history:
    print("  step", before.step, "loss", before.values["loss"])

# The sample that is to blame has a margin at which exp(-margin) overflows.
worst = found.also.argmin()
print(f"sample {worst} has the margin {found.also[worst]:.1f}")
assert careless(found.also[worst]) == jnp.inf
assert jnp.isfinite(careful(found.also[worst]))

# The failure can go to somebody else, as arrays and text.
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "failure.zip"
    found.save(path)
    again = hc.tools.load_failure(path)
assert again.step == found.step
assert again.also[worst] == found.also[worst]

losses = fit(careful)(jnp.zeros(5))
assert jnp.isfinite(losses).all()
print("with softplus the loss ends at", losses[-1])
