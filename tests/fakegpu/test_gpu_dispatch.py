"""Programs with effects on GPUs: JAX dispatches those on one GPU in C++, and they promise
what programs with tokens, as those on several, promise.

That is their order, the waits for their ends, and that a failure is raised once.
"""

from __future__ import annotations

import itertools
import threading

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from graphs import RECORDED
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc

# With tokens JAX dispatches in Python, and each `jax.effects_barrier` raises a failure again.
HAS_TOKENS = jaxlib.version.__version_info__ < (0, 12)
NO_TOKENS = pytest.mark.skipif(HAS_TOKENS, reason="jaxlib before 0.12 keeps tokens")
SCALAR = jax.ShapeDtypeStruct((), np.float32)
NUMBER = jax.ShapeDtypeStruct((), np.int32)
WAITS = [hc.barrier, jax.effects_barrier]
LIMIT = 60  # seconds: what takes longer hangs


def mesh():
    return jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


# --- Each kind of effect, on one GPU and on several ---------------------------------------


def called(order):
    return lambda host, x: hc.call(host, None, x, order=order)


FEED = hc.feed(itertools.repeat(np.float32(1)))
EFFECTS = {
    "unordered": called("unordered"),
    "ordered": called("ordered"),
    "tap": lambda host, x: hc.tap(host, x),
    "ordered tap": lambda host, x: hc.tap(host, x, order="ordered"),
    "print": lambda host, x: hc.print("{}", x),
    "progress": lambda host, x: hc.progress(jnp.int32(1), 10),
    "watch": lambda host, x: hc.watch(x),
    "drop-in": lambda host, x: hc.io_callback(host, None, x),
    "ordered drop-in": lambda host, x: hc.io_callback(host, None, x, ordered=True),
    "debug": lambda host, x: hc.debug.callback(host, x),
    "feed": lambda host, x: FEED(),
}


def on_one_gpu(effect, host):
    x = jax.device_put(np.float32(3), jax.devices()[0])
    return jax.jit(lambda x: (effect(host, x), x * 2)[1]), x


def without_results(effect, host):
    x = jax.device_put(np.float32(3), jax.devices()[1])
    return jax.jit(lambda x: (effect(host, x), None)[1]), x


def over_sharded_arrays(effect, host):
    x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh(), P("x")))
    return jax.jit(lambda x: (effect(host, x.sum()), x * 2)[1]), x


def in_shard_map(effect, host):
    def block(x):
        effect(host, x[0])
        return x + jax.lax.psum(x, "x")

    x = jax.device_put(np.arange(4, dtype=np.float32), NamedSharding(mesh(), P("x")))
    return jax.jit(
        jax.shard_map(block, mesh=mesh(), in_specs=P("x"), out_specs=P("x"))
    ), x


WAYS = {
    way.__name__: way
    for way in (on_one_gpu, without_results, over_sharded_arrays, in_shard_map)
}


@pytest.fixture
def dispatches(monkeypatch):
    """Grows by one with each dispatch that JAX makes in Python."""
    from jax._src.interpreters import pxla

    # What hostcall replaces in JAX is in place since the first program with a call; the
    # end of this fixture would take it away again if it came after.
    jax.jit(lambda: hc.call(lambda: np.float32(0), SCALAR))().block_until_ready()
    seen = []
    plain = pxla.ExecuteReplicated.__call__

    def call(self, *args):
        seen.append(1)
        return plain(self, *args)

    monkeypatch.setattr(pxla.ExecuteReplicated, "__call__", call)
    return seen


# XLA's compiler can't take programs over several GPUs without tokens.
ON_ONE_GPU = ("on_one_gpu", "without_results")
# JAX refuses ordered callbacks of its own over several devices, and so do the drop-ins.
CASES = [
    (way, effect)
    for way in WAYS
    for effect in EFFECTS
    if effect != "ordered drop-in" or way in ON_ONE_GPU
]


@NO_TOKENS
@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("way", ON_ONE_GPU)
def test_only_the_first_dispatch_is_in_python(way, effect, dispatches, capsys):
    f, x = WAYS[way](EFFECTS[effect], lambda v: None)
    f(x), f(x)
    hc.barrier()
    dispatches.clear()
    for _ in range(5):
        f(x)
    hc.barrier()
    assert dispatches == []


