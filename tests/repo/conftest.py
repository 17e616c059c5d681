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
    root = tmp_path_factory.mktemp("site")
    for name in ("docs", "examples"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignore)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, root)
    project = (ROOT / "pyproject.toml").read_text()
    if "[project.urls]" not in project:
        project += ADDRESSES
    (root / "pyproject.toml").write_text(project)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", "html"],
        cwd=root,
        env=os.environ | {"DOCS_RUN": "off"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return root / "html"
