"""The Python hooks that the engine calls for a call outside its fast path."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np

from hostcall import _native
from hostcall._core import coerce, dispatched, errors, failures, frames
from hostcall._core.callback import Callback
from hostcall._core.source import Place
from hostcall._jax.types import Aval, Device, Mesh

if TYPE_CHECKING:
    from hostcall._job.after_failure import Failures

logger = logging.getLogger("hostcall")


# What NumPy, Python and JAX say of an array where a scalar is wanted.
_NO_SCALAR = (
    "can be converted to Python scalars",
    "can be converted to a scalar index",
    "only convert an array of size 1",
    "truth value of an array",
)


class Team(NamedTuple):
    """How the devices of a program make a call together (native/base/team.h).

    Attributes:
        mode: the name of a `_native.TeamMode`.
        size: the number of this process's devices.
        leader: the ordinal of the device that calls; None for the first that comes.
    """

    mode: Literal["ONCE", "EACH"]
    size: int
    leader: int | None

    def settings(self) -> _native.TeamSettings:
        mode = _native.TeamMode[self.mode]
        return _native.TeamSettings(mode=mode, size=self.size, leader=self.leader)


class CallInfo:
    """The description of one call of one program, with the hooks that native code
    calls.

    Attributes:
        device: where JAX code inside the callback runs.
        packed: whether elements smaller than a byte are packed, as in XLA's buffers but
            not in NumPy's arrays.
        inside: which of the calls run inside one of XLA's host callbacks.
        tap: the settings of a tap (`TapInfo`); None for a call.
        team: how the devices of a program make the call together; None if each device
            makes its own.
        elsewhere: whether another process makes the call; all take its results.
        text: describes the call in other processes (_export/texts.py), or "".
        job: where its failures are noted if several processes run its program.
        caller: the process whose results all processes take, or None.
        of_program: the devices of its program, those of other processes too; None if
            there is one, empty if they are not known.
        tells: whether one more result tells all processes whether the call failed
            (native/plan/outcome.h).
        places: in a tap with on="shards", the global index of each array's block, by
            device ordinal; else None.
        origins: if each device makes a call and all fail together, the process of each
            device of the program; empty if they are not known. Else None.
    """

    device: Any = None
    packed = False
    inside = _native.Inside.NEVER
    tap: _native.TapSettings | None = None
    team: Team | None = None
    elsewhere = False
    text = ""
    job: Failures | None = None
    of_program: tuple[Device, ...] | None = None
    caller: int | None = None
    tells = False
    places: dict[int, tuple[Any, ...]] | None = None
    origins: list[int] | None = None

    def __init__(
        self,
        params: Any,
        devices: dict[int, Device],
        mesh: Mesh | None,
        avals: Sequence[Aval] = (),
        only: Sequence[int] = (),
        nested: bool = False,
    ) -> None:
        """
        Args:
            params: the equation.
            devices: by ordinal; at -1 the one whose arrays Python has on the host.
            mesh: of the program.
            avals: of the operands, if each device has them whole.
            only: the ordinals of the devices that tap; empty for all.
            nested: whether host code runs the program, inside another callback.
        """
        del avals, only, nested  # what only taps ask
        self.params = params
        self.callback: Callback = params.callback
        self.name = self.callback.name
        self.place = self.callback.place
        self.number = places.number_of(self.callback)  # in the engine's events
        self.devices = devices
        self.mesh = mesh
        self._failed: dict[int, tuple[int, ...]] = {}  # rows, by the call's thread

    def __repr__(self) -> str:
        return f"<{self.params.word} of {self.name} at {self.place}>"

    # --- Hooks ---------------------------------------------------------------------

    def flatten(self, value: Any) -> list[Any]:
        results = self.callback.results
        return coerce.take_apart(value, results.treedef, self.name, results.avals)

    def coerce(self, number: int, value: Any) -> np.ndarray:
        """A result of one row as an array."""
        return self.shaped(number, value, self.params.avals[number].shape)

    def shaped(self, number: int, value: Any, shape: tuple[int, ...]) -> np.ndarray:
        """A result of several rows as an array of another shape."""
        return coerce.coerce(
            value,
            self.params.avals[number].dtype,
            shape,
            lambda: self.result(number),
            lambda got: self.shape_hint(number, shape, got),
            self.callback.results.keys[number],
        )

    def result(self, number: int) -> str:
        """What messages call a result of the function."""
        told, _ = self._of_a_rule(number)
        return told or f"{self.callback.results.paths()[number]} of `{self.name}`"

    def shape_hint(
        self, number: int, want: tuple[int, ...], got: tuple[int, ...]
    ) -> str:
        """What may be wrong with the shape of a result; "" if nothing special."""
        params = self.params
        if params.levels and got == want[params.levels :]:
            rows = math.prod(want[: params.levels])
            return (
                f'With vmap_method="{params.method}" the function gets all {rows}'
                " rows at once, and must return one result for each, along a new axis"
                " in front"
            )
        if params.grid and got[1:] == want and got[0] != 1:
            return "Does the function return the whole batch where one row is wanted?"
        return self._of_a_rule(number)[1]

    def _of_a_rule(self, number: int) -> tuple[str, str]:
        """(what a result is, which shape it has) if the function is a rule of
        hostcall's that says so; else empty texts.
        """
        return self.callback.seen.own.result_words(number)

    def failed(self, row: tuple[int, ...]) -> None:
        """Notes which row failed, until `on_error` on this thread."""
        self._failed[threading.get_ident()] = row

    def on_error(self, error: BaseException, _: object, row: tuple[int, ...]) -> str:
        # Rows that run together say by themselves which of them failed.
        at = self._failed.pop(threading.get_ident(), ())
        row = row or at
        hint = self.hint(error)
        text = failures.text_for_xla(error, self.name, self.place, row, hint)
        has_token = self.of_program is not None or self.mesh is not None
        # A Ctrl-C is raised in the main thread anyway.
        stopped = issubclass(type(error), KeyboardInterrupt)
        if self.params.effect is not None and not has_token and not stopped:
            dispatched.call_failed(text)
        if self.job is not None:
            with failures.beside_a_failure("telling other processes of it"):
                self._tell_job(self.job, text)
        return text

    def _tell_job(self, job: Failures, text: str) -> None:
        # A failure that the program tells all processes is noted when they learn it:
        # until then this process's other devices still make their calls.
        if not self.tells:
            job.failed(text)
        if self.origins is not None:
            job.keep_text(text)

    def hint(self, error: BaseException) -> str:
        """What an option of the call may have to do with an exception of its function,
        also in a note on the error; "" if nothing.
        """
        text = ""
        if issubclass(type(error), (TypeError, ValueError)):
            said = failures.summary(error)
            text = self._hint_on_lent(said) or self._hint_on_rows(said)
        if text:
            failures.add_note(error, f"hostcall: {text}")
        return text

    def _hint_on_lent(self, said: str) -> str:
        """Why a lent argument can't be written to."""
        lend = self.params.options.lend
        if not lend or "read-only" not in said:
            return ""
        return (
            f"If it wrote to an argument: `{self.name}` has lend={lend!r}, so its"
            " arguments are views of memory that the program still reads. Write to a"
            " copy (x = x.copy()), or leave out lend="
        )

    def _hint_on_rows(self, said: str) -> str:
        """Why an argument is no scalar, in a function that gets a whole batch."""
        if not self.params.levels or not any(words in said for words in _NO_SCALAR):
            return ""
        return (
            f"If it takes scalars: under vmap with"
            f" vmap_method={self.params.method!r} `{self.name}` gets all rows at once,"
            " along a new axis in front. Write it for arrays, or use"
            ' vmap_method="sequential", which calls it for each row'
        )

    def eager_error(self, error: Exception) -> Exception:
        """The error that an eager call raises: the one that a program would raise."""
        raised: Exception = jax.errors.JaxRuntimeError(self.on_error(error, None, ()))
        return raised

    def on_lone_failure(self, ordinal: int, text: str) -> None:
        logger.error(
            "`%s` failed on %s, and the other devices go on, because the devices reach"
            " this call separately (it is inside control flow that differs between"
            " them). If one of them waits for this device in a collective (psum,"
            " all_gather, ...), XLA ends the process after a minute. To make all"
            " devices fail together, let all of them reach the call: give the condition"
            " as where= in place of lax.cond. The failure was: %s",
            self.name,
            self.devices.get(ordinal, f"device {ordinal}"),
            text,
        )

    def on_verdict(self, said: str, ours: bool) -> str:
        """The error with which the program fails on a device of this process.

        `said` is the error of this process, or what the failed one sent along.
        """
        assert self.job is not None  # only programs over several processes have one
        if ours:
            self.job.failed(said, tell=False)
            return said
        process, taken = self.caller, ""
        if self.origins is not None:  # `said` is a device's number plus one
            known = self.origins[int(said) - 1 :][:1]
            process = known[0] if known else None
            said = "" if process is None else self.job.text_of(process)
        elif self.params.avals:
            taken = ", whose results all processes take,"
        # Without a text, the caller may not be what failed: any device may have.
        sure = process is not None and (said or self.origins is not None)
        where = f"process {process}" if sure else "another process"
        if said:  # only the calling process's text is sent along
            where = f"{where}: {failures.without_number(said)}"
        error = errors.HostcallError(
            f"hostcall: `{self.name}`{taken} failed in {where}", code="hc-failed"
        )
        text = failures.numbered(error, failures.summary(error))
        self.job.failed(text, tell=False)
        return text

    def on_view_left(self, step: int, error: BaseException | None) -> bool:
        """Releases what may hold a view of lent memory by accident.

        The engine calls this with the steps 0, 1, ... as long as some view is held.
        Returns whether there is another step.
        """
        more = False
        with failures.beside_a_failure("releasing what holds its views"):
            more = frames.release_views(step, error)
        return more

    def on_escape(
        self, held: list[tuple[int, bool]], error: BaseException | None
    ) -> None:
        """Raises for views of lent memory that outlive their call."""
        names = ", ".join(itertools.starmap(self._name_of, held))
        ended = "returned" if error is None else f"raised {type(error).__name__}"
        raise errors.EscapeError(
            f"hostcall: `{self.name}` kept a view of {names} after it {ended}"
            f" {self._how_kept()}"
        ) from error

    def _how_kept(self) -> str:
        """The end of the message about a view that is kept: what it is, what to do."""
        return (
            "(itself, a slice, a memoryview, a tensor made from it). With"
            f" lend={self.params.options.lend!r} the memory is XLA's, which reuses it"
            " now: keep a copy (x.copy()), or drop lend="
        )

    def _name_of(self, number: int, is_result: bool) -> str:
        """How messages call the memory of an argument or a result."""
        if is_result:
            path = str(self.callback.results.paths()[number])
            return path.replace("result", "out", 1)
        return str(self.callback.template.paths()[number])

    def on_unwritten(self, _: object, number: int) -> None:
        aval = self.params.avals[number]
        raise errors.UnwrittenError(
            f"hostcall: `{self.name}` returned None, but did not write all of"
            f" {self._name_of(number, True)}"
            f" ({aval.dtype}{list(aval.shape)}). With lend='out' write"
            " out[...] = value, or return the value"
        )


