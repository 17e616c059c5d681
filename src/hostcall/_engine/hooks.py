"""The Python hooks that the engine calls for a call outside its fast path."""

from __future__ import annotations

import itertools
import logging
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hostcall._core import coerce, dispatched, errors, failures, frames
from hostcall._core.callback import CallSpec
from hostcall._engine.placement import Placement

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


class CallHooks:
    """What the engine calls back about one call of one program.

    It does not change once it is made: what it knows of the call is in the equation,
    and where the call is made is in the placement.
    """

    # `equation` is an `Equation`. Its file imports this one: the class of an equation
    # names that of its hooks.
    def __init__(self, equation: Any, placement: Placement) -> None:
        self.equation = equation
        self.placement = placement
        self.callback: CallSpec = equation.callback
        self.name = self.callback.name
        self.place = self.callback.place

    def __repr__(self) -> str:
        return f"<{self.equation.word} of {self.name} at {self.place}>"

    # --- Hooks ---------------------------------------------------------------------

    def flatten(self, value: Any) -> list[Any]:
        """The leaves of what the function returned, which must be such a tree."""
        results = self.callback.results
        return coerce.take_apart(value, results.treedef, self.name, results.avals)

    def coerce(self, number: int, value: Any) -> np.ndarray:
        """A result of one row as an array."""
        return self.shaped(number, value, self.equation.avals[number].shape)

    def shaped(self, number: int, value: Any, shape: tuple[int, ...]) -> np.ndarray:
        """A result of several rows as an array of another shape."""
        return coerce.coerce(
            value,
            self.equation.avals[number].dtype,
            shape,
            lambda: self.result(number),
            lambda got: self.shape_hint(number, shape, got),
            self.callback.results.keys[number],
        )

    def result(self, number: int) -> str:
        """What messages call a result of the function."""
        words, _ = self._words_of_rule(number)
        return words or f"{self.callback.results.paths()[number]} of `{self.name}`"

    def shape_hint(
        self, number: int, want: tuple[int, ...], got: tuple[int, ...]
    ) -> str:
        """What may be wrong with the shape of a result; "" if nothing special."""
        equation = self.equation
        levels = equation.levels
        if levels and got == want[levels:]:
            rows = math.prod(want[:levels])
            return (
                f'With vmap_method="{equation.method}" the function gets all {rows}'
                " rows at once, and must return one result for each, along a new axis"
                " in front"
            )
        # One row with an axis too many is no batch.
        is_batch = got[1:] == want and got[0] != 1
        if equation.grid and is_batch:
            return "Does the function return the whole batch where one row is wanted?"
        _, shape_words = self._words_of_rule(number)
        return shape_words

    def _words_of_rule(self, number: int) -> tuple[str, str]:
        """(what a result is, which shape it has) if the function is a rule of
        hostcall's that says so; else empty texts.
        """
        return self.callback.facts.host_code.result_words(number)

    def on_error(self, error: BaseException, row: tuple[int, ...]) -> str:
        """The text with which the program fails; `row` is () if no row has an index."""
        hint = self.hint(error)
        text = failures.text_for_xla(error, self.name, self.place, row, hint)
        placement = self.placement
        # The sign of a program over one device may be a result that the user deletes or
        # donates. A wait that finds it gone looks for the failure among those that are
        # noted here (_core/dispatched.py). Other programs have a token, or a sign that
        # nobody else has.
        on_one_device = placement.program_devices is None and placement.mesh is None
        # A Ctrl-C is raised in the main thread anyway.
        was_stopped = issubclass(type(error), KeyboardInterrupt)
        if self.equation.effect is not None and on_one_device and not was_stopped:
            dispatched.call_failed(text)
        if placement.job is not None:
            with failures.beside_a_failure("telling other processes of it"):
                self._tell_job(placement.job, text)
        return text

    def _tell_job(self, job: Failures, text: str) -> None:
        # A failure that the program tells all processes is noted when they learn it:
        # until then this process's other devices still make their calls.
        if not self.placement.returns_outcome:
            job.failed(text)
        if self.placement.origins is not None:
            job.keep_text(text)

    def hint(self, error: BaseException) -> str:
        """What an option of the call may have to do with an exception of its function,
        also in a note on the error; "" if nothing.
        """
        text = ""
        if issubclass(type(error), (TypeError, ValueError)):
            summary = failures.summary(error)
            text = self._hint_on_lent(summary) or self._hint_on_rows(summary)
        if text:
            failures.add_note(error, f"hostcall: {text}")
        return text

    def _hint_on_lent(self, summary: str) -> str:
        """Why a lent argument can't be written to."""
        lend = self.equation.options.lend
        if not lend or "read-only" not in summary:
            return ""
        return (
            f"If it wrote to an argument: `{self.name}` has lend={lend!r}, so its"
            " arguments are views of memory that the program still reads. Write to a"
            " copy (x = x.copy()), or leave out lend="
        )

    def _hint_on_rows(self, summary: str) -> str:
        """Why an argument is no scalar, in a function that gets a whole batch."""
        speaks_of_scalars = any(words in summary for words in _NO_SCALAR)
        if not self.equation.levels or not speaks_of_scalars:
            return ""
        return (
            "If it takes scalars: under vmap with"
            f" vmap_method={self.equation.method!r} `{self.name}` gets all rows at"
            " once, along a new axis in front. Write it for arrays, or use"
            ' vmap_method="sequential", which calls it for each row'
        )

    def eager_error(self, error: Exception) -> Exception:
        """Keeps an exception of the function, and returns what an eager call raises:
        the exception itself.
        """
        self.hint(error)
        failures.store(error, handed_over=True)
        return error

    def error_of_programs(self, error: Exception) -> Exception:
        """The same, for a call that raises what a program would raise."""
        raised: Exception = jax.errors.JaxRuntimeError(self.on_error(error, ()))
        # It is the cause of what is raised: the user may look at its frames.
        failures.hand_over(error)
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
            self.placement.devices.get(ordinal, f"device {ordinal}"),
            text,
        )

    def on_verdict(self, outcome: str, is_from_here: bool) -> str:
        """The error with which the program fails on a device of this process.

        Args:
            outcome: the error of this process, or what the failed one sent along.
            is_from_here: whether it is that of this process.
        """
        job = self.placement.job
        assert job is not None, "only programs over several processes have an outcome"
        if is_from_here:
            job.failed(outcome, announces=False)
            return outcome
        taken = ""
        if self.placement.origins is None:
            if self.equation.avals:
                taken = ", whose results all processes take,"
            sent_text = outcome
            # Only the calling process's text is sent along. Without one, the failed
            # device may be any other.
            process = self.placement.calling_process if sent_text else None
        else:
            process = self._origin(self.placement.origins, int(outcome))
            sent_text = "" if process is None else job.text_of(process)
        failed = "another process" if process is None else f"process {process}"
        if sent_text:
            failed = f"{failed}: {failures.without_number(sent_text)}"
        error = errors.HostcallError(
            f"hostcall: `{self.name}`{taken} failed in {failed}", code="hc-failed"
        )
        text = failures.numbered(error, failures.summary(error))
        job.failed(text, announces=False)
        return text

    @staticmethod
    def _origin(origins: tuple[int, ...], number: int) -> int | None:
        """The process of the device that failed; None if no process is known.

        `number` is the device's, as the outcome has it: 0 says that none failed, so
        they count from 1 (_primitives/outcome.py).
        """
        if not origins:
            return None
        assert 0 < number <= len(origins), "each device of the program has a process"
        return origins[number - 1]

    def on_view_left(self, step: int, error: BaseException | None) -> bool:
        """Releases what may hold a view of lent memory by accident.

        The engine calls this with the steps 0, 1, ... as long as some view is held.
        Returns whether there is another step.
        """
        has_next = False
        with failures.beside_a_failure("releasing what holds its views"):
            has_next = frames.release_views(step, error)
        return has_next

    def on_escape(
        self, views: list[tuple[int, bool]], error: BaseException | None
    ) -> None:
        """Raises for views of lent memory that outlive their call."""
        names = ", ".join(itertools.starmap(self._name_of, views))
        ended = "returned" if error is None else f"raised {type(error).__name__}"
        raise errors.EscapeError(
            f"hostcall: `{self.name}` kept a view of {names} after it {ended}"
            f" {self._how_kept()}"
        ) from error

    def _how_kept(self) -> str:
        """The end of the message about a view that is kept: what it is, what to do."""
        return (
            "(itself, a slice, a memoryview, a tensor made from it). With"
            f" lend={self.equation.options.lend!r} the memory is XLA's, which reuses it"
            " now: keep a copy (x.copy()), or drop lend="
        )

    def _name_of(self, number: int, is_result: bool) -> str:
        """How messages call the memory of an argument or a result."""
        if is_result:
            path = str(self.callback.results.paths()[number])
            return path.replace("result", "out", 1)
        return str(self.callback.template.paths()[number])

    def on_unwritten(self, number: int) -> None:
        aval = self.equation.avals[number]
        raise errors.UnwrittenError(
            f"hostcall: `{self.name}` returned None, but did not write all of"
            f" {self._name_of(number, True)}"
            f" ({aval.dtype}{list(aval.shape)}). With lend='out' write"
            " out[...] = value, or return the value"
        )
