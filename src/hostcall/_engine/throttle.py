"""`every=` and `sample=` of taps outside any program.

A compiled program has native counters for its taps, one for each tap and device. An
eager tap is no part of a program, so its counter is found by the line that wrote it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from hostcall import _native
from hostcall._core.source import source_of
from hostcall._engine.counters import counters_of
from hostcall._engine.params.tap import TapParams

# How many lines keep a counter. In a notebook each run of a cell makes new lines.
# Beyond this number the counter that was used longest ago is dropped, and its line
# starts counting anew.
_AT_MOST = 4096

_places: OrderedDict[Any, _native.Throttle] = OrderedDict()
_lock = threading.Lock()


def lets(params: TapParams, device: Any, always: bool) -> bool:
    """Whether an eager tap is delivered, on this device; `always` is its flag.

    If not, `hc.monitor.stats()` counts it.
    """
    if params.every is None and params.sample is None:
        return True
    callback = params.callback
    where = callback.place, source_of(callback.function), device.platform, device.id
    key = (*where, params.every, params.sample)
    with _lock:
        found = _places.pop(key, None) or _native.Throttle(params.settings())
        _places[key] = found
        while len(_places) > _AT_MOST:
            _places.popitem(last=False)
    return found.lets(counters_of(callback), always)
