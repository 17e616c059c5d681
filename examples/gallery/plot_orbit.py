"""
A flight to Mars: astropy's planets in a JAX optimiser
======================================================

When should a spacecraft leave for Mars, and how long should it fly? Astropy knows where
the planets are, and JAX computes the orbit between them. The derivative rule of the
planets' places gives their velocities, and Newton's method finds the cheapest flights.

Besides hostcall it needs ``pip install astropy matplotlib scipy``.
"""

# sphinx_gallery_tags = ["simulator", "derivatives", "taps", "optimisation"]

import astropy.units as u
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from astropy.coordinates import get_body_barycentric_posvel
from astropy.time import Time
from matplotlib.animation import FuncAnimation
from scipy.integrate import solve_ivp

import hostcall as hc

jax.config.update("jax_enable_x64", True)

# %%
# The planets
# -----------
# Lengths are in astronomical units (AU), and times in days since the beginning of 2020.
# Astropy's built-in ephemeris needs no download. It takes many times at once, so a
# batch is one call: ``vmap_method="expand_dims"``.
#
# The place of a planet has its velocity as derivative, which astropy gives too. The
# velocity has the sun's pull as derivative, a formula in JAX. These two rules give JAX
# all it needs for second derivatives.

BEGIN = Time("2020-01-01", scale="tdb")
GM = 0.01720209895**2  # of the sun, from Gauss's constant
KM_S = (1 * u.AU / u.day).to_value(u.km / u.s)


def planet(name):
    """Two host functions: days -> place, and days -> velocity; from the sun."""

    def found(days):
        time = BEGIN + days * u.day
        body = get_body_barycentric_posvel(name, time, ephemeris="builtin")
        sun = get_body_barycentric_posvel("sun", time, ephemeris="builtin")
        return [(b - s).xyz for b, s in zip(body, sun, strict=True)]

    def vector(days):
        return jax.ShapeDtypeStruct((*days.shape, 3), days.dtype)

    @hc.host(result=vector, vmap_method="expand_dims", tag=f"place of {name}")
    def place(days):
        return np.moveaxis(found(days)[0].to_value(u.AU), 0, -1)

    @hc.host(result=vector, vmap_method="expand_dims", tag=f"velocity of {name}")
    def velocity(days):
        return np.moveaxis(found(days)[1].to_value(u.AU / u.day), 0, -1)

    @place.defjvp(where="jax")
    def _(primals, tangents):
        return velocity(*primals) * tangents[0]

    @velocity.defjvp(where="jax")
    def _(primals, tangents):
        r = place(*primals)
        return -GM * r / jnp.sum(r**2) ** 1.5 * tangents[0]

    return place, velocity


earth, earth_velocity = planet("earth")
mars, mars_velocity = planet("mars")

# %%
# ``hc.testing.check`` compares the rules with finite differences, batches with loops,
# and more. The sun's pull is not the whole acceleration: other planets pull too. So the
# check of the velocities is a little looser.

report = hc.testing.check(mars, np.array(100.0))
print(report)
assert report
assert hc.testing.check(mars_velocity, np.array(100.0), rtol=1e-3)

# %%
# The orbit between two places
# ----------------------------
# Lambert's problem: which orbit goes from ``r1`` to ``r2`` in a given time? All orbits
# between the places are numbered by one variable ``z``, and a larger ``z`` takes longer
# (Bate, Mueller and White, "Fundamentals of Astrodynamics", 5.3). Bisection finds it.
# Then two steps along a fixed slope give it exact first and second derivatives: each
# step makes one more order right.


def lambert(r1, r2, duration):
    """The velocities at both ends of the orbit from r1 to r2."""
    a, b = jnp.linalg.norm(r1), jnp.linalg.norm(r2)
    cosine = r1 @ r2 / (a * b)
    forth = jnp.where(jnp.cross(r1, r2)[2] > 0, 1.0, -1.0)  # with the planets
    k = forth * jnp.sqrt(a * b * (1 + cosine))

    def height(z):
        root = jnp.sqrt(z)
        c, s = (1 - jnp.cos(root)) / z, (root - jnp.sin(root)) / root**3
        return a + b + k * (z * s - 1) / jnp.sqrt(c), c, s

    def time(z):
        y, c, s = height(z)
        possible = y > 0
        y = jnp.where(possible, y, 1.0)
        days = ((y / c) ** 1.5 * s + k * jnp.sqrt(y)) / jnp.sqrt(GM)
        return jnp.where(possible, days, 0.0)

    def halved(_, ends):
        low, high = ends
        middle = (low + high) / 2
        short = time(middle) < duration
        return jnp.where(short, middle, low), jnp.where(short, high, middle)

    ends = jax.lax.fori_loop(0, 50, halved, (1e-3, 4 * jnp.pi**2 - 1e-3))
    z = jax.lax.stop_gradient(sum(ends) / 2)
    slope = jax.lax.stop_gradient(jax.jvp(time, (z,), (1.0,))[1])
    for _ in range(2):
        z = z - (time(z) - duration) / slope
    y, _, _ = height(z)
    g = k * jnp.sqrt(y / GM)
    return (r2 - (1 - y / a) * r1) / g, ((1 - y / b) * r2 - r1) / g


def cost(flight):
    """The speeds to gain at the earth and to lose at Mars, in km/s, together."""
    start, duration = flight
    end = start + duration
    v1, v2 = lambert(earth(start), mars(end), duration)
    gain, loss = v1 - earth_velocity(start), v2 - mars_velocity(end)
    return (jnp.linalg.norm(gain) + jnp.linalg.norm(loss)) * KM_S


