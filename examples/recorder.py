"""A fit that is recorded: its losses as a table, its weights as an array.

The model predicts the sunspot number of a year from those of 20 years before. It is
fitted by gradient descent, at four speeds at once, in one compiled program. The
recorder writes to a folder while the program runs, so nothing is stacked on the device,
and a run that is killed can be read up to its last second.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import statsmodels.api

import hostcall as hc

STEPS = 2000
BEFORE = 20  # years
SPEEDS = jnp.array([0.01, 0.02, 0.04, 0.08])

data: Any = statsmodels.api.datasets.sunspots.load_pandas().data
numbers: np.ndarray = data["SUNACTIVITY"].to_numpy()
scaled = (numbers - numbers.mean()) / numbers.std()
windows = np.lib.stride_tricks.sliding_window_view(scaled, BEFORE + 1)
X = jnp.asarray(np.c_[windows[:, :-1], np.ones(len(windows))])
Y = jnp.asarray(windows[:, -1])


def loss(weights: jax.Array) -> jax.Array:
    return jnp.mean((X @ weights - Y) ** 2)


def fit(rec: hc.Recorder) -> Callable[[jax.Array], jax.Array]:
    """A compiled program: speeds -> weights."""

    def program(speed: jax.Array) -> jax.Array:
        def step(weights: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            value, slope = jax.value_and_grad(loss)(weights)
            rec(step=i, loss=value, speed=speed)  # two columns, a row for each speed
            rec(step=i, weights=weights, every=10)  # 21 elements: an array
            return weights - speed * slope, None

        return jax.lax.scan(step, jnp.zeros(BEFORE + 1), jnp.arange(STEPS))[0]

    return jax.jit(jax.vmap(program))


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        with hc.Recorder(folder) as rec:
            found = fit(rec)(SPEEDS)

        run = hc.tools.read(folder)
        table = run.dataframe().pivot(index="step", columns="row", values="loss")
        steps, weights = run.array("weights")
        files = [path for path in folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)

    best = np.linalg.lstsq(np.asarray(X), np.asarray(Y))[0]
    least = float(loss(jnp.asarray(best)))
    print(f"{len(table)} steps at {len(SPEEDS)} speeds, {size / 1e6:.1f} MB")
    for row, speed in enumerate(SPEEDS.tolist()):
        print(
            f"speed {speed:4.2f}: loss {table[row].iloc[0]:.3f} to"
            f" {table[row].iloc[-1]:.5f}, and {least:.5f} is possible"
        )
    errors = np.linalg.norm(weights - best, axis=-1)  # (steps, speeds)
    print("distance of the weights from the best:", errors[:: len(errors) // 4, -1])

    assert table.shape == (STEPS, len(SPEEDS))
    assert table.iloc[-1].is_monotonic_decreasing  # faster is better here
    assert 0.999 < table[3].iloc[-1] / least < 1.05
    assert steps.tolist() == list(range(0, STEPS, 10))
    assert weights.shape == (STEPS // 10, len(SPEEDS), BEFORE + 1)
    assert np.mean(np.diff(errors[:, -1]) < 0) > 0.9
    assert np.linalg.norm(found[-1] - best) < errors[-1, -1]


main()
