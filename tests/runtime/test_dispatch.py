"""Which thread runs a program: the dispatching one, or one of XLA's."""

from __future__ import annotations

import contextlib
import itertools
import threading

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.experimental import io_callback

import hostcall as hc
from hostcall import host_callback

WAIT = 50  # seconds after which a test fails that would otherwise hang
SIDE = 300
SCALAR = jax.ShapeDtypeStruct((), np.float32)


@pytest.fixture
def x():
    """A ready array: programs with inputs that are not ready go to XLA's threads."""
    return jax.block_until_ready(jnp.ones((SIDE, SIDE)))


def work(x):
    """Enough work that XLA runs it on one of its own threads, if it may."""
    return (jnp.sin(x) @ x).sum()


def through_buffers(host, x, **options):
    def callback(ctx, out, v):
        np.asarray(out)[...] = host(np.asarray(v))

    return hc.buffers.buffer_callback(callback, SCALAR, **options)(x)


def printed(callback):
    """A debug callback, which returns nothing."""

    def bind(host, x, **options):
        callback(host, x, **options)
        return x

    return bind


# Each binds a call of `host`, and returns the result.
WHERE_DISPATCHED = {
    "unordered": lambda host, x: hc.call(host, SCALAR, x, order="unordered"),
    "ordered": lambda host, x: hc.call(host, SCALAR, x, order="ordered"),
    "pure_callback": lambda host, x: hc.pure_callback(host, SCALAR, x),
    "io_callback": lambda host, x: hc.io_callback(host, SCALAR, x),
    "io_callback ordered": lambda host, x: hc.io_callback(
        host, SCALAR, x, ordered=True
    ),
    "io_callback numpy": lambda host, x: hc.io_callback(
        host, SCALAR, x, arrays="numpy"
    ),
    "debug.callback": printed(hc.debug.callback),
    "debug.callback ordered": printed(
        lambda host, x: hc.debug.callback(host, x, ordered=True)
    ),
    "buffer_callback": through_buffers,
    "buffer_callback with an effect": lambda host, x: through_buffers(
        host, x, has_side_effect=True
    ),
}
PATCHED = {
    "patched pure_callback": lambda host, x: jax.pure_callback(host, SCALAR, x),
    "patched io_callback": lambda host, x: io_callback(host, SCALAR, x),
    "patched debug.callback": printed(
        lambda host, x: jax.debug.callback(host, x, ordered=True)
    ),
}
ALL = WHERE_DISPATCHED | PATCHED


@pytest.fixture
def bind(request):
    """One of the functions above; with the patch if it is JAX's."""
    if request.param not in PATCHED:
        yield ALL[request.param]
        return
    with hc.patch_jax():
        yield ALL[request.param]


each = pytest.mark.parametrize("bind", ALL, indirect=True)


def compiled(bind, host, x):
    return jax.jit(lambda x: bind(host, work(x))).lower(x).compile()


# --- On the thread that dispatches ----------------------------------------------------


@each
def test_it_has_run_when_the_dispatch_returns(bind, x):
    ran = []

    def host(v):
        ran.append(True)
        return np.asarray(v)

    f = jax.jit(lambda x: bind(host, work(x)))
    for _ in range(3):  # compiled, then on JAX's fast path where it has one
        y = f(x)
        assert ran.pop()  # maybe by one of XLA's threads that helped with the product
    y = compiled(bind, host, x)(x)
    assert ran.pop()
    np.testing.assert_allclose(y, work(x), rtol=1e-5)


@each
@pytest.mark.parametrize("n", [7, 32])
def test_programs_whose_callbacks_wait_for_each_other(bind, n, x):
    """Up to as many as XLA admits on a device, each on a thread of its own."""
    meet = threading.Barrier(n)

    def host(v):
        meet.wait(WAIT)
        return np.asarray(v)

    run_at_once([compiled(bind, host, x)] * n, [x] * n)