# --- Numbers for the places of calls --------------------------------------------------
#
# Events of the engine hold the number of a place instead of its name, since the plan
# that made them may be gone when they are read. Equal places get one number, so there
# are as many as lines of the program that write calls, and some tags, however many
# functions they make.


class Named(NamedTuple):
    """What a number stands for."""

    name: str
    place: Place


class _Places:
    """Never shrinks. Number 0 stands for no place.

    No lock: each step below is a single one, with the GIL and without.
    """

    def __init__(self) -> None:
        self._numbers: dict[Named, int] = {}
        self._named: dict[int, Named] = {}
        self._next = itertools.count(1)

    def number_of(self, callback: Callback) -> int:
        """The number of a call's place."""
        key = Named(callback.lasting_tag or callback.name, callback.place)
        found = self._numbers.get(key)
        if found is not None:
            return found
        # What a number stands for is known before anybody gets it. If two threads come
        # with one place, the number of the second is left out.
        number = next(self._next)
        self._named[number] = key
        # A tag may have lone surrogates, which the engine's UTF-8 can't hold.
        texts = (key.name, str(key.place))
        shown = [t.encode(errors="backslashreplace").decode() for t in texts]
        _native.name_place(number, *shown)
        return self._numbers.setdefault(key, number)

    def named(self, number: int) -> Named | None:
        """What a number stands for, or None if there is no such number."""
        return self._named.get(number)


places = _Places()
