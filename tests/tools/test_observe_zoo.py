"""All uses of `hc.observe` at once, in programs of many kinds: they compute the
same as without.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import hostcall as hc
from hostcall import observe

P = PartitionSpec
X = np.linspace(0.1, 0.9, 8, dtype=np.float32)


def keys_in_a_loop(x):
    def body(key, x):
        key, sub = jax.random.split(key)
        return key, x + jax.random.normal(sub)

    key, ys = jax.lax.scan(body, jax.random.key(0), x)
    return jax.random.key_data(key), ys


def linear_algebra(x):
    a = jnp.outer(x, x) + jnp.eye(8)
    q, r = jnp.linalg.qr(a)
    return jnp.linalg.solve(a, x), jnp.linalg.cholesky(a), q @ r


def hessian(x):
    return jax.hessian(lambda x: jnp.linalg.inv(jnp.outer(x, x) + jnp.eye(8)).sum())(x)


def solver(x):
    matvec = lambda v: v * x
    return jax.grad(lambda b: jax.scipy.sparse.linalg.cg(matvec, b)[0].sum())(x)


def special(x):
    return jax.scipy.special.gammainc(x, x), jnp.sort(x), jnp.fft.fft(x), jnp.cumsum(x)


def empty(x):
    return x[:0] * 2, jnp.zeros((0, 3)).sum(0)


def integers(x):
    return jax.lax.fori_loop(0, 5, lambda i, n: n * 3 + i, jnp.int32(x.sum()))


def small_types(x):
    return x.astype(jnp.bfloat16) * 2, x.astype(jnp.float8_e4m3fn), x.astype(jnp.int4)


def complexes(x):
    return jnp.exp(1j * x), jnp.abs(jnp.exp(1j * x))


def switch(x):
    branches = [
        jnp.sin,
        jnp.cos,
        lambda x: jax.lax.scan(lambda c, x: (c + x, c), 0.0, x)[1],
    ]
    return jax.vmap(lambda i: jax.lax.switch(i, branches, x))(jnp.arange(3))


def scatter(x):
    x, at = jnp.asarray(x), jnp.array([0, 0, 3, 1, 2, 2, 2, 5])
    return x.at[at].add(1), x.at[at].max(0.5), jax.ops.segment_sum(x, at, 8)


def buffers(x):
    def body(i, s):
        buffer, total = s
        buffer = buffer.at[i].set(total).at[i + 1].add(2)
        return buffer, total + buffer[i] * 0.5

    return jax.lax.fori_loop(0, 7, body, (x, 0.0))


def nested_derivatives(x):
    f = lambda x: jax.lax.scan(lambda c, x: (jnp.sin(c * x), c), 1.0, x)[0]
    return jax.grad(lambda x: jax.grad(f)(x).sum())(x), jax.jacfwd(jax.grad(f))(x)


def vmapped_while(x):
    f = lambda x: jax.lax.while_loop(
        lambda s: s[0] < 9 * x, lambda s: (s[0] + 1, s[1] * x), (0, x)
    )
    return jax.vmap(f)(x)


def remat_in_scan(x):
    body = jax.checkpoint(lambda c, x: (jnp.sin(c) + x, c), prevent_cse=False)
    return jax.grad(lambda x: jax.lax.scan(body, 0.0, x, unroll=2)[0])(x)


def remat_of_some_arguments(x):
    step = jax.checkpoint(lambda c, x: jnp.sin(c) * x, prevent_cse=(True, False))
    body = lambda c, x: (step(c, x), c)
    return jax.grad(lambda x: jax.lax.scan(body, 1.0, x)[0])(x)


def associative(x):
    return jax.lax.associative_scan(jnp.multiply, x), jax.lax.map(
        jnp.sin, x, batch_size=3
    )


def refs(x):
    ref = jax.new_ref(x) if hasattr(jax, "new_ref") else jax.array_ref(x)

    def body(i, c):
        ref[i] = ref[i] * 2
        return c + ref[i]

    return jax.lax.fori_loop(0, 3, body, 0.0), ref[...]


def calls(x):
    def body(c, x):
        y = hc.call(np.sin, x, x)
        hc.call(lambda y: None, None, y, order="ordered")
        hc.tap(lambda y: None, y, order="ordered")
        return c + y, jax.pure_callback(np.cos, y, y)

    return jax.lax.scan(body, 0.0, x)


def constants(x):
    table = jnp.asarray(np.arange(64.0, dtype=np.float32).reshape(8, 8))
    return jax.jit(lambda x: table @ x + np.ones(8, np.float32))(x)


def literals(x):
    return 1.0, x, jnp.pi


def constants_of_a_program(x):
    """A program that runs while this one is traced."""
    with jax.ensure_compile_time_eval():
        basis = jax.jit(lambda: jax.lax.fori_loop(0, 3, lambda i, c: c + 1.0, 0.0))()
        other = jnp.ones(8) * 2
    return x * basis + other


def constants_in_a_loop(x):
    def body(c, x):
        return c + constants_of_a_program(x).sum(), c

    return jax.lax.scan(body, 0.0, x)


def constants_of_a_gradient(x):
    steps = lambda y: jax.lax.scan(lambda c, _: (c * y, None), 1.0, None, length=5)[0]
    with jax.ensure_compile_time_eval():
        slope = jax.jit(lambda: jax.grad(steps)(1.0))()
    return x * slope


def constants_in_a_rule(x):
    f = jax.custom_jvp(lambda x: x * 6)

    @f.defjvp
    def rule(primals, tangents):
        with jax.ensure_compile_time_eval():
            slope = jnp.ones(3) * 2
        return f(*primals), slope.sum() * tangents[0]

    return jax.grad(lambda x: f(x).sum())(x)


ZOO = [
    *(keys_in_a_loop, linear_algebra, hessian, solver, special, empty, integers),
    *(small_types, complexes, switch, scatter, buffers, nested_derivatives),
    *(
        vmapped_while,
        remat_in_scan,
        remat_of_some_arguments,
        associative,
        refs,
        calls,
        constants,
        literals,
        constants_of_a_program,
        constants_in_a_loop,
        constants_of_a_gradient,
        constants_in_a_rule,
    ),
]


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert getattr(x, "sharding", None) == getattr(y, "sharding", None)
        kind = np.complex128 if jnp.iscomplexobj(x) else np.float64
        x, y = np.asarray(x).astype(kind), np.asarray(y).astype(kind)
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5)


def everything():
    """A block with all uses, which sees each value."""
    records = []
    select = lambda record: records.append(record) or True
    options = {"nans": True, "progress": True, "select": select}
    return observe(**options, to=lambda record, value: None), records


@pytest.mark.parametrize("f", ZOO, ids=lambda f: f.__name__)
def test_zoo(f):
    pytest.importorskip("tqdm")
    expected = jax.jit(f)(X)
    block, records = everything()
    with block:
        found = jax.jit(f)(X)
        again = jax.jit(f)(X)
    same(expected, found)
    same(expected, again)
    assert records or f in (empty, literals)
    same(expected, jax.jit(f)(X))


@pytest.mark.parametrize(
    "f", [special, scatter, linear_algebra], ids=lambda f: f.__name__
)
def test_without_jit(f):
    pytest.importorskip("tqdm")
    block, _ = everything()
    with block:
        found = f(X)
    same(f(X), found)


@pytest.mark.parametrize("explicit", [False, True])
def test_on_a_mesh(explicit):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(kind, kind))

    def body(c, x):
        return c + jnp.sin(x), c * x

    f = jax.jit(lambda x: jax.lax.scan(body, x[0] * 0, x))
    x = np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    x = jax.device_put(x, NamedSharding(mesh, P(None, "i", "j")))
    block, _ = everything()
    with jax.set_mesh(mesh):
        expected = f(x)
        with block:
            found = f(x)
    same(expected, found)


def test_x64():
    block, _ = everything()
    with jax.enable_x64(True):
        x = np.array([1e300, 1e-50, 2.0])
        f = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c + x, c * 0.5), 0.0, x))
        expected = f(x)
        with block:
            found = f(x)
    same(expected, found)


def test_compiled_ahead_and_exported():
    f = jax.jit(lambda x: jnp.sin(x) * 2)
    block, _ = everything()
    with block:
        ahead = f.lower(X).compile()
        exported = jax.export.export(f)(X).serialize()
        same(ahead(X), f(X))
    same(f(X), jax.export.deserialize(exported).call(X))
    assert len(exported) == len(jax.export.export(f)(X).serialize())


def test_exported_without_devices():
    nowhere = NamedSharding(jax.sharding.AbstractMesh((1,), ("i",)), P())
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=nowhere)
    block, _ = everything()
    with block:
        exported = jax.export.export(jax.jit(jnp.sin), platforms=("cpu",))(x)
    same(exported.call(X), jnp.sin(X))
