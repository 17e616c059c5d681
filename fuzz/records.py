"""Files that hostcall writes and reads: of recorders and hc.watch."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import jax.numpy as jnp
import pyarrow as pa

import hostcall as hc
from fuzz.draw import Draw, change
from hostcall.tools._recorder.store import RunFolder

ARRAY = "arrays/many/0.arrows"
FOLDER = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))


@functools.cache
def whole() -> dict[str, bytes]:
    """The files of a run and of a failure, by their paths."""
    made = FOLDER / "made"
    with hc.Recorder(made) as recorder:
        for step in range(3):
            recorder(step=step, loss=0.5, flag=jnp.array(True), few=jnp.ones((2, 2)))
            recorder(step=step, many=jnp.ones((3, 20)))
    state = {"w": jnp.ones(3), "n": (1, None, "x")}
    failure = hc.errors.WatchError("text", values=state, also=state, row=(1,))
    failure.save(FOLDER / "failure.zip")
    found = {
        str(p.relative_to(made)): p.read_bytes() for p in made.rglob("*") if p.is_file()
    }
    found["failure.zip"] = (FOLDER / "failure.zip").read_bytes()
    return found


def seeds() -> list[bytes]:
    edits = [bytes([n % 4, n, *range(n, n + 12)]) for n in range(24)]
    files = ["columns/0.arrows", "failure.zip"]
    return [*edits, *(bytes([4 + n]) + whole()[f] for n, f in enumerate(files))]


def one(data: bytes) -> None:
    draw = Draw(data)
    kind = draw.int(0, 5)
    files = dict(whole())
    if kind <= 1:  # what the schema says of an array
        files[ARRAY] = with_told(files[ARRAY], draw)
    elif kind == 2:  # an array's blocks, and where they belong
        files[ARRAY] = draw.rest()
    elif kind == 3:  # the JSON of a failure
        files["failure.zip"] = with_json(files["failure.zip"], draw)
    else:
        name = ["columns/0.arrows", "failure.zip"][kind - 4]
        files[name] = draw.rest()
    run = FOLDER / "run"
    shutil.rmtree(run, ignore_errors=True)
    try:
        if kind in (3, 5):
            write(files, "failure.zip")
            repr(hc.tools.load_failure(FOLDER / "run" / "failure.zip"))
        else:
            write(files, "")
            found = hc.tools.read(run)
            str(found.table().to_pylist())
            for name in found.arrays:
                found.array(name)
            RunFolder(run).close()
    except hc.errors.HostcallError:
        pass


def with_told(stream: bytes, draw: Draw) -> bytes:
    """The stream of an array, with changed JSON beside the columns."""
    reader = pa.ipc.open_stream(stream)
    told = json.loads(reader.schema.metadata[b"hostcall"])
    text = json.dumps(change(draw, told))
    out = io.BytesIO()
    for n, batch in enumerate(reader):
        batch = batch.replace_schema_metadata({"hostcall": text})
        out.write(b"" if n else batch.schema.serialize())
        out.write(batch.serialize())
    return out.getvalue()


def with_json(archive: bytes, draw: Draw) -> bytes:
    """The archive of a failure, with a changed failure.json."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            text = old.read(name)
            if name == "failure.json":
                text = json.dumps(change(draw, json.loads(text))).encode()
            new.writestr(name, text)
    return out.getvalue()


def write(files: dict[str, bytes], start: str) -> None:
    for name, data in files.items():
        if name.startswith(start):
            path = FOLDER / "run" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
