"""`hostcall.errors`: the exceptions that hostcall raises.

    HostcallError
    ├── SpecError(ValueError)          the call is written wrong: found at trace time
    ├── BatchingError(ValueError)      vmap was not told how
    ├── DerivativeError(ValueError)    no rule gives this derivative
    ├── ExportError(NotImplementedError)  the host functions can't go with the program
    │
    ├── ResultError(ValueError)        the function returned something else
    ├── EscapeError(RuntimeError)      the function kept a lent view
    ├── UnwrittenError(RuntimeError)   the function did not write its lent `out`
    ├── CallTimeoutError(TimeoutError) the function took longer than `timeout=`
    └── DeadlockError(RuntimeError)    a callback would wait for its own program

The first four are raised where the call is written or traced. The others fail the
program that is running, as whatever the function raises does: JAX raises a
JaxRuntimeError with their text, `hostcall.reraise()` and `hostcall.last_error()` give
the exception itself.
"""

from hostcall._core.errors import (
    BatchingError,
    CallTimeoutError,
    DeadlockError,
    DerivativeError,
    EscapeError,
    ExportError,
    HostcallError,
    ResultError,
    SpecError,
    UnwrittenError,
)

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
