"""Runs a program with every JAX callback on hostcall's engine (hc.patch_jax)."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

# Runs in a new interpreter, since this one has imported JAX already: what the program
# sets before it imports JAX (JAX_PLATFORMS, XLA_FLAGS) must count.
_START = """
import _hostcall_autopatch, runpy, sys
module, home, program = sys.argv[1:4]
sys.argv = sys.argv[3:]
sys.path[0] = home
if module:
    runpy.run_module(program, run_name="__main__", alter_sys=True)
else:
    runpy.run_path(program, run_name="__main__")
"""


SHORT = "run a program with its callbacks on the engine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arrays",
        choices=["jax", "numpy"],
        default="jax",
        help="the arrays that callbacks get (default: jax)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="program is a module's name"
    )
    parser.add_argument("program", help="a script, or a module with -m")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, help="the program's own arguments"
    )


def main(options: argparse.Namespace) -> NoReturn:
    """Runs a script or a module as Python itself would, with JAX patched."""
    home = os.getcwd()
    if not options.module:
        if not os.path.exists(options.program):
            options.refuse(f"there is no file {options.program}")
        home = os.path.dirname(os.path.abspath(options.program))
    sys.stdout.flush()
    start = [sys.executable, "-c", _START, "-m" if options.module else "", home]
    environment = {**os.environ, "HOSTCALL_PATCH": options.arrays}
    os.execve(sys.executable, [*start, options.program, *options.rest], environment)
