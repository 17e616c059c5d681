"""Runs that somebody else made: nothing in them is executed, and no link is followed."""

import contextlib
import json
import os
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

pa = pytest.importorskip("pyarrow")

READERS = {
    "array": lambda folder: hc.tools.read(folder).array("w"),
    "Recorder": lambda folder: hc.Recorder(folder).close(),
}


class Evil:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def run(tmp_path):
    with hc.Recorder(tmp_path / "run") as rec:
        for step in range(3):
            rec(step=step, w=jnp.arange(20.0) + step, loss=1.0 * step)
    return tmp_path / "run"


def index(run, told, **columns):
    """Writes the stream of an array that says so of it."""
    real = {"process": 0, "type": "x", "whole": [20], "sparse": False}
    text = json.dumps({**real, **told} if isinstance(told, dict) else told)
    given = {
        "step": [0, 1, 2],
        "time": [0.0, 1.0, 2.0],
        "at": [[0]] * 3,
        "value": np.arange(60.0, dtype=np.float32).reshape(3, 20),
        **columns,
    }
    arrays = [lists(values) for values in given.values()]
    batch = pa.record_batch(arrays, list(given))
    batch = batch.replace_schema_metadata({"hostcall": text})
    write_stream(run / "arrays" / "w" / "0.arrows", batch)


def lists(values):
    """An Arrow array whose types say the shape of a row."""
    if isinstance(values, pa.Array):
        return values
    out = pa.array(np.ravel(values))
    for size in reversed(np.shape(values)[1:]):
        out = pa.FixedSizeListArray.from_arrays(out, size)
    return out


@pytest.mark.parametrize(
    "values",
    [
        np.array(["a"] * 3),
        np.zeros(3, "M8[s]"),
        pa.array([{"a": 1.0}] * 3),
        pa.array([b"1234"] * 3, pa.binary(4)),
        np.zeros(3, np.float32),
        np.zeros((3, 21), np.float32),
        np.zeros((3, 4, 5), np.float32),
        pa.array([[0.0] * 20, None, [0.0] * 20], pa.list_(pa.float32(), 20)),
    ],
    ids=lambda values: str(getattr(values, "type", getattr(values, "shape", ""))),
)
def test_values_that_no_recorder_writes(run, values):
    index(run, {}, value=values)
    with pytest.raises(hc.errors.HostcallError, match="the run in .* can't be read"):
        READERS["array"](run)


@pytest.mark.parametrize("parts", [("f4", "f8"), ("f2", "i4"), ("f4", "f4")], ids=str)
def test_complex_values(run, parts):
    """The imaginary part has the dtype and shape of the real one, or no recorder wrote
    it. NumPy may convert it.
    """
    real, imag = (np.ones((3, 20), kind) for kind in parts)
    index(run, {}, **{"value.real": real, "value.imag": imag})
    assert READERS["array"](run)[1].dtype == "complex64"
    index(run, {}, **{"value.real": real, "value.imag": imag[:, :3]})
    with pytest.raises(hc.errors.HostcallError, match="the run in .* can't be read"):
        READERS["array"](run)


@pytest.mark.parametrize("length", [10**15, 10**11, 61])
def test_a_length_that_is_not_there(run, length):
    """Arrow's head says it: as the number of rows, and of the bytes of a column."""
    path = run / "arrays" / "w" / "0.arrows"
    data = path.read_bytes()
    for there in (3, 60, 240):
        before = there.to_bytes(8, "little")
        changed = data.replace(before, length.to_bytes(8, "little"))
        assert changed != data
        path.write_bytes(changed)
        with contextlib.suppress(hc.errors.HostcallError):
            steps, values = READERS["array"](run)
            assert len(steps) == len(values) <= 3


def test_an_index_that_fits(run):
    index(run, {})
    assert READERS["array"](run)[0].tolist() == [0, 1, 2]
    index(run, {"whole": [40], "sparse": True}, at=[[0], [20], [20]])
    values = READERS["array"](run)[1]
    assert np.isnan(values).sum(axis=1).tolist() == [20, 20, 20]
    READERS["Recorder"](run)


@pytest.mark.parametrize(
    "told",
    [
        3,
        [],
        {"process": "0"},
        {"process": -1},
        {"process": True},
        {"whole": 20},
        {"whole": "20"},
        {"whole": [20.0]},
        {"whole": [-20]},
        {"more": 1},
    ],
    ids=str,
)
def test_an_array_that_no_recorder_describes_so(run, told):
    index(run, told)
    for reader in READERS.values():
        with pytest.raises(
            hc.errors.HostcallError, match="the run in .* can't be read"
        ):
            reader(run)


@pytest.mark.parametrize(
    ("told", "columns"),
    [
        ({"whole": []}, {}),
        ({"whole": [19]}, {}),
        ({"whole": [20, 1]}, {}),
        ({"whole": [10**15]}, {}),
        ({"whole": [10**15], "sparse": True}, {}),
        ({"whole": [10**30], "sparse": True}, {}),
        ({"whole": [0]}, {}),
        ({"sparse": True}, {"at": [[-1]] * 3}),
        ({"sparse": True}, {"at": [[1]] * 3}),
        ({"sparse": True}, {"at": [[2**63 - 1]] * 3}),
        ({}, {"at": [[0, 0]] * 3}),
        ({}, {"at": [[0.0]] * 3}),
        ({}, {"step": [0.0, 1.0, 2.0]}),
    ],
    ids=str,
)
def test_blocks_that_have_no_place(run, told, columns):
    index(run, told, **columns)
    with pytest.raises(hc.errors.HostcallError, match="the run in .* can't be read"):
        READERS["array"](run)


