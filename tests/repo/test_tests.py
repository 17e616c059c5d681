"""How tests are written: ordinary ones use public names, and none waits for a time."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hostcall"
TESTS = ROOT / "tests"
# They look at private parts, or run in place of hostcall's own.
INSIDE = {"inside", "repo", "fakegpu", "chips", "native"}
ORDINARY = [
    path
    for path in sorted(TESTS.glob("*/test_*.py"))
    if path.parent.name not in INSIDE and not path.stem.endswith("_inside")
]


def of_hostcall(name: str) -> bool:
    """Whether a dotted name is a private module or name of hostcall."""
    first, *rest = name.split(".")
    return first == "hostcall" and any(re.match("_[a-z]", part) for part in rest)


@functools.cache  # and not when the tests are collected, which each worker does
def private_attributes() -> set[str]:
    """`_name` of each attribute and method of hostcall's classes."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found |= {m.name for m in node.body if isinstance(m, ast.FunctionDef)}
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                found.add(node.attr)
    return {name for name in found if re.match("_[a-z]", name)}


@pytest.mark.parametrize("path", ORDINARY, ids=lambda path: path.stem)
def test_an_ordinary_test_uses_public_names(path):
    """What needs a private one is in tests/inside, or in a file `*_inside.py`."""
    used = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                used += [alias.name for alias in node.names if of_hostcall(alias.name)]
            case ast.ImportFrom():
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                used += [name for name in names if of_hostcall(name)]
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass  # of the test's own classes
            case ast.Attribute() if node.attr in private_attributes():
                used.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert used == []


# A loop that waits for an event asks again and again, and so does one that never ends, or
# a wait has its reason: on its line, or above it.
WAITS = re.compile(r"\bsleep\((?!0\))")
LOOP = re.compile(r"\b(while|for _ in range)\b")


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.stem
)
def test_a_sleep_polls_or_has_a_reason(path):
    lines = path.read_text().splitlines()
    without = []
    for number, line in enumerate(lines):
        if not WAITS.search(line) or path == Path(__file__):
            continue
        above = lines[number - 1] if number else ""
        if not (
            "#" in line or above.strip().startswith("#") or LOOP.search(above + line)
        ):
            without.append(f"{path.relative_to(ROOT)}:{number + 1}: {line.strip()}")
    assert without == []
