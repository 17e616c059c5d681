"""`hc.observe` on small programs of the kinds that people run.

Each has infinities that are meant, and a line that makes a bad value for some input.
Results are those of a run without the block; the line is marked in the source.
"""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hostcall import observe


def marked(fn):
    lines, first = inspect.getsourcelines(fn)
    (at,) = (i for i, line in enumerate(lines) if "# BAD" in line)
    return f"{inspect.getsourcefile(fn)}:{first + at} "


def forward_algorithm(start):
    """A hidden Markov model whose first state can't be left for the last."""
    transition = jnp.log(jnp.array([[0.9, 0.1, 0.0], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]))
    emissions = jnp.log(jnp.array([[0.7, 0.3], [0.4, 0.6], [0.1, 0.9]]))

    def step(alpha, seen):
        moved = jax.nn.logsumexp(alpha[:, None] + transition, axis=0)
        return moved + emissions[:, seen], moved

    first = jnp.log(start)  # BAD
    alpha, _ = lax.scan(step, first + emissions[:, 0], jnp.array([0, 1, 1, 0]))
    return jax.nn.logsumexp(alpha)


def viterbi(scores):
    """A state that is forbidden by a literal, and back pointers."""
    allowed = jnp.where(jnp.eye(3, dtype=bool)[::-1], -jnp.inf, 0.0)

    def step(best, score):
        ways = best[:, None] + allowed
        best = ways.max(0) + score / score.sum()  # BAD
        return best, ways.argmax(0)

    best, back = lax.scan(step, jnp.zeros(3), jnp.tile(scores, (5, 1)))
    return best, back


def diffusion(x):
    """Steps of a denoiser over a schedule."""
    betas = jnp.linspace(1e-4, 0.2, 10)
    alphas = jnp.cumprod(1 - betas)

    def step(carry, i):
        x, key = carry
        key, sub = jax.random.split(key)
        noise = jax.random.normal(sub, x.shape)
        scale = betas[i] / jnp.sqrt(1 - alphas[i])
        mean = (x - scale * jnp.tanh(x)) / jnp.sqrt(1 - betas[i])
        x = mean + jnp.where(i > 0, jnp.sqrt(betas[i]), 0) * noise
        x = x / jnp.abs(x).max()  # BAD
        return (x * jnp.sign(carry[0][0]), key), x.mean()

    (x, _), means = lax.scan(step, (x, jax.random.key(0)), jnp.arange(10)[::-1])
    return x, means


def training(w):
    """Adam on a masked softmax regression, with the best loss so far."""
    xs = jax.random.normal(jax.random.key(1), (16, 3))
    labels = jnp.arange(16) % 2

    def loss_of(w):
        logits = jnp.where(jnp.array([True, True, False]), xs @ w, -jnp.inf)
        return -jax.nn.log_softmax(logits)[jnp.arange(16), labels].mean()

    def step(state, i):
        w, m, v, best = state
        loss, grad = jax.value_and_grad(loss_of)(w)
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
        best = jnp.where(i == 10, jnp.inf, jnp.minimum(best, loss))
        w = w - 0.1 * m / (jnp.sqrt(v) + jnp.abs(w).sum() * 1e-8)  # BAD
        return (w, m, v, best), loss

    zeros = jnp.zeros_like(w)
    return lax.scan(step, (w, zeros, zeros, jnp.inf), jnp.arange(20))


def sampler(x):
    """Hamiltonian Monte Carlo on a density that ends at 0, where its energy is inf."""
    energy = lambda q: jnp.where(q > 0, q - jnp.log(jnp.where(q > 0, q, 1)), jnp.inf)
    slope = jax.grad(energy)

    def leap(_, s):
        q, p = s
        p = p - 0.1 * slope(q)
        q = q + 0.2 * p
        return q, p - 0.1 * slope(q)

    def step(q, key):
        first, second = jax.random.split(key)
        p = jax.random.normal(first)
        new, end = lax.fori_loop(0, 5, leap, (q, p))
        change = energy(q) + p**2 / 2 - energy(new) - end**2 / 2
        accepted = jnp.log(jax.random.uniform(second)) < change
        return jnp.where(accepted, new, q), energy(new)

    def run(x):
        start = jnp.log(x)  # BAD
        return lax.scan(step, jnp.exp(start), jax.random.split(jax.random.key(2), 50))

    return run(x)


def kalman(noise):
    """A filter whose gain divides by the innovation's variance."""

    def step(carry, y):
        mean, variance = carry
        variance = variance + noise
        gain = variance / (variance + noise)  # BAD
        mean = mean + gain * (y - mean)
        return (mean, (1 - gain) * variance), mean

    return lax.scan(step, (0.0, noise), jnp.arange(6.0))[1]


def clusters(points):
    """k-means, in which a cluster without points is divided by 0."""
    centers = jnp.array([-1.0, 0.5, 2.0])

    def step(_, centers):
        nearest = jnp.abs(points[:, None] - centers).argmin(1)
        one_hot = jax.nn.one_hot(nearest, 3)
        return (one_hot * points[:, None]).sum(0) / one_hot.sum(0)  # BAD

    return lax.fori_loop(0, 3, step, centers)


