"""python -m hostcall: what works here, a real job, and what a call costs."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall import _run
from hostcall._demo import heading, line

# --- The report -----------------------------------------------------------------------


def engine_answers(device: jax.Device) -> str:
    """Tries the engine on a device: a callback in a compiled loop, which counts."""
    seen = []
    result = jax.ShapeDtypeStruct((), np.float32)

    def count(x: np.ndarray) -> np.ndarray:
        seen.append(float(x))
        return x + 1

    def body(_: Any, x: Any) -> Any:
        return hc.call(count, result, x, order="ordered")

    program = jax.jit(lambda x: jax.lax.fori_loop(0, 3, body, x))
    x = jax.device_put(np.float32(0), device)
    total = float(program(x))
    if total != 3.0 or seen != [0.0, 1.0, 2.0]:
        return f"BROKEN: calls gave {total}, and got {seen}"
    if "hostcall_call" not in program.lower(x).as_text():
        return "not used: calls work, through JAX's own callback"
    return "works (tried: ordered calls in a compiled loop)"


def engine_on_gpu(devices: Sequence[jax.Device]) -> str:
    """Tries it on the first GPU of these, if there is one."""
    gpus = [device for device in devices if device.platform == "gpu"]
    if not gpus:
        return "not tried: JAX sees no GPU here"
    try:
        return engine_answers(gpus[0])
    except Exception as error:  # what a driver raises: the jobs run on the CPU anyway
        return f"BROKEN: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def report() -> tuple[str, str]:
    """Prints versions, devices and the engine's state: on CPUs, on GPUs."""
    heading("hostcall")
    for name, value in {
        "hostcall": hc.__version__,
        "jax, jaxlib": f"{jax.__version__}, {importlib.metadata.version('jaxlib')}",
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "devices": ", ".join(map(str, jax.devices())),
    }.items():
        line(name, value)
    cpu = engine_answers(jax.local_devices(backend="cpu")[0])
    line("engine on cpu", cpu)
    gpu = engine_on_gpu(jax.devices())
    line("engine on gpu", gpu)
    line("calls under way", len(hc.status()))
    return cpu, gpu


def missing_packages() -> list[str]:
    return [n for n in ("scipy", "statsmodels") if importlib.util.find_spec(n) is None]


# --- The cost -------------------------------------------------------------------------


def costs(quick: bool) -> None:
    """Microseconds a call, beside jax.pure_callback, in turn and in this process."""
    heading("Microseconds a call, in compiled programs")
    n, rounds = (100, 3) if quick else (1000, 7)
    print(f"  {'':<36} {'hostcall':>9} {'JAX':>9} {'ratio':>8}")
    for name, (call, x, times) in programs(n).items():
        ours, theirs = call(hc.call), call(jax.pure_callback)
        mine, yours = [], []
        for _ in range(1 + rounds):  # the first compiles, and settles the allocator
            mine.append(timed(ours, x, times))
            yours.append(timed(theirs, x, times))
        a, b = statistics.median(mine[1:]), statistics.median(yours[1:])
        print(f"  {name:<36} {a:>9.2f} {b:>9.1f} {b / a:>7.1f}x")


