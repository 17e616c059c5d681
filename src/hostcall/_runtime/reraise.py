"""`hc.reraise`: what this thread's programs failed with, raised as what it was.

A block knows the programs that its thread dispatched in it by what each leaves behind:
a result, or a token where it has an effect. A failed program fails all of these. On
JAX's fast path, which runs no Python, a hook of JAX's own hands the results over
(`_jax.POST_HOOK`); elsewhere JAX dispatches in Python (`_jax.tell_of_dispatches`).
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax

from hostcall import _jax, _native
from hostcall._core import failures


class reraise(contextlib.ContextDecorator):
    """Context manager and decorator: the callback's own exception comes out.

    A program whose callback raised fails with `jax.errors.JaxRuntimeError`, since
    XLA carries only text. Within `reraise` the object that the callback raised is
    raised in its place, with the traceback into the callback, and the
    JaxRuntimeError as its `__context__`.

    Leaving without an error waits for the programs that this thread has dispatched in
    the block, so that one that was only dispatched inside fails here and not later. It
    raises what those failed with and nobody has been told: not what was handled inside
    the block, nor another thread's failures, nor those of programs that callbacks
    dispatched and handled. It does not wait for the program around it where it is used
    inside a callback.

    Some failures are nobody's to know, and are then as they were without the block:
    of a program that has no effect and whose results, larger than 64 MB, nobody keeps;
    of one that wrote its results to `Ref`s only; of arrays that were deleted; and what
    runs on JAX's fast path while `jax.debug_nans` is set inside the block.

    Raises:
        BaseException: what the callback raised; of several, what JAX reported, else
            that of the program that was dispatched first. The JaxRuntimeError itself,
            if more than 32 callbacks have failed since.

    Cost: one wait when the block is left. Inside it 1 to 2 us a dispatch, and the
    smallest result of each program is kept until it is ready (64 MB at most).
    """

    def __enter__(self) -> reraise:
        _open_block()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        report = _close_block(waits=error is None)
        if report is not None:
            _raise_behind(report)
        if isinstance(error, _jax.REPORTS):
            found = failures.original(error)
            if found is not None:
                try:
                    raise found
                finally:  # else found -> traceback -> this frame -> found
                    del found


def _raise_behind(report: Exception) -> None:
    """Raises what is behind a report, with the report as its context."""
    found = failures.original(report)
    try:
        raise report
    except _jax.REPORTS:
        if found is None:  # too many have failed since
            raise
        raise found  # noqa: B904
    finally:
        del found, report


# --- Blocks --------------------------------------------------------------------------

# Results that a block keeps until they are ready, in bytes.
_KEPT_BYTES = 64e6

# So many programs that are not known to be ready, and it waits for the oldest.
_PENDING_AT_MOST = 1024


class _Block:
    """What one thread has dispatched since it entered a `reraise`.

    Attributes:
        outer: the block around it, in the same context.
        closed: it has been left.
    """

    def __init__(self, outer: _Block | None) -> None:
        self.outer = outer
        self.closed = False
        # A thread may run in a context that was copied inside the block, and a
        # callback on this thread dispatches for itself.
        self._thread, self._depth = threading.get_ident(), _depth()
        self._failures = failures.failures_so_far()
        self._pending: list[_Sign] = []  # of programs that may still fail, in order
        self._failed: list[_Sign] = []  # of programs that did
        self._kept = 0.0
        self._scan_above = 32

    def is_here(self) -> bool:
        return self._thread == threading.get_ident() and self._depth == _depth()

    def add(self, results: Sequence[Any], tokens: Sequence[Any]) -> None:
        """A program has been dispatched, with these results and tokens."""
        result, kept = _cheapest(results, _KEPT_BYTES - self._kept)
        if result is not None or tokens:
            # It may have failed by now, but not before the last look.
            self._pending.append(_Sign(result, kept, tokens, self._failures))
            self._kept += kept
        self._failures = failures.failures_so_far()
        while self._pending and self._pending[0].is_ready():
            self._settle(self._pending.pop(0))
        if len(self._pending) > self._scan_above:
            self._scan()

    def _scan(self) -> None:
        """Settles what is ready behind a program that takes long."""
        pending, self._pending = self._pending, []
        while pending:
            sign = pending.pop(0)
            if sign.is_ready() or len(pending) > _PENDING_AT_MOST:
                self._settle(sign)
            else:
                self._pending.append(sign)
        self._scan_above = max(32, 2 * len(self._pending))

    def _settle(self, sign: _Sign) -> None:
        self._kept -= sign.kept
        # A callback's failure is counted before the program ends.
        if sign.is_ready() and failures.failures_so_far() == sign.failures:
            return
        if sign.has_failed():
            self._failed.append(sign)

    def end(self, waits: bool) -> Exception | None:
        """Looks at all, or at what is ready. With `waits` gives the first failure that
        nobody has been told of.
        """
        pending, self._pending = self._pending, []
        for sign in pending:
            if waits or sign.is_ready():
                self._settle(sign)
            else:
                self._pending.append(sign)
        first: Exception | None = None
        failed, self._failed = self._failed, []
        for sign in failed:
            number = failures.number_in(sign.report)
            if not failures.is_told(number):
                if first is not None or not waits:
                    self._failed.append(sign)
                    continue
                first = sign.report
                failures.tell(number)
            # An ordered program that came next has failed with this one's token.
            _jax.forget_tokens(sign.tokens)
        return first

    def leave_to(self, outer: _Block) -> None:
        """What is not settled is the next block's."""
        outer._failed += self._failed
        outer._pending += self._pending
        outer._kept += self._kept


