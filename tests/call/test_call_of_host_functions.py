"""`hc.call` of what `hc.host` made: how it is run, defaults, and what is refused."""

from __future__ import annotations

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


def test_only_what_the_cache_does_not_know_is_merged():
    double = Double()
    f = hc.host(double, cache="memory", coalesce=4, wait=60)
    rows = jax.jit(jax.vmap(lambda x: hc.call(f, F32, x)))
    np.testing.assert_array_equal(rows(X), X * 2)
    np.testing.assert_array_equal(rows(X), X * 2)
    assert [x.shape for x in double.got] == [(4,)]
    np.testing.assert_array_equal(rows(X + 4), X * 2 + 8)
    assert [x.shape for x in double.got] == [(4,), (4,)]


def test_rules_of_a_merged_function_are_not_merged():
    double, pulled = Double(), []
    f = hc.host(double, result=hc.results.like(0), coalesce=4, wait=60)

    def pull(residual, ct):
        pulled.append(ct.shape)
        return (2 * ct,)

    f.defvjp(lambda x: (x * 2, None), pull)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(X), X * 2)
    assert [x.shape for x in double.got] == [(4,)]
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.grad(f)))(X), np.full(4, 2.0))
    assert pulled == [()] * 4


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


def test_without_a_result_only_hc_call_can_call_it():
    f = hc.host(np.sin, timeout=60)
    assert hc.call(f, F32, 1.0) == np.sin(np.float32(1))
    for use in (f, jax.jit(f), jax.grad(f), f.where(True)):
        with pytest.raises(
            hc.errors.SpecError, match=r"has no result=.*hc\.call\(sin,"
        ):
            use(1.0)


OPTIONS = ("timeout", "executor", "concurrency", "coalesce", "wait", "cache", "version")


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
    "cache= and order='ordered'": ({"cache": "memory"}, {"order": "ordered"}),
    "coalesce= and order='unordered'": ({"coalesce": 2}, {"order": "unordered"}),
    "coalesce= and vmap_method=": ({"coalesce": 2}, {"vmap_method": "expand_dims"}),
}


@pytest.mark.parametrize("text", CONFLICTS)
def test_a_pair_of_both_is_refused_where_it_meets(text):
    policy, place = CONFLICTS[text]
    f = hc.host(np.negative, **policy)
    with pytest.raises(hc.errors.SpecError, match=f"`negative` has {text}"):
        hc.call(f, F32, 1.0, **place)
    assert hc.call(f, F32, 1.0) == -1
