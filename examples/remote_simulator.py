"""A jitted, vmapped program steps 64 simulators behind an HTTP server.

The rollout is one compiled program. Each step of each row is a request of its own, and
the requests of all 64 rows are in flight at the same time, on one connection pool and
one thread. The server here is in the same process, on the loopback interface, with a
thread and an event loop of its own.
"""

import asyncio
import threading
from concurrent import futures

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
from aiohttp import web

import hostcall as hc

ROWS, STEPS = 64, 5


class Server:
    """Steps damped particles. Answers when all rows of a step have asked."""

    def __init__(self) -> None:
        self.in_flight = self.most_in_flight = 0
        self.address: futures.Future[str] = futures.Future()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))

    async def step(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await self.together.wait()
        self.in_flight -= 1
        return web.json_response({"x": 0.5 * asked["x"] + asked["push"]})

    async def serve(self) -> None:
        self.together, self.over = asyncio.Barrier(ROWS), asyncio.Event()
        self.loop = asyncio.get_running_loop()
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


class Client:
    """Its session is made on hostcall's event loop, by the first request."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.session: aiohttp.ClientSession | None = None

    async def step(self, x: np.ndarray, push: np.ndarray) -> np.floating:
        session = self.session
        if session is None:
            limits = aiohttp.TCPConnector(limit=ROWS)
            session = aiohttp.ClientSession(self.address, connector=limits)
            self.session = session
        asked = {"x": float(x), "push": float(push)}
        async with session.post("/step", json=asked) as answer:
            answer.raise_for_status()
            return np.float32((await answer.json())["x"])

    async def close(self, _: np.ndarray) -> np.integer:
        if self.session is not None:
            await self.session.close()
        return np.int32(0)


def main() -> None:
    server = Server()
    with server as address:
        client = Client(address)

        def step(x: jax.Array, push: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = hc.call(
                client.step,
                jax.ShapeDtypeStruct((), jnp.float32),
                x,
                push,
                order="unordered",  # each request is sent exactly once
                vmap_method="parallel",
                concurrency=ROWS,
                timeout=60,
            )
            return x, x

        @jax.jit
        @jax.vmap
        def rollout(x: jax.Array) -> jax.Array:
            return jax.lax.scan(step, x, jnp.linspace(0, 1, STEPS))[1]

        start = jnp.arange(ROWS, dtype=jnp.float32)
        path = np.asarray(rollout(start))
        hc.call(client.close, jnp.int32(0), 0)  # on the loop of the session

    expected, x = [], np.arange(ROWS, dtype=float)
    for push in np.linspace(0, 1, STEPS):
        x = 0.5 * x + push
        expected.append(x)
    np.testing.assert_allclose(path, np.stack(expected, 1), rtol=1e-5)
    assert server.most_in_flight == ROWS
    print(f"{ROWS * STEPS} requests, {server.most_in_flight} in flight at a time")


if __name__ == "__main__":
    main()
