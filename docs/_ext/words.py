"""Words that readers search for and that a page may not have.

They become entries of the index and keywords of the page. The site's search finds both,
and ranks a page by them (_static/scorer.js). Codes of errors and public names are added
to their own pages. `make docs` asks the search what tests/repo/test_search.py lists.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes

ABOUT = {
    "benchmarks": "benchmark, timings, figures",
    "bridges": "torch, pytorch, autograd, sympy, tensorflow",
    "buffers": "numba, cupy, dlpack, ctypes, cffi, zero copy, machine code, in place",
    "caching": "cache, memoize, memoization, lru_cache",
    "calling": "scipy, numpy, simulator, solver, float64, double precision, vmap, batch, order",
    "changelog": "release notes, what's new, history, versions",
    "choosing": "overview, which function",
    "clients": "compatibility, supported libraries",
    "comparison": "alternatives, compare",
    "dependencies": "requirements, packages",
    "derivatives": "gradient, grad, jacobian, custom_vjp, custom_jvp, autodiff, backward",
    "errors": "exception, traceback, error codes, catch, JaxRuntimeError",
    "exporting": "export, serialize, save a program, deploy, jax.export",
    "failures_over_processes": "crash, abort, fault tolerance",
    "faq": "faq, questions, print in jit, unknown shape, dynamic shape, thread safety, twice, hang, deadlock",
    "feeding": "data loader, dataloader, dataset, batches, iterator",
    "gpu": "cuda, nvidia, tpu, rocm, amd, accelerator",
    "index": "install, pip, getting started, platforms, macos, windows, license",
    "matrix": "supported transformations, dtypes",
    "migrating/host_callback": "host_callback, id_tap, id_print, deprecated, removed",
    "migrating/others": "jax-tqdm, checkify, torch2jax, tesseract, migration",
    "notebooks": "jupyter, ipython, colab",
    "nutshell": "tutorial, quickstart, introduction, mistakes",
    "objects": "gymnasium, environment, stateful, state, simulator",
    "pools": "dask, ray, joblib, multiprocessing, parallel, cluster, workers",
    "processes": "distributed, multi host, sharding, shard_map, mesh, slurm",
    "progress": "progress bar, tqdm, eta",
    "recording": "tensorboard, wandb, mlflow, csv, metrics, logging",
    "releasing": "wheels, macos, publish",
    "speed": "performance, slow, fast, overhead, latency, dispatch, cost",
    "stopping": "early stopping, stop, break, cancel, interrupt, abort, patience",
    "taps": "log, logging, print, every, when_full",
    "tracing": "profile, profiler, perfetto, flight recorder, timeline",
    "waiting": "async, await, asyncio, timeout, http, server, requests",
    "watches": "debug, debugger, breakpoint, pdb, nan, inf, jax_debug_nans",
}


def add(app: Any, doctree: nodes.document) -> None:
    page = app.env.docname
    words = [word for word in ABOUT.get(page, "").split(", ") if word]
    folder, _, name = page.partition("/")
    if folder == "errors":
        words.append(name)
    elif folder == "reference" and name != "index":
        words += [name.replace("hostcall.", "hc."), name.rpartition(".")[2]]
    entries = [("single", word, "", "main", None) for word in words]
    content = ", ".join(re.findall(r"\w+", " ".join(words)))
    doctree.insert(0, addnodes.index(entries=entries))
    doctree.insert(0, nodes.meta(name="keywords", content=content))


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
