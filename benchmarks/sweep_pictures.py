"""Draws speed.json as SVG files that are legible on light and on dark pages.

The background is transparent, and text and lines have tones in the middle. Text stays
text, so that a page's reader can search it and a browser's fonts draw it.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from benchmarks.render import number
from benchmarks.sweep_texts import NOTES, TEXTS, caption

GREY = "#7d858e"
COLOURS = {"hostcall": "#2f81f7", "JAX": "#d9772b"}  # by the first word of a name
LINES = ("-", "--", ":")  # the first of a colour, the second, the third
BARS = {"cost", "parts", "steps"}
STYLE = {
    "svg.hashsalt": "hostcall",
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.transparent": True,
}
WIDTH = 7.3  # inches of 72 points: some 700 pixels of a browser
# Bars have no other axis, so they can be narrow: a phone, which has 345 pixels for a
# picture, shows all of them. Pictures with lines scroll there (site.css).
BARS_WIDTH = 4.4
NOTE = 7.5  # points; the width of a letter is about half of it


def picture(name: str) -> str:
    """The name of a sweep's file."""
    return "speed.svg" if name == "cost" else f"speed_{name}.svg"


def colour(series: str) -> str:
    return COLOURS.get(series.split(",")[0], GREY)


def draw(known: dict[str, Any], folder: Path) -> list[Path]:
    """Draws each sweep of speed.json. Returns the files."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    made = []
    with mpl.rc_context(STYLE):
        for name, figures in known.items():
            figure = Figure(layout="constrained")
            (_bars if name in BARS else _lines)(figure, name, figures)
            below = NOTES.get(name, "")
            across = int(figure.get_size_inches()[0] * 72 / (NOTE * 0.53))
            notes = [
                line
                for note in (below, caption(figures))
                for line in textwrap.wrap(note, across)
            ]
            figure.supxlabel(
                "\n".join(notes),
                fontsize=NOTE,
                x=0.01,
                ha="left",
            )
            path = folder / picture(name)
            meta = {"Date": None, "Title": f"{TEXTS[name].title}: {caption(figures)}"}
            figure.savefig(path, metadata=meta)
            made.append(path)
    return made


def _bars(figure: Any, name: str, figures: dict[str, Any]) -> None:
    """Bars from a third of the smallest figure on, each with its figure."""
    points, series = figures["points"], figures["series"]
    entries: list[tuple[float, str, float]] = []  # place, series, figure
    place, places = 0.0, []
    for i, point in enumerate(points):
        begin = place
        for way, values in series.items():
            entries.append((place, way, values["median"][i]))
            place += 1
        places.append(((begin + place - 1) / 2, TEXTS[name].label(point)))
        place += 0.6
    figure.set_size_inches(BARS_WIDTH, 1.2 + 0.27 * place)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    values = [value for *_, value in entries]
    if min(values) <= 0:
        raise ValueError(f"{name}: a figure is not positive, and has no logarithm")
    left = min(values) / 3
    for at, way, value in entries:
        axes.barh(at, value - left, left=left, height=0.8, color=colour(way), alpha=0.9)
        said = f"{number(value)} µs"
        axes.annotate(
            f"{said}, {way}" if len(points) > 1 else said,
            (value, at),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_xlim(left, max(values) * (25 if len(points) > 1 else 10))
    axes.invert_yaxis()
    if len(points) > 1:
        axes.set_yticks(*zip(*places, strict=True))
    else:
        axes.set_yticks([e[0] for e in entries], [e[1] for e in entries])
    axes.tick_params(axis="y", length=0)
    _finish(axes.xaxis, axes, name)


def _lines(figure: Any, name: str, figures: dict[str, Any]) -> None:
    """A line for each series, with the quartiles of its rounds as a band."""
    figure.set_size_inches(WIDTH, 4)
    axes = figure.add_subplot()
    points, used = figures["points"], dict.fromkeys([GREY, *COLOURS.values()], 0)
    for way, values in figures["series"].items():
        tone = colour(way)
        line = LINES[used[tone] % len(LINES)]
        used[tone] += 1
        style = {"color": tone, "linestyle": line, "label": way}
        axes.plot(points, values["median"], marker="o", markersize=3, **style)
        axes.fill_between(
            points, values["low"], values["high"], color=tone, alpha=0.2, lw=0
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    text = TEXTS[name]
    shown = points[:: 2 if len(points) > 8 else 1]
    axes.set_xticks(shown, [text.label(point) for point in shown])
    axes.minorticks_off()
    axes.set_xlabel(text.axis)
    figure.legend(loc="outside upper center", ncols=3)
    _finish(axes.yaxis, axes, name)


def _finish(axis: Any, axes: Any, name: str) -> None:
    text = TEXTS[name]
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.grid(True, which="major")
    axes.set_axisbelow(True)
    axis.set_label_text(text.figure)
    if (
        name in BARS
    ):  # narrow, beside the names of its bars: the title begins above them
        axes.figure.suptitle(text.title, x=0.01, ha="left", fontsize=11, weight="bold")
    else:
        axes.set_title(text.title, loc="left", fontsize=11, fontweight="bold")
