"""
A data loader's epoch in one scan
=================================

A network learns the shape of a mountain range from shuffled batches of pixels. With
:func:`hostcall.feed` an epoch is one compiled program, which takes a batch of the data
loader in each step of a scan. The usual Python loop over a jitted step gets the same
numbers, and the times of both are measured here.

Besides hostcall it needs ``pip install matplotlib``.
"""

# %%
# The data
# --------
#
# The elevation of Jacksboro in Tennessee comes with matplotlib. A sample is the
# position of a pixel, and its height.

# sphinx_gallery_tags = ["feed", "training", "plots"]
# sphinx_gallery_thumbnail_number = 2

import importlib.util
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import cbook

import hostcall as hc

BATCH, EPOCHS, WIDE = 512, 6, 64

file: Any = cbook.get_sample_data("jacksboro_fault_dem.npz")
with file:
    heights = file["elevation"][::2, ::2].astype(np.float32)
picture = (heights - heights.mean()) / heights.std()
Y = picture.ravel()
grid = np.meshgrid(*(np.linspace(-1, 1, n) for n in picture.shape), indexing="ij")
X = np.stack(grid, axis=-1).reshape(-1, 2).astype(np.float32)
BATCHES = len(Y) // BATCH

# %%
# The loader is PyTorch's if torch is installed, else a plain one. Both are given the
# number of the epoch, which is the seed of the order: so each epoch is shuffled anew,
# and all runs get the same batches.


class PlainLoader:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        order = np.random.default_rng(self.seed).permutation(len(Y))
        for batch in range(BATCHES):
            rows = order[batch * BATCH : (batch + 1) * BATCH]
            yield [X[rows], Y[rows]]


def make_loader(epoch: int) -> Iterable[Any]:
    if importlib.util.find_spec("torch") is None:
        return PlainLoader(epoch)
    torch: Any = importlib.import_module("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    order = torch.Generator().manual_seed(epoch)
    loader: Iterable[Any] = torch.utils.data.DataLoader(
        data, BATCH, shuffle=True, drop_last=True, generator=order
    )
    return loader


# %%
# A step of the training
# ----------------------
#
# The network gets sines and cosines of the position, and is trained with momentum.

Params = dict[str, jax.Array]
State = tuple[Params, Params]
keys = jax.random.split(jax.random.key(0), 3)
WAVES = 6 * jax.random.normal(keys[0], (2, WIDE // 2))


def network(params: Params, x: jax.Array) -> jax.Array:
    phases = x @ WAVES
    x = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], axis=-1)
    x = jnp.tanh(x @ params["w1"] + params["b1"])
    return x @ params["w2"]


def start() -> State:
    params = {
        "w1": jax.random.normal(keys[1], (WIDE, WIDE)) / WIDE**0.5,
        "b1": jnp.zeros(WIDE),
        "w2": jax.random.normal(keys[2], (WIDE,)) / WIDE**0.5,
    }
    return params, jax.tree.map(jnp.zeros_like, params)


def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
    params, velocity = state

    def misfit(params: Params) -> jax.Array:
        return ((network(params, x) - y) ** 2).mean()

    loss, slope = jax.value_and_grad(misfit)(params)
    velocity = jax.tree.map(lambda v, g: 0.9 * v - 0.03 * g, velocity, slope)
    params = jax.tree.map(jnp.add, params, velocity)
    return (params, velocity), loss


# %%
# The Python loop
# ---------------
#
# A run returns the weights, the loss of each step, and the seconds of each epoch.

Run = tuple[Params, np.ndarray, list[float]]
jitted = jax.jit(step)


def by_python_loop(epochs: int) -> Run:
    state, losses, seconds = start(), [], []
    for epoch in range(epochs):
        begin = time.perf_counter()
        for x, y in make_loader(epoch):
            state, loss = jitted(state, np.asarray(x), np.asarray(y))
            losses.append(loss)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begin)
    return state[0], np.array(losses), seconds


# %%
# One program an epoch
# --------------------
#
# A thread of the feed pulls batches ahead while the program computes. With
# ``on_end="repeat"`` the feed goes on with the loader of the next epoch. Its state is a
# small dict; ``feed.restore`` goes back to the first batch of the first epoch.

feed = hc.feed(make_loader, on_end="repeat", tag="loader")
at_start = feed.state()


@jax.jit
def one_epoch(state: State) -> tuple[State, jax.Array]:
    def body(state: State, _: None) -> tuple[State, jax.Array]:
        (x, y), _ok = feed()
        return step(state, x, y)

    state, losses = jax.lax.scan(body, state, length=BATCHES)
    return state, losses


def by_feed(epochs: int) -> Run:
    feed.restore(at_start)
    state, losses, seconds = start(), [], []
    for _ in range(epochs):
        begin = time.perf_counter()
        state, loss = jax.block_until_ready(one_epoch(state))
        losses.append(loss)
        seconds.append(time.perf_counter() - begin)
    return state[0], np.concatenate(losses), seconds


# %%
# One epoch of each compiles the programs. Then both are measured.

by_python_loop(1)
by_feed(1)
_, losses_loop, seconds_loop = by_python_loop(EPOCHS)
params, losses_feed, seconds_feed = by_feed(EPOCHS)
print(
    f"an epoch has {BATCHES} batches of {BATCH}, of a {type(make_loader(0)).__name__}"
)
print(f"Python loop: {np.median(seconds_loop) * 1e3:.0f} ms an epoch")
print(f"fed scan:    {np.median(seconds_feed) * 1e3:.0f} ms an epoch")
print("position of the feed:", feed.state())
feed.close()

# %%
# The curves lie on each other. How the times compare depends on the loader and the
# machine: the feed overlaps the loader with the computation, if there is a core for
# each.

figure, (top, bottom) = plt.subplots(2, figsize=(5.5, 5), height_ratios=(3, 2))
at = np.arange(1, len(losses_feed) + 1) / BATCHES
top.semilogy(at, losses_feed, linewidth=4, alpha=0.4, label="fed scan")
top.semilogy(at, losses_loop, linewidth=1, label="Python loop")
top.set(xlabel="epoch", ylabel="loss of a batch")
top.legend()
for place, seconds in enumerate([seconds_feed, seconds_loop]):
    bottom.barh(place, np.median(seconds) * 1e3, alpha=0.5)
    bottom.plot(np.array(seconds) * 1e3, [place] * EPOCHS, "k.")
bottom.set_yticks([0, 1], ["fed scan", "Python\nloop"])
bottom.set(xlabel="ms an epoch")
figure.tight_layout()

# %%
# What was learned
# ----------------

learned = np.asarray(network(params, jnp.asarray(X))).reshape(picture.shape)
figure, axes = plt.subplots(1, 2, figsize=(5.5, 2.8), layout="constrained")
for axis, values, title in zip(
    axes, (picture, learned), ("the mountains", "the network"), strict=True
):
    metres = values * heights.std() + heights.mean()
    image = axis.imshow(metres, cmap="terrain", vmin=heights.min(), vmax=heights.max())
    axis.set(title=title, xticks=[], yticks=[])
figure.colorbar(image, ax=axes, label="m")
plt.show()

# %%
# Both ways took the same batches, and the network explains most of the terrain.

explained = 1 - ((learned - picture) ** 2).mean()
print(f"{100 * explained:.0f} % of the variance")
assert len(losses_feed) == EPOCHS * BATCHES
assert np.allclose(losses_feed, losses_loop, rtol=1e-3)
assert explained > 0.8
