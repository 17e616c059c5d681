"""Callbacks die with their programs; memory stays flat; the disk cache is safe."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall import _native

SCALAR = jax.ShapeDtypeStruct((), np.float32)


class Held:
    """Something a function closes over."""


def resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


def test_a_callback_dies_with_its_program():
    held = Held()
    gone = weakref.ref(held)
    f = jax.jit(lambda v, held=held: hc.call(lambda a: (held, a)[1], v, v))
    f(jnp.float32(1)).block_until_ready()
    assert _native.live_slots() == 1
    del held, f
    jax.clear_caches()
    gc.collect()
    _native.bury()
    assert _native.live_slots() == 0
    assert gone() is None


def test_an_ahead_of_time_program_keeps_its_callback():
    held = Held()
    gone = weakref.ref(held)

    def compiled(mine):
        f = jax.jit(lambda v: hc.call(lambda a: (mine, a + 1)[1], v, v))
        return f.lower(jnp.float32(1)).compile()

    program = compiled(held)
    del held
    jax.clear_caches()
    gc.collect()
    assert gone() is not None
    assert program(jnp.float32(1)) == 2
    del program
    gc.collect()
    _native.bury()
    assert gone() is None


def test_slots_are_used_again():
    for _ in range(5):
        f = jax.jit(lambda v: hc.call(lambda a: a, v, v))
        assert "slot = 1 :" in f.lower(jnp.float32(1)).as_text()
        del f
        jax.clear_caches()
        gc.collect()
        _native.bury()


def test_fresh_lambdas_called_eagerly_neither_compile_nor_grow():
    x = jnp.float32(1)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )

    def run(times):
        for i in range(times):
            assert hc.call(lambda a, i=i: a + i, SCALAR, x) == 1 + i

    run(500)
    gc.collect()
    before = resident_kib()
    compiled.clear()
    run(10_000)
    gc.collect()
    assert not [name for name in compiled if "host_call" in name]
    assert _native.live_slots() == 0
    assert resident_kib() - before < 8192


def test_jitted_fresh_lambdas_are_let_go():
    for i in range(20):
        f = jax.jit(lambda v, i=i: hc.call(lambda a: a + i, v, v))
        assert f(jnp.float32(1)) == 1 + i
        del f
    gc.collect()
    jax.clear_caches()
    gc.collect()
    _native.bury()
    assert _native.live_slots() == 0


CACHED = """
import sys
import jax, jax.numpy as jnp
import hostcall as hc
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(
    lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None
)
constant = float(sys.argv[2])
def host(a):
    return a + constant
x = jnp.arange(3, dtype=jnp.float32)
f = jax.jit(lambda v: hc.call(host, v, v) * 2)
print(f(x).tolist(), len(hits) > 0)
"""


def test_a_second_process_hits_the_disk_cache_and_runs_its_own(run_python, tmp_path):
    first = run_python(CACHED, str(tmp_path), "1")
    second = run_python(CACHED, str(tmp_path), "100")
    assert first.stdout.strip() == "[2.0, 4.0, 6.0] False"
    assert second.stdout.strip() == "[200.0, 202.0, 204.0] True"
