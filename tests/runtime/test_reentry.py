"""Callbacks that use JAX, start threads, and call callbacks."""

from __future__ import annotations

import contextvars
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import line, over

import hostcall as hc

SIDE = 400
SPEC = jax.ShapeDtypeStruct((SIDE, SIDE), np.float32)
ONES = np.ones((SIDE, SIDE), np.float32)


@pytest.fixture
def matmul():
    return jax.jit(lambda a: a @ a)


def test_200_overlapping_programs_whose_callbacks_compute(matmul):
    f = jax.jit(lambda x: hc.call(lambda a: np.asarray(matmul(a)), SPEC, x))
    outs = [f(ONES) for _ in range(200)]
    for out in outs:
        assert float(out[0, 0]) == SIDE


def test_overlapping_programs_that_xla_runs_on_its_own_threads(matmul):
    f = jax.jit(lambda x: hc.call(lambda a: np.asarray(matmul(a)), SPEC, x @ x) @ x)
    jax.block_until_ready([f(ONES) for _ in range(60)])


def test_callbacks_in_callbacks_in_callbacks(matmul):
    depths = []

    def level(n):
        def host(a):
            depths.append(n)
            if n == 3:
                return np.asarray(matmul(a))
            inner = jax.jit(lambda x: hc.call(level(n + 1), SPEC, x) + 1)
            return np.asarray(inner(a))

        return host

    f = jax.jit(lambda x: hc.call(level(0), SPEC, x))
    # Each run compiles three programs of its own.
    jax.block_until_ready([f(ONES) for _ in range(10)])
    assert float(f(ONES)[0, 0]) == SIDE + 3
    assert depths == [0, 1, 2, 3] * 11


def _of_a_rule(f, x):
    g = hc.host(np.sum, result=jax.ShapeDtypeStruct((), x.dtype))
    g.defvjp(lambda v: (np.sum(v), v), lambda v, _: (f(v),))
    return jax.jit(jax.grad(g))