# %%
# The search
# ----------
# Newton's method on the start and the duration, from twelve flights at once. It uses
# the absolute values of the Hessian's eigenvalues, so it does not climb, and goes 15
# days at most in a step. A tap collects the paths.

paths = []


@jax.jit
def search(flights):
    def slope_twice(flight):
        slope = jax.jacfwd(cost)(flight)
        return slope, slope

    def improved(flight):
        bend, slope = jax.jacfwd(slope_twice, has_aux=True)(flight)
        values, vectors = jnp.linalg.eigh(bend)
        step = vectors @ ((vectors.T @ slope) / jnp.maximum(jnp.abs(values), 1e-4))
        return flight - step * jnp.minimum(1, 15 / jnp.linalg.norm(step))

    def body(flights, _):
        hc.tap(lambda now: paths.append(now.copy()), flights)
        return jax.vmap(improved)(flights), None

    flights, _ = jax.lax.scan(body, flights, length=25)
    return flights, jax.vmap(cost)(flights)


starts = np.stack(np.meshgrid([120.0, 180, 240, 300], [150.0, 250, 350]), -1)
found, costs = search(starts.reshape(-1, 2))
hc.barrier()  # all taps have come
best = np.asarray(found)[np.argmin(costs)]
print(np.c_[found, costs].round(2))
day = [(BEGIN + t * u.day).strftime("%d %B %Y") for t in (best[0], best.sum())]
print(f"leave on {day[0]}, arrive on {day[1]}: {min(costs):.2f} km/s")

# %%
# The map of all flights
# ----------------------
# Each line is the path of a search. Between the two valleys the flight is half a turn
# around the sun, and costs much, since Mars is then above or below the earth's plane.
# Three spacecraft left for Mars in that summer.

missions = {
    "Hope": ("2020-07-19", "2021-02-09"),
    "Tianwen-1": ("2020-07-23", "2021-02-10"),
    "Perseverance": ("2020-07-30", "2021-02-18"),
}
left = np.linspace(100, 320, 70)
took = np.linspace(120, 400, 70)
cost_map = jax.jit(jax.vmap(jax.vmap(cost)))(np.stack(np.meshgrid(left, took), -1))

figure, axes = plt.subplots(figsize=(5.5, 4.5), layout="constrained")
filled = axes.contourf(left, took, np.clip(cost_map, None, 20), 28, cmap="viridis_r")
figure.colorbar(filled, label="speed to gain and to lose, km/s")
for path in np.stack([*paths, found], axis=1):
    axes.plot(*path.T, "w.-", lw=0.8, ms=3)
axes.plot(*best, "r*", ms=14, label="the cheapest")
for (name, dates), mark in zip(missions.items(), "osD", strict=True):
    away, there = (float((Time(date) - BEGIN).to_value(u.day)) for date in dates)
    axes.plot(away, there - away, f"k{mark}", mfc="none", label=name)
axes.set(xlim=left[[0, -1]], ylim=took[[0, -1]], title="Flights to Mars in 2020")
axes.set(xlabel="start, days after 1 January 2020", ylabel="days of flight")
axes.legend()

# %%
# The flight
# ----------
# SciPy integrates the spacecraft's motion from the earth with the velocity that was
# found. This tests the search: the spacecraft must meet Mars.

v1, v2 = jax.jit(lambda f: lambert(earth(f[0]), mars(f[0] + f[1]), f[1]))(best)


def motion(_, state):
    r, v = state[:3], state[3:]
    return np.concatenate([v, -GM * r / np.linalg.norm(r) ** 3])


state = np.concatenate([earth(best[0]), v1])
times = np.linspace(0, best[1], 61)
craft = solve_ivp(motion, (0, best[1]), state, t_eval=times, rtol=1e-10, atol=1e-12).y
miss = np.linalg.norm(craft[:3, -1] - mars(best.sum())) * u.AU
print(f"the spacecraft misses Mars by {miss.to(u.km):.1f}")

figure, axes = plt.subplots(figsize=(5, 5), dpi=70)
axes.plot(0, 0, "o", color="gold", ms=14)
dots, trails = [], []
for name, track, color in (
    ("earth", np.asarray(earth(best[0] + times)).T, "C0"),
    ("Mars", np.asarray(mars(best[0] + times)).T, "C3"),
    ("spacecraft", craft, "k"),
):
    trails.append((axes.plot([], [], color=color, lw=1)[0], track))
    dots.append((axes.plot([], [], "o", color=color, label=name)[0], track))
axes.set(xlim=(-1.8, 1.8), ylim=(-1.8, 1.8), aspect="equal", xlabel="AU", ylabel="AU")
axes.legend(loc="lower left")


def draw(frame):
    for dot, track in dots:
        dot.set_data(track[:1, frame], track[1:2, frame])
    for trail, track in trails:
        trail.set_data(track[0, : frame + 1], track[1, : frame + 1])
    axes.set_title((BEGIN + (best[0] + times[frame]) * u.day).strftime("%d %B %Y"))


animation = FuncAnimation(figure, draw, frames=len(times), interval=60)
plt.show()

# %%
# The cheapest flight leaves between the second and the third of the spacecraft. All
# searches end in one of two valleys.

perseverance = [
    float((Time(t) - BEGIN).to_value(u.day)) for t in missions["Perseverance"]
]
assert np.abs(best[0] - perseverance[0]) < 10
assert np.abs(best.sum() - perseverance[1]) < 10
assert np.linalg.norm(jax.jit(jax.jacfwd(cost))(best)) < 1e-8
assert len(np.unique(np.round(found, 3), axis=0)) == 2
assert miss < 100 * u.km
