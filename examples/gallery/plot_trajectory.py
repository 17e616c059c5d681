"""
A trajectory of 100,000 steps, and its film
===========================================

The Sun, four planets and 240 asteroids near Jupiter's orbit move for 274 years, a day
each step. :class:`hostcall.Recorder` writes every step to a file while the program
runs, so that the program holds one state and not 100,000. The film is made from the
folder afterwards.

Besides hostcall it needs ``pip install astropy matplotlib pandas pyarrow``.
"""

# %%
# The start
# ---------
#
# The positions and velocities of the Sun and the outer planets on 5 September 1994 are
# those of the table in E. Hairer, C. Lubich, G. Wanner, "Geometric Numerical
# Integration" (2002), section I.2. Units are AU, days, and masses of the Sun, to which
# those of the inner planets are added.

# sphinx_gallery_tags = ["simulator", "recording", "taps", "plots"]
# sphinx_gallery_thumbnail_number = 3

import contextlib
import resource
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import astropy.coordinates
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
from astropy.time import Time, TimeDelta
from matplotlib.animation import FuncAnimation
from matplotlib.collections import LineCollection

import hostcall as hc

STEPS, DAY = 100_000, 1.0
START = Time("1994-09-05", scale="tdb")
PLANETS = ("jupiter", "saturn", "uranus", "neptune")
JUPITER = 1
MASSES = [1.00000597682, 9.54786104043e-4, 2.85583733151e-4]
MASSES += [4.37273164546e-5, 5.17759138449e-5]
GRAVITY = 2.95912208286e-4 * np.array(MASSES)
POSITIONS = [
    (0.0, 0.0, 0.0),
    (-3.5023653, -3.8169847, -1.5507963),
    (9.0755314, -3.0458353, -1.6483708),
    (8.3101420, -16.2901086, -7.2521278),
    (11.4707666, -25.7294829, -10.8169456),
]
VELOCITIES = [
    (0.0, 0.0, 0.0),
    (0.00565429, -0.00412490, -0.00190589),
    (0.00168318, 0.00483525, 0.00192462),
    (0.00354178, 0.00137102, 0.00055029),
    (0.00288930, 0.00114527, 0.00039677),
]

# %%
# The asteroids are invented. They start on Jupiter's orbit, turned by 40 to 80 degrees
# to either side, where the real Trojans are, and each gets a push.

bodies = np.array([POSITIONS, VELOCITIES])
bodies -= np.average(bodies, axis=1, weights=MASSES)[:, None]
relative = bodies[:, JUPITER] - bodies[:, 0]
pole = np.cross(*relative) / np.linalg.norm(np.cross(*relative))
angles = np.radians(np.linspace(40, 80, 120))
angles = np.concatenate([angles, -angles])


def turned(v: np.ndarray, angle: float) -> np.ndarray:
    """Rodrigues' rotation of v, which is in the plane of the orbit."""
    result: np.ndarray = v * np.cos(angle) + np.cross(pole, v) * np.sin(angle)
    return result


asteroids = np.stack([turned(relative, a) for a in angles], axis=1)
across = np.cross(asteroids[1], np.random.default_rng(0).normal(size=(240, 3)))
asteroids[1] += 0.05 * across  # not along the velocity, which would change the period
asteroids += bodies[:, :1]
first = np.concatenate([bodies, asteroids], axis=1)
print(f"{first.shape[1]} bodies, {STEPS * DAY / 365.25:.0f} years")

# %%
# The program
# -----------
#
# Velocity Verlet, in double precision. In each step the recorder gets the positions in
# float32, which are an array in a file, and the energy of the Sun and the planets,
# which is a column of a table. The queue between the program and the disk is limited to
# 16 MB: if the disk is slower than the program, the program waits.


def acceleration(x: jax.Array) -> jax.Array:
    heavy = x[: len(GRAVITY)]
    away = heavy[None] - x[:, None]
    square = (away**2).sum(-1)
    pull = jnp.where(square > 0, GRAVITY / jnp.where(square > 0, square, 1) ** 1.5, 0)
    return (pull[..., None] * away).sum(1)


def energy(x: jax.Array, v: jax.Array) -> jax.Array:
    x, v = x[: len(GRAVITY)], v[: len(GRAVITY)]
    one, other = np.triu_indices(len(GRAVITY), 1)
    apart = jnp.linalg.norm(x[one] - x[other], axis=-1)
    moving = (GRAVITY * (v**2).sum(-1)).sum() / 2
    return moving - (GRAVITY[one] * GRAVITY[other] / apart).sum()


State = tuple[jax.Array, jax.Array, jax.Array]


def run(rec: hc.Recorder, x: jax.Array, v: jax.Array) -> State:
    def step(state: State, i: jax.Array) -> tuple[State, None]:
        x, v, a = state
        rec(step=i, x=x.astype(jnp.float32))
        rec(step=i, energy=energy(x, v), every=100)
        v = v + DAY / 2 * a
        x = x + DAY * v
        a = acceleration(x)
        return (x, v + DAY / 2 * a, a), None

    start = (x, v, acceleration(x))
    (x, v, a), _ = jax.lax.scan(step, start, jnp.arange(STEPS))
    return x, v, a


# %%
# A thread looks at the memory of the process and the size of the folder while the
# program runs.


def on_disk(folder: Path) -> float:
    size = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # it got another name meanwhile
            size += file.stat().st_size if file.is_file() else 0
    return size / 1e6


def in_memory() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


