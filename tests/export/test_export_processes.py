"""Programs that other processes load: exported, serialized, or refused there."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registered as r
from jax.experimental import serialize_executable

import hostcall as hc

pytest.importorskip("flatbuffers")
X = jnp.linspace(0.1, 1.0, 4)
HERE = str(Path(__file__).parent)
HEAD = f"""
import pickle, sys
sys.path.insert(0, {HERE!r})
import jax, jax.numpy as jnp, numpy as np
import hostcall as hc
data = open(sys.argv[1], "rb").read()
X = jnp.linspace(0.1, 1.0, 4)
"""


@pytest.fixture
def elsewhere(run_python, tmp_path):
    """What another process prints that has the bytes as `data`."""

    def run(data, source):
        path = tmp_path / "program"
        path.write_bytes(data)
        return run_python(HEAD + source, str(path)).stdout.splitlines()

    return run


def everything(x):
    hc.tap(r.seen, x)
    hc.print("printed {:.1f}", x[0])
    y = hc.call(r.sine, x, x, order="ordered") + hc.call(r.slow, x, x)
    item, ok = r.feed()
    y = y + jnp.where(ok, item, -1) + r.walk.step(x[0])
    return y + jax.vmap(r.cube)(x) + jax.grad(lambda x: jax.vmap(r.cube)(x).sum())(x)


def test_a_program_beside_its_weights_that_orbax_saves(run_python, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    model = lambda w, x: jax.vmap(r.cube)(w * x) + hc.call(r.sine, x, x)
    weights = 2 * X
    program = np.frombuffer(bytes(hc.export(model)(X, X)), np.uint8)
    with ocp.StandardCheckpointer() as saved:
        saved.save(tmp_path / "model", {"w": weights, "program": program})
    source = f"""
import sys
sys.path.insert(0, {HERE!r})
import jax, jax.numpy as jnp, orbax.checkpoint as ocp
import hostcall as hc
import registered as r
with ocp.StandardCheckpointer() as saved:
    found = saved.restore(sys.argv[1])
model = hc.load(bytes(found["program"]))
print(jax.jit(model.call)(found["w"], jnp.linspace(0.1, 1.0, 4)).tolist())
"""
    printed = run_python(source, str(tmp_path / "model")).stdout.splitlines()
    np.testing.assert_allclose(eval(printed[-1]), model(weights, X), rtol=1e-6)


def test_another_process_runs_it(elsewhere):
    data = bytes(hc.export(everything)(X))
    r.feed.reset()
    r.walk.renew()
    hc.barrier()
    wanted = np.asarray(everything(X)).tolist()
    r.walk.renew()
    printed = elsewhere(
        data,
        """
import registered as r
loaded = hc.load(data)
got = loaded.call(X)
hc.barrier()
print(np.asarray(got).tolist())
assert r.SEEN == [float(X.sum())]
""",
    )
    assert printed[0] == "printed 0.1"
    np.testing.assert_allclose(eval(printed[1]), wanted, rtol=1e-6)


def test_names_that_are_missing_are_all_named_before_anything_runs(elsewhere):
    data = bytes(hc.export(everything)(X))
    printed = elsewhere(
        data,
        """
@hc.register("tests.sine", version=1)  # the program wants version 2
def sine(x):
    raise AssertionError
try:
    hc.load(data)
except hc.errors.RegistryError as error:
    print(error)
""",
    )
    text, code = printed
    assert code == "[hc-registry] python -m hostcall explain hc-registry"
    assert "'tests.sine' version 2 (version 1 is registered here)" in text
    names = ("seen", "slow", "feed", "Walk", "cube")
    assert all(f"'tests.{name}' version 1" in text for name in names)
    assert "Import the module that registers it, or write @hc.register(" in text


def test_another_definition_of_a_name_is_called(elsewhere):
    data = bytes(hc.export(lambda x: hc.call(r.sine, x, x))(X))
    printed = elsewhere(
        data,
        """
@hc.register("tests.sine", version=2)
def other(x):
    return x + 1
for f in [jax.jit(lambda x: hc.call(other, x, x)) for _ in range(3)]:
    assert f(X)[0] == 1.1
print(np.allclose(hc.load(data).call(X), X + 1))
""",
    )
    assert printed == ["True"]


def test_what_is_registered_differs_in_kind(elsewhere):
    twin = hc.host(lambda x: x**3, result=hc.results.like(0))
    twin.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * x**2 * ct,))
    hc.register("tests.twin")(twin)
    two = [bytes(hc.export(jax.grad(f))(jnp.float32(2))) for f in (r.cube, twin)]
    printed = elsewhere(
        pickle.dumps(two),
        """
