"""The exceptions; `hostcall.errors` draws their tree and says who sees which."""

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


class FeedError(HostcallError, RuntimeError):
    """A feed can't give an item: none came in time, or the feed is closed."""


class FeedEndError(FeedError):
    """A program wanted an item after the last one of a feed with on_end="raise"."""


class ExportError(HostcallError, NotImplementedError):
    """A program was exported or serialized, and its host functions can't go with it."""


class LoadError(HostcallError, ValueError):
    """A file or text that describes a program can't be read, or does not fit."""


class RegistryError(HostcallError, LookupError):
    """A name is not registered here, or is taken (`hc.register`)."""


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
    "RegistryError",
    "ResultError",
    "SpecError",
    "UnwrittenError",
]

for _name in __all__:  # where users import them from, and what tracebacks show
    globals()[_name].__module__ = "hostcall.errors"
