"""What can go wrong, what it says, and where the callback's own exception is kept.

    HostcallError
    ├── SpecError(ValueError)          the call is written wrong: found at trace time
    ├── BatchingError(ValueError)      vmap was not told how
    ├── DerivativeError(ValueError)    a derivative that nobody has given
    ├── ResultError(ValueError)        the function returned something else
    ├── EscapeError(RuntimeError)      a lent view was kept
    ├── UnwrittenError(RuntimeError)   lent memory for results was not written
    ├── CallTimeoutError(TimeoutError) the function took longer than `timeout=`
    ├── DeadlockError(RuntimeError)    a callback would wait for its own program
    └── ExportError(NotImplementedError) a program whose functions can't go with it

The first three and the last are raised to the caller. The others, like whatever the
user's function raises, fail the program that called: XLA carries only text, so the
text ends with a number under which the exception object is kept.
"""

from __future__ import annotations


class HostcallError(Exception):
    """Base of all errors that hostcall itself raises."""


class SpecError(HostcallError, ValueError):
    """A call whose `result`, options or arguments can't mean anything."""


class BatchingError(HostcallError, ValueError):
    """`vmap` of a call that was not told how it batches."""


class DerivativeError(HostcallError, ValueError):
    """A derivative or transposition of a call without a rule for it."""


class ResultError(HostcallError, ValueError):
    """The function returned something else than its `result` says."""


class EscapeError(HostcallError, RuntimeError):
    """A view of lent memory is still referenced after the call."""


class UnwrittenError(HostcallError, RuntimeError):
    """The function returned without writing its lent `out`."""


class CallTimeoutError(HostcallError, TimeoutError):
    """The function took longer than its `timeout=`."""


class DeadlockError(HostcallError, RuntimeError):
    """A callback started a program that would wait for the one that calls it."""


class ExportError(HostcallError, NotImplementedError):
    """A program is exported or serialized whose host functions can't go with it."""


__all__ = [
    "BatchingError",
    "CallTimeoutError",
    "DeadlockError",
    "DerivativeError",
    "EscapeError",
    "ExportError",
    "HostcallError",
    "ResultError",
    "SpecError",
    "UnwrittenError",
]
