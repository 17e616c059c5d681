"""scripts/xla_cuda.sh: only packages that can't be had are a reason to skip tests."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "xla_cuda.sh"
PACKAGES = ("jax_cuda12_pjrt", "jax_cuda12_plugin")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("pip") is None,
    reason="needs Linux and pip",
)


def wheel(folder, name):
    """Writes a package with one module."""
    info = f"{name}-{jax.__version__}.dist-info"
    path = folder / f"{name}-{jax.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {jax.__version__}\n"
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path):
    """Where pip looks for packages, and nowhere else."""
    made = tmp_path / "an index"
    made.mkdir()
    return made


@pytest.fixture
def run(tmp_path, index):
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": index.as_uri()}
    return lambda: subprocess.run(
        [SCRIPT, sys.executable], cwd=tmp_path, env=env, capture_output=True, text=True
    )


def test_packages_that_are_there_are_installed_once(run, index, tmp_path):
    wheels = [wheel(index, name) for name in PACKAGES]
    done = run()
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "build").iterdir()
    assert done.stdout == f"{folder}\n"
    assert {f"{name}.py" for name in PACKAGES} <= {p.name for p in folder.iterdir()}
    for path in wheels:
        path.unlink()
    assert run().stdout == done.stdout


def test_packages_that_can_not_be_had(run, index, tmp_path):
    wheel(index, PACKAGES[0])
    done = run()
    assert (done.returncode, done.stdout) == (3, "")
    assert "No matching distribution found for jax-cuda12-plugin" in done.stderr
    assert not list((tmp_path / "build").iterdir())


def test_any_other_failure_is_one(run, index, tmp_path):
    for name in PACKAGES:
        wheel(index, name).write_bytes(b"half of a fi")
    done = run()
    assert (done.returncode, done.stdout) == (1, "")
    assert "jax_cuda12_pjrt" in done.stderr
    assert not list((tmp_path / "build").iterdir())
