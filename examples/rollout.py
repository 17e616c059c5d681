"""Many environments, stepped by one compiled program: `hc.Object`.

The policy is JAX code and the environments are Python: Gymnasium's CartPole-v1, or the
same physics from this file if Gymnasium is not installed. `jax.vmap` gives each row its
own environment, `jax.lax.scan` steps them, and a plain Python loop over the same
environments gives the same numbers.
"""

import importlib.util
import math
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc

GYMNASIUM = importlib.util.find_spec("gymnasium") is not None
ENVIRONMENTS = 16
STEPS = 250

A = TypeVar("A")
R = TypeVar("R")
Array = jax.Array | np.ndarray
Info = dict[str, object]
Steps = tuple[jax.Array, jax.Array, jax.Array]  # observations, rewards, ends


class CartPole(Protocol):
    """What this program uses of Gymnasium's interface."""

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, Info]: ...
    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, Info]: ...
    def close(self) -> None: ...


class SmallCartPole:
    """A pole on a cart, with Gymnasium's constants."""

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, Info]:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.state, self.steps = self.random.uniform(-0.05, 0.05, size=4), 0
        return self.state.astype(np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, Info]:
        _, speed, angle, turn = self.state
        force = 10.0 if action == 1 else -10.0
        sine, cosine = math.sin(angle), math.cos(angle)
        push = (force + 0.05 * turn**2 * sine) / 1.1
        spin = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        pull = push - 0.05 * spin * cosine / 1.1
        change = np.array([speed, pull, turn, spin])
        self.state = self.state + 0.02 * change
        self.steps += 1
        fell = abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.pi / 15
        return self.state.astype(np.float32), 1.0, fell, self.steps >= 500, {}

    def close(self) -> None:
        pass


def make() -> CartPole:
    if not GYMNASIUM:
        return SmallCartPole()
    import gymnasium

    cart_pole: CartPole = gymnasium.make("CartPole-v1")
    return cart_pole


class Environment:
    """An environment that starts again when an episode is over."""

    def __init__(self) -> None:
        self.inner = make()

    def reset(self, seed: np.ndarray) -> np.ndarray:
        return self.inner.reset(seed=int(seed))[0]

    def step(self, action: Array) -> tuple[np.ndarray, float, bool]:
        observation, reward, fell, late, _ = self.inner.step(int(action))
        if fell or late:
            observation, _ = self.inner.reset()
        return observation, reward, fell or late

    def close(self) -> None:
        self.inner.close()


def policy(observation: Array) -> Array:
    """Pushes towards the side to which the pole leans."""
    return observation[2] > 0


def rollout(environments: hc.Object) -> Callable[[jax.Array], Steps]:
    """The function seeds -> (observations, rewards, ends), whose arrays have the axes
    (environment, step, ...).
    """

    def one(seed: jax.Array) -> Steps:
        def step(observation: jax.Array, _: None) -> tuple[jax.Array, Steps]:
            out: Steps = environments.step(policy(observation).astype(jnp.int32))
            return out[0], out

        return jax.lax.scan(step, environments.reset(seed), length=STEPS)[1]

    return jax.vmap(one)


def rollout_in_python(seeds: np.ndarray) -> list[np.ndarray]:
    environments = [Environment() for _ in seeds]
    out = []
    for environment, seed in zip(environments, seeds, strict=True):
        observation, steps = environment.reset(seed), []
        for _ in range(STEPS):
            steps.append(environment.step(policy(observation)))
            observation = steps[-1][0]
        environment.close()
        out.append([np.array(column) for column in zip(*steps, strict=True)])
    return [np.array(column) for column in zip(*out, strict=True)]


def timed(f: Callable[[A], R], x: A) -> tuple[R, float]:
    begin = time.perf_counter()
    out = jax.block_until_ready(f(x))
    return out, time.perf_counter() - begin


def main() -> None:
    observation = jax.ShapeDtypeStruct((4,), jnp.float32)
    reward = jax.ShapeDtypeStruct((), jnp.float32)
    over = jax.ShapeDtypeStruct((), jnp.bool_)
    methods = {"reset": observation, "step": (observation, reward, over)}
    seeds = jnp.arange(ENVIRONMENTS)

    with hc.Object(Environment, methods=methods) as environments:
        program = jax.jit(rollout(environments)).lower(seeds).compile()
        got, compiled = timed(program, seeds)
    want, plain = timed(rollout_in_python, np.asarray(seeds))

    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)
    steps, ends = ENVIRONMENTS * STEPS, int(got[2].sum())
    whose = "Gymnasium's CartPole-v1" if GYMNASIUM else "the CartPole of this file"
    print(f"{ENVIRONMENTS} x {whose}: {steps} steps, {ends} episodes that ended")
    for name, seconds in (("compiled", compiled), ("a plain loop", plain)):
        print(f"{name:>13}: {seconds:.3f} s, {seconds / steps * 1e6:.1f} us a step")
    assert ends > 0


if __name__ == "__main__":
    main()
