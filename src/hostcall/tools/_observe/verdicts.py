"""Judges bad values on the host: who made them, and whether they are innocent.

A program that has bad values sends their digest first: how many NaNs and infinities
each value has, and a mix of their positions. That is small, and answered at once if it
is known to be innocent. Only if it is not, the program hands over what its equations
got, and these are run again here (`replay.py`).
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
from hostcall._jax import Atom, Jaxpr, JaxprEquation, Var, jaxprs, rewriting, tracing
from hostcall._jax.places import EqnPath
from hostcall._jax.rewriting import Level
from hostcall.tools._observe.bad_values import Reports
from hostcall.tools._observe.replay import (
    Frame,
    RuleCall,
    Search,
    Value,
    kinds_of,
    runs_again,
    worst,
)
from hostcall.tools._observe.where import Where

NUMBERS = 4  # of a value in a digest: NaNs, infinities, where these are, and those
COUNTS = 2  # of them are counts
_DIGESTS_MOST = 256  # that are remembered
_ASKS_MOST = 32  # of one run of a program


@dataclass(frozen=True, eq=False)
class Judge(HostCode):
    """The function of a call that a program makes if it has a bad value.

    Attributes:
        looked_at: the values that the device looks at.
        at_hand: those of them that it hands over.
        innocent: for each of these the kinds of bad values that were innocent so far,
            or told of, by their elements.
        digests: those that were found innocent, or told of.
        most: the most NaNs and infinities that innocent values had, if any did.
        told: the names of the places that were told of.
    """

    level: Level
    infs: bool
    where: Where
    reports: Reports
    looked_at: tuple[Atom, ...]
    at_hand: tuple[Atom, ...]
    innocent: dict[Atom, np.ndarray] = field(default_factory=dict, init=False)
    digests: set[bytes] = field(default_factory=set, init=False)
    most: dict[str, np.ndarray] = field(default_factory=dict, init=False)
    told: list[str] = field(default_factory=list, init=False)
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

    def is_ignored(self, place: EqnPath) -> bool:
        return not self.where.has(place)

    def is_innocent(self, digest: np.ndarray) -> bool:
        """Whether bad values are known to be innocent, or were told of."""
        is_known = digest.tobytes() in self.digests
        if not is_known and len(self.digests) >= _DIGESTS_MOST:
            # Where they are differs each time: only how many there are can tell.
            is_known = bool((_counts(digest) <= self.most["counts"]).all())
        if is_known:
            for name in self.told:
                self.reports.count(name)
        return is_known

    def judge(
        self, known: dict[Any, Value], digest: np.ndarray, flags: np.ndarray
    ) -> None:
        """Raises an error for what is bad, if that is not known to be innocent."""
        kinds = {v: kinds_of(known[v], self.infs) for v in self.at_hand}
        none = np.zeros((), np.uint8)
        has_new = flags.any() or len(self.at_hand) < len(self.looked_at)
        if not has_new and not any(
            np.any(kind & ~self.innocent.get(v, none)) for v, kind in kinds.items()
        ):
            for name in self.told:
                self.reports.count(name)
        else:
            # The host's own programs make the bad value again, whatever the user's
            # settings say of such values, and have the types that the equations name.
            with (
                rewriting.not_rewritten(),
                jax.transfer_guard("allow"),
                jax.debug_nans(False),
                jax.debug_infs(False),
                jax.enable_x64(True),
            ):
                self.find(known, digest, flags)
            for v, kind in kinds.items():
                self.innocent[v] = self.innocent.get(v, none) | kind
        if digest.size:
            counts = _counts(digest)
            self.most["counts"] = np.maximum(self.most.get("counts", counts), counts)
            if len(self.digests) < _DIGESTS_MOST:
                self.digests.add(digest.tobytes())

    def find(
        self, known: dict[Any, Value], digest: np.ndarray, flags: np.ndarray
    ) -> None:
        raise NotImplementedError

    def tell(self, search: Search, causes: Sequence[int]) -> bool:
        """Tells of the origins of these causes, and whether there are any."""
        origins = [search.origin(cause) for cause in causes]
        chains = [origin.chain for origin in origins if origin is not None]
        chains.sort(key=lambda chain: search.origins.index(chain[-1]))
        for _, same in itertools.groupby(chains, key=lambda chain: id(chain[-1])):
            name = self.reports.found(next(same))
            if name and name not in self.told:
                self.told.append(name)
        return bool(chains)

    def not_again(self, place: EqnPath, steps: RuleCall, search: Search) -> None:
        if not self.is_ignored(place):
            self.reports.not_again(place, steps, search)


def _counts(digest: np.ndarray) -> np.ndarray:
    """How many NaNs and infinities each value has, in the row that has most of them."""
    counts = digest[..., :COUNTS]
    return counts.reshape(-1, *counts.shape[-2:]).max(0)


@dataclass(frozen=True, eq=False)
class Ask(HostCode):
    """The function of the call that asks a judge whether a digest is known.

    Attributes:
        asks: the number of a run, and how often it has asked.
    """

    judge: Judge
    asks: list[int] = field(default_factory=lambda: [0, 0], init=False)
    stays = Judge.stays
    __name__ = Judge.__name__

    def place(self) -> tuple[str, int, str]:
        return self.judge.place()

    def __call__(self, digest: np.ndarray) -> tuple[np.ndarray, np.bool_]:
        """(how many bad values are none of anybody's business from now on in this run,
        whether this digest is not known).
        """
        floor = np.zeros((*digest.shape[:-1], COUNTS), np.int32)
        if not self.judge.is_innocent(digest):
            return floor, np.True_
        here = hc.current()
        run = 0 if here is None else here.run or 0
        is_same_run = run == self.asks[0]
        self.asks[:] = run, self.asks[1] + 1 if is_same_run else 1
        if self.asks[1] > _ASKS_MOST:  # innocent ones come and go
            floor[...] = self.judge.most["counts"]
        return floor, np.False_


@dataclass(frozen=True, eq=False)
class Equations(Judge):
    """Judges the equations of a level by its inputs."""

    jaxpr: Jaxpr
    operands: tuple[Var, ...]
    collectives: tuple[JaxprEquation, ...]

    def __call__(self, numbers: np.ndarray, *values: np.ndarray) -> None:
        """`numbers`: a digest; or, inside shard_map, whether the operands of each
        collective are bad on some device. The device that has them tells.
        """
        known = dict(zip(self.operands, values, strict=True))
        is_digest = numbers.dtype == np.int32
        digest = numbers if is_digest else np.zeros((0, NUMBERS), np.int32)
        self.judge(known, digest, np.zeros(0, bool) if is_digest else numbers[1:])

    def find(
        self, known: dict[Any, Value], digest: np.ndarray, flags: np.ndarray
    ) -> None:
        del digest
        search = Search(self.infs, self.is_ignored)
        pairs = zip(self.collectives, flags, strict=bool(flags.size))
        sent = [eqn for eqn, is_bad in pairs if is_bad]
        from_others = [v for eqn in sent for v in eqn.outvars]
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
            is_constant = _is_constant(self.level, v)
            frame.causes[v] = search.innocent(known[v], is_constant)
        frame.run()
        bad = [v for v in self.looked_at if search.is_bad(known[v])]
        # What this device has handed to others may be bad there, and not here.
        bad += [v for e in sent for v in e.invars if search.is_bad(frame.value(v))]
        if self.tell(search, [worst([frame.cause(v)]) for v in bad]):
            return
        if bad and not any(search.is_bad(frame.value(v)) for v in bad):
            at = next(p for p in self.level.places if bad[0] in p.eqn.outvars)
            self.not_again(at, steps, search)


@dataclass(frozen=True, eq=False)
class StepsSincePause(Judge):
    """Judges the steps of a loop since its last pause, by running them again.

    Attributes:
        others: the operands of the loop beside what it carries.
        outer: those that are variables.
        first: where what it carries is among its operands.
    """

    others: tuple[Atom, ...]
    outer: tuple[Var, ...]
    first: int

    def __call__(
        self, digest: np.ndarray, begin: np.ndarray, end: np.ndarray, *rest: np.ndarray
    ) -> None:
        """`begin`, `end`: the turns of the loop since its last pause, the last one too.
        `rest`: what it carried then, `outer`, and what is at hand of the last step.
        """
        n_carry = len(rest) - len(self.outer) - len(self.at_hand)
        known: dict[Any, Value] = {"begin": int(begin), "end": int(end)}
        known["carry"] = list(rest[:n_carry])
        known |= zip([*self.outer, *self.at_hand], rest[n_carry:], strict=True)
        self.judge(known, digest, np.zeros(0, bool))

    def find(
        self, known: dict[Any, Value], digest: np.ndarray, flags: np.ndarray
    ) -> None:
        del flags
        assert self.level.outer is not None
        assert self.level.inside is not None
        search = Search(self.infs, self.is_ignored)
        level = self.level.outer
        loop = self.level.inside
        frame = Frame(level.jaxpr, loop.outer, (), search, dict(known))
        for v in self.outer:
            frame.causes[v] = search.innocent(known[v], _is_constant(level, v))
        operands = [frame.value(x) for x in self.others]
        causes = [frame.cause(x) for x in self.others]
        carry = known["carry"]
        operands[self.first : self.first] = carry
        causes[self.first : self.first] = [search.innocent(x) for x in carry]
        n_results = len(loop.eqn.outvars)
        begin = known["begin"]
        end = known["end"]
        found = frame.in_loop(loop, operands, causes, n_results, begin, end)
        if self.tell(search, [worst([each]) for each in found]):
            return
        if not any(np.any(each) for each in found):
            are_bad = _counts(digest).any(-1)
            bad = next(itertools.compress(self.looked_at, are_bad))
            body = EqnPath(loop.eqn, loop)
            at = next((p for p in self.level.places if bad in p.eqn.outvars), body)
            self.not_again(at, (end,), search)


def _is_constant(level: Level, atom: Atom) -> bool:
    """Whether a variable has the same value in each run of the program."""
    if tracing.is_literal(atom) or atom in level.jaxpr.constvars:
        return True
    if level.outer is None or level.inside is None:
        return False
    eqn = level.inside.eqn
    inner = next((x for x in jaxprs.inners(eqn) if x.old is level.jaxpr), None)
    if inner is None or atom not in level.jaxpr.invars:
        return False
    at = level.jaxpr.invars.index(atom)
    if level.kind in jaxprs.LOOPS and at >= inner.end - inner.begin:
        return False  # it differs from step to step
    return _is_constant(level.outer, eqn.invars[inner.begin + at])
