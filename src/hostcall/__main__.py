"""python -m hostcall: reports what works here, runs a real job, and times calls."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import jax

from hostcall._cli import explain, run
from hostcall._cli.costs import costs, logging
from hostcall._cli.report import missing_packages, report

# --- The program ----------------------------------------------------------------------


def main() -> int:
    if sys.argv[1:2] == ["run"]:
        run.main(sys.argv[2:])
        return 0
    if sys.argv[1:2] == ["explain"]:
        return explain.main(sys.argv[2:])
    options = parsed()
    # SciPy computes in double precision, so the JAX programs must too.
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])
    cpu, gpu = report()
    if options.report:
        return int("BROKEN" in cpu + gpu)
    if "BROKEN" in cpu:
        return 1
    missing = missing_packages()
    if missing:
        print(
            f"\nThe demonstration needs {' and '.join(missing)}. Install with:"
            f"\n  pip install {' '.join(missing)}",
            file=sys.stderr,
        )
        return 1
    from hostcall._cli import jobs

    jobs.run(options.quick, options.plot)
    costs(options.quick)
    logging(options.quick)
    print("\nAll results agree with plain SciPy.")
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hostcall",
        usage="python -m hostcall [-h] [--quick] [--report] [--plot PATH]\n"
        "       python -m hostcall run [-h] [--arrays {jax,numpy}] [-m] program ...\n"
        "       python -m hostcall explain [-h] [code]",
        description="Reports what works on this machine, fits models to the records of"
        " lynx and hares and of sunspots in JAX programs that call SciPy, checks the"
        " results against plain SciPy, and times calls. `run` runs a program with its"
        " callbacks on the engine; `explain` prints the page of an error's code, or all"
        " codes. `python -m hostcall run -h` and `explain -h` tell more.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer starts and steps, coarser times"
    )
    parser.add_argument("--report", action="store_true", help="print only the report")
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("lynx_hare.png"),
        metavar="PATH",
        help="the PNG file for the plot of lynx and hares (default: %(default)s)",
    )
    options = parser.parse_args()
    folder = options.plot.parent
    possible = folder.is_dir() and os.access(folder, os.W_OK)
    if not options.report and (options.plot.is_dir() or not possible):
        parser.error(
            f"the plot can't be written to {options.plot}: it is a folder, or is not in"
            " a folder that you can write to. Name a file: --plot lynx_hare.png"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
