"""
Sunspots: a bootstrap with statsmodels in a compiled program
============================================================

How sure is a forecast? A parametric bootstrap answers: it makes many other histories
that the model could have produced, fits the model to each, and forecasts from each. The
histories and forecasts are JAX code, and the fit is a function of statsmodels that runs
on the rows in parallel. All of it is one compiled program.

Besides hostcall it needs ``pip install matplotlib scipy statsmodels``.
"""

# sphinx_gallery_tags = ["parallel", "sampling"]

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import statsmodels.api
from scipy.signal import find_peaks
from statsmodels.regression.linear_model import burg

import hostcall as hc

jax.config.update("jax_enable_x64", True)

# %%
# The record
# ----------
# Yearly sunspot numbers from 1700 to 2008 come with statsmodels. Their square roots
# vary about equally in strong and in weak cycles. The last 25 years are kept aside, to
# compare the forecast with.

table = statsmodels.api.datasets.sunspots.load_pandas().data
years, roots = table["YEAR"].to_numpy(), np.sqrt(table["SUNACTIVITY"].to_numpy())
ASIDE = 25
past, future = roots[:-ASIDE], roots[-ASIDE:]
MEAN = past.mean()

# %%
# The host function
# -----------------
# Burg's method fits an autoregressive model: each value is a weighted sum of the ``P``
# values before, plus noise. It is a loop over lattice stages in NumPy, and its models
# are always stationary. ``vmap_method="parallel"`` calls it for the rows of a ``vmap``
# on a pool of threads.

P = 20


@hc.host(
    result=lambda series: (
        jax.ShapeDtypeStruct((P,), series.dtype),
        jax.ShapeDtypeStruct((), series.dtype),
    ),
    vmap_method="parallel",
    tag="burg",
)
def fitted(series):
    weights, variance = burg(series, order=P, demean=False)
    return weights, np.sqrt(variance)


# %%
# One other history
# -----------------
# ``continued`` goes on from the last values with new noise. A history begins with zeros
# and runs for 200 years before it counts.

LENGTH, RUN_IN, FREQUENCIES = len(past), 200, jnp.linspace(1 / 40, 1 / 4, 400)


def continued(key, weights, noise, last, steps):
    def step(last, shock):
        new = weights @ last + noise * shock
        return jnp.concatenate([new[None], last[:-1]]), new

    return jax.lax.scan(step, last, jax.random.normal(key, (steps,)))[1]


def spectrum(weights, noise):
    """The power at each frequency."""
    lags = jnp.arange(1, P + 1)
    turns = jnp.exp(-2j * jnp.pi * FREQUENCIES[:, None] * lags)
    return noise**2 / jnp.abs(1 - turns @ weights) ** 2


def another(key, weights, noise):
    """A forecast and a spectrum from a model that was fitted to another history."""
    first, second = jax.random.split(key)
    zeros = jnp.zeros(P)
    history = continued(first, weights, noise, zeros, RUN_IN + LENGTH)[RUN_IN:]
    weights, noise = fitted(history)
    last = jnp.asarray(past[-P:][::-1] - MEAN)
    return continued(second, weights, noise, last, ASIDE), spectrum(weights, noise)


# %%
# All of them
# -----------
# The model that is fitted to the record makes the histories. The rows of ``vmap`` have
# a random key each.

ROWS = 2000


@jax.jit
def bootstrap(key):
    weights, noise = fitted(past - MEAN)
    forecasts, spectra = jax.vmap(another, (0, None, None))(
        jax.random.split(key, ROWS), weights, noise
    )
    return forecasts, spectra, spectrum(weights, noise)


forecasts, spectra, best = bootstrap(jax.random.key(1700))
low, middle, high = np.percentile(forecasts, [5, 50, 95], axis=0) + MEAN
calls = hc.monitor.stats()["burg"].calls
print(f"{calls} fits by statsmodels")

# %%
# The length of the cycle
# -----------------------
# Each spectrum has its highest peak at the length of the cycle in that history's model.


def cycle(power):
    peaks = find_peaks(power)[0]
    return 1 / FREQUENCIES[peaks[np.argmax(power[peaks])]]


spectra = np.asarray(spectra)
periods = np.array([cycle(row) for row in spectra if len(find_peaks(row)[0])])
period = cycle(np.asarray(best))
shortest, longest = np.percentile(periods, [5, 95])
print(f"cycle: {period:.1f} years, 90% of {shortest:.1f} to {longest:.1f}")

# %%
# The forecast and its band
# -------------------------
# Squares turn the roots back into sunspot numbers.


def numbers(roots):
    return np.maximum(roots, 0) ** 2


figure, axis = plt.subplots(figsize=(5.5, 4), layout="constrained")
axis.plot(years[-100:], numbers(roots[-100:]), "k.-", lw=1, label="record")
axis.fill_between(
    years[-ASIDE:], numbers(low), numbers(high), alpha=0.3, label="90% of the forecasts"
)
axis.plot(years[-ASIDE:], numbers(middle), "C0", label="median forecast")
for row in np.asarray(forecasts)[:3]:
    axis.plot(years[-ASIDE:], numbers(row + MEAN), "C0", lw=0.5)
axis.axvline(years[-ASIDE] - 0.5, color="0.6", ls=":")
axis.set(xlabel="year", ylabel="sunspot number", title="Three forecasts of 2,000")
axis.legend(loc="upper left")

# %%
# The spectra of the models have a peak, which is the cycle.

figure, axis = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
band = np.percentile(spectra, [5, 95], axis=0)
axis.fill_between(FREQUENCIES, *band, alpha=0.3, label="90% of the models")
axis.semilogy(FREQUENCIES, best, label="the record's model")
axis.axvspan(1 / longest, 1 / shortest, color="C1", alpha=0.3, label="its cycle, 90%")
axis.set(xlabel="cycles a year", ylabel="power")
axis.legend()
plt.show()

# %%
# The band is made from the past alone, and holds most of the years that were kept
# aside. The cycle has the length that is known: about 11 years.

inside = np.mean((low < future) & (future < high))
print(f"{inside:.0%} of the years that were kept aside are inside the band")
assert calls == ROWS + 1
assert np.isfinite(spectra).all()
assert 10 < shortest < period < longest < 12
assert inside > 0.75
