"""Jobs of several real processes on this machine, for tests."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import jobs
import nursery
from limits import PROGRAM_SECONDS

HEAD = """
import os, select, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["XLA_FLAGS"] = (
    "--xla_cpu_multi_thread_eigen=false"
    " --xla_force_host_platform_device_count=" + sys.argv[4]
)
import jax, jax.numpy as jnp, numpy as np
def say(*what):
    os.write(1, f"says: {' '.join(map(str, what))}\\n".encode())
me, size, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(
    f"localhost:{port}", size, me, heartbeat_timeout_seconds=int(sys.argv[5])
)
import hostcall as hc
from jax.sharding import NamedSharding, PartitionSpec as P
n = jax.device_count()
mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, P("x"))
x = jax.make_array_from_callback(
    (2 * n,), sharding, lambda index: np.arange(2.0 * n, dtype="float32")[index]
)
def awaited(key):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = in_store(key)
        if text is not None:
            return text
        time.sleep(0.02)  # until another process has written it
def over_shards(body):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
"""
HEAD += jobs.STORE


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
    source: str, size: int = 2, devices: int = 1, heartbeat_seconds: int = 100
) -> list[Ended]:
    """Runs HEAD + `source` in `size` processes, and waits for all."""

    def run(me: int, port: str) -> Ended:
        args = map(str, (me, size, port, devices, heartbeat_seconds))
        command = [sys.executable, "-c", HEAD + source, *args]
        done = nursery.run(command, {**os.environ}, PROGRAM_SECONDS)
        return Ended(done.returncode, jobs.said(done.stdout), done.stderr)

    return jobs.in_each(size, run)
