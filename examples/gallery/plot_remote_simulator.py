"""
64 simulators behind an HTTP server
===================================

A jitted, vmapped program steps 64 pendulums that live behind an HTTP server. The host
function is an ``async def``, so the requests of all rows are in flight together, on one
connection pool and one thread. The plots show each request over time, and how many were
in flight.

Besides hostcall it needs ``pip install aiohttp matplotlib scipy``.
"""

# %%
# The server
# ----------
#
# It is a real aiohttp server on the loopback interface, with a thread and an event loop
# of its own. SciPy integrates a damped pendulum, which a torque pushes. The server
# answers when all 64 have asked, so a program that asked for one after the other would
# wait for ever. Then each answer waits for 5 to 60 ms more, as one from far away would.

# sphinx_gallery_tags = ["simulator", "parallel", "plots"]
# sphinx_gallery_thumbnail_number = 2

import asyncio
import random
import threading
import time
from concurrent import futures

import aiohttp
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import scipy.integrate
from aiohttp import web

import hostcall as hc

ROWS, STEPS = 64, 8


def pendulum(angle: float, speed: float, torque: float) -> list[float]:
    """The state 0.3 s later."""

    def slope(_: float, state: np.ndarray) -> tuple[float, float]:
        return state[1], torque - 0.2 * state[1] - 9.81 * np.sin(state[0])

    done = scipy.integrate.solve_ivp(slope, (0, 0.3), (angle, speed))
    last: list[float] = done.y[:, -1].tolist()
    return last


class Server:
    def __init__(self) -> None:
        self.delays = random.Random(0)
        self.address: futures.Future[str] = futures.Future()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))

    async def step(self, request: web.Request) -> web.Response:
        state = pendulum(**await request.json())
        await self.all_asked.wait()
        await asyncio.sleep(self.delays.uniform(0.005, 0.06))
        return web.json_response(state)

    async def serve(self) -> None:
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        self.all_asked = asyncio.Barrier(ROWS)
        app = web.Application()
        app.router.add_post("/step", self.step)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address.set_result("http://127.0.0.1:{1}".format(*runner.addresses[0]))
        await self.over.wait()
        await runner.cleanup()

    def __enter__(self) -> str:
        self.thread.start()
        return self.address.result()

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join()


# %%
# The client
# ----------
#
# ``step`` is the host function. Its session is made on hostcall's event loop by the
# first request. :func:`hostcall.current` says which row of the batch is asking.


class Client:
    def __init__(self, address: str) -> None:
        self.address = address
        self.session: aiohttp.ClientSession | None = None
        self.log: list[tuple[int, float, float]] = []  # row, sent, answered

    async def step(self, state: np.ndarray, torque: np.ndarray) -> np.ndarray:
        if self.session is None:
            connector = aiohttp.TCPConnector(limit=ROWS)
            self.session = aiohttp.ClientSession(self.address, connector=connector)
        angle, speed = state.tolist()
        asked = {"angle": angle, "speed": speed, "torque": float(torque)}
        sent = time.perf_counter()
        async with self.session.post("/step", json=asked) as answer:
            answer.raise_for_status()
            after = np.array(await answer.json(), np.float32)
        current = hc.current()
        assert current is not None
        (row,) = current.row
        self.log.append((row, sent, time.perf_counter()))
        return after

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


# %%
# The program
# -----------
#
# A controller in JAX brakes the pendulums: the torque depends on the state that the
# server returned. Each step of each row is a request of its own. ``order="unordered"``
# sends each exactly once; ``concurrency=`` is how many may wait at the same time.


def rollout(client: Client, start: jax.Array) -> jax.Array:
    def step(state: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        torque = jnp.clip(-3 * state[1], -6, 6)
        state = hc.call(
            hc.host(client.step, concurrency=ROWS, timeout=60),
            state,  # the result is like it
            state,
            torque,
            order="unordered",
            vmap_method="parallel",
        )
        return state, state

    return jax.lax.scan(step, start, length=STEPS)[1]


angles = jnp.linspace(-3, 3, ROWS)
start = jnp.stack([angles, jnp.zeros(ROWS)], axis=1)

with Server() as address:
    client = Client(address)
    program = jax.jit(jax.vmap(lambda start: rollout(client, start)))
    path = np.asarray(program(start))
    hc.call(client.close, None, order="ordered")  # on the loop of the session
    jax.effects_barrier()

row, sent, answered = (np.array(column) for column in zip(*client.log, strict=True))
sent, answered = sent - sent.min(), answered - sent.min()
spent = answered.max()
print(f"{len(row)} requests in {spent:.2f} s.", end=" ")
print(f"A request waited for {(answered - sent).mean() * 1e3:.0f} ms on average.")

# %%
# What the pendulums did
# ----------------------

figure, axis = plt.subplots(figsize=(5.5, 3.5))
times = 0.3 * np.arange(STEPS + 1)
colours = plt.colormaps["twilight"](np.linspace(0, 1, ROWS))
for first, states, colour in zip(angles, path, colours, strict=True):
    axis.plot(times, np.append(first, states[:, 0]), color=colour)
axis.set(xlabel="seconds of the simulation", ylabel="angle")
axis.set_title("64 braked pendulums")
figure.tight_layout()

# %%
# The requests over time
# ----------------------
#
# A line is a request. The steps of the scan are the columns: the requests of a step are
# sent together, and the next step begins when all rows have their answers.

figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(5.5, 5))
top.hlines(row, sent * 1e3, answered * 1e3, color="tab:blue", linewidth=1)
top.set_ylabel("row")
top.set_title(f"{len(row)} requests of one compiled program")
at = np.concatenate([sent, answered])
change = np.repeat([1, -1], len(row))
order = np.argsort(at, kind="stable")
in_flight = np.cumsum(change[order])
bottom.step(at[order] * 1e3, in_flight, where="post")
bottom.axhline(ROWS, color="0.7", zorder=0)
bottom.set(xlabel="ms", ylabel="requests in flight")
figure.tight_layout()
plt.show()

# %%
# The rows of each step were in flight together, and the paths are those of SciPy
# without a server.

expected, states = [], np.asarray(start)
for _ in range(STEPS):
    torques = np.clip(-3 * states[:, 1], -6, 6)
    moved = [
        pendulum(angle, speed, torque)
        for (angle, speed), torque in zip(
            states.tolist(), torques.tolist(), strict=True
        )
    ]
    states = np.array(moved, np.float32)
    expected.append(states)

assert len(row) == ROWS * STEPS
assert in_flight.max() == ROWS
assert np.allclose(path, np.stack(expected, 1), atol=1e-3)
