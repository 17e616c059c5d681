"""Messages for rows that failed on an executor, outside of the user's function."""

from __future__ import annotations

import pickle
from concurrent import futures

from hostcall._core import failures
from hostcall._core.errors import SpecError
from hostcall._policies.executors import by_name
from hostcall._policies.layer import Executor

# What pickle raises: it has no one class for its errors.
_OF_PICKLE = (pickle.PicklingError, AttributeError, TypeError, ValueError)


def explain(
    error: BaseException, pool: Executor, name: str, which: str, sent_objects: object
) -> None:
    """Explains a row that failed outside the user's function.

    Adds a note to `error`, or raises a clearer error. Does nothing for other errors.

    Args:
        error: what the row failed with.
        pool: the executor.
        name: the name of the function.
        which: the row, in words.
        sent_objects: the function and arguments that were sent.
    """
    if issubclass(type(error), futures.BrokenExecutor):
        failures.add_note(
            error,
            f"hostcall: {which} of `{name}` failed because a worker of executor= has"
            " died. It may have crashed, run out of memory, been killed, or failed to"
            ' import the main module (with "spawn", a script needs'
            ' `if __name__ == "__main__":`). Make a new executor: this one is broken',
        )
    elif by_name(pool) and _may_be_of_pickle(error):
        # The error may be the function's own: only if they can't be pickled here
        # either, they are to blame.
        try:
            pickle.dumps(sent_objects)
        except Exception as reason:
            raise SpecError(
                f"hostcall: `{name}` or its arguments can't be sent to another process:"
                f" {reason}. This executor sends functions by name: define `{name}` at"
                " the top level of a module, or pass an executor that sends functions"
                " by value (Dask, loky) or uses threads",
                code="hc-pickle",
            ) from error
        if "pickle" in failures.summary(error):
            failures.add_note(
                error,
                f"hostcall: {which} failed. This executor pickles what `{name}`"
                " returns, and the residuals of a forward rule. Return objects that can"
                " be pickled, or declare array residuals with residuals=",
            )


def _may_be_of_pickle(error: BaseException) -> bool:
    # multiprocessing's error for a result that it can't pickle has a name of its own.
    is_of_result = type(error).__name__ == "MaybeEncodingError"
    return is_of_result or issubclass(type(error), _OF_PICKLE)
