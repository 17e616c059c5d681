"""Options of a place and those of a function, in one dictionary."""

from __future__ import annotations

import hostcall as hc

OF_FUNCTIONS = {
    *("timeout", "executor", "concurrency", "coalesce", "wait", "cache", "version")
}


def split(fn, options):
    """(a `hc.host` function if an option is a function's, the options of the place)."""
    policy = {option: options[option] for option in OF_FUNCTIONS & options.keys()}
    place = {key: value for key, value in options.items() if key not in policy}
    return hc.host(fn, **policy) if policy else fn, place


def call(fn, result, *args, **options):
    fn, place = split(fn, options)
    return hc.call(fn, result, *args, **place)
