"""`hc.bridge.jax`, compared with the same function without it."""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from concurrent import futures
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.lib import xla_client
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from meshes import line, over
from platforms import late_square

import hostcall as hc

W = jnp.arange(6.0).reshape(2, 3) / 7
X = jnp.array([0.3, -0.2, 0.8])


def model(w, x):
    return jnp.tanh(w @ x).sum() + (jnp.sin(x) * x**2).sum()


@pytest.fixture(scope="module")
def private():
    return xla_client.make_cpu_client(asynchronous=False).local_devices()[0]


@pytest.fixture(params=["own", "same client", "private client"])
def device(request, private):
    if request.param == "own":
        return None
    return jax.devices("cpu")[1] if request.param == "same client" else private


def same(got, want, rtol=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def scanned(f):
    def body(carry, x):
        return carry + f(W, x), f(W, carry * x)

    return lambda xs: lax.scan(body, 0.5, xs)


def in_while(f):
    return lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]) * f(W, c[1])), (0, x)
    )[1]


XS = jnp.stack([X, 2 * X, X - 1, -X])

TRANSFORMS = {
    "value": lambda f: f(W, X),
    "vmap": lambda f: jax.vmap(f, (None, 0))(W, XS),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f, (None, 0)), (0, None))(jnp.stack([W, -W]), XS),
    "vmap, last axis": lambda f: jax.vmap(f, (None, 1))(W, XS.T),
    "grad": lambda f: jax.grad(f, (0, 1))(W, X),
    "value_and_grad": lambda f: jax.value_and_grad(f)(W, X),
    "jvp": lambda f: jax.jvp(partial(f, W), (X,), (X + 1,)),
    "jacrev": lambda f: jax.jacrev(lambda x: f(W, x) * x)(X),
    "jacfwd": lambda f: jax.jacfwd(lambda x: f(W, x) * x)(X),
    "linearize": lambda f: jax.linearize(partial(f, W), X)[1](X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (None, 0))(W, XS),
    "grad of vmap": lambda f: jax.grad(lambda w: (jax.vmap(f, (None, 0))(w, XS) ** 2).sum())(W),
    "hessian": lambda f: jax.hessian(f)(W, X),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f, 1), 1)(W, X),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f, 1), 1)(W, X),
    "vmap of hessian": lambda f: jax.vmap(jax.hessian(f, 1), (None, 0))(W, XS),
    "jvp of grad": lambda f: jax.jvp(jax.grad(partial(f, W)), (X,), (X,)),
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(partial(f, W), (x,), (X,))[1])(X),
    "third": lambda f: jax.jacfwd(jax.hessian(f, 1), 1)(W, X),
    "scan": lambda f: scanned(f)(XS),
    "grad of scan": lambda f: jax.grad(lambda xs: scanned(f)(xs)[0])(XS),
    "while_loop, forward": lambda f: jax.jvp(in_while(f), (X,), (X,)),
    "remat": lambda f: jax.grad(jax.checkpoint(lambda w: jnp.sin(f(w, X))))(W),
    "cond": lambda f: jax.grad(lambda x: lax.cond(x[0] > 0, f, lambda w, x: 0.0, W, x))(X),
    "vmap of cond": lambda f: jax.vmap(lambda x: lax.cond(x[0] > 0, f, lambda w, x: 0.0, W, x))(XS),
}  # fmt: skip


GROUPS = [list(TRANSFORMS)[k::3] for k in range(3)]


@pytest.mark.parametrize("names", GROUPS, ids=range(3))
def test_transformations(names):
    """Several transformations a test, since they share compiled programs."""
    f = hc.bridge.jax(model)
    for name in names:
        got = jax.jit(lambda: TRANSFORMS[name](f))()
        same(got, jax.jit(lambda: TRANSFORMS[name](model))())


def test_every_kind_of_device(device):
    f = hc.bridge.jax(model, device=device)
    same(f(W, X), model(W, X))
    same(jax.jit(jax.grad(f))(W, X), jax.jit(jax.grad(model))(W, X))


def test_check_grads():
    f = hc.bridge.jax(lambda x: jnp.tanh(x) * x)
    check_grads(jax.jit(f), (X[:2],), 2, rtol=2e-2, atol=2e-2)
    check_grads(jax.jit(f), (X[:2],), 3, modes=["fwd"], rtol=2e-2, atol=2e-2)


