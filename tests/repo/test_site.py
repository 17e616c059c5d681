"""The site builds without a warning, and shows every public name once.

Here its programs are not run: test_readme.py, test_codes.py and test_gallery.py run
them, and so does `make docs`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hostcall as hc

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = [
    *("bridge", "buffers", "debug", "derivatives", "errors"),
    *("monitor", "results", "testing", "tools", "typing"),
]
NEEDED = (
    *("sphinx", "myst_nb", "furo", "sphinx_copybutton", "sphinx_gallery"),
    "sphinxcontrib.mermaid",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in NEEDED:
        pytest.importorskip(package)
    root = tmp_path_factory.mktemp("site")
    for name in ("docs", "examples"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignore)
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, root)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", "html"],
        cwd=root,
        env=os.environ | {"DOCS_RUN": "off"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return root / "html"


def test_every_page_is_there(site):
    for page in DOCS.rglob("*.md"):
        built = (site / page.relative_to(DOCS)).with_suffix(".html")
        assert "<h1>" in built.read_text(), page


def test_the_front_page_has_readmes_program_and_table(site):
    front = (site / "index.html").read_text()
    assert "bessel_sum" in front
    assert "a scalar call in a compiled loop" in front
    assert "pictures/" not in front or "_images/" in front


def test_a_program_of_a_page_is_a_cell(site):
    """Its source stands in a cell of a notebook, which `make docs` runs."""
    assert 'class="cell docutils container"' in (site / "feeding.html").read_text()


def test_a_downloaded_notebook_runs(site, tmp_path):
    """One of them; its first cell says what to install."""
    nbclient, nbformat = (pytest.importorskip(p) for p in ("nbclient", "nbformat"))
    (path,) = (site / "_downloads").glob("*/plot_hudson_bay.ipynb")
    notebook = nbformat.read(path, 4)
    assert "pip install matplotlib scipy" in notebook.cells[0].source
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=where).execute()


def test_nothing_comes_from_another_host(site):
    """No script, style, font or picture, so that a page is whole without a network."""
    fetched = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\ssrc=["']?(?:https?:)?//[^>]*"""
        r"""|<link\b[^>]*(?:stylesheet|icon|preload)[^>]*href=["']?(?:https?:)?//[^>]*"""
        r"""|<link\b[^>]*href=["']?(?:https?:)?//[^>]*(?:stylesheet|icon|preload)[^>]*"""
        r"""|(?:import|from)\s*\(?["'](?:https?:)?//[^"']*"""
        r"""|(?:@import|url\()\s*["']?(?:https?:)?//[^)]*"""
    )
    for page in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert fetched.findall(page.read_text()) == [], page
    assert "mermaid.esm.min.mjs" in (site / "design" / "taps.html").read_text()


def test_every_public_name_stands_in_the_reference_once(site):
    shown = []
    for page in (site / "reference").glob("*.html"):
        ids = re.findall(
            r'<dt class="sig sig-object py" id="([^"]+)"', page.read_text()
        )
        shown += [name for name in ids if name.count(".") == 1 or _is_public(name)]
    names = [f"hostcall.{name}" for name in dir(hc) if _is_shown(hc, name)]
    for module in map(hc.__getattr__, MODULES):
        names += [
            f"{module.__name__}.{n}" for n in module.__all__ if _is_shown(module, n)
        ]
    elsewhere = {"hostcall.errors.HostcallError", "hostcall.buffers.ExecutionStage"}
    missing = set(names) - set(shown) - elsewhere
    assert missing == set()
    assert sorted(shown) == sorted(set(shown))


def _is_public(name):
    """Whether it is a name of a module, not of a class."""
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def _is_shown(module, name):
    return name[0] != "_" and not inspect.ismodule(getattr(module, name))


def test_names_on_pages_exist():
    """Files, and what begins with `hc.`, so that a page does not outlive a name."""
    for page in [*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for name in re.findall(r"`hc((?:\.[a-zA-Z]\w*)+)", text):
            here = hc
            for part in name[1:].split("."):
                assert hasattr(here, part), f"{page.name}: hc{name}"
                here = getattr(here, part)
        for name in re.findall(r"`([a-z_]\w*/[\w./]+\.(?:py|cc|h|md|sh|svg))`", text):
            starts = ROOT, ROOT / "src" / "hostcall", ROOT / "native"
            if any((start / name.split("/")[0]).exists() for start in starts):  # ours
                assert any((s / name).exists() for s in starts), (page.name, name)
