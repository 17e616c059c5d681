"""Rows, cases and targets, and how they are timed.

A row holds cases that do the same work in different ways. They run in one process, in
turn: case 1, case 2, ..., case 1, case 2, ..., so that a machine that is slower for a
second is slower for all of them. A case returns one figure per round. The table shows
the median of the rounds; a ratio is the median of the rounds' ratios, which drifts less
than the ratio of two medians.

Only ratios carry over to another machine, so most targets are ratios.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

Case = Callable[[], float]  # one round: its figure, in the unit of the row


@dataclass(frozen=True)
class Target:
    """What a row should show.

    Attributes:
        ours: the case that is judged.
        base: the case it is compared with; None if the figure itself is judged.
        bound: the bound on base/ours (`faster`), on ours/base, or on ours.
        faster: whether more is better.
    """

    ours: str
    base: str | None
    bound: float
    faster: bool = False

    def measure(self, rounds: dict[str, list[float]]) -> float:
        ours = rounds[self.ours]
        if self.base is None:
            return statistics.median(ours)
        pairs = zip(ours, rounds[self.base], strict=True)
        if self.faster:
            return statistics.median(base / mine for mine, base in pairs)
        return statistics.median(mine / base for mine, base in pairs)

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.faster else value <= self.bound


def times_faster(bound: float, ours: str = "hostcall", base: str = "JAX") -> Target:
    return Target(ours, base, bound, faster=True)


def at_most(bound: float, base: str | None, ours: str = "hostcall") -> Target:
    """`ours` takes at most `bound` times `base`; if that is None, `bound` units."""
    return Target(ours, base, bound)


@dataclass(frozen=True)
class Row:
    """One line of the table, or several if it has several targets.

    Attributes:
        name: what is done.
        target: the targets.
        cases: makes the cases, by name, when the row's turn comes. Its argument says
            whether the run is a quick one.
        unit: the unit of the figures.
        rounds: how often each case runs; 0 for the default.
    """

    name: str
    target: tuple[Target, ...]
    cases: Callable[[bool], dict[str, Case]]
    unit: str = "us"
    rounds: int = 0


@dataclass
class Result:
    """All rounds of a row's cases."""

    row: Row
    rounds: dict[str, list[float]] = field(default_factory=dict)

    def figure(self, case: str) -> float:
        return statistics.median(self.rounds[case])

    def measured(self) -> list[tuple[Target, float, bool]]:
        found = []
        for target in self.row.target:
            value = target.measure(self.rounds)
            found.append((target, value, target.holds(value)))
        return found


ROUNDS, QUICK_ROUNDS = 9, 3


def measure(row: Row, quick: bool) -> Result:
    """Runs all cases once to warm up, then in turn, round by round."""
    cases = row.cases(quick)
    for run in cases.values():
        run()
    result = Result(row, {name: [] for name in cases})
    gc.collect()
    rounds = row.rounds or ROUNDS
    for _ in range(min(QUICK_ROUNDS, rounds) if quick else rounds):
        for name, run in cases.items():
            result.rounds[name].append(run())
    return result


# --- Ways to measure a figure ---------------------------------------------------------


ROUND_SECONDS = 0.02  # a shorter round mostly measures cold caches


def run_time(f: Callable[..., Any], *args: Any, per: int = 1) -> Case:
    """Microseconds until the results of `f(*args)` are there, per unit of work.

    Args:
        f: a function, usually jitted. A round calls it until ROUND_SECONDS have passed,
            at least once.
        *args: its arguments.
        per: units of work in one call of `f`.
    """

    def run() -> float:
        calls, begin = 0, time.perf_counter()
        while True:
            jax.block_until_ready(f(*args))
            calls += 1
            seconds = time.perf_counter() - begin
            if seconds >= ROUND_SECONDS:
                return seconds / (calls * per) * 1e6

    return run


def dispatch_time(f: Callable[..., Any], *args: Any, repeat: int) -> Case:
    """Microseconds until `f(*args)` returns, whether or not its results are computed.

    It runs in bursts of 16, below the 32 computations that JAX's CPU client admits at a
    time. Waiting for the results of a burst does not count.
    """

    def run() -> float:
        seconds, calls = 0.0, 0
        while calls < repeat:
            begin = time.perf_counter()
            for _ in range(16):
                out = f(*args)
            seconds += time.perf_counter() - begin
            calls += 16
            jax.block_until_ready(out)
        return seconds / calls * 1e6

    return run


def resident_kib() -> int:
    """This process's resident memory, from /proc."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    raise RuntimeError("no VmRSS in /proc/self/status")
