"""Which tests `make test-fast` runs: `pytest --fast`. Nobody keeps a list for it.

smoke    The tests of test_smoke.py: every face in every setting.
touched  Tests of what differs from the last merge. Functions of hostcall are compared by
         their syntax, so that a comment or a moved line is no difference. Which tests run
         a function is in a map that `make test-map` writes, as CI does
         (scripts/touched/recorder.py). Tests whose own functions differ are touched, too.
         What the map can't say, words do: a folder of native/, a page, a script and, where
         there is no map, a function touch the tests that speak of them.
wide     A share of all tests, another one each day, so that every case runs within DAYS.

Of a test function with more than CASES cases that many run a day. Those that failed last
come first in each part, then the shorter ones.
"""

from __future__ import annotations

import ast
import datetime
import functools
import gzip
import json
import os
import re
import subprocess
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MAP = ROOT / "build" / "test-map.json.gz"
PACKAGE = "src/hostcall/"
CASES = 8  # of one test function
DAYS = 28  # every case runs within them: four weeks
# Of the tests, added up, as long as they took when the map was written. Three minutes of
# two cores are 360; a quarter is for collecting, and for what starts and ends.
TOUCHED_SECONDS = 130.0
ALL_SECONDS = 270.0
USUAL_SECONDS = 0.15  # of a test that is not in the map
# Tests that are not over when this has passed since the start are left for another day.
WALL_SECONDS = 170.0

# --- What differs ---------------------------------------------------------------------


def git(*command: str) -> str | None:
    """What a command of git prints; None if there is no git, or no repository."""
    try:
        return subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def last_merge() -> str | None:
    """The commit that work began from: where this branch left `main`, or the last merge.

    The variable BASE names another one. None if there is no repository.
    """
    if given := os.environ.get("BASE"):
        return given
    head = git("rev-parse", "HEAD")
    if head is None or (git("rev-parse", "--show-prefix") or "").strip():
        return None  # ROOT is a copy inside of another repository
    for main in ("origin/main", "main"):
        fork = git("merge-base", "HEAD", main)
        if fork is not None and fork != head:
            return fork.strip()
    return (git("log", "-1", "--merges", "--format=%H") or "").strip() or head.strip()


def changed_files(base: str) -> list[str]:
    differ = git("diff", "--name-only", base, "--") or ""
    new = git("ls-files", "--others", "--exclude-standard") or ""
    return sorted({*differ.split("\n"), *new.split("\n")} - {""})


