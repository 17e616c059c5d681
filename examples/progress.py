"""Progress bars: of a compiled fit, of nested loops, of a batch, and of a Python loop.

The fit is one compiled program. Its bar moves while it runs, and does not make it wait:
for comparison the same fit is timed without a bar. Run it in a terminal to see bars;
where there is none, there are lines.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import hostcall as hc

STEPS = 20_000
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (64, 16))
Y = jnp.sin(X.sum(1))
START = (jax.random.normal(KEY, (16, 32)) / 4, jnp.zeros(32))


def loss(weights: Any) -> Any:
    hidden, out = weights
    return ((jnp.tanh(X @ hidden) @ out - Y) ** 2).mean()


def fit(show: Callable[[Any, Any], None]) -> Any:
    """A compiled program: weights -> weights after STEPS steps."""

    def step(weights: Any, i: Any) -> Any:
        value, slope = jax.value_and_grad(loss)(weights)
        show(i, value)
        return jax.tree.map(lambda w, g: w - 0.05 * g, weights, slope), None

    return jax.jit(lambda w: jax.lax.scan(step, w, jnp.arange(STEPS))[0])


def timed(program: Any) -> tuple[Any, float]:
    jax.block_until_ready(program(START))  # compiles, and warms up
    hc.barrier()
    begin = time.perf_counter()
    out = jax.block_until_ready(program(START))
    seconds = time.perf_counter() - begin
    hc.barrier()  # the bar has its last step
    return out, seconds


def epochs() -> None:
    """A Python loop around a compiled one. The lower bar is used again."""
    inner = jax.jit(
        lambda w: jax.lax.fori_loop(
            0,
            2000,
            hc.progress.loop(lambda i, w: w * 0.999, 2000, desc="epoch"),
            w,
        )
    )
    w = jnp.ones(1000)
    for epoch in range(5):
        hc.progress(epoch, 5, desc="epochs", every=1)
        w = inner(w).block_until_ready()
    hc.barrier()


def collatz(number: Any) -> Any:
    """A while_loop, whose length nobody knows. Under vmap each row has a bar."""

    def body(state: Any) -> Any:
        n, steps = state
        hc.progress(steps, desc="row", rows="each", every=1, n=n)
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1

    return jax.lax.while_loop(lambda s: s[0] > 1, body, (number, 0))[1]


def main() -> None:
    without, plain = timed(fit(lambda i, value: None))
    weights, shown = timed(
        fit(lambda i, value: hc.progress(i, STEPS, desc="fit", loss=value))
    )
    same = jax.tree.map(lambda a, b: bool((a == b).all()), weights, without)
    assert all(jax.tree.leaves(same)), "a bar changes no result"
    for name, seconds in {"without a bar": plain, "with a bar": shown}.items():
        print(f"{name:14} {seconds / STEPS * 1e6:6.2f} us a step")

    epochs()
    steps = jax.jit(jax.vmap(collatz))(jnp.array([27, 97, 871]))
    hc.barrier()
    print("steps to 1:", steps.tolist())
    assert steps.tolist() == [111, 118, 178]


if __name__ == "__main__":
    main()