def test_hc_check():
    f = hc.bridge.jax(lambda p, n: {"y": p["a"] * 2, "n": n + 1, "c": p["b"] * 1j})
    report = hc.testing.check(f, ({"a": X, "b": X[0]}, 3))
    assert report
    assert "passed   jvp" in str(report)


# --- How often it runs and compiles --------------------------------------------------


def test_derivatives_are_traced_when_they_are_asked_for():
    traced = []

    @jax.custom_jvp
    def inner(x):
        return x * 2

    @inner.defjvp
    def _(primals, tangents):
        traced.append(1)
        return inner(*primals), tangents[0] * 2

    f = hc.bridge.jax(inner)
    assert f(X[0]) == X[0] * 2
    assert not traced
    assert jax.grad(f)(X[0]) == 2
    assert traced


def test_tracing_again_compiles_nothing_again(compiled_during):
    f = hc.bridge.jax(model)
    fresh = lambda: jax.jit(lambda w, x: f(w, x))(W, X).block_until_ready()
    assert compiled_during(fresh) == 2
    assert compiled_during(fresh) == 1
    grad = lambda: jax.block_until_ready(jax.jit(lambda w: jax.grad(f)(w, X))(W))
    assert compiled_during(grad) == 2
    assert compiled_during(grad) == 1
    assert compiled_during(lambda: f(W, X).block_until_ready()) == 0  # eagerly


def test_a_function_is_traced_once_for_its_shapes():
    traced = []

    def fn(x, scale=1.0):
        traced.append(x.shape)
        return x * scale

    f = hc.bridge.jax(fn)
    for _ in range(3):
        f(X)
        jax.jit(lambda x: f(x))(X)
    assert traced == [(3,)]
    f(X[:2])
    f(X, scale=3.0)
    assert len(traced) == 3


def test_a_bridge_and_its_programs_die_together(in_time):
    def life():
        big = np.ones(1000, np.float32)
        f = hc.bridge.jax(lambda x: x + big)
        jax.block_until_ready((f(jnp.float32(1)), jax.grad(lambda x: f(x).sum())(1.0)))
        return weakref.ref(f), weakref.ref(big)

    found = [life() for _ in range(3)]
    jax.clear_caches()
    assert in_time(lambda: all(ref() is None for refs in found for ref in refs))


# --- Arguments and results -------------------------------------------------------------


def test_pytrees_static_leaves_and_keywords():
    def fn(tree, how, *, extra=None, scale):
        assert how == "sum"
        assert extra is None
        return {
            "a": tree["a"].sum() * scale,
            "none": None,
            "t": (tree["b"][0],),
            "e": (),
        }

    f = hc.bridge.jax(fn)
    tree = {"a": X, "b": [W, None]}
    same(f(tree, "sum", scale=2), fn(tree, "sum", scale=2))
    got = jax.jit(jax.grad(lambda t: f(t, "sum", scale=2.0)["a"]))(tree)
    same(got, jax.grad(lambda t: fn(t, "sum", scale=2.0)["a"])(tree))


def test_integers_have_no_derivative():
    fn = lambda n, x: (jnp.asarray(n) * 2, x**n, x > 0)
    f = hc.bridge.jax(fn)
    same(f(3, X), fn(3, X))
    same(jax.grad(lambda x: f(3, x)[1].sum())(X), 3 * X**2)
    zero = jax.grad(lambda n, x: f(n, x)[1].sum(), allow_int=True)(3, X)
    assert zero.dtype == jax.dtypes.float0
    outs, touts = jax.jvp(partial(f, 3), (X,), (X,))
    assert [t.dtype for t in touts] == [jax.dtypes.float0, X.dtype, jax.dtypes.float0]
    same(outs, fn(3, X))


def test_nothing_in_nothing_out():
    assert hc.bridge.jax(lambda: ())() == ()
    assert hc.bridge.jax(lambda: jnp.int32(3))() == 3
    assert hc.bridge.jax(lambda x: None)(X) is None


def test_size_zero():
    f = hc.bridge.jax(lambda x: (x * 2, x.sum()))
    empty = jnp.zeros((0, 2))
    same(f(empty), (empty, jnp.float32(0)))
    same(jax.jit(jax.grad(lambda x: f(x)[1]))(empty), empty)
    same(jax.vmap(f)(jnp.zeros((0, 3))), (jnp.zeros((0, 3)), jnp.zeros(0)))


