"""What `fail="together"` costs, as a table.

    python benchmarks/failing_together.py [processes]

One step of a `shard_map` over so many processes with one device each, in microseconds:
the best of five runs of 300 steps, each of which takes the result of the one before.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc

STEPS = 300


def seconds(f: Callable[[Any], Any], x: Any) -> float:
    y = f(x)
    y.block_until_ready()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(STEPS):
            y = f(y)
        y.block_until_ready()
        best = min(best, (time.perf_counter() - start) / STEPS)
    return best


def with_call(order: Any, fail: Any) -> Callable[[Any], Any]:
    def body(v: Any) -> Any:
        if order == "pure":
            return hc.call(lambda v: v, v, v, fail=fail)
        hc.call(lambda v: None, None, v, order=order, fail=fail)
        return v + 1

    return body


def measure(me: int, size: int, port: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", size, me)
    mesh = jax.make_mesh((size,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    x = jax.make_array_from_callback(
        (size,), sharding, lambda index: np.arange(size, dtype=np.float32)[index]
    )
    rows: dict[str, Callable[[Any], Any]] = {
        "no call": lambda v: v + 1,
        "`psum` of a number, no call": lambda v: v * 0 + jax.lax.psum(v.sum(), "x"),
    }
    for order in ("pure", "unordered", "ordered"):
        for fail in ("alone", "together"):
            rows[f'{order} call, "{fail}"'] = with_call(order, fail)
    for name, body in rows.items():
        step = jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        )
        took = seconds(step, x)
        if me == 0:
            print(f"| {name} | {took * 1e6:.0f} us |", flush=True)


def main() -> None:
    if len(sys.argv) > 2:
        measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
        return
    size = sys.argv[1] if len(sys.argv) > 1 else "2"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    one = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    command = [sys.executable, __file__]
    started = [
        subprocess.Popen([*command, str(me), size, port], env=one)
        for me in range(int(size))
    ]
    sys.exit(max(process.wait() for process in started))


if __name__ == "__main__":
    main()
