"""A profile of a small training loop, and what it shows without a viewer.

The loop logs through a tap and calls a slow host function every tenth step. The profile
goes to a temporary folder; open such a folder in TensorBoard, or its file in
https://ui.perfetto.dev.
"""

import gzip
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import hostcall as hc

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
losses: list[float] = []


def log(loss: jax.Array) -> None:
    losses.append(float(loss))


def schedule(loss: jax.Array) -> float:
    time.sleep(0.05)  # asks a server, say
    return 0.1 * min(float(loss), 1.0)


@jax.jit
def train(w: jax.Array) -> jax.Array:
    def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
        w, rate = carry
        loss = ((w - 3.0) ** 2).sum()
        asked = i % 10 == 0
        rate = jnp.where(asked, hc.call(schedule, SCALAR, loss, where=asked), rate)
        hc.tap(log, loss, tag="loss")
        return (w - rate * 2 * (w - 3.0), rate), None

    (w, _), _ = jax.lax.scan(step, (w, 0.1), jnp.arange(50))
    return w


train(jnp.zeros(4)).block_until_ready()  # compiles
hc.barrier()
losses.clear()
with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
        train(jnp.zeros(4)).block_until_ready()
        hc.barrier()
    (path,) = Path(folder).glob("plugins/profile/*/*.trace.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]

slices = [e for e in events if e.get("ph") == "X"]
calls = [e for e in slices if e["name"].startswith("call of schedule")]
deliveries = [e for e in slices if e["name"].startswith("delivery of loss")]

in_python = sum(e["dur"] for e in calls) / 1e3
print(f"{len(calls)} times {calls[0]['name']} took {in_python:.1f} ms")
print(f"{len(deliveries)} times {deliveries[0]['name']}")

assert len(calls) == 5  # the other steps are masked
assert len(deliveries) == len(losses) == 50
assert in_python >= 5 * 50
assert deliveries[0]["args"]["place"].split(":")[0] == __file__

print("\nThe flight recorder has the same, without a profile:")
flight = hc.monitor.flight()
print(*str(flight).splitlines()[:4], sep="\n")
assert len(flight) == 2 * 105

print("\nWhat it cost, and what to do about it:")
worst, *_ = hc.monitor.report()
assert worst.name.startswith("schedule")
