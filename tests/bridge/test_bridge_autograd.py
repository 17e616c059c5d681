"""`hc.bridge.autograd` and `hc.bridge.value_and_grad` against JAX's own derivatives."""

from __future__ import annotations

import pickle
import weakref
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads
from limits import holds_in_time

import hostcall as hc

Q = jnp.array([0.3, -0.2, 0.8])
K = jnp.array([1.0, 2.0, 0.5])
QS = jnp.stack([Q, 2 * Q, Q - 1, K])


def close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def compare(f, plain, transforms):
    for transform in transforms:
        close(jax.jit(lambda: transform(f))(), jax.jit(lambda: transform(plain))())


FIRST = [
    lambda f: f(Q, K),
    lambda f: jax.value_and_grad(f, (0, 1))(Q, K),
    lambda f: jax.jvp(f, (Q, K), (K, Q)),
    lambda f: jax.jvp(lambda q: f(q, K), (Q,), (K,)),
    lambda f: jax.vmap(jax.grad(f), (0, None))(QS, K),
    lambda f: jax.grad(lambda qs: (jax.vmap(f, (0, None))(qs, K) ** 2).sum())(QS),
    lambda f: jax.grad(jax.checkpoint(lambda q: jnp.sin(f(q, K))))(Q),
    lambda f: jax.grad(lambda q: lax.scan(lambda c, q: (c + f(q, K), c), 0.0, QS * q)[0])(2.0),
    lambda f: jax.linearize(f, Q, K)[1](K, Q),
]  # fmt: skip
SECOND = [
    lambda f: jax.hessian(f, (0, 1))(Q, K),
    lambda f: jax.jacrev(jax.grad(f))(Q, K),
    lambda f: jax.jacfwd(jax.jacfwd(f))(Q, K),
    lambda f: jax.grad(lambda q: jax.jvp(lambda q: f(q, K), (q,), (K,))[1])(Q),
]


# --- autograd ------------------------------------------------------------------------


def energy(np):
    return lambda q, k: np.sum(k * np.sin(q) ** 2) + q[0] * np.dot(q, k) ** 2


@pytest.fixture
def anp():
    pytest.importorskip("autograd")
    import autograd.numpy

    return autograd.numpy


@pytest.mark.parametrize("derivatives", [1, 2])
def test_first_order(anp, derivatives):
    f = hc.bridge.autograd(energy(anp), derivatives=derivatives)
    compare(f, energy(jnp), FIRST)
    close(jax.grad(f)(Q, K), jax.grad(energy(jnp))(Q, K))  # eagerly


def test_second_order(anp):
    compare(hc.bridge.autograd(energy(anp), derivatives=2), energy(jnp), SECOND)


def test_check_grads(anp):
    f = hc.bridge.autograd(energy(anp), derivatives=3)
    check_grads(jax.jit(f), (Q, K), 2, rtol=3e-2, atol=3e-2)
    third = lambda f: jax.jacfwd(jax.jacrev(jax.grad(f)))(Q, K)
    compare(f, energy(jnp), [third])
    assert hc.testing.check(f, (Q, K))


def test_trees_integers_and_static_arguments(anp):
    def fn(np):
        def f(p, n, how):
            assert how == "x"
            out = np.tanh(np.dot(p["w"], p["x"][0])) ** n
            return {"out": out, "n": n + 1, "w": p["w"]}

        return f

    p = {"w": jnp.arange(6.0).reshape(2, 3) / 7, "x": (Q, 2)}
    f = hc.bridge.autograd(fn(anp))
    loss = lambda f: (
        lambda w: (
            (f({**p, "w": w}, 2, "x")["out"] ** 2).sum()
            + f({**p, "w": w}, 2, "x")["w"].sum()
        )
    )
    compare(f, fn(jnp), [lambda f: jax.grad(loss(f))(p["w"])])
    assert f(p, n=2, how="x")["n"] == 3
    _, tangent = jax.jvp(lambda w: f({**p, "w": w}, 2, "x"), (p["w"],), (p["w"],))
    assert tangent["n"].dtype == jax.dtypes.float0
    assert hc.testing.check(f, (p, 2, "x"))


def test_a_result_that_depends_on_nothing(anp):
    f = hc.bridge.autograd(lambda x: (anp.ones(2), x * 0), derivatives=2)
    close(jax.jacrev(f)(Q), (jnp.zeros((2, 3)), jnp.zeros((3, 3))))
    close(jax.jacfwd(f)(Q)[0], jnp.zeros((2, 3)))
    line = hc.bridge.autograd(lambda x: 3 * x[0], derivatives=2)
    close(jax.hessian(line)(Q), jnp.zeros((3, 3)))


def test_complex(anp):
    fn = lambda np: lambda z: np.sum(np.real(np.exp(z) * z * np.conj(z) * (1 + 2j)))
    z = jnp.array([0.3 + 0.4j, -0.2j])
    close(jax.grad(hc.bridge.autograd(fn(anp)))(z), jax.grad(fn(jnp))(z))


