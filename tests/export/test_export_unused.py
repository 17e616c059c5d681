"""Programs that stay in the process import nothing of what export needs."""

from __future__ import annotations

import pytest

HEAD = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
import hostcall as hc

X = np.arange(3, dtype=np.float32)
sine = lambda x: np.sin(x)
square = hc.host(lambda x: x * x, result=hc.results.like(0), name="square")
square.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * x * ct,))

def imported():
    return [name for name in sys.modules if name.startswith("hostcall._export")]
"""
STAYING = {
    "a call": "f = lambda x: hc.call(sine, x, x)",
    "rows": "f = jax.vmap(lambda x: hc.call(sine, x, x, where=x > 1, fill=7))",
    "an ordered call": "f = lambda x: hc.call(sine, x, x, order='ordered')",
    "a tap": "f = lambda x: (hc.tap(lambda x: None, x), x)[1]",
    "a feed": "feed = hc.feed(iter(np.ones((9, 3), np.float32)))\n"
    "f = lambda x: feed()[0] + x",
    "a host function": "f = square",
    "its gradient": "f = jax.grad(lambda x: square(x).sum())",
    "an object": "o = hc.Object(lambda: [1, 2], methods={'count': jnp.int32(0)})\n"
    "f = lambda x: o.count(1) + x",
    "a drop-in": "f = lambda x: hc.pure_callback(sine, x, x)",
}


@pytest.mark.parametrize("eager", [False, True])
def test_a_program_that_stays_imports_nothing_of_export(run_python, eager):
    """All of them in one process, one after the other, so that the first is named."""
    run = "f(X)" if eager else "jax.jit(f)(X)"
    parts = [
        f"{source}\njax.block_until_ready({run})\nhc.barrier()\n"
        f"assert imported() == [], ({name!r}, imported())\n"
        for name, source in STAYING.items()
    ]
    run_python(HEAD + "".join(parts))


LEAVING = {
    "a registered function": "hc.register('tests.sine')(sine)",
    "its hc.host function": "hc.register('tests.f')(square)",
    "hc.print": "hc.print('{}', X)",
    "hc.export": "hc.export",
    "hc.load": "hc.load",
}


EACH = """
for name, leaves in {leaving}.items():
    child = os.fork()
    if child == 0:
        jax.jit(lambda x: (leaves(), x)[1])(X)
        os._exit(0 if imported() else 1)
    assert os.waitpid(child, 0)[1] == 0, name
assert not imported()
"""


def test_what_leaves_imports_it(run_python):
    """Otherwise the test above would show nothing. Each is in a fork of a process that has
    not used JAX.
    """
    leaving = ", ".join(f"{name!r}: lambda: {use}" for name, use in LEAVING.items())
    run_python(HEAD + EACH.format(leaving="{" + leaving + "}"))


REASONS = """
from jax.experimental import serialize_executable
compiled = jax.jit(lambda x: hc.call(sine, x, x)).lower(X).compile()
assert imported() == []
try:
    serialize_executable.serialize(compiled)
except hc.errors.ExportError as error:
    print("it has no name in other processes" in str(error), imported() != [])
"""


def test_why_a_program_stays_is_asked_when_it_is_serialized(run_python):
    assert run_python(HEAD + REASONS).stdout == "True True\n"
