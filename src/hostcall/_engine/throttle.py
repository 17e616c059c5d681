"""`every=` and `sample=` of taps that no program counts.

A compiled program has the counters of its taps in native code, one a place and device.
A tap outside of a program is at a place too: the line that wrote it. The same counters
serve it, found by that line.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from hostcall import _native
from hostcall._core.source import source_of
from hostcall._engine.counters import counters_of
from hostcall._engine.params.tap import TapParams

# Lines that are remembered. A program that makes more (in a notebook each run of a cell
# has lines of its own) begins to count anew where it has not been for the longest.
_AT_MOST = 4096

_places: OrderedDict[Any, Throttle] = OrderedDict()
_lock = threading.Lock()


class Throttle:
    """The executions of one place, where there is one run and one device."""

    def __init__(self, params: TapParams) -> None:
        self._native = (
            _native.Throttle(params.settings()) if _leaves_out(params) else None
        )

    def lets(self, params: TapParams) -> bool:
        """Whether this execution goes through; counts it if not (`hc.stats()`)."""
        if self._native is None:
            return True
        return self._native.lets(counters_of(params.callback.function))


def _leaves_out(params: TapParams) -> bool:
    return params.every is not None or params.sample is not None


def lets(params: TapParams, device: Any) -> bool:
    """Whether a tap outside of any program goes through, on this device."""
    if not _leaves_out(params):
        return True
    callback = params.callback
    where = callback.place, source_of(callback.function), device.platform, device.id
    key = (*where, params.every, params.sample)
    with _lock:
        found = _places.pop(key, None) or Throttle(params)
        _places[key] = found
        while len(_places) > _AT_MOST:
            _places.popitem(last=False)
    return found.lets(params)
