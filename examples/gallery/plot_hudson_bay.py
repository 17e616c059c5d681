"""
Lynx and hares: a SciPy solver with its adjoint
===============================================

The Hudson Bay Company counted the pelts of hares, and of the lynx that live on them.
This program fits a predator-prey model to the record. SciPy's ``solve_ivp`` solves the
model on the host, the adjoint equation gives its derivatives, and JAX's optimiser calls
both from one compiled program.

Besides hostcall it needs ``pip install matplotlib scipy``.
"""

# sphinx_gallery_tags = ["simulator", "derivatives", "taps", "optimisation"]

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.scipy.optimize import minimize
from scipy.integrate import solve_ivp

import hostcall as hc

jax.config.update("jax_enable_x64", True)

# %%
# The record
# ----------
# Thousands of pelts in each year from 1900 to 1920, from C. Gordon Hewitt, "The
# Conservation of the Wild Life of Canada" (1921), as it is widely tabulated.

YEARS = np.arange(1900.0, 1921.0)
HARES = [30.0, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22.0, 25.4, 27.1]
HARES += [40.3, 57.0, 76.6, 52.3, 19.5, 11.2, 7.6, 14.6, 16.2, 24.7]
LYNX = [4.0, 6.1, 9.8, 35.2, 59.4, 41.7, 19.0, 13.0, 8.3, 9.1, 7.4]
LYNX += [8.0, 12.3, 19.5, 45.7, 51.1, 29.7, 15.8, 9.7, 10.1, 8.6]
PELTS = np.stack([HARES, LYNX], axis=1)

# %%
# The model
# ---------
# Let :math:`x` and :math:`y` be the logarithms of hares and lynx. In the model of Lotka
# and Volterra hares are born at the rate :math:`\alpha` and lynx die at the rate
# :math:`\gamma`:
#
# .. math:: x' = \alpha - \beta e^y, \qquad y' = \delta e^x - \gamma.
#
# The parameters ``p`` are the logarithms of :math:`\alpha, \beta, \gamma, \delta`, and
# :math:`x` and :math:`y` in the first year.


def slope(_, state, rates):
    alpha, beta, gamma, delta = rates
    x, y = state
    return [alpha - beta * np.exp(y), delta * np.exp(x) - gamma]


def solve(p, years):
    span, rates = (years[0], years[-1]), np.exp(p[:4])
    return solve_ivp(
        slope,
        span,
        p[4:],
        "DOP853",
        dense_output=True,
        args=(rates,),
        rtol=1e-10,
        atol=1e-10,
    ).sol


@hc.host(
    result=lambda p, years: jax.ShapeDtypeStruct((*years.shape, 2), p.dtype), nondiff=1
)
def trajectory(p, years):
    return solve(p, years)(years).T


# %%
# The derivative
# --------------
# Let :math:`z = (x, y)`, :math:`z' = f(z, p)`, and let :math:`c_i` be the derivative of
# the misfit with respect to :math:`z` in year :math:`t_i`. The adjoint :math:`\lambda`
# runs backwards in time. It jumps by :math:`c_i` in each year, and between them
#
# .. math:: \lambda' = -f_z^T \lambda, \qquad \mu' = -f_p^T \lambda.
#
# In the first year :math:`\lambda` is the derivative with respect to the first state,
# and :math:`\mu` the derivative with respect to the rates. The equation needs :math:`z`
# at all times. SciPy's solution is a Python object that gives it, so the forward rule
# hands it to the backward rule. It stays on the host.


def forward(p, years):
    solution = solve(p, years)
    return solution(years).T, (solution, p, years)


def backward(residuals, cotangent):
    solution, p, years = residuals
    alpha, beta, gamma, delta = np.exp(p[:4])

    def adjoint(t, state):
        x, y = solution(t)
        eaten, born = beta * np.exp(y), delta * np.exp(x)
        a, b = state[:2]
        return [-born * b, eaten * a, -alpha * a, eaten * a, gamma * b, -born * b]

    state = np.zeros(6)  # lambda, and mu for the logarithms of the four rates
    state[:2] = cotangent[-1]
    for i in range(len(years) - 1, 0, -1):
        span = (years[i], years[i - 1])
        state = solve_ivp(adjoint, span, state, "DOP853", rtol=1e-9, atol=1e-9).y[:, -1]
        state[:2] += cotangent[i - 1]
    return np.concatenate([state[2:], state[:2]]), None


