"""
What is inside? A SciPy sparse solver with its adjoint
======================================================

A plate conducts heat, well in some places and badly in others. From temperatures that
were measured at some points, this program finds where. SciPy's sparse LU solves the
heat equation, and its factors stay on the host for the backward pass. An optimiser of
optax calls both from a compiled loop.

Besides hostcall it needs ``pip install matplotlib optax scipy tqdm``.
"""

# sphinx_gallery_tags = ["simulator", "derivatives", "taps", "optimisation"]

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import scipy.sparse as sp
from scipy.sparse.linalg import splu

import hostcall as hc

jax.config.update("jax_enable_x64", True)

# %%
# The plate
# ---------
# A grid of 32 by 32 cells. Heat flows through the faces between cells, and the edge of
# the plate is kept at the temperature 0. ``DIFFERENCES`` takes the temperatures of the
# cells to their differences across the faces. With the conductances ``c`` of the faces,
# the heat equation is
#
# .. math:: A(c)\, u = f, \qquad A(c) = D^T \operatorname{diag}(c)\, D.

N = 32
line = sp.diags([1.0, -1.0], [0, -1], shape=(N + 1, N))  # the ends are edges
DIFFERENCES = sp.vstack([sp.kron(line, sp.eye(N)), sp.kron(sp.eye(N), line)]).tocsc()
FACES = DIFFERENCES.shape[0]


def factors(c):
    return splu((DIFFERENCES.T @ sp.diags(c) @ DIFFERENCES).tocsc())


@hc.host(result=hc.results.like(1))
def temperatures(c, f):
    """For conductances (faces,) and heat (cells, experiments): like the heat."""
    return factors(c).solve(f)


# %%
# The adjoint
# -----------
# Let :math:`\bar u` be the derivative of the misfit with respect to :math:`u`. One more
# solution with the same factors gives all derivatives:
#
# .. math:: A \lambda = \bar u, \qquad \bar f = \lambda, \qquad
#           \bar c = -(D \lambda) \cdot (D u),
#
# with a product for each face, summed over the experiments. SuperLU's factors are an
# object of C code, which no JAX program could carry. The forward rule returns it as a
# residual, and the backward rule gets it.


def forward(c, f):
    lu = factors(c)
    u = lu.solve(f)
    return u, (lu, u)


def backward(residuals, cotangent):
    lu, u = residuals
    adjoint = lu.solve(cotangent)
    return -((DIFFERENCES @ adjoint) * (DIFFERENCES @ u)).sum(1), adjoint


temperatures.defvjp(forward, backward)
random = np.random.default_rng(0)
some = random.uniform(0.5, 2.0, FACES), random.normal(size=(N * N, 2))
assert hc.testing.check(temperatures, some)

# %%
# The measurements
# ----------------
# Sixteen experiments: each heats one spot. The temperatures of every fourth cell are
# measured, with an error of 1 % of their spread. The unknown is the logarithm of the
# conductivity in each cell; a face conducts like its two halves in a row.


def conductances(log_k):
    k = jnp.exp(log_k)
    padded = jnp.pad(k, 1, mode="edge")

    def between(a, b):
        return 2 * a * b / (a + b)

    down = between(padded[:-1, 1:-1], padded[1:, 1:-1])
    across = between(padded[1:-1, :-1], padded[1:-1, 1:])
    return jnp.concatenate([down.ravel(), across.ravel()])


row, column = np.mgrid[:N, :N]
true = np.zeros((N, N))
true[np.hypot(row - 10, column - 9) < 5.5] = 1.5
true[18:27, 15:26] = -1.5

spots = [(i, j) for i in (4, 12, 20, 28) for j in (4, 12, 20, 28)]
heat = np.stack(
    [np.exp(-((row - i) ** 2 + (column - j) ** 2) / 4).ravel() for i, j in spots], 1
)
sensors = np.flatnonzero((row % 2 == 0) & (column % 2 == 0))
exact = np.asarray(temperatures(conductances(true), heat))[sensors]
noise = 0.01 * exact.std()
measured = exact + noise * random.normal(size=exact.shape)

# %%
# The search
# ----------
# The misfit counts errors of measurement, and adds the total variation of the unknown,
# which prefers areas with sharp edges. The loop of L-BFGS is one compiled program. A
# tap keeps the values, another the picture of every tenth step.

STEPS = 120
objectives, pictures = [], []


def misfit(log_k):
    u = temperatures(conductances(log_k), heat)[sensors]
    return 0.5 * jnp.mean(((u - measured) / noise) ** 2)


def objective(log_k):
    down, across = jnp.diff(log_k, axis=0), jnp.diff(log_k, axis=1)
    variation = sum(jnp.sqrt(d**2 + 1e-4).sum() for d in (down, across))
    return misfit(log_k) + 2e-3 * variation


@jax.jit
def search(start):
    optimiser = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(objective)

    def step(carry, i):
        log_k, state = carry
        value, slope = value_and_grad(log_k, state=state)
        hc.tap(lambda v: objectives.append(float(v)), value)
        hc.tap(lambda picture: pictures.append(picture.copy()), log_k, every=10)
        hc.progress(i, STEPS, desc="search", objective=value)
        update, state = optimiser.update(
            slope, state, log_k, value=value, grad=slope, value_fn=objective
        )
        return (optax.apply_updates(log_k, update), state), None

    carry = start, optimiser.init(start)
    (log_k, _), _ = jax.lax.scan(step, carry, jnp.arange(STEPS))
    return log_k


start = jnp.zeros((N, N))
found = np.asarray(search(start))
hc.barrier()
print(f"misfit: {misfit(start):.1f} to {misfit(found):.2f}; truth {misfit(true):.2f}")

# %%
# What it found
# -------------
# Dots are sensors, and crosses are the spots that were heated.

figure, axes = plt.subplots(2, 2, figsize=(5.5, 4.5), layout="constrained")
maps = {
    "truth": true,
    "start": pictures[0],
    "after 10 steps": pictures[1],
    f"after {STEPS} steps": found,
}
for axis, (title, log_k) in zip(axes.flat, maps.items(), strict=True):
    image = axis.imshow(log_k, cmap="RdBu_r", vmin=-1.8, vmax=1.8)
    axis.set(title=title, xticks=[], yticks=[])
axes[0, 0].plot(*np.divmod(sensors, N)[::-1], "k.", ms=2)
axes[0, 0].plot(*np.array(spots).T[::-1], "kx", ms=5)
figure.colorbar(image, ax=axes, label="logarithm of the conductivity", shrink=0.6)

# %%
# One of the experiments, and the search.

figure, (top, bottom) = plt.subplots(2, figsize=(5.5, 6.5), layout="constrained")
warm = np.asarray(temperatures(conductances(found), heat))[:, 5].reshape(N, N)
image = top.imshow(warm, cmap="inferno")
figure.colorbar(image, ax=top)
top.set(title="temperatures of an experiment", xticks=[], yticks=[])
bottom.semilogy(objectives)
bottom.axhline(objective(true), color="k", ls=":", label="truth")
bottom.set(title="misfit and variation", xlabel="step")
bottom.legend()
plt.show()

# %%
# The misfit of the truth is 1/2, since noise is all that it misses. The search came as
# near as that.

assert 0.4 < misfit(found) < 0.55 < 500 < misfit(start)
assert np.corrcoef(found.ravel(), true.ravel())[0, 1] > 0.99
assert len(objectives) == STEPS
assert len(pictures) == STEPS // 10
