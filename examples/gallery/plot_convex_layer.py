"""
What does the pilot want? OSQP as a layer
=========================================

A pilot brings a cart to rest at a target. Each flight is the solution of a quadratic
program, with weights and a limit that only the pilot knows. OSQP solves such programs
on the host, and the optimality conditions give their derivatives. JAX learns the
weights and the limit from flights that it has seen.

Besides hostcall it needs ``pip install matplotlib optax osqp scipy``.
"""

# sphinx_gallery_tags = ["derivatives", "parallel", "taps", "training"]

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import osqp
import scipy.linalg
import scipy.sparse as sp

import hostcall as hc

jax.config.update("jax_enable_x64", True)

# %%
# The layer
# ---------
# OSQP minimises :math:`x^T P x / 2 + q^T x` where :math:`l \le A x \le u`. At the
# minimum some constraints are active: their multipliers :math:`y` are not 0. Let
# :math:`A_a x = b_a` be these. Then the minimum is the solution of linear equations,
#
# .. math::
#
#    K \begin{pmatrix} x \\ y_a \end{pmatrix} = \begin{pmatrix} -q \\ b_a \end{pmatrix},
#    \qquad K = \begin{pmatrix} P & A_a^T \\ A_a & 0 \end{pmatrix},
#
# which make OSQP's approximate solution exact.


def solved(P, q, A, lower, upper):
    """The minimum, and what its derivatives need."""
    P = (P + P.T) / 2
    solver = osqp.OSQP()
    solver.setup(
        sp.csc_matrix(np.triu(P)),  # OSQP reads the upper triangle
        q,
        sp.csc_matrix(A),
        lower,
        upper,
        eps_abs=1e-7,
        eps_rel=1e-7,
        max_iter=20_000,
        verbose=False,
    )
    y = solver.solve(raise_error=True).y
    active = np.flatnonzero(np.abs(y) > 1e-5)
    bounds = np.where(y < 0, lower, upper)[active]
    zeros = np.zeros((active.size, active.size))
    K = np.block([[P, A[active].T], [A[active], zeros]])
    factors = scipy.linalg.lu_factor(K)
    both = scipy.linalg.lu_solve(factors, np.concatenate([-q, bounds]))
    x, y[active] = np.split(both, [q.size])
    return x, (factors, x, y, active)


# %%
# The rows of a batch run on threads.


@hc.host(result=hc.results.like(1), vmap_method="parallel", tag="OSQP")
def minimum(P, q, A, lower, upper):
    return solved(P, q, A, lower, upper)[0]


# %%
# Its derivatives
# ---------------
# A small change keeps the active constraints active. So for a cotangent :math:`\bar x`,
# the solution of :math:`K (s, t) = (\bar x, 0)` has all derivatives: :math:`\bar q =
# -s`, :math:`\bar b_a = t`, :math:`\bar P = -s x^T`, and :math:`\bar A_a = -y_a s^T - t
# x^T`. The forward rule is ``solved`` itself, and the factors of :math:`K` stay on the
# host.


def backward(residuals, cotangent):
    factors, x, y, active = residuals
    right = np.concatenate([cotangent, np.zeros(active.size)])
    s, t = np.split(scipy.linalg.lu_solve(factors, right), [x.size])
    bounds, rows = np.zeros(y.size), np.zeros((y.size, x.size))
    bounds[active] = t
    rows[active] = -np.outer(y[active], s) - np.outer(t, x)
    P_bar = -(np.outer(s, x) + np.outer(x, s)) / 2
    return P_bar, -s, rows, np.where(y < 0, bounds, 0), np.where(y > 0, bounds, 0)


minimum.defvjp(solved, backward)

# %%
# The flights
# -----------
# ``H`` forces move the cart for 8 seconds. A pilot weighs the squares of places, speeds
# and forces. Forces have the weight 1 and the limit 1. Unknown are the other two
# weights and the limit of the speed, so ``theta`` has their three logarithms.

H, STEP = 24, 1 / 3
lag = np.subtract.outer(np.arange(H), np.arange(H))
SPEEDS = STEP * (lag >= 0)  # forces -> speeds after each step
PLACES = STEP**2 * np.where(lag >= 0, lag + 0.5, 0)
TIMES = STEP * np.arange(1, H + 1)


