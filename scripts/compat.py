"""Runs the core of the tests with one wheel against each jax of the supported range.

    compat.py              under this Python, with its wheel of dist/; prints a table
    compat.py VERSION...   the same with these versions of jaxlib alone

The versions of jaxlib are those that pip finds for this Python and that pyproject.toml
allows. All get the same wheel, since one binary has to serve all of XLA's interfaces
(CONTRIBUTING.md: a new jax).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from wheels import ROOT, VERSION, bare, environment, run, wheel_in_dist

CORE = (
    "tests/call/test_call_jit.py",
    "tests/call/test_vmap.py",
    "tests/call/test_order.py",
    "tests/call/test_errors.py",
    "tests/tap/test_tap.py",
    "tests/tap/test_tap_transforms.py",
    "tests/host_function/test_host_function.py",
    "tests/export/test_export.py",
    "tests/feed/test_feed.py",
    "tests/object/test_object.py",
    "tests/compat/test_drop_in.py",
    "tests/compat/test_buffer_callback.py",
)
TESTING = ("pytest", "hypothesis", "flatbuffers", "scipy", "packaging")


def versions(tools: Path) -> list[str]:
    """The versions of jaxlib in the range, oldest first."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = (n for n in needs["dependencies"] if n.startswith("jaxlib"))
    index = run(tools, "-m", "pip", "index", "versions", "jaxlib")
    (line,) = re.findall(r"Available versions: (.*)", index)
    choose = (
        "import sys; from packaging.requirements import Requirement;"
        " from packaging.version import parse;"
        " allows = Requirement(sys.argv[1]).specifier.contains;"
        " print(*sorted(filter(allows, sys.argv[2].split(', ')), key=parse))"
    )
    return run(tools, "-c", choose, wanted, line).split()


def tested(folder: Path, version: str, wheel: Path) -> tuple[str, str, bool]:
    """The jax and the summary of pytest, and whether all passed."""
    # A jaxlib 0.12.0.1 serves jax 0.12.0 and 0.12.0.1: take the newest that there is.
    jax = f"jax<={version},>={'.'.join(version.split('.')[:3])}"
    inside = environment(
        folder, sys.executable, wheel, jax, f"jaxlib=={version}", *TESTING
    )
    show = "import importlib.metadata as m; print(m.version('jax'))"
    found = run(inside, "-c", show).strip()
    done = subprocess.run(
        [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE],
        cwd=ROOT,
        env=bare(folder),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    return found, done.stdout.strip().splitlines()[-1], done.returncode == 0


def main() -> None:
    wheel = wheel_in_dist(run(sys.executable, "-c", VERSION).strip())
    print(wheel.name, end="\n\n")
    print("| jaxlib | jax | core tests | seconds |\n|---|---|---|---|", flush=True)
    good = True
    with tempfile.TemporaryDirectory() as folder:
        tools = environment(Path(folder) / "tools", sys.executable, "packaging")
        for version in sys.argv[1:] or versions(tools):
            start = time.monotonic()
            jax, summary, passed = tested(Path(folder) / "env", version, wheel)
            good &= passed
            seconds = time.monotonic() - start
            print(f"| {version} | {jax} | {summary} | {seconds:.0f} |", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
