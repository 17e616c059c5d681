"""docs/notebooks.md: its blocks are cells of a notebook, and show what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from limits import PROGRAM_SECONDS

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


STUCK = """
import time, jax, jax.numpy as jnp, hostcall as hc
def stuck(x):
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
jax.jit(lambda x: hc.call(stuck, x, x))(1.0).block_until_ready()
"""
MANY = """
def short(x):
    if x == 100:
        print("ready", flush=True)
    return x + 1
loop = jax.jit(lambda x: jax.lax.fori_loop(0, 10**9, lambda i, c: hc.call(short, c, c), x))
print(float(loop(0.0)))
"""


@pytest.mark.filterwarnings("ignore")  # of the packages that run the kernel
def test_the_stop_button(monkeypatch, tmp_path):
    """It ends a cell in one long call and in many short ones; the kernel lives on."""
    jupyter = pytest.importorskip("jupyter_client.manager")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    manager, client = jupyter.start_new_kernel(startup_timeout=PROGRAM_SECONDS)

    def stop(message):
        if "ready" in message["content"].get("text", ""):
            manager.interrupt_kernel()

    def run(cell):
        reply = client.execute_interactive(
            cell, output_hook=stop, timeout=PROGRAM_SECONDS
        )
        return reply["content"]

    try:
        for _ in range(2):  # the kernel puts Python's handler back for each cell
            assert run(STUCK)["ename"] == "KeyboardInterrupt"
        assert run(MANY)["ename"] == "KeyboardInterrupt"
        assert (
            run("assert jax.jit(lambda x: hc.call(abs, x, x))(-1.0) == 1")["status"]
            == "ok"
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
