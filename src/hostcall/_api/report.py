"""`hc.monitor.report`: what callbacks have cost, and what would make them cheaper."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
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
    out = file or sys.stdout

    def say(text: str) -> None:  # a tag may have lone surrogates
        print(text.encode(errors="backslashreplace").decode(), file=out)

    facts = dict(costs.facts)
    ranked = sorted(stats().items(), key=lambda item: -_seconds(item[1]))
    findings = [
        _finding(name, c, facts.get(name, Facts()))
        for name, c in ranked[:_WORST]
        if _seconds(c) > 0
    ]
    head = ("seconds", "in Python", "for GIL", "for queue", "us each", "times", "MB")
    say("".join(f"{h:>11}" for h in head) + "  function")
    for name, c in ranked:
        say(_line(name, c))
    waited = sum(
        _seconds(c) if "call" in facts.get(name, Facts()).kinds else c.wait_seconds
        for name, c in ranked
    )
    say(f"\nprograms waited for Python: {waited:.4f} s")
    if times := costs.barriers:
        say(
            "Python waited in hc.barrier for programs and taps:"
            f" {costs.barrier_seconds:.4f} s"
            f" ({'once' if times == 1 else f'{times} times'})"
        )
    for number, finding in enumerate(findings, 1):
        say(f"\n{number}. {finding.name}: {finding.seconds:.4f} s")
        say(f"   {finding.cause}")
        if finding.remedy:
            say(f"   {finding.remedy}")
    return findings


def _line(name: str, c: CallStats) -> str:
    seconds = (_seconds(c), c.python_seconds, c.gil_seconds, c.wait_seconds)
    mean_microseconds = 1e6 * _seconds(c) / max(c.calls, 1)
    mega = (c.bytes_in + c.bytes_out) / 1e6
    numbers = "".join(f"{s:11.4f}" for s in seconds)
    return f"{numbers}{mean_microseconds:11.2f}{c.calls:11}{mega:11.2f}  {name}"


def _seconds(c: CallStats) -> float:
    return c.python_seconds + c.gil_seconds + c.wait_seconds


def _finding(name: str, c: CallStats, facts: Facts) -> Finding:
    """The first rule that fits."""
    seconds = _seconds(c)
    cause = f"{1e6 * seconds / max(c.calls, 1):.2f} us for each of its calls"
    remedy = ""
    if seconds >= _SECONDS and c.calls >= _CALLS:
        of_kind = _of_calls if "call" in facts.kinds else _of_taps
        rules_that_fit = itertools.chain(_of_both(c, facts), of_kind(c, facts))
        cause, remedy = next(rules_that_fit, (cause, remedy))
    return Finding(name, seconds, cause, remedy)


# Each yields the causes and the remedies of the rules that fit.
_Found: TypeAlias = Iterator[tuple[str, str]]


def _of_both(c: CallStats, facts: Facts) -> _Found:
    is_call = "call" in facts.kinds
    if c.wait_seconds > 0.5 * _seconds(c):
        yield (
            f"devices waited {c.wait_seconds:.4f} s for space in the full queue of"
            " taps",
            "The function is slower than the taps come: let fewer through (every=,"
            ' sample=), or drop some (when_full="drop_oldest"), or deliver many at once'
            " (batch=)",
        )
    if c.gil_seconds > 0.5 * _seconds(c):
        remedy = (
            "Other Python threads hold it: let them sleep or release it while the"
            " program runs"
        )
        if is_call and facts.nothing:
            remedy += "; or use hc.tap, which does not wait for the GIL"
        yield f"the calls waited {c.gil_seconds:.4f} s for the GIL", remedy
    if is_call and facts.nothing:
        yield (
            "the program waits for a function that returns nothing",
            "hc.tap hands over the values and does not wait for the function",
        )
    if facts.arrays & {"jax", "free"} and c.python_seconds / c.calls < 1e-3:
        remedy = 'arrays="numpy" hands out NumPy arrays'
        if "jax" not in facts.arrays:
            remedy += ": hc.call instead of the drop-in"
        yield "most of a short call is making jax.Arrays of its arguments", remedy


def _of_calls(c: CallStats, facts: Facts) -> _Found:
    mean_seconds = c.python_seconds / c.calls
    size = (c.bytes_in + c.bytes_out) / c.calls
    rows = facts.rows if "sequential" in facts.methods else 1
    if rows >= 8 and mean_seconds < 1e-3:
        yield (
            f"a batch of {rows} rows makes as many calls",
            'vmap_method="expand_dims" (or "broadcast_all") calls the function once for'
            " the batch, if it can take arrays with a leading axis",
        )
    if rows >= 2 and mean_seconds >= 1e-2:
        yield (
            f"{rows} slow rows run one after another",
            'vmap_method="parallel" runs the rows at the same time',
        )
    if not facts.lends and size >= 1 << 18 and mean_seconds < 1e-2:
        yield (
            f"each call copies {size / 1e6:.2f} MB of arguments and results",
            "lend=True hands out views of XLA's memory instead of copies of the"
            ' arguments; lend="out" lets the function write the results there too',
        )


def _of_taps(c: CallStats, _: Facts) -> _Found:
    if c.python_seconds / c.calls < 1e-4 and c.calls >= 100_000:
        yield (
            f"{c.calls} taps are delivered one by one",
            "batch= delivers many taps in one call, stacked along a new axis",
        )
