"""Judges bad values on the host: who made them, and whether they are innocent.

A program that has bad values shows them first, by a call that gets what was looked at.
That is answered at once if the same bad elements are known to be innocent. Only if they
are not, the program hands over what its equations got, and these are run again here
(`replay.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import hostcall as hc
from hostcall._core.host_code import HostCode
from hostcall._jax import Atom, Jaxpr, JaxprEquation, Var, rewritten_programs
from hostcall._jax.places import EqnPath
from hostcall._jax.rewriting import Level
from hostcall.tools._observe.bad_values import Reports
from hostcall.tools._observe.causes import RuleCall, Search, kinds_of, worst
from hostcall.tools._observe.level_facts import is_constant
from hostcall.tools._observe.replay import Frame
from hostcall.tools._observe.running_again import Value, runs_again
from hostcall.tools._observe.where import Where

COUNTS = 2  # of a value: its NaNs, and its infinities
_FINGERPRINTS_MOST = 256  # that are remembered
_ASKS_MOST = 32  # of one run of a program


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Which elements of some values are bad.

    A program with an innocent infinity asks for its key in each run, so this is one
    pass over values that have nothing bad. The counts are seldom asked for.

    Attributes:
        row_axes: how many axes in front are rows, which are counted one by one.
    """

    values: Sequence[np.ndarray]
    infs: bool
    row_axes: int

    @functools.cached_property
    def key(self) -> int:
        """A hash of which elements are bad, and of which kind they are."""
        marks = []
        for value in self.values:
            is_good = (np.isfinite(value) if self.infs else ~np.isnan(value)).tobytes()
            kinds = self._kinds(value) if b"\0" in is_good else []
            marks.append(tuple([flags.tobytes() for flags in kinds]))
        return hash(tuple(marks))

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """How many NaNs and infinities each value has, in the row that has most."""
        counts = np.zeros((len(self.values), COUNTS), np.int32)
        for n, value in enumerate(self.values):
            axes = tuple(range(self.row_axes, value.ndim))
            for kind, flags in enumerate(self._kinds(value)):
                if flags.any():  # a value without elements has no maximum
                    counts[n, kind] = flags.sum(axes).max()
        return counts

    def _kinds(self, value: np.ndarray) -> list[np.ndarray]:
        """Which elements are NaN, and which are infinite."""
        return [np.isnan(value), np.isinf(value)] if self.infs else [np.isnan(value)]


