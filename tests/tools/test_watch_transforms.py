"""`hc.watch` under transformations, and that it changes no result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from watched import N, down, fired

import hostcall as hc


def test_vmap_raises_for_the_row_that_is_bad():
    f = jax.jit(jax.vmap(lambda x: down(x)))
    error = fired(f, jnp.array([20.0, 4.5, 5.5]))
    assert (error.row, error.step, float(error.also)) == ((1,), 5, -0.5)
    assert "in row 1," in str(error)
    nested = jax.jit(jax.vmap(jax.vmap(down)))
    assert fired(nested, jnp.array([[20.0, 20], [20, 3.5]])).row == (1, 1)


def test_rows_that_do_not_take_the_branch_pass():
    def f(x):
        good = x > 0

        def log(x):
            return hc.watch(jnp.log(x), where=good)

        return jax.lax.cond(good, log, lambda x: x, x)

    x = jnp.array([1.0, -1.0, 2.0])
    assert np.isfinite(jax.jit(jax.vmap(f))(x)).all()
    error = fired(jax.jit(jax.vmap(f)), jnp.array([1.0, -1.0, jnp.inf]))
    assert error.row == (2,)


def test_while_loop_rows_that_have_stopped_pass():
    def f(n):
        def body(c):
            hc.watch(jnp.log(n - c), where=c < n)
            return c + 1

        return jax.lax.while_loop(lambda c: c < n, body, 0.0)

    assert jax.jit(jax.vmap(f))(jnp.array([1.0, 4.0])).tolist() == [1, 4]


def test_grad_checks_the_primal_once():
    seen = []

    def f(x):
        y = hc.watch(jnp.sin(x), lambda y: y < -2, action=lambda e: seen.append(e.step))
        return y**2

    for g in (jax.grad(f), jax.grad(jax.checkpoint(f)), jax.value_and_grad(f)):
        jax.block_until_ready(jax.jit(g)(1.0))
        jax.effects_barrier()
        assert seen == [0]
        seen.clear()
    error = fired(jax.jit(jax.grad(lambda x: down(x).sum())), 2.5)
    assert error.step == 3


def test_cotangents():
    def f(x, **options):
        return jnp.sqrt(hc.watch(x * 1.0, name="root", **options))

    assert jnp.isinf(jax.jit(jax.grad(f))(0.0))
    checked = lambda x: f(x, cotangents=True)
    assert jax.jit(jax.grad(checked))(4.0) == 0.25
    error = fired(jax.jit(jax.grad(checked)), 0.0)
    assert error.name == "cotangent of root"
    # The line of the watch, not of the call that asks for the derivative.
    assert error.place.line == test_cotangents.__code__.co_firstlineno + 2
    assert np.isinf(error.values)
    rows = jax.jit(jax.vmap(jax.grad(checked)))
    assert fired(rows, jnp.array([1.0, 0.0])).row == (1,)

    def loop(x):
        return jax.lax.scan(lambda c, _: (checked(c), None), x, None, length=3)[0]

    assert fired(jax.jit(jax.grad(loop)), 0.0).name == "cotangent of root"
    assert jax.jit(jax.grad(jax.checkpoint(loop)))(1.0) == 0.125
    assert jax.jit(jax.jacrev(jax.jacrev(checked)))(1.0) == -0.25
    mixed = {"x": jnp.float32(2), "n": jnp.int32(3)}
    tree = lambda t: hc.watch(t, cotangents=True)["x"] ** 2
    assert jax.jit(jax.grad(tree, allow_int=True))(mixed)["x"] == 4


def test_all_shards_fail_together():
    mesh = meshes.line()
    spec = jax.sharding.PartitionSpec("x")

    def shard(x):
        def body(c, _):
            c = hc.watch(jnp.log(c), also=c)
            return c + jax.lax.pmean(c, "x"), None  # a shard that went on would hang

        return jax.lax.scan(body, x, None, length=3)[0]

    f = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec))
    place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, spec))
    size = mesh.devices.size
    error = fired(f, place(jnp.ones(2 * size).at[3].set(-1)))
    assert error.device == mesh.devices.flat[1]
    assert np.isnan(error.values).tolist() == [
        False,
        True,
    ]


def test_a_sharded_array_arrives_whole():
    mesh = meshes.line()
    x = jax.device_put(
        jnp.arange(8.0) - 3, jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    )
    error = fired(jax.jit(lambda x: hc.watch(jnp.log(x)) * 2), x)
    assert error.values.shape == (8,)
    assert np.isnan(error.values).sum() == 3


def test_steps_of_a_partitioned_loop_are_counted_whichever_device_leads():
    mesh = meshes.line()
    x = jax.device_put(
        jnp.zeros(8), jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    )

    def check(x):
        return jnp.all(x < 40)

    @jax.jit
    def run(x):
        return jax.lax.fori_loop(0, 100, lambda i, x: hc.watch(x, check, also=i) + 1, x)

    error = fired(run, x)
    assert error.step == error.also == 40


# --- Bitwise ----------------------------------------------------------------------------


def loop(show):
    def body(c, i):
        c = jnp.sin(c) * 1.1 + 0.01 * i
        c = show(c)
        return c, c

    def run(x):
        last, all_ = jax.lax.scan(body, x, jnp.arange(N))
        return last + all_.sum()

    return run


def whiled(show):
    body = lambda s: (s[0] + 1, show(s[1] * 1.3 + 0.1))
    return lambda x: jax.lax.while_loop(lambda s: s[1] < 50, body, (0, x))[1]


BATCH = jnp.linspace(0.1, 1, 5)
PROGRAMS = {
    "scan": lambda show: jax.jit(loop(show))(0.3),
    "while": lambda show: jax.jit(whiled(show))(0.3),
    "vmap": lambda show: jax.jit(jax.vmap(loop(show)))(BATCH),
    "vmap of while": lambda show: jax.jit(jax.vmap(whiled(show)))(BATCH),
    "grad": lambda show: jax.jit(jax.grad(loop(show)))(0.3),
    "remat": lambda show: jax.jit(jax.grad(jax.checkpoint(loop(show))))(0.3),
    "vmap of grad": lambda show: jax.jit(jax.vmap(jax.grad(loop(show))))(BATCH),
    "eager": lambda show: loop(show)(0.3),
}
WATCHES = {
    "plain": {},
    "cotangents": {"cotangents": True},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_the_same_bits(name, optimized):
    plain = np.asarray(PROGRAMS[name](lambda x: x)).tobytes()
    for watch, options in WATCHES.items():
        show = lambda x, options=options: hc.watch(x, also=x, **options)
        assert np.asarray(PROGRAMS[name](show)).tobytes() == plain, watch


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_cotangents_of_integers_pass(wrap):
    def loss(x):
        tree = hc.watch({"x": x, "i": jnp.arange(2)}, cotangents=True)
        return jnp.sin(tree["x"]).sum()

    x = jnp.arange(3.0)
    np.testing.assert_allclose(wrap(jax.grad(loss))(x), jnp.cos(x), rtol=1e-6)
