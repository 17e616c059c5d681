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
        _, _, state = self.__reduce__()
        saved = {"text": self.args[0]}
        saved |= {name: state[name] for name in _SAVED}
        saved["place"] = self.place and dataclasses.astuple(self.place)
        unfinished = f"{os.fspath(path)}.{os.getpid()}.part"
        # Of a process that was killed, or a link that somebody has put there.
        with contextlib.suppress(FileNotFoundError):
            os.remove(unfinished)
        try:
            # "x" follows no link, which "w" would.
            with zipfile.ZipFile(unfinished, "x", allowZip64=True) as file:
                encoded: Json = {
                    name: _encoded(file, value, name) for name, value in saved.items()
                }
                encoded["version"] = _VERSION
                file.writestr("failure.json", json.dumps(encoded, indent=1))
            os.replace(unfinished, path)  # so that no half of a file gets this name
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(unfinished)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> WatchError:
        """Reads what `save` wrote; `hc.tools.load_failure` says what comes back."""
        try:
            with zipfile.ZipFile(path) as file:
                # A small compressed part may be read as one that fills the memory.
                if any(part.compress_type for part in file.infolist()):
                    raise ValueError("it has compressed parts; `save` writes none")
                encoded = json.loads(file.read("failure.json"))
                version = encoded.pop("version")
                encoded.pop("history", None)  # which earlier versions kept
                if version > _VERSION:
                    raise SpecError(
                        f"hostcall: {os.fspath(path)!r} was written by a newer hostcall"
                        f" (version {version} of the file; this one reads up to"
                        f" {_VERSION}). Update hostcall",
                        code="hc-load",
                    )
                state = {name: _read(file, part) for name, part in encoded.items()}
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


def _encoded(file: zipfile.ZipFile, tree: object, label: str) -> Json:
    """The JSON of a tree; its arrays go to the file. Errors call it by its label."""
    if type(tree) in _PLAIN:
        return {"leaf": tree}
    if isinstance(tree, (np.ndarray, np.generic, jax.Array)):
        return _encoded_array(file, tree, label)
    # One level: each child is a leaf of it.
    is_child = lambda node: node is not tree  # noqa: E731
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_child)
    # JAX calls what is no pytree a leaf of itself.
    if len(children) == 1 and children[0][1] is tree:
        raise SpecError(
            f"hostcall: {label} can't be saved: it is of type {type(tree).__name__}."
            " Arrays, numbers, texts and None are saved, and pytrees of them; leave"
            " it out of the watched tree and of also=",
            code="hc-pickle",
        )
    keystr = jax.tree_util.keystr
    encoded = [_encoded(file, child, label + keystr(path)) for path, child in children]
    if type(tree) in (list, tuple):
        return {type(tree).__name__: encoded}
    keys = [keystr(path, simple=True) for path, _ in children]
    if type(tree) is dict and all(type(key) in (str, int) for key in tree):
        keys = [path[0].key for path, _ in children]
    return {"dict": list(zip(keys, encoded, strict=True))}


def _encoded_array(file: zipfile.ZipFile, value: Array, label: str) -> Json:
    """The JSON of an array, which goes to a part of the file in NumPy's own format."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        block = jax.random.key_data(value)
        implementation = str(jax.random.key_impl(value))
        return {"key": _encoded_array(file, block, label), "impl": implementation}
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise SpecError(
            f"hostcall: {label} can't be saved: it is an array of Python objects",
            code="hc-pickle",
        )
    # NumPy's file format does not know the dtypes of ml_dtypes (bfloat16).
    if array.dtype.isbuiltin != 1:
        array = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    name = f"{len(file.namelist())}.npy"
    with file.open(name, "w", force_zip64=True) as stream:
        np.lib.format.write_array(cast("BinaryIO", stream), array, allow_pickle=False)
    return {"array": name, "dtype": str(value.dtype), "shape": value.shape}


def _read(file: zipfile.ZipFile, encoded: Json) -> Any:
    """The tree of a JSON; the inverse of `_encoded`."""
    if "leaf" in encoded:
        return encoded["leaf"]
    if "array" in encoded:
        with file.open(encoded["array"]) as stream:
            # Never pickled objects, which would run code of whoever wrote the file.
            array = np.lib.format.read_array(
                cast("BinaryIO", stream), allow_pickle=False
            )
        dtype = jax.numpy.dtype(encoded["dtype"])
        return array.view(dtype).reshape(encoded["shape"])
    if "key" in encoded:
        block = _read(file, encoded["key"])
        return jax.random.wrap_key_data(block, impl=encoded["impl"])
    if "dict" in encoded:
        return {key: _read(file, child) for key, child in encoded["dict"]}
    ((kind, children),) = encoded.items()
    container = {"list": list, "tuple": tuple}[kind]
    return container(_read(file, child) for child in children)