@dataclass(frozen=True, eq=False)
class Judge(HostCode):
    """The function of a call that a program makes if it has a bad value.

    Attributes:
        looked_at: the values that the device looks at.
        at_hand: those of them that are results of the level.
        row_axes: how many axes of rows they have in front, in a while loop under vmap.
        innocent: for each of these the kinds of bad values that were innocent so far,
            or told of, by their elements.
        fingerprints: the keys of those that were found innocent, or told of.
        most: the most NaNs and infinities that innocent values had, if any did.
        reported: the names of the places that were reported.
    """

    level: Level
    infs: bool
    scope: Where
    reports: Reports
    looked_at: tuple[Atom, ...]
    at_hand: tuple[Atom, ...]
    row_axes: int
    innocent: dict[Atom, np.ndarray] = field(default_factory=dict, init=False)
    fingerprints: set[int] = field(default_factory=set, init=False)
    most: dict[str, np.ndarray] = field(default_factory=dict, init=False)
    reported: list[str] = field(default_factory=list, init=False)
    stays = "hc.observe looks at programs of this process only"
    __name__ = "hc.observe(nans=True)"

    def place(self) -> tuple[str, int, str]:
        inside = [self.level.inside] if self.level.inside else []
        places = [*inside, *self.level.places]
        lines = (place.users_line for place in places)
        line = next(filter(None, lines), None)
        return (line.file, line.line, line.function) if line else ("a program", 0, "")

    @functools.cached_property
    def ask(self) -> Ask:
        """The function of the call that is made first."""
        return Ask(self)

    @functools.cached_property
    def ask_in_loop(self) -> AskInLoop:
        """The same in a loop."""
        return AskInLoop(self)

    def is_ignored(self, place: EqnPath) -> bool:
        return not self.scope.has(place)

    def fingerprint(self, values: Sequence[np.ndarray]) -> Fingerprint:
        return Fingerprint(values, self.infs, self.row_axes)

    def is_innocent(self, bad: Fingerprint) -> bool:
        """Whether bad values are known to be innocent, or were told of."""
        is_known = bad.key in self.fingerprints
        if not is_known and len(self.fingerprints) >= _FINGERPRINTS_MOST:
            # Where they are differs each time: only how many there are can tell.
            is_known = bool((bad.counts <= self.most["counts"]).all())
        if is_known:
            for name in self.reported:
                self.reports.count(name)
        return is_known

    def judge(
        self, known: dict[Any, Value], bad: Fingerprint | None, flags: np.ndarray
    ) -> None:
        """Raises an error for what is bad, if that is not known to be innocent."""
        kinds = {v: kinds_of(known[v], self.infs) for v in self.at_hand}
        none = np.zeros((), np.uint8)
        has_new = flags.any() or len(self.at_hand) < len(self.looked_at)
        if not has_new and not any(
            np.any(kind & ~self.innocent.get(v, none)) for v, kind in kinds.items()
        ):
            for name in self.reported:
                self.reports.count(name)
        else:
            # The host's own programs make the bad value again, whatever the user's
            # settings say of such values, and have the types that the equations name.
            with (
                rewritten_programs.not_rewritten(),
                jax.transfer_guard("allow"),
                jax.debug_nans(False),
                jax.debug_infs(False),
                jax.enable_x64(True),
            ):
                self.find(known, bad, flags)
            for v, kind in kinds.items():
                self.innocent[v] = self.innocent.get(v, none) | kind
        if bad is not None:
            most = self.most.get("counts", bad.counts)
            self.most["counts"] = np.maximum(most, bad.counts)
            if len(self.fingerprints) < _FINGERPRINTS_MOST:
                self.fingerprints.add(bad.key)

    def find(
        self, known: dict[Any, Value], bad: Fingerprint | None, flags: np.ndarray
    ) -> None:
        raise NotImplementedError

    def tell(self, search: Search, causes: Sequence[int]) -> bool:
        """Tells of the origins of these causes, and whether there are any."""
        origins = [search.origin(cause) for cause in causes]
        chains = [origin.chain for origin in origins if origin is not None]
        chains.sort(key=lambda chain: search.origins.index(chain[-1]))
        for _, chains_of_origin in itertools.groupby(
            chains, key=lambda chain: id(chain[-1])
        ):
            name = self.reports.found(next(chains_of_origin))
            if name and name not in self.reported:
                self.reported.append(name)
        return bool(chains)

    def not_again(self, place: EqnPath, steps: RuleCall, search: Search) -> None:
        if not self.is_ignored(place):
            self.reports.not_again(place, steps, search)


@dataclass(frozen=True, eq=False)
class Ask(HostCode):
    """The function of the call that asks a judge whether bad values are known."""

    judge: Judge
    stays = Judge.stays
    __name__ = Judge.__name__

    def place(self) -> tuple[str, int, str]:
        return self.judge.place()

    def __call__(self, *values: np.ndarray) -> np.bool_:
        """Whether they are not."""
        return np.bool_(not self.judge.is_innocent(self.judge.fingerprint(values)))


@dataclass(frozen=True, eq=False)
class AskInLoop(Ask):
    """The same in a loop, which asks often.

    Attributes:
        asks: the number of a run, and how often it has asked.
    """

    asks: list[int] = field(default_factory=lambda: [0, 0], init=False)

    def __call__(  # type: ignore[override]
        self, floor: np.ndarray, *values: np.ndarray
    ) -> tuple[np.ndarray, np.bool_]:
        """Returns (the counts up to which the loop need not ask again in this run,
        whether these bad values are not known).

        `floor`: those counts so far.
        """
        is_unknown = super().__call__(*values)
        if is_unknown:
            return floor, is_unknown
        call = hc.current()
        run = 0 if call is None else call.run or 0
        is_same_run = run == self.asks[0]
        self.asks[:] = run, self.asks[1] + 1 if is_same_run else 1
        if self.asks[1] > _ASKS_MOST:  # innocent ones come and go
            floor = np.maximum(floor, self.judge.most["counts"])
        return floor, is_unknown


