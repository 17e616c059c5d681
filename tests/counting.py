"""Counts the calls of a function."""

from __future__ import annotations

import functools


def counted(fn):
    """Wraps `fn`; its list `seen` grows by (args, kwargs) with each call."""

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        wrapper.seen.append((args, kwargs))
        return fn(*args, **kwargs)

    wrapper.seen = []
    return wrapper
