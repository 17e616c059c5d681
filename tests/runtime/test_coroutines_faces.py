"""Coroutine functions in hc.host, with its rules, and as methods of hc.Object."""

from __future__ import annotations

import asyncio
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from limits import HANG_SECONDS

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)
X = np.arange(1, 5, dtype=np.float32)


async def cube(x):
    await asyncio.sleep(0)
    return x**3


# --- hc.host -----------------------------------------------------------------------


async def jvp(primals, tangents):
    await asyncio.sleep(0)
    (x,), (t,) = primals, tangents
    return 3 * x**2 * t


async def both(primals, tangents):
    return await cube(*primals), await jvp(primals, tangents)


async def each(t, y, x):
    await asyncio.sleep(0)
    return 3 * x**2 * t


async def fwd(x):
    return await cube(x), x


async def bwd(x, ct):
    await asyncio.sleep(0)
    return (3 * x**2 * ct,)


RULES = {
    "jvp": lambda f: f.defjvp(jvp),
    "jvp that returns both": lambda f: f.defjvp(both),
    "plain jvp": lambda f: f.defjvp(lambda p, t: 3 * p[0] ** 2 * t[0]),
    "jvps": lambda f: f.defjvps(each),
    "plain jvps": lambda f: f.defjvps(lambda t, y, x: 3 * x**2 * t),
    "vjp": lambda f: f.defvjp(fwd, bwd),
    "plain bwd": lambda f: f.defvjp(fwd, lambda x, ct: (3 * x**2 * ct,)),
    "residuals": lambda f: f.defvjp(fwd, bwd, residuals=F32),
}


@pytest.mark.parametrize("method", ["parallel", "sequential"])
@pytest.mark.parametrize("rule", RULES)
def test_derivatives(rule, method):
    function = hc.host(
        cube, result=hc.results.like(0), vmap_method=method, concurrency=2
    )
    RULES[rule](function)

    def slope(f):
        if "jvp" in rule:
            return lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))
        return jax.value_and_grad(f)

    got = jax.jit(jax.vmap(slope(function)))(X)
    want = jax.vmap(slope(lambda x: x**3))(X)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_forward_rule_that_runs_again():
    function = hc.host(cube, result=hc.results.like(0))
    function.defvjp(fwd, bwd)
    hc.configure(residuals=0)
    try:
        assert jax.grad(function)(2.0) == 12
    finally:
        hc.configure(residuals=1024)


def test_jacobians_batches_and_inferred_results():
    function = hc.host(cube, result="infer")

    @function.defjacobian
    async def _(x):
        await asyncio.sleep(0)
        return np.diag(3 * x**2)

    np.testing.assert_allclose(jax.jacrev(function)(X), np.diag(3 * X**2))
    np.testing.assert_allclose(jax.jit(function)(X), X**3)


def test_finite_differences():
    function = hc.derivatives.finite_difference(
        hc.host(cube, result=hc.results.elementwise)
    )
    np.testing.assert_allclose(jax.vmap(jax.grad(function))(X), 3 * X**2, rtol=1e-2)


def test_all_rules_of_a_function_share_its_limit():
    now, most = 0, 0

    async def counted(x, *_):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return x

    function = hc.host(
        counted, result=hc.results.like(0), vmap_method="parallel", concurrency=3
    )
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(function))(jnp.arange(9.0)), range(9)
    )
    assert most == 3


# --- hc.Object -----------------------------------------------------------------------


class Walk:
    """Goes on when all rows have come, so rows must run together."""

    barrier = asyncio.Barrier(4)

    def __init__(self, index=()):
        self.index, self.place, self.closed = index, np.float32(0), False

    async def step(self, by):
        async with asyncio.timeout(HANG_SECONDS):
            await type(self).barrier.wait()
        before = self.place
        await asyncio.sleep(0)
        self.place = before + by
        return self.place

    async def alone(self):
        await asyncio.sleep(0)
        return self.place

    def where(self):
        return self.place


METHODS = {"step": F32, "alone": F32, "where": F32}


@pytest.fixture
def barrier(monkeypatch):
    monkeypatch.setattr(Walk, "barrier", asyncio.Barrier(4))


def test_rows_of_an_object_wait_together(barrier):
    walk = hc.Object(Walk, methods=METHODS, vmap_method="parallel", concurrency=4)

    @jax.jit
    @jax.vmap
    def f(by):
        first, second = walk.step(by), walk.step(by=by)
        return first, second, walk.where(where=by > -1), walk.alone(where=by > -1)

    by = jnp.arange(4.0)
    with walk:
        for n in (0, 2):
            got = f(by)
            want = [(n + 1) * by, (n + 2) * by, (n + 2) * by, (n + 2) * by]
            np.testing.assert_array_equal(got, want)


def test_calls_of_one_object_do_not_overlap():
    inside, log = [], []

    class One:
        async def enter(self, x):
            assert not inside
            inside.append(1)
            await asyncio.sleep(0.001)  # in which another call might come
            inside.clear()
            log.append(float(x))
            return x

    one = hc.Object(One, methods={"enter": F32}, order="unordered")
    f = jax.jit(one.enter)
    f(0.0).block_until_ready()
    threads = [threading.Thread(target=f, args=(float(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    jax.effects_barrier()
    assert sorted(log) == [0, *range(8)]
    one.close()


@pytest.mark.parametrize("method", ["parallel", "sequential"])
def test_factories_and_hooks_may_be_coroutine_functions(method):
    ended = []

    async def make(index):
        await asyncio.sleep(0)
        return Walk(index)

    async def end(walk):
        await asyncio.sleep(0)
        ended.append(walk.index)

    walk = hc.Object(make, methods={"alone": F32}, close=end, vmap_method=method)
    f = jax.jit(jax.vmap(lambda x: walk.alone(where=x > -1)))
    np.testing.assert_array_equal(f(jnp.arange(3.0)), np.zeros(3))
    walk.close()
    assert ended == [(0,), (1,), (2,)]


def test_an_object_without_coroutine_methods_has_no_concurrency():
    with pytest.raises(hc.errors.SpecError, match="not a coroutine function"):
        hc.Object(Walk, methods={"where": F32}, concurrency=4)


def test_a_method_that_fails_keeps_the_objects():
    class Fails:
        async def step(self, x):
            if x == 2:
                raise ValueError("two")
            return x

    fails = hc.Object(Fails, methods={"step": F32}, vmap_method="parallel")
    f = jax.jit(jax.vmap(fails.step))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"ValueError: two.*row 2"):
        f(jnp.arange(4.0)).block_until_ready()
    np.testing.assert_array_equal(f(jnp.arange(4.0) + 5), np.arange(4) + 5)
    fails.close()


def test_an_object_that_is_freed_on_the_thread_of_the_loop():
    closed = threading.Event()

    class Closing:
        async def step(self, x):
            return x

        async def close(self):
            closed.set()

    held = [hc.Object(Closing, methods={"step": F32})]
    held[0].step(1.0)

    async def frees(x):
        held.clear()
        gc.collect()
        return x

    assert jax.jit(lambda x: hc.call(frees, F32, x))(1.0) == 1
    jax.clear_caches()
    gc.collect()
    assert closed.wait(HANG_SECONDS)
