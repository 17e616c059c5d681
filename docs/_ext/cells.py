"""Reads a page as a notebook: each ```python block is a cell. Those that show something
run in the build (conf.py).

Links to programs of the gallery lead to their pages.

A page stays Markdown for every other reader, and each of its programs also runs alone
(tests/repo/test_readme.py). "```python torch" runs where torch is installed.
Other blocks, such as "```py" and "```text", are shown as they are.
"""

from __future__ import annotations

import importlib.util
import re

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

_BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```\n", re.M | re.S)
_GALLERY = re.compile(r"\.\./examples/gallery/(plot_\w+)\.py\)")
_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def programs(text: str) -> list[str]:
    return [block[2] for block in _BLOCK.finditer(text)]


def read(text: str) -> nbformat.NotebookNode:
    text = _GALLERY.sub(r"gallery/\1.rst)", text)
    cells, at = [], 0
    for block in _BLOCK.finditer(text):
        needs, source = block[1].split(), block[2]
        if not all(map(importlib.util.find_spec, needs)):
            continue  # stays in the Markdown around it
        cells.append(new_markdown_cell(text[at : block.start()]))
        cells.append(new_code_cell(source.rstrip()))
        at = block.end()
    cells.append(new_markdown_cell(text[at:]))
    for number, cell in enumerate(cells):
        cell.metadata = nbformat.from_dict({})
        cell["id"] = str(number)
    return new_notebook(cells=cells, metadata={"kernelspec": _KERNEL})
