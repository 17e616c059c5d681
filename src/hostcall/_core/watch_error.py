"""`WatchError`, and the file that it is saved in.

The file is a zip archive: `failure.json` with the text, the place and the trees, and
an .npy file for each array. Nothing in it is pickled, so a file of somebody else can be
loaded without running code of theirs, and any tool can read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import zipfile
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

import jax
import numpy as np

from hostcall._core.errors import HostcallError, ReplacesReport, SpecError
from hostcall._core.gone import refuse
from hostcall._core.source import Place
from hostcall._jax.types import Device

_VERSION = 1
_SAVED = ("values", "also", "step", "row", "device", "place", "name")


# Attributes that the error had once, and what to write instead.
_GONE = {
    "history": "hc.Recorder beside the watch records what was before, and hc.tools.read"
    " reads it",
}


class WatchError(HostcallError, RuntimeError, ReplacesReport):
    """A value that `hc.watch` checks is bad. It ends the program, as itself.

    Attributes:
        values: the watched tree, with NumPy arrays; under vmap those of the row.
        also: the tree given as `also=`, likewise.
        step: how many executions of the watch came before in this run of the program.
        row: the index of the row along each batch axis, the outermost vmap first.
        device: the device that reached the watch; the name of one in a loaded error.
        place: the line of the watch: `file`, `line`, `function`.
        name: the name of the watch.
    """

    code = "hc-watch"

    def __init__(
        self,
        text: str,
        *,
        values: Any,
        also: Any = None,
        step: int = 0,
        row: tuple[int, ...] = (),
        device: Device | str | None = None,
        place: Place | None = None,
        name: str = "",
    ) -> None:
        super().__init__(text)
        self.values = values
        self.also = also
        self.step = step
        self.row = row
        self.device = device
        self.place = place
        self.name = name

    if not TYPE_CHECKING:  # a type checker would accept any name, as Any

        def __getattr__(self, name: str) -> Any:
            refuse("WatchError", _GONE, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and other processes get all that it has; a device as its name."""
        state = {**self.__dict__}
        if self.device is not None:
            state["device"] = str(self.device)
        return functools.partial(type(self), values=None), self.args, state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes arrays and text to a file, for `hc.tools.load_failure`.

        Args:
            path: the file, which is replaced if there is one.

        Raises:
            SpecError: a leaf is neither an array nor a number, a text or None. There
                is no file then.
        """
        state = self.__reduce__()[2]
        state = {"text": self.args[0], **{name: state[name] for name in _SAVED}}
        state["place"] = self.place and dataclasses.astuple(self.place)
        beside = f"{os.fspath(path)}.{os.getpid()}.part"
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)  # of a killed process, or a link that somebody put there
        try:
            # "x" follows no link, which "w" would.
            with zipfile.ZipFile(beside, "x", allowZip64=True) as file:
                told = {name: _told(file, x, name) for name, x in state.items()}
                text = json.dumps({**told, "version": _VERSION}, indent=1)
                file.writestr("failure.json", text)
            os.replace(beside, path)  # so that no half of a file gets this name
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(beside)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> WatchError:
        """Reads what `save` wrote; `hc.tools.load_failure` says what comes back."""
        try:
            with zipfile.ZipFile(path) as file:
                if any(one.compress_type for one in file.infolist()):
                    raise ValueError("it has compressed parts; `save` writes none")
                told = json.loads(file.read("failure.json"))
                version = told.pop("version")
                told.pop("history", None)  # which earlier versions kept
                if version > _VERSION:
                    raise SpecError(
                        f"hostcall: {os.fspath(path)!r} was written by a newer hostcall"
                        f" (version {version} of the file; this one reads up to"
                        f" {_VERSION}). Update hostcall",
                        code="hc-load",
                    )
                state = {name: _read(file, part) for name, part in told.items()}
            state["place"] = state["place"] and Place(*state["place"])
            return cls(state.pop("text"), **state)
        except (SpecError, FileNotFoundError, IsADirectoryError, PermissionError):
            raise  # other OSErrors come from wrong offsets in a damaged file
        except Exception as error:  # zipfile, json and NumPy raise many kinds
            raise SpecError(
                f"hostcall: {os.fspath(path)!r} can't be read ({type(error).__name__}:"
                f" {error}). It was damaged, or WatchError.save did not write it",
                code="hc-load",
            ) from error


# Where users import it from, and what tracebacks show.
WatchError.__module__ = "hostcall.errors"


# --- Trees as JSON --------------------------------------------------------------------
#
# A leaf is {"leaf": value}, {"array": its file, ...} or {"key": array, ...}; a node is
# {"list": [...]}, {"tuple": [...]}, or {"dict": [[key, child], ...]}, which also stands
# for nodes of other types.

Json: TypeAlias = dict[str, Any]
Array: TypeAlias = np.ndarray | np.generic | jax.Array

_PLAIN = (bool, int, float, str, type(None))


def _told(file: zipfile.ZipFile, x: object, at: str) -> Json:
    """The JSON of a tree; its arrays go to the file. `at` names it in errors."""
    if type(x) in _PLAIN:
        return {"leaf": x}
    if isinstance(x, (np.ndarray, np.generic, jax.Array)):
        return _told_array(file, x, at)
    paths = jax.tree_util.tree_flatten_with_path(x, lambda y: y is not x)[0]
    if len(paths) == 1 and paths[0][1] is x:
        raise SpecError(
            f"hostcall: {at} can't be saved: it is of type {type(x).__name__}."
            " Arrays, numbers, texts and None are saved, and pytrees of them; leave"
            " it out of the watched tree and of also=",
            code="hc-pickle",
        )
    keystr = jax.tree_util.keystr
    told = [_told(file, child, at + keystr(path)) for path, child in paths]
    if type(x) in (list, tuple):
        return {type(x).__name__: told}
    keys = [keystr(path, simple=True) for path, _ in paths]
    if type(x) is dict and all(type(key) in (str, int) for key in x):
        keys = [path[0].key for path, _ in paths]
    return {"dict": list(zip(keys, told, strict=True))}


def _told_array(file: zipfile.ZipFile, x: Array, at: str) -> Json:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        kind = str(jax.random.key_impl(x))
        return {"key": _told_array(file, jax.random.key_data(x), at), "impl": kind}
    array = np.asarray(x)
    if array.dtype.hasobject:
        raise SpecError(
            f"hostcall: {at} can't be saved: it is an array of Python objects",
            code="hc-pickle",
        )
    # NumPy's file format does not know the dtypes of ml_dtypes (bfloat16).
    if array.dtype.isbuiltin != 1:
        array = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    name = f"{len(file.namelist())}.npy"
    with file.open(name, "w", force_zip64=True) as to:
        np.lib.format.write_array(cast("BinaryIO", to), array, allow_pickle=False)
    return {"array": name, "dtype": str(x.dtype), "shape": x.shape}


def _read(file: zipfile.ZipFile, told: Json) -> Any:
    if "leaf" in told:
        return told["leaf"]
    if "array" in told:
        with file.open(told["array"]) as data:
            read_array = np.lib.format.read_array
            array = read_array(cast("BinaryIO", data), allow_pickle=False)
        return array.view(jax.numpy.dtype(told["dtype"])).reshape(told["shape"])
    if "key" in told:
        return jax.random.wrap_key_data(_read(file, told["key"]), impl=told["impl"])
    if "dict" in told:
        return {k: _read(file, child) for k, child in told["dict"]}
    ((kind, children),) = told.items()
    return {"list": list, "tuple": tuple}[kind](_read(file, x) for x in children)
