"""A job of two processes on one machine: what runs where.

The program starts itself twice. The two copies connect by loopback, and run one program
over four devices, two of each process. A simulator has one object for each device, each
in the process of its device; process 0 writes the checkpoint of all of them.
"""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

PROCESSES, DEVICES = 2, 2


def parent() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            subprocess.Popen(
                [sys.executable, __file__, str(me), str(port), folder],
                stdout=subprocess.PIPE,
                text=True,
            )
            for me in range(PROCESSES)
        ]
        said = [job.communicate(timeout=120)[0] for job in jobs]
    assert all(job.returncode == 0 for job in jobs)
    for me, text in enumerate(said):
        lines = [line for line in text.splitlines() if line.startswith("process ")]
        assert lines, text
        print(*lines, sep="\n")
        # The sum was printed once in the job, the parts once in each process.
        assert ("the sum is 28" in text) == (me == 0)
        print("all processes agree")


def child(me: int, port: str, folder: Path) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    jax.distributed.initialize(f"localhost:{port}", PROCESSES, me)
    import hostcall as hc

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding, over = NamedSharding(mesh, PartitionSpec("x")), PartitionSpec("x")
    items = np.arange(8, dtype=np.float32)
    x = jax.make_array_from_callback(items.shape, sharding, lambda index: items[index])

    # --- A call is made once, and all devices of all processes get its results.
    def host(v: np.ndarray) -> np.ndarray:
        here = hc.current()
        assert here is not None
        assert here.process == 0
        assert here.processes == PROCESSES
        return np.sort(v)[::-1]

    blocks: dict[int, float] = {}

    def note(v: np.ndarray) -> None:
        here = hc.current()
        assert here is not None
        assert here.block is not None
        blocks[here.block[0][0]] = float(v.sum())

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        hc.print("process 0 says that the sum is {:.0f}", x.sum())  # on="once"
        hc.tap(note, x, on="shards")
        return hc.call(host, x, x)

    out = step(x)
    hc.barrier()
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, items[::-1][shard.index])
    assert blocks == {i: float(items[2 * i] * 2 + 1) for i in (2 * me, 2 * me + 1)}

    # --- An object for each device lives in its device's process.
    class Walker:
        def __init__(self, index: tuple[int, ...]) -> None:
            self.place = 10.0 * index[0]

        def move(self, by: np.ndarray) -> np.float32:
            self.place += float(by)
            return np.float32(self.place)

    number = jax.ShapeDtypeStruct((), np.float32)
    walkers = hc.Object(Walker, methods={"move": number}, save=vars, restore=put)
    move = jax.jit(
        jax.shard_map(
            lambda v: v * 0 + walkers.move(v[0]),
            mesh=mesh,
            in_specs=over,
            out_specs=over,
        )
    )
    first = move(x)
    # Each process saves its own objects.
    (folder / f"walkers-{me}").write_bytes(pickle.dumps(walkers.save()))
    second = move(x)
    walkers.restore(pickle.loads((folder / f"walkers-{me}").read_bytes()))
    again = move(x)
    for a, b, c in zip(
        *(y.addressable_shards for y in (first, second, again)), strict=True
    ):
        at = a.index[0].start
        assert float(a.data[0]) == 10.0 * (at // 2) + at
        assert float(b.data[0]) == float(c.data[0]) == float(a.data[0]) + at

    # --- What all processes are doing, also if their programs hang.
    found = hc.monitor.status(processes="all", limit=60)
    assert [process.answered for process in found] == [True] * PROCESSES
    total = jax.jit(jnp.sum)(x)
    print(
        f"process {me} ends, and the sum is still {float(total):.0f} here", flush=True
    )


def put(walker: object, state: dict[str, float]) -> None:
    vars(walker).update(state)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    else:
        parent()
