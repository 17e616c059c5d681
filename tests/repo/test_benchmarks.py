"""The benchmarks run and print their table. What they measure is not tested here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def benchmarks(*args):
    # Without the tests' four devices, which benchmarks do not use.
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *args],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=170,
    )


def test_a_table_comes_out(tmp_path):
    document, data = tmp_path / "deep" / "out.md", tmp_path / "out.json"
    few = ("--quick", "--only", "compiled loop")
    done = benchmarks(*few, "--write", str(document), "--json", str(data))
    assert done.returncode == 0, done.stderr
    head, rule, *body = done.stdout.splitlines()
    assert [c.strip() for c in head.strip("|").split("|")][:3] == [
        "what",
        "case",
        "figure",
    ]
    assert set(rule) == {"|", "-"}
    lines = [line for line in body if line.startswith("|")]
    assert any("scalar call in a compiled loop" in line for line in lines)
    assert all(line.count("|") == head.count("|") for line in lines)
    assert "targets reached" in done.stdout

    written = document.read_text()
    assert "| jaxlib |" in written
    assert head in written

    rows = json.loads(data.read_text())["rows"]
    # Only finite: some are differences of two loops, which on a busy machine can be
    # negative.
    figures = [figure for row in rows for figure in row["median"].values()]
    assert len(figures) >= len(rows) > 0
    assert all(
        isinstance(figure, float) and math.isfinite(figure) for figure in figures
    )


def test_an_unknown_row_is_an_error():
    done = benchmarks("--only", "no such row")
    assert done.returncode == 2
    assert "no such row" in done.stderr


def test_targets():
    harness = pytest.importorskip("benchmarks.harness")
    rounds = {"JAX": [30.0, 60.0, 90.0], "hostcall": [1.0, 1.0, 3.0]}
    faster = harness.times_faster(30)
    assert faster.measure(rounds) == 30.0  # of 30, 60, 30
    assert faster.holds(30.0)
    assert not faster.holds(29.9)
    slower = harness.at_most(2, "hostcall", ours="JAX")
    assert slower.measure(rounds) == 30.0
    assert not slower.holds(30.0)
    assert harness.at_most(1, None).measure(rounds) == 1.0
