"""What the package says of itself is written once, or agrees wherever it is written."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hostcall as hc
from hostcall import _jax

ROOT = Path(__file__).parents[2]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = BUILD["project"]
RELEASE = BUILD["tool"]["cibuildwheel"]
CHANGES = (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def wheels():
    """scripts/wheels.py"""
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "scripts/wheels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_written_in_pyproject_and_for_citations():
    version = PROJECT["version"]
    assert hc.__version__ == version
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.M) == [version]
    literal = re.compile(rf"version\w*\s*=\s*[\"']{re.escape(version)}[\"']", re.I)
    for folder in ("src", "native", "docs", "scripts"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".pyi", ".cc", ".h", ".md", ".sh"):
                assert not literal.search(path.read_text()), path


def test_wheels_are_built_for_the_pythons_of_the_classifiers(wheels):
    said = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert said == [v for v in wheels.OLDEST if not v.endswith("t")]
    assert PROJECT["requires-python"] == f">={said[0]}"
    free = any("Free Threading" in line for line in PROJECT["classifiers"])
    assert free == any(v.endswith("t") for v in wheels.OLDEST)
    names = [f"cp{v.replace('.', '')}-*" for v in wheels.OLDEST]
    assert RELEASE["build"] == names


def test_the_oldest_jax_is_the_same_everywhere(wheels):
    for package in ("jax", "jaxlib"):
        (needs,) = (n for n in PROJECT["dependencies"] if re.match(rf"{package}\W", n))
        # Without an upper bound: what a newer one lacks is refused where it is used.
        assert needs == f"{package}>={wheels.OLDEST['3.11']}"
    assert wheels.OLDEST["3.11"] == _jax.OLDEST
    headers = [Requirement(n) for n in BUILD["build-system"]["requires"]]
    for version, oldest in wheels.OLDEST.items():
        here = {"python_version": version.rstrip("t")}
        (jaxlib,) = (
            n for n in headers if n.name == "jaxlib" and n.marker.evaluate(here)
        )
        assert str(jaxlib.specifier) == f"=={oldest}"
        name = f"cp{version.replace('.', '')}-manylinux_x86_64"
        tests = [
            RELEASE,
            *(o for o in RELEASE["overrides"] if fnmatch(name, o["select"])),
        ]
        assert (
            f"pip install jax=={oldest} jaxlib=={oldest}" in tests[-1]["test-command"]
        )


def test_the_changelog_keeps_its_form():
    """https://keepachangelog.com: versions, newest first; kinds of changes in each."""
    titles = re.findall(r"^## (.*)$", CHANGES, re.M)
    assert titles[0] == "[Unreleased]"
    form = r"\[(\d+\.\d+\.\d+)\](?: - (\d{4}-\d{2}-\d{2}))?"
    releases = [re.fullmatch(form, title) for title in titles[1:]]
    assert None not in releases
    numbers = [tuple(map(int, release[1].split("."))) for release in releases]
    assert numbers == sorted(set(numbers), reverse=True)
    assert releases[0][1] == PROJECT["version"]
    assert all(release[2] for release in releases[1:]), "only the newest may be undated"
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for section in re.split(r"^## ", CHANGES, flags=re.M)[1:]:
        found = re.findall(r"^### (.*)$", section, re.M)
        assert set(found) <= kinds, section.splitlines()[0]
        assert found, section.splitlines()[0]
        assert len(found) == len(set(found)), section.splitlines()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux wheels")
def test_wheels_get_the_policy_of_jaxlibs(wheels):
    jaxlib = importlib.metadata.distribution("jaxlib")
    assert f"-{wheels.TAG}" in (jaxlib.read_text("WHEEL") or "")


def test_a_copy_without_metadata_has_no_version(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delitem(vars(hc), "__version__", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert hc.__version__ == "0+unknown"
    monkeypatch.delitem(vars(hc), "__version__")
