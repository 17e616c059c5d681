"""Runs that somebody else made: nothing in them is executed, and no link is followed."""

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
    "zarr": lambda folder: [a[:] for a in hc.tools.read(folder).zarr("w")],
    "Recorder": lambda folder: hc.Recorder(folder).close(),
}
PICKLED = {
    "zarr_format": 2,
    "shape": [1],
    "chunks": [1],
    "compressor": None,
    "order": "C",
    "fill_value": "",
    "dtype": "|O",
    "filters": [{"id": "vlen-utf8"}, {"id": "pickle", "protocol": 5}],
}
NUMBERS = {**PICKLED, "filters": None, "dtype": "<i8", "fill_value": None}


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


def read_all(folder):
    """What each reader raised."""
    raised = {}
    for name, reader in READERS.items():
        if name == "zarr":
            pytest.importorskip("zarr", minversion="3")
        with pytest.raises(hc.errors.HostcallError) as caught:
            reader(folder)
        assert caught.value.code == "hc-record"
        raised[name] = str(caught.value)
    return raised


@pytest.mark.parametrize("where", ["a group of version 2", "consolidated metadata"])
@pytest.mark.parametrize("which", ["step", "have", "value"])
def test_arrays_of_zarr_2_hold_pickles(run, where, which, tmp_path):
    group = run / "arrays" / "w"
    old = where == "a group of version 2"
    for part in ("step", "have", "value"):
        told = PICKLED if part == which else NUMBERS
        if old:
            (group / part / ".zarray").write_text(json.dumps(told))
            (group / part / ".zattrs").write_text("{}")
        evil = pickle.dumps(np.array([Evil(tmp_path / "ran")], object))
        (group / part / "0").write_bytes(evil)
        (group / part / "zarr.json").unlink()
    (group / "have" / "zarr.json").touch()
    attributes = {"blocks": [[[0, 1]]]}
    if old:
        (group / "zarr.json").unlink()
        (group / ".zgroup").write_text('{"zarr_format": 2}')
        (group / ".zattrs").write_text(json.dumps(attributes))
    else:
        inside = {p: PICKLED if p == which else NUMBERS for p in ("step", "have")}
        inside["value"] = PICKLED if which == "value" else NUMBERS
        meta = {"kind": "inline", "must_understand": False, "metadata": inside}
        group_meta = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        group_meta["consolidated_metadata"] = meta
        (group / "zarr.json").write_text(json.dumps(group_meta))
    read_all(run)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"zarr_format": 2},
        {"codecs": [{"name": "numcodecs.pickle", "configuration": {}}]},
        {"codecs": [{"name": "vlen-bytes"}]},
        {"codecs": [{"name": "bytes"}, {"name": "no.such.codec"}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]},
        {"data_type": "object"},
        {"data_type": "string"},
        {"data_type": {"name": "numpy.datetime64", "configuration": {"unit": "s"}}},
        {"data_type": "O"},
        {"data_type": "float64"},  # with chunks of float32
        {"shape": [3.0, 20]},
        {"shape": [-1, 20]},
        {"shape": [3, 10**15]},
        {"shape": []},
        {"shape": True},
        {"fill_value": "0x41"},
        {"fill_value": {"a": 1}},
        {"storage_transformers": [{"name": "x"}]},
        {"chunk_key_encoding": {"name": "v2"}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 20]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1]}}},
        {"dimension_names": None},
        {"dimension_names": [{}, []]},
        {"node_type": "group"},
        {"attributes": {"a": 1}},
    ],
    ids=str,
)
def test_an_array_that_no_recorder_describes_so(run, change):
    path = run / "arrays" / "w" / "value" / "zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(hc.errors.HostcallError, match="the run in .* can't be read"):
        READERS["array"](run)


@pytest.mark.parametrize("length", [10**15, 10**10])
@pytest.mark.parametrize("parts", [("step",), ("step", "have", "value")], ids=str)
def test_a_length_that_is_not_there(run, length, parts):
    for part in parts:
        path = run / "arrays" / "w" / part / "zarr.json"
        told = json.loads(path.read_text())
        told["shape"][0] = length
        path.write_text(json.dumps(told))
    steps, values = hc.tools.read(run).array("w")
    assert steps.tolist() == [0, 1, 2]
    assert values[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("blocks", [[[[0, "x"]]], [[[-5, 20]]], 3, [[3]], {"a": 1}])
def test_blocks_that_are_no_corners(run, blocks):
    path = run / "arrays" / "w" / "zarr.json"
    told = json.loads(path.read_text()) | {"attributes": {"blocks": blocks}}
    path.write_text(json.dumps(told))
    with pytest.raises(hc.errors.HostcallError, match="the run in .* can't be read"):
        READERS["array"](run)


def test_what_zarr_reads_is_what_was_recorded(run):
    """The oracle for `array` and `zarr` is the package zarr alone, on a run of ours."""
    zarr = pytest.importorskip("zarr", minversion="3")
    group = zarr.open_group(run / "arrays" / "w", mode="r")
    for reader in ("array", "zarr"):
        steps, values = READERS[reader](run)
        np.testing.assert_array_equal(steps, group["step"][:])
        np.testing.assert_array_equal(values, group["value"][:])


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
    "arrays/w/value",
    "arrays/w/value/c",
    "arrays/w/value/c/0/0",
    "arrays/w/value/zarr.json",
    "arrays/w/zarr.json",
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


@pytest.mark.parametrize("place", [".lock", "columns/1.arrows", "arrays/w/value/c/1"])
def test_a_pipe_is_not_waited_for(run, place):
    (run / place).unlink(missing_ok=True)
    os.mkfifo(run / place)
    with pytest.raises(hc.errors.HostcallError, match="is a link, or no plain file"):
        hc.Recorder(run)


@pytest.mark.parametrize("what", ["lengths", "groups", "chunks"])
def test_a_new_file_replaces_a_link_of_its_name(what, tmp_path):
    """Links at the names of the files that a recorder writes before it renames them."""
    secret = tmp_path / "thesis"
    secret.write_text("ten years of work")
    with hc.Recorder(tmp_path / "run") as rec:
        rec(step=0, w=jnp.zeros(1 << 16))  # so large that a chunk has 4 entries
        rec.flush()
        place = {
            "lengths": "value/.zarr.json.new",
            "groups": ".zarr.json.new",
            "chunks": "value/c/1/.0.new",
        }[what]
        path = tmp_path / "run" / "arrays" / "w" / place
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(secret)
        for step in range(1, 9):
            rec(step=step, w=jnp.zeros(1 << 16))
        rec.flush()
        if what == "groups":
            rec._store._arrays["w"]._write_group()
    assert secret.read_text() == "ten years of work"
    assert hc.tools.read(tmp_path / "run").array("w")[0].tolist() == [*range(9)]


def test_a_run_whose_folder_is_a_link(tmp_path):
    """The user has named it."""
    (tmp_path / "big disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "big disk")
    with hc.Recorder(tmp_path / "run") as rec:
        rec(w=jnp.zeros(20), loss=1.0)
    assert hc.tools.read(tmp_path / "run").table().num_rows == 1
    assert len(hc.tools.read(tmp_path / "run").array("w")[0]) == 1
