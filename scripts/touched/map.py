"""Makes the map of `make test-fast`: map.py FOLDER MAP joins what recorder.py has left.

The map is JSON, compressed by gzip:
    tests: a list of [name, seconds]
    functions: for each function of hostcall, the numbers of the tests that run it
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path


def joined(folder: Path) -> dict[str, object]:
    seconds: dict[str, float] = defaultdict(float)
    ran: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            test, took, functions = json.loads(line)
            if test:  # else what importing has run, which is no test's
                seconds[test] += took
                ran[test].update(functions)
    tests = sorted(seconds)
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, test in enumerate(tests):
        for function in ran[test]:
            if "<module>" not in function:
                numbers[function].append(number)
    return {
        "tests": [[test, round(seconds[test], 3)] for test in tests],
        "functions": dict(sorted(numbers.items())),
    }


def main(folder: str, out: str) -> None:
    made = joined(Path(folder))
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(out, "wt") as file:
        json.dump(made, file, separators=(",", ":"))
    print(
        f"{out}: {len(made['functions'])} functions, {len(made['tests'])} tests,"
        f" {Path(out).stat().st_size // 1024} KiB"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