trajectory.defvjp(forward, backward)

# %%
# The fit
# -------
# The misfit compares logarithms, since the errors of counts are relative. A tap shows
# each value of the misfit that the optimiser asks for. The optimiser is JAX's BFGS,
# compiled together with the calls of SciPy.

START = np.log([0.5, 0.03, 0.8, 0.03, *PELTS[0]])
seen = []


def misfit(p):
    return 0.5 * jnp.sum((trajectory(p, YEARS) - jnp.log(PELTS)) ** 2)


@jax.jit
def fit(start):
    scale = 0.1  # the first step of BFGS is as long as the gradient

    def scaled(q):
        value = misfit(start + scale * q)
        hc.tap(lambda v: seen.append(float(v)), value)
        return value

    found = minimize(scaled, jnp.zeros_like(start), method="BFGS")
    return start + scale * found.x, found.fun


best, cost = fit(START)
hc.barrier()  # all values of the misfit have come
alpha, beta, gamma, delta = np.exp(best[:4])
print(f"misfit {seen[0]:.2f} to {cost:.3f} with {len(seen)} solutions")
print(f"hares: born {alpha:.3f} a year; lynx: die {gamma:.3f} a year")

# %%
# Is the gradient right?
# ----------------------
# Central differences of the misfit come closer to the adjoint's gradient as the step
# gets smaller, until rounding and the solver's tolerance outweigh it.

value = jax.jit(misfit)
gradient = np.asarray(jax.jit(jax.grad(misfit))(START))
steps = np.logspace(-1, -7, 13)


def difference(step):
    moves = step * np.eye(6)
    return [(value(START + m) - value(START - m)) / (2 * step) for m in moves]


errors = np.abs(np.array([difference(step) for step in steps]) - gradient)
errors /= np.abs(gradient).max()

# %%
# What it found
# -------------

figure, axis = plt.subplots(figsize=(5.5, 4), layout="constrained")
fine = np.linspace(YEARS[0], YEARS[-1], 401)
for column, name, color in ((0, "hares", "C0"), (1, "lynx", "C3")):
    before, after = (np.exp(trajectory(p, fine)[:, column]) for p in (START, best))
    axis.plot(YEARS, PELTS[:, column], "o", color=color, label=f"{name}, pelts")
    axis.plot(fine, after, color=color, label=f"{name}, fit")
    axis.plot(fine, before, ":", color=color, alpha=0.6, label=f"{name}, start")
axis.set(xlabel="year", ylabel="thousands", ylim=(0, 130))
axis.set_xticks(YEARS[::5])
axis.legend(ncols=2, fontsize="small")

# %%
# How the search went on, and how far finite differences are from the gradient of the
# adjoint equation.

figure, (top, bottom) = plt.subplots(2, figsize=(5.5, 6.5), layout="constrained")
top.semilogy(np.array(seen) - cost + 1e-12, ".-", color="C2")
top.set(xlabel="solution", title="Misfit above the best")

names = ["alpha", "beta", "gamma", "delta", "first x", "first y"]
for name, row in zip(names, errors.T, strict=True):
    bottom.loglog(steps, row, ".-", label=name)
bottom.set(xlabel="step of the difference", title="Gradient: difference - adjoint")
bottom.legend(fontsize="small")
plt.show()

# %%
# The rates agree with the means that B. Carpenter found by sampling, "Predator-Prey
# Population Dynamics: the Lotka-Volterra model in Stan" (2018).

published = np.array([0.55, 0.028, 0.80, 0.024])
assert np.allclose(np.exp(best[:4]), published, rtol=0.05)
assert errors.min(axis=0).max() < 1e-7
assert np.abs(jax.grad(misfit)(best)).max() < 1e-3
assert cost < seen[0] / 2
