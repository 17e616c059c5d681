"""`hc.reraise`: raises the callback's own exception in place of a JaxRuntimeError.

The idea: JAX dispatches programs asynchronously, so a block must know which programs it
has to wait for. It learns of each dispatch, and keeps one *sign* of the program
(dispatch_sign.py): its smallest result, or the tokens of its effects. All of these fail
if the program fails.

How a block learns of a dispatch:

  * on JAX's fast path, which is C++, from a hook of JAX's (`_jax.POST_HOOK`);
  * elsewhere, from the wrapped dispatch in Python (`_jax.report_dispatches_to`).

What happens to a sign:

  1. `add` puts it into `_pending`, with the number of callbacks that had failed so far.
  2. Once the program has ended, `_settle` drops the sign. If any callback has failed
     since step 1, it first looks at the sign, and moves a failed one to `_failed`.
  3. `end` settles the rest, and returns the first failure that was not reported, which
     it asks the ledger (_core/failures.py). Signs that are left over go to the block
     around this one.

A program without results and tokens makes no host call with an effect, and gives no
sign: one that makes such a call has tokens or a hidden result (_jax/signs.py).

All of a block's state belongs to one thread, so there is no lock.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import re
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax

from hostcall import _jax, _native
from hostcall._core import failures, mistakes
from hostcall._runtime.dispatch_sign import Sign, cheapest, has_ended

# XLA's texts begin with the code of a status. A user's ValueError seldom does.
_OF_XLA = re.compile(r"[A-Z]+(_[A-Z]+)*: ")


class reraise(contextlib.ContextDecorator):
    """Context manager and decorator that raises the callback's own exception.

    If a callback raises, JAX raises `jax.errors.JaxRuntimeError`, since XLA carries
    only text. Inside a `reraise` block the exception object that the callback raised
    replaces it, with its traceback into the callback, and with the JaxRuntimeError as
    its `__context__`.

    A block that ends without an error waits for the programs that its thread has
    dispatched in it, so that their failures are raised here and not later. It raises
    only failures that the user has not seen: no failure that was handled inside the
    block, none of another thread, and none of a program that a callback dispatched and
    handled. A block inside a callback does not wait for the program that made the call.

    A block can't notice some failures; they appear where they would without the block.
    These are failures of a program that has no effect and whose results are larger than
    64 MB and not kept by anyone; of a program without effects that writes only to
    `Ref`s; of arrays that were deleted; and of programs on JAX's fast path after
    `jax.debug_nans` was set inside the block. What a thread has dispatched in its block
    and leaves by an error is raised by its next `hc.barrier()`; if the thread ends, by
    that of the main thread.

    Raises:
        BaseException: the callback's exception. If several callbacks failed, the one
            that JAX reported, else the one of the program that was dispatched first.
            The JaxRuntimeError itself if too many callbacks have failed since: more
            than 1,024, or more than 32 when the failure is older than a minute.

    Cost: one wait at the end of the block. Inside it 1 to 2 us for each dispatch, and
    the smallest result of each program is kept until it is ready (64 MB at most).
    """

    def __enter__(self) -> reraise:
        mistakes.warn_if_traced(
            "a block of hc.reraise() begins",
            "It can't raise what the program's callbacks raise. Put it around the call"
            " of the program",
        )
        _open_block()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        report = _close_block(waits=error is None)
        reported = report or error
        original = None
        if isinstance(reported, _jax.REPORTS):
            original = failures.original(reported)
            failures.mark_reported(failures.number_in(reported))
            _, _, text = failures.summary(reported).partition(": ")
            # Without the original the user gets JAX's report, and a note that says why.
            if original is None and _OF_XLA.match(text):
                failures.explain(reported)
        try:
            # JAX's report is raised first, so that Python makes it the `__context__` of
            # the callback's exception. An `error` is being handled already.
            if report is not None:
                raise report
            if original is not None:
                raise original
        except _jax.REPORTS as raised:
            # A callback's own exception may be of these types too.
            if original is None or raised is original:
                raise
            raise original  # noqa: B904
        finally:  # breaks the cycle original -> traceback -> this frame -> original
            del original, reported, report


# --- Blocks --------------------------------------------------------------------------

# Results that a block keeps until they are ready, in bytes.
_KEPT_BYTES = 64e6

# With this many programs that may still run, the block waits for the oldest.
_PENDING_AT_MOST = 1024

# With more signs than this, those behind a program that still runs are looked at too.
_MANY_SIGNS = 32


class _Block:
    """The programs that one thread has dispatched since it entered a `reraise`.

    The lists hold what `end` has to settle: `_pending` the signs of programs that may
    still fail, in the order of dispatch, and `_failed` JAX's reports of programs that
    have failed, each with the tokens of its program.

    Attributes:
        outer: the block around it, in the same context.
        closed: whether it has been left.
    """

    def __init__(self, outer: _Block | None) -> None:
        self.outer = outer
        self.closed = False
        # The context variable alone does not say whether a dispatch is in the block: a
        # thread may run in a copy of this context, and a callback on this thread
        # dispatches programs of its own. So thread and depth are compared too.
        self._thread = threading.get_ident()
        self._depth = _depth()
        # How many callbacks had failed when the block began, and at the last look.
        self._failures_at_start = failures.failures_so_far()
        self._failures_seen = self._failures_at_start
        self._some_sign_was_gone = False
        self._pending: list[Sign] = []
        self._failed: list[tuple[BaseException, Sequence[Any]]] = []
        self._kept_bytes = 0.0
        self._scan_above = _MANY_SIGNS

    def is_here(self) -> bool:
        return self._thread == threading.get_ident() and self._depth == _depth()

    def add(self, results: Sequence[Any], tokens: Sequence[Any]) -> None:
        """A program has been dispatched, with these results and tokens."""
        if results and self.has_succeeded(results[0]):
            return
        room = _KEPT_BYTES - self._kept_bytes
        result, kept_bytes = cheapest(results, room)
        if result is not None or tokens:
            # The count of failures is that of the last look, before this dispatch: a
            # callback of this program may have failed by now.
            sign = Sign(result, kept_bytes, tokens, self._failures_seen)
            self._pending.append(sign)
            self._kept_bytes += kept_bytes
        self._failures_seen = failures.failures_so_far()
        # Programs mostly end in the order in which they were dispatched, so a look at
        # the oldest is enough.
        while self._pending and self._pending[0].is_ready():
            self._settle(self._pending.pop(0))
        if len(self._pending) > self._scan_above:  # some may have ended behind an older
            self._settle_all(_PENDING_AT_MOST)
            # Twice as many as stay: the looks cost a constant for each dispatch.
            self._scan_above = max(_MANY_SIGNS, 2 * len(self._pending))

    def has_succeeded(self, result: Any) -> bool:
        """Whether a program that was just dispatched, with this result, needs no sign:
        it has ended, and no callback has failed since the last look. Small programs run
        while JAX dispatches them, and a sign would cost as much as they do.
        """
        # What was dispatched before may still fail, and a failure that is counted
        # below could be of that.
        if self._pending or self._some_sign_was_gone:
            return False
        if not _jax.are_arrays((result,)) or not has_ended(result):
            return False
        # A failure is counted before its program ends, so it is looked at last.
        return failures.failures_so_far() == self._failures_seen

    def _settle_all(self, most_pending: float) -> None:
        """Settles programs that have ended, and waits until so few have not."""
        pending = self._pending
        self._pending = []
        for i, sign in enumerate(pending):
            not_looked_at = len(pending) - i
            if sign.is_ready() or not_looked_at > most_pending:
                self._settle(sign)
            else:
                self._pending.append(sign)

    def _settle(self, sign: Sign) -> None:
        """Drops a sign. Looks at it first if its program may have failed."""
        self._kept_bytes -= sign.kept_bytes
        if sign.is_gone():
            self._some_sign_was_gone = True
        # A failure is counted before its program ends. So if the count has not changed
        # and the program has ended, it did not fail, and need not be looked at. But a
        # result that was donated tells nothing: the program that took it fails instead,
        # which may have been dispatched after the failure was counted.
        failures_before = sign.failures_before
        if self._some_sign_was_gone:
            failures_before = self._failures_at_start
        if sign.is_ready() and failures.failures_so_far() == failures_before:
            return
        if (report := sign.report()) is not None:
            self._failed.append((report, sign.tokens))

    def end(self, waits: bool) -> BaseException | None:
        """Settles the pending programs; without `waits` only those that have ended.

        With `waits`, returns the first failure that was not reported so far.
        """
        self._settle_all(0 if waits else math.inf)
        first: BaseException | None = None
        failed = self._failed
        self._failed = []
        for report, tokens in failed:
            number = failures.number_in(report)
            if not failures.is_reported(number):
                if first is not None or not waits:
                    # It stays unreported, for the block around this one.
                    self._failed.append((report, tokens))
                    continue
                failures.mark_reported(number)
                first = report
            # An ordered program that came next has failed with this one's token, and
            # has its number. Its tokens are forgotten too; otherwise JAX's next wait
            # for effects would raise the same failure again.
            _jax.forget_tokens(tokens)
        return first

    def leave_to(self, outer: _Block) -> None:
        """Hands what is not settled to the block around this one."""
        assert self.closed, "a block that is open may still add programs"
        outer._failed += self._failed
        outer._pending += self._pending
        outer._kept_bytes += self._kept_bytes


# --- Which block a dispatch belongs to -----------------------------------------------
#
# The tasks of an asyncio loop interleave on one thread, so the current block is a
# context variable. JAX's hook belongs to the thread, and is installed while the thread
# has any block open.

_current: contextvars.ContextVar[_Block | None] = contextvars.ContextVar(
    "hostcall.reraise", default=None
)


class _Thread(threading.local):
    """
    Attributes:
        open: how many blocks the thread has open, in all contexts.
        hook_before: the thread's hook of JAX's before ours took its place.
    """

    open = 0
    hook_before: Any = None


_thread = _Thread()


def _open_block() -> None:
    _jax.install(_jax.When.CALLS)
    _jax.need(_jax.Part.FAST)  # by it a block hears of the programs
    _jax.report_dispatches_to(_dispatched)
    outer = _first_open(_current.get())
    _current.set(_Block(outer))
    _thread.open += 1
    if _thread.open == 1:
        _thread.hook_before = _jax.POST_HOOK.swap_local(_dispatched_fast)


def _close_block(waits: bool) -> BaseException | None:
    """Leaves the innermost block; with `waits` returns the failure to raise, if any.

    Tasks or generators that interleave may leave blocks out of order.
    """
    block = _first_open(_current.get())
    if block is None or not block.is_here():
        return None  # a generator left the block in another context than it entered it
    block.closed = True
    outer = _first_open(block.outer)
    _current.set(outer)
    assert _thread.open > 0, "this thread has opened the block"
    _thread.open -= 1
    if _thread.open == 0:
        # Put the old hook back, unless jax.debug_nans has replaced ours since.
        if _jax.POST_HOOK.get_local() is _dispatched_fast:
            _jax.POST_HOOK.set_local(_thread.hook_before)
        _thread.hook_before = None
    report = block.end(waits)
    if outer is not None and outer.is_here():
        block.leave_to(outer)
    return report


def _first_open(block: _Block | None) -> _Block | None:
    while block is not None and block.closed:
        block = block.outer
    return block


def _depth() -> int:
    """How many of hostcall's callbacks the calling thread is inside."""
    if _native.current() is None:  # as nearly always: a list of all calls costs more
        return 0
    this_thread = threading.get_ident()
    return sum(thread == this_thread for _, thread, _, _ in _native.active())


def _dispatched(results: Sequence[Any], tokens: Sequence[Any]) -> None:
    block = _first_open(_current.get())
    if block is not None and block.is_here():
        block.add(results, tokens)


def _dispatched_fast(function: Any, args: Any, kwargs: Any, results: Any) -> None:
    """JAX calls this after each dispatch on its fast path.

    Programs there have no tokens: those with effects go through Python.
    """
    block = _first_open(_current.get())
    if block is not None and block.is_here():
        # For most programs their first result says enough, and a walk over all of them
        # takes longer than all else here.
        first = results
        while type(first) in (tuple, list) and first:
            first = first[0]
        if not block.has_succeeded(first):
            block.add(jax.tree.leaves(results), ())
    # A hook that somebody else has set, for this thread or for all, still runs.
    hook = _thread.hook_before
    if hook is None or hook is _jax.UNSET:
        hook = _jax.POST_HOOK.get_global()
    if hook is not None:
        hook(function, args, kwargs, results)
