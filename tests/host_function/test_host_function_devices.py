"""hc.host over several devices, and with other arrays than NumPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import hostcall as hc

X = np.arange(1, 5, dtype=np.float32)
AUTO = jax.sharding.AxisType.Auto
EXPLICIT = jax.sharding.AxisType.Explicit


def product(kind):
    """x * w, with derivative rules of one kind; w is a scalar."""
    nondiff = (0,) if kind == "transpose" else ()
    f = hc.host(np.multiply, result=hc.results.elementwise, nondiff=nondiff)
    total = lambda x: np.sum(x, dtype=np.float32)
    if kind == "vjp":
        f.defvjp(
            lambda x, w: (x * w, (x, w)), lambda r, ct: (r[1] * ct, total(r[0] * ct))
        )
    elif kind == "jaxjvp":
        f.defjvp(lambda p, t: t[0] * p[1] + p[0] * t[1], where="jax")
    elif kind == "jacobian":
        eye = lambda x: np.eye(x.size, dtype=np.float32).reshape(2 * x.shape)
        f.defjacobian(lambda x, w: (eye(x) * w, x))
    else:
        f.deftranspose(lambda ct, x: total(ct * x))
    return f


KINDS = pytest.mark.parametrize("kind", ["vjp", "jaxjvp", "jacobian", "transpose"])


@KINDS
def test_shard_map_adds_up_what_all_devices_share(kind):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AUTO,))
    f = product(kind)
    specs = {"mesh": mesh, "in_specs": (P("i"), P())}
    blocks = jax.shard_map(f, out_specs=P("i"), **specs)
    assert jax.jit(jax.grad(lambda w: blocks(X, w).sum()))(2.0) == X.sum()
    np.testing.assert_array_equal(jax.jit(jax.jacrev(blocks, 1))(X, 2.0), X)

    def inside(x, w):
        return jax.grad(lambda w: jax.lax.psum(f(x, w).sum(), "i"))(w)

    assert jax.jit(jax.shard_map(inside, out_specs=P(), **specs))(X, 2.0) == X.sum()


@KINDS
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
def test_sharded_arrays(kind, axis_type):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(axis_type,))
    f = product(kind)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P("i")))
        loss = lambda x, w: f(x, w).sum()
        assert jax.jit(jax.grad(loss, 1))(x, 2.0) == X.sum()
        if kind != "transpose":
            got = jax.jit(jax.grad(loss))(x, 2.0)
            np.testing.assert_array_equal(got, np.full(4, 2.0))


def of_rows(f):
    """Functions of vectors of which each computes row by row, by a vmap."""
    rows = jax.vmap(f, (0, None))
    own = lambda x: jax.vmap(jax.grad(f), (0, None))(x, 2.0)
    dots = lambda x: jax.vmap(lambda v: jax.jvp(lambda v: f(v, 2.0), (v,), (v,)))(x)
    return {
        "value": lambda x: rows(x, 2.0),
        "sum of x f": lambda x: jax.vmap(lambda v: jnp.dot(f(v, 2.0), v))(x),
        "two axes": lambda x: jax.vmap(lambda v: rows(v, 2.0) + v)(x.reshape(4, 1)),
        "grad of rows": own,
        "grad of a sum": jax.grad(lambda x: rows(x, 2.0).sum()),
        "jvp": dots,
    }


@KINDS
@pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_rows_over_an_explicit_axis(kind, mode):
    """They are sharded as the rows of the arguments, as JAX wants of all in a vmap."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(EXPLICIT,))
    x = jax.device_put(X, jax.NamedSharding(mesh, P("i")))
    without_a_mesh_set = mode(jax.vmap(product(kind), (0, None)))(x, 2.0)
    np.testing.assert_array_equal(without_a_mesh_set, X * 2)
    with jax.set_mesh(mesh):
        for name, g in of_rows(product(kind)).items():
            if kind == "transpose" and ("grad" in name or name == "jvp"):
                continue  # it is no function of x
            if kind == "vjp" and name == "jvp":
                continue
            got, want = mode(g)(x), g(X)
            jax.tree.map(np.testing.assert_array_equal, got, want)
            assert {v.sharding.spec[0] for v in jax.tree.leaves(got)} == {"i"}, name


def test_rows_under_a_transfer_guard():
    f, x = product("vjp"), jax.device_put(X)
    w = jax.device_put(np.float32(2))
    with jax.transfer_guard("disallow"):
        got = jax.vmap(f, (0, None))(x, w)
    np.testing.assert_array_equal(got, X * 2)


@pytest.mark.parametrize("arrays", ["jax", "dlpack"])
def test_other_arrays(arrays):
    here = np.asarray if arrays == "jax" else np.from_dlpack
    f = hc.host(
        lambda x, y: np.sin(here(x)) * here(y), result=hc.results.like(0), arrays=arrays
    )

    @f.defjvp
    def _(primals, tangents):
        (x, y), (x_dot, y_dot) = (map(here, p) for p in (primals, tangents))
        return np.cos(x) * y * x_dot + np.sin(x) * y_dot

    def bwd(residual, ct):
        slope, sine = residual
        return slope * here(ct), sine * here(ct)

    def fwd(x, y):
        x, y = here(x), here(y)
        return np.sin(x) * y, (np.cos(x) * y, np.sin(x))

    f.defvjp(fwd, bwd)
    _, dot = jax.jvp(lambda x: f(x, X), (X,), (X,))
    np.testing.assert_allclose(dot, np.cos(X) * X * X, rtol=1e-5)
    got = jax.jit(jax.grad(lambda x, y: f(x, y).sum(), (0, 1)))(X, X)
    np.testing.assert_allclose(got, (np.cos(X) * X, np.sin(X)), rtol=1e-5)


def test_bfloat16_and_complex_numbers():
    f = hc.host(np.square, result=hc.results.like(0))
    f.defjvp(lambda p, t: 2 * p[0] * t[0])
    f.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * x * ct,))
    for dtype in (jnp.bfloat16, np.complex64):
        x = jnp.asarray(X, dtype)
        out, dot = jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x)
        assert out.dtype == dot.dtype == dtype
        np.testing.assert_allclose(np.asarray(dot, np.complex64), 2 * X * X)
        (back,) = jax.vjp(f, x)[1](x)
        np.testing.assert_allclose(np.asarray(back, np.complex64), 2 * X * X)


def test_a_timeout_holds_for_rules():
    f = hc.host(np.sin, result=hc.results.like(0), timeout=5.0)
    f.defvjp(lambda x: (np.sin(x), np.cos(x)), lambda c, ct: (c * ct,))
    got = jax.jit(jax.grad(lambda x: f(x).sum()))(X)
    np.testing.assert_allclose(got, np.cos(X), rtol=1e-6)
