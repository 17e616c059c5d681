"""Makes these pictures of docs/ from real runs (`make pictures`).

bar.svg, loss.svg   the programs of docs/watching.md run on a terminal of 80 columns
trace.svg           a trace, as a viewer shows it
observe_*.svg       what examples/gallery/plot_observe.py prints in a terminal: the
                    error, the table, and the bars

`pictures.py TRACE PICTURE` draws a trace of yours. It needs matplotlib, pyte and rich.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
STYLE = {"svg.hashsalt": "hostcall", "svg.fonttype": "none"}  # equal for equal runs
COLUMNS = 80
WIDE = 150
COLOURS = {
    "call": "#4c72b0",
    "tap": "#dd8452",
    "delivery": "#55a868",
    "team": "#8172b3",
    "rows": "#64b5cd",
    "wait": "#c0c0c0",
    "compilation": "#b8a07e",
}


def record(path: Path) -> None:
    """A loop with a call, a slow tap and parallel rows, in a trace."""
    import jax
    import jax.numpy as jnp

    import hostcall as hc

    spec = jax.ShapeDtypeStruct((), jnp.float32)

    def advise(x: Any) -> Any:
        time.sleep(0.0015)
        return x

    def log(x: Any) -> None:
        time.sleep(0.001)

    def simulate(x: Any) -> Any:
        time.sleep(0.002)
        return x

    @jax.jit
    def program(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            c = hc.call(advise, spec, c)
            for _ in range(2):
                hc.tap(log, c, tag="loss")
            return c, None

        c = jax.lax.scan(step, x, jnp.arange(5))[0]
        rows = jax.vmap(lambda r: hc.call(simulate, spec, r, vmap_method="parallel"))
        return rows(c + jnp.arange(4.0))

    program(1.0).block_until_ready()
    hc.barrier()
    with hc.trace(path):
        program(1.0).block_until_ready()
        hc.barrier()


def draw(events: list[dict[str, Any]], picture: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    from matplotlib import pyplot as plt

    named = [e for e in events if e["ph"] == "M" and "name" in e["args"]]
    process = {
        e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"
    }
    thread = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in named
        if e["name"] == "thread_name"
    }
    slices = [e for e in events if e["ph"] == "X"]
    begin = min(e["ts"] for e in slices)
    tracks = sorted({(e["pid"], e["tid"]) for e in slices}, reverse=True)
    level = {track: i for i, track in enumerate(tracks)}
    figure, (axes, count) = plt.subplots(
        2, 1, figsize=(9, 0.5 * len(tracks) + 2.2), sharex=True, height_ratios=(3, 1)
    )
    for e in slices:
        at, width = (e["ts"] - begin) / 1e3, e["dur"] / 1e3
        y = level[e["pid"], e["tid"]]
        colour = COLOURS.get(e["cat"], "#999999")
        axes.barh(
            y,
            max(width, 0.02),
            left=at,
            height=0.7,
            color=colour,
            edgecolor="white",
            lw=0.3,
        )
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    for e in events:
        if e["ph"] == "f" and e["id"] in starts:
            s = starts[e["id"]]
            axes.annotate(
                "",
                ((e["ts"] - begin) / 1e3, level[e["pid"], e["tid"]]),
                ((s["ts"] - begin) / 1e3, level[s["pid"], s["tid"]]),
                arrowprops={"arrowstyle": "->", "color": "#666666", "lw": 0.6},
            )
    names = [f"{process[p]}: {thread.get((p, t), t)}" for p, t in tracks]
    axes.set_yticks(range(len(tracks)), names)
    kinds = [k for k in COLOURS if any(e["cat"] == k for e in slices)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[k]) for k in kinds]
    axes.legend(
        handles, kinds, ncols=len(kinds), loc="lower center", bbox_to_anchor=(0.4, 1)
    )
    points = [e for e in events if e["ph"] == "C"]
    count.step(
        [(e["ts"] - begin) / 1e3 for e in points],
        [e["args"]["taps"] for e in points],
        where="post",
        color=COLOURS["tap"],
    )
    count.set_ylabel("queued taps")
    count.set_xlabel("milliseconds")
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else {})


# --- docs/watching.md -----------------------------------------------------------------


def run_page(folder: Path) -> bytes:
    """Runs the page's fit in a folder. Returns what a terminal got."""
    page = (DOCS / "watching.md").read_text()
    cells = re.findall(r"^```py\n(.*?)^```", page, re.M | re.S)[:3]
    program = "\n".join([*cells, "table.to_json('table.json')"])
    return on_terminal(["-c", program], folder, COLUMNS)