def test_typed_keys():
    def fn(key, x):
        key, sub = jax.random.split(key)
        return key, x * jax.random.normal(sub, x.shape)

    f = hc.bridge.jax(fn)
    key = jax.random.key(7)
    got, want = f(key, X), fn(key, X)
    assert got[0].dtype == key.dtype
    assert (jax.random.key_data(got[0]) == jax.random.key_data(want[0])).all()
    same(got[1], want[1])
    loss = lambda f: lambda x: (f(key, x)[1] ** 2).sum()
    same(jax.jit(jax.grad(loss(f)))(X), jax.grad(loss(fn))(X))
    keys = jax.random.split(key, 4)
    same(jax.vmap(f, (0, None))(keys, X)[1], jax.vmap(fn, (0, None))(keys, X)[1])
    same(
        hc.bridge.jax(lambda: jax.random.normal(key, (2,)))(),
        jax.random.normal(key, (2,)),
    )


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "int8", "complex64", "bool", "float8_e4m3fn"]
)
def test_dtypes(dtype):
    x = jnp.asarray([1, 0, 1], dtype)
    fn = lambda x: (x, x.astype(jnp.complex64) * 2)
    same(hc.bridge.jax(fn)(x), fn(x))


def test_numbers_are_weak_as_in_jax(x64):
    x = jnp.float32(2)
    fn = lambda x, s: x * s
    f = hc.bridge.jax(fn)
    assert f(x, 3.0).dtype == np.float32
    assert f(x, np.float64(3)).dtype == np.float64
    assert f(jnp.bfloat16(2), 3).dtype == jnp.bfloat16
    assert jax.jit(jax.grad(f))(x, 3.0).dtype == np.float32
    assert jax.grad(f, 1)(x, 3.0) == 2


def test_complex():
    fn = lambda z: (jnp.exp(z) * z).real
    f = hc.bridge.jax(fn)
    z = jnp.complex64(0.3 + 0.4j)
    same(jax.grad(f)(z), jax.grad(fn)(z))
    check_grads(jax.jit(f), (z,), 2, rtol=2e-2, atol=2e-2)


def test_64_bits(x64):
    f = hc.bridge.jax(lambda x: jnp.sin(x) + jnp.ones(3).sum())
    x = jnp.float64(0.1)
    assert f(x).dtype == np.float64
    assert abs(jax.jit(jax.hessian(f))(x) + np.sin(0.1)) < 1e-15


def test_64_bits_here_and_32_there():
    f = hc.bridge.jax(lambda x: x * jnp.ones(2))
    x = np.float64([1, 2])
    assert f(x).dtype == np.float32
    with jax.enable_x64(True):
        assert jax.jit(f)(x).dtype == np.float64
        assert jax.jit(jax.jacrev(f))(x * 3).dtype == np.float64
        assert jax.vmap(f)(x).dtype == np.float64
    assert jax.jit(f)(x).dtype == np.float32


# --- What it closes over ---------------------------------------------------------------


def test_arrays_it_closes_over_may_lie_anywhere():
    far = jax.device_put(W, jax.devices()[2])
    mesh = jax.make_mesh((4,), ("i",))
    spread = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("i")))
    f = hc.bridge.jax(lambda x: far @ x + spread.sum())
    same(jax.jit(f)(X), W @ X + 6)
    same(jax.jit(jax.jacrev(f))(X), W)


def test_values_of_the_program_that_it_closes_over_have_derivatives():
    def loss(bridge, w, x):
        f = bridge(lambda x: jnp.tanh(w @ x) * scale)
        scale = w.sum()
        return (f(x) ** 2).sum()

    mine, plain = partial(loss, hc.bridge.jax), partial(loss, lambda f: f)
    for transform, x in (
        (lambda f: f, X),
        (lambda f: jax.grad(f, (0, 1)), X),
        (lambda f: jax.hessian(f, 1), X),
        (lambda f: jax.vmap(f, (None, 0)), XS),
    ):
        same(jax.jit(transform(mine))(W, x), jax.jit(transform(plain))(W, x))
    same(jax.grad(mine)(W, X), jax.grad(plain)(W, X))


def test_the_same_function_with_another_value_to_close_over():
    cell = {}
    f = hc.bridge.jax(lambda x: cell["w"] * x)

    def loss(w):
        cell["w"] = w
        return f(X).sum()

    same(jax.grad(loss)(2.0), X.sum())
    same(jax.jit(jax.grad(loss))(3.0), X.sum())
    same(jax.jit(loss)(3.0), 3 * X.sum())


# --- Inside the function -----------------------------------------------------------------


