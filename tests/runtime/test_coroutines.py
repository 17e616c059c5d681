"""Coroutine functions as host functions: what runs together, where, and in what order."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import policies
import pytest
from limits import HANG_SECONDS, holds_in_time

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)


async def twice(x):
    await asyncio.sleep(0)
    return 2 * x


class Callable:
    async def __call__(self, x):
        return await twice(x)

    async def method(self, x):
        return await twice(x)


class Together:
    """Coroutines that go on when so many of them have come. A negative x does not wait:
    for a first run, since threads that all need a program take turns to compile it.
    """

    def __init__(self, parties):
        self.barrier = asyncio.Barrier(parties)
        self.most = self.now = 0

    async def __call__(self, x):
        if x < 0:
            return 2 * x
        self.now += 1
        self.most = max(self.most, self.now)
        async with asyncio.timeout(HANG_SECONDS):
            await self.barrier.wait()
        self.now -= 1
        return 2 * x


def rows(fn, **options):
    return jax.vmap(
        lambda x: policies.call(fn, F32, x, vmap_method="parallel", **options)
    )


@pytest.mark.parametrize(
    "fn",
    [
        twice,
        functools.partial(twice),
        functools.partial(functools.partial(twice)),
        Callable(),
        Callable().method,
    ],
)
@pytest.mark.parametrize("mode", [jax.jit, lambda f: f])
def test_every_kind_of_coroutine_function(fn, mode):
    assert mode(lambda x: hc.call(fn, F32, x))(3.0) == 6.0


@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
@pytest.mark.parametrize("method", ["parallel", "sequential", None])
def test_rows_equal_those_of_the_same_function_without_jit(order, method):
    async def plain(xs):
        return [await twice(x) for x in xs]

    f = jax.vmap(lambda x: hc.call(twice, F32, x, order=order, vmap_method=method))
    xs = np.arange(50, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(f)(xs), asyncio.run(plain(xs)))


def test_rows_of_a_batch_wait_together():
    together = Together(40)
    f = jax.jit(rows(together, concurrency=40))
    np.testing.assert_array_equal(f(jnp.arange(40.0)), 2 * np.arange(40.0))


@pytest.mark.parametrize(("given", "most"), [(None, 32), (4, 4)])
def test_at_most_so_many_run_at_once(given, most):
    together = Together(most)
    options = {} if given is None else {"concurrency": given}
    f = jax.jit(rows(together, **options))
    f(jnp.arange(2.0 * most)).block_until_ready()
    assert together.most == most


def test_calls_of_several_threads_and_programs_wait_together():
    together = Together(4)
    f = jax.jit(lambda x: hc.call(together, F32, x))
    g = jax.jit(lambda x: 1 + hc.call(together, F32, x, order="unordered"))
    assert f(-1.0) + g(-1.0) == -3
    values: dict[int, float] = {}

    def run(number):
        values[number] = float((f, g)[number % 2](float(number)))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert values == {0: 0.0, 1: 3.0, 2: 4.0, 3: 7.0}


def test_current_answers_in_the_coroutine_after_it_has_waited():
    async def where(x):
        before = hc.current()
        await asyncio.sleep(0)
        after = hc.current()
        assert before == after
        assert after.name.endswith("where")
        inside = await asyncio.to_thread(hc.current)
        assert inside == after
        return np.float32(after.row[0])

    f = jax.jit(rows(where))
    np.testing.assert_array_equal(f(jnp.zeros(5)), np.arange(5))
    assert hc.current() is None


def test_jax_in_a_coroutine_computes_on_the_device_of_callbacks():
    async def compute(x):
        first = jnp.sin(x)
        await asyncio.sleep(0)
        second = jnp.cos(x)
        assert first.devices() == second.devices()
        return first + second

    f = jax.jit(lambda x: hc.call(compute, F32, x))
    np.testing.assert_allclose(f(0.5), np.sin(0.5) + np.cos(0.5), rtol=1e-6)


@pytest.mark.parametrize("arrays", ["numpy", "jax"])
def test_trees_and_kinds_of_arrays(arrays):
    async def swap(tree, *, name):
        kinds = {"numpy": np.ndarray, "jax": jax.Array}
        assert isinstance(tree["a"], kinds[arrays])
        assert name == "n"
        return tree["b"], tree["a"]

    tree = {"a": jnp.arange(3.0), "b": jnp.float32(1)}
    spec = (F32, jax.ShapeDtypeStruct((3,), jnp.float32))
    b, a = jax.jit(lambda t: hc.call(swap, spec, t, name="n", arrays=arrays))(tree)
    np.testing.assert_array_equal(a, tree["a"])
    assert b == 1


def test_where_leaves_out_rows():
    seen = []

    async def see(x):
        seen.append(float(x))
        return x

    f = jax.vmap(
        lambda x: hc.call(see, F32, x, where=x > 1, fill=-1.0, vmap_method="parallel")
    )
    np.testing.assert_array_equal(jax.jit(f)(jnp.arange(4.0)), [-1, -1, 2, 3])
    assert sorted(seen) == [2.0, 3.0]


def test_taps_keep_their_order_and_barrier_waits_for_them():
    seen = []

    async def slow(x):
        await asyncio.sleep(0.01 if x == 0 else 0)  # the second could overtake it
        seen.append(float(x))

    @jax.jit
    def f(x):
        hc.tap(slow, x)
        hc.tap(slow, x + 1)
        return x

    f(0.0).block_until_ready()
    hc.barrier()
    assert seen == [0.0, 1.0]


# --- Loops -------------------------------------------------------------------------


def test_inside_a_running_loop():
    async def main():
        f = jax.jit(lambda x: hc.call(twice, F32, x))
        there = await asyncio.to_thread(f, 2.0)
        return float(f(1.0)), float(there)

    assert asyncio.run(main()) == (2.0, 4.0)


def test_a_loop_of_the_users_runs_the_coroutines():
    threads = set()

    async def where(x):
        await asyncio.sleep(0)
        threads.add(threading.get_ident())
        return x

    async def main():
        hc.configure(loop=asyncio.get_running_loop())
        f = jax.jit(rows(where))
        try:
            out = await asyncio.to_thread(lambda: np.asarray(f(jnp.arange(4.0))))
        finally:
            hc.configure(loop="own")
        np.testing.assert_array_equal(out, np.arange(4))

    asyncio.run(main())
    assert threads == {threading.get_ident()}


def test_nothing_is_left_behind():
    """No task is left on the loop, and no function that it ran."""
    loops = set()

    async def host(x):
        loops.add(asyncio.get_running_loop())
        return await twice(x)

    gone = weakref.ref(host)
    jax.jit(rows(host))(jnp.arange(4.0)).block_until_ready()
    (loop,) = loops
    assert holds_in_time(lambda: not asyncio.all_tasks(loop))
    del host
    assert holds_in_time(lambda: gone() is None)


@pytest.mark.parametrize("limit", [1, 2])
def test_a_function_that_calls_itself_needs_no_place_of_its_own(limit):
    async def down(n):
        if n <= 0:
            return np.float32(0)
        return float(await asyncio.to_thread(program, n - 1)) + 1

    program = jax.jit(lambda n: hc.call(hc.host(down, concurrency=limit), F32, n))
    assert program(1.0) == 1
    assert program(4.0) == 4


def warm(*programs):
    """JAX runs the first call of a program alone: it must not run inside itself."""
    for program in programs:
        program(np.float32(0)).block_until_ready()


def test_more_depths_than_asyncio_has_threads():
    deep = (os.cpu_count() or 1) + 4 + 6

    async def down(n):
        if n <= 0:
            return np.float32(0)
        return float(await asyncio.to_thread(program, n - 1)) + 1

    program = jax.jit(lambda n: hc.call(hc.host(down, concurrency=1), F32, n))
    warm(program)
    assert program(np.float32(min(deep, 24))) == min(deep, 24)


def test_functions_that_call_each_other_do_not_wait_in_a_circle():
    met = threading.Barrier(2)

    def make(other):
        async def down(n):
            if n >= 2:  # both functions are full before either calls the other
                await asyncio.to_thread(met.wait, HANG_SECONDS)
            if n <= 0:
                return np.float32(0)
            return float(await asyncio.to_thread(programs[other], n - 1)) + 1

        return jax.jit(
            lambda n: hc.call(
                hc.host(down, concurrency=1, timeout=HANG_SECONDS), F32, n
            )
        )

    programs = [make(1), make(0)]
    warm(*programs)
    outs = [None, None]

    def run(number):
        outs[number] = float(programs[number](np.float32(2)))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outs == [2, 2]


def test_a_barrier_in_a_tap():
    caught = []

    async def tap(x):
        try:
            hc.barrier()
        except hc.errors.HostcallError as error:
            caught.append(str(error))
        try:
            await asyncio.to_thread(hc.barrier)
        except hc.errors.HostcallError as error:
            caught.append(str(error))

    def f(x):
        hc.tap(tap, x)
        return x

    jax.jit(f)(1.0)
    hc.barrier()
    text = "hc.barrier() inside a tap would wait for the tap"
    assert [text in each for each in caught] == [True, True]
