"""Compiles every face for a chip that is not here: `chip_faces.py CHIP DEVICES FORM`.

XLA's compilers for CUDA and TPUs need no hardware (docs/gpu.md). For each face a line
of JSON says what is in the compiled program: its custom calls by their targets, sends
and receives, and collectives.
"""

from __future__ import annotations

import collections
import json
import re
import sys

import variables

# Before JAX is imported, and not in tests, which import this file.
if __name__ == "__main__":
    variables.start_no_chip()

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc

# What XLA's compiler wants to know of a GPU.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  device_memory_size: 84978434048
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices(chip, count):
    if chip == "cuda":
        shape = {"target_config": H100, "topology": f"1x{count}x1"}
        return topologies.get_topology_desc("", "cuda", **shape).devices
    return topologies.get_topology_desc("v5e:2x2", "tpu").devices[:count]


def double(x):
    return np.asarray(x) * 2


def note(*_):
    pass


def items():
    while True:
        yield np.zeros((8, 128), np.float32)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


SPEC = jax.ShapeDtypeStruct((8, 128), jnp.float32)
FEED = hc.feed(items, on_end="repeat", spec=SPEC)
SINE = hc.host(np.sin, result=hc.results.like(0))
SINE.defvjp(lambda x: (np.sin(x), np.cos(x)), lambda c, g: (c * g,))


def after(do):
    """A program that does something with its argument, and returns it."""

    def program(x):
        do(x)
        return x * 2

    return program


def loop(body):
    def program(x):
        return jax.lax.fori_loop(0, 3, lambda _, c: body(c), x)

    return program


FACES = {
    "call": lambda x: hc.call(double, like(x), x),
    "call unordered": lambda x: hc.call(double, like(x), x, order="unordered"),
    "call ordered": lambda x: hc.call(double, like(x), x, order="ordered"),
    "call no arguments": lambda x: x + hc.call(lambda: np.float32(1), x[0, 0]),
    "call no results": after(lambda x: hc.call(note, None, x, order="ordered")),
    "call rows": jax.vmap(lambda r: hc.call(double, like(r), r)),
    "call where": lambda x: hc.call(double, like(x), x, where=x.sum() > 0),
    "call in a loop": loop(lambda x: hc.call(double, like(x), x, order="ordered")),
    "call in a branch": lambda x: jax.lax.cond(
        x.sum() > 0, lambda x: hc.call(double, like(x), x), lambda x: x, x
    ),
    "call of bits": lambda x: hc.call(lambda a: a, x[0] > 0, x[0] > 0),
    "tap": after(lambda x: hc.tap(note, x)),
    "tap ordered": after(lambda x: hc.tap(note, x, order="ordered")),
    "tap in a loop": loop(after(lambda x: hc.tap(note, x, every=10))),
    "print": after(lambda x: hc.print("{}", x)),
    "feed": lambda x: x + FEED()[0][: len(x)],
    "host": SINE,
    "host gradient": jax.grad(lambda x: SINE(x).sum()),
    "pure_callback": lambda x: hc.pure_callback(double, like(x), x),
    "io_callback": lambda x: hc.io_callback(double, like(x), x),
    "io_callback ordered": lambda x: hc.io_callback(double, like(x), x, ordered=True),
    "debug.callback": after(lambda x: hc.debug.callback(note, x)),
    "debug.print": after(lambda x: hc.debug.print("{}", x)),
    "buffer_callback": lambda x: hc.buffers.buffer_callback(note, like(x))(x),
    "a target that nobody registered": lambda x: jax.ffi.ffi_call("nobody", like(x))(x),
}
LETTERS = {"all-gather": r"\ball-gather(?:-start)?\(", "send": r"\bsend\("}
LETTERS |= {"recv": r"\brecv\(", "all-reduce": r"\ball-reduce(?:-start)?\("}


def contents(text):
    """What a compiled program has."""
    targets = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text))
    ours = {name: n for name, n in targets.items() if name.startswith("hostcall")}
    found = {name: len(re.findall(letter, text)) for name, letter in LETTERS.items()}
    return ours | {name: n for name, n in found.items() if n}


def compiled(face, chip, of, form):
    if len(of) == 1:
        sharding = SingleDeviceSharding(of[0])
    else:
        mesh = Mesh(np.array(of), "d")
        sharding = NamedSharding(mesh, P("d"))
        if form == "shard_map":
            whole = {"mesh": mesh, "in_specs": P("d"), "out_specs": P("d")}
            face = jax.shard_map(face, **whole, check_vma=False)
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=sharding)
    return jax.jit(face).trace(x).lower(lowering_platforms=(chip,)).compile()


def main(chip, count, form):
    of = devices(chip, int(count))
    for name, face in FACES.items():
        try:
            has = contents(compiled(face, chip, of, form).as_text())
        except Exception as error:
            has = f"{type(error).__name__}: {str(error)[:300]}"
        print(json.dumps([name, has]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
