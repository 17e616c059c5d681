"""Programs that leave the process: exported, serialized, or kept by their text."""

from __future__ import annotations

import functools
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import hostcall as hc
from hostcall import _jax, _native

ALL = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
SCALAR = jax.ShapeDtypeStruct((), np.float32)


def export(f, *args):
    return jax.export.export(jax.jit(f), disabled_checks=ALL)(*args)


@pytest.fixture(autouse=True)
def exported_slots():
    """Drops the slots of exported programs, which otherwise live as long as the
    process.
    """
    yield
    _jax.exported.clear()


def sine(v):
    return np.sin(v)


def tapped(v):
    del v


def into(ctx, out, v):
    np.asarray(out)[...] = np.asarray(v)


sine_host = hc.host(sine, result=hc.like(0))
KINDS = {
    "call": lambda fn, x: hc.call(fn, SCALAR, x),
    "ordered": lambda fn, x: hc.call(fn, SCALAR, x, order="ordered"),
    "tap": lambda fn, x: (hc.tap(fn, x), x)[1],
    "pure_callback": lambda fn, x: hc.pure_callback(fn, SCALAR, x),
    "io_callback": lambda fn, x: hc.io_callback(fn, SCALAR, x),
    "buffer_callback": lambda fn, x: hc.buffer_callback(fn, SCALAR)(x),
    "host": lambda fn, x: hc.host(fn, result=hc.like(0))(x),
}


@pytest.mark.parametrize("kind", KINDS)
def test_nameless_functions_are_not_exported(kind):
    def inside(*args):
        return args[-1]

    for fn in (lambda *args: args[-1], inside, functools.partial(sine)):
        with pytest.raises(
            hc.errors.ExportError, match="can't be exported: a lambda"
        ) as e:
            export(lambda x, fn=fn: KINDS[kind](fn, x), 1.0)
        assert isinstance(e.value, NotImplementedError)  # as JAX's callbacks raise
        assert "called in the process that exported it" in str(e.value)


@pytest.mark.parametrize("kind", KINDS)
def test_named_functions_run_where_they_were_exported(kind):
    fn = {"tap": tapped, "buffer_callback": into}.get(kind, sine)
    exported = export(lambda x: KINDS[kind](fn, x), 1.0)
    jax.clear_caches()
    gc.collect()
    others = [jax.jit(lambda x: hc.call(np.cos, x, x)) for _ in range(3)]
    assert [f(0.0) for f in others] == [1, 1, 1]
    wanted = 1.0 if kind in ("tap", "buffer_callback") else np.sin(np.float32(1))
    np.testing.assert_allclose(exported.call(1.0), wanted, rtol=1e-6)
    hc.barrier()


LOADED = """
import dataclasses, sys
import jax, numpy as np
import hostcall as hc
def sine(v):  # of the same name, for the same shapes
    return np.float32(777)
programs = []
for _ in range(int(sys.argv[2])):  # one of them has the exported call's number
    f = jax.jit(lambda x: hc.call(sine, x, x))
    assert f(np.float32(1)) == 777
    programs.append(f)
checks = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
own = jax.export.export(programs[0], disabled_checks=checks)(np.float32(1))
assert own.call(np.float32(1)) == 777
module = open(sys.argv[1], "rb").read()
loaded = dataclasses.replace(own, mlir_module_serialized=module)
try:
    print("called", loaded.call(np.float32(1)))
except jax.errors.JaxRuntimeError as error:
    print("refused" if "exported or compiled in another process" in str(error) else error)
"""


def test_another_process_does_not_call_its_own_function(run_python, tmp_path):
    exported = export(lambda x: hc.call(sine, x, x), np.float32(1))
    (number,) = re.findall(r"count = (\d+)", exported.mlir_module())
    path = tmp_path / "module"
    path.write_bytes(exported.mlir_module_serialized)
    done = run_python(LOADED, str(path), number)
    assert done.stdout == "refused\n"


def test_blocks_of_devices_are_not_exported():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
    taps = lambda x: hc.tap(tapped, x, on="shards")
    calls = lambda x: hc.debug.callback(tapped, x, partitioned=True)
    for f in (taps, calls):
        with pytest.raises(hc.errors.ExportError, match="Give the whole value"):
            export(f, x)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_programs_are_not_serialized(kind):
    fn = {"tap": tapped, "buffer_callback": into}.get(kind, sine)
    compiled = jax.jit(lambda x: KINDS[kind](fn, x)).lower(1.0).compile()
    with pytest.raises(
        hc.errors.ExportError, match=f"calls `{fn.__name__}` can't be serial"
    ):
        serialize_executable.serialize(compiled)


def test_blocks_of_devices_are_not_serialized():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
    compiled = jax.jit(lambda x: hc.tap(tapped, x, on="shards")).lower(x)
    with pytest.raises(
        hc.errors.ExportError, match="calls `tapped` can't be serialized"
    ):
        serialize_executable.serialize(compiled.compile())


def test_an_exported_program_is_compiled_and_loaded_again_here():
    exported = export(sine_host, np.float32(1))
    compiled = jax.jit(exported.call).lower(np.float32(1)).compile()
    saved = serialize_executable.serialize(compiled)
    del compiled
    devices = jax.devices()[:1]
    loaded = serialize_executable.deserialize_and_load(
        *saved, execution_devices=devices
    )
    np.testing.assert_allclose(loaded(np.float32(1)), np.sin(np.float32(1)), rtol=1e-6)


def test_a_number_is_given_again_once_its_program_is_gone(in_time):
    before = _native.live_slots()
    texts = set()
    for _ in range(3):
        f = jax.jit(lambda x: hc.call(sine, x, x))
        texts.add(re.search(r"count = (\d+)", f.lower(1.0).as_text())[1])
        f(1.0)
        del f
        jax.clear_caches()
        assert in_time(lambda: _native.live_slots() == before)
    assert len(texts) == 1