@dataclass(frozen=True, eq=False)
class Equations(Judge):
    """Judges the equations of a level by its inputs."""

    jaxpr: Jaxpr
    operands: tuple[Var, ...]
    collectives: tuple[JaxprEquation, ...]

    def __call__(self, flags: np.ndarray, *values: np.ndarray) -> None:
        """`flags`: inside shard_map, whether something is bad on some device, and
        whether the operands of each collective are. The device that has them tells.
        """
        known = dict(zip(self.operands, values, strict=True))
        bad = None
        if not self.level.meshes:
            bad = self.fingerprint([known[x] for x in self.looked_at])
        self.judge(known, bad, flags[1:])

    def find(
        self, known: dict[Any, Value], bad: Fingerprint | None, flags: np.ndarray
    ) -> None:
        del bad
        search = Search(self.infs, self.is_ignored)
        pairs = zip(self.collectives, flags, strict=bool(flags.size))
        bad_collectives = [eqn for eqn, is_bad in pairs if is_bad]
        from_others = [v for eqn in bad_collectives for v in eqn.outvars]
        steps = tuple(known[v] for v in self.level.steps)
        frame = Frame(
            *(self.jaxpr, self.level.inside, steps, search),
            from_others=frozenset(from_others),
        )
        # What is computed again, or was handed over, gets its cause at its equation.
        computed = {v for eqn in self.jaxpr.eqns for v in eqn.outvars}
        again = {v for e in self.jaxpr.eqns if runs_again(e) for v in e.outvars}
        frame.values |= {
            v: x for v, x in known.items() if v not in again or v not in self.looked_at
        }
        for v in known.keys() - computed:
            constant = is_constant(self.level, v)
            frame.causes[v] = search.innocent(known[v], constant)
        frame.run()
        suspects = [v for v in self.looked_at if search.is_bad(known[v])]
        # What this device has handed to others may be bad there, and not here.
        suspects += [
            v
            for e in bad_collectives
            for v in e.invars
            if search.is_bad(frame.value(v))
        ]
        if self.tell(search, [worst([frame.cause(v)]) for v in suspects]):
            return
        if suspects and not any(search.is_bad(frame.value(v)) for v in suspects):
            at = next(p for p in self.level.places if suspects[0] in p.eqn.outvars)
            self.not_again(at, steps, search)


@dataclass(frozen=True, eq=False)
class StepsSincePause(Judge):
    """Judges the steps of a loop since its last pause, by running them again.

    Attributes:
        other_operands: the operands of the loop beside what it carries.
        outer: those that are variables.
        first: where what it carries is among its operands.
    """

    other_operands: tuple[Atom, ...]
    outer: tuple[Var, ...]
    first: int

    def __call__(self, begin: np.ndarray, end: np.ndarray, *rest: np.ndarray) -> None:
        """`begin`, `end`: the turns of the loop since its last pause, without `end`.
        `rest`: what was looked at, what the loop carried at the pause, and `outer`.
        """
        n_looked_at = len(self.looked_at)
        n_before_outer = len(rest) - len(self.outer)
        looked_at = rest[:n_looked_at]
        known: dict[Any, Value] = {"begin": int(begin), "last": int(end) - 1}
        known["carry"] = list(rest[n_looked_at:n_before_outer])
        known |= zip(self.looked_at, looked_at, strict=True)
        known |= zip(self.outer, rest[n_before_outer:], strict=True)
        self.judge(known, self.fingerprint(looked_at), np.zeros(0, bool))

    def find(
        self, known: dict[Any, Value], bad: Fingerprint | None, flags: np.ndarray
    ) -> None:
        del flags
        assert self.level.outer is not None
        assert self.level.inside is not None
        search = Search(self.infs, self.is_ignored)
        level = self.level.outer
        loop = self.level.inside
        outer_values = {v: known[v] for v in self.outer}
        frame = Frame(level.jaxpr, loop.outer, (), search, outer_values)
        for v in self.outer:
            frame.causes[v] = search.innocent(known[v], is_constant(level, v))
        operands = [frame.value(x) for x in self.other_operands]
        causes = [frame.cause(x) for x in self.other_operands]
        carry = known["carry"]
        operands[self.first : self.first] = carry
        causes[self.first : self.first] = [search.innocent(x) for x in carry]
        n_results = len(loop.eqn.outvars)
        begin = known["begin"]
        last = known["last"]
        result_causes = frame.in_loop(loop, operands, causes, n_results, begin, last)
        if self.tell(
            search, [worst([causes_of_result]) for causes_of_result in result_causes]
        ):
            return
        if not any(np.any(causes_of_result) for causes_of_result in result_causes):
            assert bad is not None, "steps are looked at outside of shard_map alone"
            suspects = itertools.compress(self.looked_at, bad.counts.any(-1))
            suspect = next(suspects)
            body = EqnPath(loop.eqn, loop)
            at = next((p for p in self.level.places if suspect in p.eqn.outvars), body)
            self.not_again(at, (last,), search)
