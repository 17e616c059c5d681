"""python -m hostcall: reports what works here; runs programs, times calls."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from hostcall._cli import costs, explain, report, run

_COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "run": run.main,
    "explain": explain.main,
    "costs": costs.main,
}


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in _COMMANDS:
        return _COMMANDS[sys.argv[1]](sys.argv[2:]) or 0
    argparse.ArgumentParser(
        prog="python -m hostcall",
        usage="python -m hostcall [-h]\n"
        "       python -m hostcall run [-h] [--arrays {jax,numpy}] [--nans]\n"
        "               [--progress] [--stats] [--values NAME] [-m] program ...\n"
        "       python -m hostcall explain [-h] [code]\n"
        "       python -m hostcall costs [-h] [--quick]",
        description="Reports what works on this machine. `run` runs a program with its"
        " callbacks on the engine; `explain` prints the page of an error's code, or all"
        " codes; `costs` times calls beside JAX's own. `python -m hostcall run -h`"
        " and so on tell more.",
    ).parse_args()
    return int("BROKEN" in "".join(report.report()))


if __name__ == "__main__":
    sys.exit(main())
