"""Options of a place and those of a function, in one dictionary."""

from __future__ import annotations

import numpy as np

import hostcall as hc
from hostcall._core.options import CALL, POLICY, TAP  # noqa: F401  (tests read them)

OF_FUNCTIONS = set(POLICY)

# Values for tests that choose options, of those that have more than the table can list.
SOME = {
    **dict.fromkeys(("concurrency", "batch", "prefetch"), (1, 3)),
    **{
        "timeout": (60, 60.5),
        "every": (2, 0.5),
        "sample": (0.5, 1.0),
    },
    **{"tag": ("a tag",), "executor": ()},
}


def some(table):
    """Values for each option of a table."""
    return {name: row.values or SOME[name] for name, row in table.items()}


def split(fn, given):
    """(a `hc.host` function if an option is a function's, the options of the place)."""
    policy = {option: given[option] for option in OF_FUNCTIONS & given.keys()}
    place = {key: value for key, value in given.items() if key not in policy}
    return hc.host(fn, **policy) if policy else fn, place


def call(fn, result, *args, **given):
    fn, place = split(fn, given)
    return hc.call(fn, result, *args, **place)


def parallel(fn, executor, **options):
    """A function of one row whose rows, under vmap, run on this executor."""

    def one(x, *args):
        how = {"executor": executor, "vmap_method": "parallel", **options}
        return call(fn, x, x, *args, **how)

    return one


# --- Functions for other processes, which find them here ------------------------------


def adds_and_writes(x, table):
    """Each row finds the table as it was sent, whatever other rows write to theirs."""
    assert table.flags.writeable
    assert type(table) is np.ndarray
    total = x + table[7] + table[-1]
    table[:] = -1
    return np.float32(total)


def lacks(x, table, lock=None):
    return table.no_such_thing
