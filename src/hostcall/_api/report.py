"""`hc.monitor.report`: what callbacks have cost, and what would make them cheaper."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TextIO, TypeAlias

from hostcall._api.status import CallStats, stats
from hostcall._engine.counters import Facts, costs

# How many of the costliest functions get a remedy.
_WORST = 5

# Below these, a remedy would save nothing that anybody notices.
_SECONDS = 1e-3
_CALLS = 10


class Finding(NamedTuple):
    """One of the costliest functions.

    Attributes:
        name: the key in `hc.monitor.stats()`: the tag, or the function and its line.
        seconds: the time in the function, waiting for the GIL, or waiting for space in
            the queue of taps.
        cause: where the time goes.
        remedy: what to write in the program, or "" if nothing is known.
    """

    name: str
    seconds: float
    cause: str
    remedy: str


def report(file: TextIO | None = None) -> list[Finding]:
    """Prints what callbacks have cost so far, and what would make the worst cheaper.

    The table has what `hc.monitor.stats()` counts, the costliest functions first, how
    long programs have waited for Python, and how long Python has waited in
    `hc.barrier()`. The remedies are chosen by rules from the counts and the options of
    the calls. They are advice: only you know whether a result may be delayed, or
    whether a function can take a batch.

    Args:
        file: where to print; None for `sys.stdout`.

    Returns:
        The five costliest functions with their remedies.

    Cost: the time to print. What it reads is counted anyway.
    """
    rows = [_Row(name, stat, costs.facts.get(name)) for name, stat in stats().items()]
    rows.sort(key=lambda row: -row.seconds)
    findings = [_finding(row) for row in rows[:_WORST] if row.seconds > 0]
    lines = [*_table(rows), *_waits(rows)]
    for number, finding in enumerate(findings, 1):
        lines.append(f"\n{number}. {finding.name}: {finding.seconds:.4f} s")
        lines.append(f"   {finding.cause}")
        if finding.remedy:
            lines.append(f"   {finding.remedy}")
    for line in lines:
        # A tag may have lone surrogates, which a stream of UTF-8 refuses.
        print(line.encode(errors="backslashreplace").decode(), file=file or sys.stdout)
    return findings


class _Row:
    """What was counted of one function.

    Attributes:
        name: its key in `hc.monitor.stats()`.
        stats: the counts.
        facts: the kinds and options of its calls.
        is_call: whether programs wait for it; else only taps call it.
        seconds: what it has cost in all.
        mean: seconds for each of its calls.
    """

    def __init__(self, name: str, stats: CallStats, facts: Facts | None) -> None:
        self.name = name
        self.stats = stats
        self.facts = facts or Facts()
        self.is_call = "call" in self.facts.kinds
        self.seconds = stats.python_seconds + stats.gil_seconds + stats.wait_seconds
        self.mean = self.seconds / max(stats.calls, 1)


def _table(rows: Sequence[_Row]) -> Iterator[str]:
    head = ("seconds", "in Python", "for GIL", "for queue", "us each", "times", "MB")
    yield "".join(f"{title:>11}" for title in head) + "  function"
    for row in rows:
        stats = row.stats
        megabytes = (stats.bytes_in + stats.bytes_out) / 1e6
        yield (
            f"{row.seconds:11.4f}{stats.python_seconds:11.4f}{stats.gil_seconds:11.4f}"
            f"{stats.wait_seconds:11.4f}{1e6 * row.mean:11.2f}{stats.calls:11}"
            f"{megabytes:11.2f}  {row.name}"
        )


def _waits(rows: Sequence[_Row]) -> Iterator[str]:
    """How long programs have waited for Python, and Python for programs."""
    # A tap makes its program wait for space in the queue alone.
    waited = sum(row.seconds if row.is_call else row.stats.wait_seconds for row in rows)
    yield f"\nprograms waited for Python: {waited:.4f} s"
    if count := costs.barriers:
        yield (
            "Python waited in hc.barrier for programs and taps:"
            f" {costs.barrier_seconds:.4f} s"
            f" ({'once' if count == 1 else f'{count} times'})"
        )


# --- Rules ---------------------------------------------------------------------------
#
# Each yields (cause, remedy) for what it finds. The first one counts: those that help
# most, whatever the function does, stand in front.


def _finding(row: _Row) -> Finding:
    """The first rule that fits."""
    cause = f"{1e6 * row.mean:.2f} us for each of its calls"
    remedy = ""
    if row.seconds >= _SECONDS and row.stats.calls >= _CALLS:
        of_kind = _of_calls if row.is_call else _of_taps
        rules_that_fit = itertools.chain(_of_both(row), of_kind(row))
        cause, remedy = next(rules_that_fit, (cause, remedy))
    return Finding(row.name, row.seconds, cause, remedy)


_Found: TypeAlias = Iterator[tuple[str, str]]


def _of_both(row: _Row) -> _Found:
    stats = row.stats
    if stats.wait_seconds > 0.5 * row.seconds:
        yield (
            f"devices waited {stats.wait_seconds:.4f} s for space in the full queue of"
            " taps",
            "The function is slower than the taps come: let fewer through (every=,"
            ' sample=), or drop some (when_full="drop_oldest"), or deliver many at once'
            " (batch=)",
        )
    could_be_a_tap = row.is_call and row.facts.nothing
    if stats.gil_seconds > 0.5 * row.seconds:
        remedy = (
            "Other Python threads hold it: let them sleep or release it while the"
            " program runs"
        )
        if could_be_a_tap:
            remedy += "; or use hc.tap, which does not wait for the GIL"
        yield f"the calls waited {stats.gil_seconds:.4f} s for the GIL", remedy
    if could_be_a_tap:
        yield (
            "the program waits for a function that returns nothing",
            "hc.tap hands over the values and does not wait for the function",
        )
    # Only in short calls: in others making the arrays takes a small part of the time.
    mean_in_python = stats.python_seconds / stats.calls
    if row.facts.arrays & {"jax", "free"} and mean_in_python < 1e-3:
        remedy = 'arrays="numpy" hands out NumPy arrays'
        if "jax" not in row.facts.arrays:  # "free": only drop-ins have it
            remedy += ": hc.call instead of the drop-in"
        yield "most of a short call is making jax.Arrays of its arguments", remedy


def _of_calls(row: _Row) -> _Found:
    stats = row.stats
    mean_in_python = stats.python_seconds / stats.calls
    size = (stats.bytes_in + stats.bytes_out) / stats.calls
    batch = row.facts.rows if "sequential" in row.facts.methods else 1
    # Short rows cost their entry into Python, slow ones are worth threads.
    if batch >= 8 and mean_in_python < 1e-3:
        yield (
            f"a batch of {batch} rows makes as many calls",
            'vmap_method="expand_dims" (or "broadcast_all") calls the function once for'
            " the batch, if it can take arrays with a leading axis",
        )
    if batch >= 2 and mean_in_python >= 1e-2:
        yield (
            f"{batch} slow rows run one after another",
            'vmap_method="parallel" runs the rows at the same time',
        )
    # Copies of a quarter of a megabyte take as long as a small call.
    if not row.facts.lends and size >= 1 << 18 and mean_in_python < 1e-2:
        yield (
            f"each call copies {size / 1e6:.2f} MB of arguments and results",
            "lend=True hands out views of XLA's memory instead of copies of the"
            ' arguments; lend="out" lets the function write the results there too',
        )


def _of_taps(row: _Row) -> _Found:
    stats = row.stats
    if stats.python_seconds / stats.calls < 1e-4 and stats.calls >= 100_000:
        yield (
            f"{stats.calls} taps are delivered one by one",
            "batch= delivers many taps in one call, stacked along a new axis",
        )
