"""The pages for users: their programs, run one after the other, print what the pages
say, and each cell of the table in docs/external_callbacks.md is true.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"external_callbacks.md": 16, "host_callback.md": 3}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pmap is deprecated
@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_the_page(page):
    pytest.importorskip("scipy")
    text = (DOCS / page).read_text()
    cells = re.findall(r"^```py\n(.*?)^```\n```text\n(.*?)^```", text, re.M | re.S)
    assert len(cells) == text.count("```py\n") == PAGES[page]
    run(page, cells, {})


def run(page, cells, names):
    for source, wanted in cells:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                exec(compile(source, f"<{page}>", "exec"), names)
            except ValueError as error:
                print(f"ValueError: {str(error).splitlines()[0]}")
        assert numbers(out.getvalue()) == numbers(wanted), source


def numbers(text):
    """The text with numbers of five digits, since the last ones differ between
    machines.
    """
    rounded = re.sub(r"-?\d+\.\d*", lambda m: f"{float(m[0]):.5f}", text)
    return re.sub(r"\[ +", "[", re.sub(r" +", " ", rounded))


# --- The table --------------------------------------------------------------------------

KINDS = {
    "pure": lambda fn, x: hc.pure_callback(fn, x, x),
    "io": lambda fn, x: hc.io_callback(fn, x, x),
    "ordered": lambda fn, x: hc.io_callback(fn, x, x, ordered=True),
    "debug": lambda fn, x: (hc.debug.callback(fn, x), x)[1],
}
X = jnp.arange(3.0)


def returns(api, seen):
    assert (api(lambda x: x + 1, X) == X + 1).all()


def jit(api, seen):
    jax.jit(lambda x: api(lambda v: (seen.append(1), v)[1], x))(X)


def vmap(api, seen):
    jax.vmap(lambda x: api(lambda v: (seen.append(1), v)[1], x))(X)


def grad(api, seen):
    jax.grad(lambda x: api(lambda v: (seen.append(1), v)[1], x))(1.0)


def scan(api, seen):
    body = lambda c, x: (c, api(lambda v: (seen.append(1), v)[1], x))
    lax.scan(body, 0, X)


def while_loop(api, seen):
    body = lambda x: api(lambda v: (seen.append(1), np.asarray(v) + 1)[1], x) + 1
    lax.while_loop(lambda x: x < 3, body, 0.0)


def execution(api, seen):
    """The call with unused results."""

    @jax.jit
    def f(x):
        api(lambda v: (seen.append(1), v)[1], x)
        return x

    f(X)
    jax.effects_barrier()
    assert seen


TABLE = {
    returns: {"pure": True, "io": True, "ordered": True, "debug": False},
    jit: dict.fromkeys(KINDS, True),
    vmap: {"pure": True, "io": True, "ordered": False, "debug": True},
    grad: {"pure": False, "io": False, "ordered": False, "debug": True},
    scan: dict.fromkeys(KINDS, True),
    while_loop: dict.fromkeys(KINDS, True),
    # JAX may drop a debug callback, though it does not here.
    execution: {"pure": False, "io": True, "ordered": True, "debug": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", TABLE, ids=lambda cell: cell.__name__)
def test_cell(cell, kind):
    seen: list[int] = []
    if TABLE[cell][kind]:
        cell(KINDS[kind], seen)
        jax.effects_barrier()
        assert seen or cell is returns
    else:
        with pytest.raises((ValueError, AssertionError)):
            cell(KINDS[kind], seen)
        assert not seen
