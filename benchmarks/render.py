"""Writes results as a Markdown table and as JSON, with the machine they hold for."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, Target

COLUMNS = ("what", "case", "figure", "compared with", "figure", "ratio", "wanted", "")


def number(value: float) -> str:
    """Three digits without an exponent; whole numbers in full."""
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def _judged(target: Target, value: float, unit: str) -> tuple[str, str]:
    """The ratio as shown, and the one wanted."""
    if target.base is None:
        return "", f"<= {target.bound:g} {unit}"
    if target.faster:
        return f"{number(value)}x faster", f">= {target.bound:g}x faster"
    return f"{number(value)}x", f"<= {target.bound:g}x"


def lines(result: Result) -> list[tuple[str, ...]]:
    """The table's lines for one row: one per target, then cases without a target."""
    unit, made = result.row.unit, []
    name = result.row.name
    for target, value, holds in result.measured():
        ratio, wanted = _judged(target, value, unit)
        base = target.base
        made.append(
            (
                name,
                target.ours,
                f"{number(result.figure(target.ours))} {unit}",
                base or "",
                f"{number(result.figure(base))} {unit}" if base else "",
                ratio,
                wanted,
                "pass" if holds else "**FAIL**",
            )
        )
        name = ""
    judged = {c for t in result.row.target for c in (t.ours, t.base)}
    for case in result.rounds:
        if case not in judged:
            figure = f"{number(result.figure(case))} {unit}"
            made.append((name, case, figure, "", "", "", "", ""))
            name = ""
    return made


def table(results: Sequence[Result]) -> str:
    """A Markdown table, aligned so that it reads well as plain text too."""
    body = [line for result in results for line in lines(result)]
    widths = [max(len(line[i]) for line in (COLUMNS, *body)) for i in range(8)]

    def write(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) for c, w in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([write(COLUMNS), rule, *map(write, body)])


def summary(results: Sequence[Result]) -> str:
    marks = [holds for result in results for _, _, holds in result.measured()]
    return f"{sum(marks)} of {len(marks)} targets reached."


def machine() -> dict[str, str]:
    """The facts about this machine on which the figures depend."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as info:
            models = [line for line in info if line.startswith("model name")]
        model = models[0].split(":", 1)[1].strip() if models else model
    except OSError:
        pass
    found = {
        "CPU": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
    }
    for package in ("jax", "jaxlib", "numpy"):
        found[package] = importlib.metadata.version(package)
    return found


def seconds_of(page: Path) -> float:
    """How long the run took that wrote a page; 0 if it does not say."""
    text = page.read_text() if page.exists() else ""
    found = re.search(r"^\| seconds for all rows \| (\d+) \|$", text, re.M)
    return float(found[1]) if found else 0.0


def document(results: Sequence[Result], seconds: float) -> str:
    """The whole text of docs/benchmarks.md."""
    about = {**machine(), "seconds for all rows": f"{seconds:.0f}"}
    where = "\n".join(f"| {name} | {value} |" for name, value in about.items())
    return f"""# Benchmarks

Written by `make bench-packages bench VENV=.venv-bench` (`python -m benchmarks --write
docs/benchmarks.md`, beside the packages that its rows compare with); edits are lost.
[Where a microsecond goes](speed.md) has pictures, and explains them.

The cases of a row run in turn, in one process. Figures are medians of the rounds, and
ratios are medians of the rounds' ratios. **FAIL** marks a bound that was missed in the
run shown here. "JAX" is JAX's own callback doing the same
work: `jax.pure_callback` for calls, `jax.debug.callback` or `debug.print` for taps, and
`jax.experimental.io_callback` where a line says so. The bounds are the project's aims;
a line without a bound is there for comparison. Three bounds need a word: "resident
memory flat" means 0.1 KiB per call at most; "program size independent of the batch"
counts lines of the program's text; and 1 MiB lent is judged in a program of 32 calls,
since a run costs some 150 us for the fresh memory of its buffers, whatever it calls.
The rows of 1 MiB vary most from run to run.

A row "on the device" shows what a tap adds to a step of a compiled loop, including
XLA's entry into the handler; the row "kept back by where=False" shows little more than
that entry.

The rows "GPU, ..." appear on a machine that has one. [On NVIDIA GPUs](gpu.md) has
the figures of an H200.

{table(results)}

{summary(results)}

| measured on | |
|---|---|
{where}
"""


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    rows = []
    for result in results:
        targets = [
            {
                "ours": target.ours,
                "base": target.base,
                "value": value,
                "bound": target.bound,
                "more_is_better": target.faster,
                "pass": holds,
            }
            for target, value, holds in result.measured()
        ]
        rows.append(
            {
                "name": result.row.name,
                "unit": result.row.unit,
                "median": {case: result.figure(case) for case in result.rounds},
                "rounds": result.rounds,
                "targets": targets,
            }
        )
    return {"machine": machine(), "rows": rows}
