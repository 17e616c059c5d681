"""docs/notebooks.md: its blocks are cells of a notebook, and show what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "notebooks.md"
# A cell, and what it shows if the page says so.
BLOCKS = re.findall(
    r"^```py(?:thon)?\n(.*?)^```\n(?:```text\n(.*?)^```)?",
    PAGE.read_text(),
    re.M | re.S,
)

RUN = """
import json, sys, nbformat
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(source) for source in json.load(open(sys.argv[1]))]
book = nbformat.v4.new_notebook(cells=cells)
NotebookClient(book, kernel_name="python3", allow_errors=True).execute()
print("says:", json.dumps([cell.outputs for cell in book.cells]))
"""


def shown(outputs):
    """What a reader sees of a cell's outputs: printed text, and the error's last line."""
    text = "".join(o["text"] for o in outputs if o.get("name") == "stdout")
    errors = [o for o in outputs if o["output_type"] == "error"]
    return text + "".join(f"{e['ename']}: {e['evalue']}\n" for e in errors)


def test_the_cells_show_what_the_page_says(run_python, tmp_path):
    for package in ("nbclient", "nbformat", "ipykernel", "tqdm"):
        pytest.importorskip(package)
    env = {"IPYTHONDIR": str(tmp_path), "JUPYTER_PLATFORM_DIRS": "1"}
    sources = tmp_path / "cells.json"
    sources.write_text(json.dumps([source for source, _ in BLOCKS]))
    done = run_python(RUN, str(sources), env=env)
    (told,) = re.findall("says: (.*)", done.stdout)
    outputs = json.loads(told)
    assert len(outputs) == len(BLOCKS) > 8
    for (source, wanted), of_cell in zip(BLOCKS, outputs, strict=True):
        if wanted or "hc.print" not in source:
            assert shown(of_cell) == wanted, source
    assert shown(outputs[0]) == "x is 1.0\n"
