"""What JAX's fast dispatch must not change: values, order, counts, errors, barriers.

Each program here has effects and is dispatched in C++, where nothing hands tokens from
program to program (`_jax/fast_dispatch.py`).
"""

from __future__ import annotations

import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from platforms import late_square

import hostcall as hc

SCALAR = jax.ShapeDtypeStruct((), np.float32)
I32 = jax.ShapeDtypeStruct((), np.int32)


@pytest.fixture(scope="module")
def slow():
    """A program that JAX dispatches at once, and whose result is ready much later."""
    m = jax.block_until_ready(jnp.ones(late_square(400)))

    def body(c, _):
        return jnp.sin(c @ c) * 0.01, None

    f = jax.jit(lambda m: lax.scan(body, m, length=25)[0].sum() * 0)
    jax.block_until_ready(f(m))
    return lambda: f(m)


class Log:
    """What host code has seen."""

    def __init__(self):
        self.seen = []

    def __call__(self, i, x):
        self.seen.append(int(i))
        return np.float32(x)

    def nothing(self, i, x):
        self.seen.append(int(i))


def ordered(log, i, x):
    return hc.call(log, SCALAR, i, x, order="ordered")


def in_loop(log, i, x):
    """Three calls, with the numbers 10 i, 10 i + 1, 10 i + 2."""

    def body(c, k):
        return hc.call(log, SCALAR, 10 * i + k, c, order="ordered"), None

    return lax.scan(body, x, jnp.arange(3))[0]


def drop_in(log, i, x):
    return hc.io_callback(log, SCALAR, i, x, ordered=True)


def tap(log, i, x):
    hc.tap(log.nothing, i, x, order="ordered")
    return x


ORDERED = {"call": ordered, "loop": in_loop, "drop-in": drop_in, "tap": tap}
BARRIERS = {
    "hc.barrier": hc.barrier,
    "with a limit": lambda: hc.barrier(60),
    "effects_barrier": jax.effects_barrier,
}


def program(kind, log):
    f = jax.jit(lambda i, x: ORDERED[kind](log, i, x))
    jax.block_until_ready(f(0, np.float32(0)))
    hc.barrier()
    log.seen.clear()
    return f


def numbers(kind, i):
    return [10 * i, 10 * i + 1, 10 * i + 2] if kind == "loop" else [i]


# --- Order ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ORDERED)
def test_programs_of_a_thread_are_in_order(kind, slow):
    """Also if the first of them has to wait for its input, and the second does not."""
    log = Log()
    f, g = program(kind, log), program(kind, log)
    want = []
    for i in range(0, 40, 4):
        f(i, np.float32(1))
        f(i + 1, slow())
        g(i + 2, np.float32(1))
        f(i + 3, np.float32(1))
        want += [n for k in range(i, i + 4) for n in numbers(kind, k)]
    hc.barrier()
    assert log.seen == want


@pytest.mark.parametrize("loaded", [False, True], ids=["", "loaded"])
def test_programs_over_one_device_and_over_several(loaded, slow):
    """Each device's calls are in the order of the dispatches."""
    n = len(jax.devices())
    seen = {k: [] for k in range(n)}
    spec = jax.P("x")
    mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    @hc.register(f"tests.fast_dispatch.note{loaded}")
    def note(device, i):
        time.sleep(0.002 * (device == n - 1))  # the last device ends after the others
        seen[int(device)].append(int(i))
        return np.int32(i)

    def block(devices, i):
        return hc.call(note, I32, devices[0], i, order="ordered")[None]

    def both(devices, i):
        specs = (spec, jax.P())
        f = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=spec)
        return f(devices, i)

    def note_of(k, i):
        return hc.call(note, I32, k, i, order="ordered")

    sharding = jax.NamedSharding(mesh, spec)
    devices = jax.device_put(jnp.arange(n), sharding)
    whole = jax.device_put(jnp.int32(0), jax.NamedSharding(mesh, jax.P()))
    many = jax.jit(both)
    jax.block_until_ready(many(devices, whole))
    seen = {k: [] for k in range(n)}
    if loaded:  # its effect is another object than that of the first token, and equal
        pytest.importorskip("flatbuffers")
        many = jax.jit(hc.load(bytes(hc.export(many)(devices, whole))).call)
    one = jax.jit(lambda k, i, x: (note_of(k, i), x)[0])
    last = jax.device_put(jnp.int32(n - 1), jax.devices()[-1])
    for i in range(0, 60, 3):
        many(devices, whole + i)
        one(0, i + 1, np.float32(0))
        one(0, i + 2, slow())
        one(last, i + 1, 0)
    hc.barrier()
    assert seen[0] == list(range(60))
    assert seen[n - 1] == [i for i in range(60) if n == 1 or i % 3 != 2]


