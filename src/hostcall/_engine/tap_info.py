"""What the engine asks of a tap, and its masked batches."""

from __future__ import annotations

from typing import Any

from hostcall._engine.info import CallInfo
from hostcall._runtime import tap_failures


class TapInfo(CallInfo):
    """One tap's description, with the hooks that native code calls.

    `places`: of a tap of shards, for each device ordinal the global index of each
    array's block.
    """

    places: dict[int, tuple[Any, ...]] | None = None

    def on_error(self, error: BaseException, _: Any, row: tuple[int, ...]) -> str:
        """The computation goes on: the log says it, and the next barrier() raises."""
        tap_failures.failed(self.name, self.place, error, row)
        return ""

    def __repr__(self) -> str:
        return f"<tap of {self.name} at {self.place}>"
