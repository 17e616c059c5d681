"""Makes these pictures of docs/ from real runs (`make pictures`).

bar.svg, loss.svg   the programs of docs/watching.md run on a terminal of 80 columns
observe_*.svg       what examples/gallery/plot_observe.py prints in a terminal: the
                    error and the bars

It needs matplotlib, pyte and rich.
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
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
STYLE = {"svg.hashsalt": "hostcall", "svg.fonttype": "none"}  # equal for equal runs
COLUMNS = 80
WIDE = 150
LINE = "#4c72b0"


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
    """The error and the bars of the program in the gallery."""
    import pyte

    name = "plot_observe.py"
    program = DOCS.parent / "examples" / "gallery" / name
    (folder / name).write_text(program.read_text())
    said = on_terminal([name], folder, WIDE)
    text = said.decode().replace("\r\n", "\n").replace(f"{folder.resolve()}/", "")
    error = re.search(r"^hostcall: .*\n.*\n.*$", text, re.M)
    if error is None:
        raise RuntimeError(text)
    for part, found in (("nan", error),):
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
    axes.semilogy(rows["step"], rows["loss"], color=LINE)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    pictures = DOCS / "pictures"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw_observed(folder, pictures)
        draw_bar(run_page(folder), pictures / "bar.svg")
        draw_loss(folder / "table.json", pictures / "loss.svg")


if __name__ == "__main__":
    main()
