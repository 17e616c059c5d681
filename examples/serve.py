"""Train in one process, export, and serve in another, with a web server.

The parent fits a damping rate. The model calls a solver of SciPy, with a rule for its
derivative. The program goes into a file, together with its gradient. A child process
loads it and answers requests with 8 threads. The parent sends 400, some of which must
fail, and checks that each gets its own answer or its own error.
"""

import asyncio
import concurrent.futures
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.web
import jax
import jax.numpy as jnp
import numpy as np
from scipy.integrate import solve_ivp

import hostcall as hc

TIMES = np.linspace(0, 2, 9)


def solve(rate: Any) -> np.ndarray:
    """y' = -rate y with y(0) = 1, and s = dy/drate beside it."""
    if rate < 0:
        raise ValueError(f"rate should be 0 or more, got {float(rate):g}")

    def slope(_: float, ys: np.ndarray) -> list[float]:
        return [-rate * ys[0], -rate * ys[1] - ys[0]]

    found = solve_ivp(slope, (0, 2), [1, 0], t_eval=TIMES, rtol=1e-8, atol=1e-10)
    y: np.ndarray = found.y
    return y.astype(np.float32)


# Both processes run this line: the file has the name only.
decay = hc.register("serve.decay", version=1)(
    hc.host(
        lambda rate: solve(rate)[0],
        result=jax.ShapeDtypeStruct(TIMES.shape, jnp.float32),
    )
)
decay.defvjp(
    lambda rate: tuple(solve(rate)),
    lambda s, ct: (np.float32(s @ ct),),
)


def train() -> tuple[hc.typing.Exported, float]:
    data = jnp.asarray(np.exp(-0.7 * TIMES), jnp.float32)
    loss = jax.jit(jax.grad(lambda rate: ((decay(rate) - data) ** 2).sum()))
    rate = jnp.float32(0.1)
    for _ in range(60):
        rate -= 0.2 * loss(rate)
    model = hc.export(lambda x: decay(rate * x), vjp_order=1)
    return model(jnp.float32(1)), float(rate)


# --- The server ----------------------------------------------------------------------


async def serve(path: str) -> None:
    model = hc.load(Path(path).read_bytes())
    gradient = jax.jit(jax.grad(lambda x: model.call(x)[-1]))
    threads = concurrent.futures.ThreadPoolExecutor(8)

    def answer(x: float) -> dict[str, Any]:
        with hc.reraise():  # the solver's own exception, on the thread that asked
            y, slope = model.call(jnp.float32(x)), gradient(jnp.float32(x))
            return {"y": np.asarray(y).tolist(), "slope": float(slope)}

    async def handle(request: aiohttp.web.Request) -> aiohttp.web.Response:
        x = float(request.query["x"])
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(threads, answer, x)
        except ValueError as error:
            return aiohttp.web.json_response({"error": str(error)}, status=422)
        return aiohttp.web.json_response(found)

    app = aiohttp.web.Application()
    app.router.add_get("/", handle)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    # The parent closes the pipe when it has its answers.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()
    threads.shutdown()


# --- The clients ---------------------------------------------------------------------


async def ask(port: int, rate: float) -> list[float]:
    took = []
    gate = asyncio.Semaphore(16)

    async def one(session: aiohttp.ClientSession, x: float) -> None:
        async with gate:
            start = time.perf_counter()
            async with session.get(f"http://127.0.0.1:{port}/?x={x}") as response:
                found = json.loads(await response.text())
            took.append(time.perf_counter() - start)
        if x < 0:
            got = float(found["error"].rpartition(" ")[2])
            assert response.status == 422
            assert np.isclose(got, rate * x, rtol=1e-4)  # its own error
        else:
            assert np.allclose(found["y"], np.exp(-rate * x * TIMES), atol=1e-5)
            slope = -rate * TIMES[-1] * np.exp(-rate * x * TIMES[-1])
            assert np.isclose(found["slope"], slope, atol=1e-5)

    async with aiohttp.ClientSession() as session:
        xs = np.random.default_rng(0).uniform(-0.2, 2, 400)
        await asyncio.gather(*(one(session, x) for x in xs))
    return took


if __name__ == "__main__" and sys.argv[1:]:
    asyncio.run(serve(sys.argv[1]))
elif __name__ == "__main__":
    model, rate = train()
    assert abs(rate - 0.7) < 1e-3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "decay.hostcall")
        path.write_bytes(bytes(model))
        print(f"{model.manifest}\n{path.stat().st_size} bytes")
        command = [sys.executable, __file__, str(path)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            port = int(server.stdout.readline())
            start = time.perf_counter()
            took = asyncio.run(ask(port, rate))
            seconds = time.perf_counter() - start
            server.stdin.close()
    assert server.returncode == 0
    fast, slow = np.quantile(took, [0.5, 0.95]) * 1e3
    print(
        f"400 requests, 16 at a time: {400 / seconds:.0f} a second;"
        f" half took {fast:.1f} ms or less, 95 % {slow:.1f} ms"
    )
