"""Runs one fuzzer, with atheris: python -m fuzz NAME [--seconds 600]

    make fuzz SECONDS=600       all of them, the native ones too
    python -m fuzz NAME FILE    the input of a finding again

The corpus is in build/fuzz/NAME, and begins with the fuzzer's seeds. Inputs that fail
are written to build/fuzz/NAME.found.*.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import logging
import os
import pkgutil
import sys
from pathlib import Path

NAMES = ("prints", "specs", "buffers", "exports", "records", "stacks")
# Seconds for one input, and MB of memory for the process.
LONGEST, MOST_MEMORY = 60, 8000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("again", nargs="?", type=Path)
    parser.add_argument("--seconds", type=int, default=600)
    given = parser.parse_args()
    logging.getLogger("hostcall").setLevel(logging.CRITICAL + 1)
    if given.again is not None:
        importlib.import_module(f"fuzz.{given.name}").one(given.again.read_bytes())
        return
    import atheris
    import jax  # not measured, nor what it imports

    del jax
    with atheris.instrument_imports(include=["hostcall"]):
        import hostcall

        for module in pkgutil.walk_packages(hostcall.__path__, "hostcall."):
            if module.name.split(".")[1] not in ("bridge", "_cli", "__main__"):
                importlib.import_module(module.name)
    target = importlib.import_module(f"fuzz.{given.name}")
    folder = Path("build/fuzz") / given.name
    folder.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (folder / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    options = {
        "max_total_time": given.seconds,
        "timeout": LONGEST,
        "rss_limit_mb": MOST_MEMORY,
        "artifact_prefix": f"{folder}.found.",
        "print_final_stats": 1,
        "max_len": 1 << 16,
    }
    told = [f"-{key}={value}" for key, value in options.items()]
    atheris.Setup([sys.argv[0], str(folder), *told], target.one)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
