"""Programs over several processes: which function they call."""

from __future__ import annotations

import concurrent.futures
import socket

import pytest

HEAD = """
import gc, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np
me, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{port}", 2, me)
import hostcall as hc
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, P("x"))
x = jax.make_array_from_callback(
    (8,), sharding, lambda index: np.arange(8.0, dtype="float32")[index]
)
"""


@pytest.fixture
def run_both(run_python):
    """The lines that two processes of one job print; the second one's number is 1."""

    def run(source):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        with concurrent.futures.ThreadPoolExecutor() as pool:
            programs = [
                pool.submit(run_python, HEAD + source, str(me), port, timeout=60)
                for me in range(2)
            ]
            printed = [program.result().stdout.splitlines() for program in programs]
            return [[x for x in lines if "[Gloo]" not in x] for lines in printed]

    return run


def test_executables_that_jax_keeps_by_their_text(run_both):
    """Three programs differ only in their function. With this flag the first process
    of them all keeps what it has compiled, and on CPUs it alone: its keys differ.
    """
    first, second = run_both(
        """
jax.config.update("jax_share_binary_between_hosts", me == 0)
def run(f):
    out = jax.jit(f, in_shardings=sharding, out_shardings=sharding)(x)
    got = {s.index[0].start: s.data.tolist() for s in out.addressable_shards}
    jax.clear_caches()
    for _ in range(2):
        gc.collect()
    return got
mine = range(4 * me, 4 * me + 4, 2)
for factor in (1, 10, 100):
    if me == 0:  # a program of its own, which moves no number of theirs
        local = jax.jit(lambda v: hc.call(lambda v: v + 1, v, v))
        assert local(np.float32(factor)) == factor + 1
        jax.jit(lambda x: hc.call(lambda v: v, x, x)).lower(x)
    wanted = {i: [float(i * factor), float((i + 1) * factor)] for i in mine}
    assert run(lambda x: hc.call(lambda v: v * factor, x, x)) == wanted
    def shard(v):
        return hc.call(lambda v: v * factor, v, v, order="unordered")
    assert run(jax.shard_map(shard, mesh=mesh, in_specs=P("x"), out_specs=P("x"))) == wanted
if me == 0:
    try:
        jax.jit(lambda x: hc.tap(print, x, sharding="shards")).lower(x)
    except hc.HostcallError as error:
        assert "jax_share_binary_between_hosts" in str(error), error
        print("refused")
print("done")
"""
    )
    assert (first, second) == (["refused", "done"], ["done"])
