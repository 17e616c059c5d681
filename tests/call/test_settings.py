"""JAX's settings of the place where a call is traced (`with jax.enable_x64(True):`):
host code runs under them on every thread.
"""

from __future__ import annotations

import contextlib
from concurrent import futures

import forked
import jax
import jax.numpy as jnp
import numpy as np
import policies
import pytest
from platforms import late_square

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)
# Programs with this product run on XLA's threads, others on the one that dispatches.
M = jnp.ones(late_square(600))


def costly(m):
    return (jnp.sin(m) @ m)[0, 0]


# --- What JAX does under a setting, as a number ----------------------------------------


def raises(f):
    try:
        f()
    except (TypeError, ValueError, FloatingPointError):
        return 1
    return 0


def bytes_of_a_float():
    return jax.eval_shape(lambda: jnp.ones(2, float)).dtype.itemsize


def random_bits():
    key = jax.random.wrap_key_data(np.uint32([1, 2]), impl="threefry2x32")
    return int(jax.random.bits(key, (3,))[0])


def numbers_of_a_key():
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(3))).size


def mixed_dtypes():
    both = jax.ShapeDtypeStruct((2,), np.float32), jax.ShapeDtypeStruct((2,), np.int32)
    return raises(lambda: jax.eval_shape(jnp.add, *both))


def mixed_ranks():
    both = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((2, 3), (3,)))
    return raises(lambda: jax.eval_shape(jnp.add, *both))


def nan():
    return raises(lambda: jnp.log(jnp.float32(-1)))


def infinite():
    return raises(lambda: jnp.float32(1) / jnp.float32(0))


def precise_products():
    v = np.ones(2, np.float32)
    return int("HIGHEST" in str(jax.make_jaxpr(jnp.dot)(v, v)))


def softmax_rule():
    v = np.ones(2, np.float32)
    return int("custom_jvp" in str(jax.make_jaxpr(jax.nn.softmax)(v)))


SETTINGS = {
    "x64": (lambda: jax.enable_x64(True), bytes_of_a_float),
    "threefry": (lambda: jax.threefry_partitionable(False), random_bits),
    "keys": (lambda: jax.default_prng_impl("rbg"), numbers_of_a_key),
    "dtypes": (lambda: jax.numpy_dtype_promotion("strict"), mixed_dtypes),
    "ranks": (lambda: jax.numpy_rank_promotion("raise"), mixed_ranks),
    "nans": (lambda: jax.debug_nans(True), nan),
    "infs": (lambda: jax.debug_infs(True), infinite),
    "products": (lambda: jax.default_matmul_precision("highest"), precise_products),
    "softmax": (lambda: jax.softmax_custom_jvp(True), softmax_rule),
}


# --- Ways to run host code -------------------------------------------------------------


def rows(fn, m, **options):
    def row(x):
        return policies.call(fn, F32, x, vmap_method="parallel", **options)

    return jax.vmap(row)(jnp.stack([costly(m), costly(m)]))


def later(fn):
    async def run(x):
        return fn(x)

    return run


def pushed(fn):
    f = hc.host(lambda x: x, result=F32)
    f.defjvp(lambda primals, tangents: fn(tangents[0]))
    return f


def pulled(fn):
    f = hc.host(lambda x: x, result=F32)
    f.defvjp(lambda x: (x, x), lambda x, ct: (fn(ct),))
    return f


def methods(fn):
    class Thing:
        def ask(self, x):
            return fn(x)

    return hc.Object(Thing, methods={"ask": F32})


WAYS = {
    "call": lambda fn, m: hc.call(fn, F32, m[0, 0]),
    "call on XLA's threads": lambda fn, m: hc.call(fn, F32, costly(m)),
    "unordered": lambda fn, m: hc.call(fn, F32, costly(m), order="unordered"),
    "ordered": lambda fn, m: hc.call(fn, F32, costly(m), order="ordered"),
    "limit": lambda fn, m: hc.call(hc.host(fn, timeout=60), F32, m[0, 0]),
    "rows": lambda fn, m: jax.vmap(lambda x: hc.call(fn, F32, x + costly(m)))(m[0, :2]),
    "parallel rows": rows,
    "parallel rows with a limit": lambda fn, m: rows(fn, m, timeout=60),
    "coroutine": lambda fn, m: hc.call(later(fn), F32, costly(m)),
    "coroutine with a limit": lambda fn, m: hc.call(
        hc.host(later(fn), timeout=60), F32, costly(m)
    ),
    "parallel coroutines": lambda fn, m: rows(later(fn), m),
    "jax arrays": lambda fn, m: hc.call(fn, F32, costly(m), arrays="jax"),
    "where": lambda fn, m: hc.call(fn, F32, costly(m), where=m[0, 0] > 0),
    "tap": lambda fn, m: hc.tap(fn, costly(m)),
    "coroutine tapped": lambda fn, m: hc.tap(later(fn), costly(m)),
    "tap of many": lambda fn, m: hc.tap(fn, costly(m), batch=4),
    "tap_through": lambda fn, m: hc.tap_through(fn, costly(m)),
    "host": lambda fn, m: hc.host(fn, result=F32)(costly(m)),
    "jvp rule": lambda fn, m: jax.jvp(pushed(fn), (costly(m),), (costly(m),)),
    "vjp rule": lambda fn, m: jax.grad(pulled(fn))(costly(m)),
    "differences": lambda fn, m: jax.grad(
        hc.derivatives.finite_difference(hc.host(fn, result=F32))
    )(costly(m)),
    "object": lambda fn, m: methods(fn).ask(costly(m)),
    "pure_callback": lambda fn, m: hc.pure_callback(fn, F32, costly(m)),
    "io_callback": lambda fn, m: hc.io_callback(fn, F32, costly(m), ordered=True),
    "debug.callback": lambda fn, m: hc.debug.callback(fn, costly(m)),
    "while_loop": lambda fn, m: jax.lax.while_loop(
        lambda s: s[0] < 2,
        lambda s: (s[0] + 1, s[1] + hc.call(fn, F32, s[1])),
        (0, costly(m)),
    ),
}


