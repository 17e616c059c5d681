"""A training script from the days of jax.experimental.host_callback.

Only its import has changed; it was
`from jax.experimental import host_callback as hcb`.

It fits a linear recurrence to a noisy signal, taps its losses, prints from inside pmap
on two devices, and lets NumPy compute the eigenvalues of what it has learnt (JAX has no
general eigenvalues on accelerators).
"""

import os
import warnings

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np

import hostcall.host_callback as hcb

# pmap warns that it is deprecated, too.
warnings.filterwarnings("ignore", category=DeprecationWarning)

ORDER, STEPS, RATE = 3, 400, 0.1
TRUE = np.array([1.5, -0.8, 0.2], np.float32)


class Lines:
    """The stream to which id_print writes."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, line: str) -> None:
        self.text += line


losses: list[float] = []
printed = Lines()


def log_loss(loss: np.ndarray, transforms: object) -> None:
    losses.append(float(loss))


def signal(seed: int, n: int = 300) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(scale=0.5, size=n).astype(np.float32)
    x = np.zeros(n, np.float32)
    for i in range(ORDER, n):
        x[i] = TRUE @ x[i - ORDER : i][::-1] + noise[i]
    return x


def windows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = [x[i - ORDER : i][::-1] for i in range(ORDER, len(x))]
    return np.stack(rows), x[ORDER:]


def loss_of(w: jax.Array, rows: np.ndarray, targets: np.ndarray) -> jax.Array:
    loss = jnp.mean((rows @ w - targets) ** 2)
    hcb.id_tap(log_loss, loss)
    return loss


@jax.jit
def train(w: jax.Array, rows: np.ndarray, targets: np.ndarray) -> jax.Array:
    def step(w: jax.Array, _: None) -> tuple[jax.Array, None]:
        return w - RATE * jax.grad(loss_of)(w, rows, targets), None

    return jax.lax.scan(step, w, length=STEPS)[0]


def eigenvalues(m: np.ndarray) -> np.ndarray:
    return np.linalg.eigvals(m).astype(np.complex64)


@jax.jit
def modes(w: jax.Array) -> jax.Array:
    companion = jnp.zeros((ORDER, ORDER)).at[0].set(w)
    companion = companion.at[1:, :-1].set(jnp.eye(ORDER - 1))
    roots: jax.Array = hcb.call(
        eigenvalues,
        companion,
        result_shape=jax.ShapeDtypeStruct((ORDER,), jnp.complex64),
    )
    return roots


rows, targets = windows(signal(0))
w = train(jnp.zeros(ORDER), rows, targets)
hcb.barrier_wait("after training")
assert len(losses) == STEPS
assert losses[-1] < losses[0] / 3
assert np.abs(w - TRUE).max() < 0.3


# How well it predicts two other signals, each on a device of its own.
@jax.pmap
def error(rows: np.ndarray, targets: np.ndarray) -> jax.Array:
    mse = jnp.mean((rows @ w - targets) ** 2)
    hcb.id_print(mse, what="mse", tap_with_device=True, output_stream=printed)
    return mse


others = [windows(signal(seed)) for seed in (1, 2)]
errors = error(*(np.stack(part) for part in zip(*others, strict=True)))
hcb.barrier_wait("after evaluation")
lines = printed.text.splitlines()
assert sorted(lines[::2]) == [f"device: {d} what: mse" for d in jax.devices()[:2]]
assert sorted(map(float, lines[1::2])) == sorted(float(f"{e:.8g}") for e in errors)

roots = modes(w)
assert np.abs(roots).max() < 1  # the learnt recurrence is stable, as the true one is
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
print(f"errors {[round(float(e), 3) for e in errors]}, |roots| {np.abs(roots)}")
