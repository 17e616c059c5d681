"""How long callbacks live, and what is kept of them: programs, memory, disk cache."""

import functools
import gc
import logging
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall import _native

F32 = jax.ShapeDtypeStruct((), jnp.float32)
ORDERS = ("pure", "unordered", "ordered")


class Model:
    """Something that a callback holds."""

    def double(self, x):
        return 2 * x


def collected(*refs):
    """Whether the objects are gone, once everything that is dead is buried."""
    jax.effects_barrier()
    for _ in range(2):
        gc.collect()
        _native.bury()
    return [ref() is None for ref in refs] == [True] * len(refs)


# --- Programs ----------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_callback_dies_with_its_program(order, calls):
    model = Model()
    program = jax.jit(lambda x: hc.call(model.double, F32, x, order=order))
    compiled = program.lower(1.0).compile()
    for _ in range(calls):
        assert compiled(2.0) == 4
        assert program(2.0) == 4
    ref = weakref.ref(model)
    del model
    assert not collected(ref)
    assert _native.live_slots() >= 1
    del compiled, program
    assert collected(ref)
    assert _native.live_slots() == 0


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
def test_every_kind_of_callable_is_let_go(make, batch):
    model = Model()
    row = lambda x, fn=make(model): hc.call(fn, F32, x)
    program = jax.jit(jax.vmap(row, in_axes=0) if batch else row)
    program(jnp.arange(3.0) if batch else 2.0).block_until_ready()
    ref = weakref.ref(model)
    del model, row, program
    assert collected(ref)
    assert _native.live_slots() == 0


def test_static_arguments_are_let_go():
    token = Model()
    program = jax.jit(lambda x, t=token: hc.call(lambda x, t: x, F32, x, t))
    assert program(1.0) == 1
    ref = weakref.ref(token)
    del token, program
    assert collected(ref)


def test_arguments_and_results_are_let_go():
    class Tracked(np.ndarray):
        pass

    refs = []

    def host(x):
        out = (x + 1).view(Tracked)
        refs.append(weakref.ref(out))
        return out

    program = jax.jit(lambda x: hc.call(host, F32, x, order="unordered"))
    for i in range(5):
        program(float(i)).block_until_ready()
        hc.call(host, F32, float(i))
    assert len(refs) == 10
    assert collected(*refs)


@pytest.mark.parametrize("order", ORDERS)
def test_a_program_that_is_dropped_while_it_runs_ends(order):
    entered, go, seen = threading.Event(), threading.Event(), []

    def host(x):
        entered.set()
        go.wait()
        seen.append(float(x[0, 0]))
        return x

    # Large enough for XLA to run it on a thread of its own.
    x = jnp.ones((1000, 1000))
    program = jax.jit(lambda x: hc.call(host, x, x @ x, order=order) + 1)
    y = program(x)
    entered.wait()
    del program
    jax.clear_caches()
    gc.collect()
    _native.bury()
    go.set()
    assert y[0, 0] == 1001
    assert seen == [1000]


def test_slots_are_used_again():
    def program(i):
        return jax.jit(lambda x: hc.call(lambda x: x + i, F32, x))

    kept = [program(i) for i in range(3)]
    assert [p(0.0) for p in kept] == [0, 1, 2]
    assert _native.live_slots() == 3
    for i in range(20):
        assert program(i)(1.0) == 1 + i
        gc.collect()
    assert _native.live_slots() == 3
    assert [p(1.0) for p in kept] == [1, 2, 3]


def test_jax_finds_the_same_call_again():
    traced = []

    def host(x):
        return x

    @jax.jit
    def inner(x):
        traced.append(x)
        return hc.call(host, F32, x)

    for _ in range(3):
        assert jax.jit(lambda x: inner(x) + inner(x))(1.0) == 2
    assert len(traced) == 1


# --- Fresh functions ---------------------------------------------------------------


def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * 4096