def seen(way, told):
    """What `told` says in host code of a program that is traced and run here."""
    found = []

    def fn(x):
        found.append(told())
        return np.float32(1)

    jax.block_until_ready(jax.jit(lambda m: way(fn, m))(M))
    hc.barrier()
    return found


def check(way, enter, told):
    plain = told()
    with enter():
        want = told()
        assert set(seen(way, told)) == {want}
    assert want != plain
    # The same threads, under the process's settings.
    assert set(seen(way, told)) == {plain}


@contextlib.contextmanager
def all_settings():
    with contextlib.ExitStack() as stack:
        for enter, _ in SETTINGS.values():
            stack.enter_context(enter())
        yield


def all_told():
    """What each setting does, but that of random bits, whose program is a large one."""
    cheap = {"threefry": lambda: jax.config.jax_threefry_partitionable}
    return tuple(cheap.get(name, told)() for name, (_, told) in SETTINGS.items())


@pytest.mark.filterwarnings("ignore:.*finite_difference.*")
@pytest.mark.parametrize("way", WAYS)
def test_host_code_has_the_settings_of_its_trace(way):
    check(WAYS[way], all_settings, all_told)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting(name):
    check(WAYS["call on XLA's threads"], *SETTINGS[name])
    check(WAYS["limit"], *SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_around_the_call_inside_the_program(name):
    enter, told = SETTINGS[name]
    with enter():
        want = told()

    def way(fn, m):
        with enter():
            inside = hc.call(fn, F32, costly(m), order="ordered")
        return inside, hc.call(fn, F32, inside, order="ordered")

    assert seen(way, told) == [want, told()]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_program_that_was_compiled_ahead_of_time(name):
    enter, told = SETTINGS[name]
    found = []
    with enter():
        want = told()
        f = jax.jit(lambda m: hc.tap(lambda x: found.append(told()), m[0, 0]))
        compiled = f.lower(M).compile()
    compiled(M)
    hc.barrier()
    assert found == [want]


def test_a_host_function_in_float64_has_all_digits():
    """`jax.enable_x64` as a context: what the function computes is not rounded."""
    x = np.float64(0.1234567890123456)
    want = np.sin(x) * np.exp(x)
    with jax.enable_x64(True):
        spec = jax.ShapeDtypeStruct((), jnp.float64)
        host = lambda v: jnp.sin(v) * jnp.exp(v)

        def program(x, m):
            x = x + 0 * costly(m).astype(jnp.float64)
            return (
                hc.call(host, spec, x, arrays="jax"),
                hc.call(hc.host(host, timeout=60), spec, x),
                hc.host(host, result=spec)(x),
                hc.pure_callback(host, spec, x),
            )

        got = jax.jit(program)(x, M)
        assert [v.dtype for v in got] == [np.float64] * len(got)
        np.testing.assert_allclose(got, want, rtol=1e-15)


@pytest.mark.parametrize("options", [{"timeout": 60}, {}], ids=["limit", "plain"])
def test_an_eager_call(options):
    for enter, told in SETTINGS.values():
        found = []
        with enter():
            policies.call(
                lambda: found.append(told()), None, order="unordered", **options
            )
            assert found == [told()]


def test_without_jit_as_a_setting():
    """Host code of an eager call on another thread runs without jit too."""
    found = []

    def looks(x):
        jax.jit(lambda v: found.append(not isinstance(v, jax.core.Tracer)))(x)

    with jax.disable_jit():
        hc.call(hc.host(looks, timeout=60), None, 1.0, order="unordered")
    assert found == [True]


def of_a_row(x):
    return np.float32(bytes_of_a_float())


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_rows_on_an_executor(kind):
    if kind == "threads":
        pool = futures.ThreadPoolExecutor(2)
    else:
        pool = futures.ProcessPoolExecutor(1, mp_context=forked.CONTEXT)
    with pool:
        run = jax.jit(lambda m: rows(of_a_row, m, executor=pool))
        with jax.enable_x64(True):
            assert run(M).tolist() == [8, 8]
        assert run(M).tolist() == [4, 4]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_source_of_a_feed_has_the_settings_of_the_feed(name):
    enter, told = SETTINGS[name]

    class Source:
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return np.int64(told()).astype(np.uint32)

    with enter():
        want = told()
        feed = hc.feed(Source())
    with feed:
        take = jax.jit(lambda: feed()[0])
        assert [int(take()) for _ in range(3)] == [want] * 3


def test_an_exported_program_takes_its_settings_along():
    pytest.importorskip("flatbuffers")
    found = []

    @hc.register("tests.settings.told")
    def fn(x):
        found.append((bytes_of_a_float(), mixed_dtypes(), numbers_of_a_key()))
        return x

    f = jax.jit(lambda x: hc.call(fn, x, x))
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.default_prng_impl("rbg"),
    ):
        data = bytes(hc.export(f)(np.float32(1)))
    plain = bytes(hc.export(f)(np.float32(1)))
    assert hc.load(data).call(np.float32(1)) == 1
    assert hc.load(plain).call(np.float32(1)) == 1
    assert found == [(8, 1, 4), (4, 0, 2)]
    with jax.enable_x64(True):  # the loader's settings are not the program's
        jax.jit(hc.load(plain).call).lower(np.float32(1)).compile()(np.float32(1))
