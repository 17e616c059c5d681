"""Jobs of several real processes on this machine, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

HEAD = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=" + sys.argv[4]
import jax, jax.numpy as jnp, numpy as np
def say(*what):
    os.write(1, f"says: {' '.join(map(str, what))}\\n".encode())
me, size, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", size, me)
import hostcall as hc
from jax.sharding import NamedSharding, PartitionSpec as P
n = jax.device_count()
mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, P("x"))
x = jax.make_array_from_callback(
    (2 * n,), sharding, lambda index: np.arange(2.0 * n, dtype="float32")[index]
)
def over_shards(body):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
"""


class Ended(NamedTuple):
    """How one process of a job ended.

    Attributes:
        code: its exit code; negative: the signal.
        said: what it wrote with `say`, in order.
        err: its stderr.
    """

    code: int
    said: list[str]
    err: str

    @property
    def last(self) -> str:
        """The last line of its stderr."""
        return (self.err.splitlines() or [""])[-1]


def run_job(
    source: str,
    size: int = 2,
    devices: int = 1,
    *,
    limit: float = 120.0,
    act: Callable[[list[subprocess.Popen[str]]], object] | None = None,
    env: dict[str, str] | None = None,
) -> list[Ended]:
    """Runs HEAD + `source` in `size` processes, and waits for all.

    `act` may do something to them, such as signals. A process that has not ended after
    `limit` seconds is killed, and its code is then -9.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HEAD + source, *map(str, (me, size, port, devices))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        for me in range(size)
    ]
    outputs: list[tuple[str, str]] = [("", "")] * size

    def read(number: int) -> None:
        try:
            outputs[number] = processes[number].communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            processes[number].kill()
            outputs[number] = processes[number].communicate()

    readers = [threading.Thread(target=read, args=(i,)) for i in range(size)]
    for reader in readers:
        reader.start()
    if act is not None:
        act(processes)
    for reader in readers:
        reader.join()
    return [
        Ended(
            process.returncode,
            [
                line.partition("says: ")[2]
                for line in out.splitlines()
                if "says: " in line
            ],
            err,
        )
        for process, (out, err) in zip(processes, outputs, strict=True)
    ]