def test_ordered_programs_on_different_gpus_are_dispatched_in_python(dispatches):
    """They wait for each other, which C++ does not do."""
    seen = []

    def host(v):
        seen.append((hc.current().device.id, int(v)))

    programs = [jax.jit(lambda x: hc.tap(host, x, order="ordered")) for _ in range(4)]
    wanted = []
    for i in range(40):
        device = jax.devices()[i % 4]
        programs[i % 4](jax.device_put(np.int32(i), device))
        wanted.append((device.id, i))
    hc.barrier()
    assert seen == wanted
    assert len(dispatches) >= 40


# --- Order --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["one GPU", "four GPUs"])
def test_ten_thousand_mixed_effects_are_in_order(way):
    calls = []
    taps = []

    def call(i):
        calls.append(int(i))

    def tap(i):
        taps.append(int(i))

    @jax.jit
    def first(i):
        hc.call(call, None, i, order="ordered")
        hc.tap(tap, i)
        hc.call(call, None, i + 1, order="unordered")
        hc.tap(tap, i + 1, order="ordered")
        return i + 2

    @jax.jit
    def second(i):
        hc.io_callback(call, None, i)
        hc.debug.callback(call, i + 1)
        hc.tap(tap, i)
        hc.tap(tap, i + 1)
        return i + 2

    where = jax.devices()[0]
    if way == "four GPUs":
        where = NamedSharding(mesh(), P())
    i = jax.device_put(np.int32(0), where)
    for _ in range(1250):
        i = second(first(i))
    hc.barrier()
    assert calls == list(range(5000))
    assert taps == list(range(5000))


def test_mixed_programs_of_four_threads():
    """Each thread has a GPU of its own, and all of them share programs over all GPUs."""
    seen = [[] for _ in range(4)]
    everywhere = []

    def host(k, i):
        seen[k].append(int(i))

    @jax.jit
    def alone(k, i):
        hc.call(host, None, k, i, order="ordered")
        return k, i + 1

    @jax.jit
    def together(x):
        hc.tap(lambda v: everywhere.append(float(v)), x.sum())
        return x * 1

    x = jax.device_put(np.arange(4, dtype=np.float32), NamedSharding(mesh(), P("x")))

    def work(k):
        at = jax.device_put((np.int32(k), np.int32(0)), jax.devices()[k])
        for _ in range(50):
            at = alone(*at)
            together(x)
        hc.barrier()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)
    assert seen == [list(range(50))] * 4
    hc.barrier()
    assert everywhere == [6.0] * 200


# --- Waits --------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("way", WAYS)
def test_waits_wait_for_the_end_of_a_program(way, wait, driver):
    f, x = WAYS[way](EFFECTS["tap"], lambda v: None)
    g = jax.jit(lambda x: x + 1)
    jax.block_until_ready(g(x))
    f(x), f(x)
    hc.barrier()
    driver.fakeSetDelayMicroseconds(300)
    for _ in range(3):
        results = f(x)
        wait()
        for result in jax.tree.leaves(results):
            assert result.is_ready()


def test_a_barrier_waits_for_the_taps_of_a_program_without_results(driver):
    seen = []
    f = jax.jit(lambda x: hc.tap(lambda v: seen.append(float(v)), x))
    x = jax.device_put(np.float32(3), jax.devices()[0])
    driver.fakeSetDelayMicroseconds(300)
    for n in range(1, 5):
        f(x)
        hc.barrier()
        assert seen == [3.0] * n


def test_donated_results_leave_the_end_of_the_program_known():
    """The state of a training step is donated to the next one."""
    seen = []

    def step(state):
        hc.tap(lambda v: seen.append(int(v)), state)
        return state + 1

    step = jax.jit(step, donate_argnums=0)
    state = jax.device_put(np.int32(0), jax.devices()[0])
    for _ in range(20):
        state = step(state)
    jax.effects_barrier()
    assert state.is_ready()
    hc.barrier()
    assert seen == list(range(20))


# --- Failures -----------------------------------------------------------------------------


def failing(way, effect):
    """A program, its argument, and the switch that makes its host code fail."""
    switch = []

    def host(v):
        if switch:
            raise LookupError("no such row")

    f, x = WAYS[way](EFFECTS[effect], host)
    f(x), f(x)
    hc.barrier()
    return f, x, switch


# In a shard_map the others would wait in the collective for a device that fails alone.
FAILING = [
    (way, effect)
    for way, effect in CASES
    if way != "in_shard_map"
    and effect in ("unordered", "ordered", "drop-in", "ordered drop-in")
]


