"""hc.Recorder: columns. The oracle is a loop in Python that appends to lists."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import line
from recorded import columns

import hostcall as hc

pa = pytest.importorskip("pyarrow")


def scanned(body, xs, carry=0.0):
    """A compiled loop that calls `body(carry, x)`."""
    step = lambda c, x: (body(c, x), c)
    return jax.jit(lambda xs: jax.lax.scan(step, carry, xs))(xs)


def test_a_loop(rec):
    def body(c, i):
        rec(step=i, loss=c * 2, pair=jnp.stack([c, -c]))
        return c + 0.5

    scanned(body, jnp.arange(1000))
    table = rec.table()
    assert table.column_names == ["step", "time", "loss", "pair"]
    step, time, loss, pair = columns(table, *table.column_names)
    np.testing.assert_array_equal(step, np.arange(1000))
    np.testing.assert_array_equal(loss, np.arange(1000.0))
    np.testing.assert_array_equal(pair, np.outer(np.arange(1000) / 2, [1, -1]))
    assert (np.diff(time) >= 0).all()


DTYPES = {
    "bool": "bool",
    "int8": "int8",
    "uint16": "uint16",
    "int32": "int32",
    "float16": "float16",
    "float32": "float32",
    "bfloat16": "float32",
    "float8_e4m3fn": "float32",
    "int4": "int8",
    "uint2": "uint8",
}


SHAPES = [(), (2, 4), (16,), (1, 1)]
BOTH = [(d, (3,)) for d in DTYPES] + [(d, s) for d in ("bool", "int32") for s in SHAPES]


@pytest.mark.parametrize(("dtype", "shape"), BOTH, ids=str)
def test_dtypes_and_shapes(dtype, shape, rec):
    xs = np.arange(5 * int(np.prod(shape))).reshape(5, *shape) % 3
    xs = jnp.asarray(xs).astype(dtype)
    scanned(lambda c, x: (rec(x=x), c)[1], xs)
    (got,) = columns(rec.table(), "x")
    np.testing.assert_array_equal(got, np.asarray(xs).astype(DTYPES[dtype]))
    kind = rec.table().schema.field("x").type
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    assert np.dtype(kind.to_pandas_dtype()) == DTYPES[dtype]


def test_complex_values_have_two_columns(rec):
    xs = jnp.arange(4) * (1 - 2j)
    scanned(lambda c, x: (rec(z=x), c)[1], xs)
    real, imag = columns(rec.table(), "z.real", "z.imag")
    np.testing.assert_array_equal(real + 1j * imag, xs)


def test_pytrees_have_columns_with_dots(rec):
    rec(grads={"w": 1.0, "b": (2.0, [3.0])}, lr=0.5)
    (row,) = rec.table().drop_columns(["step", "time"]).to_pylist()
    assert row == {"grads.w": 1.0, "grads.b.0": 2.0, "grads.b.1.0": 3.0, "lr": 0.5}


def test_calls_without_a_step_are_counted(rec):
    for _ in range(2):
        scanned(lambda c, x: (rec(x=x), c)[1], jnp.arange(5))
    (step,) = columns(rec.table(), "step")
    np.testing.assert_array_equal(step, np.arange(10))


def test_calls_with_different_names_are_joined_with_nulls(rec):
    def body(c, i):
        rec(step=i, loss=c)
        rec(step=i, error=-c, where=i % 2 == 0)
        return c + 1

    scanned(body, jnp.arange(4))
    table = rec.table()
    assert table.column_names == ["step", "time", "loss", "error"]
    rows = sorted(
        ((r["step"], r["loss"], r["error"]) for r in table.to_pylist()), key=str
    )
    want = [(i, float(i), None) for i in range(4)] + [(i, None, -i) for i in (0, 2)]
    assert rows == sorted(want, key=str)


@pytest.mark.parametrize("option", [{"every": 10}, {"sample": 0.3}], ids=str)
def test_fewer_steps(option, rec):
    scanned(lambda c, i: (rec(step=i, twice=2 * i, **option), c)[1], jnp.arange(200))
    step, twice = columns(rec.table(), "step", "twice")
    assert 0 < len(step) < 150
    np.testing.assert_array_equal(twice, 2 * step)
    if "every" in option:
        np.testing.assert_array_equal(step, np.arange(0, 200, 10))


# --- Transformations -------------------------------------------------------------------


def test_vmap_adds_a_row_column(rec):
    xs = np.arange(12.0).reshape(4, 3)

    def body(c, x):
        jax.vmap(lambda v: rec(v=v, c=c))(x)
        return c + 1

    scanned(body, jnp.asarray(xs))
    step, row, v, c = columns(rec.table(), "step", "row", "v", "c")
    np.testing.assert_array_equal(step, np.repeat(np.arange(4), 3))
    np.testing.assert_array_equal(c, step)
    np.testing.assert_array_equal(row, np.tile(np.arange(3), 4))
    np.testing.assert_array_equal(v, xs.ravel())


@pytest.mark.parametrize("masked", [False, True], ids=["all", "where"])
@pytest.mark.parametrize("x_axes", [(0, 0), (0, None), (None, 0), (1, 0)], ids=str)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_nested_vmap(wrap, x_axes, masked, rec):
    """x has the axes that `x_axes` says, y has both, k has none."""
    outer, inner = x_axes
    x = np.arange(100.0, 100 + 24).reshape(2, 3, 4)
    x = x[: 2 if outer is not None else 1, : 3 if inner is not None else 1]
    given = x.squeeze(tuple(n for n in range(2) if x_axes[n] is None))
    if outer == 1:
        given = np.moveaxis(given, 0, 1)
    y = np.arange(6).reshape(2, 3)

    def f(x, y):
        rec(y=y, x=x, k=7, where=y % 2 == 0 if masked else None)

    wrap(jax.vmap(jax.vmap(f, (inner, 0)), (outer, 0)))(given, y)
    row0, row1, ys, xs, ks = columns(rec.table(), "row0", "row1", "y", "x", "k")
    kept = [at for at in np.ndindex(2, 3) if not masked or y[at] % 2 == 0]
    assert list(zip(row0, row1, strict=True)) == kept
    np.testing.assert_array_equal(ys, [y[at] for at in kept])
    whole = np.broadcast_to(x, (2, 3, 4))
    np.testing.assert_array_equal(xs, [whole[at] for at in kept])
    np.testing.assert_array_equal(ks, 7)


def test_shard_map_adds_the_device(rec):
    def body(block):
        return jax.lax.fori_loop(
            0, 5, lambda i, b: (rec(step=i, b=b[0] + i), b)[1], block
        )

    run = jax.shard_map(body, mesh=line(), in_specs=P("x"), out_specs=P("x"))
    jax.jit(run)(100 * jnp.arange(4))
    step, device, b = columns(rec.table(), "step", "device", "b")
    np.testing.assert_array_equal(b, 100 * device + step)
    assert sorted(zip(device, step)) == [(d, s) for d in range(4) for s in range(5)]


def test_vmap_in_shard_map(rec, rec_folder):
    def body(block):
        jax.vmap(lambda v: rec(v=v, big=jnp.full(20, v)))(block)
        return block

    run = jax.shard_map(body, mesh=line(), in_specs=P("x"), out_specs=P("x"))
    jax.jit(run)(jnp.arange(12))
    device, row, v = columns(rec.table(), "device", "row", "v")
    np.testing.assert_array_equal(v, 3 * device + row)
    assert sorted(v) == list(range(12))
    _, big = hc.tools.read(rec_folder).array("big")
    assert big.shape == (1, 4, 3, 20)
    np.testing.assert_array_equal(big[0, :, :, 7].ravel(), np.arange(12))


@pytest.mark.parametrize("value", [True, False])
def test_where_that_is_the_same_for_all_rows(value, rec):
    jax.jit(lambda w: jax.vmap(lambda v: rec(v=v, where=w))(jnp.arange(3)))(value)
    table = rec.table()
    assert table.num_rows == (3 if value else 0)
    if value:
        assert columns(table, "row", "v")[1].tolist() == [0, 1, 2]


def test_where_differs_between_rows_and_no_value_does(rec):
    jax.jit(jax.vmap(lambda w: rec(step=7, v=5, where=w)))(jnp.arange(4) % 2 == 1)
    rows = rec.table().drop_columns("time").to_pylist()
    assert rows == [{"step": 7, "row": at, "v": 5} for at in (1, 3)]


def test_step_differs_between_rows(rec):
    jax.jit(jax.vmap(lambda i: rec(step=i, v=2 * i)))(jnp.arange(4))
    assert rec.table()["step"].to_pylist() == [0, 1, 2, 3]


def test_cond_and_while(rec):
    def body(c):
        i, x = c
        jax.lax.cond(x > 2, lambda: rec(step=i, high=x), lambda: rec(step=i, low=x))
        return i + 1, x + 1.0

    jax.jit(lambda: jax.lax.while_loop(lambda c: c[0] < 6, body, (0, 0.0)))()
    table = rec.table()
    low, high = table["low"].to_pylist(), table["high"].to_pylist()
    assert low == [0, 1, 2, None, None, None]
    assert high == [None, None, None, 3, 4, 5]


def test_grad_records_the_forward_pass_once(rec):
    def loss(x):
        rec(x=x)
        return x**2

    jax.jit(jax.grad(jax.checkpoint(loss)))(3.0)
    assert columns(rec.table(), "x")[0].tolist() == [3.0]


def of_steps(record, c):
    def body(c, i):
        record(step=i, c=c[0], s=jnp.sum(c), big=jnp.tile(c, 5))
        return jnp.sin(c) * 1.1 + i, c

    return jax.lax.scan(body, c, jnp.arange(50.0).astype(int))


def until(record, c):
    def body(state):
        i, c = state
        record(step=i, c=c)
        return i + 1, jnp.cos(c) * 1.3

    return jax.lax.while_loop(lambda s: (s[0] < 40) & (s[1][0] < 5), body, (0, c))


def in_shards(record, c):
    def body(block):
        record(block=block * 2)
        return jnp.exp(block)

    spec = P("x")
    return jax.shard_map(body, mesh=line(), in_specs=spec, out_specs=spec)(c)


PROGRAMS = {
    "scan": of_steps,
    "vmap of scan": lambda record, c: jax.vmap(lambda x: of_steps(record, c * x))(c),
    "while": until,
    "grad": jax.grad(lambda c, record: of_steps(record, c)[0].sum(), argnums=0),
    "remat": jax.grad(
        lambda c, record: jax.checkpoint(lambda c: of_steps(record, c)[0].sum())(c)
    ),
    "shard_map": in_shards,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_the_same_bits(name, rec, optimized):
    c = jnp.linspace(0, 1, 4)
    program = PROGRAMS[name]
    by_grad = name in ("grad", "remat")

    def run(record):
        args = lambda c: (c, record) if by_grad else (record, c)
        return jax.tree.leaves(jax.jit(lambda c: program(*args(c)))(c))

    for a, b in zip(run(lambda **_: None), run(rec), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert rec.table().num_rows > 0


def test_several_threads_record(rec):
    """Each thread traces and runs a program of its own."""

    def work(number):
        f = lambda c, i: (rec(thread=number, i=i), c)[1]
        scanned(f, jnp.arange(200))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    thread, i = columns(rec.table(), "thread", "i")
    for number in range(4):
        np.testing.assert_array_equal(i[thread == number], np.arange(200))


# --- Mistakes ---------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "'loss' of .* has the type float32, and is now recorded as int32"),
        (jnp.ones(3), r"'loss' of .* is now recorded as float32\[3\]"),
        (jnp.ones(30), r"'loss' of .* is now recorded as an array of float32\[30\]"),
    ],
)
def test_a_changed_type_names_the_column(value, text, resumed, tmp_path):
    rec = hc.Recorder(tmp_path / "run")
    rec(loss=1.0, other=2)
    if resumed:
        rec.close()
        rec = hc.Recorder(tmp_path / "run")
    with rec:
        with pytest.raises(hc.errors.SpecError, match=text):
            jax.jit(lambda x: rec(loss=x, other=2))(value)
        assert rec.table().num_rows == 1


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "without a value"),
        ({"x": "train"}, "stores numbers and arrays, and x= is 'train', str"),
        ({"x": len}, "x= is <built-in function len>, builtin_function"),
        ({"x": jnp.zeros((0, 3))}, r"x= has the shape \(0, 3\), so there is nothing"),
        ({"step": 1.5, "x": 1}, r"step= .* integer scalar, got float32\[\]"),
        ({"step": jnp.arange(3), "x": 1}, r"step= .* integer scalar, got int32\[3\]"),
        ({"time": 1}, "under the name 'time'. It adds the columns time, process, dev"),
        ({"row3": 1}, "under the name 'row3'"),
        (
            {"a/b/c": 1},
            r"under the name 'a/b/c': .* can't have \"/\". Write"
            r" rec\(\*\*{'a.b.c': value}\), or as a tree: rec\(a={'b.c': value}\)",
        ),
        ({"x": 2**70}, "stores numbers and arrays, and x= is 1180591620717411303424"),
        (
            {"step": 2**70, "x": 1},
            "stores numbers and arrays, and step= is 11805916207",
        ),
        ({"a\0": 1}, "under the name"),
        ({"\ud800": 1}, "under the name"),
        ({"ä" * 128: 1}, "names of folders, of 255 bytes at most"),
        ({"x": 1, "on": "shards", "sample": 0.5}, "on='shards' .* takes no sample="),
        ({"x": 1, "on": "shards", "every": 0.5}, "no every= in seconds"),
    ],
    ids=str,
)
def test_values_that_can_not_be_recorded(values, text, rec):
    with pytest.raises(hc.errors.SpecError, match=text):
        rec(**values)


def test_keys_are_recorded_as_their_data(rec):
    with pytest.raises(hc.errors.SpecError, match="Record jax.random.key_data"):
        rec(key=jax.random.key(0))


def test_an_object_that_jax_takes_for_an_array_may_have_any_name(rec):
    class Variable:
        def __jax_array__(self):
            return jnp.arange(3)

    with pytest.raises(hc.errors.SpecError, match=r"Did you mean where=\?"):
        rec(wher=1)
    rec(wher=Variable())


def test_two_recorders_of_one_folder(tmp_path, rec):
    with pytest.raises(
        hc.errors.HostcallError, match="another recorder, of this or another"
    ):
        hc.Recorder(tmp_path / "run")


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(
        hc.errors.HostcallError, match="has no run that a recorder wrote"
    ):
        hc.tools.read(tmp_path)
