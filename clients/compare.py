"""Runs each of clients/programs.py as it is and under `hostcall.patch_jax()`.

    python clients/compare.py [part of a name ...]

Every run is a separate process. The results must be equal. The table has the time of a
run: of the compiled function if the program returns one, else of the whole program,
including what it compiles each time. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
ROUNDS, REPEATS = 3, 20


def run_one(name: str, patched: bool, path: str) -> None:
    """Runs one program in this process. Writes its results and its time to `path`."""
    import programs

    program, arrays = programs.PROGRAMS[name]
    if patched:
        import hostcall as hc

        hc.patch_jax(arrays=arrays)
    import jax
    import numpy as np

    def plain(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, (jax.Array, np.generic)) else leaf

    def timed(f: Any) -> Any:
        begin = time.perf_counter()
        result = f()
        if isinstance(result, programs.Compiled):
            begin = time.perf_counter()
            for _ in range(REPEATS):
                jax.block_until_ready(result.again())
            return result.results, (time.perf_counter() - begin) / REPEATS
        return result, time.perf_counter() - begin

    results, seconds = [], []
    for _ in range(ROUNDS + 1):
        result, took = timed(program)
        seconds.append(took)
        results.append(jax.tree.map(plain, result))
    engine = {}
    if patched:
        stats = hc.monitor.stats()
        engine = {"calls": sum(s.calls for s in stats.values())}
    with open(path, "wb") as file:
        pickle.dump((results, sorted(seconds[1:])[ROUNDS // 2], engine), file)


def run(name: str, patched: bool) -> Any:
    """Returns (results, seconds, engine), or the text of the error."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result")
        env = dict(
            os.environ,
            XLA_FLAGS="--xla_force_host_platform_device_count=2",
            SCIPY_ARRAY_API="1",
            JAX_PLATFORMS="cpu",
        )
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, str(int(patched)), path],
            capture_output=True,
            text=True,
            env=env,
            timeout=600,
        )
        if done.returncode or not os.path.exists(path):
            return done.stderr.strip()[-2000:] or f"exit status {done.returncode}"
        with open(path, "rb") as file:
            return pickle.load(file)


def equal(a: Any, b: Any) -> bool:
    import jax
    import numpy as np

    leaves_a, tree_a = jax.tree.flatten(a)
    leaves_b, tree_b = jax.tree.flatten(b)
    return tree_a == tree_b and all(
        np.array_equal(x, y, equal_nan=x.dtype.kind in "fc")
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray)
        else type(x) is type(y) and x == y
        for x, y in zip(leaves_a, leaves_b, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, patched, path = options.one
        run_one(name, patched == "1", path)
        return 0
    import programs

    names = [
        name
        for name in programs.PROGRAMS
        if not options.names or any(part in name for part in options.names)
    ]
    width = max(map(len, names))
    print(f"{'program':{width}}  {'JAX':>9}  {'hostcall':>9}  {'ratio':>6}  calls")
    failed = 0
    for name in names:
        before, after = run(name, False), run(name, True)
        broken_before, broken = isinstance(before, str), isinstance(after, str)
        if broken:
            failed += 1
            print(f"{name:{width}}  FAILED under patch_jax():\n{after}")
            continue
        results, seconds, engine = after
        if broken_before:
            said = [line for line in before.splitlines() if "Error: " in line]
            reason = said[-1].split("Error: ")[-1][:70] if said else "?"
            took = f"{'fails':>9}  {seconds * 1e3:>6.2f} ms  {'':>6}"
            print(f"{name:{width}}  {took}  {engine['calls']}   JAX: {reason}")
            continue
        wanted, seconds_before, _ = before
        same = equal(wanted, results)
        failed += not same
        print(
            f"{name:{width}}  {seconds_before * 1e3:>6.2f} ms  {seconds * 1e3:>6.2f} ms"
            f"  {seconds_before / seconds:>5.1f}x  {engine['calls']}"
            + ("" if same else f"  DIFFERS:\n  {wanted}\n  {results}")
        )
    versions = {
        package: importlib.metadata.version(package) for package in ("jax", "jaxlib")
    }
    print(f"\n{len(names) - failed} of {len(names)} the same; {json.dumps(versions)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
