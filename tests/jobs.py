"""Runs a program in every process of a small job, connected by loopback."""

from __future__ import annotations

import concurrent.futures
import re
import socket
from collections.abc import Callable
from typing import Any, TypeVar

HEAD = """
import os, pickle, sys, threading
me, port, processes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=" + sys.argv[4]
import jax, jax.numpy as jnp, numpy as np
def say(*what):
    os.write(1, f"says: {' '.join(map(str, what))}\\n".encode())
jax.distributed.initialize(f"localhost:{port}", processes, me)
import hostcall as hc
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
def put(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
"""

# What programs of tests do by the store that the processes of a job share, and to what is
# kept of failures.
STORE = """
def meet(name):
    from jax._src.distributed import global_state
    global_state.client.wait_at_barrier(name, 60_000)
def in_store(key):
    from hostcall import _jax
    return _jax.job_get(key)
def keys_in_store(folder):
    from hostcall import _jax
    return _jax.job_folder(folder)
def write_to_store(key, text):
    from hostcall import _jax
    _jax.job_put(key, text)
def failure_of_another():
    from hostcall._job.job import job
    return job().failures.announced
def waits_at_its_end(seconds):
    from hostcall._job.job import Job
    Job.patience = seconds
def stays_at_its_end(seconds):
    from hostcall._job.job import Job
    Job.stays = seconds
def sees_nobody_leave():
    from hostcall._job.job import job
    job()._sees_others = False
def closes_collectives():
    from hostcall import _jax
    return _jax.close_collectives()
def goes_on():  # in all processes, as if there had been no failure
    from hostcall import _jax
    from hostcall._job.job import job
    job().failures._first.pop("here", None)
    _jax.execution._refusal_across = None
"""
HEAD += STORE


T = TypeVar("T")


def free_port() -> str:
    """A port of this machine on which nobody listens now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def in_each(processes: int, run: Callable[[int, str], T]) -> list[T]:
    """`run(number, port)` for each process of a job, at once, each in a thread."""
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        return list(pool.map(lambda number: run(number, port), range(processes)))


def said(text: str) -> list[str]:
    """What a program said. Gloo writes pieces of text to the same stream."""
    return re.findall("says: (.*)", text)


def run_job(
    run_python: Callable[..., Any],
    source: str,
    *more: str,
    processes: int = 2,
    devices: int = 2,
) -> list[list[str]]:
    """What each process said. `more` are `sys.argv[5:]` of the program."""

    def run(me: int, port: str) -> list[str]:
        place = map(str, (me, port, processes, devices))
        return said(run_python(HEAD + source, *place, *more).stdout)

    return in_each(processes, run)
