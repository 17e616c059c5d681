"""Taps and calls of every shard, over devices and processes.

The harness runs its cases in one process, so this is a program of its own:
`python -m benchmarks.processes`. It starts jobs of one to four processes on this
machine, connected by loopback. Each runs the same loops in a `shard_map`, with one tap
or one call a step and shard, and prints

    us a shard    microseconds until all devices are done, by steps and shards
    grown         KiB by which the first process has grown over the last two rounds

All processes share the machine's cores, so a figure has the cost of all of them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

LAYOUTS = ((1, 2), (1, 8), (1, 32), (2, 2), (4, 1))  # processes, devices of each
STEPS, JAX_STEPS = 10_000, 500
ROUNDS = 5


def main() -> None:
    quick = "--quick" in sys.argv
    print("| job | case | us a shard | grown |\n|---|---|---|---|", flush=True)
    for processes, devices in LAYOUTS:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        started = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.processes", "child"),
                    *map(str, (me, processes, devices, port, int(quick))),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for me in range(processes)
        ]
        said = [one.communicate(timeout=900)[0] for one in started]
        if any(one.returncode for one in started):
            raise SystemExit(f"a process of {processes} x {devices} failed")
        lines = said[0].splitlines()
        for line in (line for line in lines if line.startswith("{")):
            row = json.loads(line)
            print(
                f"| {processes} x {devices} | {row['case']} |"
                f" {row['us']:.2f} | {row['grown']} KiB |",
                flush=True,
            )


def _child(me: int, processes: int, devices: int, port: int, quick: bool) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, me)
    import hostcall as hc
    from benchmarks.harness import resident_kib
    from benchmarks.rows_call import SCALAR, same

    def nothing(x: Any) -> None:
        del x

    def with_tap(x: Any) -> Any:
        hc.tap(nothing, x)
        return x + 1

    def with_debug(x: Any) -> Any:
        jax.debug.callback(nothing, x)
        return x + 1

    steps, few = (500, 50) if quick else (STEPS, JAX_STEPS)
    cases = {
        "hostcall, a tap": (with_tap, steps),
        "hostcall, a call": (lambda x: hc.call(same, SCALAR, x), steps),
        "JAX, debug.callback": (with_debug, few),
        "JAX, pure_callback": (lambda x: jax.pure_callback(same, SCALAR, x), few),
    }
    mesh = Mesh(np.array(jax.devices()), ("d",))
    over = PartitionSpec("d")
    n = processes * devices
    x = jax.make_array_from_callback(
        (n,), NamedSharding(mesh, over), lambda i: np.ones(n, np.float32)[i]
    )
    for name, (step, count) in cases.items():

        def shard(x: Any, step: Any = step, count: int = count) -> Any:
            body = lambda _, c: step(c)
            return jax.lax.fori_loop(0, count, body, x[0])[None]

        f = jax.jit(
            jax.shard_map(
                shard, mesh=mesh, in_specs=over, out_specs=over, check_vma=False
            )
        )
        times, sizes = [], []
        for _ in range(ROUNDS):
            if processes > 1:
                multihost_utils.sync_global_devices("round")
            begin = time.perf_counter()
            jax.block_until_ready(f(x))
            jax.effects_barrier()
            hc.barrier()
            times.append((time.perf_counter() - begin) / (count * n) * 1e6)
            sizes.append(resident_kib())
        best = sorted(times[1:])[len(times[1:]) // 2]
        row = {"case": name, "us": best, "grown": sizes[-1] - sizes[-3]}
        if me == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        me, processes, devices, port, quick = map(int, sys.argv[2:])
        _child(me, processes, devices, port, bool(quick))
    else:
        main()
