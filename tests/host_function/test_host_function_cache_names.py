"""cache=: what goes by name, what each rule's entries go by, and the end of a process."""

import asyncio
import types

import jax
import numpy as np
import pytest

import hostcall as hc

X = np.array([0.5, -1.0, 2.0], np.float32)


class Disk(dict):
    """What a diskcache.Cache has of a dict."""

    def set(self, key, value):
        self[key] = value


def sine(x):
    return np.sin(x)


def scale(by):
    """A function and a class that have the same names each time."""
    namespace = {"__name__": __name__}
    exec(f"def double(x): return {by} * x\nclass Scale: by = {by}", namespace)
    for name in ("double", "Scale"):
        globals()[name] = namespace[name]
    return namespace["double"], namespace["Scale"]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_static_argument_defined_again(wrap):
    ran = []

    def apply(how, x):
        ran.append(1)
        return how(x) if isinstance(how, types.FunctionType) else how.by * x

    f = hc.host(apply, result=hc.results.like(1), cache="memory")
    for by, runs in [(2, 2), (3, 4)]:
        for how in scale(by):
            for _ in range(2):
                out = wrap(lambda x, how=how: f(how, x))(X)
                np.testing.assert_array_equal(out, by * X)
        assert len(ran) == runs


def apply_on_disk(how, x):
    return how(x)


def test_a_static_function_defined_again_on_a_disk():
    disk = Disk()
    for by in (2, 3, 2):
        double, _ = scale(by)
        f = hc.host(apply_on_disk, result=hc.results.like(1), cache=disk, version=1)
        np.testing.assert_array_equal(f(double, X), by * X)
    assert len(disk) == 2


def width(x):
    return np.full_like(x, x.itemsize)


def width_of_tangent(primals, tangents):
    return width(tangents[0])


def test_a_disk_tells_functions_and_rules_that_get_float64():
    disk = Disk()
    for wide in (False, True, False, True):
        like = hc.results.like(0)
        f = hc.host(width, result=like, cache=disk, version=1, float64=wide)
        f.defjvp(width_of_tangent)
        for got in jax.jit(lambda x, f=f: (f(x), *jax.jvp(f, (x,), (x,))))(X):
            assert (got == (8 if wide else 4)).all()
    assert len(disk) == 4


def test_rules_and_differences_have_entries_of_their_own():
    disk = Disk()

    def function():
        return hc.host(sine, result=hc.results.like(0), cache=disk, version=1)

    one, seven = function(), function()
    one.defjvp(lambda p, t: np.float32(1) * t[0])
    seven.defjvp(lambda p, t: np.float32(7) * t[0])
    for f, slope in [(one, 1), (seven, 7), (one, 1)]:
        assert jax.jvp(f, (1.0,), (1.0,))[1] == slope
    rough, fine = (
        hc.derivatives.finite_difference(function(), step=step) for step in (0.5, 1e-3)
    )
    slopes = {float(jax.jacobian(f)(1.0)) for f in (rough, fine)}
    assert len(slopes) == 2


def elementwise_sine(x):
    return np.sin(x)


def test_differences_of_elementwise_functions():
    disk, slopes = Disk(), set()
    for step in (0.5, 1e-3):
        f = hc.host(
            elementwise_sine, result=hc.results.elementwise, cache=disk, version=1
        )
        slopes.add(float(jax.grad(hc.derivatives.finite_difference(f, step=step))(1.0)))
    assert len(slopes) == 2


def test_a_result_that_is_too_large_leaves_the_others():
    ran = []

    def same(x):
        ran.append(x.size)
        return x

    f = hc.host(same, result=hc.results.like(0), cache="memory")
    try:
        hc.configure(cache_bytes=1)  # drops what functions of other tests have left
        hc.configure(cache_bytes=3000)
        for x in (X, np.zeros(10_000, np.float32), X):
            f(x)
        assert ran.count(X.size) == 1
    finally:
        hc.configure(cache_bytes=int(256e6))


def test_a_cached_coroutine_function_that_calls_itself():
    """Rows of one call wait for programs that claim each other's keys. They take five
    threads of asyncio.to_thread at a time, which has that many on one core.
    """

    async def factorial(n):
        if n <= 1:
            return np.float32(1)
        return n * float(await asyncio.to_thread(program, n - 1))

    f = hc.host(
        factorial, result=hc.results.like(0), vmap_method="parallel", cache="memory"
    )
    program = jax.jit(lambda n: f(n))
    # JAX runs the first call of a program alone: here one would wait for another.
    jax.jit(jax.vmap(f))(np.ones(2, np.float32)).block_until_ready()
    program(1.0)
    program(2.0)
    rows = np.array([4, 3], np.float32)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(rows), [24, 6])


def test_the_thread_of_a_loop_does_not_wait_for_another_computation():
    @hc.host(result=hc.results.like(0), cache="memory")
    async def same(x):
        started.set()
        await asyncio.sleep(0.2)
        return x

    program = jax.jit(same)

    async def main():
        global started
        loop, started = asyncio.get_running_loop(), asyncio.Event()
        hc.configure(loop=loop)
        await asyncio.to_thread(program, 0.0)
        started.clear()
        other = asyncio.create_task(asyncio.to_thread(program, 1.0))
        await started.wait()
        with pytest.raises(jax.errors.JaxRuntimeError, match="await asyncio.to_thr"):
            jax.block_until_ready(program(1.0))
        assert await other == 1

    try:
        asyncio.run(main())
    finally:
        hc.configure(loop="own")


def test_functions_and_objects_that_live_until_the_process_ends(run_python):
    done = run_python(
        """
        import jax, numpy as np
        import hostcall as hc

        @hc.host(result=hc.results.like(0), cache="memory")
        def f(x):
            return np.sin(x)

        class Same:
            def step(self, x):
                return x

        kept = hc.Object(Same, methods={"step": jax.ShapeDtypeStruct((), "float32")})
        print(jax.jit(f)(0.0), kept.step(1.0))
        """
    )
    assert done.stdout.split() == ["0.0", "1.0"]
    assert done.stderr == ""
