"""Symbolic sizes: which follow from a call's arrays, fills, and elementwise results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registered as r

import hostcall as hc

pytest.importorskip("flatbuffers")
LIKE = jax.ShapeDtypeStruct((), np.float32)
times = hc.register("tests.times")(
    hc.host(lambda x, y: np.multiply(x, y), result=hc.results.elementwise)
)


def row(where, method):
    def f(v):
        return hc.call(r.sine, v, v, where=where(v), fill=7, vmap_method=method)

    return f


PROGRAMS = {
    "fill": row(lambda v: v[0] > 1, None),
    "fill of rows": lambda x: jax.vmap(row(lambda v: v[0] > 1, None))(jnp.diag(x)),
    "fill of a batch": lambda x: jax.vmap(row(lambda v: v[0] > 1, "expand_dims"))(
        jnp.diag(x)
    ),
    "fill of host": lambda x: r.cube.where(x[0] > 1, fill=7.0)(x),
    "derivative of a fill": jax.grad(
        lambda x: r.cube.where(x[0] > 1, fill=7.0)(x).sum()
    ),
    "elementwise": lambda x: times(x, 2.0),
    "elementwise outer": lambda x: times(x[:, None], x),
    "elementwise rows": jax.vmap(lambda v: times(v, 2.0)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_size_gives_the_program(name):
    f = PROGRAMS[name]
    (n,) = jax.export.symbolic_shape("n")
    data = bytes(hc.export(f)(jax.ShapeDtypeStruct((n,), np.float32)))
    loaded = hc.load(data)
    for size in (1, 4):
        for start in (0.5, 1.5):
            x = jnp.linspace(start, 2, size)
            np.testing.assert_allclose(loaded.call(x), f(x), rtol=1e-6)


def test_a_fill_of_a_symbolic_shape_is_one_number():
    (n,) = jax.export.symbolic_shape("n")
    f = lambda x: hc.call(r.sine, x, x, where=x[0] > 0, fill=np.ones(4))
    with pytest.raises(hc.errors.SpecError, match="fill= of `sine` is array"):
        hc.export(f)(jax.ShapeDtypeStruct((n,), np.float32))


total = hc.register("tests.total")(
    hc.host(lambda x, y: np.float32(x.sum() * y.sum()), result=LIKE)
)
total.defvjp(
    lambda x, y: (np.float32(x.sum() * y.sum()), np.float32(y.sum())),
    lambda y, ct: (np.full(3, y * ct, np.float32), None),
    residuals=LIKE,
)


def test_a_size_that_does_not_follow_is_an_error_of_the_export():
    n, m = jax.export.symbolic_shape("n, m")
    specs = [jax.ShapeDtypeStruct((size,), np.float32) for size in (n, m)]
    with pytest.raises(
        hc.errors.ExportError, match=r"the sizes m don't follow .*\(n\)"
    ):
        hc.export(jax.grad(total))(*specs)
    three = jax.ShapeDtypeStruct((3,), np.float32)
    loaded = hc.load(bytes(hc.export(jax.grad(total))(three, three)))
    np.testing.assert_allclose(loaded.call(jnp.ones(3), jnp.ones(3)), np.full(3, 3))


class Careful:
    """A pytree that refuses children that are Python's numbers."""

    def __init__(self, x):
        assert not isinstance(x, int)
        self.x = x


jax.tree_util.register_pytree_node(
    Careful, lambda c: ((c.x,), None), lambda _, xs: Careful(*xs)
)
jax.export.register_pytree_node_serialization(
    Careful,
    serialized_name="tests.Careful",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: None,
)


def test_a_tree_is_read_with_opaque_leaves():
    x = jnp.ones(2)
    inside = hc.register("tests.inside")(lambda careful: careful.x)
    data = bytes(hc.export(lambda x: hc.call(inside, x, Careful(x)))(x))
    np.testing.assert_array_equal(hc.load(data).call(x), x)
