"""The words around sweeps: titles, axes, captions, tables of docs/benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.render import number


def count(point: Any) -> str:
    return f"{point:,}" if isinstance(point, int) else str(point)


def size(point: int) -> str:
    """A number of bytes: 64 B, 1 KiB, 16 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if point < 1024 or unit == "MiB":
            return f"{point} {unit}"
        point //= 1024
    raise AssertionError("unreachable")


def one(point: str) -> str:
    return "a row of a vmap" if point == "row" else f"a {point}"


@dataclass(frozen=True)
class Text:
    """What a picture says.

    Attributes:
        title: the line above it.
        axis: what its points are.
        figure: what is measured.
        label: writes a point.
    """

    title: str
    axis: str
    figure: str = "µs for a call"
    label: Callable[[Any], str] = count


TEXTS = {
    "cost": Text("A call, a tap, a row of a vmap", "", "µs, lower is better", one),
    "parts": Text(
        "What a call consists of", "step of a loop", "µs for a step of the loop"
    ),
    "steps": Text(
        "A jitted step that Python calls in a loop", "beside x + 1", "µs for a step"
    ),
    "bytes": Text("A call, by bytes", "bytes in, and as many out", label=size),
    "leaves": Text("A call, by leaves", "scalars in, and as many out"),
    "rows": Text("A row of a vmap, by rows", "rows", "µs for a row"),
    "devices": Text(
        "A call in a shard_map, by devices",
        "virtual CPU devices",
        "µs for a call, all devices together",
    ),
    "threads": Text(
        "Loops of calls in several threads",
        "threads that run a loop",
        "µs for a call, all threads together",
    ),
}
INTRO = """The figures behind the pictures of [where a microsecond goes](speed.md). That
page says what each line is. "(100x)" after a time means that the median of its ratios
to hostcall's time in the same round is 100.
"""
NOTES = {
    "cost": "floor: for a call, a handler that only calls an empty Python function;"
    " for a tap, one that where= holds back;"
    " for a row, Python calling the function on arrays that are ready.",
}


def caption(figures: dict[str, Any]) -> str:
    """The machine, the versions and the date that figures hold for."""
    has = figures["machine"]
    versions = ", ".join(f"{k} {has[k]}" for k in ("Python", "jax", "hostcall"))
    return (
        f"{has['CPU']}, {has['cores']} cores; {versions}; {figures['date']};"
        f" medians of {figures['rounds']} rounds"
    )


# --- Tables ---------------------------------------------------------------------------


def _table(head: list[str], body: list[list[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))


def _figure(series: dict[str, list[float]], i: int) -> str:
    """Microseconds, and how many times the base's, unless it is the base."""
    figure, ratio = f"{number(series['median'][i])} µs", series["times"][i]
    return figure if ratio == 1 else f"{figure} ({number(ratio)}x)"


def _rows(name: str, figures: dict[str, Any]) -> str:
    """Four points at most: the first, the last, and two between."""
    points = figures["points"]
    last = len(points) - 1
    shown = sorted({0, round(last / 3), round(2 * last / 3), last})
    text = TEXTS[name]
    head = [text.axis, *(text.label(points[i]) for i in shown)]
    body = [
        [f"`{way}`" if "=" in way else way, *(_figure(series, i) for i in shown)]
        for way, series in figures["series"].items()
    ]
    if len(points) == 1:
        head = [text.axis, "takes"]
    return _table(head, body)


def table(name: str, figures: dict[str, Any]) -> str:
    return f"{_rows(name, figures)}\n\n({caption(figures)})"


def places() -> str:
    """The end of docs/benchmarks.md: a section for each sweep, still without tables."""
    sections = (
        f"### {text.title}\n\n<!-- figures: {name} -->\n\n<!-- end -->\n"
        for name, text in TEXTS.items()
    )
    return "\n".join(("## By size\n", INTRO, *sections))


def write(page: Path, known: dict[str, Any]) -> None:
    """Puts the tables into a page, between its marks.

    `<!-- figures: NAME -->` and `<!-- end -->` stand on lines of their own.
    """
    text = page.read_text()
    for name, figures in known.items():
        made = table(name, figures)
        text, found = re.subn(
            rf"(^<!-- figures: {name} -->\n).*?(^<!-- end -->$)",
            lambda mark, made=made: f"{mark[1]}\n{made}\n\n{mark[2]}",
            text,
            flags=re.M | re.S,
        )
        if found > 1:
            raise ValueError(f"{page} has {found} places for the figures of {name}")
    page.write_text(text)
