"""Options of a place and those of a function, in one dictionary."""

from __future__ import annotations

import hostcall as hc
from hostcall._engine import options

OF_FUNCTIONS = set(options.POLICY)


def split(fn, given):
    """(a `hc.host` function if an option is a function's, the options of the place)."""
    policy = {option: given[option] for option in OF_FUNCTIONS & given.keys()}
    place = {key: value for key, value in given.items() if key not in policy}
    return hc.host(fn, **policy) if policy else fn, place


def call(fn, result, *args, **given):
    fn, place = split(fn, given)
    return hc.call(fn, result, *args, **place)
