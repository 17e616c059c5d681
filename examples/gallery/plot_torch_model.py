"""
A torch model inside a JAX loop
===============================

How do hares and lynx depend on each other? JAX has the growth of the ones and the
decline of the others, and a PyTorch network finds the rest from data of 21 years.
:func:`hostcall.bridge.torch` makes the network a function of JAX arrays with torch's
derivatives, so one compiled program solves the equations, differentiates through the
solver and trains both halves.

Besides hostcall it needs ``pip install matplotlib torch``.
"""

# %%
# The data
# --------
#
# Thousands of pelts of hares and lynx that the Hudson's Bay Company bought from 1900 to
# 1920 (C. Gordon Hewitt, "The Conservation of the Wild Life of Canada", 1921).

# sphinx_gallery_tags = ["derivatives", "training", "plots"]
# sphinx_gallery_thumbnail_number = 2

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch

import hostcall as hc

YEARS = np.arange(1900, 1921)
HARES = (
    *(30.0, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22.0, 25.4, 27.1),
    *(40.3, 57.0, 76.6, 52.3, 19.5, 11.2, 7.6, 14.6, 16.2, 24.7),
)
LYNX = (
    *(4.0, 6.1, 9.8, 35.2, 59.4, 41.7, 19.0, 13.0, 8.3, 9.1, 7.4),
    *(8.0, 12.3, 19.5, 45.7, 51.1, 29.7, 15.8, 9.7, 10.1, 8.6),
)
PELTS = jnp.log(jnp.array([HARES, LYNX]).T)  # (years, 2)

# %%
# The network
# -----------
#
# An ordinary torch module. One thread is right for a small one that is called often.

torch.set_num_threads(1)
torch.manual_seed(0)
module = torch.nn.Sequential(
    torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
)
net = hc.bridge.torch(module)

# %%
# The equations
# -------------
#
# The states are logarithms, so the equations are relative rates. ``hybrid`` knows that
# hares grow at a rate ``a`` and that lynx decline at a rate ``c``. The network adds
# what they do to each other. ``textbook`` has the law of Lotka and Volterra instead,
# for comparison.

Params = dict[str, Any]
Slope = Callable[[Params, jax.Array], jax.Array]


def hybrid(params: Params, state: jax.Array) -> jax.Array:
    a, c = jnp.exp(params["rates"][:2])
    interaction: jax.Array = net(params["net"], state - 3)
    return jnp.stack([a, -c]) + interaction


def textbook(params: Params, state: jax.Array) -> jax.Array:
    a, c, b, d = jnp.exp(params["rates"])
    hares, lynx = jnp.exp(state[:, 0]), jnp.exp(state[:, 1])
    return jnp.stack([a - b * lynx, d * hares - c], axis=-1)


# %%
# The solver is a Runge-Kutta method of second order in a ``lax.scan``. It starts at all
# measured years at once, and is compared with the three years that follow: the network
# gets a batch of 18 states, 24 times.

SUBSTEPS, AHEAD = 4, 3
STARTS = len(YEARS) - AHEAD


