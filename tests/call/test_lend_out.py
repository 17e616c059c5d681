"""lend="out": results that the function writes into XLA's memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specs import N, ramp, spec

import hostcall as hc

MODES = {"eager": lambda f: f, "jit": jax.jit}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@modes
@pytest.mark.parametrize("order", ["pure", "ordered"])
def test_results_are_written_in_place(mode, order):
    def host(x, *, out):
        assert set(out) == {"twice", "sum"}
        assert out["twice"].flags.writeable
        assert (out["sum"].shape, out["sum"].dtype) == ((), np.int32)
        np.multiply(x, 2, out=out["twice"])
        out["sum"][...] = x.sum()

    result = {"twice": spec(N), "sum": spec(dtype="int32")}
    program = mode(lambda x: hc.call(host, result, x, lend="out", order=order))
    for start in range(3):
        got = program(ramp(start))
        np.testing.assert_array_equal(got["twice"], ramp(start) * 2)
        assert got["sum"] == ramp(start).sum()


@modes
def test_a_value_may_be_returned_instead(mode):
    host = lambda x, out: x + 1 if x[0] else None if out.fill(7) is None else x
    program = mode(lambda x: hc.call(host, spec(N), x, lend="out"))
    np.testing.assert_array_equal(program(ramp(0)), 7)
    np.testing.assert_array_equal(program(ramp(1)), ramp(2))


@modes
def test_out_itself_may_be_returned(mode):
    program = mode(lambda x: hc.call(np.negative, spec(N), x, lend="out"))
    np.testing.assert_array_equal(program(ramp()), -ramp())


def write(*parts):
    def host(out):
        for part in parts:
            out["y"][part] = 1
        out["z"][...] = 1

    return host


PARTS = [slice(0, 0), slice(1), slice(50_000), slice(50_000, None), slice(10, -10)]


@modes
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_result_that_was_not_written_is_an_error(mode, part):
    result = {"y": spec(100_000), "z": spec(3)}
    program = mode(lambda: hc.call(write(part), result, lend="out"))
    with pytest.raises(hc.errors.UnwrittenError) as caught, hc.reraise():
        jax.block_until_ready(program())
    assert "did not write all of out['y'] (float32[100000])" in str(caught.value)
    assert "write out[...] = value, or return the value" in str(caught.value)
    whole = mode(lambda: hc.call(write(part, ...), result, lend="out"))()
    np.testing.assert_array_equal(whole["y"], 1)


@modes
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "complex64", "int4"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 33, 511])
def test_small_results_never_show_old_memory(mode, dtype, size):
    """If they are too small to tell what was written, the rest is zero, or an error is
    raised.
    """

    def host(out):
        out[:1] = 1

    program = mode(lambda: hc.call(host, spec(size, dtype=dtype), lend="out"))
    want = np.zeros(size, dtype)
    want[0] = 1
    for _ in range(3):
        try:
            with hc.reraise():
                got = program()
        except hc.errors.UnwrittenError:
            assert size > 1
            continue
        np.testing.assert_array_equal(got, want)


@modes
def test_kept_out_is_an_error_that_names_it(mode):
    kept = []

    def host(x, out):
        out[0][...] = x
        out[1][...] = x
        kept.append(out[1])

    program = mode(lambda x: hc.call(host, [spec(N), spec(N)], x, lend="out"))
    with (
        pytest.raises(hc.errors.EscapeError, match=r"kept a view of out\[1\] "),
        hc.reraise(),
    ):
        jax.block_until_ready(program(ramp()))
    np.testing.assert_array_equal(kept[0], ramp())


@modes
@pytest.mark.parametrize("dtype", ["float32", "uint2"])
def test_rows_write_their_own_part(mode, dtype):
    def host(x, *, out):
        assert out.shape == (3,)
        out[...] = x[::-1]

    rows = (np.arange(12).reshape(4, 3) % 3).astype(dtype)
    call = lambda x: hc.call(host, spec(3, dtype=dtype), x, lend="out")
    np.testing.assert_array_equal(mode(jax.vmap(call))(rows), rows[:, ::-1])


@modes
def test_a_row_that_did_not_write_is_an_error(mode):
    def host(x, *, out):
        if x != 2:
            out[...] = x

    call = lambda x: hc.call(host, spec(10_000), x, lend="out")
    with pytest.raises(hc.errors.UnwrittenError, match="of out "), hc.reraise():
        jax.block_until_ready(mode(jax.vmap(call))(jnp.arange(4.0)))


@modes
def test_masked_rows_need_not_write(mode):
    def host(x, *, out):
        out[...] = x

    call = lambda x: hc.call(host, spec(N), x, lend="out", where=x > 1, fill=-1)
    out = mode(jax.vmap(call))(jnp.arange(4.0))
    np.testing.assert_array_equal(out[:, 0], [-1, -1, 2, 3])


def test_a_kept_byte_is_nobody_elses():
    """Python has one object for each bytes of length 1, which all share."""
    kept = []

    def host(x, out):
        kept.append(out)
        out[...] = x + 1

    f = hc.host(host, result=spec(dtype="uint8"), lend="out")
    with pytest.raises(jax.errors.JaxRuntimeError, match="kept a view"):
        jax.block_until_ready(jax.jit(f)(np.uint8(6)))
    kept[0][...] = 99
    assert bytes([7]) == b"\x07"
    assert b"a\x07"[1:] == b"\x07"
