"""hc.buffers.native: machine code in place of a callback, without Python and the GIL."""

import ctypes
import subprocess
import sysconfig
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specs import spec

import hostcall as hc

CODE = r"""
#include <stdatomic.h>
#include <stdint.h>

void add(void** out, void** in) {
  float *z = out[0], *x = in[0], *y = in[1];
  for (int i = 0; i < 4; ++i) z[i] = x[i] + y[i];
}

void total(void** out, void** in, void* stream) {
  int8_t *x = in[0];
  *(int32_t*)out[0] = 0;
  for (int i = 0; i < 5; ++i) *(int32_t*)out[0] += (int8_t)(x[i] << 4) >> 4;
  *(int32_t*)out[1] = stream != 0;
}

void twice(void** out, void** in) { *(float*)out[0] *= 2; }

int32_t root(void** out, void** in) {
  float x = *(float*)in[0];
  *(float*)out[0] = x;
  return x < 0 ? 17 : 0;
}

void nothing(void** out, void** in) {}
void spoil(void** out, void** in) { *(float*)out[0] = 1; ((float*)in[0])[2] = 99; }

atomic_int arrived, opened;
void wait(void** out, void** in) {
  arrived = 1;
  while (!opened) {}
  *(int32_t*)out[0] = opened;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    (folder / "code.c").write_text(CODE)
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    subprocess.run(
        [*compiler, "-O1", "-shared", "-fPIC", "code.c", "-o", "code.so"],
        cwd=folder,
        check=True,
    )
    return ctypes.CDLL(str(folder / "code.so"))


MODES = {"eager": lambda f: f, "jit": jax.jit}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@modes
def test_calls(library, mode):
    f = mode(hc.buffers.buffer_callback(hc.buffers.native(library.add), spec(4)))
    x, y = jnp.arange(4.0), jnp.full(4, 2.0)
    for _ in range(3):
        np.testing.assert_array_equal(f(x, y), x + y)


def test_addresses_of_every_kind(library):
    class Compiled:  # as numba.cfunc has it
        address = ctypes.cast(library.add, ctypes.c_void_p).value

    for function in (
        library.add,
        Compiled.address,
        np.int64(Compiled.address),
        ctypes.c_void_p(Compiled.address),
    ):
        f = hc.buffers.buffer_callback(hc.buffers.native(function), spec(4))
        np.testing.assert_array_equal(f(jnp.ones(4), jnp.ones(4)), [2] * 4)
    made = hc.buffers.native(Compiled(), name="adder")
    assert repr(made) == f"<native function adder at {Compiled.address:#x}>"
    assert hc.buffers.native(made) is made
    assert hc.buffers.native(library.add).__name__ == "add"
    assert hc.buffers.native(library.add) == hc.buffers.native(Compiled())
    with pytest.raises(TypeError, match="Python can't call it"):
        made()
    for wrong in ("add", None, True, lambda: 1, 1.5):
        with pytest.raises(hc.errors.SpecError, match="takes an address"):
            hc.buffers.native(wrong)
    for wrong in (0, -5, 2**64):
        with pytest.raises(hc.errors.SpecError, match="where no function can be"):
            hc.buffers.native(wrong)


@modes
def test_small_elements_and_no_stream(library, mode):
    f = hc.buffers.buffer_callback(
        hc.buffers.native(library.total), (spec(dtype="int32"), spec(dtype="int32"))
    )
    x = jnp.array([-8, 7, -1, 3, -2], jnp.int4)
    assert mode(f)(x) == (-1, 0)


@modes
def test_aliases(library, mode):
    f = hc.buffers.buffer_callback(
        hc.buffers.native(library.twice), spec(), input_output_aliases={0: 0}
    )
    assert mode(lambda x: f(f(x)))(jnp.float32(3)) == 12


@pytest.mark.parametrize("axes", [(0, 0), (None, 0)])
def test_rows(library, axes):
    f = hc.buffers.buffer_callback(
        hc.buffers.native(library.add), spec(4), vmap_method="sequential"
    )
    args = [jnp.arange(4.0) if a is None else jnp.ones((6, 4)) * 3 for a in axes]
    out = jax.jit(jax.vmap(f, axes))(*args)
    np.testing.assert_array_equal(out, np.broadcast_to(args[0] + args[1], (6, 4)))


@pytest.mark.parametrize(
    "method", ["expand_dims", "broadcast_all", "legacy_vectorized"]
)
def test_no_whole_batches(library, method):
    with pytest.raises(
        hc.errors.SpecError, match="`add` is machine code, which does not get"
    ):
        hc.buffers.buffer_callback(
            hc.buffers.native(library.add), spec(4), vmap_method=method
        )


@modes
def test_debug_mode(library, mode, monkeypatch):
    x = jnp.arange(4.0)
    f = mode(hc.buffers.buffer_callback(hc.buffers.native(library.nothing), spec(4)))
    np.testing.assert_array_equal(f(x), np.zeros(4))
    monkeypatch.setenv("HOSTCALL_DEBUG", "1")
    f = mode(hc.buffers.buffer_callback(hc.buffers.native(library.nothing), spec(4)))
    with (
        pytest.raises(hc.errors.UnwrittenError, match="`nothing` did not write"),
        hc.reraise(),
    ):
        jax.block_until_ready(f(x))
    f = mode(hc.buffers.buffer_callback(hc.buffers.native(library.spoil), spec()))
    with (
        pytest.raises(hc.errors.ResultError, match=r"`spoil` wrote to args\[0\]"),
        hc.reraise(),
    ):
        jax.block_until_ready(f(x))
    np.testing.assert_array_equal(x, np.arange(4.0))
    f = mode(hc.buffers.buffer_callback(hc.buffers.native(library.add), spec(4)))
    np.testing.assert_array_equal(f(x, x), x * 2)


@modes
def test_status(library, mode):
    f = hc.buffers.buffer_callback(hc.buffers.native(library.root, status=True), spec())
    assert mode(f)(jnp.float32(4)) == 4
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"returned 17; it must return 0.*in callback `root`",
    ):
        jax.block_until_ready(mode(f)(jnp.float32(-4)))


@modes
def test_status_has_the_class_and_code_of_its_page(library, mode):
    f = hc.buffers.buffer_callback(hc.buffers.native(library.root, status=True), spec())
    with pytest.raises(hc.errors.HostcallError) as caught, hc.reraise():
        jax.block_until_ready(mode(f)(jnp.float32(-4)))
    assert caught.value.code == "hc-buffer"
    assert str(caught.value).endswith("explain hc-buffer")


def test_status_of_a_row(library):
    f = hc.buffers.buffer_callback(
        hc.buffers.native(library.root, status=True), spec(), vmap_method="sequential"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"returned 17 in row \(2\)"):
        jax.block_until_ready(jax.jit(jax.vmap(f))(jnp.array([1.0, 0.0, -1.0, 2.0])))


def test_it_does_not_hold_the_interpreters_lock(library):
    """It waits for something that only another Python thread can provide."""
    arrived = ctypes.c_int.in_dll(library, "arrived")
    opened = ctypes.c_int.in_dll(library, "opened")
    arrived.value = opened.value = 0

    def give():
        while not arrived.value:
            pass
        opened.value = 5

    thread = threading.Thread(target=give)
    thread.start()
    f = hc.buffers.buffer_callback(hc.buffers.native(library.wait), spec(dtype="int32"))
    for run in (f, jax.jit(f)):
        assert run() == 5
    thread.join()


def test_statistics(library):
    f = hc.buffers.buffer_callback(
        hc.buffers.native(library.add, name="added_natively"), spec(4)
    )
    jax.jit(lambda x: f(f(x, x), x))(jnp.ones(4)).block_until_ready()
    (stats,) = [s for name, s in hc.monitor.stats().items() if "added_natively" in name]
    assert stats.calls == 2


def test_where_numba_is_installed():
    numba = pytest.importorskip("numba")
    types = numba.types
    pointers = types.CPointer(types.voidptr)

    @numba.cfunc(types.void(pointers, pointers))
    def double(outputs, inputs):
        out = numba.carray(inputs[0], (8,), numba.float32)
        numba.carray(outputs[0], (8,), numba.float32)[:] = out * 2

    f = jax.jit(hc.buffers.buffer_callback(hc.buffers.native(double), spec(8)))
    np.testing.assert_array_equal(f(jnp.arange(8.0)), np.arange(8.0) * 2)