def test_the_graph_is_kept_for_the_backward_pass(anp):
    """And is let go after it."""
    from autograd.extend import defvjp, primitive

    class Slope:
        def __init__(self, x):
            self.at = 3 * x**2

    runs, slopes = [], []
    cube = primitive(lambda x: x**3)

    def vjp(ans, x):
        slope = Slope(x)
        slopes.append(weakref.ref(slope))
        return lambda g: g * slope.at

    defvjp(cube, vjp)
    f = hc.bridge.autograd(
        lambda x: (runs.append(1), anp.sum(cube(x)))[1],
        result=jax.ShapeDtypeStruct((), Q.dtype),
    )
    got = jax.jit(jax.value_and_grad(f))(Q)
    close(got[1], 3 * Q**2)
    assert len(runs) == len(slopes) == 1
    assert holds_in_time(lambda: slopes[0]() is None)


def test_too_many_derivatives(anp):
    f = hc.bridge.autograd(energy(anp), name="energy")
    text = (
        "`energy` was made with derivatives=1. Write"
        r" hc.bridge.autograd\(fn, derivatives=2\)"
    )
    with pytest.raises(hc.errors.DerivativeError, match=text):
        jax.hessian(f)(Q, K)
    twice = hc.bridge.autograd(energy(anp), name="energy", derivatives=2)
    with pytest.raises(hc.errors.DerivativeError, match="was made with derivatives=2"):
        jax.jacfwd(jax.hessian(twice))(Q, K)
    with pytest.raises(hc.errors.DerivativeError, match="was made with derivatives=0"):
        jax.grad(hc.bridge.autograd(energy(anp), derivatives=0))(Q, K)


def test_refusals_of_autograd(anp, monkeypatch):
    with pytest.raises(
        hc.errors.SpecError, match="derivatives= of `e` should be the highest order"
    ):
        hc.bridge.autograd(energy(anp), name="e", derivatives="all")
    with pytest.raises(
        hc.errors.SpecError, match="should be 'sequential' or 'parallel'"
    ):
        hc.bridge.autograd(energy(anp), vmap_method="expand_dims")
    with pytest.raises(
        hc.errors.SpecError, match="is a bridge, whose rules come from the other"
    ):
        hc.bridge.autograd(energy(anp)).defvjp(len, len)


def test_without_autograd(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "autograd", None)
    with pytest.raises(ImportError, match="Install it: pip install autograd;"):
        hc.bridge.autograd(lambda x: x)


# --- value_and_grad --------------------------------------------------------------------


def pair(q, k):
    s = np.sin(q)
    value = (k * s**2).sum() + q[0] * (q @ k) ** 2
    q_bar = 2 * k * s * np.cos(q) + 2 * q[0] * (q @ k) * k
    q_bar[0] += (q @ k) ** 2
    return value, (q_bar, s**2 + 2 * q[0] * (q @ k) * q)


def test_value_and_grad_in_both_modes():
    f = hc.bridge.value_and_grad(pair)
    compare(f, energy(jnp), FIRST)
    check_grads(jax.jit(f), (Q, K), 1, rtol=1e-2, atol=1e-2)
    assert hc.testing.check(f, (Q, K))


def test_one_call_for_value_and_gradient():
    calls = []

    @hc.bridge.value_and_grad(value=lambda x: (calls.append("value"), x @ x)[1])
    def f(x):
        calls.append("both")
        return x @ x, 2 * x

    close(jax.jit(f)(Q), Q @ Q)
    assert calls == ["value"]
    for run in (
        lambda: jax.jit(jax.value_and_grad(f))(Q),
        lambda: jax.grad(f)(Q),
        lambda: jax.jit(lambda: jax.jvp(f, (Q,), (Q,)))(),
        lambda: jax.jit(jax.jacfwd(f))(Q),
    ):
        calls.clear()
        jax.block_until_ready(run())
        assert calls == ["both"]
    _, pull = jax.vjp(f, Q)
    calls.clear()
    close(pull(1.0)[0], 2 * Q)
    close(pull(2.0)[0], 4 * Q)
    assert calls == []


def test_trees_nondiff_and_none():
    @hc.bridge.value_and_grad(nondiff=-1)
    def f(p, n, x, how):
        assert how == "sum"
        return (p["a"] * n).sum() + p["b"][0], (
            {"a": n * np.ones_like(p["a"]), "b": (1.0, None)},
            None,
        )

    p = {"a": Q, "b": (jnp.float32(2), 3)}
    got = jax.jit(jax.grad(lambda p, x: f(p, 2, x, "sum"), (0, 1), allow_int=True))(
        p, K
    )
    close(got[0]["a"], 2 * jnp.ones(3))
    assert got[0]["b"][0] == 1
    close(got[1], jnp.zeros(3))


def test_numbers():
    f = hc.bridge.value_and_grad(lambda x: (x**2, 2 * x))
    assert jax.grad(f)(3.0) == 6
    assert jax.jvp(f, (3.0,), (2.0,)) == (9, 12)


