"""Sweeps: what a call costs over a range of bytes, leaves, rows, devices or threads.

They are measured as rows are (harness.py): at each point all programs run in turn, and
the figures are medians of the rounds. speed.json, beside the pictures, keeps them:

    {sweep: {"date", "seconds", "rounds", "machine", "points",
             "series": {name: {"median", "low", "high", "times"}}}}

with one figure for each point: microseconds (low and high are quartiles of the rounds),
and how many times as long as the sweep's base it took in the same round (the median).

    python -m benchmarks.sweeps NAME [quick]

measures one sweep and prints it, for a sweep that needs a process of its own.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import sweep_parts, sweep_sizes
from benchmarks.harness import QUICK_ROUNDS, Case, Result, Row, measure, run_time
from benchmarks.render import machine
from benchmarks.rows_call import same
from benchmarks.rows_tap import settle
from benchmarks.sweep_sizes import Host, Program, Programs

FILE = "speed.json"


@dataclass(frozen=True)
class Sweep:
    """One picture.

    Attributes:
        name: its key in speed.json.
        points: the values of its axis.
        programs: makes the programs of a point.
        base: the program that the others are compared with.
        times: how often a program repeats a slow step; cheap ones repeat more.
        devices: CPU devices that the measuring process needs; 0 for this process.
    """

    name: str
    points: tuple[Any, ...]
    programs: Callable[[Any, int, Host], Programs]
    base: str = "hostcall"
    times: int = 1000
    devices: int = 0


SWEEPS = (
    Sweep("cost", ("call", "tap", "row"), sweep_parts.cost),
    Sweep("parts", (1,), sweep_parts.parts, sweep_parts.BASE),
    Sweep("steps", (1,), sweep_parts.steps, sweep_parts.NOTHING),
    Sweep("bytes", tuple(4**i for i in range(1, 13)), sweep_sizes.size),
    Sweep("leaves", tuple(2**i for i in range(7)), sweep_sizes.leaves),
    Sweep(
        "rows",
        tuple(4**i for i in range(7)),
        sweep_sizes.rows,
        "hostcall, row by row",
    ),
    Sweep("devices", (1, 2, 4, 8), sweep_sizes.devices, devices=8),
    Sweep("threads", (1, 2, 4), sweep_sizes.threads),
)


def _case(program: Program) -> Case:
    timed = run_time(program.f, *program.args, per=program.per)

    def run() -> float:
        figure = timed()
        settle()  # taps that are still queued would disturb the next program
        return figure

    return run


def _at(sweep: Sweep, point: Any, quick: bool) -> Result:
    def cases(quick: bool) -> dict[str, Case]:
        times = max(64, sweep.times // 10) if quick else sweep.times
        made = sweep.programs(point, times, same)
        return {name: _case(program) for name, program in made.items()}

    return measure(Row(f"{sweep.name} {point}", (), cases), quick)


def _rounded(figures: Sequence[float]) -> list[float]:
    return [float(f"{figure:.4g}") for figure in figures]


def summed(points: Sequence[dict[str, list[float]]], base: str) -> dict[str, Any]:
    """The series of a sweep, from the rounds of each of its points."""

    def over(f: Callable[[list[float], list[float]], float], name: str) -> list[float]:
        return _rounded([f(rounds[name], rounds[base]) for rounds in points])

    def quartile(which: int) -> Callable[[list[float], list[float]], float]:
        return lambda mine, _: statistics.quantiles(mine, n=4, method="inclusive")[
            which
        ]

    def ratio(mine: list[float], base: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(mine, base, strict=True))

    return {
        name: {
            "median": over(lambda mine, _: statistics.median(mine), name),
            "low": over(quartile(0), name),
            "high": over(quartile(2), name),
            "times": over(ratio, name),
        }
        for name in points[0]
    }


def _here(sweep: Sweep, quick: bool) -> dict[str, Any]:
    begin = time.perf_counter()
    points = [_at(sweep, point, quick).rounds for point in sweep.points]
    (rounds, *_) = (len(figures) for figures in points[0].values())
    return {
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.perf_counter() - begin),
        "rounds": rounds,
        "machine": {**machine(), "hostcall": importlib.metadata.version("hostcall")},
        "points": list(sweep.points),
        "series": summed(points, sweep.base),
    }


def measured(sweep: Sweep, quick: bool) -> dict[str, Any]:
    """The figures of a sweep, from a child if it needs more devices."""
    if not sweep.devices:
        return _here(sweep, quick)
    flags = f"--xla_force_host_platform_device_count={sweep.devices}"
    done = subprocess.run(
        [sys.executable, "-m", __name__, sweep.name, *(["quick"] if quick else [])],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "XLA_FLAGS": flags},
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def load(folder: Path) -> dict[str, Any]:
    """speed.json of a folder; empty if it has none."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.exists() else {}


def seconds_of(folder: Path) -> float:
    """How long all sweeps took; 0 if one is missing or was measured quickly."""
    known = load(folder)
    whole = all(figures["rounds"] > QUICK_ROUNDS for figures in known.values())
    if not whole or len(known) < len(SWEEPS):
        return 0.0
    return float(sum(figures["seconds"] for figures in known.values()))


def save(folder: Path, name: str, figures: dict[str, Any]) -> None:
    """Puts one sweep into speed.json; those that were not measured again stay."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {**load(folder), name: figures}
    kept = {sweep.name: known[sweep.name] for sweep in SWEEPS if sweep.name in known}
    (folder / FILE).write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    (sweep,) = (s for s in SWEEPS if s.name == sys.argv[1])
    print(json.dumps(_here(sweep, "quick" in sys.argv[2:])))


if __name__ == "__main__":
    main()