def test_jit_custom_rules_and_loops_inside():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))

    @jax.jit
    def fn(x):
        body = lambda c, _: (jnp.sin(c) + clipped(3 * c), c)
        return lax.scan(body, x, length=3)[0].sum()

    f = hc.bridge.jax(fn)
    same(jax.jit(jax.grad(f))(X), jax.grad(fn)(X))
    same(jax.vmap(jax.grad(f))(XS), jax.vmap(jax.grad(fn))(XS))


def test_a_call_inside():
    def fn(x):
        return hc.call(np.sin, x, x, vmap_method="expand_dims") * 2

    f = hc.bridge.jax(fn)
    same(jax.jit(f)(X), 2 * np.sin(X))
    same(jax.vmap(f)(XS), 2 * np.sin(XS))
    g = jax.jit(lambda x: f(x @ x * x))
    jax.block_until_ready([g(X) for _ in range(40)])


def test_a_bridge_in_a_bridge_in_a_bridge(private):
    inner = hc.bridge.jax(jnp.sin)
    middle = hc.bridge.jax(lambda x: inner(x) ** 2, device=private)
    outer = hc.bridge.jax(lambda x: middle(x) * inner(x), device=jax.devices()[3])
    want = lambda x: jnp.sin(x) ** 3
    same(jax.jit(outer)(X), want(X))
    same(
        jax.jit(jax.grad(lambda x: outer(x).sum()))(X), 3 * jnp.sin(X) ** 2 * jnp.cos(X)
    )
    g = jax.jit(outer)
    outs = [g(X * k) for k in range(50)]
    same(outs[20], want(X * 20))


def test_taps_inside():
    seen = []

    def fn(x):
        hc.tap(lambda v: seen.append(float(v)), x)
        return x * 2

    assert jax.jit(hc.bridge.jax(fn))(3.0) == 6
    hc.barrier()
    assert seen == [3]


class Odd(Exception):
    pass


def odd(x):
    raise Odd("seven")


def test_errors_are_raised_unchanged():
    with pytest.raises(Odd, match="seven"):
        hc.bridge.jax(odd)(X)
    with pytest.raises(Odd, match="seven"):
        jax.jit(hc.bridge.jax(odd))(X)
    inside = hc.bridge.jax(lambda x: hc.call(odd, x, x))
    with pytest.raises(Odd, match="seven"), hc.reraise():
        jax.block_until_ready(jax.jit(inside)(X))
    with pytest.raises(Odd, match="seven"):
        inside(X)
    with pytest.raises(TypeError, match="dot_general requires contracting"):
        hc.bridge.jax(lambda a: a @ W)(X)


# --- Devices -----------------------------------------------------------------------------


def test_it_runs_there(private):
    where = []

    def note(x):
        where.append(hc.current().device)
        return x

    fn = lambda x: hc.call(note, x, x)
    jax.block_until_ready(jax.jit(hc.bridge.jax(fn, device=private))(X))
    assert where == [private]
    where.clear()
    jax.block_until_ready(jax.jit(hc.bridge.jax(fn, device=jax.devices()[1]))(X))
    assert where[0].client is not jax.devices()[0].client
    assert where[0].client is not private.client


def test_200_programs_in_flight(device):
    a = jnp.ones((200, 200)) / 200
    f = hc.bridge.jax(lambda a: a @ a, device=device)
    g = jax.jit(lambda a: f(a @ a) @ a)
    for out in [g(a) for _ in range(200)]:
        assert abs(float(out[0, 0]) - 1 / 200) < 1e-6


def test_a_ring_of_devices_that_wait_for_each_other():
    """With JAX alone, 20 programs on each of four devices wait for ever."""
    a, devices = np.ones(late_square(200), np.float32) / 200, jax.devices()
    fs = [hc.bridge.jax(lambda a: a @ a, device=devices[(i + 1) % 4]) for i in range(4)]
    gs = [jax.jit(lambda a, f=f: f(a @ a) @ a) for f in fs]
    at = [jax.device_put(a, d) for d in devices]
    jax.block_until_ready(
        [g(x) for _ in range(40) for g, x in zip(gs, at, strict=True)]
    )


def test_shard_map():
    fn = lambda x: jnp.sin(x) * x.sum()
    inside = over(line(), hc.bridge.jax(fn), P("x"))
    wanted = lambda x: jax.vmap(fn)(x.reshape(4, 2)).ravel()
    x = jnp.arange(8.0)
    same(inside(x), wanted(x))
    got = jax.jit(jax.grad(lambda x: (inside(x) ** 2).sum()))(x)
    same(got, jax.jit(jax.grad(lambda x: (wanted(x) ** 2).sum()))(x))


