"""What is kept between builds, and for how long: what programs showed, as long as they,
JAX, and what they used of hostcall are the same.

Outputs of pages are in build/notebooks (jupyter-cache), for all of hostcall's code:
their kernels don't say what they used. Outputs of the gallery are beside its pages,
with a list of the files of hostcall that the program had loaded in the end. (The list
may be too long, since one process runs several programs.) Sphinx itself keeps pages
whose text has not changed: a setting tells it that hostcall has.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

GALLERY = Path(__file__).parents[1] / "gallery"


def _package() -> Path:
    (folder,) = importlib.util.find_spec("hostcall").submodule_search_locations
    return Path(folder)


def _digest(files: Iterable[str]) -> str:
    """Of versions, and of files of hostcall; those that have gone count as empty."""
    digest = hashlib.sha256()
    for package in ("jax", "jaxlib", "numpy"):
        digest.update(importlib.metadata.version(package).encode())
    for name in files:
        path = _package() / name
        digest.update(f"\0{name}\0".encode())
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()[:16]


def engine() -> str:
    """A digest of all code that programs run on."""
    found = (p for p in _package().rglob("*") if p.suffix in (".py", ".so"))
    return _digest(sorted(str(path.relative_to(_package())) for path in found))


def note_used(program: str) -> None:
    """Writes down what this process has loaded of hostcall, after a program ran."""
    modules = {k: m for k, m in sys.modules.items() if k.split(".")[0] == "hostcall"}
    files = (getattr(module, "__file__", None) for module in modules.values())
    used = sorted({str(Path(f).relative_to(_package())) for f in files if f})
    _list_of(GALLERY / program).write_text("\n".join([_digest(used), *used]))


def forget_gallery() -> None:
    """Makes the gallery's programs run again whose code has changed."""
    for mark in GALLERY.glob("*.py.md5"):
        used = _list_of(mark.with_suffix(""))
        before, *files = used.read_text().splitlines() if used.exists() else [""]
        if before != _digest(files):
            mark.unlink()


def _list_of(program: Path) -> Path:
    return program.with_suffix(".used")
