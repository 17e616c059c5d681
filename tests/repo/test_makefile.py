"""The commands of the Makefile: on an old pip, at a path with a space, without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Makefile").read_text().replace("\\\n", " ")
# A rule: its target's line, and the lines of its recipe, which begin with a tab.
RULES = re.findall(r"^([^\s#][^=\n]*:[^=\n]*)\n((?:\t[^\n]*\n)+)", TEXT, re.M)


def test_pip_gets_no_option_that_debian_12_lacks():
    """Its pip is 23.0.1, whose `pip install` has --config-settings, and no -C for it."""
    scripts = [*(ROOT / "scripts").rglob("*.sh"), *(ROOT / "scripts").rglob("*.py")]
    texts = [TEXT, *(path.read_text().replace("\\\n", " ") for path in scripts)]
    asked = [
        line for text in texts for line in text.splitlines() if "pip install" in line
    ]
    assert len(asked) > 10
    assert [line for line in asked if re.search(r"\s-C\b", line)] == []


def test_a_command_that_compiles_says_so_first():
    """pip is quiet for minutes: scripts/compiler.sh says what it does in them."""
    compiles = [
        recipe for _, recipe in RULES if re.search(r'install.* "?\.[\s"\[]', recipe)
    ]
    assert len(compiles) > 5
    for recipe in compiles:
        before = re.split(r'install[^\n]* "?\.[\s"\[]', recipe)[0]
        assert "scripts/compiler.sh" in before, recipe
    done = subprocess.run(
        [ROOT / "scripts" / "compiler.sh"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Compiling hostcall" in done.stdout
    assert "minutes" in done.stdout


def test_paths_with_spaces_are_quoted(tmp_path):
    """Those that begin with the folder of the checkout. The makefile of the tests of
    native/ takes CXX as words, so its path is relative.
    """
    for name in ("Makefile", "fuzz/native/Makefile"):
        text = (ROOT / name).read_text()
        for line in re.findall(r"^.*\$\((?:abspath |CURDIR|XLA\)).*$", text, re.M):
            found = re.findall(r"(\S?)\$\((?:abspath |CURDIR|XLA\))", line)
            assert set(found) == {'"'}, line
        for line in re.findall(r"^.*CXX=.*$", text, re.M):
            assert "abspath" not in line, line
    if shutil.which("make"):
        python = tmp_path / "a folder" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\necho "{python.parent}/include"\n')
        python.chmod(0o755)
        planned = subprocess.run(
            ["make", "-n", "-B", "-C", ROOT / "fuzz/native", "all", f"PYTHON={python}"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert f'-isystem "{python.parent}/include"' in planned.stdout, planned.stderr


# --- Mermaid, which npm brings for `make docs` -----------------------------------------

MERMAID = "build/static/mermaid/mermaid.esm.min.mjs"
# What npm does with `pack`: it writes the package's file, or says why it can't. Other
# messages and their levels are npm's own.
NPM = """#!/bin/sh
case "$*" in *--silent*|*-s*) quiet=1 ;; esac
if [ -e "{root}/network" ]; then
  cp "{root}/mermaid-11.2.3.tgz" .
else
  [ "$quiet" ] || echo "npm error code ENOTFOUND: no registry" >&2
  exit 1
fi
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with a space in its path, the Makefile, and an npm."""
    if not (shutil.which("make") and shutil.which("tar")):
        pytest.skip("make is not installed")
    root = tmp_path / "a copy of hostcall"
    tools = root / ".venv-docs" / "bin"
    tools.mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", root)
    (root / ".venv-docs" / ".installed").touch()
    (root / "src").mkdir()
    (root / "native").mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md"):
        (root / name).touch()
    (tools / "npm").write_text(NPM.format(root=root))
    (tools / "npm").chmod(0o755)
    chunks = tmp_path / "package" / "dist" / "chunks" / "mermaid.esm.min"
    chunks.mkdir(parents=True)
    (chunks / "chunk.mjs").write_text("part")
    (chunks.parents[1] / "mermaid.esm.min.mjs").write_text("whole")
    (chunks.parents[1] / "mermaid.js").write_text("not needed")
    packed = root / "mermaid-11.2.3.tgz"
    subprocess.run(["tar", "-czf", packed, "-C", tmp_path, "package"], check=True)
    os.utime(root / ".venv-docs" / ".installed")
    return root


def made(root):
    return subprocess.run(
        ["make", "--no-print-directory", MERMAID],
        cwd=root,
        env={"PATH": os.environ["PATH"], "LANG": "C"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_make_docs_says_why_npm_failed_each_time(checkout):
    """A second time, too: what a failure leaves is not taken for the whole."""
    for _ in range(2):
        failed = made(checkout)
        assert failed.returncode != 0
        assert "npm error code ENOTFOUND: no registry" in failed.stderr
    (checkout / "network").touch()
    done = made(checkout)
    assert done.returncode == 0, done.stderr
    assert (checkout / MERMAID).read_text() == "whole"


def test_mermaid_has_the_parts_that_it_loads_and_no_more(checkout):
    (checkout / "network").touch()
    older = checkout / "build" / "mermaid" / "mermaid-11.0.0.tgz"
    older.parent.mkdir(parents=True)
    older.write_text("a download that broke off")
    done = made(checkout)
    assert done.returncode == 0, done.stderr
    folder = (checkout / MERMAID).parent
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.*js")}
    assert found == {"mermaid.esm.min.mjs", "chunks/mermaid.esm.min/chunk.mjs"}
