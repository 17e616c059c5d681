"""Sinks of hc.Recorder. The oracle is the recorder's own table."""

import csv
import json
import sqlite3
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall.tools import sinks

pytest.importorskip("pyarrow")


def run_of(rec, steps=100):
    """Two sets of columns, with a vector and rows."""

    @jax.jit
    def run(x):
        def body(c, i):
            rec(step=i, loss=c.sum(), pair=c[:2], even=i % 2 == 0)
            jax.vmap(lambda v: rec(step=i, v=v))(c)
            return c + 1, None

        return jax.lax.scan(body, x, jnp.arange(steps))[0]

    run(jnp.arange(3.0))


def rows_of(table, *names):
    """Rows without nulls in `names`."""
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return [row for row in rows if None not in row]


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self):
        self.batches = []
        self.closed_by = None

    def __call__(self, columns):
        self.batches.append(columns)

    def close(self):
        self.closed_by = threading.current_thread().name

    def column(self, name):
        return np.concatenate([b[name] for b in self.batches if name in b])


def test_any_callable_gets_batches_of_columns(tmp_path):
    kept, plain = Kept(), []
    with hc.Recorder(tmp_path / "run", sinks=[kept, plain.append]) as rec:
        run_of(rec)
        table = rec.table()
    assert kept.closed_by == "hostcall-sink-Kept"
    assert len(plain) == len(kept.batches) < 50
    assert list(kept.batches[0])[:2] == ["step", "time"]
    assert kept.column("pair").shape == (100, 2)
    assert kept.column("even").dtype == bool
    for name in ("loss", "v", "row"):
        assert kept.column(name).tolist() == [x for (x,) in rows_of(table, name)]


def test_csv(tmp_path):
    for _ in range(2):  # the second appends
        with hc.Recorder(
            tmp_path / "run", sinks=[sinks.csv(tmp_path / "a.csv")]
        ) as rec:
            run_of(rec)
    table = hc.tools.read(tmp_path / "run").table()
    for file, names in (("a.csv", ["loss", "pair.0", "pair.1"]), ("a.1.csv", ["v"])):
        rows = list(csv.DictReader((tmp_path / file).read_text().splitlines()))
        want = rows_of(table, "step", "time", names[0])
        got = [(int(r["step"]), float(r["time"]), float(r[names[0]])) for r in rows]
        assert got == want
        assert len(got) in (200, 600)
        assert set(names) <= set(rows[0])


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    with hc.Recorder(tmp_path / "run", sinks=[sinks.jsonl(path)]) as rec:
        run_of(rec)
        table = rec.table()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    got = [(r["step"], r["loss"], r["pair"], r["even"]) for r in rows if "loss" in r]
    assert got == rows_of(table, "step", "loss", "pair", "even")
    assert len(rows) == 400


def test_sqlite(tmp_path):
    path = tmp_path / "a.db"
    for _ in range(2):
        with hc.Recorder(tmp_path / "run", sinks=[sinks.sqlite(path, "log")]) as rec:
            run_of(rec)
    table = hc.tools.read(tmp_path / "run").table()
    connection = sqlite3.connect(path)
    got = connection.execute(
        'SELECT step, loss, "pair.0" FROM log WHERE loss IS NOT NULL'
    ).fetchall()
    rows = connection.execute(
        "SELECT step, row, v FROM log WHERE v IS NOT NULL"
    ).fetchall()
    connection.close()
    want = rows_of(table, "step", "loss", "pair")
    assert got == [(step, loss, pair[0]) for step, loss, pair in want]
    assert rows == rows_of(table, "step", "row", "v")


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    with hc.Recorder(
        tmp_path / "run", sinks=[sinks.tensorboard(tmp_path / "tb")]
    ) as rec:
        run_of(rec, 10)
        table = rec.table()
    seen = {}
    for event in events_in(tmp_path / "tb"):
        for value in event.summary.value:
            seen.setdefault(value.tag, []).append((event.step, value.simple_value))
    want = {"loss": rows_of(table, "step", "loss")}
    for row in range(3):
        rows = rows_of(table, "step", "row", "v")
        want[f"v/row{row}"] = [(step, v) for step, r, v in rows if r == row]
    for tag, values in want.items():
        assert seen[tag] == values
    assert {"pair.0", "pair.1", "even"} <= seen.keys()


def events_in(folder):
    """The events of a TensorBoard file: records of a length, data and checksums."""
    import struct

    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.iterdir()
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


@pytest.fixture
def figures(monkeypatch):
    """What is drawn of each figure: {name of a plot: {label of a line: its points}}."""
    figure = pytest.importorskip("matplotlib.figure")
    figures = []
    save = figure.Figure.savefig

    def saved(self, *args, **options):
        figures.append(
            {
                plot.get_ylabel(): {
                    line.get_label(): line.get_data() for line in plot.get_lines()
                }
                for plot in self.axes
            }
        )
        return save(self, *args, **options)

    monkeypatch.setattr(figure.Figure, "savefig", saved)
    return figures