class _NoDocstrings(ast.NodeTransformer):
    """Drops docstrings, and what else is an expression without any effect."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def functions_of(source: str) -> dict[str, str]:
    """The syntax of each function and method of a file, and of each other statement.

    Functions have their qualified names, other statements the names that they bind:
    `=LIMIT` for `LIMIT = 3`, and `Class=` for the statements of a class.
    """
    found: dict[str, str] = {}

    def add(name: str, node: ast.AST) -> None:
        stripped = _NoDocstrings().visit(node)
        if stripped is not None:
            found[name] = found.get(name, "") + ast.dump(stripped)

    def walk(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                add(prefix + node.name, node)
            elif isinstance(node, ast.ClassDef):
                head = [*node.bases, *node.keywords, *node.decorator_list]
                found[f"{prefix}{node.name}="] = "".join(map(ast.dump, head))
                walk(node.body, f"{prefix}{node.name}.")
            elif prefix:
                add(f"{prefix[:-1]}=", node)
            else:
                for name in bound_names(node) or [""]:
                    add(f"={name}", node)

    walk(ast.parse(source).body, "")
    return found


def bound_names(node: ast.stmt) -> list[str]:
    """The names that a statement binds, those of its own blocks too."""
    names = [
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]
    for each in ast.walk(node):
        if isinstance(each, (ast.Import, ast.ImportFrom)):
            names += [alias.asname or alias.name for alias in each.names]
    return names


def differing(old: str, new: str) -> set[str]:
    """The functions that two versions of a file have in different forms.

    A statement that is in no function touches those that use the names that it binds.
    """
    before, after = functions_of(old), functions_of(new)
    names = {n for n in before | after if before.get(n) != after.get(n)}
    functions = {name for name in names if "=" not in name}
    bound = {name[1:] for name in names if name.startswith("=")}
    classes = {name[:-1] for name in names if name.endswith("=") and name != "="}
    bound |= {name.rpartition(".")[2] for name in classes}
    used = re.compile(r"id='(\w+)'")
    for name, syntax in after.items():
        in_class = name.rpartition(".")[0] in classes
        if in_class or bound.intersection(used.findall(syntax)):
            functions.add(name.removesuffix("="))
    return {name for name in functions if not name.startswith("=")}


def source_then(base: str, path: str) -> str:
    return git("show", f"{base}:{path}") or ""


def source_now(path: str) -> str:
    file = ROOT / path
    return file.read_text() if file.exists() else ""


def differing_in(base: str, path: str) -> set[str]:
    try:
        return differing(source_then(base, path), source_now(path))
    except SyntaxError:
        return set()


# --- Which tests that touches -----------------------------------------------------------


@dataclass
class Map:
    """What `make test-map` has written, or nothing."""

    seconds: dict[str, float] = field(default_factory=dict)
    functions: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Map:
        if not path.exists():
            return cls()
        with gzip.open(path, "rt") as file:
            written = json.load(file)
        names = [name for name, _ in written["tests"]]
        numbers = written["functions"].items()
        return cls(
            seconds=dict(written["tests"]),
            functions={f: [names[n] for n in tests] for f, tests in numbers},
        )


def words(text: str) -> set[str]:
    """The words of a path or a name, without plurals: `_api/tap_queue.py` has three."""
    found = re.findall(r"[a-z]+|[A-Z][a-z]*", text)
    return {w.lower().removesuffix("s") for w in found} - _ANYWHERE


_ANYWHERE = {"", "py", "src", "hostcall", "native", "init", "cc", "h", "md", "test"}


@dataclass(frozen=True)
class Collected:
    """A test that pytest has collected.

    Attributes:
        name: its node id.
        file: from ROOT.
        function: its qualified name in the file.
    """

    name: str
    file: str
    function: str

    @property
    def key(self) -> str:
        return f"{self.file}::{self.function}"


class Scores:
    """By name of a test: how much it has to do with what differs. More is more.

    Attributes:
        changed: tests that differ themselves.
    """

    def __init__(self, tests: list[Collected], known: Map) -> None:
        self.tests, self.known = tests, known
        self.of: dict[str, float] = defaultdict(float)
        self.changed: set[str] = set()
        self._words = {test.name: words(test.name) for test in tests}
        self._functions_run: dict[str, int] = defaultdict(int)
        for names in known.functions.values():
            for name in names:
                self._functions_run[name] += 1

    def run(self, path: str, functions: set[str]) -> None:
        """Functions of a file of hostcall differ: those that run them, first what runs
        little else. Words say it of functions that no test of the map runs.
        """
        unknown = []
        for function in functions:
            running = self._words.keys() & self.known.functions.get(
                f"{path}::{function}", ()
            )
            if not running:
                unknown.append(function)
            for name in running:
                rare = len(running) * self._functions_run[name]
                self.of[name] += 1 / rare**0.5
        if unknown:
            self.speak_of(path, *unknown)

    def own(self, path: str, functions: set[str]) -> None:
        """Functions of a file of tests differ, or of what such files import."""
        file = Path(path)
        imports = re.compile(rf"^\s*(import|from) {file.stem}\b", re.MULTILINE)
        importing = {
            name
            for name in {test.file for test in self.tests}
            if imports.search(text_of(name))
            or (file.name == "conftest.py" and file.parent in Path(name).parents)
        }
        for test in self.tests:
            if test.file == path and test.function in functions:
                self.changed.add(test.name)
            elif test.file in importing:
                self.of[test.name] += 0.01

    def speak_of(self, path: str, *functions: str) -> None:
        """Tests whose names have the words of a path, or whose files name that file."""
        wanted = words(" ".join([path, *functions]))
        file = Path(path).name
        naming = {t.file for t in self.tests if file in text_of(t.file)}
        for test in self.tests:
            said = len(wanted & self._words[test.name]) + 0.2 * (test.file in naming)
            if said:
                self.of[test.name] += 0.01 * said


def scores(
    base: str, files: Iterable[str], tests: list[Collected], known: Map
) -> Scores:
    """How much each test has to do with what differs in these files."""
    scored = Scores(tests, known)
    for path in files:
        if not path.startswith((PACKAGE, "tests/")) or not path.endswith(".py"):
            scored.speak_of(path)
        elif functions := differing_in(base, path):
            if path.startswith(PACKAGE):
                scored.run(path.removeprefix(PACKAGE), functions)
            else:
                scored.own(path, functions)
    return scored


text_of = functools.cache(source_now)


# --- What runs --------------------------------------------------------------------------


def number_of(name: str) -> int:
    """A number that is a test's own, the same in each process."""
    return zlib.crc32(name.encode())