def test_mixed_programs_of_four_threads():
    """10,000 dispatches: each value once, and ordered ones in the thread's order."""
    lock, seen = threading.Lock(), {}

    def note(kind, thread, i):
        with lock:
            seen.setdefault((int(kind), int(thread)), []).append(int(i))
        return np.int32(i)

    def silent(kind, thread, i):
        note(kind, thread, i)

    def unordered(thread, i):
        return hc.call(note, I32, 1, thread, i, order="unordered")

    def tapped(thread, i):
        hc.tap(silent, 2, thread, i)
        return i

    def loop(thread, i):
        def body(_, k):
            return hc.call(note, I32, 3, thread, 3 * i + k, order="ordered"), None

        return lax.scan(body, jnp.int32(0), jnp.arange(3))[0]

    programs = [
        jax.jit(lambda t, i: hc.call(note, I32, 0, t, i, order="ordered")),
        jax.jit(unordered),
        jax.jit(tapped),
        jax.jit(loop),
        jax.jit(lambda t, i: hc.io_callback(note, I32, 4, t, i, ordered=True)),
    ]

    def work(thread):
        for i in range(500):
            for f in programs:
                f(thread, i)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hc.barrier()
    for thread in range(4):
        for kind in range(5):
            got = seen[kind, thread]
            want = list(range(1500 if kind == 3 else 500))
            assert (sorted(got) if kind in (1, 2) else got) == want, (kind, thread)


# --- Barriers and errors --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["call", "loop", "drop-in"])
def test_barriers_wait_for_programs_whose_results_are_dropped(kind, slow):
    log = Log()
    f = program(kind, log)
    for barrier in BARRIERS.values():
        log.seen.clear()
        for i in range(5):
            f(i, slow())
            barrier()
            assert log.seen == [n for k in range(i + 1) for n in numbers(kind, k)]


def test_a_barrier_waits_for_the_taps_of_such_a_program(slow):
    log = Log()
    f = program("tap", log)
    for i in range(5):
        f(i, slow())
        hc.barrier()
        assert log.seen == list(range(i + 1))


def failing(order="ordered", result=SCALAR):
    """A program that fails from its second run on, and has been on the fast path."""
    fails = []

    def host(x):
        if fails:
            raise ValueError("no such row")
        return None if result is None else x

    f = jax.jit(lambda x: hc.call(host, result, x, order=order))
    for x in 3 * [np.float32(1), jnp.float32(1)]:
        jax.block_until_ready(f(x))
    fails.append(True)
    return f


ORDERS = ["ordered", "unordered"]


RESULTS = pytest.mark.parametrize("result", [SCALAR, None], ids=["result", "none"])


@RESULTS
@pytest.mark.parametrize("order", ORDERS)
def test_a_failure_is_raised_at_dispatch_and_not_again(order, result):
    f = failing(order, result)
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no such row"):
            f(np.float32(1))
        hc.barrier()
        jax.effects_barrier()


@RESULTS
@pytest.mark.parametrize("order", ORDERS)
def test_failures_behind_another_program_are_raised_by_barriers(order, result, slow):
    """Each barrier raises one."""
    f = failing(order, result)
    for barrier, n in itertools.product(BARRIERS.values(), (1, 3)):
        for _ in range(n):
            f(slow())  # the result is dropped
        for _ in range(n):
            with pytest.raises(jax.errors.JaxRuntimeError, match="no such row"):
                barrier()
        hc.barrier()
        jax.effects_barrier()


@pytest.mark.parametrize("order", ORDERS)
def test_a_failure_that_was_read_is_not_raised_again(order, slow):
    f = failing(order)
    y = f(slow())
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such row"):
        np.asarray(y)
    hc.barrier()
    jax.effects_barrier()


@RESULTS
@pytest.mark.parametrize("order", ORDERS)
def test_reraise_raises_the_functions_own_exception(order, result, slow):
    f = failing(order, result)
    for x in (lambda: np.float32(1), slow):
        with pytest.raises(ValueError, match="no such row"), hc.reraise():
            f(x())
        hc.barrier()