@contextlib.contextmanager
def looking(folder: Path) -> Iterator[list[tuple[float, float]]]:
    """Yields a list that grows: MB on disk, MB in memory."""
    seen: list[tuple[float, float]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            seen.append((on_disk(folder), in_memory()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        seen.append((on_disk(folder), in_memory()))


home = tempfile.TemporaryDirectory()
folder = Path(home.name) / "run"
hc.configure(tap_queue_bytes=16_000_000)
with jax.enable_x64(True), hc.Recorder(folder) as rec:
    program = jax.jit(lambda x, v: run(rec, x, v)).lower(*first).compile()
    with looking(folder) as seen:
        last = jax.block_until_ready(program(*first))
        rec.close()
hc.configure(tap_queue_bytes=256_000_000)  # the default

disk, memory = np.array(seen).T
print(f"{disk[-1]:.0f} MB written; memory grew by {memory.max() - memory[0]:.0f} MB")

# %%
# Was it right?
# -------------
#
# Arrow maps the file, and reads from it only what is asked for. The planets are
# compared with the positions that astropy has for the same days, for a century, and the
# energy with its first value.


def of_astropy(day: float) -> np.ndarray:
    """Positions relative to the Sun: (planets, 3)."""
    when = START + TimeDelta(day, format="jd")
    sun, *planets = [
        astropy.coordinates.get_body_barycentric(name, when, "builtin").xyz
        for name in ("sun", *PLANETS)
    ]
    return np.stack([(planet - sun).to_value("AU") for planet in planets])


recorded = hc.tools.read(folder)
mapped = pa.memory_map(str(folder / "arrays" / "x" / "0.arrows"))
x = pa.ipc.open_stream(mapped).read_all()["value"]
energies = recorded.dataframe()
some = np.arange(0, 36_525, 365)
planets = np.array(x.take(some).to_pylist())[:, : len(GRAVITY)]
planets = planets[:, 1:] - planets[:, :1]
wanted = np.stack([of_astropy(day * DAY) for day in some])
apart = np.linalg.norm(planets - wanted, axis=-1)
drift = np.abs(energies["energy"] / energies["energy"][0] - 1)

figure, axis = plt.subplots(figsize=(5.5, 3.3))
axis.plot(disk, memory - memory[0])
axis.plot(disk, disk, color="0.7", linestyle="--", label="if nothing was written")
axis.set(xlabel="MB written", ylabel="growth of the memory, MB")
axis.legend()
figure.tight_layout()

# %%
# How far the planets are from astropy's, and how well the energy is kept.

figure, (top, bottom) = plt.subplots(2, figsize=(5.5, 5.5))
for name, column in zip(PLANETS, apart.T, strict=True):
    top.semilogy(1994.7 + some * DAY / 365.25, column, label=name.capitalize())
top.set(ylabel="AU from astropy's position", xlabel="year")
top.legend()
bottom.plot(1994.7 + energies["step"] * DAY / 365.25, drift)
bottom.set(ylabel="relative error of the energy", xlabel="year")
figure.tight_layout()

# %%
# The film
# --------
#
# Seen from a frame that turns with Jupiter, the asteroids swing about two points, 60
# degrees before and behind it. One that is not bound to its point goes on to the other
# side. The film shows half of the run. A frame is 1,000 steps later than the one
# before, and the trails are the 10 states between them.

TRAIL, FRAMES = 10, 50
states = np.array(x.take(np.arange(0, STEPS, 100)).to_pylist())
centred = states - states[:, :1]
ahead = centred[:, JUPITER]
angle = np.arctan2(ahead[:, 1], ahead[:, 0])[:, None]
turning = np.stack(
    [
        np.cos(angle) * centred[..., 0] + np.sin(angle) * centred[..., 1],
        np.cos(angle) * centred[..., 1] - np.sin(angle) * centred[..., 0],
    ],
    axis=-1,
)

figure, axis = plt.subplots(figsize=(5, 5), dpi=80)
axis.set(xlim=(-7, 7), ylim=(-7, 7), aspect="equal", xlabel="AU", ylabel="AU")
axis.plot(0, 0, "o", color="orange", markersize=12)
axis.plot(*turning[::7, JUPITER].T, ".", color="tab:brown", markersize=8)
axis.text(4.2, 0.4, "Jupiter", color="tab:brown")
trails = LineCollection([], color="0.7", linewidth=0.6, zorder=0)
axis.add_collection(trails)
half = len(angles) // 2
(leading,) = axis.plot([], [], ".", color="tab:blue", markersize=3)
(trailing,) = axis.plot([], [], ".", color="tab:green", markersize=3)


def draw(frame: int) -> None:
    now = turning[frame * TRAIL : (frame + 1) * TRAIL, len(GRAVITY) :]
    leading.set_data(*now[-1, :half].T)
    trailing.set_data(*now[-1, half:].T)
    trails.set_segments(list(now.swapaxes(0, 1)))
    axis.set_title(f"year {1994.7 + frame * 1000 * DAY / 365.25:.0f}")


film = FuncAnimation(figure, draw, frames=FRAMES, interval=80)
html = film.to_jshtml()
home.cleanup()
plt.show()

# %%
# The run is complete, the planets are where astropy has them, and nearly all asteroids
# stayed on their side of Jupiter.

side = np.sign(turning[:, len(GRAVITY) :, 1])
stayed = (side == np.sign(angles)).all(axis=0)
print(f"{stayed.sum()} of {len(angles)} asteroids stayed on their side")
assert (len(x), *states.shape[1:]) == (STEPS, *first[0].shape)
assert disk[-1] > STEPS * first[0].size * 4 / 1e6
assert memory.max() - memory[0] < disk[-1] / 2
assert apart.max() < 0.05
assert drift.max() < 1e-6
assert html.count("data:image/png") == FRAMES
assert stayed.mean() > 0.95
