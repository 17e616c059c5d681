"""A few seconds of the fuzzers, without atheris: the seeds, and seeds with changed bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKAGES = {"exports": "flatbuffers", "records": "pyarrow"}

# In a process of its own: what it reads may crash it.
SMOKE = """
import importlib, logging, random, sys, warnings
sys.path.insert(0, sys.argv[1])
logging.getLogger("hostcall").setLevel(logging.CRITICAL + 1)
warnings.simplefilter("ignore")
for name in sys.argv[2:]:
    print(name, flush=True)
    target = importlib.import_module("fuzz." + name)
    chosen = random.Random(7)
    seeds = target.seeds()
    runs = 0
    for data in [*seeds, *chosen.choices(seeds, k=20)]:
        changed = bytearray(data)
        for _ in range(3 if runs >= len(seeds) else 0):
            changed[chosen.randrange(len(changed))] = chosen.randrange(256)
        try:
            target.one(bytes(changed))
        except BaseException:
            print(bytes(changed).hex())
            raise
        runs += 1
    print("ran", runs == len(seeds) + 20)
"""


NAMES = ["prints", "specs", "buffers", "exports", "records", "stacks"]


def test_fuzzers_find_nothing_in_their_seeds(run_python):
    """One after the other in one process. The last that is named is where it ended."""
    missing = {n for n, package in PACKAGES.items() if find_spec(package) is None}
    names = [name for name in NAMES if name not in missing]
    done = run_python(SMOKE, ROOT, *names)
    wanted = "".join(f"{name}\nran True\n" for name in names)
    assert done.stdout.endswith(wanted), done.stdout + done.stderr


def test_the_list_of_fuzzers_is_whole():
    folder = os.path.join(ROOT, "fuzz")
    found = {name.removesuffix(".py") for name in os.listdir(folder)}
    sys.path.insert(0, ROOT)
    try:
        from fuzz.__main__ import NAMES
    finally:
        sys.path.remove(ROOT)
    assert {*NAMES, "draw", "stablehlo", "__init__", "__main__", "native"} == found - {
        "__pycache__"
    }


def test_the_native_fuzzers_are_of_these_headers():
    """They are built with clang, which may not be here; any compiler can read them."""
    compiler, native = os.environ.get("CXX", "c++"), Path(ROOT, "fuzz", "native")
    include = [f"-I{ROOT}/native", f"-isystem{jax.ffi.include_dir()}"]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *include]
    subprocess.run([compiler, *flags, *native.glob("*.cc")], check=True)
