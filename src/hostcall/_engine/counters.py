"""The counters of calls and their costs, for each tag or function definition."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from hostcall import _native
from hostcall._core.callback import CallSpec
from hostcall._core.process import Guarded
from hostcall._engine.params.equation import Equation
from hostcall._native import Counters

_MOST_NOTED = 64


@dataclass
class Facts:
    """What the programs with a function's calls say about them, for the report.

    Attributes:
        kinds: the words of its equations, "call" and "tap".
        arrays, methods: what `arrays=` and `vmap_method=` were.
        rows: the most rows that one execution called the function for.
        lends: whether some call had `lend=`.
        nothing: whether no call had a result.
        noted: what plans have said already. Eager calls make a plan each time, which
            mostly says the same again. No fact of its own, so it is not compared.
    """

    kinds: set[str] = field(default_factory=set)
    arrays: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    rows: int = 1
    lends: bool = False
    nothing: bool = True
    noted: set[tuple[object, ...]] = field(default_factory=set, compare=False)


class _Costs(Guarded):
    """What calls have cost in this process. Readers copy the tables in a single step.

    Attributes:
        lock: guards the values. Held for a few additions, while no other code runs.
        counters, facts: by the calls' tag, or by the place of their function
            in the source, not by the function object: a program that makes a new lambda
            for each call must not use more and more memory.
        barriers, barrier_seconds: how often and how long Python waited in `hc.barrier`.
    """

    def __init__(self) -> None:
        self.counters: defaultdict[str, Counters] = defaultdict(Counters)
        self.facts: defaultdict[str, Facts] = defaultdict(Facts)
        self.barriers = 0
        self.barrier_seconds = 0.0
        super().__init__()

    def counters_of(self, callback: CallSpec) -> Counters:
        """The counters of all calls with one tag, or of all functions of one `def`."""
        with self.lock:
            return self.counters[callback.counted_as]

    def note(self, equation: Equation) -> Counters:
        """Notes what a plan that is made says about the calls of its function.

        Returns the counters of these calls.
        """
        name = equation.callback.counted_as
        kind = equation.word
        arrays = equation.options.arrays
        method = equation.method
        rows = math.prod(equation.grid)
        lends = equation.lends
        has_results = bool(equation.avals)
        said = (kind, arrays, method, rows, lends, has_results)
        # Without the lock: what is in `noted` is in all the rest, and stays there.
        known = self.facts.get(name)
        if known is not None and said in known.noted:
            return self.counters[name]
        with self.lock:
            facts = self.facts[name]
            facts.kinds.add(kind)
            facts.arrays.add(arrays)
            facts.methods.add(method)
            facts.rows = max(facts.rows, rows)
            facts.lends |= lends
            facts.nothing &= not has_results
            # Batches may have another size each time, and `noted` would only grow.
            if len(facts.noted) < _MOST_NOTED:
                facts.noted.add(said)
            return self.counters[name]

    def waited_in_barrier(self, start: int) -> None:
        """Counts a wait of this thread from `start`, in ticks, to now."""
        seconds = (_native.ticks() - start) * _native.tick_ns() * 1e-9
        with self.lock:
            self.barriers += 1
            self.barrier_seconds += seconds


costs = _Costs()
