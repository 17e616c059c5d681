"""python -m hostcall: what works here, a real job, and what a call costs."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall import _run

# --- The report -----------------------------------------------------------------------


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def line(name: str, value: object) -> None:
    print(f"  {name:<34} {value}")


def engine_answers() -> str:
    """Tries the engine: a callback in a compiled loop, which counts."""
    seen = []
    result = jax.ShapeDtypeStruct((), np.float32)

    def count(x: np.ndarray) -> np.ndarray:
        seen.append(float(x))
        return x + 1

    def body(_: Any, x: Any) -> Any:
        return hc.call(count, result, x, order="ordered")

    total = jax.jit(lambda x: jax.lax.fori_loop(0, 3, body, x))(0.0)
    works = float(total) == 3.0 and seen == [0.0, 1.0, 2.0]
    return "works (tried: ordered calls in a compiled loop)" if works else "BROKEN"


def report() -> bool:
    """Prints versions, devices and the engine's state: whether it works."""
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
    answer = engine_answers()
    line("engine on cpu", answer)
    line("engine on gpu", "not in this version")
    line("calls under way", len(hc.status()))
    return answer.startswith("works")


# --- The job --------------------------------------------------------------------------


def missing_packages() -> list[str]:
    return [n for n in ("scipy", "statsmodels") if importlib.util.find_spec(n) is None]


def job() -> None:
    """The sunspot record, through SciPy routines that JAX lacks; see `_demo`."""
    from hostcall import _demo

    record = _demo.load()
    years, numbers = record
    t = years - years.mean()
    heading(f"Sunspots, {years[0]:.0f} to {years[-1]:.0f} ({len(years)} years)")
    bessel(_demo)
    modulation(_demo, t, numbers)
    forecasts(_demo, numbers)
    ours = ("jv", "next_year")
    calls = sum(s.calls for name, s in hc.stats().items() if name.startswith(ours))
    print(f"\n  {calls} calls of SciPy, every one from a compiled program.")


def bessel(demo: Any) -> None:
    """First derivatives beside SciPy's, and second ones in Bessel's equation."""
    import scipy.special

    z, orders = np.linspace(0, 20, 201), np.arange(-3, 4)

    def table(f: Any) -> np.ndarray:
        over_z = jax.vmap(f, (None, 0))
        return np.asarray(jax.jit(jax.vmap(over_z, (0, None)))(orders, z))

    slope = jax.grad(demo.jv, 1)
    y, dy, ddy = table(demo.jv), table(slope), table(jax.grad(slope, 1))
    n = orders[:, None]
    values = demo.close(y, scipy.special.jv(n, z), 1e-14)
    slopes = demo.close(dy, scipy.special.jvp(n, z), 1e-13)
    equation = demo.close(z**2 * ddy + z * dy + (z**2 - n**2) * y, 0, 1e-11)
    print("\n  Bessel functions jv, under jit(vmap(vmap)), grad and grad(grad)")
    line("against scipy.special.jv, jvp", f"max difference {max(values, slopes):.1e}")
    line("Bessel's equation, from all three", f"max residual {equation:.1e}")


def modulation(demo: Any, t: np.ndarray, numbers: np.ndarray) -> None:
    import scipy.special

    first, steps = demo.starts(16), 100
    begin = time.perf_counter()
    parameters, costs = jax.block_until_ready(demo.fit(first, t, numbers, steps))
    seconds = time.perf_counter() - begin
    best = np.asarray(parameters)[int(np.argmin(costs))]
    plain = demo.fit_with_scipy(first, t, numbers)
    curve = jax.jit(lambda p: demo.curve(p, t, jnp, demo.jv))(best)
    difference = demo.close(curve, demo.curve(best, t, np, scipy.special.jv), 1e-9)
    demo.close(np.min(costs) / plain.cost, 1.0, 1e-6)
    period, depth, long_period = np.abs(best[3:6])
    worse = demo.close(np.abs(best[:6]), np.abs(plain.x[:6]), 0.1)

    print(
        f"\n  Slow modulation of the cycle: jit(vmap(scan)), 16 starts x {steps} steps"
    )
    line("cycle", f"{period:.2f} years")
    line("its phase swings once in", f"{long_period:.0f} years, by {depth:.2f} rad")
    error = np.sqrt(2 * np.min(costs) / len(t))
    line("root mean square error", f"{error:.1f} sunspots (mean {numbers.mean():.1f})")
    line("time, with compilation", f"{seconds:.2f} s")
    line("against plain SciPy, the curve", f"max difference {difference:.1e}")
    line("  least_squares, parameters", f"max difference {worse:.1e}")


