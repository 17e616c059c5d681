"""
Inside a program that nobody changed
====================================

A model of 309 years of sunspots is fitted by gradients, and its parameters become NaN.
:class:`hostcall.observe` finds the line and the year that are to blame, in the backward
pass of a scan. No line of the model is changed for that. Then it shows the values of
two variables, and how the fit goes on.

Besides hostcall it needs ``pip install matplotlib statsmodels tqdm``.
"""

# %%
# The model
# ---------
#
# Counts have a variance that grows with them, and their square roots do not. So the
# model smooths the roots: ``level`` follows them at some ``rate``. The loss is the
# share of the roots' variance that is left. ``shift`` is added to each count. The body
# of the scan is computed again in the backward pass (``jax.checkpoint``), as in long
# recurrences.

# sphinx_gallery_tags = ["errors", "training", "plots"]

from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import statsmodels.api

import hostcall as hc

data: Any = statsmodels.api.datasets.sunspots.load_pandas().data
years = data["YEAR"].to_numpy()
spots = jnp.asarray(data["SUNACTIVITY"].to_numpy(), jnp.float32)


def loss_of(params: dict[str, jax.Array]) -> jax.Array:
    def step(level: jax.Array, count: jax.Array) -> tuple[jax.Array, Any]:
        root = jnp.sqrt(count + params["shift"])
        error = root - level
        level = level + params["rate"] * error
        return level, (error, root)

    first = jnp.sqrt(spots[0])
    errors, roots = jax.lax.scan(jax.checkpoint(step), first, spots)[1]
    return (errors**2).mean() / roots.var()


start = {"shift": jnp.float32(0), "rate": jnp.float32(0.5)}
gradient = jax.jit(jax.value_and_grad(loss_of))


@jax.jit
def fit(params: dict[str, jax.Array], pace: float | jax.Array) -> jax.Array:
    """The loss of each step of a descent."""

    def descend(params: Any, _: None) -> tuple[Any, jax.Array]:
        value, slope = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, s: p - pace * s, params, slope), value

    return jax.lax.scan(descend, params, None, length=1000)[1]


bad_losses = fit(start, 0.1)
print(f"losses: {bad_losses[:3]}, then {bad_losses[-1]}")

# %%
# Where it comes from
# -------------------
#
# The first loss is fine, so the gradient is to blame. The error names the line, its
# operands, the pass and the step.

try:
    with hc.observe(nans=True):
        gradient(start)
    raise SystemExit("the bad value did not show")
except FloatingPointError as error:
    found = str(error)
print(found)

# %%
# The root of 0 is 0, but its derivative is infinite. Which years had no spots at all?
# The backward pass goes through the last of them first.

none = np.flatnonzero(spots == 0)
step = int(none[-1])
print(f"no spots: {years[none].astype(int)}; step {step} is {years[step]:.0f}")

# %%
# Anscombe's root adds 3/8 to each count. So the fit starts there.

start["shift"] = jnp.float32(0.375)

# %%
# Values by the names of variables
# --------------------------------

values: dict[str, list[float]] = {"level": [], "root": []}


def keep(record: Any, value: np.ndarray) -> None:
    values[record.name].append(float(value))


with hc.observe("level", "root", to=keep):
    jax.jit(loss_of)(start)

figure, axis = plt.subplots(figsize=(7, 3))
axis.plot(years, values["root"], label="root", color="0.6")
axis.plot(years, values["level"], label="level")
axis.axvline(
    years[step], color="tab:red", linestyle="--", label="the year without spots"
)
axis.set(xlabel="year", ylabel="root of the number of spots")
axis.legend(loc="upper right")
figure.tight_layout()

# %%
# Nested bars
# -----------
#
# Each loop that lasts longer than 0.3 s has a bar in a terminal: the four fits, and
# below it the steps of each.

paces = jnp.array([0.01, 0.03, 0.1, 0.3])
with hc.observe(progress=True):
    losses = jax.jit(lambda paces: jax.lax.map(lambda p: fit(start, p), paces))(paces)

figure, axis = plt.subplots(figsize=(7, 3))
axis.semilogx(jnp.arange(1, 1001), losses.T, label=[f"{pace:.2f}" for pace in paces])
axis.set(xlabel="step of the fit", ylabel="loss")
axis.legend(title="pace")
figure.tight_layout()
plt.show()

# %%
# The line and the step were right, nothing was left in the programs, and the fit works.

assert np.isnan(bad_losses[1:]).all()
assert f"step {step} of the scan" in found
assert "backward pass" in found
assert "root = jnp.sqrt(" in found
assert len(values["level"]) == len(years)
assert np.isfinite(losses).all()
assert (losses[:, -1] < losses[:, 0]).all()
