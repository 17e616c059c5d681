"""The texts of calls in exported programs: read, changed, and for which device."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registered as r
from hypothesis import given, settings
from hypothesis import strategies as st

import hostcall as hc
from hostcall import _jax
from hostcall._export import texts
from hostcall._runtime import host_device

pytest.importorskip("flatbuffers")
from fuzz.stablehlo import mlir_of, texts_in

X = jnp.linspace(0.1, 1.0, 4)


def texts_of(f, *specs):
    return texts_in(mlir_of(hc.export(f)(*specs).exported))


def everything(x):
    hc.tap(r.seen, x, every=2)
    hc.print("{}", x)
    y = hc.call(r.sine, x, x) + jax.vmap(r.cube)(x) + r.feed()[0] + r.walk.step(x[0])
    return y + jax.grad(lambda x: r.product(x, x).sum())(x)


TEXTS = texts_of(everything, X)


def test_texts_are_read_as_they_were_written():
    for text in TEXTS:
        assert texts.read_text(text, False, None) is None


def parts_of(told, path=()):
    yield path
    items = []
    if isinstance(told, (dict, list)):
        items = told.items() if isinstance(told, dict) else enumerate(told)
    for key, value in items:
        yield from parts_of(value, (*path, key))


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_text_is_refused_or_read(data):
    """Never anything but an error of hostcall's."""
    told = json.loads(data.draw(st.sampled_from(TEXTS)))
    paths = [path for path in parts_of(told) if path]
    path = data.draw(st.sampled_from(paths))
    inner = told
    for key in path[:-1]:
        inner = inner[key]
    if isinstance(inner, dict) and data.draw(st.booleans()):
        del inner[path[-1]]
    else:
        inner[path[-1]] = data.draw(ANY)
    with contextlib.suppress(hc.errors.HostcallError):
        texts.read_text(json.dumps(told), False, None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "description can't be read"),
        ("[]", "description can't be read"),
        ('{"hostcall":99}', "version 99 of hostcall's format"),
        ('{"hostcall":6}', "lacks 'equation'"),
    ],
)
def test_texts_that_are_none(text, why):
    with pytest.raises(hc.errors.LoadError, match=why):
        texts.read_text(text, False, None)


def test_differences_of_a_function_that_has_none():
    (text,) = texts_of(jax.grad(lambda x: r.product(x, x).sum()), X)
    assert json.loads(text)["function"][1]["steps"]["kind"] == "jacobian"
    assert texts.read_text(text, False, None) is None
    changed = text.replace('"tests.product"', '"tests.cube"')
    with pytest.raises(hc.errors.LoadError, match="has no defjacobian"):
        texts.read_text(changed, False, None)


def test_shapes_that_are_not_the_programs():
    """Otherwise the engine would read or write behind XLA's memory."""
    (text,) = texts_of(lambda x: hc.call(r.sine, x, x), X)
    call = jax.ffi.ffi_call("hostcall_call", X)
    np.testing.assert_allclose(call(X, text=text), np.sin(X), rtol=1e-6)
    for changed in (
        text.replace('"float32",4', '"float32",9'),
        text.replace('"float32",4', '"float32"'),
        text.replace('"float32",4', '"float64",4'),
        text.replace('"operands":[["float32",4]]', '"operands":[]'),
    ):
        assert changed != text
        with pytest.raises(jax.errors.JaxRuntimeError, match="hostcall: the program"):
            jax.block_until_ready(call(X, text=changed))


def of_kind(f, *specs):
    """The only text of a program, as JSON."""
    (text,) = texts_of(f, *specs)
    return json.loads(text)


def more_levels(told):
    told["params"]["levels"] = 10**12


def more_rows(told):
    told["params"]["grid"] = [2**40]
    told["params"]["batched"] = [[False] for _ in told["operands"]]
    told["parallel"] = True
    told["avals"], told["fills"] = [], []


def an_axis_of_no_operand(told):
    told["params"]["sizes"] = [3, 2**40]
    told["params"]["flags"] = [[True], [False]]


def mask_and_flag(told):
    told["params"]["masked"] = told["params"]["always"] = True
    told["operands"] = [["bool"]]


@pytest.mark.parametrize(
    ("f", "change"),
    [
        (lambda x: hc.call(r.sine, x, x), more_levels),
        (lambda x: hc.call(r.sine, x, x), more_rows),
        (jax.vmap(lambda x: hc.tap(r.seen, x)), an_axis_of_no_operand),
        (lambda x: hc.tap(r.seen, x), mask_and_flag),
    ],
)
def test_sizes_that_no_array_has(f, change):
    def program(x):
        out = f(x)
        return x if out is None else out

    told = of_kind(program, X)
    change(told)
    with pytest.raises(hc.errors.LoadError):
        texts.read_text(json.dumps(told), False, None)


def test_a_default_device_of_another_platform(monkeypatch):
    """A program is loaded for its own platform, whatever the thread's default is."""
    cpu = jax.devices("cpu")[1]
    host = host_device.host_device_for(cpu.client)
    gpu = SimpleNamespace(client=SimpleNamespace(platform="gpu"))
    for default, wanted in ((cpu, cpu), (host, cpu), (gpu, cpu), (None, cpu)):
        set_to = SimpleNamespace(value=default)
        monkeypatch.setattr(_jax, "default_device", set_to)
        assert texts._client("cpu") is wanted.client


def test_host_code_loads_a_program_for_its_own_device():
    data = bytes(hc.export(lambda x: hc.call(r.sine, x, x))(X))
    clients = []

    def host(x):
        clients.append(texts._client("cpu"))
        return np.asarray(hc.load(data).call(x))

    got = jax.jit(lambda x: hc.call(host, x, x))(X)
    np.testing.assert_allclose(got, np.sin(X), rtol=1e-6)
    assert clients == [host_device.host_device_for(jax.devices("cpu")[0].client).client]
