"""A whole epoch in one scan, fed by a data loader, beside the usual Python loop.

The loader is PyTorch's if torch is installed, else a plain one of the same name.
"""

import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc

Train = Callable[[], tuple[jax.Array, list[float]]]
ROWS, BATCH, EPOCHS = 4096, 32, 3
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 16)).astype(np.float32)
TRUE = rng.normal(size=16).astype(np.float32)
Y = X @ TRUE


class DataLoader:
    """Stands for PyTorch's, with as much of it as this program needs."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        order = np.random.default_rng(self._seed).permutation(ROWS)
        for rows in order.reshape(-1, BATCH):
            yield [X[rows], Y[rows]]


def make_loader(seed: int) -> Iterable[Any]:
    if importlib.util.find_spec("torch") is None:
        return DataLoader(seed)
    torch: Any = importlib.import_module("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    order = torch.Generator().manual_seed(seed)
    loader: Iterable[Any] = torch.utils.data.DataLoader(
        data, BATCH, shuffle=True, drop_last=True, generator=order
    )
    return loader


def step(w: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, slope = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
    return w - 0.05 * slope, loss


def by_python_loop() -> tuple[jax.Array, list[float]]:
    jitted, w, losses = jax.jit(step), jnp.zeros(16), []
    loss = jnp.inf
    for epoch in range(EPOCHS):
        for x, y in make_loader(epoch):
            w, loss = jitted(w, np.asarray(x), np.asarray(y))
        losses.append(float(loss))
    return w, losses


def by_feed() -> tuple[jax.Array, list[float]]:
    with hc.feed(make_loader, on_end="repeat", tag="loader") as feed:

        @jax.jit
        def epoch(w: jax.Array) -> tuple[jax.Array, jax.Array]:
            def body(w: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
                (x, y), _ok = feed()
                return step(w, x, y)

            w, losses = jax.lax.scan(body, w, length=ROWS // BATCH)
            return w, losses[-1]

        w, losses = jnp.zeros(16), []
        for _ in range(EPOCHS):
            w, loss = epoch(w)
            losses.append(float(loss))
        return w, losses


def timed(train: Train) -> tuple[jax.Array, list[float], float]:
    start = time.perf_counter()
    w, losses = train()
    return w, losses, time.perf_counter() - start


w_loop, losses_loop, seconds_loop = timed(by_python_loop)
w_feed, losses_feed, seconds_feed = timed(by_feed)
print(f"Python loop: {seconds_loop:.2f} s, losses {losses_loop}")
print(f"one scan an epoch, fed: {seconds_feed:.2f} s, losses {losses_feed}")
assert np.allclose(w_loop, w_feed, atol=1e-5)
assert np.allclose(w_feed, TRUE, atol=0.05)