class CountCompilations(logging.Handler):
    """Counts what JAX compiles inside a block."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def emit(self, record):
        self.count += "Compiling" in record.getMessage()

    def __enter__(self):
        self.levels = jax.config.jax_log_compiles
        jax.config.update("jax_log_compiles", True)
        self.logger = logging.getLogger("jax._src.interpreters.pxla")
        self.propagate, self.logger.propagate = self.logger.propagate, False
        self.logger.addHandler(self)
        return self

    def __exit__(self, *_):
        self.logger.removeHandler(self)
        self.logger.propagate = self.propagate
        jax.config.update("jax_log_compiles", self.levels)


@pytest.mark.filterwarnings("ignore:Finished:UserWarning")
def test_the_counter_counts():
    with CountCompilations() as compilations:
        jax.jit(lambda x: x * 3 + 1)(1.0)
    assert compilations.count >= 1


@pytest.mark.parametrize("order", ORDERS)
def test_eager_calls_of_fresh_lambdas_neither_compile_nor_grow(order):
    x = jnp.zeros(256)

    def many(n):
        for i in range(n):
            out = hc.call(lambda x, i=i: x + i, x, x, order=order)
        return out

    many(2_000)
    gc.collect()
    before = resident()
    with CountCompilations() as compilations:
        assert many(10_000)[0] == 9_999
    gc.collect()
    # 10,000 arguments and results of 1 KiB each would be 20 MB.
    assert resident() - before < 8 * 2**20
    assert compilations.count == 0
    assert _native.live_slots() == 0


def test_jitted_fresh_lambdas_do_not_grow():
    block = np.zeros(1 << 20, np.uint8)

    def many(n):
        for i in range(n):
            held = block.copy()
            step = jax.jit(lambda x, held=held: hc.call(lambda x: x + held[0], F32, x))
            assert step(float(i)) == i

    many(10)
    gc.collect()
    before = resident()
    many(60)
    gc.collect()
    _native.bury()
    # Sixty copies of the block would be 60 MB.
    assert resident() - before < 30 * 2**20
    assert _native.live_slots() == 0


def test_failing_calls_do_not_grow():
    def failing(x):
        block = np.ones(1 << 18, np.uint8)  # held by a frame of the traceback
        raise ValueError(block[0])

    def many(n):
        for _ in range(n):
            with pytest.raises(ValueError, match="1"):
                hc.call(failing, F32, 0.0)

    many(50)
    gc.collect()
    before = resident()
    many(400)
    gc.collect()
    # Four hundred blocks would be 100 MB; the newest 32 are kept.
    assert resident() - before < 16 * 2**20


# --- The compilation cache on disk -------------------------------------------------

CACHED = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
import hostcall as hc

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))

def host(x):
    return x + CONSTANT

@jax.jit
def program(x):
    row = lambda x: hc.call(host, x, x, order="ORDER")
    return jax.vmap(row)(x) * 2

x = jnp.arange(4.0)
events.clear()
y = program(x)
print(events.count("/jax/compilation_cache/cache_hits"))
print(y.tolist())
"""


@pytest.mark.parametrize("order", ORDERS)
def test_a_cached_program_runs_the_function_of_its_process(run_python, tmp_path, order):
    source = CACHED.replace("ORDER", order)
    for run, constant in enumerate((1.0, 10.0)):
        done = run_python(source.replace("CONSTANT", str(constant)), str(tmp_path))
        hits, result = done.stdout.splitlines()
        assert result == str([2 * (x + constant) for x in range(4)])
        assert int(hits) == (run > 0)


def test_cached_programs_with_many_calls_find_each_its_own(run_python, tmp_path):
    source = CACHED.replace("ORDER", "pure").replace(
        "    return jax.vmap(row)(x) * 2",
        "    a = hc.call(host, x, x); b = hc.call(lambda x: x * CONSTANT, x, x)\n"
        "    return a + 100 * b",
    )
    for run, constant in enumerate((2.0, 3.0)):
        done = run_python(source.replace("CONSTANT", str(constant)), str(tmp_path))
        hits, result = done.stdout.splitlines()
        want = [x + constant + 100 * (x * constant) for x in range(4)]
        assert result == str(want)
        assert int(hits) == (run > 0)