def path(slope: Slope, params: Params, state: jax.Array, years: int) -> jax.Array:
    """The states of the following years: (years, batch, 2)."""

    def step(state: jax.Array, _: None) -> tuple[jax.Array, None]:
        middle = state + 0.5 / SUBSTEPS * slope(params, state)
        return state + slope(params, middle) / SUBSTEPS, None

    def year(state: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        state, _none = jax.lax.scan(step, state, length=SUBSTEPS)
        return state, state

    return jax.lax.scan(year, state, length=years)[1]


def misfit(slope: Slope, params: Params) -> jax.Array:
    got = path(slope, params, PELTS[:STARTS], AHEAD)
    wanted = jnp.stack([PELTS[k : k + STARTS] for k in range(1, AHEAD + 1)])
    large = sum((p**2).sum() for p in jax.tree.leaves(params["net"]))
    return ((got - wanted) ** 2).mean() + 1e-4 * large


# %%
# Are the gradients right?
# ------------------------
#
# The same network, written in JAX, has the same gradients.


def hybrid_in_jax(params: Params, state: jax.Array) -> jax.Array:
    a, c = jnp.exp(params["rates"][:2])
    weights = params["net"]
    hidden = jnp.tanh((state - 3) @ weights["0.weight"].T + weights["0.bias"])
    interaction = hidden @ weights["2.weight"].T + weights["2.bias"]
    return jnp.stack([a, -c]) + interaction


rates = jnp.log(jnp.array([0.5, 0.8, 0.03, 0.03]))
start: Params = {"rates": rates, "net": net.parameters()}
gradient = jax.jit(jax.grad(misfit, 1), static_argnums=0)
by_torch, by_jax = gradient(hybrid, start), gradient(hybrid_in_jax, start)
for where, leaf in jax.tree.leaves_with_path(by_torch):
    print(f"{jax.tree_util.keystr(where):22} norm {jnp.linalg.norm(leaf):.5f}")

# %%
# Training
# --------
#
# Adam, written in JAX. A fit is one compiled program; each of its steps runs torch 24
# times forward and 24 times backward.


def fit(slope: Slope, params: Params, steps: int) -> tuple[Params, jax.Array]:
    def step(carry: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        params, mean, square = carry
        value, grads = jax.value_and_grad(misfit, 1)(slope, params)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, square, grads)
        rate = 0.03 * 0.1 ** (i / steps)

        def move(p: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
            m, s = m / (1 - 0.9 ** (i + 1)), s / (1 - 0.99 ** (i + 1))
            return p - rate * m / (jnp.sqrt(s) + 1e-6)

        params = jax.tree.map(move, params, mean, square)
        return (params, mean, square), value

    zeros = jax.tree.map(jnp.zeros_like, params)
    carry, losses = jax.lax.scan(step, (params, zeros, zeros), jnp.arange(steps))
    return carry[0], losses


STEPS = 500
fit_jit = jax.jit(fit, static_argnums=(0, 2))
found, losses = fit_jit(hybrid, start, STEPS)
law, losses_law = fit_jit(textbook, start, STEPS)
print(f"misfit {losses[0]:.3f} -> {losses[-1]:.4f}; textbook {losses_law[-1]:.4f}")

figure, axis = plt.subplots(figsize=(5.5, 3.5))
axis.semilogy(losses, label="JAX and torch")
axis.semilogy(losses_law, label="textbook")
axis.set(xlabel="step", ylabel="mean squared misfit (logarithms)")
axis.legend()
figure.tight_layout()

# %%
# What was found
# --------------
#
# The years after 1900, from the state of 1900 alone.


def run(slope: Slope, params: Params) -> np.ndarray:
    states = path(slope, params, PELTS[:1], len(YEARS) - 1)[:, 0]
    return np.exp(np.concatenate([PELTS[:1], states]))


free, free_law = run(hybrid, found), run(textbook, law)
figure, axes = plt.subplots(2, figsize=(5.5, 5), sharex=True)
for at, name in enumerate(["hares", "lynx"]):
    axis = axes[at]
    axis.plot(YEARS, np.exp(PELTS[:, at]), "k.", label="pelts")
    axis.plot(YEARS, free[:, at], label="JAX and torch")
    axis.plot(YEARS, free_law[:, at], label="textbook", linestyle="--")
    axis.set(ylabel=f"thousands of {name}")
    axis.set_xticks(YEARS[::4])
axes[0].legend()
figure.tight_layout()

# %%
# The interaction that the network has learned. The textbook says that hares lose in
# proportion to the lynx, and that lynx gain in proportion to the hares.

numbers = np.linspace(5, 70, 50)
middle = np.full(50, 3.0)
a, c, b, d = np.exp(law["rates"])
growth, decline = np.exp(found["rates"][:2])
on_hares = net(found["net"], np.stack([middle, np.log(numbers)], 1) - 3)[:, 0]
on_lynx = net(found["net"], np.stack([np.log(numbers), middle], 1) - 3)[:, 1]

figure, (top, bottom) = plt.subplots(2, figsize=(5.5, 5.5))
top.plot(numbers, growth + on_hares, label="JAX and torch")
top.plot(numbers, a - b * numbers, "--", label="textbook")
top.set(xlabel="thousands of lynx", ylabel="growth of hares a year")
top.legend()
bottom.plot(numbers, on_lynx - decline)
bottom.plot(numbers, d * numbers - c, "--")
bottom.set(xlabel="thousands of hares", ylabel="growth of lynx a year")
figure.tight_layout()
plt.show()

# %%
# Second derivatives are asked for: with ``derivatives=2`` there is a Hessian, by torch
# as well.

soft_maximum = hc.bridge.torch(lambda x: torch.logsumexp(x**2, 0), derivatives=2)
x = jnp.array([0.1, 0.5, 0.9])
hessian = jax.jit(jax.hessian(soft_maximum))(x)
wanted = jax.hessian(lambda x: jax.nn.logsumexp(x**2))(x)

assert np.allclose(hessian, wanted, atol=1e-5)
assert np.allclose(losses[-1], misfit(hybrid_in_jax, found), rtol=0.05)
assert losses[-1] < 0.5 * losses[0]
assert losses[-1] < 1.1 * losses_law[-1]
assert jax.tree.all(
    jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-3, atol=1e-5), by_torch, by_jax)
)