def flight(theta, first):
    """The forces of a pilot for the first place and speed."""
    of_places, of_speeds, limit = jnp.exp(theta)
    speeds = first[1] * np.ones(H)  # without a force
    places = first[0] + first[1] * TIMES
    P = np.eye(H) + of_places * PLACES.T @ PLACES + of_speeds * SPEEDS.T @ SPEEDS
    q = of_places * PLACES.T @ places + of_speeds * SPEEDS.T @ speeds
    A = np.concatenate([np.eye(H), SPEEDS])
    lower = jnp.concatenate([-np.ones(H), -limit - speeds])
    upper = jnp.concatenate([np.ones(H), limit - speeds])
    return minimum(P, q, A, lower, upper)


flights = jax.vmap(flight, (None, 0))

# %%
# The pilot's flights begin at 24 places, and are seen with small errors.

random = np.random.default_rng(0)
firsts = np.stack([random.uniform(-3, 3, 24), random.uniform(-0.4, 0.4, 24)], 1)
pilot = np.log([8.0, 0.5, 0.7])
seen = np.asarray(flights(pilot, firsts)) + 0.02 * random.normal(size=(24, H))


def loss(theta):
    return jnp.mean((flights(theta, firsts) - seen) ** 2)


# %%
# Are the derivatives right?
# --------------------------
# Central differences of the loss agree with its gradient.

start = np.log([2.0, 2.0, 1.0])
gradient = np.asarray(jax.jit(jax.grad(loss))(start))
value = jax.jit(loss)
differences = [(value(start + d) - value(start - d)) / 2e-5 for d in 1e-5 * np.eye(3)]
print("gradient:   ", gradient)
print("differences:", np.array(differences))

# %%
# Learning
# --------
# Adam learns in one compiled loop, and each of its steps solves 24 programs in
# parallel. A tap keeps what it knows after each step.

STEPS = 120
history = []


@jax.jit
def learn(theta):
    optimiser = optax.adam(0.1)

    def step(carry, _):
        theta, state = carry
        now, slope = jax.value_and_grad(loss)(theta)
        hc.tap(lambda *now: history.append([*map(np.array, now)]), now, theta)
        update, state = optimiser.update(slope, state)
        return (optax.apply_updates(theta, update), state), None

    carry = theta, optimiser.init(theta)
    return jax.lax.scan(step, carry, length=STEPS)[0][0]


learned = np.asarray(learn(start))
hc.barrier()
losses, thetas = (np.array(column) for column in zip(*history, strict=True))
print("pilot:  ", np.exp(pilot).round(3))
print("learned:", np.exp(learned).round(3))

# %%
# New flights
# -----------
# What was learned predicts flights from places that it has not seen.

new = np.array([[3.5, 0.0], [-2.5, 0.3], [1.5, -0.4]])
figure, (top, bottom) = plt.subplots(
    2, sharex=True, figsize=(5.5, 5), layout="constrained"
)
styles = {"pilot": (pilot, "k."), "start": (start, "C0:"), "learned": (learned, "C3-")}
for name, (theta, style) in styles.items():
    forces = np.asarray(flights(theta, new))
    speeds = forces @ SPEEDS.T + new[:, 1:]
    places = forces @ PLACES.T + new[:, :1] + new[:, 1:] * TIMES
    top.plot(TIMES, places.T, style, label=[name, None, None])
    bottom.plot(TIMES, speeds.T, style)
limit = np.exp(pilot[2])
bottom.axhspan(-limit, limit, color="0.9")
top.set_title("places of three new flights")
top.legend()
bottom.set(xlabel="seconds", title="their speeds, and the limit")

# %%
# What was learned, step by step. The pilot's numbers are dotted.

figure, axis = plt.subplots(figsize=(5.5, 3.5), layout="constrained")
names = ["weight of places", "weight of speeds", "limit of speeds"]
for i, name in enumerate(names):
    (curve,) = axis.semilogy(np.exp(thetas[:, i]), label=name)
    axis.axhline(np.exp(pilot[i]), color=curve.get_color(), ls=":")
axis.set_xlabel("step")
axis.legend()
plt.show()

# %%
# The gradient is right, the loss falls to the errors of the flights, the limit and the
# weight of places are found, and new flights are predicted.

assert np.allclose(gradient, differences, rtol=1e-5, atol=1e-9)
assert losses[0] > 50 * losses[-1]
assert losses[-1] < 1.1 * 0.02**2
assert np.allclose(np.exp(learned - pilot)[[0, 2]], 1, atol=0.05)
assert np.abs(flights(learned, new) - flights(pilot, new)).max() < 0.05