RUNS_ITSELF = {
    "call": lambda f, x: jax.jit(lambda v: hc.call(f, v, v)),
    "ordered": lambda f, x: jax.jit(lambda v: hc.call(f, v, v, order="ordered")),
    "eager": lambda f, x: lambda v: hc.call(f, v, v),
    "timeout": lambda f, x: jax.jit(lambda v: hc.call(hc.host(f, timeout=600), v, v)),
    "host": lambda f, x: hc.host(f, result=hc.results.like(0)),
    "rule": _of_a_rule,
    "drop-in": lambda f, x: jax.jit(lambda v: hc.pure_callback(f, v, v)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", RUNS_ITSELF)
def test_a_program_that_its_own_callback_runs_ends_with_an_error(kind):
    """Each level has a client with threads of its own: unchecked, a machine's end."""
    x, calls = jnp.arange(4.0), []

    def host(v):
        calls.append(0)
        return np.asarray(program(v))

    program = RUNS_ITSELF[kind](host, x)
    with pytest.raises((jax.errors.JaxRuntimeError, hc.errors.HostcallError)) as caught:
        jax.block_until_ready(program(x))
    assert str(caught.value).strip().endswith("python -m hostcall explain hc-recursion")
    assert "runs the program that called it" in str(caught.value)
    assert len(calls) == 32
    # What is not a recursion is served as before.
    np.testing.assert_array_equal(hc.call(np.negative, x, x), -x)


def test_a_recursion_that_ends_is_served():
    def host(n):
        return n if n == 0 else n + np.asarray(program(n - 1))

    program = jax.jit(lambda n: hc.call(host, n, n))
    assert program(jnp.int32(20)) == sum(range(21))


def test_each_depth_computes_on_a_client_of_its_own():
    clients = []

    def inner(a):
        clients.append(jnp.zeros(()).devices().pop().client)
        return a

    def outer(a):
        clients.append(jnp.zeros(()).devices().pop().client)
        return np.asarray(jax.jit(lambda v: hc.call(inner, v, v))(a))

    x = jnp.float32(1)
    jax.jit(lambda v: hc.call(outer, v, v))(x).block_until_ready()
    assert len({id(c) for c in [x.devices().pop().client, *clients]}) == 3


def in_a_thread(function):
    """A host function that starts a thread and computes in it."""

    def host(a):
        out = []
        thread = threading.Thread(target=lambda: out.append(np.asarray(function(a))))
        thread.start()
        thread.join()
        return out[0]

    return host


def test_a_callback_that_starts_a_thread_that_computes(matmul):
    # One at a time: a new thread has none of its starter's settings, so it uses the
    # process's client (docs/design/threads.md).
    f = jax.jit(lambda x: hc.call(in_a_thread(matmul), SPEC, x))
    for _ in range(20):
        assert float(f(ONES)[0, 0]) == SIDE


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_a_hundred_whose_callbacks_start_threads_that_compute(order, matmul):
    """They run one by one on the dispatching thread, and hold none of XLA's threads.

    Their input is ready; otherwise they would run on XLA's threads.
    """
    ones = jax.block_until_ready(jnp.asarray(ONES))
    f = jax.jit(lambda x: hc.call(in_a_thread(matmul), SPEC, x, order=order))
    for out in [f(ones) for _ in range(100)]:
        assert float(out[0, 0]) == SIDE


ONE_CORE = """
    import os
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # XLA has one thread
    import jax, jax.numpy as jnp, numpy as np
    import hostcall as hc

    SPEC = jax.ShapeDtypeStruct((300, 300), np.float32)
    matmul = jax.jit(lambda a: jnp.sin(a) @ a)
    weights = jax.device_put(jnp.ones((300, 300)), jax.devices()[0])
    want = np.asarray(matmul(weights))
    for order in ("pure", "unordered", "ordered"):
        calls = []

        def host(x):
            calls.append(order)
            return np.asarray(matmul(weights))

        f = jax.jit(lambda x: hc.call(host, SPEC, jnp.sin(x) @ x, order=order))
        for _ in range(3):
            np.testing.assert_array_equal(f(weights), want)
        print(order, len(calls))
"""


def test_committed_arrays_on_a_machine_with_one_core(run_python):
    """The pure call holds XLA's only thread, for which its program would wait. So it is
    made again, once, inside one of XLA's host callbacks.
    """
    done = run_python(ONE_CORE, env={"XLA_FLAGS": ""})
    assert done.stdout.split() == ["pure", "4", "unordered", "3", "ordered", "3"]


def test_six_threads_at_once(matmul):
    f = jax.jit(lambda x: hc.call(lambda a: np.asarray(matmul(a)), SPEC, x))
    wrong = []

    def run():
        for out in [f(ONES) for _ in range(20)]:
            if float(out[0, 0]) != SIDE:
                wrong.append(out)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_threads_default_device_is_its_own_again():
    x = jnp.float32(1)
    (mine,) = jnp.zeros(()).devices()
    f = jax.jit(lambda v: hc.call(lambda a: np.asarray(jnp.sin(a)), v, v))
    for _ in range(3):
        f(x).block_until_ready()
        assert jnp.zeros(()).devices() == {mine}

    def fail(a):
        raise ValueError

    with pytest.raises(ValueError), hc.reraise():
        jax.jit(lambda v: hc.call(fail, v, v))(x)
    assert jnp.zeros(()).devices() == {mine}


def test_callbacks_do_not_inherit_device_or_mesh():
    x = jnp.arange(4.0)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def host(a):
        seen.append(jnp.zeros(()).devices())
        return np.asarray(jnp.sin(a) * 2)

    f = jax.jit(lambda v: hc.call(host, v, v))
    want = np.sin(np.arange(4.0)) * 2
    with jax.default_device(jax.devices()[3]):
        np.testing.assert_allclose(f(x), want, rtol=1e-6)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(f(x), want, rtol=1e-6)
    assert all(device not in jax.devices() for (device,) in seen)


def test_a_mesh_is_hidden_from_each_call_of_a_run():
    mesh = jax.sharding.AbstractMesh((1,), ("x",))
    seen = []

    def host(a):
        seen.append(jax.sharding.get_abstract_mesh().empty)
        return a

    x = jnp.float32(1)
    f = jax.jit(lambda v: jax.lax.fori_loop(0, 3, lambda i, v: hc.call(host, v, v), v))
    compiled = f.lower(x).compile()
    with jax.sharding.use_abstract_mesh(mesh):
        jax.block_until_ready(compiled(x))
    assert seen == [True] * 3


@pytest.mark.parametrize("where", ["one device", "each of four"])
@pytest.mark.parametrize("order", ["pure", "unordered"])
def test_small_numbers_are_not_flushed_to_zero(order, where):
    """XLA flushes them in its programs, but a host function must see them."""
    smallest = np.finfo(np.float32).smallest_subnormal
    seen = []

    def host(a):
        half = np.full(3, 2.0**-1060) / 2
        seen.append((float(half[0]), float(smallest * np.float32(2))))
        return a

    def f(v):
        return hc.call(host, v, jnp.sin(v) @ v, order=order)

    on_four = where == "each of four"
    program = over(line(), f, P("x")) if on_four else jax.jit(f)
    jax.block_until_ready(program(np.ones((4, SIDE, SIDE), np.float32)))
    assert seen == [(2.0**-1061, 2 * float(smallest))] * (4 if on_four else 1)


def test_context_variables_of_the_dispatching_thread():
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    def host(a):
        same = threading.current_thread() is threading.main_thread()
        seen.append((same, variable.get()))
        return a

    f = jax.jit(lambda v: hc.call(host, v, v))
    late = jax.jit(lambda v: hc.call(hc.host(host, timeout=60), v, v))
    variable.set("mine")
    f(jnp.float32(1)).block_until_ready()
    late(jnp.float32(1)).block_until_ready()
    assert seen == [(True, "mine"), (False, "mine")]
