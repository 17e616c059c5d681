"""
One kernel, three ways: machine code, Python, JAX
=================================================

A filter that smooths the carbon dioxide record of Mauna Loa is written three times: as
machine code by Numba, as a Python function that calls SciPy, and in JAX. All three run
inside one compiled program, and give the same numbers. The plot shows what a call costs
for series of 1 to 10,000 weeks.

Besides hostcall it needs ``pip install matplotlib numba scipy statsmodels``.
"""

# %%
# The kernel
# ----------
#
# Exponential smoothing takes a step for each week: ``level += K * (value - level)``. A
# step needs the one before, which is hard for vector instructions and easy for a loop.

# sphinx_gallery_tags = ["buffers", "plots"]
# sphinx_gallery_thumbnail_number = 2

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numba
import numpy as np
import scipy.signal
import statsmodels.api
from numba import types

import hostcall as hc

K = np.float32(0.05)

co2: Any = statsmodels.api.datasets.co2.load_pandas().data["co2"].interpolate()
weeks = jnp.asarray(co2.to_numpy() - co2.iloc[0], jnp.float32)
print(f"{len(weeks)} weeks, {co2.index[0]:%Y-%m-%d} to {co2.index[-1]:%Y-%m-%d}")

# %%
# **As machine code.** ``numba.cfunc`` compiles the loop, and
# :func:`hostcall.buffers.native` calls it in XLA's memory, without Python and without
# the GIL. Machine code is not told any shapes, so the length is an argument.

pointers = types.CPointer(types.voidptr)


@numba.cfunc(types.void(pointers, pointers))
def compiled(outputs: Any, inputs: Any) -> None:
    n = numba.carray(inputs[1], (1,), numba.int32)[0]
    old = numba.carray(inputs[0], (n,), numba.float32)
    new = numba.carray(outputs[0], (n,), numba.float32)
    level = old[0]
    for i in range(n):
        level += K * (old[i] - level)
        new[i] = level


def by_numba(x: jax.Array) -> jax.Array:
    smooth = hc.buffers.buffer_callback(
        hc.buffers.native(compiled), x, vmap_method="sequential"
    )
    result: jax.Array = smooth(x, np.int32(len(x)))
    return result


# %%
# **As Python.** SciPy's filter takes its first state from the first value.


def in_python(x: np.ndarray) -> np.ndarray:
    after, _ = scipy.signal.lfilter([K], [1, K - 1], x, zi=(1 - K) * x[:1])
    return np.asarray(after, np.float32)


def by_python(x: jax.Array) -> jax.Array:
    return hc.call(in_python, x, x)


# %%
# **In JAX.** A scan is the same loop; XLA runs a handful of operations for each week.


def by_jax(x: jax.Array) -> jax.Array:
    def week(level: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        level += K * (value - level)
        return level, level

    return jax.lax.scan(week, x[0], x)[1]


# %%
# For comparison, the same Python function through JAX's own callback.


def by_jax_callback(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda x: in_python(np.asarray(x)), x, x)


Kernel = Callable[[jax.Array], jax.Array]
ways: dict[str, Kernel] = {
    "Numba, hc.buffers.native": by_numba,
    "Python, hc.call": by_python,
    "JAX, lax.scan": by_jax,
    "Python, jax.pure_callback": by_jax_callback,
}

# %%
# Equal results
# -------------

smoothed = {name: np.asarray(jax.jit(way)(weeks)) for name, way in ways.items()}

figure, axis = plt.subplots(figsize=(5.5, 3.8))
last = slice(-520, None)  # ten years
axis.plot(co2.index[last], co2.iloc[last], color="0.6", label="measured")
for width, (name, level) in zip((6, 4, 2, 1), smoothed.items(), strict=True):
    shown = level[last] + co2.iloc[0]
    axis.plot(co2.index[last], shown, linewidth=width, label=name)
axis.set(ylabel="ppm", title="Carbon dioxide at Mauna Loa, smoothed")
axis.legend(loc="lower right", fontsize="small")
figure.tight_layout()

# %%
# What a call costs
# -----------------
#
# A compiled loop makes many calls, each on the result of the one before. The time of
# the whole loop divided by their number is what a call costs, with no dispatch in it.
# The smallest of three runs is taken.


def cost(way: Kernel, n: int) -> float:
    """Seconds a call, of n weeks."""
    x = jnp.resize(weeks, (n,))
    loop = jax.jit(lambda x, k: jax.lax.fori_loop(0, k, lambda _, x: way(x), x))
    loop(x, 1).block_until_ready()  # compiles; the number of calls is an argument
    calls, seconds = 1, 0.0
    while seconds < 0.02:
        calls *= 4
        begin = time.perf_counter()
        loop(x, calls).block_until_ready()
        seconds = time.perf_counter() - begin
    runs = [seconds]
    for _ in range(2):
        begin = time.perf_counter()
        loop(x, calls).block_until_ready()
        runs.append(time.perf_counter() - begin)
    return min(runs) / calls


sizes = [1, 10, 100, 1_000, 10_000]
costs = {name: [cost(way, n) for n in sizes] for name, way in ways.items()}

print("microseconds a call" + "".join(f"{n:>10,}" for n in sizes))
for name, seconds in costs.items():
    print(f"{name:25}" + "".join(f"{s * 1e6:10.2f}" for s in seconds))

# %%
# For short series the price is that of getting to the host: nearly nothing for machine
# code, and Python's own time for SciPy. For long ones the loop itself decides.

figure, axis = plt.subplots(figsize=(5.5, 4.2))
for (name, seconds), marker in zip(costs.items(), "osD^", strict=True):
    axis.loglog(sizes, np.array(seconds) * 1e6, marker=marker, label=name)
axis.set(xlabel="weeks in the series", ylabel="microseconds a call")
axis.set_title("Calls in a compiled loop")
axis.grid(True, which="major", color="0.9")
axis.legend()
figure.tight_layout()
plt.show()

# %%
# Under ``vmap``
# --------------
#
# With ``vmap_method="sequential"`` the engine loops over the rows of a batch without
# Python, so machine code that knows nothing of batches can be vmapped.

years = weeks[: len(weeks) // 52 * 52].reshape(-1, 52)
by_rows = jax.jit(jax.vmap(by_numba))(years)
wanted = np.stack([in_python(year) for year in np.asarray(years)])
print(f"{len(years)} years, smoothed one by one in one call")

assert np.allclose(by_rows, wanted, atol=1e-4)
levels = list(smoothed.values())
assert all(np.allclose(level, levels[0], atol=1e-3) for level in levels)