@pytest.mark.parametrize("bind", ["unordered", "io_callback"], indirect=True)
def test_more_of_them_on_two_devices(bind, x):
    n = 40  # places are counted for each device
    meet = threading.Barrier(n)

    def host(v):
        meet.wait(WAIT)
        return np.asarray(v)

    xs = [jax.block_until_ready(jax.device_put(x, d)) for d in jax.devices()[:2]]
    fs = [compiled(bind, host, x) for x in xs]
    run_at_once(fs * (n // 2), xs * (n // 2))


def run_at_once(fs, xs):
    wrong = []

    def run(f, x):
        try:
            jax.block_until_ready(f(x))
        except Exception as error:
            wrong.append(error)

    threads = [
        threading.Thread(target=run, args=each) for each in zip(fs, xs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- On a thread of XLA's ---------------------------------------------------------------


def pure(host, x):
    return hc.call(host, SCALAR, x)


def through_host_function(host, x):
    return hc.host(host, result=hc.results.like(0))(x)


@pytest.mark.parametrize("bind", [pure, through_host_function])
def test_a_pure_call_does_not_keep_the_thread_that_dispatches(bind, x):
    go, threads = threading.Event(), []

    def host(v):
        threads.append(threading.current_thread())
        assert go.wait(WAIT)
        return v

    f = compiled(bind, host, x)
    y = f(x)
    go.set()
    np.testing.assert_allclose(y, work(x), rtol=1e-5)
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize("order", ["unordered", "ordered", "pure"])
def test_a_tap_does_not_keep_the_thread_that_dispatches(order, x):
    go, seen = threading.Event(), []

    def slow(v):
        assert go.wait(WAIT)
        seen.append(float(v))

    def tap(v):
        if order == "pure":
            return hc.tap_through(slow, v)
        hc.tap(slow, v, order=order)
        return v

    y = jax.jit(lambda x: tap(work(x)))(x)
    go.set()
    jax.block_until_ready(y)
    hc.barrier()
    assert len(seen) == 1


# --- What it is made of -----------------------------------------------------------------


def python_dispatches(monkeypatch, f, x):
    """The number of calls of `f` that JAX dispatches in Python, of several."""
    from jax._src.interpreters import pxla

    f(x), f(x)
    count = []
    call = pxla.ExecuteReplicated.__call__
    with monkeypatch.context() as patch:
        patch.setattr(
            pxla.ExecuteReplicated,
            "__call__",
            lambda self, *args: count.append(1) or call(self, *args),
        )
        for _ in range(5):
            jax.block_until_ready(f(x))
    return len(count)


def a_tap(order):
    def bind(host, x):
        hc.tap(host, x, order=order)
        return x

    return bind


FEED = hc.feed(itertools.repeat(np.float32(1)))


class Counter:
    def add(self, v):
        return v + np.float32(1)


COUNTER = hc.Object(Counter, methods={"add": SCALAR})


def without_results(host, x):
    WHERE_DISPATCHED["ordered"](host, x)


FAST = ALL | {
    "pure": pure,
    "hc.host": through_host_function,
    "tap": a_tap("unordered"),
    "ordered tap": a_tap("ordered"),
    "tap_through": lambda host, x: hc.tap_through(host, x),
    "print": printed(lambda host, x: hc.print("{}", x)),
    "without results": without_results,
    "feed": lambda host, x: FEED()[0] + x,
    "object": lambda host, x: COUNTER.add(x),
    "watch": printed(lambda host, x: hc.watch(x)),
    "progress": printed(lambda host, x: hc.progress(jnp.int32(1), 10)),
    "host_callback.call": lambda host, x: host_callback.call(
        host, x, result_shape=SCALAR
    ),
    "host_callback.id_tap": lambda host, x: host_callback.id_tap(
        lambda v, _: host(v), x
    ),
    "host_callback.id_print": lambda host, x: host_callback.id_print(x),
    "where": lambda host, x: hc.call(host, SCALAR, x, order="ordered", where=x > 9e9),
}


@pytest.mark.parametrize("name", FAST)
def test_programs_take_jaxs_fast_path(name, x, monkeypatch, capsys):
    with hc.patch_jax() if name in PATCHED else contextlib.nullcontext():
        f = jax.jit(lambda x: FAST[name](lambda v: np.asarray(v), work(x)))
        assert python_dispatches(monkeypatch, f, x) == 0
    hc.barrier()


def beside_jaxs_own(host, x):
    jax.debug.callback(lambda v: None, x)
    return WHERE_DISPATCHED["ordered"](host, x)


def over_devices(host, x):
    mesh, spec = meshes.line(), jax.P("x")

    def block(v):
        return WHERE_DISPATCHED["ordered"](host, v.sum())[None]

    both = jax.shard_map(block, mesh=mesh, in_specs=spec, out_specs=spec)
    return both(jnp.ones(mesh.size) * x)


@pytest.mark.parametrize("bind", [beside_jaxs_own, over_devices])
def test_programs_that_need_tokens_go_through_python(bind, x, monkeypatch):
    f = jax.jit(lambda x: bind(lambda v: np.asarray(v), work(x)))
    assert python_dispatches(monkeypatch, f, x) == 5


class Gpu:
    """Stands for the client of a GPU that is not here."""

    platform = "none"

    def local_devices(self):
        return []

    def process_index(self):
        return 0


@each
@pytest.mark.parametrize(("platform", "client"), [("cpu", 1), ("cuda", 1), ("cuda", 0)])
def test_jax_keeps_the_token_of_a_program(bind, platform, client, monkeypatch):
    """JAX does so for programs with host callbacks: effects_barrier waits for them.

    A compiler without the devices takes none.
    """
    if platform == "cuda" and client:
        made = Gpu()
        monkeypatch.setattr(mlir.ModuleContext, "get_backend", lambda *_, **__: made)
    jax.clear_caches()
    traced = jax.jit(lambda x: bind(lambda v: np.asarray(v), x)).trace(jnp.float32(1))
    lowered = traced.lower(lowering_platforms=(platform,))
    marks = lowered._lowering.compile_args["host_callbacks"]
    assert len(marks) == client
    jax.clear_caches()


PROGRAM = """
    import inspect, json, sys
    import jax, jax.numpy as jnp, numpy as np
    import hostcall as hc
    from jax._src import compilation_cache

    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    SCALAR = jax.ShapeDtypeStruct((), np.float32)
    ran, hits = [], []
    host = lambda v: ran.append(1) or np.asarray(v)
    calls = {
        "pure": lambda x: hc.call(host, SCALAR, x),
        "tap": lambda x: (hc.tap(host, x), x)[1],
        "unordered": lambda x: hc.call(host, SCALAR, x, order="unordered"),
        "ordered": lambda x: hc.call(host, SCALAR, x, order="ordered"),
        "pure_callback": lambda x: hc.pure_callback(host, SCALAR, x),
    }
    x = jax.block_until_ready(jnp.ones((300, 300)))
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event.endswith("/cache_hits"))
    )
    found = {}
    for kind, call in calls.items():
        f = jax.jit(lambda x: call((jnp.sin(x) @ x).sum()))
        hits.clear()
        f = f.lower(x).compile()
        found[kind] = [any(hits)]
        hc.barrier()
        ran.clear()
        y = f(x)
        if kind not in ("pure", "tap"):
            found[kind].append(bool(ran))
        jax.block_until_ready(y)
        hc.barrier()
        assert ran
    parameters = inspect.signature(compilation_cache.get_executable_and_time).parameters
    print(json.dumps([found, "host_callbacks" in parameters]))
"""


def test_programs_from_the_disk_cache_run_there_too(run_python, tmp_path):
    """JAX caches them from 0.11 on."""
    import json

    first, kept = json.loads(run_python(PROGRAM, str(tmp_path)).stdout)
    again, _ = json.loads(run_python(PROGRAM, str(tmp_path)).stdout)
    here = ("unordered", "ordered", "pure_callback")
    never, both = {"pure": [False], "tap": [False]}, {"pure": [True], "tap": [True]}
    assert first == never | {kind: [False, True] for kind in here}
    assert again == both | {kind: [kept, True] for kind in here}
