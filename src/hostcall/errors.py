"""`hostcall.errors`: the exceptions that hostcall raises.

    HostcallError
    ├── SpecError(ValueError)          the arguments of a call or tap are invalid
    ├── BatchingError(ValueError)      vmap can't batch the call as it is written
    ├── DerivativeError(ValueError)    no rule gives this derivative
    ├── ExportError(NotImplementedError)  the program's host functions can't be exported
    ├── LoadError(ValueError)          a file that hc.load reads is damaged or foreign
    ├── RegistryError(LookupError)     a name of hc.register is missing, or taken
    ├── PackageError(ModuleNotFoundError)  an optional package is not installed
    │
    ├── ResultError(ValueError)        the function's result does not fit `result`
    ├── EscapeError(RuntimeError)      the function kept a view of lent memory
    ├── UnwrittenError(RuntimeError)   the function did not write all of its `out`
    ├── CallTimeoutError(TimeoutError) the function took longer than `timeout=`
    ├── DeadlockError(RuntimeError)    a callback would wait for its own program
    ├── FeedError(RuntimeError)        a feed can't give an item: none came in time, ...
    │   └── FeedEndError               its items have ended (on_end="raise")
    └── WatchError(RuntimeError)       a value that `hostcall.watch` checks is bad

`last_error` returns the exception that a callback raised last.

The first seven are raised when a call is written or traced, or a program is loaded. The
others fail the program that is running, like any exception of the function: JAX raises
a JaxRuntimeError with their text, and `hc.reraise()` and `hc.errors.last_error()` give
the exception itself. A WatchError needs neither: it is raised in place of the
JaxRuntimeError, with the values that were bad.

Each has a `code`, which ends its message: `python -m hostcall explain hc-escape` prints
what that code means. `python -m hostcall explain` lists all codes.
"""

from hostcall._core.errors import (
    BatchingError,
    CallTimeoutError,
    DeadlockError,
    DerivativeError,
    EscapeError,
    ExportError,
    FeedEndError,
    FeedError,
    HostcallError,
    LoadError,
    PackageError,
    RegistryError,
    ResultError,
    SpecError,
    UnwrittenError,
)
from hostcall._core.failures import last_error
from hostcall._core.watch_error import WatchError

__all__ = [
    "BatchingError",
    "CallTimeoutError",
    "DeadlockError",
    "DerivativeError",
    "EscapeError",
    "ExportError",
    "FeedEndError",
    "FeedError",
    "HostcallError",
    "LoadError",
    "PackageError",
    "RegistryError",
    "ResultError",
    "SpecError",
    "UnwrittenError",
    "WatchError",
    "last_error",
]
