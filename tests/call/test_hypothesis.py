"""Any tree of any arrays, under any vmap, compared with the same function without JAX."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import policies
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hostcall as hc

DTYPES = [
    *map(np.dtype, ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"]),
    *map(np.dtype, ["float16", "float32", "complex64", ml_dtypes.bfloat16]),
]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
ORDERS = st.sampled_from(policies.CALL["order"].values)


def numbers(shape, dtype, seed):
    """Numbers of a dtype, without NaN and infinity."""
    draw = np.random.default_rng(seed).integers(-100, 100, shape)
    if dtype == np.bool_:
        return draw > 0
    values = draw.astype(np.int64) if dtype.kind == "u" else draw
    array = np.asarray(values).astype(dtype)
    return array * dtype.type(1j) + array if dtype.kind == "c" else array


def arrays(shapes=SHAPES):
    return st.builds(numbers, shapes, st.sampled_from(DTYPES), st.integers(0, 99))


def trees(leaves):
    return st.recursive(
        leaves | st.none(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=6,
    )


def change(array):
    """Another array of the same shape and dtype, computed element by element."""
    if array.dtype == np.bool_:
        return ~array
    if array.dtype.kind in "iu":
        return array ^ array.dtype.type(1)
    return -array


def mirrored(array):
    """As `change`, but with the elements reversed in memory, so not contiguous."""
    return np.flip(change(array))


def like(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype), tree)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_trees(wrap):
    @given(args=trees(arrays()), kwargs=st.dictionaries(st.sampled_from("uvw"), arrays()),
           order=ORDERS)  # fmt: skip
    def check(args, kwargs, order):
        seen = []

        def host(tree, **named):
            seen.append(jax.tree.map(np.copy, (tree, named)))
            # Results with another structure than the arguments.
            return [jax.tree.map(mirrored, named), (jax.tree.map(mirrored, tree),)]

        want = host(args, **kwargs)
        seen.clear()
        assume(order != "pure" or jax.tree.leaves(want))

        def program(tree, named):
            return hc.call(host, like(want), tree, order=order, **named)

        assert_same(wrap(program)(args, kwargs), want)
        jax.effects_barrier()
        if seen or order != "pure" or any(x.size for x in jax.tree.leaves(want)):
            [found] = seen  # JAX may drop a pure call whose results have no elements
            assert_same(found, (args, kwargs))

    check()


@st.composite
def batches(draw):
    """(arrays, in_axes, out_axes, batch size), at least one of the arrays batched."""
    size = draw(st.integers(1, 4))
    values, in_axes, out_axes = [], [], []
    for n in range(draw(st.integers(1, 3))):
        row = draw(arrays())
        rank = row.ndim
        axis = draw(st.integers(-rank - 1, rank) | (st.none() if n else st.nothing()))
        shape = list(row.shape)
        if axis is not None:
            shape.insert(axis % (rank + 1), size)
        values.append(numbers(tuple(shape), row.dtype, draw(st.integers(0, 99))))
        in_axes.append(axis)
        out_axes.append(draw(st.integers(-rank - 1, rank)))
    return values, tuple(in_axes), tuple(out_axes), size


@pytest.mark.parametrize("method", ["sequential", "parallel", "broadcast_all"])
def test_vmap(method):
    @given(batch=batches(), order=ORDERS)
    def check(batch, order):
        values, in_axes, out_axes, size = batch
        rows = [
            [x if a is None else np.take(x, n, a) for x, a in zip(values, in_axes)]
            for n in range(size)
        ]
        want = tuple(
            np.stack([change(row[k]) for row in rows], out)
            for k, out in enumerate(out_axes)
        )
        calls = []

        def host(*args):
            calls.append(1)
            return tuple(map(change, args))

        def program(*args):
            return hc.call(host, like(args), *args, order=order, vmap_method=method)

        got = jax.jit(jax.vmap(program, in_axes, out_axes))(*values)
        assert_same(got, want)
        jax.effects_barrier()
        if order != "pure" or any(x.size for x in want):
            assert len(calls) == (1 if method == "broadcast_all" else size)

    check()


# --- Any options of the tables ----------------------------------------------------------


def chosen(table):
    """Some of the options of a table, with values that fit."""
    some = {name: st.sampled_from(v) for name, v in policies.some(table).items() if v}
    return st.fixed_dictionaries({}, optional=some)


def code_of(run):
    """The code of the error that this raises; None if it raises none."""
    try:
        with hc.reraise():
            jax.block_until_ready(run())
    except hc.errors.HostcallError as error:
        return error.code
    return None


def twice(x, out=None):
    return np.from_dlpack(x) * 2


@settings(max_examples=60)
@given(how=chosen(policies.CALL))
def test_any_options_of_a_call_are_refused_or_give_the_result(how):
    batch = jnp.arange(3, dtype=jnp.float32)
    spec = jax.ShapeDtypeStruct((), jnp.float32)
    program = jax.jit(jax.vmap(lambda x: policies.call(twice, spec, x, **how)))
    code = code_of(lambda: program(batch))
    if code is None:
        np.testing.assert_array_equal(program(batch), 2 * np.arange(3), str(how))
    elif code != "hc-conflict":
        assert how["arrays"] == "cuda", code  # there is no GPU here


@settings(max_examples=60)
@given(how=chosen(policies.TAP))
def test_any_options_of_a_tap_are_refused_or_deliver_the_values(how):
    seen = []

    def program(x):
        hc.tap(lambda v: seen.extend(np.ravel(np.from_dlpack(v))), x, **how)
        return x

    hc.barrier()
    batch = jnp.arange(3, dtype=jnp.float32)
    code = code_of(lambda: jax.jit(jax.vmap(program))(batch))
    if code is not None:
        assert code in ("hc-conflict", "hc-dropped"), how
        return
    hc.barrier()
    thinned = how.keys() & {"every", "sample"}
    assert sorted(seen) == [0, 1, 2] or (thinned and set(seen) < {0, 1, 2}), how


def test_a_search_after_a_failed_call_explains_what_it_found():
    """hypothesis watches which lines ran, unless somebody else has taken its tool."""

    def fail(x):
        raise LookupError("no")

    spec = jax.ShapeDtypeStruct((), jnp.float32)
    with pytest.raises(LookupError), hc.reraise():
        jax.block_until_ready(jax.jit(lambda x: hc.call(fail, spec, x))(1.0))

    @given(st.integers())
    def search(number):
        assert number < 5

    with pytest.raises(AssertionError):
        search()
