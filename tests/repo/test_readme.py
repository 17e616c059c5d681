"""The README's and the docs' programs run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPLAINED = sorted((ROOT / "docs" / "errors").glob("*.md"))
CODE = re.compile(r"^## (hc-\S+)$", re.M)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# "```python torch": a program that needs a package of the optional ones.
BLOCKS = [
    pytest.param(page, needs.split(), block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (needs, block) in enumerate(
        re.findall(r"^```python( [^\n]*)?\n(.*?)^```", page.read_text(), re.M | re.S)
    )
    if "torch" not in needs
]


@pytest.mark.parametrize(("page", "needs", "block"), BLOCKS)
def test_block_runs(page, needs, block):
    for package in needs:
        pytest.importorskip(package)
    names = {"__name__": "__main__"}
    exec(compile(block, "<documentation>", "exec"), names)
    if page in EXPLAINED:  # what the program has caught has the code of its section
        section = CODE.findall(page.read_text().partition(block)[0])[-1]
        # Taken out: its traceback leads to a compiled program, which is not garbage while
        # the function that it calls, whose globals these are, leads to it.
        assert names.pop("caught").code == section


def test_the_first_screen_has_a_program_that_ends_in_an_assert():
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    (first, *_) = re.findall(r"^```python\n(.*?)^```", screen, re.M | re.S)
    assert first.rstrip().splitlines()[-1].startswith("assert")
    assert "make demo" in screen
    assert "make test" in screen
    assert "| JAX's callbacks | hostcall |" in screen


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md"])
def test_a_cell_of_the_table_has_one_time(page):
    """So that the two cells of a row are compared with each other."""
    rows = [r for r in (ROOT / page).read_text().splitlines() if r.startswith("| ")]
    assert any("µs" in row for row in rows)
    for row in rows:
        for cell in row.split("|"):
            times = re.findall(r"[0-9.]+ (?:µs|us|ms|s)\b", cell)
            assert len(times) <= 1, row
            assert not re.search(r"\d, \d", cell), row


WITH_TORCH = [page for page in PAGES if "```python torch" in page.read_text()]


@pytest.mark.parametrize("page", WITH_TORCH, ids=lambda p: p.name)
def test_the_programs_with_torch(run_python, page):
    """In a separate process: torch is large, and would stay in this one."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    text = page.read_text()
    blocks = re.findall(r"^```python torch\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) == text.count("```python torch")
    run_python("\n".join(blocks))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