def decoding(logits):
    """Tokens one after another, of the two that are best."""

    def step(carry, _):
        key, logits = carry
        key, sub = jax.random.split(key)
        least = lax.top_k(logits, 2)[0][-1]
        kept = jnp.where(logits < least, -jnp.inf, logits)
        token = jax.random.categorical(sub, kept)
        spread = jnp.log(logits.max() - logits.min())  # BAD
        return (key, logits + spread * jax.nn.one_hot(token, 4)), (token, kept)

    return lax.scan(step, (jax.random.key(3), logits), None, length=6)[1]


def attention(x):
    """Causal attention with normed rows, and its gradient."""

    def loss_of(x):
        rows = x / jnp.sqrt((x**2).sum(-1, keepdims=True))  # BAD
        scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), rows @ rows.T, -jnp.inf)
        return (jax.nn.softmax(scores) @ rows).sum()

    return jax.value_and_grad(loss_of)(x)


def advantages(rewards):
    """Generalized advantages, backward in time, as actor-critic methods norm them."""

    def step(carry, reward):
        after, value = carry
        after = reward + 0.9 * value - reward.mean() + 0.8 * after
        return (after, reward), after

    start = jnp.zeros(3), jnp.zeros(3)
    _, found = lax.scan(step, start, rewards, reverse=True)
    centered = found - found.mean()
    return centered / jnp.sqrt((centered**2).mean())  # BAD


def solver(rate):
    """An adaptive method of Heun, which saves the steps that it accepts."""

    def slope(y):
        return -jnp.sqrt(y) * rate  # BAD

    def body(state):
        i, t, y, size, times, saved, _ = state
        first = slope(y)
        second = slope(y + size * first)
        error = jnp.abs(size * (second - first)) / 2
        is_good = error < 1e-3
        y = jnp.where(is_good, y + size * (first + second) / 2, y)
        t = jnp.where(is_good, t + size, t)
        write = lambda rows: (rows[0].at[i].set(t), rows[1].at[i].set(y))
        rows = times, saved
        times, saved = lax.cond(is_good, write, lambda rows: rows, rows)
        size = jnp.clip(size * jnp.where(is_good, 1.5, 0.5), 1e-3, 1 - t)
        return i + is_good, t, y, size, times, saved, error

    rows = jnp.full(64, jnp.inf)
    start = 0, 0.0, jnp.sign(rate), 0.1, rows, rows, 0.0
    return lax.while_loop(lambda s: (s[1] < 0.99) & (s[0] < 64), body, start)


def newton(target):
    """Roots of many numbers, each with steps of its own."""

    def root(x):
        def body(state):
            n, y = state
            return n + 1, y - (y * y - x) / (2 * y)  # BAD

        is_far = lambda state: (state[0] < 20) & ~(jnp.abs(state[1] ** 2 - x) < 1e-4)
        return lax.while_loop(is_far, body, (0, x))

    return jax.vmap(root)(target)


# A good input, and a bad one.
PROGRAMS = {
    viterbi: (jnp.array([1.0, 2.0, 4.0]), jnp.array([1.0, -1.0, 0.0])),
    diffusion: (jnp.array([0.5, -0.3, 0.8]), jnp.zeros(3)),
    training: (jnp.eye(3), jnp.zeros((3, 3))),
    sampler: (jnp.float32(1.0), jnp.float32(-1.0)),
    kalman: (jnp.float32(0.1), jnp.float32(0.0)),
    clusters: (jnp.array([-1.0, 0.4, 2.1]), jnp.array([-1.0, -1.1, -0.9])),
    attention: (jnp.eye(4) + 0.1, jnp.eye(4).at[2].set(0)),
    advantages: (jnp.sin(jnp.arange(12.0)).reshape(4, 3), jnp.zeros((4, 3))),
    solver: (jnp.float32(1.0), jnp.float32(-1.0)),
    newton: (jnp.array([1.0, 2.0, 9.0]), jnp.array([1.0, -1.0, 9.0])),
    decoding: (jnp.array([1.0, 3.0, 2.0, 0.0]), jnp.ones(4)),
}
name_of = lambda f: f.__name__


@pytest.mark.parametrize("f", PROGRAMS, ids=name_of)
def test_infinities_that_are_meant(f):
    program, (x, _) = jax.jit(f), PROGRAMS[f]
    expected = program(x)
    with observe(nans=True):
        found = program(x)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("f", PROGRAMS, ids=name_of)
def test_the_line_that_makes_a_bad_value(f):
    x = PROGRAMS[f][1]
    with pytest.raises(FloatingPointError) as caught, observe(nans=True):
        jax.block_until_ready(jax.jit(f)(x))
    assert marked(f) in str(caught.value)


def test_a_model_with_a_logarithm_of_zero():
    """Its infinities are made, so only NaNs can be looked for."""
    program = jax.jit(forward_algorithm)
    start = jnp.array([0.5, 0.5, 0.0])
    with pytest.raises(FloatingPointError, match="log made"), observe(nans=True):
        jax.block_until_ready(program(start))
    with observe(nans=True, infs=False):
        found = program(start)
        with pytest.raises(FloatingPointError) as caught:
            jax.block_until_ready(program(-start))
    np.testing.assert_allclose(found, program(start), rtol=1e-6)
    assert marked(forward_algorithm) in str(caught.value)
