"""The exceptions that hostcall raises, as a tree.

    HostcallError
    ├── SpecError(ValueError)            the call is written wrong; found at trace time
    ├── BatchingError(ValueError)        vmap can't batch the call
    ├── DerivativeError(ValueError)      a derivative of a call without a rule for it
    ├── ResultError(ValueError)          the function's result differs from `result=`
    ├── EscapeError(RuntimeError)        the function kept a view of lent memory
    ├── UnwrittenError(RuntimeError)     the function did not write a lent result
    ├── CallTimeoutError(TimeoutError)   the function took longer than `timeout=`
    ├── DeadlockError(RuntimeError)      a callback would wait for its own program
    └── ExportError(NotImplementedError) a program is exported without its functions

The first three and the last are raised to the caller. The others, and any exception of
the user's function, fail the program that made the call. XLA carries only the text of
an error, so the text ends with a number under which the exception object is kept
(_core/failures.py).
"""

from __future__ import annotations


class HostcallError(Exception):
    """The base class of all errors that hostcall itself raises."""


class SpecError(HostcallError, ValueError):
    """The `result`, options or arguments of a call are invalid."""


class BatchingError(HostcallError, ValueError):
    """`vmap` can't batch a call with its options, or its own batching rule is wrong."""


class DerivativeError(HostcallError, ValueError):
    """A call was differentiated or transposed, and has no rule for that."""


class ResultError(HostcallError, ValueError):
    """The function returned something that differs from what `result` declares."""


class EscapeError(HostcallError, RuntimeError):
    """The function kept a reference to a view of lent memory after the call."""


class UnwrittenError(HostcallError, RuntimeError):
    """The function returned without writing all of its lent `out`."""


class CallTimeoutError(HostcallError, TimeoutError):
    """The function took longer than its `timeout=`."""


class DeadlockError(HostcallError, RuntimeError):
    """A callback started a program that would wait for the program that called it."""


class ExportError(HostcallError, NotImplementedError):
    """A program was exported or serialized, and its host functions can't go with it."""


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
