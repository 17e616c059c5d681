"""A table by folder: table.py PYTHON.json NATIVE.json; --lines shows what is left."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path


def share(covered: int, total: int) -> str:
    return f"{100 * covered / total:5.1f} %" if total else "      -"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", type=Path)
    parser.add_argument("native", type=Path)
    parser.add_argument("--lines", action="store_true")
    given = parser.parse_args()
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    left = []
    for name, file in json.loads(given.python.read_text())["files"].items():
        inner = name.partition("site-packages/hostcall/")[2]
        folder = inner.rpartition("/")[0].split("/")[0] or "."
        told = file["summary"]
        counts = ["covered_lines", "num_statements", "covered_branches", "num_branches"]
        for key in (f"src/hostcall/{folder}", "Python, all"):
            rows[key] = [a + told[b] for a, b in zip(rows[key], counts, strict=True)]
        if file["missing_lines"]:
            left.append(f"{inner}: {', '.join(map(str, file['missing_lines']))}")
    for file in json.loads(given.native.read_text())["files"]:
        counts = ["line_covered", "line_total", "branch_covered", "branch_total"]
        for key in (file["filename"].rpartition("/")[0], "C++, all"):
            rows[key] = [a + file[b] for a, b in zip(rows[key], counts, strict=True)]
    print(
        f"{'folder':32} {'lines':>7}  {'of them':>9}  {'branches':>8}  {'of them':>9}"
    )
    for key in sorted(rows):
        lines, all_lines, branches, all_branches = rows[key]
        print(
            f"{key:32} {all_lines:7}  {share(lines, all_lines):>9}"
            f"  {all_branches:8}  {share(branches, all_branches):>9}"
        )
    if given.lines:
        print("", *sorted(left), sep="\n")


if __name__ == "__main__":
    main()
