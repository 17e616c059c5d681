"""vmap of a call: what the function receives and returns, and in which order."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

ROWS = ["sequential", "parallel", None]
WHOLE = ["expand_dims", "broadcast_all", "legacy_vectorized"]
METHODS = ROWS + WHOLE
EAGER_AND_JIT = pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit], ids=["eager", "jit"]
)

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.arange(3, dtype=np.float32) * 10
S = np.float32(0.5)


def like(shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


class Host:
    """Computes x + y * scale on the host, and records the shapes it received."""

    def __init__(self, method, shape=(3,), order="pure", **options):
        self.options = {"vmap_method": method, "order": order, **options}
        self.shape = shape
        self.seen = []

    def add(self, x, y, *, scale):
        self.seen.append((x.shape, y.shape, scale.shape))
        return x + y * scale[..., None]

    def __call__(self, x, y, scale=S):
        return hc.call(self.add, like(self.shape), x, y, scale=scale, **self.options)


# --- One vmap ----------------------------------------------------------------------------

SAW = {
    **{method: [((3,), (3,), ())] * 4 for method in ROWS},
    "expand_dims": [((4, 3), (1, 3), (1,))],
    "broadcast_all": [((4, 3), (4, 3), (4,))],
    "legacy_vectorized": [((4, 3), (3,), ())],
}


@EAGER_AND_JIT
@pytest.mark.parametrize("method", METHODS)
def test_what_the_function_sees(method, wrap):
    host = Host(method)
    got = wrap(jax.vmap(host, in_axes=(0, None)))(X, Y)
    np.testing.assert_array_equal(got, X + Y * S)
    assert host.seen == SAW[method]


@pytest.mark.parametrize("method", METHODS)
def test_all_arguments_batched(method):
    host = Host(method)
    scale = np.arange(4, dtype=np.float32)
    got = jax.jit(jax.vmap(lambda x, y, s: host(x, y, scale=s)))(X, X[::-1], scale)
    np.testing.assert_array_equal(got, X + X[::-1] * scale[:, None])
    whole = [((4, 3), (4, 3), (4,))]
    assert host.seen == (whole if method in WHOLE else [((3,), (3,), ())] * 4)


@pytest.mark.parametrize("method", METHODS)
def test_no_argument_batched_calls_once(method):
    host = Host(method)
    got = jax.jit(jax.vmap(lambda x: host(Y, Y) + x))(X)
    np.testing.assert_array_equal(got, X + (Y + Y * S))
    assert host.seen == [((3,), (3,), ())]


AXES = [(0, 1, None), (0, 1, 0), (-1, 0, 0), (1, None, None), (None, -2, 0)]


@pytest.mark.parametrize("method", ["sequential", "parallel", "broadcast_all"])
@pytest.mark.parametrize("in_axes", AXES, ids=str)
def test_axes(method, in_axes):
    host = Host(method)
    scale = np.arange(4, dtype=np.float32)
    arrays = [
        row if axis is None else np.moveaxis(batch, 0, axis)
        for axis, batch, row in zip(in_axes, (X, X * 2, scale), (Y, Y, S), strict=True)
    ]
    rows = [
        [a if axis is None else np.take(a, n, axis) for a, axis in zip(arrays, in_axes)]
        for n in range(4)
    ]
    for out_axes in (0, 1, -1):
        host.seen.clear()
        want = np.stack([x + y * s for x, y, s in rows], out_axes)
        f = jax.vmap(lambda x, y, s: host(x, y, scale=s), in_axes, out_axes)
        np.testing.assert_array_equal(jax.jit(f)(*arrays), want)
        assert len(host.seen) == (1 if method == "broadcast_all" else 4)


@pytest.mark.parametrize("method", ROWS)
@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
def test_rows_run_in_row_order(method, order):
    seen = []

    def host(x):
        seen.append((int(x), hc.current().row))
        return x * 2

    f = jax.jit(
        jax.vmap(lambda x: hc.call(host, x, x, vmap_method=method, order=order))
    )
    xs = np.arange(50, dtype=np.int32)[::-1].copy()
    np.testing.assert_array_equal(f(xs), xs * 2)
    jax.effects_barrier()
    if method == "parallel":
        seen.sort(key=lambda entry: entry[1])
    assert seen == [(x, (n,)) for n, x in enumerate(xs)]


@pytest.mark.parametrize("method", ["sequential", "broadcast_all"])
def test_trees_and_static_leaves(method):
    def host(tree, name, *, bias):
        return {
            "sum": tree["a"] + tree["b"][0] + bias,
            "name": np.int32(len(name)) + 0 * tree["n"],
        }

    result = {"sum": like((3,)), "name": like((), np.int32)}
    f = jax.vmap(
        lambda t, b: hc.call(host, result, t, "four", bias=b, vmap_method=method),
        in_axes=({"a": 0, "b": [None], "n": 0}, 0),
    )
    tree = {"a": X, "b": [Y], "n": np.arange(4, dtype=np.int32)}
    got = jax.jit(f)(tree, X)
    np.testing.assert_array_equal(got["sum"], X + Y + X)
    np.testing.assert_array_equal(got["name"], [4] * 4)


# --- Nested ------------------------------------------------------------------------------

A = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
NESTED_SAW = {
    **{method: [((3,), (3,), ())] * 8 for method in ROWS},
    "expand_dims": [((2, 4, 3), (1, 4, 3), (2, 1))],
    "broadcast_all": [((2, 4, 3), (2, 4, 3), (2, 4))],
}


@EAGER_AND_JIT
@pytest.mark.parametrize("method", NESTED_SAW)
def test_nested_vmap_with_an_axis_each(method, wrap):
    host = Host(method)
    scale = np.arange(1, 3, dtype=np.float32)
    inner = jax.vmap(lambda x, y, s: host(x, y, scale=s), in_axes=(0, 0, None))
    got = wrap(jax.vmap(inner, in_axes=(0, None, 0)))(A, X, scale)
    np.testing.assert_array_equal(got, A + X * scale[:, None, None])
    assert host.seen == NESTED_SAW[method]


@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
@pytest.mark.parametrize("depth", [2, 3])
def test_nested_rows_run_as_nested_python_loops_would(order, depth):
    seen = []
    sizes = (2, 3, 4)[:depth]

    def host(*xs):
        seen.append((hc.current().row, tuple(map(int, xs))))
        return np.int32(sum(xs))

    f = lambda *xs: hc.call(host, like((), np.int32), *xs, order=order)
    # Argument n is batched by the vmap number n from outside alone.
    for n in reversed(range(depth)):
        f = jax.vmap(f, in_axes=[0 if n == k else None for k in range(depth)])
    args = [np.arange(size, dtype=np.int32) * 10**k for k, size in enumerate(sizes)]
    got = jax.jit(f)(*args)
    jax.effects_barrier()
    want = [(row, tuple(a[i] for a, i in zip(args, row))) for row in np.ndindex(*sizes)]
    assert seen == want
    np.testing.assert_array_equal(got, sum(np.ix_(*args)))


@pytest.mark.parametrize("method", ["sequential", "parallel", "broadcast_all"])
def test_nested_vmap_with_mixed_axes(method):
    host = Host(method)
    inner = jax.vmap(host, in_axes=(1, None), out_axes=1)
    f = jax.jit(jax.vmap(inner, in_axes=(-1, 0), out_axes=-1))
    x, y = np.moveaxis(A, (0, 1), (2, 1)), X[:2] + 1  # x: (3, 4, 2)
    want = np.stack(
        [np.stack([x[:, j, i] + y[i] * S for j in range(4)], 1) for i in range(2)], -1
    )
    np.testing.assert_array_equal(f(x, y), want)
    assert len(host.seen) == (1 if method == "broadcast_all" else 8)


def test_vmap_inside_and_outside_of_loops():
    seen = []

    def host(i, x):
        seen.append((int(i), int(x)))
        return x + 1

    def loop(x):
        body = lambda i, c: hc.call(host, c, i, c, order="ordered")
        return jax.lax.fori_loop(0, 3, body, x)

    xs = np.array([0, 10], np.int32)
    for f in (jax.vmap(loop), lambda v: jax.lax.fori_loop(
            0, 3, lambda i, c: jax.vmap(lambda x: hc.call(host, x, i, x, order="ordered"))(c), v)):  # fmt: skip
        seen.clear()
        np.testing.assert_array_equal(jax.jit(f)(xs), xs + 3)
        jax.effects_barrier()
        assert seen == [(i, x + i) for i in range(3) for x in xs]


# --- Sizes -----------------------------------------------------------------------------------


@EAGER_AND_JIT
@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
@pytest.mark.parametrize("method", ROWS)
def test_an_empty_batch_calls_nothing(method, order, wrap):
    host = Host(method, order=order)
    got = wrap(jax.vmap(host, in_axes=(0, None)))(X[:0], Y)
    jax.effects_barrier()
    assert (got.shape, got.dtype) == ((0, 3), np.float32)
    assert host.seen == []


@EAGER_AND_JIT
@pytest.mark.parametrize("method", WHOLE)
def test_an_empty_batch_as_a_whole(method, wrap):
    host = Host(method, order="unordered")
    got = wrap(jax.vmap(host, in_axes=(0, None)))(X[:0], Y)
    jax.effects_barrier()
    assert (got.shape, got.dtype) == ((0, 3), np.float32)
    assert [x for x, _, _ in host.seen] == [(0, 3)]


@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
@pytest.mark.parametrize("method", ["sequential", "parallel"])
def test_program_size_does_not_depend_on_the_batch(method, order):
    def text(*sizes):
        f = Host(method, order=order)
        for _ in sizes:
            f = jax.vmap(f, in_axes=(0, None))
        lowered = jax.jit(f).lower(like((*sizes, 3)), like((3,))).as_text()
        assert lowered.count("@hostcall_call") == 1
        return re.sub(r"\d+", "N", lowered)  # shapes, and the slot's number

    # Sizes whose results are all below 64 KiB: a larger program has a hidden result.
    assert text(2) == text(5_000)
    assert text(2, 3) == text(500, 7)
    assert math.isclose(len(text(2)), len(text(2, 3)), rel_tol=0.2)


def of_scalars(x):
    return np.float32(math.sin(x))


def branching(x):
    return x if x > 0 else -x


def counting(x):
    return np.float32(len(range(x.astype(int))))


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("method", WHOLE)
@pytest.mark.parametrize("fn", [of_scalars, branching, counting])
def test_a_function_for_scalars_gets_the_hint_that_rows_have_an_axis(fn, method, wrap):
    for make in (
        lambda x: hc.call(fn, x, x, vmap_method=method),
        hc.host(fn, result=hc.results.like(0), vmap_method=method),
    ):
        with pytest.raises((TypeError, ValueError)) as caught, hc.reraise():
            jax.block_until_ready(wrap(jax.vmap(make))(jnp.ones(3)))
        (note,) = [n for n in caught.value.__notes__ if n.startswith("hostcall:")]
        assert f"vmap_method='{method}' `{fn.__name__}` gets all rows at once" in note
        assert "along a new axis in front" in note


def test_other_errors_get_no_hint():
    def fails(x):
        raise TypeError("of its own")

    for method in ("sequential", "expand_dims"):
        with pytest.raises(TypeError) as caught, hc.reraise():
            jax.vmap(lambda x: hc.call(fails, x, x, vmap_method=method))(jnp.ones(3))
        assert not [n for n in caught.value.__notes__ if n.startswith("hostcall:")]
