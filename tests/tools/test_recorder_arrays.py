"""hc.Recorder: arrays. The oracle is stacked `ys`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import grid, line

import hostcall as hc

pa = pytest.importorskip("pyarrow")

COLLECTIVE = re.compile("all-gather|all-reduce|all-to-all|permute|broadcast-start")


@pytest.fixture
def read(rec, rec_folder):
    """The steps and the values of an array that the recorder has got."""

    def read_array(name):
        rec.flush()
        return hc.tools.read(rec_folder).array(name)

    return read_array


def scanned(body, length, carry):
    """The carries of a compiled loop that calls `body(carry, i)`."""

    def step(c, i):
        new = body(c, i)
        return new, new

    return jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(length))[1])(carry)


@pytest.mark.parametrize("shape", [(17,), (5, 4), (300, 400), (2, 3, 4)], ids=str)
def test_a_trajectory(shape, rec, read):
    def body(c, i):
        c = c * 0.9 + i
        rec(step=i, traj=c, loss=c.sum())
        return c

    ys = scanned(body, 30, jnp.linspace(0, 1, np.prod(shape)).reshape(shape))
    steps, traj = read("traj")
    np.testing.assert_array_equal(steps, np.arange(30))
    np.testing.assert_array_equal(traj, ys)
    table = rec.table()
    assert table.column_names == ["step", "time", "loss"]
    assert table.num_rows == 30


DTYPES = ["bool", "int8", "uint16", "int32", "float16", "float32", "complex64"]


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16", "int4"])
def test_dtypes(dtype, rec, read):
    xs = (jnp.arange(60).reshape(3, 20) % 5).astype(dtype)
    for x in xs:
        rec(x=x)
    stored = {"bfloat16": "float32", "int4": "int8"}.get(dtype, dtype)
    _, got = read("x")
    assert got.dtype == stored
    np.testing.assert_array_equal(got, np.asarray(xs).astype(stored))


def test_only_arrays(rec, rec_folder):
    rec(a=jnp.ones((4, 5)), b=jnp.zeros(30))
    assert rec.table().num_rows == 0
    run = hc.tools.read(rec_folder)
    assert run.arrays == ["a", "b"]
    assert run.array("a")[1].shape == (1, 4, 5)
    with pytest.raises(hc.errors.HostcallError, match="no array 'c'. It has: a, b"):
        run.array("c")


def test_many_flushes_fill_one_file(tmp_path):
    """A run that resumes begins another."""
    want = []
    for run in range(2):
        with hc.Recorder(tmp_path / "run") as rec:
            for number in range(4):
                x = jnp.arange(20) + 100 * run + number
                want.append(np.asarray(x))
                rec(x=x)
                rec.flush()
                _, written = hc.tools.read(tmp_path / "run").array("x")
                np.testing.assert_array_equal(written, want)
    steps, values = hc.tools.read(tmp_path / "run").array("x")
    np.testing.assert_array_equal(values, want)
    np.testing.assert_array_equal(steps, np.arange(8))
    files = {path.name for path in (tmp_path / "run/arrays/x").iterdir()}
    assert files == {"0.arrows", "1.arrows"}
    for number in range(2):
        mapped = pa.memory_map(str(tmp_path / f"run/arrays/x/{number}.arrows"))
        table = pa.ipc.open_stream(mapped).read_all()
        assert table["value"].to_pylist() == np.stack(want)[4 * number :][:4].tolist()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_a_killed_process_wrote_of_an_array(count, tmp_path):
    """A block that was written in part is not there."""
    path = tmp_path / "run" / "arrays" / "x" / "0.arrows"
    sizes = []
    with hc.Recorder(tmp_path / "run") as rec:
        for number in range(3):
            sizes.append(path.stat().st_size if number else 0)
            rec(x=jnp.full(20, number))
            rec.flush()
    with open(path, "r+b") as stream:
        stream.truncate(sizes[count] + 100)
    if count == 0:
        with pytest.raises(hc.errors.HostcallError, match="before its first whole en"):
            hc.tools.read(tmp_path / "run").array("x")
    with hc.Recorder(tmp_path / "run") as rec:
        rec(step=8, x=jnp.full(20, 9))
    steps, values = hc.tools.read(tmp_path / "run").array("x")
    np.testing.assert_array_equal(values[:, 0], [*range(count), 9])
    np.testing.assert_array_equal(steps, [*range(count), 8])


def test_blocks_of_another_run_are_not_taken(tmp_path):
    """A step that one run left unfinished is recorded by the next one."""
    x = jax.device_put(jnp.arange(80.0), NamedSharding(line(), P("x")))
    for run in range(2):
        with hc.Recorder(tmp_path / "run") as rec:
            jax.jit(lambda x: rec(step=3, x=x, on="shards"))(x + run)
        if run == 0:  # a batch with the blocks of two devices
            path = tmp_path / "run/arrays/x/0.arrows"
            reader = pa.ipc.open_stream(path.read_bytes())
            whole = reader.read_next_batch()
            assert whole.num_rows == 4
            data = reader.schema.serialize().to_pybytes()
            path.write_bytes(data + whole.slice(0, 2).serialize().to_pybytes())
    steps, values = hc.tools.read(tmp_path / "run").array("x")
    assert steps.tolist() == [3]
    np.testing.assert_array_equal(values, [x + 1])


def test_another_sharding_of_the_same_steps(tmp_path):
    """Entries come in the order in which they were recorded, however they are cut."""
    whole, want = jnp.arange(64.0).reshape(8, 8), []
    with hc.Recorder(tmp_path / "run") as rec:
        for n, spec in enumerate([P("x"), P(), P("x", "y"), P("x"), P(None, "x")]):
            x = jax.device_put(whole + n, NamedSharding(grid(), spec))
            jax.jit(lambda x: rec(step=0, x=x, on="shards"))(x)
            rec.flush()
            want.append(x)
    steps, values = hc.tools.read(tmp_path / "run").array("x")
    assert steps.tolist() == [0] * 5
    np.testing.assert_array_equal(values, want)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)], ids=str)
def test_nested_vmap_adds_axes(axes, rec, read):
    shape = tuple(n for n, axis in zip((2, 3), axes) if axis is not None)
    x = np.arange(np.prod(shape) * 20).reshape(*shape, 20)
    y = jnp.zeros((2, 3))

    def f(x, y):
        rec(x=x, y=y)

    outer, inner = axes
    jax.jit(jax.vmap(jax.vmap(f, (inner, 0)), (outer, 0)))(x, y)
    np.testing.assert_array_equal(read("x")[1], x[None])


# --- Several devices --------------------------------------------------------------------

SPECS = [P("x", "y"), P(("x", "y")), P("x"), P(None, "y"), P(None, ("y", "x")), P()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shards_are_written_block_by_block(spec, rec, read, rec_folder):
    xs = np.arange(12 * 16, dtype=np.float32).reshape(12, 16)

    @jax.jit
    def run(x):
        def body(c, i):
            c = c * 1.5 + 1
            rec(step=i, x=c, few=c[:2, :2], total=i * 2.0, on="shards")
            return c, c

        return jax.lax.scan(body, x, jnp.arange(20))[1]

    x = jax.device_put(xs, NamedSharding(grid(), spec))
    ys = run(x)
    steps, values = read("x")
    np.testing.assert_array_equal(steps, np.arange(20))
    np.testing.assert_array_equal(values, ys)
    table = rec.table()
    assert table["total"].drop_null().to_pylist() == [i * 2.0 for i in range(20)]
    assert table.column_names == ["step", "time", "total"]
    np.testing.assert_array_equal(read("few")[1], ys[:, :2, :2])
    device_blocks = {str(i) for i in x.sharding.devices_indices_map(x.shape).values()}
    stream = pa.OSFile(str(rec_folder / "arrays/x/0.arrows"))
    blocks = pa.ipc.open_stream(stream).read_all()
    assert len(blocks) == 20 * len(device_blocks)


def test_shards_do_not_communicate(rec, optimized):
    """And what the program computes has the same bits."""
    whole = jnp.linspace(0, 1, 64).reshape(8, 8)
    x = jax.device_put(whole, NamedSharding(grid(), P("x", "y")))
    few = jax.device_put(jnp.arange(4.0), NamedSharding(grid(), P("x")))

    def f(x, few, on):
        if on is not None:
            rec(**{f"x_{on}": x, f"few_{on}": few}, on=on)
        return jnp.sin(x) * 2

    compiled = lambda on: jax.jit(lambda *xs: f(*xs, on)).lower(x, few).compile()
    texts = {on: compiled(on).as_text() for on in ("shards", "once")}
    assert not COLLECTIVE.search(texts["shards"])
    assert COLLECTIVE.search(texts["once"])
    results = [np.asarray(compiled(on)(x, few)) for on in ("shards", None)]
    assert results[0].tobytes() == results[1].tobytes()


def test_a_step_that_comes_twice(rec, read):
    """Each block goes to the first entry of its step that lacks it."""
    x = jax.device_put(jnp.zeros((8, 8)), NamedSharding(grid(), P("x", "y")))

    @jax.jit
    def run(x):
        body = lambda i, c: (rec(step=i // 5, x=c, on="shards"), c + 1)[1]
        return jax.lax.fori_loop(0, 20, body, x)

    run(x)
    steps, values = read("x")
    np.testing.assert_array_equal(steps, np.arange(20) // 5)
    np.testing.assert_array_equal(
        values, np.full((20, 8, 8), np.arange(20)[:, None, None])
    )


def test_shard_map_adds_the_axes_of_the_mesh(rec, read):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))

    def body(block):
        def step(i, c):
            rec(step=i, x=c + i)
            return c

        return jax.lax.fori_loop(0, 6, step, block)

    x = jnp.arange(8.0 * 12).reshape(8, 12)
    jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))
    )(x)
    steps, values = read("x")
    np.testing.assert_array_equal(steps, np.arange(6))
    assert values.shape == (6, 2, 2, 4, 6)
    blocks = np.asarray(x).reshape(2, 4, 2, 6).swapaxes(1, 2)
    for step in range(6):
        np.testing.assert_array_equal(values[step], blocks + step)


def test_a_shard_that_does_not_record(rec, read):
    def body(block):
        rec(x=block, where=jax.lax.axis_index("x") != 1)
        return block

    x = jnp.arange(80.0)
    jax.jit(jax.shard_map(body, mesh=line(), in_specs=P("x"), out_specs=P("x")))(x)
    _, values = read("x")
    want = np.asarray(x).reshape(1, 4, 20).copy()
    want[:, 1] = np.nan
    np.testing.assert_array_equal(values, want)


def test_shards_that_never_come(rec, read):
    """Each entry is there, of steps that come once and of a step that comes often."""

    def body(block):
        def step(i, c):
            one = jax.lax.axis_index("x") == 1
            rec(step=i, x=c + i, where=one)
            rec(step=0, y=c - i, where=one)
            return c

        return jax.lax.fori_loop(0, 50, step, block)

    x = jnp.arange(80.0)
    jax.jit(jax.shard_map(body, mesh=line(), in_specs=P("x"), out_specs=P("x")))(x)
    steps, values = read("x")
    np.testing.assert_array_equal(steps, np.arange(50))
    want = np.arange(20, 40) + np.arange(50)[:, None]
    np.testing.assert_array_equal(values[:, 1], want)
    np.testing.assert_array_equal(read("y")[1][:, 1], want - 2 * np.arange(50)[:, None])


# --- Mistakes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda rec, x: rec(x=x, where=x[0] > 0), "where= differs between the rows"),
        (
            lambda rec, x: rec(x=x, step=x[0].astype(int)),
            "step= differs between the rows",
        ),
    ],
)
def test_rows_that_have_no_place(call, text, rec):
    jax.jit(jax.vmap(lambda x: call(rec, x)))(jnp.arange(40.0).reshape(2, 20))
    with pytest.raises(
        hc.errors.HostcallError, match=f"values x can't be recorded.*{text}"
    ):
        hc.barrier()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_vmap_of_another_size(resumed, tmp_path):
    """The error is the tap's. The recorder goes on."""
    rec = hc.Recorder(tmp_path / "run")
    f = jax.jit(jax.vmap(lambda x: rec(x=x)))
    f(jnp.ones((2, 20)))
    if resumed:
        rec.close()
        rec = hc.Recorder(tmp_path / "run")
        f = jax.jit(jax.vmap(lambda x: rec(x=x)))
    f(jnp.ones((3, 20)))
    text = r"array 'x' is recorded with the shape \(3, 20\).* have the shape \(2, 20\)"
    with pytest.raises(hc.errors.HostcallError, match=text):
        hc.barrier()
    f(jnp.ones((2, 20)))
    rec.close()
    assert hc.tools.read(tmp_path / "run").array("x")[1].shape == (2, 2, 20)


def test_a_vmap_over_no_rows_writes_nothing(tmp_path):
    with hc.Recorder(tmp_path / "run") as rec:
        f = jax.jit(jax.vmap(lambda x: (rec(step=3, w=x), x)[1]))
        f(jnp.ones((0, 20))).block_until_ready()
        f(jnp.ones((2, 20))).block_until_ready()
    steps, values = hc.tools.read(tmp_path / "run").array("w")
    assert steps.tolist() == [3]
    assert values.shape == (1, 2, 20)