def test_a_bad_value_behind_another_program_is_logged_where_an_object_closes(
    slow, caplog
):
    """WatchError takes the report's place as soon as JAX makes one."""
    f = jax.jit(lambda x: (hc.watch(jnp.log(x - 1)), x)[1])
    for x in np.float32(2), jnp.float32(2):
        jax.block_until_ready(f(x))
    f(slow())
    hc.Object(dict, methods={"get": SCALAR}).close()
    assert "continues after a failed program" in caplog.text
    hc.barrier()


def test_ordered_calls_go_on_after_a_failure(slow):
    log = Log()
    f, bad = program("call", log), failing()
    f(0, np.float32(1))
    bad(slow())
    f(1, np.float32(1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such row"):
        hc.barrier()
    f(2, np.float32(1))
    assert log.seen == [0, 1, 2]


# --- Programs of every kind -----------------------------------------------------------


def counted(f, *args):
    """(values, numbers that host code saw) of `f(log)` at `args`, twice."""
    log = Log()
    g = f(log)
    got = [g(*args), g(*args)]
    hc.barrier()
    return jax.tree.map(np.asarray, got), log.seen


TABLE = np.float32([[3, 4], [5, 6]])


def closed_over(log):
    table = jnp.asarray(TABLE)
    return jax.jit(lambda x: ordered(log, 7, x) + table.sum() + TABLE[0, 0])


def donated(log):
    f = jax.jit(lambda x: ordered(log, 7, x) + 1, donate_argnums=0)
    return lambda x: f(jnp.asarray(x) * 1)


def nested(log):
    inner = jax.jit(lambda x: ordered(log, 7, x))
    return jax.jit(lambda x: inner(x) + inner(x + 1))


def ahead(log):
    return jax.jit(lambda x: ordered(log, 7, x)).lower(np.float32(0)).compile()


def under_cond(log):
    return jax.jit(lambda x: lax.cond(x > 0, lambda x: ordered(log, 7, x), jnp.sin, x))


def with_gradient(log):
    def f(x):
        return ordered(log, 7, lax.stop_gradient(x)) * x * x

    return jax.jit(jax.value_and_grad(jax.checkpoint(f)))


def unused_arguments(log):
    f = jax.jit(lambda a, x, b: ordered(log, 7, x))
    return lambda x: f(1.0, x, np.zeros(3))


def pytrees(log):
    f = jax.jit(lambda t: {"a": ordered(log, 7, t["x"]), "b": t["k"]})
    return lambda x: f({"x": x, "k": np.int32(3)})["a"]


def keyed(log):
    def f(x, key):
        return ordered(log, 7, x) + 0 * jax.random.normal(key)

    return lambda x: jax.jit(f)(x, jax.random.key(0))


PROGRAMS = {
    f.__name__: (f, want, calls)
    for f, want, calls in (
        (closed_over, 2 + TABLE.sum() + 3, 1),
        (donated, 3, 1),
        (nested, 5, 2),
        (ahead, 2, 1),
        (under_cond, 2, 1),
        (with_gradient, (8, 8), 1),
        (unused_arguments, 2, 1),
        (pytrees, 2, 1),
        (keyed, 2, 1),
    )
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_counts(name):
    make, want, calls = PROGRAMS[name]
    got, seen = counted(make, np.float32(2))
    for each in got:
        np.testing.assert_allclose(each, want)
    assert seen == [7] * calls * 2


@pytest.mark.parametrize("setting", ["jax_debug_nans", "jax_disable_jit"])
def test_settings_that_change_how_jax_dispatches(setting):
    log = Log()
    f = jax.jit(lambda x: ordered(log, 7, x))
    f(np.float32(2))
    with jax.enable_custom_prng(False), getattr(jax, setting[4:])(True):
        assert float(f(np.float32(2))) == 2
    assert log.seen == [7, 7]


def test_without_the_function_that_lowers_programs(run_python):
    """A later JAX may not ask it: then programs go through Python, and all holds."""
    run_python("""
        import jax, jax.numpy as jnp, numpy as np, hostcall as hc
        from jax._src.interpreters import pxla
        plain, dispatched = pxla.__dict__["_cached_lowering_to_hlo"], []
        jax.make_jaxpr(lambda x: hc.call(np.square, x, x))(1.0)  # replaces it
        assert pxla._cached_lowering_to_hlo is not plain
        pxla._cached_lowering_to_hlo = plain
        call = pxla.ExecuteReplicated.__call__
        def count(self, *args):
            dispatched.append(self.name)
            return call(self, *args)
        pxla.ExecuteReplicated.__call__ = count
        seen = []
        def host(x):
            seen.append(float(x))
            return x
        f = jax.jit(lambda x: hc.call(host, x, x, order="ordered"))
        for i in range(5):
            assert float(f(jnp.float32(i))) == i
        hc.barrier()
        jax.effects_barrier()
        assert seen == [0, 1, 2, 3, 4]
        assert sum("lambda" in name for name in dispatched) == 5, dispatched
    """)


def test_under_pgle(run_python):
    """JAX profiles the first runs of a program, and then lowers it anew."""
    run_python("""
        import jax, jax.numpy as jnp, numpy as np, hostcall as hc
        seen = []
        def host(x):
            seen.append(float(x))
            return x
        jax.config.update("jax_enable_pgle", True)
        jax.config.update("jax_pgle_profiling_runs", 2)
        f = jax.jit(lambda x: hc.call(host, x, x, order="ordered"))
        for i in range(8):
            assert float(f(jnp.float32(i))) == i
        hc.barrier()
        assert seen == list(range(8)), seen
    """)


def test_no_execution_refuses_it():
    log = Log()
    f = program("call", log)
    with jax.no_execution(), pytest.raises(RuntimeError, match="no_execution"):
        f(1, np.float32(0))
    hc.barrier()
    assert log.seen == []
    assert f(2, np.float32(3)) == 3
    assert log.seen == [2]


def test_while_the_profiler_records(tmp_path):
    log = Log()
    f = program("call", log)
    with jax.profiler.trace(str(tmp_path)):
        for i in range(5):
            f(i, np.float32(0))
    assert log.seen == list(range(5))
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_ctrl_c_while_it_is_dispatched(run_python):
    """The program is being dispatched when the signal comes: it runs on this thread."""
    run_python("""
        import signal, jax, jax.numpy as jnp, numpy as np, hostcall as hc
        signal.signal(signal.SIGINT, signal.default_int_handler)
        seen = []
        def host(i):
            seen.append(int(i))
            if len(seen) == 3:
                signal.raise_signal(signal.SIGINT)
            return i
        f = jax.jit(lambda i: hc.call(host, i, i, order="ordered"))
        i = 0
        try:
            for i in range(10):
                f(i)
        except KeyboardInterrupt:
            assert i == 2
        assert i == 2
        hc.barrier()
        jax.effects_barrier()
        for i in range(3, 6):
            assert f(i) == i
        assert seen == list(range(6))
    """)


def test_a_parent_goes_on_after_a_fork(run_python):
    run_python("""
        import os, jax, jax.numpy as jnp, hostcall as hc
        seen = []
        def host(i):
            seen.append(int(i))
            return i
        f = jax.jit(lambda i: hc.call(host, i, i, order="ordered"))
        for i in range(3):
            f(i)
        child = os.fork()
        if child == 0:
            hc.barrier()  # there is nothing to wait for, and it does not hang
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        for i in range(3, 6):
            f(i)
        hc.barrier()
        assert seen == list(range(6))
    """)


def test_exported_and_loaded_it_is_dispatched_fast_and_in_order(slow):
    pytest.importorskip("flatbuffers")
    seen = []

    @hc.register("tests.fast_dispatch.exported")
    def note(i, x):
        seen.append(int(i))
        return np.float32(x)

    f = jax.jit(lambda i, x: hc.call(note, SCALAR, i, x, order="ordered"))
    loaded = hc.load(bytes(hc.export(f)(I32, SCALAR)))
    g = jax.jit(loaded.call)
    for i in range(0, 9, 3):
        f(i, np.float32(0))
        g(i + 1, slow())
        f(i + 2, np.float32(0))
    hc.barrier()
    assert seen == list(range(9))


CACHED = """
import sys, jax, jax.numpy as jnp, hostcall as hc
folder, order = sys.argv[1:]
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(
    lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
seen = []
def host(i):
    seen.append(int(i))
    return i
@jax.jit
def step(i):
    return hc.call(host, i, i, order=order) + 1
i = jnp.int32(0)
hits.clear()
for _ in range(6):
    i = step(i)
hc.barrier()
assert seen == list(range(6)) and int(i) == 6
print(len(hits))
"""


@pytest.mark.parametrize("order", ORDERS)
def test_from_the_disk_cache(run_python, order, tmp_path):
    """JAX caches programs with host callbacks from 0.11 on."""
    first, again = (
        int(run_python(CACHED, str(tmp_path), order).stdout) for _ in range(2)
    )
    assert first == 0
    assert again == (jax.__version_info__ >= (0, 11))
