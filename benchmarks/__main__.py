"""python -m benchmarks [--quick] [--only WORD] [--write FILE] [--json FILE]"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks import (
    render,
    rows_around,
    rows_bridge,
    rows_buffers,
    rows_cache,
    rows_call,
    rows_devices,
    rows_drop_in,
    rows_export,
    rows_feed,
    rows_gpu,
    rows_growth,
    rows_host,
    rows_parallel,
    rows_pools,
    rows_recorder,
    rows_tap,
    rows_tools,
    rows_trace,
    rows_waiting,
    rows_watch,
)
from benchmarks.harness import measure

ROWS = (
    *rows_call.ROWS,
    *rows_devices.ROWS,
    *rows_cache.ROWS,
    *rows_parallel.ROWS,
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
    *rows_tools.ROWS,
    *rows_recorder.ROWS,
    *rows_trace.ROWS,
    *rows_watch.ROWS,
    *rows_gpu.ROWS,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Prints the table of targets."
    )
    parser.add_argument("--only", metavar="WORD", help="rows whose name has this")
    parser.add_argument("--quick", action="store_true", help="few rounds, coarse")
    parser.add_argument("--write", metavar="FILE", type=Path, help="Markdown")
    parser.add_argument("--json", metavar="FILE", type=Path, help="all rounds")
    parser.add_argument("--list", action="store_true", help="names of the rows")
    options = parser.parse_args()

    word = (options.only or "").lower()
    rows = [row for row in ROWS if word in row.name.lower()]
    if options.list:
        print(*(row.name for row in rows), sep="\n")
        return 0
    if not rows:
        print(f"no row has {options.only!r} in its name; see --list", file=sys.stderr)
        return 2

    begin = time.perf_counter()
    results = []
    for row in rows:
        print(f"  {row.name} ...", file=sys.stderr, flush=True)
        results.append(measure(row, options.quick))
    print(render.table(results))
    print()
    print(render.summary(results), f"{time.perf_counter() - begin:.0f} s.")
    print(*(f"{k} {v}" for k, v in render.machine().items()), sep=", ")
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(render.document(results))
    if options.json:
        options.json.write_text(json.dumps(render.as_json(results), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