@pytest.mark.parametrize(
    "wait", [hc.barrier, pytest.param(jax.effects_barrier, marks=NO_TOKENS)]
)
@pytest.mark.parametrize(("way", "effect"), FAILING)
def test_a_failure_is_raised_once_by_a_wait(way, effect, wait):
    f, x, switch = failing(way, effect)
    switch.append(1)
    heard = []
    try:
        f(x)
    except jax.errors.JaxRuntimeError as error:  # where XLA tells it at the dispatch
        heard.append(str(error))
    if not heard:
        with pytest.raises(jax.errors.JaxRuntimeError) as raised:
            wait()
        heard.append(str(raised.value))
    assert "no such row" in heard[0]
    wait()
    switch.clear()
    jax.block_until_ready(f(x))
    wait()


@NO_TOKENS
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("is_donated", [False, True])
def test_each_failure_of_a_pure_drop_in_is_heard_of_once(is_donated, wait):
    """The first dispatch of a program is in Python, and the next ones are not."""

    def host(v):
        if v < 0:
            raise LookupError("no such row")
        return v

    program = lambda x: hc.pure_callback(host, SCALAR, x)
    f = jax.jit(program, donate_argnums=0 if is_donated else ())
    run = lambda v: f(jax.device_put(np.float32(v), jax.devices()[0]))
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no such row"):
            run(-1).block_until_ready()
        wait()
        run(-1)  # nobody reads its result
        with pytest.raises(jax.errors.JaxRuntimeError, match="no such row"):
            wait()
        wait()
        assert run(1) == 1
    f.clear_cache()
    assert run(2) == 2


@pytest.mark.parametrize(("way", "effect"), FAILING)
def test_reraise_raises_the_functions_own_exception(way, effect):
    f, x, switch = failing(way, effect)
    switch.append(1)
    with pytest.raises(LookupError, match="no such row"), hc.reraise():
        f(x)
    switch.clear()
    with hc.reraise():
        jax.block_until_ready(f(x))
    hc.barrier()


def test_a_failure_that_was_read_is_not_raised_again():
    f, x, switch = failing("on_one_gpu", "unordered")
    switch.append(1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such row"):
        np.asarray(f(x))
    hc.barrier()
    jax.effects_barrier()


def test_ordered_calls_go_on_after_a_failure():
    seen = []

    def host(i):
        seen.append(int(i))
        if i == 2:
            raise LookupError("no such row")

    f = jax.jit(lambda i: hc.call(host, None, i, order="ordered"))
    failures = 0
    for i in range(5):
        try:
            f(jax.device_put(np.int32(i), jax.devices()[0]))
        except jax.errors.JaxRuntimeError:
            failures += 1
    assert seen == list(range(5))
    if not failures:
        with pytest.raises(jax.errors.JaxRuntimeError, match="no such row"):
            hc.barrier()
    hc.barrier()


# --- CUDA graphs --------------------------------------------------------------------------


def test_effects_between_graphs(driver, dispatches):
    """XLA records the kernels around a call into graphs, and replays them."""
    calls = []
    taps = []

    def f(x):
        x = jnp.sin(x)
        hc.call(lambda v: calls.append(float(v)), None, x[0], order="ordered")
        x = jnp.cos(x)
        hc.tap(lambda v: taps.append(float(v)), x[0])
        return x + 1

    f = jax.jit(f, compiler_options=RECORDED)
    x = jax.device_put(np.arange(8, dtype=np.float32), jax.devices()[0])
    f(x), f(x)
    hc.barrier()
    inputs = [x + k for k in range(6)]
    before = driver.fakeGraphLaunches()
    dispatches.clear()
    results = [f(x) for x in inputs]
    assert dispatches == [] or HAS_TOKENS
    for x, y in zip(inputs, results, strict=True):
        np.testing.assert_allclose(y, np.cos(np.sin(np.asarray(x))) + 1, 1e-5)
    hc.barrier()
    assert driver.fakeGraphLaunches() > before
    assert len(calls) == len(taps) == 8
    np.testing.assert_allclose(calls[2:], np.sin(np.arange(6.0)), atol=1e-6)
    np.testing.assert_allclose(taps[2:], np.cos(np.sin(np.arange(6.0))), atol=1e-6)