def forecasts(demo: Any, numbers: np.ndarray) -> None:
    field = demo.magnetic_field(numbers)
    drive = np.linspace(0, 0.4, 9)
    begin = time.perf_counter()
    ahead = np.asarray(demo.forecast(drive, field))
    seconds = time.perf_counter() - begin
    difference = demo.close(ahead, demo.forecast_without_jax(drive, field), 1e-9)

    def error(guess: np.ndarray) -> np.ndarray:
        """Root mean square, without the 20 years that it takes to settle."""
        miss = (guess - numbers[1:])[..., 20:]
        return np.sqrt(np.mean(miss**2, axis=-1))  # type: ignore[no-any-return]

    errors = error(ahead**2)
    best = int(np.argmin(errors))
    assert errors[best] < error(numbers[:-1])
    steps = len(field) - 1
    print(f"\n  Forecast a year ahead by solve_ivp: jit(vmap(scan)), 9 x {steps} years")
    line(
        "root mean square error, best drive", f"{errors[best]:.1f} ({drive[best]:.2f})"
    )
    line("  a harmonic oscillator's", f"{errors[0]:.1f}")
    line("  next year like this one", f"{error(numbers[:-1]):.1f}")
    line("time, with compilation", f"{seconds:.2f} s")
    line("against plain SciPy", f"max difference {difference:.1e}")


# --- The cost -------------------------------------------------------------------------


def costs(quick: bool) -> None:
    """Microseconds a call, beside jax.pure_callback, in turn and in this process."""
    heading("Microseconds a call, in compiled programs")
    n, rounds = (100, 3) if quick else (1000, 7)
    print(f"  {'':<34} {'hostcall':>9} {'JAX':>9} {'ratio':>8}")
    for name, (call, x, times) in programs(n).items():
        ours, theirs = call(hc.call), call(jax.pure_callback)
        mine, yours = [], []
        for _ in range(1 + rounds):  # the first compiles, and settles the allocator
            mine.append(timed(ours, x, times))
            yours.append(timed(theirs, x, times))
        a, b = statistics.median(mine[1:]), statistics.median(yours[1:])
        print(f"  {name:<34} {a:>9.2f} {b:>9.1f} {b / a:>7.1f}x")


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
    parser = argparse.ArgumentParser(
        prog="python -m hostcall",
        description="Says what works here, analyses the sunspot record in JAX programs"
        " that call SciPy, checks the results against plain SciPy, and times calls."
        " `python -m hostcall run script.py` runs a program with its callbacks on the"
        " engine.",
    )
    parser.add_argument("--quick", action="store_true", help="time calls coarsely")
    parser.add_argument("--report", action="store_true", help="the report only")
    options = parser.parse_args()
    # SciPy computes in double precision, and so does what it is compared with.
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])
    if not report():
        return 1
    if options.report:
        return 0
    missing = missing_packages()
    if missing:
        print(
            f"\nThe main job needs {' and '.join(missing)}. To install:"
            '\n  pip install "hostcall[demo]"',
            file=sys.stderr,
        )
        return 1
    job()
    costs(options.quick)
    logging(options.quick)
    print("\nAll results agree with plain SciPy.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
