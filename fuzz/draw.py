"""Makes choices from the bytes that a fuzzer mutates."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Draw:
    """Takes bytes from the front; after the end all are zero."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self._at)

    def bytes(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken.ljust(count, b"\0")

    def int(self, low: int, high: int) -> int:
        """From low to high, both included."""
        size = max(1, ((high - low).bit_length() + 7) // 8)
        return low + int.from_bytes(self.bytes(size), "little") % (high - low + 1)

    def bool(self) -> bool:
        return bool(self.int(0, 1))

    def choice(self, among: Sequence[T]) -> T:
        return among[self.int(0, len(among) - 1)]

    def rest(self) -> bytes:
        return self.bytes(self.left)

    def text(self) -> str:
        """All that is left. Also texts that no UTF-8 can hold: lone surrogates."""
        passes, data = self.bool(), self.rest()
        try:
            return data.decode("utf-8", "surrogatepass" if passes else "replace")
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")


# Values that JSON can hold, for places where they are wrong.
ODD: list[Any] = [0, 1, -1, 2, 3, 4, 7, 12, 10**6, 2**40, 2**62, -(2**63), 2**64, 1e308]
ODD += [0.5, -1.5, True, False, None, "", "x", "*", "a\ud800b", [], {}, [[]], [3, 4]]
ODD += [[True], [[True, True]], ["float32", 3, 4], "float64", "int4", "U9", {"is": 1}]
ODD += ["out", "jax", "ordered", "NaN", float("nan"), [[[[[[[[]]]]]]]]]


def change(draw: Draw, told: Any) -> Any:
    """A copy of what JSON can hold, with up to four values replaced, taken or added."""
    told = json.loads(json.dumps(told))
    for _ in range(draw.int(1, 4)):
        inner, trail = told, []
        while (
            isinstance(inner, (dict, list)) and inner and (not trail or draw.int(0, 5))
        ):
            keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
            trail.append((inner, draw.choice(keys)))
            inner = inner[trail[-1][1]]
        if not trail:
            return copy.deepcopy(draw.choice(ODD))
        holder, key = trail[-1]
        what = draw.int(0, 3)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(draw.choice(ODD)))
        else:
            holder[key] = copy.deepcopy(draw.choice(ODD))
    return told
