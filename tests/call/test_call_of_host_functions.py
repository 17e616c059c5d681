"""`hc.call` of what `hc.host` made: how it is run, defaults, and what is refused."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)
X = jnp.arange(4.0)


class Double:
    def __init__(self):
        self.got = []

    def __call__(self, x):
        self.got.append(x)
        return x * 2


@pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_it_is_run_as_hc_host_was_told(mode):
    never = threading.Event()

    def stuck(x):
        never.wait(60)
        return x

    try:
        f = mode(lambda x: hc.call(hc.host(stuck, timeout=0.1), x, x))
        with pytest.raises(hc.errors.CallTimeoutError), hc.reraise():
            jax.block_until_ready(f(1.0))
    finally:
        never.set()


def test_its_other_options_are_defaults_that_a_call_may_change():
    double = Double()
    f = hc.host(double, order="unordered", arrays="jax", tag="mine")
    jax.jit(lambda x: hc.call(f, F32, x))(1.0).block_until_ready()
    jax.jit(lambda x: hc.call(f, F32, x, arrays="numpy", tag="its"))(2.0)
    hc.barrier()
    assert [type(x) is np.ndarray for x in double.got] == [False, True]
    assert {"mine", "its"} <= hc.monitor.stats().keys()
    pure = jax.jit(lambda x: (hc.call(f, F32, x, order="pure"), x)[1])
    pure(3.0).block_until_ready()  # nothing needs the result
    assert len(double.got) == 2


def test_a_batch_is_called_as_hc_host_says():
    double = Double()
    whole = hc.host(double, vmap_method="expand_dims")
    got = jax.jit(jax.vmap(lambda x: hc.call(whole, F32, x)))(X)
    np.testing.assert_array_equal(got, X * 2)
    assert len(double.got) == 1
    ruled = hc.host(double, vmap_method=lambda n, batched, x: (x * 3, True))
    got = jax.jit(jax.vmap(lambda x: hc.call(ruled, F32, x)))(X)
    np.testing.assert_array_equal(got, X * 3)
    assert len(double.got) == 1


def test_a_method_keeps_its_object():
    class Walk:
        def __init__(self, by):
            self.by = by

        @hc.host(result=F32, timeout=60)
        def step(self, x):
            return x + np.float32(self.by)

    f = jax.jit(lambda x: hc.call(Walk(3).step, F32, x, order="ordered"))
    assert f(1.0) == 4


def test_its_rules_are_not_used():
    f = hc.host(np.sin, result=hc.results.like(0))
    f.defjvp(lambda xs, dots: np.cos(xs[0]) * dots[0])
    assert jax.jvp(f, (1.0,), (1.0,))[1] == pytest.approx(np.cos(1.0))
    with pytest.raises(hc.errors.DerivativeError):
        jax.jvp(lambda x: hc.call(f, F32, x), (1.0,), (1.0,))


def sin(x):
    return np.sin(x)


def test_without_a_result_only_hc_call_can_call_it():
    f = hc.host(sin, timeout=60)
    assert hc.call(f, F32, 1.0) == np.sin(np.float32(1))
    for use in (f, jax.jit(f), jax.grad(f), f.where(True)):
        with pytest.raises(
            hc.errors.SpecError, match=r"has no result=.*hc\.call\(sin,"
        ):
            use(1.0)


OPTIONS = ("timeout", "executor", "concurrency")


MISSPELT = {"timeot": "timeout", "executr": "executor"}


@pytest.mark.parametrize("option", MISSPELT)
def test_a_misspelt_option_of_a_function_is_not_swallowed(option):
    text = rf"has no option {option}=.*hc\.host\(fn, {MISSPELT[option]}="
    with pytest.raises(hc.errors.SpecError, match=text):
        hc.call(lambda x, **more: x, F32, 1.0, **{option: 1})


@pytest.mark.parametrize("option", OPTIONS)
def test_hc_call_says_where_the_options_of_a_function_went(option):
    for takes in (np.sin, lambda x: x, lambda x, **more: x):
        text = rf"hc\.call\(hc\.host\(fn, {option}=\.\.\.\), result"
        with pytest.raises(hc.errors.SpecError, match=text):
            hc.call(takes, F32, 1.0, **{option: 1})


def test_a_parameter_of_the_function_of_that_name_is_its_own():
    def waits(x, timeout):
        return x + np.float32(timeout)

    assert hc.call(waits, F32, 1.0, timeout=3.0) == 4


CONFLICTS = {
    "lend=True and timeout=": ({"timeout": 60}, {"lend": True}),
}


@pytest.mark.parametrize("text", CONFLICTS)
def test_a_pair_of_both_is_refused_where_it_meets(text):
    policy, place = CONFLICTS[text]
    f = hc.host(np.negative, **policy)
    with pytest.raises(hc.errors.SpecError, match=f"`negative` has {text}"):
        hc.call(f, F32, 1.0, **place)
    assert hc.call(f, F32, 1.0) == -1


def test_a_batch_of_an_elementwise_function_keeps_its_axes():
    f = hc.host(np.multiply, result=hc.results.elementwise, vmap_method="expand_dims")
    u, rows = jnp.arange(3.0), jnp.ones((3, 3))
    row = jax.ShapeDtypeStruct((3,), jnp.float32)
    want = jax.vmap(f)(u, rows)
    np.testing.assert_array_equal(want, u[:, None] * rows)
    got = jax.vmap(lambda a, b: hc.call(f, row, a, b))(u, rows)
    np.testing.assert_array_equal(got, want)


TAKERS = {
    "hc.tap": lambda f: hc.tap(f, 1.0),
    "a partial": lambda f: hc.call(functools.partial(f, 1.0), F32),
    "hc.host": lambda f: hc.host(f, timeout=60),
    "a buffer callback": lambda f: hc.buffers.buffer_callback(f, F32)(1.0),
}


@pytest.mark.parametrize("use", TAKERS.values(), ids=TAKERS)
def test_without_a_result_others_refuse_it_where_it_is_written(use):
    with pytest.raises(hc.errors.SpecError, match="has no result="):
        use(hc.host(sin, timeout=60))


def test_the_bridge_to_jax_keeps_its_device():
    traced = []

    def model(x):
        traced.append(x)
        return 2 * x

    f = hc.bridge.jax(model, device=jax.devices()[0])
    for x in range(3):
        assert hc.call(f, F32, float(x)) == 2 * x
    assert len(traced) == 1  # it is compiled, as where the program calls it


def test_a_decorated_function_is_sent_to_a_pool_of_processes(tmp_path, run_python):
    (tmp_path / "sent.py").write_text(
        """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import hostcall as hc
pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
@hc.host(executor=pool, vmap_method="parallel")
def double(x):
    return 2 * x
"""
    )
    done = run_python(
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import numpy as np, jax, jax.numpy as jnp, hostcall as hc
from sent import double, pool
if __name__ == "__main__":
    F32 = jax.ShapeDtypeStruct((), jnp.float32)
    for order in ("pure", "unordered"):
        f = jax.jit(jax.vmap(lambda x: hc.call(double, F32, x, order=order)))
        print(f(jnp.arange(3.0)).tolist())
    pool.shutdown()
"""
    )
    assert done.stdout == "[0.0, 2.0, 4.0]\n" * 2
