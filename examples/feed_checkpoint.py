"""Training that is killed and resumed: the same numbers as without the kill.

Orbax saves the weights and the position of the feed together, after each chunk of
steps. A child process trains and is killed by SIGKILL; another one resumes from what is
on the disk. The parent trains without an interruption, and compares.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import hostcall as hc

CHUNKS, STEPS, BATCH = 8, 25, 16  # an epoch is 64 items, so chunks end inside of one
rng = np.random.default_rng(0)
X = rng.normal(size=(1024, 8)).astype(np.float32)
Y = X @ rng.normal(size=8).astype(np.float32)


def loader(epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    order = np.random.default_rng(epoch).permutation(len(X))
    for rows in order.reshape(-1, BATCH):
        yield X[rows], Y[rows]


def train(folder: Path | None, kill_after: int | None = None) -> jax.Array:
    with hc.feed(loader, on_end="repeat") as feed:

        @jax.jit
        def chunk(w: jax.Array) -> jax.Array:
            def body(w: jax.Array, _: None) -> tuple[jax.Array, None]:
                (x, y), _ok = feed()
                return w - 0.02 * jax.grad(lambda w: ((x @ w - y) ** 2).mean())(w), None

            return jax.lax.scan(body, w, length=STEPS)[0]

        w, done = jnp.zeros(8), 0
        if folder is None:
            for _ in range(CHUNKS):
                w = chunk(w)
            return w
        with ocp.CheckpointManager(folder) as saved:
            last = saved.latest_step()
            if last is not None:
                found = saved.restore(
                    last,
                    args=ocp.args.Composite(
                        w=ocp.args.ArrayRestore(), feed=ocp.args.JsonRestore()
                    ),
                )
                w, done = jnp.asarray(found["w"]), last
                feed.restore(found["feed"])
            while done < CHUNKS:
                w = jax.block_until_ready(chunk(w))
                done += 1
                saved.save(
                    done,
                    args=ocp.args.Composite(
                        w=ocp.args.ArraySave(w), feed=ocp.args.JsonSave(feed.state())
                    ),
                )
                saved.wait_until_finished()
                if done == kill_after:
                    signal.raise_signal(signal.SIGKILL)
        return w


def child(folder: str, *kill_after: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, __file__, folder, *kill_after]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> None:
    wanted = np.asarray(train(None))
    with tempfile.TemporaryDirectory() as folder:
        killed = child(folder, "3")
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        resumed = child(folder)
        assert resumed.returncode == 0, resumed.stderr
    found = np.array([float.fromhex(number) for number in resumed.stdout.split()])
    print(f"killed after 3 chunks of {STEPS} steps, resumed: w = {found}")
    np.testing.assert_array_equal(found, wanted)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        w = train(Path(sys.argv[1]), *map(int, sys.argv[2:]))
        print(*(float(number).hex() for number in w))
