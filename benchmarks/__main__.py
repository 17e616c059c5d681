"""python -m benchmarks [--quick] [--only WORD] [--write FILE] [--json FILE]
[--pictures FOLDER] [--draw FOLDER]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

from benchmarks import (
    render,
    rows_around,
    rows_bridge,
    rows_buffers,
    rows_call,
    rows_devices,
    rows_drop_in,
    rows_export,
    rows_feed,
    rows_gpu,
    rows_growth,
    rows_host,
    rows_observe,
    rows_parallel,
    rows_pools,
    rows_recorder,
    rows_scipy,
    rows_tap,
    rows_threads,
    rows_tools,
    rows_waiting,
    rows_watch,
    sweep_pictures,
    sweep_texts,
    sweeps,
)
from benchmarks.harness import measure

ROWS = (
    *rows_call.ROWS,
    *rows_devices.ROWS,
    *rows_observe.ROWS,
    *rows_parallel.ROWS,
    *rows_threads.ROWS,
    *rows_pools.ROWS,
    *rows_waiting.ROWS,
    *rows_growth.ROWS,
    *rows_around.ROWS,
    *rows_tap.ROWS,
    *rows_feed.ROWS,
    *rows_export.ROWS,
    *rows_drop_in.ROWS,
    *rows_buffers.ROWS,
    *rows_host.ROWS,
    *rows_bridge.ROWS,
    *rows_scipy.ROWS,
    *rows_tools.ROWS,
    *rows_recorder.ROWS,
    *rows_watch.ROWS,
    *rows_gpu.ROWS,
)


def draw(folder: Path) -> None:
    """Draws speed.json of a folder, and writes its tables into benchmarks.md above."""
    known = sweeps.load(folder)
    if not known:
        raise FileNotFoundError(f"{folder} has no {sweeps.FILE}: measure it first")
    for path in sweep_pictures.draw(known, folder):
        print(f"drew {path}", file=sys.stderr)
    page = folder.parent / "benchmarks.md"
    if page.exists():
        sweep_texts.write(page, known)


def last_run(options: argparse.Namespace) -> str:
    """How long the last whole run took, from what it wrote."""
    seconds = []
    if options.write:
        seconds.append(render.seconds_of(options.write))
    if options.pictures:
        seconds.append(sweeps.seconds_of(options.pictures))
    if not seconds or 0 in seconds:
        return "how long a whole run takes is not recorded yet"
    return f"the last whole run took {sum(seconds) / 60:.0f} min"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Prints the table of targets, and draws pictures of speed.",
    )
    add = parser.add_argument
    add("--only", metavar="WORD", help="rows and sweeps whose name has this")
    add("--quick", action="store_true", help="few rounds, coarse")
    add("--write", metavar="FILE", type=Path, help="Markdown")
    add("--json", metavar="FILE", type=Path, help="all rounds")
    add("--pictures", metavar="FOLDER", type=Path, help="measure sweeps, and draw them")
    add("--draw", metavar="FOLDER", type=Path, help="only draw what was measured")
    add("--list", action="store_true", help="names of the rows and sweeps")
    options = parser.parse_args()
    if options.draw:
        draw(options.draw)
        return 0

    word = (options.only or "").lower()
    rows = [row for row in ROWS if word in row.name.lower()]
    chosen = [s for s in sweeps.SWEEPS if word in f"sweep: {s.name}"]
    if options.list:
        print(*(row.name for row in rows), sep="\n")
        print(*(f"sweep: {sweep.name}" for sweep in chosen), sep="\n")
        return 0
    if not options.pictures:
        chosen = []
    if not rows and not chosen:
        print(f"no row has {options.only!r} in its name; see --list", file=sys.stderr)
        return 2

    if chosen and importlib.util.find_spec("matplotlib") is None:
        print("--pictures needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2

    begin, done = time.perf_counter(), 0

    def say(name: str) -> None:
        nonlocal done
        done += 1
        seconds = time.perf_counter() - begin
        print(
            f"  {seconds:4.0f} s, {done} of {len(rows) + len(chosen)}: {name} ...",
            file=sys.stderr,
            flush=True,
        )

    print(
        f"{len(rows)} rows and {len(chosen)} sweeps; {last_run(options)}",
        file=sys.stderr,
    )
    results = []
    for row in rows:
        say(row.name)
        results.append(measure(row, options.quick))
    if rows:
        seconds = time.perf_counter() - begin
        print(render.table(results))
        print()
        print(render.summary(results), f"{seconds:.0f} s.")
        print(*(f"{k} {v}" for k, v in render.machine().items()), sep=", ")
        if options.write:
            options.write.parent.mkdir(parents=True, exist_ok=True)
            text = f"{render.document(results, seconds)}\n{sweep_texts.places()}"
            options.write.write_text(text)
            pictures = options.pictures or options.write.parent / "pictures"
            sweep_texts.write(options.write, sweeps.load(pictures))
        if options.json:
            made = json.dumps(render.as_json(results), indent=1)
            options.json.write_text(made + "\n")
    for sweep in chosen:
        say(f"sweep: {sweep.name}")
        figures = sweeps.measured(sweep, options.quick)
        sweeps.save(options.pictures, sweep.name, figures)
    if chosen:
        draw(options.pictures)
        print(f"all of it took {(time.perf_counter() - begin) / 60:.1f} min")
    return 0


if __name__ == "__main__":
    sys.exit(main())
