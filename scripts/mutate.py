"""Changes one operator or constant at a time, and runs the tests that cover its line.

    python scripts/mutate.py COVERAGE-DATA [--count 150] [--seed 1]

COVERAGE-DATA is what `make coverage` leaves. A mutant survives if all tests pass.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import coverage

FILES = ["_core/*.py", "_engine/*.py", "_engine/params/*.py", "_export/*.py"]
FILES += ["*/**/batching.py"]
# Primitives, which have all rules in one file.
FILES += [f"_primitives/{p}.py" for p in ("buffer", "feed", "drop_in", "blocks")]
FILES += ["_primitives/tap/*.py"]
FIRST, MOST, LIMIT = 12, 80, 150  # tests, tests, seconds
PAIRS = ["Lt LtE", "Gt GtE", "Eq NotEq", "Is IsNot", "In NotIn", "And Or", "Add Sub"]
OTHER: dict[type, type] = {ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}
for one, other in ((getattr(ast, name) for name in p.split()) for p in PAIRS):
    OTHER |= {one: other, other: one}


def changed(node: ast.AST) -> ast.AST | None:
    """The node with another operator; None if it has none that is changed."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            return ast.Compare(node.left, [OTHER[type(op)]()], node.comparators)
        case ast.BoolOp(op=op):
            return ast.BoolOp(OTHER[type(op)](), node.values)
        case ast.BinOp(op=op) if type(op) in OTHER:
            return ast.BinOp(node.left, OTHER[type(op)](), node.right)
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value)):
            return ast.Constant(value + 1)
    return None


def mutants(path: Path) -> Iterator[tuple[Path, int, str, bytes]]:
    """(file, line, what was changed, the new source) of each mutant of a file."""
    source = path.read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    nodes = list(ast.walk(ast.parse(source)))
    texts = [n for n in nodes if isinstance(n, (ast.JoinedStr, ast.Raise))]
    types = [getattr(n, p, None) for n in nodes for p in ("annotation", "returns")]
    inside = [ast.walk(n) for n in [*texts, *types] if isinstance(n, ast.AST)]
    skipped = set().union(*inside)
    for node in (n for n in nodes if n not in skipped):
        if isinstance(node, ast.expr) and (new := changed(node)):
            begin = begins[node.lineno - 1] + node.col_offset
            end = begins[node.end_lineno - 1] + node.end_col_offset
            old, put = source[begin:end].decode(), ast.unparse(new)
            whole = source[:begin] + f"({put})".encode() + source[end:]
            yield path, node.lineno, f"{' '.join(old.split())}  ->  {put}", whole


def covering(data: coverage.CoverageData, file: Path, line: int) -> list[str]:
    """The tests that cover a line, those first that reach what few reach beside it.

    After the first ones, the files of tests take turns. All tests that cover any of the
    file count for a line that an import runs. Tests whose programs cover the line come
    last, with the context "test (call)": they take many times as long.
    """
    by_line = data.contexts_by_lineno(str(file))
    near = range(line - 9, line + 10)
    found = set(by_line.get(line, ()))
    if "" in found:
        near = range(max(by_line) + 1)
        found = set().union(*by_line.values())
    few = [by_line[each] for each in near if each in by_line]
    size = Counter(one for contexts in by_line.values() for one in contexts)
    fewest = lambda c: min(len(contexts) for contexts in few if c in contexts)
    started = re.compile(r" \(\w+\)$")
    rank = lambda c: (started.search(c) is not None, fewest(c), size[c], c)
    ordered = sorted(found - {""}, key=rank)
    tests = list(dict.fromkeys(started.sub("", c) for c in ordered))
    turns: Counter[str] = Counter()
    turn = {}
    for test in tests[FIRST:]:
        file_of_tests = test.partition("::")[0]
        turns[file_of_tests] += 1
        turn[test] = turns[file_of_tests]
    return [*tests[:FIRST], *sorted(tests[FIRST:], key=turn.__getitem__)]


def run(package: Path, tests: Sequence[str], *options: str, **hooks: Any) -> str:
    """How tests go with this package, in a fork of this process, which has JAX."""
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_WRONLY)
        _ = os.dup2(null, 1), os.dup2(null, 2)
        os.environ["PYTHONPATH"] = str(package)
        sys.path[:0] = [str(package), "tests"]
        importlib.import_module("limits").HANG_SECONDS = 40
        # Bytecode is written once, of all tests. Mutants must not find that of others.
        sys.dont_write_bytecode = "--collect-only" not in options
        pytest = importlib.import_module("pytest")
        told = ["-xqpno:cacheprovider", *options, *tests]
        os._exit(pytest.main(told, [SimpleNamespace(**hooks)]))
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "killed" if status else "SURVIVED"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)  # the fork leads a group of its own
    os.waitpid(child, 0)
    return "hung"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    os.chdir(Path(__file__).parents[1])
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    __import__("jax")  # before the forks, which then need not
    (data := coverage.CoverageData(given.data)).read()
    # What was measured is the installed package.
    here = Path(importlib.util.find_spec("hostcall").origin).parent
    work = Path(tempfile.mkdtemp())
    os.environ["GCOV_PREFIX"] = str(work)  # what mutants run of C++ is not counted
    shutil.copytree(here, work / "hostcall", ignore=shutil.ignore_patterns("*.pyc"))
    known = work / "tests"  # written by the fork
    write = lambda items: known.write_text("\n".join(i.nodeid for i in items))
    run(work, ["tests"], "--collect-only", pytest_collection_modifyitems=write)
    names = set(known.read_text().splitlines())
    files = [path for pattern in FILES for path in sorted(here.glob(pattern))]
    chosen = [mutant for path in files for mutant in mutants(path)]
    random.Random(given.seed).shuffle(chosen)
    print(f"{len(chosen)} mutants; {given.count} of them, at random", flush=True)
    how: Counter[str] = Counter()
    # A test that fails without any change would kill all of its mutants.
    sound = functools.cache(lambda *tests: run(work, tests) == "SURVIVED")
    failed = work / "failed"  # the test that did, written by the fork
    note = lambda report: report.failed and failed.write_text(report.nodeid)
    for path, line, what, source in chosen[: given.count]:
        tests = [t for t in covering(data, path, line) if t in names][:MOST]
        mutated = work / "hostcall" / path.relative_to(here)
        mutated.write_bytes(source)
        went = "untested"
        for some in (tests[:FIRST], tests[FIRST:]):  # most die at once
            if some and went in ("untested", "SURVIVED"):
                failed.write_text("")
                went = run(work, some, pytest_runtest_logreport=note)
                shutil.copy(path, mutated)
                by = [failed.read_text()] if failed.read_text() else some
                if went != "SURVIVED" and not sound(*by):
                    went = "broken"
                mutated.write_bytes(source)
        shutil.copy(path, mutated)
        how[went] += 1
        print(f"{went:8} {path.relative_to(here)}:{line}: {what}", flush=True)
    shutil.rmtree(work)
    print(dict(how))


if __name__ == "__main__":
    main()
