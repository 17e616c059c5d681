"""`hc.host(float64=True)`: what the function and its rules get, and what comes back."""

from __future__ import annotations

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dtypes import DTYPES

import hostcall as hc

X = jnp.array([0.3, -0.2, 0.8])
ROWS = jnp.stack([X, 2 * X, X - 1, X])
METHODS = (
    None,
    "sequential",
    "parallel",
    "expand_dims",
    "broadcast_all",
    "legacy_vectorized",
)
TINY = 1e-12  # lost beside 1 in float32


def slope(x):
    """A difference that is nothing in float32."""
    assert x.dtype == np.float64, x.dtype
    return ((x + 1) ** 3 * (1 + TINY) - (x + 1) ** 3) / TINY


def want(x):
    return (np.asarray(x, np.float64) + 1) ** 3


def close(got, want, dtype=jnp.float32):
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want, rtol=1e-3)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_function_gets_float64(transform):
    f = transform(hc.host(slope, result=hc.results.like(0), float64=True))
    close(f(X), want(X))


@pytest.mark.parametrize("method", METHODS)
def test_every_vmap_method(method):
    f = hc.host(slope, result=hc.results.like(0), vmap_method=method, float64=True)
    close(jax.jit(jax.vmap(f))(ROWS), want(ROWS))
    if method == "legacy_vectorized":  # which takes no where= of rows
        return
    masked = jax.jit(jax.vmap(lambda x, go: f.where(go, fill=-1.0)(x)))
    got = masked(ROWS, jnp.array([True, False, True, True]))
    close(got[::2], want(ROWS[::2]))
    assert (got[1] == -1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, x64):
    kind = np.dtype(getattr(jnp, dtype))
    x = jnp.ones((2,), kind)
    wide = kind
    if jnp.issubdtype(kind, jnp.inexact):
        wide = np.dtype("c16" if jnp.issubdtype(kind, jnp.complexfloating) else "f8")
    got = []

    @hc.host(result=hc.results.like(0), float64=True)
    def f(x):
        got.append(x.dtype)
        return x

    assert jax.jit(f)(x).dtype == kind
    assert got == [wide]


def test_complex_integers_trees_keys_and_static_arguments():
    def f(tree, key, how):
        assert {k: v.dtype.name for k, v in tree.items()} == {
            "z": "complex128", "n": "int32", "flag": "bool", "h": "float64"
        }  # fmt: skip
        assert jax.random.bits(key).dtype == jnp.uint32
        assert how == "sum"
        return {"z": tree["z"] + tree["h"].sum(), "n": tree["n"]}

    tree = {
        "z": jnp.complex64(1j),
        "n": jnp.int32(3),
        "flag": True,
        "h": jnp.ones(2, jnp.bfloat16),
    }
    result = {"z": jnp.complex64(0), "n": jnp.int32(0)}
    g = hc.host(f, result=result, float64=True)
    got = jax.jit(lambda tree, key: g(tree, key, "sum"))(tree, jax.random.key(0))
    assert got["z"] == 2 + 1j
    assert got["z"].dtype == jnp.complex64
    assert got["n"] == 3


POLICIES = {
    "timeout": {"timeout": 60},
    "lend": {"lend": True},
    "dlpack": {"arrays": "dlpack"},
    "unordered": {"order": "unordered"},
    "ordered": {"order": "ordered"},
}


@pytest.mark.parametrize("given", POLICIES.values(), ids=POLICIES)
def test_with_other_options(given):
    def f(x):
        return slope(np.from_dlpack(x) if given.get("arrays") else x)

    f = hc.host(f, result=hc.results.like(0), float64=True, **given)
    close(jax.jit(f)(X), want(X))
    if "order" not in given:
        close(jax.jit(jax.vmap(f))(ROWS), want(ROWS))


def test_a_coroutine_function():
    async def f(x):
        await asyncio.sleep(0)
        return slope(x)

    f = hc.host(f, result=hc.results.like(0), float64=True)
    close(jax.jit(jax.vmap(f))(ROWS), want(ROWS))


def test_lent_results_have_the_declared_dtype():
    def f(x, *, out):
        assert out.dtype == np.float32
        out[...] = slope(x)

    f = hc.host(f, result=hc.results.like(0), lend="out", float64=True)
    close(jax.jit(f)(X), want(X))


def test_a_call_of_the_function():
    close(hc.call(hc.host(slope, float64=True), X, X), want(X))
    assert (
        hc.call(hc.host(lambda x: x.dtype.num, float64=True), 0, X)
        == np.dtype("f8").num
    )


def test_what_is_inferred_is_what_the_function_returns_for_float64():
    f = hc.host(slope, result="infer", float64=True)
    close(f(X), want(X))
    with jax.enable_x64(True):
        assert f(X).dtype == jnp.float64


def test_float64_arguments_stay(x64):
    f = hc.host(slope, result=hc.results.like(0), float64=True)
    close(jax.jit(f)(jnp.float64([1.0])), [8.0], jnp.float64)


