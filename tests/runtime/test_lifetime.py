"""Callbacks die with their programs; memory stays flat; the disk cache is safe."""

from __future__ import annotations

import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from limits import resident_kib
from platforms import late_square

import hostcall as hc

SCALAR = jax.ShapeDtypeStruct((), np.float32)


class Held:
    """An object that a function closes over."""


def test_a_callback_dies_with_its_program(in_time):
    held = Held()
    gone = weakref.ref(held)
    f = jax.jit(lambda v, held=held: hc.call(lambda a: (held, a)[1], v, v))
    f(jnp.float32(1)).block_until_ready()
    del held
    gc.collect()
    assert gone() is not None
    del f
    jax.clear_caches()
    assert in_time(lambda: gone() is None)


def test_an_ahead_of_time_program_keeps_its_callback(in_time):
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
    assert in_time(lambda: gone() is None)


def test_slots_are_used_again(in_time):
    for _ in range(5):
        same = lambda a: a
        gone = weakref.ref(same)
        f = jax.jit(lambda v, same=same: hc.call(same, v, v))
        assert "count = 1 :" in f.lower(jnp.float32(1)).as_text()
        del f, same
        jax.clear_caches()
        assert in_time(lambda: gone() is None)


def test_fresh_lambdas_called_eagerly_neither_compile_nor_grow():
    x = jnp.float32(1)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )

    alive = weakref.WeakSet()

    def run(times):
        for i in range(times):
            add = lambda a, i=i: a + i
            alive.add(add)
            assert hc.call(add, SCALAR, x) == 1 + i

    run(500)
    gc.collect()
    before = resident_kib()
    compiled.clear()
    run(5_000)
    gc.collect()
    assert not [name for name in compiled if "host_call" in name]
    assert not alive
    assert resident_kib() - before < 4096


def test_jitted_fresh_lambdas_are_let_go(in_time):
    alive = weakref.WeakSet()
    for i in range(20):
        add = lambda a, i=i: a + i
        alive.add(add)
        f = jax.jit(lambda v, add=add: hc.call(add, v, v))
        assert f(jnp.float32(1)) == 1 + i
        del f, add
    gc.collect()
    jax.clear_caches()
    assert in_time(lambda: not alive)


# --- Without clearing JAX's caches, as in users' programs ---------------------------


class Model:
    """An object that a callback holds."""

    def double(self, x):
        return 2 * x


@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_callback_dies_when_its_program_is_dropped(order, calls, in_time):
    model = Model()
    program = jax.jit(lambda x, fn=model.double: hc.call(fn, SCALAR, x, order=order))
    compiled = program.lower(1.0).compile()
    for _ in range(calls):
        assert compiled(2.0) == 4
        assert program(2.0) == 4
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is not None
    del compiled, program
    assert in_time(lambda: ref() is None)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: functools.partial(Model.double, m),
        lambda m: lambda x: m.double(x),
        lambda m: m.double,
        lambda m: type("Callable", (), {"__call__": lambda self, x: m.double(x)})(),
    ],
    ids=["partial", "closure", "method", "object"],
)
@pytest.mark.parametrize("batch", [False, True])
def test_every_kind_of_callable_is_let_go(make, batch, in_time):
    model = Model()
    row = lambda x, fn=make(model): hc.call(fn, SCALAR, x)
    program = jax.jit(jax.vmap(row) if batch else row)
    program(jnp.arange(3.0) if batch else 2.0).block_until_ready()
    ref = weakref.ref(model)
    del model, row, program
    assert in_time(lambda: ref() is None)


def test_static_arguments_are_let_go(in_time):
    token = Model()
    program = jax.jit(lambda x, t=token: hc.call(lambda x, t: x, SCALAR, x, t))
    assert program(1.0) == 1
    ref = weakref.ref(token)
    del token, program
    assert in_time(lambda: ref() is None)