class _Sign:
    """What a program leaves behind, which fails if the program does.

    Attributes:
        tokens: of its effects.
        failures: how many callbacks had failed before it was dispatched.
        report: what JAX raises for it, once that is known.
    """

    __slots__ = ("_result", "failures", "kept", "report", "tokens")

    def __init__(
        self, result: Any, kept: int, tokens: Sequence[Any], failures: int
    ) -> None:
        """`kept`: bytes of the result to keep alive; with 0 it is held weakly."""
        held = lambda: result  # noqa: E731
        self._result = held if kept or result is None else weakref.ref(result)
        self.kept, self.tokens, self.failures = kept, tokens, failures
        self.report = Exception()

    def is_ready(self) -> bool:
        """Whether there is nothing to wait for, as far as that is known."""
        result = self._result()
        try:
            if result is not None:
                return bool(result.is_ready())
        except RuntimeError:  # deleted, or given to a program, which fails with it
            pass
        return not self.tokens or any(map(_jax.is_token_ready, self.tokens))

    def has_failed(self) -> bool:
        """Waits for it. Whether it failed for a callback of hostcall's."""
        for left in (self._result(), *self.tokens):
            report = None if left is None else failures.failure_of(left)
            if report is not None and failures.number_in(report):
                self.report = report
                return True
        return False


def _cheapest(results: Sequence[Any], room: float) -> tuple[Any, int]:
    """The smallest result of a program, and how many bytes of it are to be kept."""
    if len(results) > 8:  # a few will do
        results = [*results[:4], *results[-4:]]
    arrays = [_jax.data_of(x) for x in results if isinstance(x, jax.Array)]
    smallest = min(arrays, key=_size, default=None)
    if smallest is None:
        return None, 0
    size = _size(smallest)
    return smallest, size if size <= room else 0


def _size(array: Any) -> int:
    return int(array.nbytes) or 1


# --- Which block a dispatch belongs to -----------------------------------------------
#
# Tasks of one thread (asyncio) interleave, so the block lies in a context variable;
# JAX's hook is the thread's, and is there while the thread has any block open.

_current: contextvars.ContextVar[_Block | None] = contextvars.ContextVar(
    "hostcall.reraise", default=None
)


class _Thread(threading.local):
    open = 0
    hook_before: Any = None


_thread = _Thread()


def _open_block() -> None:
    _jax.tell_of_dispatches(_dispatched)
    _current.set(_Block(_first_open(_current.get())))
    _thread.open += 1
    if _thread.open == 1:
        _thread.hook_before = _jax.POST_HOOK.swap_local(_dispatched_fast)


def _close_block(waits: bool) -> Exception | None:
    """Leaves the innermost block; with `waits` gives a failure that is to be raised.

    Blocks may be left out of turn, by tasks or generators that interleave.
    """
    block = _first_open(_current.get())
    if block is None or not block.is_here():
        return None  # a generator was left in another context than it was entered in
    block.closed = True
    outer = _first_open(block.outer)
    _current.set(outer)
    _thread.open -= 1
    if _thread.open == 0:
        # Unless jax.debug_nans has replaced it.
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
    """How many callbacks of hostcall's the calling thread is inside."""
    if _native.current() is None:
        return 0
    here = threading.get_ident()
    return sum(thread == here for _, thread, _, _ in _native.active())


def _dispatched(results: Sequence[Any], tokens: Sequence[Any]) -> None:
    block = _first_open(_current.get())
    if block is not None and block.is_here():
        block.add(results, tokens)


def _dispatched_fast(function: Any, args: Any, kwargs: Any, results: Any) -> None:
    """JAX calls this after each dispatch on its fast path."""
    if isinstance(results, jax.Array):
        _dispatched((results,), ())
    else:
        _dispatched(jax.tree.leaves(results), ())
    before = _thread.hook_before
    if before is None or before is _jax.UNSET:
        before = _jax.POST_HOOK.get_global()
    if before is not None:
        before(function, args, kwargs, results)