# --- Columns ----------------------------------------------------------------------------


class FromPickle(pa.ExtensionType):
    """As packages do it: what a file says of the type is unpickled."""

    def __init__(self, data=b""):
        self.data = data
        super().__init__(pa.int64(), "hostcall.test.pickle")

    def __arrow_ext_serialize__(self):
        return self.data

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, data):
        pickle.loads(data)
        return cls(data)


@pytest.fixture
def registered():
    pa.register_extension_type(FromPickle())
    yield
    pa.unregister_extension_type("hostcall.test.pickle")


def write_stream(path, batch):
    with pa.OSFile(str(path), "wb") as file:
        file.write(batch.schema.serialize())
        file.write(batch.serialize())


def refused_columns(run):
    for reader in (lambda: hc.tools.read(run).table(), lambda: hc.Recorder(run)):
        with pytest.raises(
            hc.errors.HostcallError, match="the run in .* can't be read"
        ):
            reader()


@pytest.mark.parametrize("nested", [False, True])
def test_a_column_of_an_extension_type(run, registered, nested, tmp_path):
    kind = FromPickle(pickle.dumps(Evil(tmp_path / "ran")))
    (tmp_path / "ran").mkdir()  # else making the type here would
    column = pa.ExtensionArray.from_storage(kind, pa.array([1]))
    if nested:
        column = pa.FixedSizeListArray.from_arrays(column, 1)
    batch = pa.record_batch([column], ["step"])
    write_stream(run / "columns" / "1.arrows", batch)
    (tmp_path / "ran").rmdir()
    refused_columns(run)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"x"]),
        pa.array(["x"]),
        pa.array(["x"]).dictionary_encode(),
        pa.array([[1, 2]]),
        pa.array([{"a": 1}]),
        pa.array([None]),
    ],
    ids=lambda column: str(column.type),
)
def test_a_column_of_a_type_that_is_not_recorded(run, column):
    batch = pa.record_batch([column], ["step"])
    write_stream(run / "columns" / "1.arrows", batch)
    refused_columns(run)


# --- Links ------------------------------------------------------------------------------

LINKS = [
    ".lock",
    "columns",
    "columns/1.arrows",
    "arrays",
    "arrays/w",
    "arrays/w/0.arrows",
    "arrays/w/1.arrows",
]


@pytest.mark.parametrize("place", LINKS)
def test_a_link_leads_nowhere(run, place, tmp_path):
    """What it leads to is a part of another run, so that only the link is wrong."""
    with hc.Recorder(tmp_path / "other") as rec:
        rec(step=0, w=jnp.zeros(20), loss=0.0)
    (tmp_path / "other" / "columns" / "0.arrows").rename(
        tmp_path / "other" / "columns" / "1.arrows"
    )
    (tmp_path / "other" / ".lock").write_text("ten years of work")
    before = {p: p.read_bytes() for p in tmp_path.rglob("other/**/*") if p.is_file()}
    path = run / place
    if path.exists():
        path.rename(tmp_path / "aside")
    path.symlink_to(tmp_path / "other" / place)
    with pytest.raises(hc.errors.HostcallError, match="is a link, or no plain file"):
        hc.Recorder(run)
    if place != ".lock":
        table = place.startswith("columns")
        with pytest.raises(
            hc.errors.HostcallError, match="is a link, or no plain file"
        ):
            hc.tools.read(run).table() if table else hc.tools.read(run).array("w")
    assert {p: p.read_bytes() for p in before} == before
    path.unlink()


@pytest.mark.parametrize("place", [".lock", "columns/1.arrows", "arrays/w/1.arrows"])
def test_a_pipe_is_not_waited_for(run, place):
    (run / place).unlink(missing_ok=True)
    os.mkfifo(run / place)
    with pytest.raises(hc.errors.HostcallError, match="is a link, or no plain file"):
        hc.Recorder(run)


def test_nothing_is_written_through_a_link_that_comes_later(tmp_path):
    """It lies where the recorder will make a file."""
    secret = tmp_path / "thesis"
    secret.write_text("ten years of work")
    with contextlib.suppress(FileExistsError), hc.Recorder(tmp_path / "run") as rec:
        path = tmp_path / "run" / "arrays" / "w" / "0.arrows"
        path.parent.mkdir(parents=True)
        path.symlink_to(secret)
        rec(step=0, w=jnp.zeros(20))
        rec(step=0, loss=0.0)
    assert secret.read_text() == "ten years of work"


def test_a_run_whose_folder_is_a_link(tmp_path):
    """The user has named it."""
    (tmp_path / "big disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "big disk")
    with hc.Recorder(tmp_path / "run") as rec:
        rec(w=jnp.zeros(20), loss=1.0)
    assert hc.tools.read(tmp_path / "run").table().num_rows == 1
    assert len(hc.tools.read(tmp_path / "run").array("w")[0]) == 1
