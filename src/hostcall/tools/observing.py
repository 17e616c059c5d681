"""`hc.observe`: looks into programs that nobody changed.

A program that is lowered inside the block gets further equations there, after
derivatives, vmap and dead code (`_jax/rewriting.py`). It is compiled once more for the
block, and programs that were compiled before are found again after it.

What is put in are calls and taps as a user would write them. Each use is a class with a
method `look`, which says what goes into a level of a program:

    _observe/nans.py    looks for bad values on the device
    _observe/values.py  hands on the values of variables
    _observe/loops.py   shows bars of loops

Each asks the equations' places (`_jax/places.py`) for lines, loops, calls and shards,
and `_observe/where.py` which of these the block looks at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax

import hostcall as hc
from hostcall import _jax
from hostcall._core.gone import refuse
from hostcall._core.suggestions import suggests
from hostcall._jax import rewriting, rewritten_programs, tracing
from hostcall.errors import HostcallError, SpecError
from hostcall.tools._observe.bad_values import BadRecord as BadRecord
from hostcall.tools._observe.loops import Loops
from hostcall.tools._observe.nans import Nans
from hostcall.tools._observe.values import Record as Record
from hostcall.tools._observe.values import To, Values
from hostcall.tools._observe.where import Where
from hostcall.tools._values import need, wrong

_VALUES = (
    'hc.observe("loss", to=collect) hands on the values, of which NumPy makes the'
    " statistics (the page 'Observing' has the lines)"
)
# What it had once, and what to write instead.
_GONE = dict.fromkeys(("stats", "rows", "table"), _VALUES)


class observe:
    """A context manager in which compiled programs are observed, as they are.

        with hc.observe(nans=True):
            train(state)

        with hc.observe(progress=True):
            train(state)

        with hc.observe("loss", "grads", to=print):
            train(state)

    It sees each equation of each program that this thread compiles in the block, in
    loops, in branches, under vmap, in the backward pass, in remat and in shard_map.
    The page "Observing" says what it does not see.

    Args:
        *names: variables of the user's whose values are handed on, as they stand in the
            source: "loss", "self.scale", or a pattern such as "grad_*". All functions
            that assign to such a variable count.
        nans: a program that makes a value which is NaN or infinite ends with a
            FloatingPointError, if this value reaches a result of the program or of a
            step of a loop.
        infs: whether infinities are bad values too. False: NaNs alone, for models in
            which log(0) is meant.
        on_bad: "raise", the default. "report": the program goes on, each place is told
            once on stderr, and how often it was found at the end of the block. Or a
            function of a `BadRecord`, which runs on the thread of the program.
        only: where it looks: a pattern or several, each of a file ("train.py"), a
            package ("optax") or a function ("loss_fn"). Bad values that other lines
            make are no errors, and other loops have no bars. Default: everywhere;
            variables in your own files, and in no library's.
        ignore: where it does not look, in the same form.
        progress: shows a bar for each loop that lasts longer than 0.3 s, those of inner
            loops below those of outer ones.
        select: a function of a `Record` that chooses values in place of names.
        to: where the values go: a function (record, value) with a `Record` and a NumPy
            array, which runs later, as that of a tap; a `hc.Recorder`; or a sink of
            `hc.tools.sinks`. Default: they are printed.

    Blocks inside a block add to it. A block holds for its thread alone. The same object
    can be entered again, and its programs are compiled once for all of its blocks;
    blocks with `nans` alone share theirs.

    Raises:
        FloatingPointError: with `nans`, a program has made a bad value.
        SpecError: an option is invalid, or a block begins while a program is traced.
        HostcallError: a block begins, and this JAX does not show its programs.

    Cost: none outside of the block. Inside, each program is compiled once more. The
    page "Observing" has measured costs.
    """

    @suggests("hc.observe", gone=_GONE)
    def __init__(
        self,
        *names: str,
        nans: bool = False,
        infs: bool = True,
        on_bad: Literal["raise", "report"] | Callable[[BadRecord], object] = "raise",
        progress: bool = False,
        select: Callable[[Record], object] | None = None,
        to: To = None,
        only: str | Sequence[str] = (),
        ignore: str | Sequence[str] = (),
    ) -> None:
        _check(names, select, to)
        where = Where(_patterns("only", only), _patterns("ignore", ignore))
        _check_nans(nans, infs, on_bad)
        wants_values = bool(names) or select is not None
        if to is not None and not wants_values:
            raise wrong(
                "hc.observe(to=...) has no values to hand on. Name variables,"
                ' as in hc.observe("loss", to=...), or choose values with select='
            )
        self._values = Values(names, select, to, where) if wants_values else None
        # Uses with equal keys put the same into a program, and share it.
        self._nans = Nans(infs, on_bad, where) if nans else None
        self._raises_only = on_bad == "raise"
        self._shows_progress = progress
        own = None if self._raises_only else self
        uses: dict[Hashable, rewriting.Use | None] = {
            ("nans", infs, where, own): self._nans,
            ("progress", where): Loops(where) if progress else None,
            ("values", self): self._values,
        }
        self._uses: dict[Hashable, rewriting.Use] = {
            key: use for key, use in uses.items() if use is not None
        }
        if not self._uses:
            raise wrong(
                "hc.observe() observes nothing. Say what: names of variables,"
                " nans=True, or progress=True"
            )
        self._block: contextlib.ExitStack | None = None

    def __enter__(self) -> observe:
        if self._block is not None:
            raise HostcallError(
                "hostcall: this hc.observe block is open already. Make another one"
                " inside it: their options add up",
                code="hc-closed",
            )
        if tracing.is_staged():
            raise SpecError(
                "hostcall: a block of hc.observe begins while a program is traced, and"
                " not when it runs. Put it around the call of the program",
                code="hc-traced",
            )
        _need_programs()
        with contextlib.ExitStack() as stack:
            stack.push(self._end)  # the last to end, after what may raise an error
            stack.enter_context(hc.reraise())
            stack.enter_context(rewritten_programs.rewritten_by(self._uses))
            self._block = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        block = self._block
        self._block = None
        assert block is not None
        block.__exit__(*raised)

    if not TYPE_CHECKING:  # a type checker would accept any name, as Any

        def __getattr__(self, name: str) -> Any:
            refuse("hc.observe", _GONE, name)

    def _end(self, _: object, error: BaseException | None, __: object) -> None:
        """Waits until all that the programs have tapped is delivered."""
        if len(self._uses) > 1 or self._nans is None or not self._raises_only:
            try:
                hc.barrier()
            except Exception:
                # If the block raises its own error, that one goes on. Failures of taps
                # have been logged.
                if error is None:
                    raise
        if self._shows_progress:
            hc.progress.close()
        if self._nans is not None:
            self._nans.reports.report()
        if error is None:
            if self._values is not None:
                self._values.warn()
            _need_programs()  # JAX may have had no devices before


def _need_programs() -> None:
    _jax.need(_jax.Part.OBSERVE)
    if not rewritten_programs.shows_programs():
        raise HostcallError(
            "hostcall: hc.observe can't see the programs of this JAX, version"
            f" {jax.__version__}, which does not lower them where hostcall looks."
            f" Install one of the versions that hostcall was made for: {_jax.INSTALL}",
            code="hc-jax",
        )


def _patterns(option: str, given: str | Sequence[str]) -> tuple[str, ...]:
    patterns = [given] if isinstance(given, str) else given
    is_list = isinstance(patterns, (list, tuple, set, frozenset))
    are_texts = is_list and all(isinstance(x, str) and x for x in patterns)
    wanted = f'{option}= of hc.observe should be a text, such as "train.py", or several'
    need(are_texts, wanted, given)
    return tuple(patterns)


def _check_nans(nans: bool, infs: bool, on_bad: object) -> None:
    is_known = on_bad in ("raise", "report") or callable(on_bad)
    wanted = 'on_bad= of hc.observe should be "raise", "report", or a function'
    need(is_known, wanted, on_bad)
    if not nans and (not infs or on_bad != "raise"):
        raise wrong(
            "hc.observe(infs=..., on_bad=...) looks for no bad values. Add nans=True"
        )


def _check(names: tuple[object, ...], select: object, to: object) -> None:
    for name in names:
        need(isinstance(name, str), "a name in hc.observe should be a str", name)
    wanted = "select= of hc.observe should be a function of a record"
    need(select is None or callable(select), wanted, select)
    wanted = (
        "to= of hc.observe should be a function of a record and a value, a hc.Recorder,"
        " or a sink"
    )
    need(to is None or callable(to), wanted, to)
