"""Programs that are exported, written to bytes, and loaded: as without all that."""

from __future__ import annotations

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registered as r
from registered import travelled

import hostcall as hc

pytest.importorskip("flatbuffers")
X = jnp.linspace(0.1, 1.0, 4)
LIKE = jax.ShapeDtypeStruct((), np.float32)


def row(x):
    return hc.call(r.sine, LIKE, x)


PROGRAMS = {
    "pure": lambda x: hc.call(r.sine, x, x),
    "unordered": lambda x: hc.call(r.sine, x, x, order="unordered"),
    "ordered": lambda x: hc.call(r.sine, x, x, order="ordered"),
    "twice": lambda x: hc.call(r.sine, x, hc.call(r.sine, x, x, order="ordered")),
    "rows": jax.vmap(row),
    "rows at once": jax.vmap(
        lambda x: hc.call(r.sine, LIKE, x, vmap_method="parallel")
    ),
    "whole batch": jax.vmap(
        lambda x: hc.call(r.sine, LIKE, x, vmap_method="expand_dims")
    ),
    "rows of rows": lambda x: jax.vmap(jax.vmap(row))(jnp.outer(x, x)),
    "where": jax.vmap(lambda x: hc.call(r.sine, LIKE, x, where=x > 0.5, fill=7)),
    "coroutine": lambda x: hc.call(r.slow, x, x),
    "timeout": lambda x: hc.call(r.limited, x, x),
    "lend": lambda x: hc.call(r.sine, x, x, lend=True),
    "jax arrays": lambda x: hc.call(r.sine, x, x, arrays="jax"),
    "trees": lambda x: hc.call(
        r.scaled,
        {"a": x, "b": (x,)},
        {"a": x, "b": (x, None)},
        by=jnp.float32(2),
        how="up",
    ),
    "named tuple": lambda x: tuple(
        hc.call(r.swapped, r.Pair(x[0], x), r.Pair(x, x[0]))
    ),
    "key": lambda x: jax.random.uniform(
        hc.call(r.drawn, jax.random.key(0), jax.random.key(3))
    ),
    "scan": lambda x: jax.lax.scan(lambda c, x: (c + row(x), row(c)), 0.0, x),
    "while": lambda x: jax.lax.while_loop(
        lambda c: row(c) < 0.9, lambda c: c + row(c), x[0]
    ),
    "cond": lambda x: jax.lax.cond(x[0] > 0, row, lambda x: x, x[1]),
    "jit in jit": lambda x: jax.jit(jax.vmap(row))(x) + jax.jit(jax.vmap(row))(x),
    "host": jax.vmap(r.cube),
    "gradient": jax.grad(lambda x: jax.vmap(r.cube)(x).sum()),
    "tangent": lambda x: jax.jvp(jax.vmap(r.pushed), (x,), (x,)),
    "differences": jax.grad(lambda x: jax.vmap(r.product)(x, 3 * x).sum()),
    "pool": jax.vmap(r.pooled),
    "pool, called": jax.vmap(lambda x: hc.call(r.pooled, LIKE, x)),
    "ordered host": lambda x: jax.vmap(r.effect)(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loaded_program_is_the_program(name):
    f = PROGRAMS[name]
    got = travelled(f, X).call(X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, f(X))


SYMBOLIC = (
    *("pure", "unordered", "ordered", "rows", "rows at once", "whole batch"),
    *("rows of rows", "scan", "host", "gradient", "pool", "ordered host"),
)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_shapes_are_those_of_each_call(name):
    f = PROGRAMS[name]
    (b,) = jax.export.symbolic_shape("b")
    loaded = travelled(f, jax.ShapeDtypeStruct((b,), np.float32))
    for n in (1, 4, 9):
        x = jnp.linspace(0.1, 1.0, n)
        got = loaded.call(x)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5), got, f(x)
        )


@pytest.mark.parametrize("size", ["b", "2*b", "b+3", "b*c", "2*b+c"])
def test_symbolic_shapes_of_results(size):
    """The sizes follow from those of the call's arguments and results."""

    def f(x, y):
        n = {
            "b": x.shape[0],
            "2*b": 2 * x.shape[0],
            "b+3": x.shape[0] + 3,
            "b*c": x.shape[0] * y.shape[0],
            "2*b+c": 2 * x.shape[0] + y.shape[0],
        }[size]
        padded = jnp.zeros((n,)) + x[0]
        return hc.call(r.sine, padded, padded)

    b, c = jax.export.symbolic_shape("b, c")
    specs = [jax.ShapeDtypeStruct((n,), np.float32) for n in (b, c)]
    loaded = travelled(f, *specs)
    for n, m in ((1, 1), (2, 5)):
        x, y = jnp.full(n, 0.5), jnp.ones(m)
        got = loaded.call(x, y)
        assert got.shape == f(x, y).shape
        np.testing.assert_allclose(got, np.sin(np.full(got.shape, 0.5)), rtol=1e-6)


def test_gradients_of_a_loaded_program():
    f = lambda x: jax.vmap(r.cube)(x).sum()
    loaded = travelled(f, X, vjp_order=1)
    np.testing.assert_allclose(jax.grad(loaded.call)(X), 3 * X**2, rtol=1e-6)
    kinds = [call.kind for call in loaded.manifest.calls]
    assert kinds == ["value", "forward", "backward"]
    with pytest.raises(ValueError, match="No VJP is available"):
        jax.grad(travelled(f, X).call)(X)


