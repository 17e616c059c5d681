"""hc.Recorder: reading, resuming, closing, and disks that fail."""

import sys

import jax
import jax.numpy as jnp
import pytest
from recorded import columns

import hostcall as hc

pytest.importorskip("pyarrow")


# --- Reading, resuming ------------------------------------------------------------------


def test_a_run_is_read_while_it_runs(tmp_path, in_time):
    """Without a flush, a close, or another delivery."""
    with hc.Recorder(tmp_path / "run", flush=0.01) as rec:
        rec(x=1.0)
        assert in_time(lambda: hc.tools.read(tmp_path / "run").table().num_rows == 1)


def test_a_program_that_changes_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outputs = [hc.tools.sinks.csv("a.csv"), hc.tools.sinks.jsonl("a.jsonl")]
    rec = hc.Recorder("run", sinks=[*outputs, hc.tools.sinks.sqlite("a.db")])
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    rec(x=1.0, big=jnp.ones(20))
    rec.close()
    assert hc.tools.read(tmp_path / "run").table()["x"].to_pylist() == [1.0]
    assert hc.tools.read(tmp_path / "run").arrays == ["big"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run", "other", "a.csv", "a.jsonl", "a.db"}
    assert list((tmp_path / "other").iterdir()) == []


def test_a_run_without_a_call(tmp_path):
    hc.Recorder(tmp_path / "run").close()
    assert hc.tools.read(tmp_path / "run").table().num_rows == 0


def test_a_damaged_run(tmp_path):
    """Neither read nor continued, and what it is said of names the run."""
    with hc.Recorder(tmp_path / "run") as rec:
        rec(many=jnp.ones(20))
    path = tmp_path / "run" / "arrays" / "many" / "0.arrows"
    path.write_text('{"shape": 3}')
    for use in (lambda run: hc.tools.read(run).array("many"), hc.Recorder):
        with pytest.raises(
            hc.errors.HostcallError, match="the run in .* can't be read"
        ) as caught:
            use(tmp_path / "run")
        assert caught.value.code == "hc-record"
    path.unlink()
    with pytest.raises(hc.errors.HostcallError):  # and nobody holds the lock
        hc.tools.read(tmp_path / "run").array("many")


def test_a_name_of_a_column_that_is_no_text(tmp_path):
    with hc.Recorder(tmp_path / "run") as rec:
        rec(loss=1.0)
    (path,) = (tmp_path / "run" / "columns").iterdir()
    path.write_bytes(path.read_bytes().replace(b"loss", b"l\xd2ss"))
    with pytest.raises(hc.errors.HostcallError, match="the run in .* can't be read"):
        hc.tools.read(tmp_path / "run").table()


def test_resuming_appends(tmp_path):
    for number in range(3):
        with hc.Recorder(tmp_path / "run") as rec:
            rec(x=float(number))
            rec(y=number)
    step, x, y = columns(hc.tools.read(tmp_path / "run").table(), "step", "x", "y")
    assert x.tolist() == [0, None, 1, None, 2, None]
    assert y.tolist() == [None, 0, None, 1, None, 2]
    assert step.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_stream_that_is_cut_anywhere(tmp_path):
    """Every prefix of the file is a run, and can be resumed."""
    with hc.Recorder(tmp_path / "run") as rec:
        for number in range(3):
            rec(x=float(number))
            rec.flush()
    path = tmp_path / "run" / "columns" / "0.arrows"
    data = path.read_bytes()
    seen = []
    for end in [*range(0, len(data), 7), len(data)]:
        path.with_name("1.arrows").unlink(missing_ok=True)
        path.write_bytes(data[:end])
        before = hc.tools.read(tmp_path / "run").table()
        rows = before.num_rows
        seen.append(rows)
        assert rows == 0 or before["x"].to_pylist() == list(range(rows))
        with hc.Recorder(tmp_path / "run") as rec:
            rec(x=9.0)
        after = hc.tools.read(tmp_path / "run").table()
        assert after["x"].to_pylist() == [*range(rows), 9]
        assert after["step"].to_pylist() == list(range(rows + 1))
    assert set(seen) == {0, 1, 2, 3}
    assert seen == sorted(seen)


def test_parquet_and_pandas(tmp_path, rec):
    pytest.importorskip("pandas")
    pq = pytest.importorskip("pyarrow.parquet")
    rec(step=5, x=1.5, v=jnp.arange(3))
    frame = rec.dataframe()
    assert frame["x"].tolist() == [1.5]
    assert frame["v"][0].tolist() == [0, 1, 2]
    hc.tools.read(tmp_path / "run").to_parquet(tmp_path / "run.parquet")
    assert pq.read_table(tmp_path / "run.parquet").equals(rec.table())


# --- Closing, failing ------------------------------------------------------------------


def test_a_closed_recorder(tmp_path):
    rec = hc.Recorder(tmp_path / "run")
    f = jax.jit(lambda x: rec(x=x))
    f(1.0)
    rec.close()
    rec.close()
    with pytest.raises(
        hc.errors.HostcallError,
        match="is closed, and takes no more values. Close it after the last program that"
        " records in it; or open another one: hc.Recorder of the same folder appends",
    ):
        rec(x=1.0)
    f(2.0)
    with pytest.raises(
        hc.errors.HostcallError, match="closed, and a program still records"
    ):
        hc.barrier()
    assert hc.tools.read(tmp_path / "run").table().num_rows == 1


RECORD = "record"
MISSING = {
    "pyarrow": (lambda folder, rec: hc.Recorder(folder / "new"), RECORD),
    "pyarrow.parquet": (
        lambda folder, rec: hc.tools.read(folder / "run").to_parquet("x"),
        RECORD,
    ),
    "pandas": (lambda folder, rec: rec.dataframe(), RECORD),
    "matplotlib.figure": (
        lambda folder, rec: hc.tools.sinks.live(folder / "x.png"),
        "matplotlib",
    ),
    "tensorboardX": (
        lambda folder, rec: hc.tools.sinks.tensorboard(folder),
        "tensorboardX",
    ),
}


@pytest.mark.parametrize("module", MISSING)
def test_a_missing_package_is_named(module, tmp_path, rec, monkeypatch):
    call, package = MISSING[module]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(hc.errors.PackageError) as caught:
        call(tmp_path, rec)
    name = module.split(".")[0]
    pip = f'pip install "{package}"'
    if package == RECORD:
        pip = f'pip install {name}; in a checkout of hostcall: pip install ".[record]"'
    text = f"{name}, which is not installed. Install it: {pip}"
    assert f" needs the package {text}" in str(caught.value)
    assert (caught.value.name, caught.value.code) == (name, "hc-package")


def test_a_disk_that_fails(tmp_path, in_time, caplog):
    """The next barrier raises the error, once. Later values are dropped."""
    rec = hc.Recorder(tmp_path / "run", flush=0.01)
    (tmp_path / "run" / "columns").write_text("not a folder")
    rec(x=1.0)
    assert in_time(lambda: "run failed: FileExistsError" in caplog.text)
    with pytest.raises(OSError, match="columns"):
        hc.barrier()
    rec(x=2.0)
    with pytest.raises(
        hc.errors.HostcallError, match="could not write, and records"
    ) as error:
        rec.flush()
    assert isinstance(error.value.__cause__, OSError)
    rec.close()


def test_a_disk_that_fails_at_close(tmp_path):
    rec = hc.Recorder(tmp_path / "run", flush=1e6)
    (tmp_path / "run" / "columns").write_text("not a folder")
    rec(x=1.0)
    with pytest.raises(OSError, match="columns"):
        rec.close()


def test_a_program_that_fails(tmp_path):
    """What came before is recorded, and the program's error stays itself."""

    def fails(x):
        raise ValueError("diverged")

    rec = hc.Recorder(tmp_path / "run", flush=1e6)
    rec(x=1.0)
    hc.tap(fails, 1)
    with pytest.raises(ValueError, match="diverged"):
        rec.close()
    assert hc.tools.read(tmp_path / "run").table().num_rows == 1
