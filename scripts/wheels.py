"""Builds the sdist and wheels, and tries the wheels where there is no compiler.

    wheels.py sdist    the sdist, in dist/
    wheels.py build    the sdist, and from it a wheel for each Python that is found
    wheels.py try      installs the wheel of dist/ for each Python where PATH has no
                       compiler, and runs `python -m hostcall` under the oldest jax
                       and the newest

CONTRIBUTING.md says which glibc the wheels need, and why. Each wheel is built in a
folder of its own, since two builds in one checkout would share build/.

PYTHONS="python3.12 /path/to/python3.14t" names the Pythons. Without it, PATH and pyenv
are searched for each of OLDEST, and a version that is not there is an error.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
# With the oldest jaxlib that has wheels for each (a test compares with pyproject.toml).
OLDEST = dict.fromkeys(("3.11", "3.12", "3.13", "3.14", "3.14t"), "0.9.0")
OLDEST |= dict.fromkeys(("3.15", "3.15t"), "0.11.1")
TAG = f"manylinux_2_27_{platform.machine()}"

VERSION = "import sys; print('%d.%d' % sys.version_info[:2] + sys.abiflags)"
# The best of three processes: the first reads the files from the disk.
_TIMES = """import time, jax; start = time.perf_counter(); import hostcall
print(time.perf_counter() - start)"""


def run(*command: object, env: dict[str, str] | None = None) -> str:
    """What the command prints. If it fails, this program ends with all it said."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def pythons() -> dict[str, str]:
    """Versions, such as "3.14t", and a command for each."""
    if named := os.environ.get("PYTHONS", "").split():
        given = {run(command, "-c", VERSION).strip(): command for command in named}
        if unknown := given.keys() - OLDEST:
            sys.exit(f"No wheels are made for Python {', '.join(sorted(unknown))}.")
        return given
    found = {}
    for version in OLDEST:
        pyenv = Path.home().glob(f".pyenv/versions/{version}*/bin/python")
        for command in (f"python{version}", *map(str, sorted(pyenv))):
            if shutil.which(command) is None:
                continue
            # A shim of pyenv fails if its version is not selected.
            ask = subprocess.run(
                [command, "-c", VERSION], capture_output=True, text=True
            )
            if ask.stdout.strip() == version:
                found[version] = command
                break
    if missing := [version for version in OLDEST if version not in found]:
        sys.exit(
            f"No Python {', '.join(missing)} on PATH or under pyenv. Install it, or"
            ' name the Pythons to build for: make wheels PYTHONS="python3.12 ..."'
        )
    return found


def environment(folder: Path, python: str, *packages: object) -> Path:
    """Makes an environment with these packages, and returns its Python.

    Nothing is compiled on the way: its PATH has no compiler, and pip takes wheels only.
    """
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    command = (inside, "-m", "pip", "install", "--quiet", "--only-binary=:all:")
    run(*command, *packages, env=bare(folder))
    return inside


def bare(folder: Path) -> dict[str, str]:
    """The variables of a process that finds only this environment's programs."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["PATH"] = str(folder / "bin")
    assert not any(
        shutil.which(c, path=env["PATH"]) for c in ("cc", "c++", "gcc", "g++")
    )
    return env


def wheel_in_dist(version: str) -> Path:
    """The wheel for this Python, whose tags are like cp314-cp314t for "3.14t"."""
    found = list(DIST.glob(f"hostcall-*-cp{version.replace('.', '')}-{TAG}.whl"))
    if len(found) != 1:
        sys.exit(f"dist/ has {len(found)} wheels for Python {version}: run make wheels")
    return found[0]


def sdist(tools: Path) -> Path:
    for old in DIST.glob("hostcall-*.tar.gz"):
        old.unlink()
    run(tools, "-m", "build", "--sdist", "--no-isolation", "-x", "--outdir", DIST)
    (made,) = DIST.glob("hostcall-*.tar.gz")
    print(f"{made.name}: {made.stat().st_size / 1024:,.0f} KiB", flush=True)
    return made


def wheel(tools: Path, work: Path, version: str, python: str, source: Path) -> None:
    """Builds a wheel from the sdist with its declared requirements, and tags it."""
    environment(work / version, python, "pip")
    pip = (work / version / "bin" / "python", "-m", "pip", "wheel", "--no-deps")
    old = "--config-settings=cmake.define.HOSTCALL_OLD_GLIBC=ON"
    run(*pip, "--quiet", old, "--wheel-dir", work / "built" / version, source)
    (built,) = (work / "built" / version).glob("hostcall-*.whl")
    for old in DIST.glob(f"hostcall-*-cp{version.replace('.', '')}-{TAG}.whl"):
        old.unlink()
    repair = (tools, "-m", "auditwheel", "repair", "--plat", TAG, "--only-plat")
    run(*repair, "--wheel-dir", DIST, built, env=bare(tools.parents[1]))  # has patchelf
    tagged = wheel_in_dist(version)
    print(f"{tagged.name}: {tagged.stat().st_size / 1024:,.0f} KiB", flush=True)


def attempt(work: Path, version: str, python: str, made: Path) -> None:
    """Runs an installed wheel under the oldest jax and the newest."""
    demo = f"hostcall[demo] @ {made.resolve().as_uri()}"
    oldest = OLDEST[version]
    for jax in (("jax", "jaxlib"), (f"jax=={oldest}", f"jaxlib=={oldest}")):
        inside = environment(work / "try", python, demo, *jax)
        env = bare(work / "try")
        said = run(inside, "-m", "hostcall", env=env)
        run(inside, "-m", "hostcall", "costs", "--quick", env=env)
        run(inside, ROOT / "examples" / "demo", "--quick", env=env)
        (versions,) = (row for row in said.splitlines() if "jax, jaxlib" in row)
        best = min(float(run(inside, "-c", _TIMES, env=env)) for _ in range(3))
        said = f"{version}, {' '.join(versions.split())}: the demo passed;"
        print(f"{said} import hostcall after jax {1e3 * best:.0f} ms", flush=True)


def main(what: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if what in ("sdist", "build"):
            packages = ("build", "auditwheel", "patchelf", "scikit-build-core")
            tools = environment(work / "tools", sys.executable, *packages)
            source = sdist(tools)
        if what == "build":
            for version, python in pythons().items():
                wheel(tools, work, version, python, source)
        if what == "try":
            for version, python in pythons().items():
                attempt(work, version, python, wheel_in_dist(version))


if __name__ == "__main__":
    main(sys.argv[1])
