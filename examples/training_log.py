"""A training loop that logs every step, prints some, and saves its weights.

The whole run is one compiled program. The log is a tap: the device hands the numbers
over and goes on, so a slow writer does not slow it down. For comparison the same loop
is timed without logging, and with JAX's callback.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc

STEPS = 2000
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (64, 16))
Y = jnp.sin(X.sum(1))
Weights = tuple[jax.Array, jax.Array]


def loss(weights: Weights) -> jax.Array:
    hidden, out = weights
    return ((jnp.tanh(X @ hidden) @ out - Y) ** 2).mean()


def trained(
    log: Callable[[jax.Array, jax.Array], None],
    snapshot: Callable[[jax.Array, Weights], None],
) -> Callable[[Weights], Weights]:
    """A compiled program: weights -> weights after STEPS steps."""

    def step(weights: Weights, number: jax.Array) -> tuple[Weights, None]:
        value, slope = jax.value_and_grad(loss)(weights)
        log(number, value)
        snapshot(number, weights)
        return jax.tree.map(lambda w, g: w - 0.05 * g, weights, slope), None

    return jax.jit(lambda w: jax.lax.scan(step, w, jnp.arange(STEPS))[0])


def main() -> None:
    weights = (jax.random.normal(KEY, (16, 32)) / 4, jnp.zeros(32))
    losses: list[tuple[int, float]] = []
    written: list[Path] = []
    folder = Path(tempfile.mkdtemp())

    def note(number: np.ndarray, value: np.ndarray) -> None:
        losses.append((int(number), float(value)))

    def write(number: np.ndarray, weights: tuple[np.ndarray, np.ndarray]) -> None:
        time.sleep(0.01)  # a slow disk
        path = folder / f"step{int(number)}.npz"
        np.savez(path, *weights)
        written.append(path)

    def tap_log(number: jax.Array, value: jax.Array) -> None:
        hc.tap(note, number, value)
        hc.print("step {:5d}  loss {:.4f}", number, value, every=500)

    def tap_snapshot(number: jax.Array, weights: Weights) -> None:
        hc.tap(write, number, weights, every=200)

    programs = {
        "no logging": trained(lambda *_: None, lambda *_: None),
        "hc.tap": trained(tap_log, tap_snapshot),
        "jax.debug.callback": trained(
            lambda *a: jax.debug.callback(note, *a), lambda *_: None
        ),
    }
    for name, program in programs.items():
        jax.block_until_ready(program(weights))  # compiles, and warms up
        jax.effects_barrier()
        hc.barrier()
        losses.clear()
        written.clear()
        begin = time.perf_counter()
        jax.block_until_ready(program(weights))
        computed = time.perf_counter() - begin
        jax.effects_barrier()
        hc.barrier()
        done = time.perf_counter() - begin
        print(
            f"{name:20} {computed / STEPS * 1e6:6.1f} us a step,"
            f" all logged after {done:.2f} s, {len(losses)} losses,"
            f" {len(written)} snapshots"
        )
        if name != "no logging":
            assert len(losses) == STEPS
        if name == "hc.tap":
            assert [n for n, _ in losses] == list(range(STEPS))
            assert losses[-1][1] < losses[0][1] / 2
            assert len(written) == STEPS // 200
            last = np.load(written[-1])
            assert last["arr_0"].shape == (16, 32)


if __name__ == "__main__":
    main()
