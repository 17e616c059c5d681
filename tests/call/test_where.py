"""`where=`: rows where it is False never reach the function."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

ROWS = ["sequential", "parallel", None]
WHOLE = ["expand_dims", "broadcast_all"]
ORDERS = pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
EAGER_AND_JIT = pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit], ids=["eager", "jit"]
)
X = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
MASKS = [
    [True, False, True, True],
    [False, False, False, True],
    [True] * 4,
    [False] * 4,
]
ROW = jax.ShapeDtypeStruct((3,), np.float32)


class Host:
    """Doubles on the host; `seen` has the arguments in order."""

    def __init__(self, **options):
        self.options, self.seen = options, []

    def double(self, x):
        self.seen.append(x.copy())
        return x * 2

    def __call__(self, x, where):
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return hc.call(self.double, result, x, where=where, **self.options)


# --- One mask for all --------------------------------------------------------------------


@EAGER_AND_JIT
@ORDERS
@pytest.mark.parametrize("where", [True, False, np.bool_(False), np.array(True)])
def test_a_constant(where, order, wrap):
    host = Host(order=order)
    got = wrap(lambda x: host(x, where))(X)
    jax.effects_barrier()
    np.testing.assert_array_equal(got, X * 2 if where else X * 0)
    assert len(host.seen) == int(where)


@pytest.mark.parametrize("shape", [(), (3,)], ids=["one", "rows"])
@ORDERS
def test_nothing_wanted_enters_no_python(order, shape):
    def host(x):
        raise AssertionError

    def f(x, where):
        return hc.call(
            host, x, x, where=where, fill=2, vmap_method="sequential", order=order
        )

    if shape:
        f = jax.vmap(f)
    where = jnp.zeros(shape, bool)
    got = jax.jit(lambda x: f(x, where))(jnp.ones(shape))
    np.testing.assert_array_equal(got, np.full(shape, 2))
    jax.effects_barrier()
    (stats,) = (
        s for name, s in hc.monitor.stats().items() if "enters_no_python" in name
    )
    assert stats.calls == stats.gil_seconds == stats.python_seconds == 0
    assert stats.masked > 0


@EAGER_AND_JIT
@ORDERS
def test_a_computed_scalar(order, wrap):
    host = Host(order=order, fill=-1)
    f = wrap(lambda x, limit: host(x, x.sum() > limit))
    for limit, want in [(0.0, X * 2), (1000.0, np.full_like(X, -1)), (77.0, X * 2)]:
        np.testing.assert_array_equal(f(jnp.asarray(X), limit), want)
    jax.effects_barrier()
    assert len(host.seen) == 2


@pytest.mark.parametrize("where", [True, False])
@pytest.mark.parametrize("method", [*ROWS, *WHOLE, "legacy_vectorized"])
def test_a_scalar_for_a_batch(method, where):
    host = Host(vmap_method=method, fill=7)
    got = jax.jit(jax.vmap(host, in_axes=(0, None)))(X, jnp.asarray(where))
    np.testing.assert_array_equal(got, X * 2 if where else np.full_like(X, 7))
    calls = (1 if method in WHOLE or method == "legacy_vectorized" else 4) * where
    assert len(host.seen) == calls


# --- A mask for each row -------------------------------------------------------------


@EAGER_AND_JIT
@ORDERS
@pytest.mark.parametrize("method", ROWS)
def test_rows(method, order, wrap):
    host = Host(vmap_method=method, order=order)
    f = wrap(jax.vmap(host))
    for mask in map(np.array, MASKS):
        host.seen.clear()
        np.testing.assert_array_equal(f(X, mask), X * 2 * mask[:, None])
        jax.effects_barrier()
        if method == "parallel":
            host.seen.sort(key=lambda row: row[0])
        np.testing.assert_array_equal(np.reshape(host.seen, (-1, 3)), X[mask])


@EAGER_AND_JIT
@ORDERS
@pytest.mark.parametrize("method", WHOLE)
def test_rows_of_a_whole_batch(method, order, wrap):
    host = Host(vmap_method=method, order=order)
    f = wrap(jax.vmap(host))
    for mask in map(np.array, MASKS):
        host.seen.clear()
        np.testing.assert_array_equal(f(X, mask), X * 2 * mask[:, None])
        jax.effects_barrier()
        assert len(host.seen) == mask.any()
        for seen in host.seen:
            np.testing.assert_array_equal(seen, X[mask])


SAW_UNBATCHED = {"expand_dims": ((2, 3), (1, 3)), "broadcast_all": ((2, 3), (2, 3))}


@pytest.mark.parametrize("method", WHOLE)
def test_unbatched_arguments_of_a_whole_batch(method):
    seen = []

    def add(x, y):
        seen.append((x.shape, y.shape))
        return x + y

    f = jax.vmap(
        lambda x, y, w: hc.call(add, ROW, x, y, where=w, vmap_method=method),
        in_axes=(0, None, 0),
    )
    mask = np.array([False, True, True, False])
    got = jax.jit(f)(X, X[0], mask)
    np.testing.assert_array_equal(got, np.where(mask[:, None], X + X[0], 0))
    assert seen == [SAW_UNBATCHED[method]]


def test_only_the_mask_is_batched():
    host = Host()
    mask = np.array([True, False, True, False])
    got = jax.jit(jax.vmap(host, in_axes=(None, 0)))(X[0], mask)
    np.testing.assert_array_equal(got, X[0] * 2 * mask[:, None])
    assert len(host.seen) == 2


NESTED = [(0, 0), (0, None), (None, 0)]  # axes of `where`, outer and inner vmap
A = np.arange(1, 25, dtype=np.float32).reshape(2, 4, 3)


@EAGER_AND_JIT
@pytest.mark.parametrize("axes", NESTED, ids=str)
@pytest.mark.parametrize("method", ["sequential", *WHOLE])
def test_nested(method, axes, wrap):
    outer, inner = axes
    mask = np.array([[True, False, False, True], [False, True, True, False]])
    mask = mask if axes == (0, 0) else mask[:, 0] if inner is None else mask[0]
    full = np.broadcast_to(mask[:, None] if inner is None else mask, (2, 4))
    host = Host(vmap_method=method, fill=-3)
    f = jax.vmap(jax.vmap(host, in_axes=(0, inner)), in_axes=(0, outer))
    want = np.where(full[..., None], A * 2, -3)
    np.testing.assert_array_equal(wrap(f)(A, mask), want)
    rows = np.concatenate([seen.reshape(-1, 3) for seen in host.seen])
    np.testing.assert_array_equal(rows, A[full])
    assert len(host.seen) == (1 if method in WHOLE else full.sum())


@pytest.mark.parametrize("axes", [*itertools.product([0, None], repeat=3)], ids=str)
@pytest.mark.parametrize("method", ["sequential", *WHOLE])
def test_three_levels(method, axes):
    x = np.arange(72, dtype=np.float32).reshape(2, 3, 4, 3)
    full = np.random.default_rng(0).random((2, 3, 4)) < 0.5
    mask = full[tuple(slice(None) if axis == 0 else 0 for axis in axes)]
    full = mask[tuple(slice(None) if axis == 0 else None for axis in axes)]
    f = host = Host(vmap_method=method, fill=-3)
    for axis in reversed(axes):
        f = jax.vmap(f, in_axes=(0, axis))
    want = np.where(full[..., None], x * 2, -3)
    np.testing.assert_array_equal(jax.jit(f)(x, mask), want)
    rows = np.concatenate([np.zeros((0, 3)), *(s.reshape(-1, 3) for s in host.seen)])
    np.testing.assert_array_equal(rows, x[np.broadcast_to(full, (2, 3, 4))])


# --- Fill --------------------------------------------------------------------------------


TREE = {"a": ROW, "b": (jax.ShapeDtypeStruct((2, 2), np.int32), ROW)}
FILLS = {
    "zeros": (None, (0, 0, 0)),
    "scalar": (-2, (-2, -2, -2)),
    "tree": ({"a": np.nan, "b": (7, -1.5)}, (np.nan, 7, -1.5)),
    "broadcast": (
        {"a": np.array([1, 2, 3]), "b": (np.array([[1], [2]]), 0.5)},
        ([1, 2, 3], [[1, 1], [2, 2]], 0.5),
    ),
}


@EAGER_AND_JIT
@pytest.mark.parametrize(("fill", "want"), FILLS.values(), ids=FILLS.keys())
@pytest.mark.parametrize("method", [None, "expand_dims", "no vmap"])
def test_fill(method, fill, want, wrap):
    def host(x):
        raise AssertionError("every row is masked")

    def f(x):
        method_ = None if method == "no vmap" else method
        return hc.call(host, TREE, x, where=x[0] < 0, fill=fill, vmap_method=method_)

    rows = X[0] if method == "no vmap" else X
    got = wrap(f if method == "no vmap" else jax.vmap(f))(jnp.asarray(rows))
    assert jax.tree.structure(got) == jax.tree.structure(TREE)
    for leaf, spec, number in zip(
        jax.tree.leaves(got), jax.tree.leaves(TREE), want, strict=True
    ):
        shape = rows.shape[:-1] + spec.shape
        assert leaf.dtype == spec.dtype
        np.testing.assert_array_equal(leaf, np.broadcast_to(number, shape))


# --- What is refused -----------------------------------------------------------------------


def free(x):
    return x


BAD = {
    "int": ({"where": 1}, "where= of `free` should be one bool, got int"),
    "float": ({"where": np.float32(1)}, "should be one bool, got float32[]"),
    "array": ({"where": np.ones(3, bool)}, "should be one bool, got bool[3]"),
    "fill too large": (
        {"where": True, "fill": 10**400},
        "for result, which can't be converted to float32[3]: int too large",
    ),
    "fill that overflows": (
        {"where": True, "fill": 1e300},
        "fill= of `free` is 1e+300 for result, which can't be converted to float32[3]:"
        " it would become inf",
    ),
    "fill shape": (
        {"where": True, "fill": np.zeros(4)},
        "for result, which can't be converted to float32[3]",
    ),
    "fill object": ({"where": True, "fill": "zero"}, "fill= of `free` is 'zero'"),
    "fill tree": ({"where": True, "fill": {"a": 0}}, "fill= of `free` is {'a': 0}"),
}


@EAGER_AND_JIT
@pytest.mark.parametrize(("options", "text"), BAD.values(), ids=BAD.keys())
def test_a_wrong_mask_or_fill_is_refused(options, text, wrap):
    with pytest.raises(hc.errors.SpecError, match=re.escape(text)):
        wrap(lambda x: hc.call(free, ROW, x, **options))(X[0])


@EAGER_AND_JIT
def test_a_fill_that_an_integer_can_not_hold_is_refused(wrap):
    whole = jax.ShapeDtypeStruct((), np.int32)
    masked = lambda fill: wrap(lambda x: hc.call(int, whole, x, where=x > 9, fill=fill))
    text = "fill= of `int` is 4294967301 for result, which can't be converted to int32"
    with pytest.raises(hc.errors.SpecError, match=text):
        masked(2**32 + 5)(1.0)
    assert int(masked(-(2**31))(1.0)) == -(2**31)


def test_a_traced_mask_of_many_is_refused():
    with pytest.raises(
        hc.errors.SpecError, match=re.escape("got bool[3]. For one bool per row, vmap")
    ):
        jax.jit(lambda x: hc.call(free, ROW, x, where=x > 0))(X[0])


def test_a_traced_fill_is_refused():
    with pytest.raises(
        hc.errors.SpecError, match=re.escape("fill= of `free` is traced")
    ):
        jax.jit(lambda x: hc.call(free, ROW, x, where=True, fill=x[0]))(X[0])


def test_legacy_vectorized_refuses_a_mask_a_row():
    host = Host(vmap_method="legacy_vectorized")
    with pytest.raises(
        hc.errors.BatchingError, match='vmap_method="legacy_vectorized", which'
    ):
        jax.vmap(host)(X, np.ones(4, bool))


@pytest.mark.parametrize(
    ("options", "say"),
    [
        ({"vmap_method": "legacy_vectorized"}, "does not tell batched arguments"),
        (
            {"vmap_method": "expand_dims", "lend": "out"},
            "gets only the rows where the mask",
        ),
    ],
    ids=["legacy_vectorized", "out"],
)
def test_masks_that_differ_between_rows_are_refused(options, say):
    row = lambda v, m: hc.call(np.negative, v, v, where=m, **options)
    with pytest.raises(hc.errors.BatchingError, match=say):
        jax.vmap(row)(jnp.ones((2, 3)), jnp.array([True, False]))