# --- Rules -----------------------------------------------------------------------------


def wide(*arrays):
    for x in jax.tree.leaves(arrays):
        assert x.dtype == np.float64, x.dtype


def cube(x, y):
    wide(x, y)
    return x**3 * y


def by_jvp(f):
    @f.defjvp
    def _(primals, tangents):
        wide(primals, tangents)
        (x, y), (dx, dy) = primals, tangents
        return 3 * x**2 * y * dx + x**3 * dy


def by_vjp(f, **more):
    def fwd(x, y):
        wide(x, y)
        return x**3 * y, (3 * x**2 * y, x**3)

    def bwd(kept, ct):
        wide(kept, ct)
        return tuple(each * ct for each in kept)

    f.defvjp(fwd, bwd, **more)


def by_vjp_with_arrays(f):
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    by_vjp(f, residuals=(like, like))


def by_jacobian(f):
    @f.defjacobian
    def _(x, y):
        wide(x, y)
        return np.diag(3 * x**2 * y), np.diag(x**3)


def by_jax(f):
    @f.defjvp(where="jax")
    def _(primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        assert x.dtype == dx.dtype == jnp.float32
        return 3 * x**2 * y * dx + x**3 * dy


def by_differences(f):
    hc.derivatives.finite_difference(f)


FORWARD = (by_jvp, by_jacobian, by_jax, by_differences)
REVERSE = (by_vjp, by_vjp_with_arrays, by_jacobian, by_jax, by_differences)


@pytest.mark.parametrize("rule", FORWARD)
@pytest.mark.parametrize("method", [None, "parallel"])
def test_rules_of_forward_mode(rule, method):
    f = hc.host(cube, result=hc.results.like(0), vmap_method=method, float64=True)
    rule(f)
    _, got = jax.jit(lambda: jax.jvp(f, (X, X + 1), (X, X)))()
    close(got, 3 * X**3 * (X + 1) + X**4)
    rows = jax.jit(jax.vmap(lambda x: jax.jvp(f, (x, x + 1), (x, x))[1]))(ROWS)
    close(rows, 3 * ROWS**3 * (ROWS + 1) + ROWS**4)


@pytest.mark.parametrize("rule", REVERSE)
@pytest.mark.parametrize("method", [None, "parallel"])
def test_rules_of_reverse_mode(rule, method):
    f = hc.host(cube, result=hc.results.like(0), vmap_method=method, float64=True)
    rule(f)
    grad = jax.grad(lambda x: f(x, x + 1).sum())
    close(jax.jit(grad)(X), 3 * X**2 * (X + 1) + X**3)
    close(grad(X), 3 * X**2 * (X + 1) + X**3)
    close(jax.jit(jax.vmap(grad))(ROWS), 3 * ROWS**2 * (ROWS + 1) + ROWS**3)


def test_a_transposed_linear_function():
    @hc.host(result=hc.results.like(0), float64=True)
    def double(x):
        wide(x)
        return 2 * x

    @double.deftranspose
    def _(ct):
        wide(ct)
        return 2 * ct

    close(jax.jit(jax.grad(lambda x: double(x).sum()))(X), [2, 2, 2])


# --- What is refused, and what travels -------------------------------------------------


@pytest.mark.parametrize("arrays", ["jax", "cuda"])
def test_arrays_of_the_programs_dtypes_are_refused(arrays):
    text = f"float64=True and arrays='{arrays}'. Such arrays have the dtypes of the"
    with pytest.raises(hc.errors.SpecError, match=text):
        hc.host(slope, result=hc.results.like(0), arrays=arrays, float64=True)
    with pytest.raises(hc.errors.SpecError, match=text):
        hc.call(hc.host(slope, float64=True), X, X, arrays=arrays)


def test_another_value_is_refused():
    with pytest.raises(hc.errors.SpecError, match="float64= of `slope` should be"):
        hc.host(slope, result=hc.results.like(0), float64="yes")


def test_a_call_without_hc_host_says_where_it_belongs():
    with pytest.raises(hc.errors.SpecError, match=r"hc.host\(fn, float64=...\)"):
        hc.call(slope, X, X, float64=True)


def test_an_exported_program():
    pytest.importorskip("flatbuffers")
    f = hc.register("tests.float64.slope")(
        hc.host(slope, result=hc.results.like(0), float64=True)
    )
    close(hc.load(bytes(hc.export(jax.jit(f))(X))).call(X), want(X))


def test_programs_that_differ_in_it_are_different():
    def kind(x):
        return np.int32(x.dtype.itemsize)

    spec = jax.ShapeDtypeStruct((), jnp.int32)
    run = jax.jit(
        lambda x: [hc.call(hc.host(kind, float64=w), spec, x) for w in (0 > 1, 1 > 0)]
    )
    assert run(jnp.float32(1)) == [4, 8]
