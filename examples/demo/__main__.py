"""Models of real data, fitted by JAX programs that call SciPy (`make demo`).

    python examples/demo

It fits the records of lynx and hares and of sunspots, and differentiates Bessel
functions. All results are checked against plain SciPy.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import jax


def main() -> int:
    options = parsed()
    needed = ("scipy", "statsmodels", "tqdm")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"\nThe demonstration needs {' and '.join(missing)}. Install with:"
            f"\n  pip install {' '.join(missing)}",
            file=sys.stderr,
        )
        return 1
    # SciPy computes in double precision, so the JAX programs must too.
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])
    import fits

    fits.run(options.quick, options.plot)
    print("\nAll results agree with plain SciPy.")
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python examples/demo",
        description="Fits models to the records of lynx and hares and of sunspots in"
        " JAX programs that call SciPy, and checks the results against plain SciPy.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer starts and steps")
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
    if options.plot.is_dir() or not possible:
        parser.error(
            f"the plot can't be written to {options.plot}: it is a folder, or is not in"
            " a folder that you can write to. Name a file: --plot lynx_hare.png"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
