"""
Learning to balance: Gymnasium in one compiled program
======================================================

A policy learns to balance a pole on a cart. The sixteen carts are Gymnasium's, Python
objects with a state each, and the policy and its gradients are JAX code. Playing and
learning are one compiled program, and a learning curve leaves it while it runs.

Besides hostcall it needs ``pip install gymnasium matplotlib optax tqdm``.
"""

# sphinx_gallery_tags = ["objects", "simulator", "taps", "training"]

import gymnasium
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.animation import FuncAnimation

import hostcall as hc

ENVIRONMENTS, STEPS, UPDATES = 16, 200, 40

# %%
# The environments
# ----------------
# ``hc.Object`` makes an object for each row of a ``vmap``. It says which methods
# programs may call, and what they return. A method is called exactly once each time
# that the program comes to it, and the calls of a row keep their order.


class CartPole:
    def __init__(self):
        self.inner = gymnasium.make("CartPole-v1", max_episode_steps=STEPS)

    def reset(self, seed):
        return self.inner.reset(seed=int(seed))[0]

    def step(self, action):
        observation, _, fell, late, _ = self.inner.step(int(action))
        return observation, fell or late

    def close(self):
        self.inner.close()


observation = jax.ShapeDtypeStruct((4,), jnp.float32)
over = jax.ShapeDtypeStruct((), jnp.bool_)
environments = hc.Object(
    CartPole, methods={"reset": observation, "step": (observation, over)}
)

# %%
# An episode
# ----------
# The policy pushes to the right with a probability that depends on four weights. When
# an episode is over, ``where=`` leaves its environment alone, and the others go on.


def push_right(weights, observation):
    """The logarithms of the probabilities of left and right."""
    logit = observation @ weights
    return jax.nn.log_sigmoid(jnp.stack([-logit, logit], axis=-1))


def episode(weights, key):
    """Observations, actions and whether the pole still stands, each for all steps."""
    start, rest = jax.random.split(key)

    def step(carry, key):
        observation, playing = carry
        action = jax.random.categorical(key, push_right(weights, observation))
        new, over = environments.step(action, where=playing)
        return (new, playing & ~over), (observation, action, playing)

    first = environments.reset(jax.random.bits(start))  # a seed
    return jax.lax.scan(step, (first, True), jax.random.split(rest, STEPS))[1]


def play(weights, key):
    keys = jax.random.split(key, ENVIRONMENTS)
    return jax.vmap(episode, (None, 0))(weights, keys)


# %%
# Learning
# --------
# The gradient does not go through the environments. An action is made more likely if
# the pole stood longer after it than it did on average at that step (Williams'
# REINFORCE, with a baseline). ``hc.tap`` hands over the lengths of the episodes after
# each update, and ``hc.progress`` shows a bar.

updated = []


@jax.jit
def learn(weights, key):
    optimiser = optax.adam(0.3)

    def surprise(weights, observations, actions, playing):
        left = jnp.cumsum(playing[:, ::-1], axis=1)[:, ::-1]  # steps that are left
        count = jnp.maximum(playing.sum(0), 1)
        advantage = (left - (left * playing).sum(0) / count) * playing
        chosen = jnp.take_along_axis(
            push_right(weights, observations), actions[..., None], axis=-1
        )[..., 0]
        return -(chosen * advantage).sum() / playing.sum()

    def update(carry, inputs):
        (weights, state), (i, key) = carry, inputs
        played = play(weights, key)
        lengths = played[2].sum(1)
        hc.tap(lambda lengths: updated.append(lengths.copy()), lengths)
        hc.progress(i, UPDATES, desc="learning", mean=lengths.mean())
        change, state = optimiser.update(jax.grad(surprise)(weights, *played), state)
        return (optax.apply_updates(weights, change), state), None

    inputs = jnp.arange(UPDATES), jax.random.split(key, UPDATES)
    return jax.lax.scan(update, (weights, optimiser.init(weights)), inputs)[0][0]


start = jnp.zeros(4)  # pushes at random
learned = learn(start, jax.random.key(0))
hc.barrier()
curve = np.array(updated)

# %%
# Play at random, and play as learned
# -----------------------------------
# Twenty times sixteen episodes of random pushes show what luck can do.

playing = jax.jit(play)
keys = jax.random.split(jax.random.key(1), 20)
luck = np.stack([playing(start, key)[2].sum(1) for key in keys])
skill = np.asarray(playing(learned, jax.random.key(2))[2].sum(1))
print(f"random: {luck.mean():.0f}, at best {luck.max()}; learned: {skill.mean():.0f}")

fast, slow = (playing(w, jax.random.key(3)) for w in (learned, start))
environments.close()

# %%
# A plain Python loop over the same environment, with the actions of the program, sees
# what the program saw.

observations, actions, stood = (np.asarray(array[0]) for array in fast)
plain = CartPole()
seed = jax.random.bits(jax.random.split(jax.random.split(jax.random.key(3), 16)[0])[0])
seen = [plain.reset(seed)]
for action in actions[: stood.sum() - 1]:
    seen.append(plain.step(action)[0])
plain.close()
same = np.array_equal(seen, observations[: len(seen)])

# %%
# The learning curve
# ------------------

figure, axes = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
updates = np.arange(UPDATES)
axes.fill_between(
    updates, curve.min(1), curve.max(1), alpha=0.2, label="shortest to longest"
)
axes.plot(updates, curve.mean(1), label="mean of 16 episodes")
axes.axhline(luck.max(), color="C3", ls=":", label=f"best of {luck.size} random ones")
axes.set(xlabel="update", ylabel="steps until the pole falls", ylim=(0, STEPS + 5))
axes.legend(loc="lower right")

# %%
# Before and after
# ----------------
# The same environment, with random pushes and with those that were learned.

figure, axes = plt.subplots(2, 1, figsize=(6, 5), dpi=70, sharex=True)
pictures = []
for axis, name, played in zip(axes, ("random", "learned"), (slow, fast), strict=True):
    axis.set(xlim=(-2.4, 2.4), ylim=(-0.3, 1.3), yticks=[], title=name, aspect="equal")
    axis.axhline(0, color="0.7", zorder=0)
    (cart,) = axis.plot([], [], "ks", ms=14)
    (pole,) = axis.plot([], [], "C1", lw=4)
    last = int(played[2][0].sum()) - 1
    pictures.append((cart, pole, np.asarray(played[0][0]), last))


def draw(frame):
    for cart, pole, observations, last in pictures:
        place, _, angle, _ = observations[min(4 * frame, last)]
        cart.set_data([place], [0])
        pole.set_data([place, place + np.sin(angle)], [0, np.cos(angle)])


animation = FuncAnimation(figure, draw, frames=STEPS // 4, interval=80)
plt.show()

# %%
# The policy balances the pole for longer than the luckiest of the random episodes.

assert luck.max() < 150
assert skill.mean() > 180
assert curve[-5:].mean() > 150 > curve[0].max()
assert same
