"""Words that readers search for and that a page may not have.

They become keywords of the page, by which the search finds it, and a table in front of
_static/scorer.js, by which it is ranked. Codes of errors and public names are words of
their own pages. Not entries of the index: Sphinx forgets those of pages that it keeps.
Pages of the design are in no index: they are linked from the page for contributors.
tests/repo/test_search.py asks the search of a built site.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).parents[1]

ABOUT = {
    "benchmarks": "benchmark, timings, figures",
    "bridges": "torch, pytorch, autograd, sympy, tensorflow",
    "buffers": "numba, cupy, dlpack, ctypes, cffi, zero copy, machine code, in place",
    "calling": "scipy, simulator, solver, float64, precision, vmap, batch, order",
    "changelog": "release notes, what's new, history, versions",
    "choosing": "overview, which function",
    "comparison": "alternatives, compare, jax-tqdm, checkify, torch2jax, tesseract,"
    " migration",
    "contributing": "requirements, packages, dependencies, wheels, macos, publish,"
    " releasing",
    "derivatives": "gradient, grad, jacobian, custom_vjp, custom_jvp, autodiff",
    "errors": "exception, traceback, error codes, catch, JaxRuntimeError",
    "errors/arguments": "UnexpectedTracerError, tracer, leaked tracer, closure",
    "errors/results": "shape mismatch, wrong shape, wrong structure, dtype mismatch,"
    " wrong dtype, overflow, rounding",
    "exporting": "export, serialize, save a program, deploy, jax.export",
    "external_callbacks": "compatibility, supported libraries, patch",
    "faq": "faq, cache, memoize, lru_cache, print in jit, unknown shape, dynamic shape,"
    " thread safety, twice, hang, hangs, stuck, freeze, retry, try again, mypy,"
    " pyright, type checker",
    "feeding": "data loader, dataloader, dataset, batches, iterator",
    "gpu": "cuda, nvidia, tpu, rocm, amd, accelerator",
    "index": "install, pip, getting started, platforms, macos, windows, license",
    "matrix": "supported transformations, dtypes",
    "host_callback": "host_callback, id_tap, id_print, deprecated, removed",
    "notebooks": "jupyter, ipython, colab",
    "nutshell": "tutorial, quickstart, introduction, mistakes",
    "objects": "gymnasium, environment, stateful, state, simulator",
    "processes": "distributed, multi host, sharding, shard_map, mesh, slurm, crash,"
    " abort, fault tolerance",
    "progress": "progress bar, tqdm, eta",
    "recording": "tensorboard, wandb, mlflow, csv, metrics, logging",
    "reference/monitor": "hc.monitor.stats, hc.monitor.feeds, hc.monitor.tap_queue",
    "running": "dask, ray, joblib, multiprocessing, parallel, cluster, workers, pool,"
    " async, await, asyncio, timeout, http, server, requests",
    "speed": "performance, slow, fast, overhead, latency, dispatch, cost",
    "stopping": "early stopping, stop, break, cancel, interrupt, abort, patience",
    "taps": "log, logging, print, every, when_full",
    "testing": "test, tests, unit test, pytest, mock, fake, testing, collect, check",
    "watching": "profile, profiler, perfetto, flight recorder, timeline, monitoring,"
    " tracing",
    "watches": "debug, debugger, breakpoint, pdb, nan, inf, jax_debug_nans",
}

# Pages for those who work on hostcall: the search does not find them.
DEVELOPERS = "design/"


def words(page: str) -> list[str]:
    about = ABOUT[page].split(", ") if page in ABOUT else []
    folder, _, name = page.partition("/")
    if folder == "errors" and name:
        text = (ROOT / f"{page}.md").read_text()
        about += re.findall(r"^## (hc-\S+)$", text, re.M)
    if folder == "reference" and name not in ("", "index"):
        name = name.removeprefix("hostcall.")
        about += [f"hc.{name}", f"hostcall.{name}", name.rpartition(".")[2]]
    return about


def add_keywords(app: Any, doctree: nodes.document) -> None:
    if app.env.docname.startswith(DEVELOPERS):
        app.env.metadata[app.env.docname]["nosearch"] = "1"
    content = ", ".join(re.findall(r"\w+", " ".join(words(app.env.docname))))
    doctree.insert(0, nodes.meta(name="keywords", content=content))


def write_scorer(app: Any, env: Any) -> None:
    """The scorer of the site: the table, and the file in _static."""
    table = {page: words(page) for page in sorted(env.found_docs)}
    code = Path(app.srcdir, app.config.html_search_scorer).read_text()
    made = Path(app.doctreedir, "scorer.js")
    made.write_text(f"const ABOUT = {json.dumps(table)};\n{code}")
    app.config.html_search_scorer = str(made)


def setup(app: Any) -> dict[str, bool]:
    # All pages are read again after a change.
    app.add_config_value("words", ABOUT, "env")
    app.connect("doctree-read", add_keywords)
    app.connect("env-updated", write_scorer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
