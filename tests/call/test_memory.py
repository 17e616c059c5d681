"""Arguments are the function's own: it may keep them, and write to them."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specs import N, ramp, spec

import hostcall as hc

MODES = {"eager": lambda f: f, "jit": jax.jit}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
# --- Arguments that the function owns ----------------------------------------------

KEPT = {
    "array": lambda x: x,
    "view": lambda x: x[:],
    "view of a view": lambda x: x.reshape(10, -1)[:, ::1].reshape(N),
    "memoryview": lambda x: memoryview(x),
    "iterator": lambda x: x.flat,
    "dlpack": lambda x: np.from_dlpack(x),
    "jax.Array": lambda x: jnp.asarray(x),
    "in a closure": lambda x: lambda: x,
}


@modes
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("order", ["pure", "unordered"])
def test_arguments_may_be_kept(mode, keep, order):
    kept = []

    def host(x):
        kept.append(keep(x))
        return x.sum()

    program = mode(lambda x: hc.call(host, spec(), x, order=order))
    for start in range(5):
        program(jnp.asarray(ramp(start))).block_until_ready()
    assert len(kept) == 5
    for start, value in enumerate(kept):
        value = value() if callable(value) else value
        np.testing.assert_array_equal(np.array(value), ramp(start))


@modes
def test_a_weakly_kept_argument_is_not_used_again(mode):
    kept = []
    program = mode(lambda x: hc.call(lambda x: kept.append(weakref.ref(x)), None, x,
                                     order="unordered"))  # fmt: skip
    for start in range(3):
        program(ramp(start))
        jax.effects_barrier()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


@modes
def test_arguments_may_be_written_to(mode):
    def host(a, b, c):
        seen = [x.copy() for x in (a, b, c)]
        a[...] = -1
        b *= 2
        c.sort()
        return seen

    def program(x):
        y = x + 1
        return x, y, hc.call(host, [spec(N)] * 3, x, x, y), x, y

    x = jnp.asarray(ramp())
    for _ in range(3):
        results = mode(program)(x)
        for i, want in [(0, 0), (1, 1), (3, 0), (4, 1)]:
            np.testing.assert_array_equal(results[i], ramp(want))
        for got, want in zip(results[2], (0, 0, 1), strict=True):
            np.testing.assert_array_equal(got, ramp(want))
    np.testing.assert_array_equal(x, ramp())


@modes
def test_arrays_of_the_callers_are_not_written_to(mode):
    x = ramp()
    constant = ramp(5)

    def host(x, constant):
        x[...] = constant[...] = 0
        return 0.0

    program = mode(lambda x: hc.call(host, spec(), x, constant))
    for _ in range(2):
        program(x).block_until_ready()
    np.testing.assert_array_equal(x, ramp())
    np.testing.assert_array_equal(constant, ramp(5))


@modes
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.setflags(write=False),
        lambda x: x.resize(3, refcheck=False),
        lambda x: setattr(x, "shape", (10, 100)),
        lambda x: x.fill(np.nan),
        lambda x: x.byteswap(inplace=True),
    ],
    ids=["frozen", "resized", "reshaped", "filled", "swapped"],
)
@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")
def test_what_a_function_does_to_its_argument_stays_its_own(mode, change):
    def host(x):
        np.testing.assert_array_equal(x, ramp())
        assert x.flags.writeable
        change(x)

    program = mode(lambda x: hc.call(host, None, x, order="unordered"))
    for _ in range(3):
        with hc.reraise():
            program(ramp())


@pytest.mark.parametrize("method", ["sequential", "parallel", "broadcast_all"])
def test_rows_do_not_share_what_they_write_to(method):
    def host(x, shared):
        out = x + shared
        x[...] = shared[...] = -1
        return out

    row = lambda x, y: hc.call(host, spec(3), x, y, vmap_method=method)
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.ones(3, np.float32)
    out = jax.jit(jax.vmap(row, in_axes=(0, None)))(x, y)
    np.testing.assert_array_equal(out, x + 1)
    np.testing.assert_array_equal(y, 1)