def test_whole_batches():
    def both(x):
        return (x**2).sum(-1), 2 * x

    f = hc.bridge.value_and_grad(both, vmap_method="expand_dims")
    compare(f, lambda x: x @ x, [lambda f: jax.vmap(jax.value_and_grad(f))(QS)])


def test_64_bits(x64):
    f = hc.bridge.value_and_grad(lambda x: (x @ x, 2 * x))
    value, gradient = jax.value_and_grad(f)(np.float64([1, 2]))
    assert value.dtype == gradient.dtype == np.float64
    assert f(np.float32([1, 2])).dtype == np.float32


def wrong(answer, text, *args):
    f = hc.bridge.value_and_grad(lambda *args: answer, name="f")
    with pytest.raises(hc.errors.ResultError, match=text), hc.reraise():
        jax.block_until_ready(jax.jit(jax.grad(f))(*args))


def test_wrong_answers():
    wrong(1.0, r"`f` should return \(value, gradient\), got float", Q)
    wrong(
        (1.0, (Q,)),
        r"for the arguments \[0, 1\] should have .*a tuple with one entry for each",
        Q,
        K,
    )
    for several in ([Q, K], {"a": Q, "b": K}):
        wrong((1.0, several), r"for the arguments \[0, 1\] should have", Q, K)
    wrong((1.0, (Q, {"b": 1})), "for argument 1 should have the structure", Q, {"a": K})
    wrong(
        (1.0, {"b": 1}),
        "for argument 0 should have the structure",
        {"a": Q},
    )
    wrong((1.0, np.ones(2, np.float32)), r"\[2\]", Q)


def test_refusals_of_value_and_grad():
    f = hc.bridge.value_and_grad(pair)
    text = "`pair` is differentiated twice, but .* gives only its first derivative"
    with pytest.raises(hc.errors.DerivativeError, match=text):
        jax.hessian(f)(Q, K)
    with pytest.raises(hc.errors.SpecError, match="two conventions for its gradient"):
        jax.grad(
            hc.bridge.value_and_grad(
                lambda z: (1.0, z), result=jax.ShapeDtypeStruct((), Q.dtype)
            )
        )(1j)
    with pytest.raises(
        hc.errors.SpecError, match="value= of `pair` should be a function of"
    ):
        hc.bridge.value_and_grad(pair, value=3)
    with pytest.raises(
        hc.errors.SpecError, match=r"fn\(\*args\) -> \(value, gradient\)"
    ):
        hc.bridge.value_and_grad(3)


def test_pickle():
    again = pickle.loads(pickle.dumps(hc.bridge.value_and_grad(pair)))
    close(jax.grad(again)(Q, K), jax.grad(energy(jnp))(Q, K))


@pytest.mark.parametrize("mode", ["threads", "parallel"])
def test_threads_that_nest_traces(anp, mode):
    """Autograd counts its nested traces for the whole process, not for each thread."""
    import time

    import autograd

    def force(q):
        time.sleep(0.002 * float(np.sum(autograd.tracer.getval(q))))
        slope = autograd.elementwise_grad(lambda x: anp.sum(anp.sin(x) ** 2 * x))
        return slope(q) * anp.sum(q)

    rows = jnp.array(np.random.RandomState(0).rand(16, 3), jnp.float32)
    f = hc.bridge.autograd(force, result=hc.results.like(0))
    want = [np.asarray(jax.jit(jax.jacrev(f))(row)) for row in rows]
    if mode == "parallel":
        f = hc.bridge.autograd(force, result=hc.results.like(0), vmap_method="parallel")
        got = jax.jit(jax.vmap(jax.jacrev(f)))(rows)
    else:
        program = jax.jit(jax.jacrev(f))
        with futures.ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda row: np.asarray(program(row)), rows))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_value_and_grad_takes_keywords_and_is_named():
    def scaled(x, s=2.0):
        return (x * s).sum(), (np.full(3, s, np.float32), x.sum())

    f = hc.bridge.value_and_grad(scaled)
    assert f(jnp.ones(3), s=3.0) == 9
    wrong = hc.bridge.value_and_grad(lambda x: (x.sum(), x[:2]), name="wrong")
    with pytest.raises(hc.errors.ResultError, match="`wrong`"), hc.reraise():
        jax.block_until_ready(jax.jit(jax.grad(wrong))(jnp.ones(3)))


def test_a_position_in_nondiff_that_is_left_out():
    f = hc.bridge.value_and_grad(lambda x, y=None: ((x**2).sum(), 2 * x), nondiff=1)
    close(jax.jit(jax.grad(f))(Q), 2 * Q)


def test_a_registered_function_travels_with_its_derivative(anp):
    @hc.register("tests.autograd_energy")
    @hc.bridge.autograd
    def registered(q, k):
        return energy(anp)(q, k)

    exported = hc.export(jax.jit(jax.grad(registered)))(Q, K)
    close(hc.load(bytes(exported)).call(Q, K), jax.grad(energy(jnp))(Q, K))