def eight_a_day(names: list[str], day: int) -> list[str]:
    """CASES of the cases of a function, the next ones each day."""
    ordered = sorted(names, key=number_of)
    if len(ordered) <= CASES:
        return ordered
    begin = day * CASES % len(ordered)
    return (ordered + ordered)[begin : begin + CASES]


def share_of_a_day(names: list[str], day: int, days: int) -> list[str]:
    """The cases of a function whose day it is: each has one in `days`, or in more if
    there were more than CASES a day.
    """
    ordered = sorted(names, key=number_of)
    days = max(days, -(-len(ordered) // CASES))
    first = number_of(ordered[0].partition("[")[0])
    return [name for n, name in enumerate(ordered) if (first + n - day) % days == 0]


def in_turns(names: Iterable[str], key: Callable[[str], str]) -> Iterator[str]:
    """The first of each group, then the second of each: `names` with the groups mixed."""
    turns: dict[str, int] = defaultdict(int)
    numbered = []
    for name in names:
        numbered.append((turns[key(name)], name))
        turns[key(name)] += 1
    return (name for _, name in sorted(numbered, key=lambda pair: pair[0]))


@dataclass
class Chosen:
    """Names of tests, in the order in which they run."""

    smoke: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    wide: list[str] = field(default_factory=list)
    left_out: int = 0  # touched tests, for which there is no time


def choose(
    tests: list[Collected],
    known: Map,
    scored: Scores,
    day: int,
    failed_last: Iterable[str] = (),
) -> Chosen:
    chosen = Chosen()
    took = lambda name: known.seconds.get(name, USUAL_SECONDS)
    failed = set(failed_last)
    smoke = [t.name for t in tests if t.file.endswith("/test_smoke.py")]
    chosen.smoke = sorted(smoke, key=lambda n: (n not in failed, took(n)))
    taken = set(smoke)
    left = ALL_SECONDS - sum(map(took, smoke))
    cases: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        if test.name not in taken:
            cases[test.key].append(test.name)
    key_of = {test.name: test.key for test in tests}

    scored_names = {*scored.of, *scored.changed} - taken
    again = [test.name for test in tests if test.name in failed - taken]
    # By name too: each worker chooses, and a set has another order in each process.
    differ = sorted(scored.changed - taken - {*again}, key=lambda n: (took(n), n))
    touched = [*again, *differ]
    by_key: dict[str, list[str]] = defaultdict(list)
    for name in sorted(scored_names - {*touched}):
        by_key[key_of[name]].append(name)
    rest = [n for names in by_key.values() for n in eight_a_day(names, day)]
    rest.sort(key=lambda n: (-scored.of[n] / (took(n) + 0.1) ** 0.5, n))
    touched += in_turns(rest, key_of.__getitem__)
    budget = min(TOUCHED_SECONDS, left)
    for name in touched:
        if budget < took(name) and name not in again:
            chosen.left_out += 1
            continue
        budget -= took(name)
        left -= took(name)
        chosen.touched.append(name)
    taken.update(chosen.touched)

    whole = sum(took(n) for names in cases.values() for n in names)
    days = max(DAYS, int(whole / max(left, 30.0)) + 1)
    wide = [n for names in cases.values() for n in share_of_a_day(names, day, days)]
    chosen.wide = [name for name in wide if name not in taken]
    return chosen


# --- The plugin of pytest -----------------------------------------------------------------


def test_of(item: pytest.Item) -> Collected:
    file = item.path.relative_to(ROOT).as_posix()
    inside = item.nodeid.partition("::")[2].partition("[")[0]
    return Collected(item.nodeid, file, inside.replace("::", "."))


class Fast:
    """Deselects the tests that `choose` leaves out, and orders the others."""

    def __init__(self) -> None:
        # Workers of xdist read both: they must choose the same tests.
        os.environ.setdefault("FAST_DAY", str(datetime.date.today().toordinal()))
        os.environ.setdefault("FAST_BEGAN", str(time.time()))
        self.ends = float(os.environ["FAST_BEGAN"]) + WALL_SECONDS
        self.words: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        tests = [test_of(item) for item in items]
        known = Map.read(MAP)
        base = last_merge()
        files = [] if base is None else changed_files(base)
        scored = scores(base or "", files, tests, known)
        cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
        failed = cache.get("cache/lastfailed", {}) if cache else {}
        chosen = choose(tests, known, scored, int(os.environ["FAST_DAY"]), failed)
        rank = [*chosen.smoke, *chosen.touched, *chosen.wide]
        order = {name: number for number, name in enumerate(rank)}
        config.hook.pytest_deselected(
            items=[item for item in items if item.nodeid not in order]
        )
        items[:] = sorted(
            (item for item in items if item.nodeid in order),
            key=lambda item: order[item.nodeid],
        )
        self.tell(base, files, known, chosen)

    def tell(
        self, base: str | None, files: list[str], known: Map, chosen: Chosen
    ) -> None:
        since = f"{len(files)} files differ from {base[:10]}" if base else "no git here"
        self.words = [
            f"fast: {len(chosen.smoke)} smoke, {len(chosen.touched)} touched ({since}),"
            f" {len(chosen.wide)} wide"
        ]
        if chosen.left_out:
            self.words.append(
                f"fast: {chosen.left_out} more tests are touched than"
                f" {TOUCHED_SECONDS:.0f} s allow: `make test` runs them"
            )
        if files and not known.functions:
            self.words.append(
                f"fast: without {MAP.relative_to(ROOT)}, words say what is touched."
                " `make test-map` writes it, and so does CI (CONTRIBUTING.md)"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.time() > self.ends:
            pytest.skip(f"fast: {WALL_SECONDS:.0f} s are over")

    def pytest_report_collectionfinish(self) -> list[str]:
        return self.words

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        told = getattr(session.config, "workeroutput", None)
        if told is not None:  # a worker of xdist: its controller has collected nothing
            told["fast"] = self.words

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.words = getattr(node, "workeroutput", {}).get("fast", self.words)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.words:
            terminalreporter.write_line(line)


# --- The tests of C++ ---------------------------------------------------------------------

NATIVE_TESTS = ROOT / "tests" / "native"


def included(file: Path, seen: set[Path]) -> set[Path]:
    """A file of C++, and those of this repository that it includes."""
    if file in seen or not file.exists():
        return seen
    seen.add(file)
    for name in re.findall(r'^#include "(.*)"', file.read_text(), re.MULTILINE):
        for folder in (file.parent, ROOT / "native", NATIVE_TESTS):
            included((folder / name).resolve(), seen)
    return seen


def native_tests() -> list[str]:
    """The tests of tests/native/Makefile that what differs is compiled into."""
    base = last_merge()
    files = {(ROOT / name).resolve() for name in changed_files(base)} if base else set()
    makefile = (NATIVE_TESTS / "Makefile").read_text()
    (names,) = re.findall(r"^TESTS := (.*)", makefile, re.MULTILINE)
    return [
        name
        for name in names.split()
        if not files.isdisjoint(included(NATIVE_TESTS / f"{name}_test.cc", set()))
    ]


if __name__ == "__main__":
    print(*native_tests())