def logging(quick: bool) -> None:
    """Microseconds of a step that logs its loss, in one compiled loop of many."""
    heading("Microseconds a step, in a compiled training loop that logs each")
    steps, rounds = (500, 2) if quick else (5000, 5)
    key = jax.random.key(0)
    inputs = jax.random.normal(key, (32, 8), jnp.float32)
    target = jnp.sin(inputs.sum(1))
    count = 0

    def note(value: Any) -> None:
        nonlocal count
        count += 1

    def trained(log: Callable[..., Any] | None) -> Program:
        def loss(w: Any) -> Any:
            return ((jnp.tanh(inputs @ w) - target) ** 2).mean()

        def step(w: Any, _: Any) -> Any:
            value, slope = jax.value_and_grad(loss)(w)
            if log is not None:
                log(note, value)
            return w - 0.1 * slope, None

        program: Program = jax.jit(lambda w: jax.lax.scan(step, w, length=steps)[0])
        return program

    weights = jnp.zeros(8, jnp.float32)
    ways = {
        "no logging": trained(None),
        "hc.tap": trained(hc.tap),
        "jax.debug.callback": trained(jax.debug.callback),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, program in ways.items():
            seconds[name].append(timed(program, weights, steps))
            jax.effects_barrier()
            hc.barrier()
    for name, figures in seconds.items():
        line(name, f"{statistics.median(figures[1:]):.2f}")
    line("losses that arrived", f"{count}")
    assert count > 0
    assert count % steps == 0


Program = Callable[[Any], Any]


def programs(n: int) -> dict[str, tuple[Program, Any, int]]:
    """Name -> (program made from hc.call or jax.pure_callback, argument, its calls)."""

    def same(x: Any) -> Any:
        return x

    def spec(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def loop(call: Any) -> Any:
        def body(_: Any, c: Any) -> Any:
            return call(same, jax.tree.map(spec, c), c)

        return jax.jit(lambda x: jax.lax.fori_loop(0, n, body, x))

    def rows(call: Any) -> Any:
        method = "sequential"
        return jax.jit(jax.vmap(lambda x: call(same, spec(x), x, vmap_method=method)))

    def once(call: Any) -> Any:
        return jax.jit(lambda x: call(same, spec(x), x))

    one, mib = jnp.float32(1), jnp.ones(1 << 18, jnp.float32)
    return {
        "scalar, in a loop": (loop, one, n),
        "scalar, a row of a vmap": (rows, jnp.ones(n, jnp.float32), n),
        "a tree of 20 scalars, in a loop": (loop, (one,) * 20, n),
        "scalar, a dispatched program each": (once, one, 1),
        "1 MiB, a dispatched program each": (once, mib, 1),
    }


def timed(f: Callable[[Any], Any], x: Any, calls: int) -> float:
    """Microseconds a call; programs that are soon done run until 20 ms have passed."""
    runs, begin = 0, time.perf_counter()
    while True:
        jax.block_until_ready(f(x))
        runs += 1
        seconds = time.perf_counter() - begin
        if seconds >= 0.02:
            return seconds / (runs * calls) * 1e6


# --- The program ----------------------------------------------------------------------


def main() -> int:
    if sys.argv[1:2] == ["run"]:
        _run.main(sys.argv[2:])
        return 0
    options = parsed()
    # SciPy computes in double precision, and so does what it is compared with.
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
            f"\nThe main job needs {' and '.join(missing)}. To install:"
            '\n  pip install "hostcall[demo]"',
            file=sys.stderr,
        )
        return 1
    from hostcall import _demo_jobs

    _demo_jobs.run(options.quick, options.plot)
    costs(options.quick)
    logging(options.quick)
    print("\nAll results agree with plain SciPy.")
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hostcall",
        description="Says what works here, fits models to the record of lynx and hares"
        " and to that of sunspots in JAX programs that call SciPy, checks the results"
        " against plain SciPy, and times calls. `python -m hostcall run script.py` runs"
        " a program with its callbacks on the engine.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer starts and steps, coarser times"
    )
    parser.add_argument("--report", action="store_true", help="the report only")
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("lynx_hare.png"),
        metavar="PATH",
        help="where the plot of lynx and hares goes, a PNG (default: %(default)s here)",
    )
    options = parser.parse_args()
    folder = options.plot.parent
    possible = folder.is_dir() and os.access(folder, os.W_OK)
    if not options.report and (options.plot.is_dir() or not possible):
        parser.error(
            f"the plot can't be written to {options.plot}: that is a folder, or is in"
            " none that may be written to. Say which file: --plot lynx_hare.png"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