def on_terminal(arguments: list[str], folder: Path, columns: int) -> bytes:
    """What a terminal gets from Python with these arguments, in a folder."""
    outer, inner = pty.openpty()
    termios.tcsetwinsize(inner, (24, columns))
    running = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        stdout=inner,
        stderr=inner,
        env={
            **os.environ,
            "TERM": "xterm",
            "PYTHONIOENCODING": "utf-8",
            "MPLBACKEND": "Agg",
        },
    )
    os.close(inner)
    said = b""
    with contextlib.suppress(OSError):  # how Linux says that the program ended
        while part := os.read(outer, 65536):
            said += part
    os.close(outer)
    if running.wait() != 0:
        raise RuntimeError(said.decode())
    return said


def draw_bar(said: bytes, picture: Path) -> None:
    """The bar when it was nearest to the middle of the run, and at the end."""
    import pyte

    screen = pyte.Screen(COLUMNS, 24)
    stream = pyte.ByteStream(screen)
    lines = []
    for part in re.split(rb"(?=\r)", said):
        stream.feed(part)
        lines += [line.rstrip() for line in screen.display if line.startswith("fit")]
    share = [int(line[4:].split("%")[0]) for line in lines]
    middle = min(range(len(lines)), key=lambda i: abs(share[i] - 50))
    draw_text([lines[middle], lines[-1]], picture, "hc.progress", COLUMNS)


def draw_text(lines: list[str], picture: Path, title: str, columns: int) -> None:
    """Lines as a terminal of so many columns shows them."""
    from rich.console import Console

    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=columns, file=nowhere)
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.save_svg(str(picture), title=title, unique_id=picture.stem)


def draw_observed(folder: Path, pictures: Path) -> None:
    """The error, the table and the bars of the program in the gallery."""
    import pyte

    name = "plot_observe.py"
    program = DOCS.parent / "examples" / "gallery" / name
    (folder / name).write_text(program.read_text())
    said = on_terminal([name], folder, WIDE)
    text = said.decode().replace("\r\n", "\n").replace(f"{folder.resolve()}/", "")
    error = re.search(r"^hostcall: .*\n.*\n.*$", text, re.M)
    table = re.search(r"^ +line +calls.*\n(?:.*plot_observe.py:.*\n)+", text, re.M)
    if error is None or table is None:
        raise RuntimeError(text)
    for part, found in (("nan", error), ("table", table)):
        picture = pictures / f"observe_{part}.svg"
        draw_text(found[0].splitlines(), picture, "hc.observe", WIDE)
    screen = pyte.Screen(WIDE, 24)
    stream = pyte.ByteStream(screen)
    shown: list[list[str]] = []
    for piece in re.split(rb"(?=\r)", said):
        stream.feed(piece)
        bars = [x.rstrip() for x in screen.display if x.startswith("scan ")]
        if len(bars) == 2 and "2/4" in bars[0]:
            shown.append(bars)
    middle = shown[len(shown) // 2]
    draw_text(middle, pictures / "observe_bars.svg", "hc.observe", WIDE)


def draw_loss(table: Path, picture: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    import pandas as pd
    from matplotlib import pyplot as plt

    rows = pd.read_json(table)
    figure, axes = plt.subplots(figsize=(7, 2.6))
    axes.semilogy(rows["step"], rows["loss"], color=COLOURS["call"])
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    from hostcall.tools import read_trace

    if len(sys.argv) == 3:
        draw(read_trace(sys.argv[1]), Path(sys.argv[2]))
        return
    pictures = DOCS / "pictures"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder / "run.json")
        draw(read_trace(folder / "run.json"), pictures / "trace.svg")
        draw_observed(folder, pictures)
        draw_bar(run_page(folder), pictures / "bar.svg")
        draw_loss(folder / "table.json", pictures / "loss.svg")


if __name__ == "__main__":
    main()
