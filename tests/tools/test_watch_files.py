"""Which values `hc.watch` brings, and the files that they are saved in."""

from __future__ import annotations

import collections
import dataclasses
import io
import os
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from watched import fired

import hostcall as hc
from hostcall.errors import SpecError, WatchError

KEY = jax.random.key(0)


def test_leaves_of_every_kind():
    values = {
        "half": jnp.full(3, jnp.nan, jnp.bfloat16),
        "complex": jnp.ones(2, complex),
        "int4": jnp.arange(4, dtype=jnp.int4),
        "bool": jnp.array([True, False]),
        "number": 2.5,
        "empty": jnp.zeros((0, 3)),
    }
    also = {"key": KEY, "text": "hello", "none": None}
    f = jax.jit(lambda v: hc.watch(v, also=also, where=v["number"] > 0))
    error = fired(f, values)
    for name, leaf in values.items():
        assert error.values[name].dtype == jnp.asarray(leaf).dtype, name
        assert error.values[name].shape == jnp.shape(leaf)
    assert error.values["int4"].tolist() == [0, 1, 2, 3]
    assert error.also["text"] == "hello"
    assert error.also["none"] is None
    assert (jax.random.key_data(error.also["key"]) == jax.random.key_data(KEY)).all()


# --- Files ------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Config:
    rate: float
    name: str = dataclasses.field(metadata={"static": True})


def test_a_file_has_all_of_it(tmp_path):
    values = {
        "pair": Pair(jnp.float32(np.nan), [1, "two"]),
        "half": (jnp.ones(3, jnp.bfloat16), None),
        7: Config(jnp.float32(0.5), "adam"),
        "int4": jnp.arange(4, dtype=jnp.int4),
        "empty": jnp.zeros((0, 2)),
    }
    f = jax.jit(lambda v: hc.watch({"v": 1.0, **v["v"]}, also=(KEY, "text")))
    del values[7]  # a dict of mixed keys can't be sorted, so JAX refuses it
    values["config"] = Config(jnp.float32(0.5), "adam")
    tree = {k: v for k, v in values.items() if k != "pair"}
    tree["pair"] = Pair(values["pair"].left, [jnp.int32(1)])
    error = fired(f, {"v": tree})
    path = tmp_path / "failure.zip"
    error.save(path)
    error.save(path)  # replaces it
    assert [p.name for p in tmp_path.iterdir()] == ["failure.zip"]
    again = hc.tools.load_failure(path)
    assert str(again) == str(error)
    assert isinstance(again, WatchError)
    assert (again.step, again.row, again.name) == (error.step, error.row, error.name)
    assert again.place == error.place
    assert again.device == str(error.device)
    assert set(again.values) == set(error.values)
    assert again.values["pair"]["right"][0] == 1
    assert again.values["config"] == {"rate": np.float32(0.5)}
    half = again.values["half"]
    assert type(half) is tuple
    assert half[0].dtype == jnp.bfloat16
    assert half[1] is None
    assert (half[0] == 1).all()
    assert again.values["int4"].dtype == jnp.int4
    assert again.values["int4"].tolist() == [0, 1, 2, 3]
    assert again.values["empty"].shape == (0, 2)
    key, text = again.also
    assert text == "text"
    assert key.dtype == KEY.dtype
    assert (jax.random.key_data(key) == jax.random.key_data(KEY)).all()
    assert np.isnan(again.values["pair"]["left"])
    with pytest.raises(WatchError):
        raise again


def test_what_a_file_can_not_have(tmp_path):
    error = fired(jax.jit(lambda x: hc.watch(x, also={"a": [print]})), np.nan)
    with pytest.raises(SpecError, match=r"also\['a'\]\[0\] can't be saved: it is of"):
        error.save(tmp_path / "file")
    error.also = np.array([object()])
    with pytest.raises(SpecError, match="also can't be saved: it is an array of"):
        error.save(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    with pytest.raises(SpecError, match=r"can't be read .* named 'failure\.json'"):
        hc.tools.load_failure(tmp_path / "other.npz")


def test_a_file_with_pickles_is_refused(tmp_path):
    path = tmp_path / "failure.zip"
    fired(jax.jit(hc.watch), np.nan).save(path)
    with zipfile.ZipFile(path) as file:
        text = file.read("failure.json")
    made = []

    class Evil:
        def __reduce__(self):
            return made.append, (1,)

    data = io.BytesIO()
    np.save(data, np.array([Evil()]), allow_pickle=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("failure.json", text)
        file.writestr("0.npy", data.getvalue())
    with pytest.raises(SpecError, match="can't be read .* allow_pickle=False"):
        hc.tools.load_failure(path)
    assert made == []


def test_a_file_of_a_newer_hostcall(tmp_path):
    path = tmp_path / "failure.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("failure.json", '{"version": 999}')
    with pytest.raises(SpecError, match=r"newer hostcall \(version 999 .* Update"):
        hc.tools.load_failure(path)


@pytest.mark.parametrize("damage", ["cut", "other", "JSON", "number"])
def test_a_damaged_file(tmp_path, damage):
    path = tmp_path / "failure.zip"
    fired(jax.jit(hc.watch), np.nan).save(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "other":
        path.write_bytes(b"no archive")
    else:
        with zipfile.ZipFile(path, "w") as file:
            text = (
                '{"version": 1, "values": {"array": 9}}' if damage == "number" else "{"
            )
            file.writestr("failure.json", text)
    with pytest.raises(SpecError, match="can't be read .* It was damaged") as caught:
        hc.tools.load_failure(path)
    assert caught.value.code == "hc-load"
    with pytest.raises(FileNotFoundError):
        hc.tools.load_failure(tmp_path / "none.zip")


def test_a_file_of_compressed_parts_is_not_unpacked(tmp_path):
    """A megabyte of a file could fill a gigabyte of memory."""
    WatchError("bad", values=np.zeros(1 << 20)).save(tmp_path / "failure.zip")
    small = tmp_path / "small.zip"
    with (
        zipfile.ZipFile(tmp_path / "failure.zip") as file,
        zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as again,
    ):
        for name in file.namelist():
            again.writestr(name, file.read(name))
    with pytest.raises(SpecError, match="it has compressed parts") as caught:
        hc.tools.load_failure(small)
    assert caught.value.code == "hc-load"


def test_an_array_that_a_file_says_is_pickled(tmp_path):
    path = tmp_path / "failure.zip"
    WatchError("bad", values=np.zeros(2)).save(path)
    with zipfile.ZipFile(path) as file:
        text = file.read("failure.json")
    to = io.BytesIO()
    np.save(to, np.array([print], object), allow_pickle=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("failure.json", text)
        file.writestr("0.npy", to.getvalue())
    with pytest.raises(SpecError, match="can't be read"):
        hc.tools.load_failure(path)


def test_a_file_is_saved_beside_a_link_to_another(tmp_path):
    """`save` writes to a name that others can guess, and renames it."""
    secret = tmp_path / "thesis"
    secret.write_text("ten years of work")
    path = tmp_path / "failure.zip"
    path.with_name(f"failure.zip.{os.getpid()}.part").symlink_to(secret)
    WatchError("bad", values=np.zeros(2)).save(path)
    assert secret.read_text() == "ten years of work"
    assert hc.tools.load_failure(path).values.tolist() == [0, 0]
