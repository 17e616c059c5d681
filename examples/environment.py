"""A Python environment inside a compiled loop, as in reinforcement learning.

The environment keeps its state, so its steps must run one after the other, each exactly
once: `order="ordered"`. The policy and the bookkeeping are JAX code, and the whole
episode is one compiled program.
"""

import random
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc

STEPS = 500
Number = TypeVar("Number", jax.Array, np.float32)
Pair = tuple[jax.Array, jax.Array]


class Walk:
    """A walker on a line, pushed by the policy and at random. Its goal is 0."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.place = 0.0
        self.steps = 0

    def step(self, push: np.ndarray | np.float32) -> tuple[np.float32, np.float32]:
        self.place += float(push) + self.chance.gauss(0.0, 1.0)
        self.steps += 1
        return np.float32(self.place), np.float32(-abs(self.place))


def policy(gain: Number, place: Number) -> Number:
    return -gain * place


def episode(environment: Walk) -> Callable[[float], Pair]:
    """A compiled program that plays: gain -> (places, total reward)."""
    number = jax.ShapeDtypeStruct((), jnp.float32)

    def step(place: jax.Array, gain: jax.Array) -> tuple[jax.Array, Pair]:
        push = policy(gain, place)
        place, reward = hc.call(
            environment.step, (number, number), push, order="ordered"
        )
        return place, (place, reward)

    @jax.jit
    def play(gain: float) -> Pair:
        gains = jnp.full(STEPS, gain)
        _, (places, rewards) = jax.lax.scan(step, jnp.float32(0), gains)
        return places, rewards.sum()

    return play


def episode_in_python(environment: Walk, gain: float) -> np.ndarray:
    place, places = np.float32(0), []
    for _ in range(STEPS):
        place, _ = environment.step(policy(np.float32(gain), place))
        places.append(place)
    return np.array(places)


def main() -> None:
    environment = Walk(seed=1)
    places, reward = episode(environment)(0.5)
    expected = episode_in_python(Walk(seed=1), 0.5)
    print(f"{environment.steps} steps, total reward {reward:.1f}")
    assert environment.steps == STEPS
    np.testing.assert_array_equal(places, expected)

    # Without the policy the walker drifts away.
    _, lost = episode(Walk(seed=1))(0.0)
    print(f"without a policy {lost:.1f}")
    assert lost < reward


if __name__ == "__main__":
    main()
