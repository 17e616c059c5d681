"""`only=` and `ignore=` of `hc.observe`: files, packages and functions."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall import observe


def lossy(x):
    loss = jnp.log(x).sum()
    return loss


def scaled(x):
    loss = jnp.sqrt(x - 1).sum()
    return loss


def model(x):
    return lossy(x), scaled(x)


PROGRAM = jax.jit(model)
ZERO = jnp.array([0.0, 2.0])  # log(0) is inf, sqrt(-1) is NaN


def error_of(**where):
    with pytest.raises(FloatingPointError) as caught, observe(nans=True, **where):
        jax.block_until_ready(PROGRAM(ZERO))
    return str(caught.value)


@pytest.mark.parametrize("only", ["scaled", "scal*", ["other", "scaled"]])
def test_bad_values_of_one_function_alone(only):
    assert "sqrt made" in error_of(only=only)


def test_bad_values_of_a_function_that_is_ignored():
    assert "sqrt made" in error_of(ignore="lossy")
    assert "log made" in error_of(ignore="scaled")


@pytest.mark.parametrize("form", ["test_observe_where.py", "tools/test_observe_*.py"])
def test_a_file(form):
    assert " made" in error_of(only=form)
    with observe(nans=True, ignore=form):
        found = PROGRAM(ZERO)
    np.testing.assert_array_equal(found, [-np.inf, np.nan])


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package that is installed, with a variable of its own."""
    folder = tmp_path / "site-packages" / "lib"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    source = (
        "import jax.numpy as jnp\ndef f(x):\n    loss = jnp.log(x)\n    return loss\n"
    )
    (folder / "losses.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder.parent))
    from lib import losses

    yield losses
    for name in [name for name in sys.modules if name.partition(".")[0] == "lib"]:
        del sys.modules[name]


def values_of(f, *names, **where):
    got = []
    with observe(*names, to=lambda record, value: got.append(record.function), **where):
        jax.block_until_ready(jax.jit(f)(jnp.float32(2.0)))
    return got


def test_variables_of_libraries_are_handed_on_if_they_are_named(library):
    def mine(x):
        loss = library.f(x) * 2
        return loss + library.f(x + 1)

    assert values_of(mine, "loss") == [mine.__qualname__]
    assert set(values_of(mine, "loss", only="lib")) == {"f"}
    assert set(values_of(mine, "loss", only="lib.losses")) == {"f"}
    both = values_of(mine, "loss", only=["lib", "mine"])
    assert {*both} == {"f", mine.__qualname__}
    assert values_of(mine, "loss", ignore="f") == [mine.__qualname__]


def test_a_name_that_only_a_library_has(library):
    with pytest.warns(RuntimeWarning, match="lib/losses.py: only='lib' looks there"):
        values_of(lambda x: library.f(x), "loss")


def test_bad_values_of_a_package(library):
    f = jax.jit(library.f)
    with observe(nans=True, ignore="lib"):
        assert f(0.0) == -np.inf
    with pytest.raises(FloatingPointError), observe(nans=True, only="lib.losses"):
        jax.block_until_ready(f(0.0))


@pytest.mark.parametrize("where", [{"only": 3}, {"ignore": [None]}, {"only": ""}])
def test_patterns_are_texts(where):
    with pytest.raises(hc.errors.SpecError, match='such as "train.py"'):
        observe(nans=True, **where)


def test_misspelt():
    with pytest.raises(TypeError, match="Did you mean 'only'"):
        observe(nans=True, onyl="x")
    with pytest.raises(TypeError, match="Did you mean 'nans'"):
        observe(nan=True)
