"""The Python hooks that the engine calls for a tap."""

from __future__ import annotations

from typing import Any

from hostcall._engine.info import CallInfo
from hostcall._runtime import tap_failures


class TapInfo(CallInfo):
    """The description of one tap, with the hooks that native code calls.

    Attributes:
        places: in a tap with on="shards", the global index of each array's block,
            by device ordinal; else None.
    """

    places: dict[int, tuple[Any, ...]] | None = None

    def on_error(self, error: BaseException, _: Any, row: tuple[int, ...]) -> str:
        """Logs the failure and keeps it for the next barrier(); the program goes on."""
        tap_failures.failed(self.name, self.place, error, row)
        return ""

    def __repr__(self) -> str:
        return f"<tap of {self.name} at {self.place}>"