def test_live_draws_a_png(tmp_path, figures):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "live.png"
    drawn = []

    def looks(columns):  # a sink behind the plot's, which may be drawn at any moment
        if path.exists():
            drawn.append(image.imread(path))

    live = sinks.live(path, every=0)
    assert not path.exists()
    with hc.Recorder(tmp_path / "run", sinks=[lambda c: (live(c), looks(c))]) as rec:
        run_of(rec, 5000)
    live.close()
    last = image.imread(path)
    assert last.shape[2] == 4
    assert all(before.shape[1] == last.shape[1] for before in drawn)
    assert len(drawn) > 0
    assert (last != last[0, 0]).any()  # not one colour
    assert list(figures[-1]) == ["even", "loss", "pair.0", "pair.1", "v"]
    assert sorted(figures[-1]["v"]) == ["row 0", "row 1", "row 2"]
    ((steps, losses),) = figures[-1]["loss"].values()
    np.testing.assert_array_equal(steps, np.arange(0, 5000, 2))  # thinned
    np.testing.assert_array_equal(losses, 3 + 3 * steps)


def test_live_is_throttled(tmp_path, figures):
    live = sinks.live(tmp_path / "live.png", every=1e6, names=["b"])
    for step in range(5):
        live({n: np.array([step]) for n in ("step", "time", "a", "b")})
    assert [list(plots) for plots in figures] == [["b"]]
    live.close()
    assert len(figures) == 2


NOTEBOOK = """
import jax, jax.numpy as jnp, hostcall as hc
from hostcall.tools import sinks
with hc.Recorder("run", sinks=[sinks.live(every=0)], flush=0) as rec:
    for step in range(3):
        rec(step=step, loss=1.0 / (step + 1))
        rec.flush()
"""


def test_live_in_a_notebook(tmp_path, monkeypatch):
    """The cell has one image, which is updated: it differs from that of an empty run."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import base64

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cells = [
        nbformat.v4.new_code_cell("from hostcall.tools import sinks; sinks.live();"),
        nbformat.v4.new_code_cell(NOTEBOOK),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    seen = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, cell_index):
            seen.append((message["msg_type"], cell_index))
            return super().process_message(message, cell, cell_index)

    Client(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    empty, live = (cell.outputs for cell in notebook.cells)
    assert [o.output_type for o in empty] == ["display_data"]
    assert [o.output_type for o in live] == ["display_data"]
    assert seen.count(("update_display_data", 1)) >= 3
    images = [base64.b64decode(o[0].data["image/png"]) for o in (empty, live)]
    assert all(image.startswith(b"\x89PNG") for image in images)
    assert images[0] != images[1]
    assert not (tmp_path / "live.png").exists()


# --- Slow, failing ----------------------------------------------------------------------


def test_a_slow_sink_delays_nobody_and_loses_nothing(tmp_path):
    go_on, slow, fast = threading.Event(), Kept(), Kept()

    def waits(columns):
        assert go_on.wait(60)
        slow(columns)

    with hc.Recorder(tmp_path / "run", sinks=[waits, fast], flush=0) as rec:
        for number in range(20):
            rec(x=float(number))
            rec.flush()
        assert rec.table()["x"].to_pylist() == list(range(20))
        assert not slow.batches
        go_on.set()
    assert slow.column("x").tolist() == fast.column("x").tolist() == list(range(20))
    assert len(slow.batches) == 20


def test_the_error_of_a_sink_comes_at_the_barrier(tmp_path, in_time, caplog):
    calls, good = [], Kept()

    def fails(columns):
        calls.append(columns)
        raise ConnectionError("gone")

    with hc.Recorder(tmp_path / "run", sinks=[fails, good], flush=0) as rec:
        rec(x=0.0)
        assert in_time(lambda: "the sink fails failed: ConnectionError" in caplog.text)
        with pytest.raises(ConnectionError, match="gone") as caught:
            hc.barrier()
        assert "the sink fails raised this, and got nothing more" in str(
            caught.value.__notes__
        )
        rec(x=1.0)
    assert len(calls) == 1
    assert good.column("x").tolist() == [0, 1]


def test_the_error_of_a_sink_comes_at_close(tmp_path):
    begun, closing = threading.Event(), threading.Event()

    def fails(columns):
        begun.set()
        assert closing.wait(60)
        raise ConnectionError("gone")

    class FailsAtItsEnd(Kept):
        def close(self):
            raise OSError("full")

    good, last = Kept(), FailsAtItsEnd()
    rec = hc.Recorder(tmp_path / "run", sinks=[fails, good, last], flush=0)
    rec(x=1.0)
    rec.flush()
    assert begun.wait(60)
    closing.set()
    with pytest.raises(BaseExceptionGroup, match="closing the recorder of") as caught:
        rec.close()
    assert [str(error) for error in caught.value.exceptions] == ["gone", "full"]
    assert good.column("x").tolist() == last.column("x").tolist() == [1]
    hc.barrier()
    assert hc.tools.read(tmp_path / "run").table().num_rows == 1


def test_a_sink_that_can_not_be_called(tmp_path):
    with pytest.raises(hc.errors.SpecError, match="should be a function, got 3"):
        hc.Recorder(tmp_path, sinks=[3])