def test_taps_prints_and_feeds(capsys):
    def f(x):
        hc.tap(r.seen, x)
        hc.tap(r.seen, 10 * x, order="ordered", where=x[0] > 0)
        hc.print("x is {:.1f} {}", x[0], "here")
        item, ok = r.feed()
        return hc.tap_through(r.seen, x) + item, ok

    loaded = travelled(f, X)
    r.SEEN.clear()
    r.feed.reset()
    for step in range(3):
        got, ok = loaded.call(X)
        np.testing.assert_allclose(got, X + step, rtol=1e-6)
        assert ok
    hc.barrier()
    total = float(X.sum())
    wanted = sorted([total, 10 * total, total] * 3)
    np.testing.assert_allclose(sorted(r.SEEN), wanted, rtol=1e-5)
    assert capsys.readouterr().out == "x is 0.1 here\n" * 3


def test_objects_are_shared_by_programs():
    exported = hc.export(lambda x: r.walk.step(x))(jnp.float32(1))
    one, two = hc.load(bytes(exported)), hc.load(bytes(exported))
    r.walk.renew()
    assert [float(f.call(jnp.float32(1))) for f in (exported, one, two)] == [1, 2, 3]
    assert float(r.walk.step(1.0)) == 4  # in the process that has it, the same object
    assert list(one.objects) == ["Walk"]
    state = one.objects["Walk"].save()
    two.objects["Walk"].renew()
    assert float(one.call(jnp.float32(1))) == 1
    r.walk.restore(state)
    assert float(one.call(jnp.float32(1))) == 5
    r.walk.renew()


def test_one_file_for_two_platforms():
    loaded = travelled(PROGRAMS["ordered"], X, platforms=("cpu", "cuda"))
    assert loaded.exported.platforms == ("cpu", "cuda")
    module = loaded.exported.mlir_module()
    assert module.count("@hostcall_call") == 1
    assert "case" not in module  # no choice of platform at run time
    np.testing.assert_allclose(loaded.call(X), np.sin(X), rtol=1e-6)


def test_jaxs_own_loader():
    checks = [jax.export.DisabledSafetyCheck.custom_call("hostcall_call")]
    f = jax.jit(PROGRAMS["ordered"])
    data = jax.export.export(f, disabled_checks=checks)(X).serialize()
    loaded = jax.export.deserialize(data)
    np.testing.assert_allclose(jax.jit(loaded.call)(X), np.sin(X), rtol=1e-6)


def test_a_loaded_program_inside_programs():
    loaded = travelled(PROGRAMS["pure"], X)
    twice = jax.jit(lambda x: loaded.call(loaded.call(x)))
    np.testing.assert_allclose(twice(X), np.sin(np.sin(X)), rtol=1e-6)
    steps = jax.lax.scan(lambda c, _: (loaded.call(c), None), X, length=3)[0]
    np.testing.assert_allclose(steps, np.sin(np.sin(np.sin(X))), rtol=1e-6)


def test_failures_are_those_of_the_function():
    loaded = travelled(lambda x: hc.call(r.failing, x, x), X)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"no 0\.1"):
        jax.block_until_ready(loaded.call(X))
    with pytest.raises(ValueError, match=r"no 0\.1"), hc.reraise():
        loaded.call(X)
    assert str(hc.errors.last_error()) == f"no {float(X[0])}"


def test_several_devices_call_once():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
    before = hc.monitor.stats().get("four", None)
    assert before is None
    f = jax.jit(lambda x: hc.call(r.sine, x, x, order="unordered", tag="four"))
    loaded = travelled(f, x)
    np.testing.assert_allclose(loaded.call(x), np.sin(x), rtol=1e-6)
    assert hc.monitor.stats()["four"].calls == 1


def test_loads_in_many_threads():
    data = bytes(hc.export(PROGRAMS["pure"])(X))

    def one(k):
        x = X + k
        loaded = hc.load(data)
        np.testing.assert_allclose(loaded.call(x), np.sin(x), rtol=1e-5)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(32)))


def test_the_manifest_says_what_is_called():
    def f(x):
        hc.print("{}", x)
        y = hc.call(r.sine, x, x) + hc.call(r.sine, x, x)
        return jax.vmap(r.cube)(y) + r.walk.step(x[0])

    loaded = travelled(f, X)
    assert str(loaded.manifest).splitlines()[1:] == [
        "  hc.print: unordered print, (float32[4]) -> ()",
        "  tests.sine v2: pure call, (float32[4]) -> (float32[4]), at 2 places",
        "  tests.cube v1: pure value, (float32[4]) -> (float32[4])",
        "  tests.Walk v1: ordered method step, (float32[]) -> (float32[])",
    ]
    platform = jax.default_backend().replace("gpu", "cuda")
    begin = f"<hc.typing.Exported f for {platform}, vjp_order=0, by hostcall"
    assert repr(loaded).startswith(begin)


def test_equal_programs_are_equal_bytes():
    one, two = (bytes(hc.export(PROGRAMS["trees"])(X)) for _ in range(2))
    assert one == two