@hc.register("tests.cube")
def cube(x):
    return x
hc.register("tests.twin")(hc.host(lambda x: x, result=hc.results.like(0)))
for program in pickle.loads(data):
    try:
        hc.load(program)
    except hc.errors.LoadError as error:
        print(str(error).splitlines()[0])
""",
    )
    assert "plain function. Register the result of hc.host" in printed[0]
    assert "has no defvjp" in printed[1]


def test_a_feed_of_other_items(elsewhere):
    other = hc.feed(iter(np.zeros((3, 2), np.float32)), tag="other")
    hc.register("tests.other_feed")(other)
    data = bytes(hc.export(lambda x: other()[0] + x)(X[:2]))
    np.testing.assert_allclose(hc.load(data).call(X[:2]), X[:2])
    other.close()
    printed = elsewhere(
        data,
        """
hc.register("tests.other_feed")(hc.feed(iter(np.zeros(3, np.float32))))
try:
    jax.block_until_ready(hc.load(data).call(X[:2]))
except jax.errors.JaxRuntimeError as error:
    print(error)
""",
    )
    assert re.search(r"\[8\] bytes.* have \[4\]", "\n".join(printed))


def test_only_importing_hostcall_is_needed(elsewhere):
    """With JAX's own loader, and nothing lowered before."""
    checks = [jax.export.DisabledSafetyCheck.custom_call("hostcall_tap")]
    f = jax.jit(lambda x: (hc.print("x {:.1f}", x[0]), x)[1])
    data = bytes(jax.export.export(f, disabled_checks=checks)(X).serialize())
    source = "loaded = jax.export.deserialize(bytearray(data)); loaded.call(X)"
    assert elsewhere(data, source) == ["x 0.1"]


def test_a_serialized_executable(elsewhere):
    def f(x):
        hc.print("x {:.1f}", x[0])
        return hc.call(r.sine, x, x, order="ordered") + jax.vmap(r.cube)(x)

    saved = serialize_executable.serialize(jax.jit(f).lower(X).compile())
    printed = elsewhere(
        pickle.dumps(saved),
        """
import registered as r
from jax.experimental import serialize_executable
# Programs whose slots have the names that the loaded program had where it was made.
others = [jax.jit(lambda x: hc.call(r.sine, x, x, order="ordered")) for _ in range(3)]
assert np.allclose([f(X)[0] for f in others], np.sin(0.1))
loaded = serialize_executable.deserialize_and_load(
    *pickle.loads(data), execution_devices=jax.devices()[:1]
)
print(np.allclose(loaded(X), np.sin(X) + X**3))
hc.barrier()
""",
    )
    assert sorted(printed) == ["True", "x 0.1"]


def test_barriers_wait_for_a_serialized_executable_behind_another_program(elsewhere):
    def f(x):
        hc.tap(r.seen, x)

    saved = serialize_executable.serialize(jax.jit(f).lower(X[0]).compile())
    printed = elsewhere(
        pickle.dumps(saved),
        """
import registered as r
from jax.experimental import serialize_executable
m = jax.block_until_ready(jnp.ones((400, 400)))
body = lambda c, _: (jnp.sin(c @ c) * 0.01, None)
slow = jax.jit(lambda m: jax.lax.scan(body, m, length=100)[0].sum() * 0)
jax.block_until_ready(slow(m))
loaded = serialize_executable.deserialize_and_load(
    *pickle.loads(data), execution_devices=jax.devices()[:1]
)
for n in range(1, 4):
    loaded(slow(m))
    hc.barrier()
    print(len(r.SEEN) == n)
""",
    )
    assert printed == ["True"] * 3


def test_a_serialized_executable_in_a_process_without_the_name(elsewhere):
    f = jax.jit(lambda x: hc.call(r.sine, x, x))
    saved = serialize_executable.serialize(f.lower(X).compile())
    printed = elsewhere(
        pickle.dumps(saved),
        """
from jax.experimental import serialize_executable
try:
    serialize_executable.deserialize_and_load(*pickle.loads(data))
except Exception as error:
    print("'tests.sine' version 2" in str(error))
""",
    )
    assert printed == ["True"]


def test_a_shard_map_is_serialized_with_its_mesh():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    def f(x):
        return hc.call(r.sine, x, x)

    saved = serialize_executable.serialize(f.lower(x).compile())
    loaded = serialize_executable.deserialize_and_load(*saved)
    np.testing.assert_allclose(loaded(x), np.sin(np.arange(8)), rtol=1e-6)
