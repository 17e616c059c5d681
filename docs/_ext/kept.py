"""What is kept between builds, and for how long: what programs showed, as long as they,
hostcall and JAX are the same.

Outputs of pages are in build/notebooks (jupyter-cache), those of the gallery beside its
pages. Sphinx itself keeps pages whose text has not changed: a setting tells it that
hostcall has.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path


def engine() -> str:
    """A digest of the code that programs run on."""
    digest = hashlib.sha256()
    for package in ("jax", "jaxlib", "numpy"):
        digest.update(importlib.metadata.version(package).encode())
    found = importlib.util.find_spec("hostcall")
    (folder,) = found.submodule_search_locations
    for path in sorted(Path(folder).rglob("*")):
        if path.suffix in (".py", ".so"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def forget_gallery(gallery: Path, engine: str) -> None:
    """Makes its programs run again if they ran on other code."""
    mark = gallery / "engine.txt"
    if mark.exists() and mark.read_text() == engine:
        return
    for kept in gallery.glob("*.md5"):
        kept.unlink()
    gallery.mkdir(exist_ok=True)
    mark.write_text(engine)