def test_programs_of_fresh_functions_do_not_grow(in_time):
    block = np.zeros(1 << 20, np.uint8)

    def run(times):
        for i in range(times):
            held = block.copy()
            f = jax.jit(lambda x, b=held: hc.call(lambda x: x + b[0], SCALAR, x))
            assert f(float(i)) == i

    run(10)
    gc.collect()
    before = resident_kib()
    run(60)
    # Sixty blocks would be twice that.
    assert in_time(lambda: resident_kib() - before < 30 * 1024)


def test_failing_calls_do_not_keep_what_they_had():
    blocks = []

    def failing(x):
        block = np.ones(8)  # a frame of the traceback holds it
        blocks.append(weakref.ref(block))
        raise ValueError(block[0])

    for _ in range(400):
        with pytest.raises(ValueError, match="1"):
            hc.call(failing, SCALAR, 0.0)
    gc.collect()
    assert len(blocks) == 400
    assert sum(ref() is not None for ref in blocks) <= 1  # the newest error's


def test_a_program_that_is_dropped_while_it_runs_ends(in_time):
    """A pure call: with other calls, the dispatching frame holds the program until it
    ends.
    """
    entered, go, seen = threading.Event(), threading.Event(), []

    def host(x):
        entered.set()
        go.wait()
        seen.append(float(x[0, 0]))
        return x

    # Large enough that XLA runs it on one of its own threads.
    x = jnp.ones(late_square(1000))
    program = jax.jit(lambda x: hc.call(host, x, x @ x) + 1)
    y = program(x)
    entered.wait()
    del program
    jax.clear_caches()
    assert in_time(lambda: True)  # frees it at once, not when the watcher next does
    go.set()
    assert y[0, 0] == 1001
    assert seen == [x.shape[0]]


CACHED = """
import gc, sys
import jax, jax.numpy as jnp
import hostcall as hc
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(
    lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None
)
x = jnp.arange(3, dtype=jnp.float32)
def run(constant):
    hits.clear()
    def host(a):
        return a + constant
    f = jax.jit(lambda v: hc.call(host, v, v) * 2)
    print(f(x).tolist(), len(hits) > 0)
run(float(sys.argv[2]))
jax.clear_caches()
gc.collect()
run(float(sys.argv[2]) + 1)
"""


def test_the_disk_cache_is_hit_and_every_program_runs_its_own(run_python, tmp_path):
    """It is hit in another process, and by another function in the same process."""
    first = run_python(CACHED, str(tmp_path), "1")
    second = run_python(CACHED, str(tmp_path), "100")
    assert first.stdout.splitlines() == [
        "[2.0, 4.0, 6.0] False",
        "[4.0, 6.0, 8.0] True",
    ]
    assert second.stdout.splitlines() == [
        "[200.0, 202.0, 204.0] True",
        "[202.0, 204.0, 206.0] True",
    ]


@pytest.mark.parametrize("mode", ["each", "once"])
def test_functions_of_programs_over_devices_die_with_them(mode, in_time):
    """The threads on which devices meet keep none of them."""
    mesh = jax.make_mesh((2,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    x = jax.device_put(jnp.ones(2), jax.sharding.NamedSharding(mesh, spec))
    gone = []
    for number in range(5):

        def host(a, number=number):
            return a + number

        def program(v, host=host):
            return hc.call(host, v, v)

        if mode == "each":
            program = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec)
        assert jax.jit(program)(x).tolist() == [1 + number] * 2
        gone.append(weakref.ref(host))
        del host, program
    jax.clear_caches()
    assert in_time(lambda: not any(reference() for reference in gone))


def test_what_a_program_held_dies_without_further_calls():
    """If its last reference goes on a thread without the GIL, the watcher has to bury
    it.
    """
    entered, leave = threading.Event(), threading.Event()
    held = Held()
    gone = weakref.ref(held)

    def host(a, held=held):
        entered.set()
        leave.wait(60)
        return a

    m = jnp.ones(late_square(600))
    f = jax.jit(lambda m, host=host: hc.call(host, m, m @ m))
    y = f(m)
    assert entered.wait(60)
    del f, host, held
    jax.clear_caches()
    gc.collect()
    leave.set()
    y.block_until_ready()
    while gone() is not None:  # the limit is the test's own
        gc.collect()
