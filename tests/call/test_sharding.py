"""Calls in jitted programs over sharded arrays: one call, on the whole value."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc

ORDERS = pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
X = np.arange(32, dtype=np.float32).reshape(4, 8)
SPECS = [P("x"), P("x", "y"), P(None, ("y", "x")), P()]


def grid(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))


def put(x, spec, kind=AxisType.Auto):
    return jax.device_put(x, NamedSharding(grid(kind), spec))


class Host:
    """Doubles on the host; `seen` has each argument and the device that called."""

    def __init__(self, **options):
        self.options, self.seen = options, []

    def double(self, x):
        assert hc.current().mesh_coords == {}
        self.seen.append((x.copy(), hc.current().device))
        return x * 2

    def tell(self, x):
        self.double(x)

    def __call__(self, x):
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return hc.call(self.double, result, x, **self.options)

    def check(self, *values, device=0):
        jax.effects_barrier()
        assert [at.id for _, at in self.seen] == [device] * len(values)
        for (seen, _), want in zip(self.seen, values, strict=True):
            np.testing.assert_array_equal(seen, want)


@ORDERS
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_call_gets_the_whole_value(spec, order):
    host = Host(order=order)
    x = put(X, spec)
    np.testing.assert_array_equal(jax.jit(lambda v: host(v) + v)(x), X * 2 + X)
    host.check(X)


@ORDERS
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_mesh_of_explicit_axes(spec, order):
    host = Host(order=order)
    x = put(X, spec, AxisType.Explicit)
    np.testing.assert_array_equal(jax.jit(lambda v: host(v) + v)(x), X * 2 + X)
    host.check(X)


@pytest.mark.parametrize("method", ["sequential", "parallel", "expand_dims"])
def test_rows_over_an_explicit_axis(method):
    host = Host(vmap_method=method)
    x = put(X, P("x"), AxisType.Explicit)
    got = jax.jit(jax.vmap(lambda v: jnp.dot(host(v), v)))(x)
    np.testing.assert_array_equal(got, (X * X * 2).sum(1))
    assert got.sharding.spec == P("x")
    np.testing.assert_array_equal(jax.vmap(host, 1, 1)(x), X * 2)


@ORDERS
def test_the_result_can_be_sharded_again(order):
    host = Host(order=order)
    sharding = NamedSharding(grid(), P("y", "x"))
    f = jax.jit(lambda v: host(v * 3), out_shardings=sharding)
    got = f(put(X, P("x", "y")))
    np.testing.assert_array_equal(got, X * 6)
    assert got.sharding.is_equivalent_to(sharding, 2)
    host.check(X * 3)


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_a_call_without_results(order):
    host = Host()

    @jax.jit
    def f(v):
        hc.call(host.tell, None, v, order=order)
        hc.call(host.tell, None, v + 1, order=order)
        return v

    f(put(X, P("x", "y"))).block_until_ready()
    host.check(X, X + 1)


@ORDERS
def test_in_a_loop_and_a_cond(order):
    host = Host(order=order)

    @jax.jit
    def f(v):
        def body(i, c):
            return lax.cond(i % 2 == 0, lambda u: host(u) - u + 1, lambda u: u + 1, c)

        return lax.fori_loop(0, 6, body, v)

    np.testing.assert_array_equal(f(put(X, P("x", "y"))), X + 6)
    host.check(X, X + 2, X + 4)


@ORDERS
def test_under_vmap_with_a_mask(order):
    host = Host(order=order)
    mask = np.array([True, False, False, True])
    f = jax.jit(jax.vmap(lambda v, w: hc.call(host.double, v, v, where=w, order=order)))
    np.testing.assert_array_equal(f(put(X, P("x", "y")), mask), X * 2 * mask[:, None])
    host.check(X[0], X[3])


@ORDERS
@pytest.mark.parametrize("number", range(4))
def test_on_picks_the_device(number, order):
    device = jax.devices()[number]
    host = Host(order=order, on=device)
    f = jax.jit(lambda v: host(v) + v)
    for _ in range(2):
        np.testing.assert_array_equal(f(put(X, P("x", "y"))), X * 3)
    host.check(X, X, device=number)


def test_a_device_outside_of_the_program_is_refused():
    host = Host(on=jax.devices()[3])
    x = jax.device_put(X, NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P()))
    with pytest.raises(
        hc.errors.HostcallError, match="is not among the devices of the program"
    ):
        jax.jit(host)(x)


ON_OTHER = "has on=.*not among the devices of {}: .*leave out on=.*jax.device_put"


@pytest.mark.parametrize("face", ["call", "tap", "print"])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("committed", [False, True])
def test_another_device_than_the_one_is_refused(face, wrap, committed):
    other = jax.devices()[2]
    x = jnp.ones(3)
    if committed:
        x = jax.device_put(x, jax.devices()[1])

    def f(v):
        if face == "call":
            return hc.call(lambda v: v, v, v, on=other)
        hc.tap(print, v, on=other) if face == "tap" else hc.print("{}", v, on=other)
        return v

    of = "the program" if wrap is jax.jit else "its arrays"
    with pytest.raises(hc.errors.HostcallError, match=ON_OTHER.format(of)):
        wrap(f)(x)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_one_device_may_be_named(wrap):
    device = jax.devices()[1]
    f = wrap(lambda v: hc.call(lambda v: v * 2, v, v, on=device))
    out = f(jax.device_put(jnp.ones(3), device))
    assert out.devices() == {device}
    np.testing.assert_array_equal(out, np.full(3, 2))


@pytest.mark.parametrize("number", [None, 0, 2])
def test_eager_and_jitted_calls_leave_results_on_the_same_devices(number):
    on = "once" if number is None else jax.devices()[number]
    where = []

    def host(v):
        where.append(hc.current().device.id)
        return v * 2

    def f(v):
        return hc.call(host, v, v, on=on)

    x = put(X, P("x", "y"))
    eager, jitted = f(x), jax.jit(f)(x)
    np.testing.assert_array_equal(eager, jitted)
    assert eager.devices() == jitted.devices()
    assert eager.is_fully_replicated
    assert jitted.is_fully_replicated
    assert where == [number or 0] * 2


def test_an_eager_call_on_a_device_without_its_arrays_is_refused():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    with pytest.raises(hc.errors.HostcallError, match=ON_OTHER.format("its arrays")):
        hc.call(lambda v: v, X, x, on=jax.devices()[3])


def test_host_code_has_one_device_for_all():
    """A function that names a device may be called in host code, whose device it is."""
    inner = jax.jit(lambda v: hc.call(lambda v: v + 1, v, v, on=jax.devices()[2]))

    def host(v):
        return np.asarray(inner(v))

    out = jax.jit(lambda v: hc.call(host, v, v))(jnp.zeros(3))
    np.testing.assert_array_equal(out, np.ones(3))


@pytest.mark.parametrize("on", ["first", 0, "mesh", None, "sharding"])
def test_another_place_is_refused(on):
    if on == "mesh":
        on = NamedSharding(grid(), P())
    elif on == "sharding":
        on = SingleDeviceSharding(jax.devices()[0])
    host = Host(on=on)
    text = "on= of `Host.double` should be 'once' or a device, such as jax.devices()[0]"
    with pytest.raises(hc.errors.SpecError, match=re.escape(text)):
        jax.jit(host)(X)


def test_a_call_of_each_block_is_refused():
    text = "on= of `Host.double` should be 'once' or a device, such as jax.devices()[0]"
    with pytest.raises(hc.errors.SpecError, match=re.escape(text)) as caught:
        jax.jit(Host(on="shards"))(X)
    assert "make the call inside jax.shard_map" in str(caught.value)
    assert "hc.tap(Host.double, ..., on='shards')" in str(caught.value)


def test_a_program_on_one_other_device():
    host = Host()
    got = jax.jit(host)(jax.device_put(X, jax.devices()[2]))
    np.testing.assert_array_equal(got, X * 2)
    assert got.devices() == {jax.devices()[2]}
    host.check(X, device=2)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_eager_call(spec):
    host = Host()
    got = host(put(X, spec))
    np.testing.assert_array_equal(got, X * 2)
    assert got.devices() == set(jax.devices())
    host.check(X)


@ORDERS
def test_failing_call(order):
    def host(x):
        if x[0, 0] < 0:
            raise KeyError("negative")
        return x

    f = jax.jit(lambda v: hc.call(host, v, v, order=order).sum())
    for _ in range(3):
        with pytest.raises(KeyError, match="negative"), hc.reraise():
            f(put(X - 1, P("x", "y"))).block_until_ready()
        assert f(put(X, P("x", "y"))) == X.sum()


def test_overlapping_programs_keep_the_ordered_calls_in_order():
    seen = []

    def host(n, x):
        seen.append(int(n))

    @jax.jit
    def f(n, x):
        hc.call(host, None, n, x, order="ordered")
        hc.call(host, None, n + 1, x * 2, order="ordered")
        return jnp.sin(x) @ x.T

    x = put(X, P("x", "y"))
    outs = [f(n, x) for n in range(0, 60, 2)]
    jax.block_until_ready(outs)
    jax.effects_barrier()
    assert seen == list(range(60))