@pytest.mark.parametrize("make", [line, lambda: jax.make_mesh((4,), ("x",))])
def test_sharded_arrays_and_a_mesh_around(make):
    mesh = make()
    x, plain = jnp.arange(8.0), jnp.arange(8.0)
    x = jax.device_put(x, NamedSharding(mesh, P("x")))
    fn = lambda x: jnp.cumsum(x) * jnp.ones(8)
    f = hc.bridge.jax(fn)
    same(jax.jit(f)(x), fn(plain))
    with jax.set_mesh(mesh):
        same(jax.jit(lambda x: f(x) + 1)(x), fn(plain) + 1)
        got = jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(x)
    same(got, jax.grad(lambda x: (fn(x) ** 2).sum())(plain))


def test_threads():
    f = hc.bridge.jax(model)
    start = threading.Barrier(4)

    def work(k):
        start.wait()
        return [jax.jit(jax.grad(f))(W * k, X) for _ in range(3)]

    with futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    for k in range(4):
        same(found[k][-1], jax.grad(model)(W * k, X))


# --- What is refused ---------------------------------------------------------------------


def test_refusals():
    with pytest.raises(
        hc.errors.SpecError, match=r"device= of `model` should be a jax.Device, such as"
    ):
        hc.bridge.jax(model, device="cpu:1")
    with pytest.raises(
        hc.errors.SpecError, match=r"Write hc.bridge.jax\(fn, device=...\)"
    ):
        hc.bridge.jax(3)
    f = hc.bridge.jax(model)
    text = r"`model` is a bridge.* it takes no defjvp. To give a rule yourself, make"
    with pytest.raises(hc.errors.SpecError, match=text):
        f.defjvp(lambda p, t: t)
    with pytest.raises(hc.errors.SpecError, match="it takes no defbatch"):
        f.defbatch(lambda size, flags, x: (x, True))
    with pytest.raises(TypeError, match="valid JAX type"):
        hc.bridge.jax(lambda x: "text")(X)


def test_timeout():
    late = threading.Event()
    f = hc.bridge.jax(
        lambda x: hc.call(lambda x: (late.wait(20), x)[1], x, x), timeout=0.5
    )
    with pytest.raises(hc.errors.CallTimeoutError):
        f(X)
    late.set()
    wait_until(lambda: hc.monitor.status() == [])


def wait_until(true):
    end = time.monotonic() + 20
    while not true() and time.monotonic() < end:
        time.sleep(0.01)


@hc.bridge.jax
def decorated(x):
    return x + 1


def test_decorator_name_and_pickle():
    assert decorated(X).shape == (3,)
    assert decorated.__name__ == "decorated"
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    again = pickle.loads(pickle.dumps(hc.bridge.jax(model, name="s")))
    same(again(W, X), model(W, X))
    assert again.__name__ == "s"
    twice = hc.bridge.jax(timeout=10, name="twice")(lambda x: 2 * x)
    assert repr(twice) == "<hostcall.typing.HostFunction twice>"
    same(twice(X), 2 * X)


@pytest.mark.parametrize("caller", ["cpu", "gpu"])
def test_on_a_gpu(caller, pytestconfig):
    if pytestconfig.getoption("--platform") != "cuda":
        pytest.skip("--platform cuda")
    other = {"cpu": "gpu", "gpu": "cpu"}[caller]
    f = hc.bridge.jax(model, device=jax.devices(other)[0])
    with jax.default_device(jax.devices(caller)[0]):
        same(jax.jit(jax.grad(f))(W, X), jax.jit(jax.grad(model))(W, X), 1e-3)
        g = jax.jit(lambda x: f(W, x))
        jax.block_until_ready([g(X * k) for k in range(100)])


def test_the_front_page_knows_bridges():
    assert "bridge" in dir(hc)
    assert {"jax", "value_and_grad"} <= set(dir(hc.bridge))
    with pytest.raises(AttributeError, match="no attribute 'pascal'"):
        hc.bridge.pascal


def test_importing_costs_no_library(run_python):
    run_python("""
        import sys, hostcall as hc
        assert "hostcall.bridge" not in sys.modules
        hc.bridge.jax
        assert not {"torch", "casadi"} & set(sys.modules)
    """)
