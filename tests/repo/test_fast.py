"""`make test-fast`: what differs, which tests that touches, and which of them run."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import fast
import pytest
from fast import Collected, Map, Scores

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "touched"

BEFORE = '''
"""A module."""
from os import path

LIMIT = 3

def small(x):
    """Says something."""
    return x < LIMIT

def other(x):
    return path.join(x)

class Thing(Base):
    size = 1

    def grow(self):
        return self.size + 1

    def shrink(self):
        def inner():
            return self.size - 1
        return inner()
'''


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("return x < LIMIT", "return x <= LIMIT", {"small"}),
        ("return x < LIMIT", "# a reason\n    return (x < LIMIT)", set()),
        ('"""Says something."""', '"""Says more."""', set()),
        ('"""A module."""', '"""Another text."""\n\n', set()),
        ("LIMIT = 3", "LIMIT = 4", {"small"}),
        ("from os import path", "from posix import path", {"other"}),
        ("return self.size - 1", "return self.size - 2", {"Thing.shrink"}),
        ("size = 1", "size = 2", {"Thing.grow", "Thing.shrink"}),
        ("(Base)", "(Other)", {"Thing.grow", "Thing.shrink"}),
        ("def other(x):", "@cache\ndef other(x):", {"other"}),
        ("def other(x):", "def another(x):", {"other", "another"}),
    ],
)
def test_functions_differ_by_their_syntax(old, new, names):
    assert old in BEFORE
    after = BEFORE.replace(old, new)
    assert fast.differing(BEFORE, after) == names
    assert fast.differing(after, BEFORE) >= names - {"another"}


def test_a_moved_function_is_no_difference():
    first, _, rest = BEFORE.partition("def small")
    small, _, others = rest.partition("def other")
    assert (
        fast.differing(BEFORE, f"{first}def other{others}\ndef small{small}") == set()
    )


@pytest.mark.parametrize("count", [1, 8, 9, 100, 300])
def test_each_case_runs_within_some_weeks_and_at_most_eight_a_day(count):
    names = [f"tests/a/test_a.py::test_a[{n}]" for n in range(count)]
    for choose, days in (
        (lambda day: fast.eight_a_day(names, day), -(-count // 8)),
        (lambda day: fast.share_of_a_day(names, day, 28), max(28, -(-count // 8))),
    ):
        ran = [choose(day) for day in range(1000, 1000 + days)]
        assert {name for chosen in ran for name in chosen} == set(names)
        assert max(map(len, ran)) <= 8


def collected(*names):
    return [
        Collected(n, n.split("::")[0], n.split("::")[1].split("[")[0]) for n in names
    ]


TAP = "tests/tap/test_tap.py"
MANY = [f"{TAP}::test_many[{n}]" for n in range(50)]
TESTS = collected(
    *(f"tests/matrix/test_smoke.py::test_smoke[{n}]" for n in range(3)),
    f"{TAP}::test_one",
    f"{TAP}::test_long",
    *MANY,
    "tests/call/test_call.py::test_other",
)
KNOWN = Map(
    seconds={test.name: 0.1 for test in TESTS} | {f"{TAP}::test_long": 500.0},
    functions={
        "_api/tap.py::tap": [f"{TAP}::test_one", f"{TAP}::test_long", *MANY],
        "_api/tap.py::unused": [],
        "_api/call.py::call": ["tests/call/test_call.py::test_other"],
    },
)


def chosen(functions, failed=(), known=KNOWN, day=0):
    scored = Scores(TESTS, known)
    for path, names in functions.items():
        scored.run(path, names)
    return fast.choose(TESTS, known, scored, day, failed)


def test_smoke_comes_first_then_what_runs_the_function():
    got = chosen({"_api/tap.py": {"tap"}})
    assert sorted(got.smoke) == [test.name for test in TESTS[:3]]
    assert f"{TAP}::test_one" in got.touched
    assert sum(name in MANY for name in got.touched) == fast.CASES
    assert got.left_out == 1  # it takes longer than there is time
    assert f"{TAP}::test_long" not in got.touched
    assert "tests/call/test_call.py::test_other" not in got.touched


def test_what_failed_last_comes_first_however_long_it_takes():
    got = chosen({"_api/call.py": {"call"}}, failed=[f"{TAP}::test_long"])
    assert got.touched[0] == f"{TAP}::test_long"


def test_without_a_map_words_say_what_is_touched():
    got = chosen({"_api/tap.py": {"tap"}}, known=Map())
    assert {f"{TAP}::test_one", f"{TAP}::test_long"} <= {*got.touched}
    assert "tests/call/test_call.py::test_other" not in got.touched


def test_tests_that_differ_are_touched():
    scored = Scores(TESTS, KNOWN)
    scored.own(TAP, {"test_one"})
    got = fast.choose(TESTS, KNOWN, scored, 0)
    assert got.touched == [f"{TAP}::test_one"]


@pytest.mark.parametrize("known", [Map(), KNOWN], ids=["no map", "map"])
def test_each_worker_chooses_the_same_in_the_same_order(known):
    """Sets of names have another order in each process, and pytest-xdist compares."""
    scored = Scores(TESTS, known)
    scored.own(TAP, {"test_many", "test_one"})
    differ = fast.choose(TESTS, known, scored, 0).touched
    assert len(differ) > 1
    assert differ == sorted(differ)


def test_every_case_is_in_the_wide_part_of_some_day():
    ran = set()
    for day in range(fast.DAYS):
        got = chosen({}, day=day)
        ran |= {*got.smoke, *got.wide}
    assert ran == {test.name for test in TESTS}


def test_tests_of_c_plus_plus_that_include_what_differs():
    files = fast.included(fast.NATIVE_TESTS / "tap_queue_test.cc", set())
    assert ROOT / "native" / "queue" / "tap_queue.h" in files
    assert ROOT / "native" / "cuda" / "pinned_pool.h" not in files


def test_the_smoke_tests_have_every_face_in_every_setting():
    """`make test-fast` begins with them, wherever the change is."""
    text = (ROOT / "tests" / "matrix" / "test_smoke.py").read_text()
    assert '@pytest.mark.parametrize("face", FACES)' in text
    for test in ("in_each_setting", "a_failure", "a_process_that_ends"):
        assert test in text


# --- The map ---------------------------------------------------------------------------------

PROGRAM = """
import os, recorder, sys
import hostcall as hc, numpy as np, jax
recorder.take()
jax.jit(lambda x: hc.call(np.sin, x, x))(1.0).block_until_ready()
if (child := os.fork()) == 0:
    hc.configure(residuals=9)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python can't say what runs")
def test_a_program_tells_for_its_test_what_it_ran(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(SCRIPTS),
            "RECORD_TO": str(tmp_path),
            "PYTEST_CURRENT_TEST": "tests/a/test_a.py::test_a[1] (call)",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "map.json.gz"
    made = subprocess.run(
        [sys.executable, SCRIPTS / "map.py", tmp_path, out],
        capture_output=True,
        text=True,
    )
    assert "1 tests" in made.stdout, made.stderr
    with gzip.open(out, "rt") as file:
        assert json.load(file)["tests"] == [["tests/a/test_a.py::test_a[1]", 0.0]]
    functions = Map.read(out).functions
    assert functions["_api/call.py::call"] == ["tests/a/test_a.py::test_a[1]"]
    assert any(name.endswith("::configure") for name in functions)  # in a fork of it
    assert not any("<module>" in name for name in functions)
    assert all((ROOT / "src/hostcall" / f.split("::")[0]).exists() for f in functions)
