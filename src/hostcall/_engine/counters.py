"""The counters of calls and their costs, for each tag or function definition."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from dataclasses import dataclass, field

from hostcall._engine.callback import Callback
from hostcall._engine.params.equation import Equation
from hostcall._native import Counters, Lend


@dataclass
class Facts:
    """What the programs with a function's calls say about them, for the report.

    Attributes:
        kinds: "call" and "tap".
        arrays, methods: what `arrays=` and `vmap_method=` were.
        rows: the most rows that one execution called the function for.
        lends: whether some call had `lend=`.
        nothing: whether no call had a result.
    """

    kinds: set[str] = field(default_factory=set)
    arrays: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    rows: int = 1
    lends: bool = False
    nothing: bool = True


class Tally:
    """How many rows a cache answered (hits), and how many it did not (misses)."""

    def __init__(self) -> None:
        self.hits = self.misses = 0

    def add(self, hits: int, misses: int) -> None:
        with _lock:
            self.hits += hits
            self.misses += misses


_counters: defaultdict[str, Counters] = defaultdict(Counters)
_facts: defaultdict[str, Facts] = defaultdict(Facts)
_tallies: defaultdict[str, Tally] = defaultdict(Tally)
_lock = threading.Lock()


def counters_of(callback: Callback) -> Counters:
    """The counters of all calls with one tag, or of all functions made by one `def`.

    The key is the place in the source, not the function object: a program that makes a
    new lambda for each call must not use more and more memory.
    """
    with _lock:
        return _counters[callback.counted_as]


def tally_of(callback: Callback) -> Tally:
    """The tally for calls that share their counters."""
    with _lock:
        return _tallies[callback.counted_as]


def note(params: Equation) -> None:
    """Notes what a plan that is made says about the calls of its function."""
    callback = params.callback
    with _lock:
        facts = _facts[callback.counted_as]
        facts.kinds.add(params.word)
        facts.arrays.add(params.options.arrays)
        facts.methods.add(params.method)
        facts.rows = max(facts.rows, math.prod(params.grid))
        facts.lends |= params.native["lend"] is not Lend.COPY
        facts.nothing &= not params.avals


def all_facts() -> dict[str, Facts]:
    with _lock:
        return dict(_facts)


def all_tallies() -> dict[str, Tally]:
    with _lock:
        return dict(_tallies)


def all_counters() -> dict[str, Counters]:
    with _lock:
        return dict(_counters)
