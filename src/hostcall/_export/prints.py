"""`hc.print` in programs that leave the process (_export/records.py)."""

from __future__ import annotations

from typing import Any

from hostcall._api.print import Printer
from hostcall._core.codec import Json, Malformed, NotPortable
from hostcall._core.options import Policy
from hostcall._export.plain_format import WIDEST, OnlyItems, fault, without_controls
from hostcall._export.structures import CODEC


class LoadedPrinter(Printer):
    """One whose format comes from a file."""

    def line(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return without_controls(OnlyItems().filled(self.fmt, args, kwargs) + self.end)


def record_of(printer: Printer, _: bool) -> Printer:
    if printer.file is not None:
        raise NotPortable(
            "file= is a stream of this process. Leave it out: the line goes to what"
            " sys.stdout is where the program runs"
        )
    if why := fault(printer.fmt):
        raise NotPortable(f"its format {why}")
    return printer


def read(given: Json) -> tuple[Printer, Policy]:
    found = LoadedPrinter(file=None, **CODEC.fields(given, Printer))
    if why := fault(found.fmt):
        raise Malformed(f"the format {found.fmt!r}, which {why}")
    if not 0 <= (found.options.precision or 0) <= WIDEST:
        raise Malformed(f"the option precision={found.options.precision}")
    if min(found.numbers, default=0) < 0:
        raise Malformed(f"the numbers {found.numbers} of arguments of a print")
    return found, Policy()
