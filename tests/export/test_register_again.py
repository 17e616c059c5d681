"""Names that are given again: a definition that runs again, or another function."""

from __future__ import annotations

import functools
import gc
import textwrap
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

pytest.importorskip("flatbuffers")
X = jnp.linspace(0.1, 1.0, 4)
AGAIN = "so it can't be given to .* different data, so neither replaces the other"


def run_cell(source, k=1.0, line=0):
    """Runs a cell as a notebook does: it is compiled each time. Returns its `thing`."""
    names = {"hc": hc, "np": np, "jax": jax, "functools": functools, "k": k}
    names["__name__"] = "a_notebook"
    code = compile("\n" * line + textwrap.dedent(source), "<a cell>", "exec")
    exec(code, names)
    return names["thing"]


CELLS = {
    "def": """
        @hc.register("again.def")
        def thing(x):
            return k * x
    """,
    "lambda": 'thing = hc.register("again.lambda")(lambda x: k * x)',
    "closure": """
        def make(k):
            return lambda x: k * x
        thing = hc.register("again.closure")(make(k))
    """,
    "host": """
        @hc.register("again.host")
        @hc.host(result=hc.results.like(0))
        def thing(x):
            return k * x
    """,
    "host lambda": """
        thing = hc.register("again.hl")(hc.host(lambda x: k * x, result=hc.results.like(0)))
    """,
    "decorated": """
        def twice(f):
            return functools.wraps(f)(lambda x: f(x))
        @hc.register("again.decorated")
        @twice
        def thing(x):
            return k * x
    """,
    "partial": """
        thing = hc.register("again.partial")(functools.partial(np.multiply, k))
    """,
    "method": """
        class Model:
            def step(self, x):
                return k * x
        thing = hc.register("again.method")(Model().step)
    """,
    "instance": """
        class Model:
            def __call__(self, x):
                return k * x
        thing = hc.register("again.instance")(Model())
    """,
}


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_that_runs_again_registers_its_object_again(kind):
    """What is loaded afterwards calls the new one, also from equal bytes."""
    old = run_cell(CELLS[kind], 1.0)
    call = (lambda x: old(x)) if "host" in kind else lambda x: hc.call(old, x, x)
    data = bytes(hc.export(call)(X))
    older = hc.load(data)
    np.testing.assert_allclose(older.call(X), X)
    run_cell(CELLS[kind], 2.0)
    np.testing.assert_allclose(older.call(X), X)  # compiled before
    newer = hc.load(data)
    np.testing.assert_allclose(newer.call(X), 2 * X)
    assert bytes(newer) == data
    run_cell(CELLS[kind], 3.0)
    np.testing.assert_allclose(hc.load(data).call(X), 3 * X)


def test_a_program_that_runs_after_its_function_was_replaced(in_time):
    """It calls the new one. JAX tells programs apart by the number of the old one, so
    no other function may get that number.
    """
    cell = CELLS["def"].replace("again.def", "again.number")
    call = functools.partial(hc.call, run_cell(cell, 1.0))
    data = bytes(hc.export(lambda x: call(x, x))(X))
    gone = weakref.ref(run_cell(cell, 1.5))
    loaded = hc.load(data)
    run_cell(cell, 2.0)
    np.testing.assert_allclose(loaded.call(X), 2 * X)
    jax.clear_caches()
    gc.collect()
    assert gone() is not None
    np.testing.assert_allclose(hc.load(data).call(X), 2 * X)
    del loaded
    jax.clear_caches()
    assert in_time(lambda: gone() is None)


def test_a_feed_is_registered_again():
    cell = """
        feed = hc.feed(lambda: iter(np.full((3, 4), k, np.float32)), tag="again")
        thing = hc.register("again.feed")(feed)
    """
    old = run_cell(cell, 1.0)
    data = bytes(hc.export(lambda x: x + old()[0])(X))
    np.testing.assert_allclose(hc.load(data).call(X), X + 1)
    new = run_cell(cell, 2.0)
    np.testing.assert_allclose(hc.load(data).call(X), X + 2)
    with pytest.raises(hc.errors.RegistryError, match=f"`again` .*{AGAIN}"):
        run_cell(cell, 3.0, line=7)
    old.close(), new.close()


