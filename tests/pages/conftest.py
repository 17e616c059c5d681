"""The site, for the tests that look at its pages and ask its search."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = (
    *("sphinx", "myst_nb", "furo", "sphinx_copybutton", "sphinx_gallery"),
    "sphinxcontrib.mermaid",
)
ADDRESSES = """
[project.urls]
Documentation = "https://docs.example.org/"
Repository = "https://github.com/example/hostcall"
"""
# The theme draws the tree of all pages beside each page, which takes a third of the build
# and is the same everywhere. Trees are still read, and checked, where pages have them.
WITHOUT_TREES = """
def without_tree(app, page, template, context, doctree):
    context.pop("toctree", None)

def setup(app):
    app.connect("html-page-context", without_tree, priority=1)
"""
# Sphinx makes millions of objects that stay: Python looks at all of them again and again.
BUILD = """
import gc, sys
gc.set_threshold(100_000, 50, 100)
from sphinx.cmd.build import main
sys.exit(main(["-W", "--keep-going", "-q", "docs", "html"]))
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site, or the one in the folder HOSTCALL_SITE. Here its programs are not run:
    test_readme.py, test_codes.py and test_gallery.py run them, and so does `make docs`.

    If pyproject.toml has no addresses yet, it is built with some that stand for them.
    """
    if "HOSTCALL_SITE" in os.environ:
        return Path(os.environ["HOSTCALL_SITE"]).absolute()
    for package in NEEDED:
        pytest.importorskip(package)
    root = tmp_path_factory.mktemp("a path with spaces")
    for name in ("docs", "examples"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignore)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, root)
    project = (ROOT / "pyproject.toml").read_text()
    if "[project.urls]" not in project:
        project += ADDRESSES
    (root / "pyproject.toml").write_text(project)
    with (root / "docs" / "conf.py").open("a") as settings:
        settings.write(WITHOUT_TREES)
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=root,
        env=os.environ | {"DOCS_RUN": "off"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return root / "html"