def test_a_class_is_registered_again():
    cell = """
        @hc.register("again.Walk")
        class thing:
            def step(self, x):
                return k * x
    """
    old = run_cell(cell, 1.0)
    env = hc.Object(old, methods={"step": jax.ShapeDtypeStruct((), np.float32)})
    data = bytes(hc.export(lambda x: env.step(x))(X[0]))
    assert hc.load(data).call(X[0]) == X[0]
    run_cell(cell, 2.0)
    with pytest.raises(hc.errors.ExportError, match="its name, 'again.Walk' version 1"):
        hc.export(lambda x: env.step(x))(X[0])


def test_derivatives_are_those_of_the_new_one():
    cell = """
        thing = hc.register("again.vjp")(hc.host(lambda x: x * k, result=hc.results.like(0)))
        thing.defvjp(lambda x: (x * k, None), lambda _, ct: (k * ct,))
    """
    old = run_cell(cell, 1.0)
    data = bytes(hc.export(lambda x: old(x).sum(), vjp_order=1)(X))
    for k in (1.0, 2.0, 3.0):
        run_cell(cell, np.float32(k))
        loaded = hc.load(data)
        np.testing.assert_allclose(jax.grad(loaded.call)(X), np.full(4, k))
        np.testing.assert_allclose(loaded.call(X), k * X.sum(), rtol=1e-6)
        assert bytes(loaded) == data


def test_what_was_replaced_says_so():
    for kind in ("def", "lambda", "host", "instance"):
        old = run_cell(CELLS[kind])
        run_cell(CELLS[kind])
        call = (lambda x: old(x)) if kind == "host" else lambda x: hc.call(old, x, x)
        where = r"was given to another definition at <a cell>:\d+\. Use what was"
        with pytest.raises(hc.errors.ExportError, match=where):
            hc.export(call)(X)


class Model:
    def __init__(self, k):
        self.k = k

    def step(self, x):
        return self.k * x

    def __call__(self, x):
        return self.k * x


def closure(k):
    def inner(x):
        return k * x

    return inner


OTHERS = {
    "closures": closure,
    "lambdas of one line": lambda k: lambda x: k * x,
    "host closures": lambda k: hc.host(closure(k), result=hc.results.like(0)),
    "host lambdas": lambda k: hc.host(lambda x: k * x, result=hc.results.like(0)),
    "methods": lambda k: Model(k).step,
    "instances": Model,
    "partials": lambda k: functools.partial(np.multiply, k),
    "classes": lambda k: type("Local", (), {"__qualname__": "f.<locals>.Local"}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_two_objects_of_one_factory_are_two(kind):
    name = f"others.{kind.replace(' ', '_')}"
    one, two = (OTHERS[kind](k) for k in (1.0, 10.0))
    for _ in range(2):
        hc.register(name)(one)
    with pytest.raises(hc.errors.RegistryError, match=AGAIN):
        hc.register(name)(two)
    hc.register(name, version=2)(two)


def test_two_lambdas_of_a_module():
    hc.register("others.two")(lambda x: x)
    with pytest.raises(hc.errors.RegistryError, match=AGAIN):
        hc.register("others.two")(lambda x: 2 * x)


def test_a_lambda_of_another_line_of_a_cell():
    run_cell(CELLS["lambda"].replace("again", "lines"))
    with pytest.raises(hc.errors.RegistryError, match=AGAIN):
        run_cell(CELLS["lambda"].replace("again", "lines"), line=1)


def test_a_function_and_its_host_function():
    def inner(x):
        return x

    hc.register("others.inner")(inner)
    with pytest.raises(hc.errors.RegistryError, match="Use another name, or a higher"):
        hc.register("others.inner")(hc.host(inner, result=hc.results.like(0)))


def test_cells_of_a_notebook_may_be_edited(run_python):
    """There the "file" of a cell is another one when its text is."""
    printed = run_python(
        """
import sys
import numpy as np
import hostcall as hc
assert not hasattr(sys.modules["__main__"], "__file__")
def cell(text, file):
    exec(compile(text, file, "exec"), {"__name__": "__main__", "hc": hc, "np": np})
cell('hc.register("a.f")(hc.feed(iter(np.ones(3)), tag="train"))', "<cell 1>")
cell('\\nhc.register("a.f")(hc.feed(iter(np.ones(5)), tag="train"))', "<cell 2>")
try:
    cell('hc.register("a.f")(hc.feed(iter(np.ones(5)), tag="test"))', "<cell 3>")
except hc.errors.RegistryError as error:
    print("`train`" in str(error), "`test`" in str(error))
"""
    ).stdout
    assert printed == "True True\n"
