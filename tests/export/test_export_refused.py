"""What can't leave the process, and what is wrong with a file."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registered as r
from jax.experimental import serialize_executable

import hostcall as hc

pytest.importorskip("flatbuffers")
from fuzz.stablehlo import packed, unpacked

X = jnp.linspace(0.1, 1.0, 4)
SCALAR = jax.ShapeDtypeStruct((), np.float32)


def plain(v):
    return np.sin(v)


def into(ctx, out, v):
    np.asarray(out)[...] = np.asarray(v)


NEEDS_A_NAME = {
    "call": lambda fn, x: hc.call(fn, SCALAR, x),
    "ordered": lambda fn, x: hc.call(fn, SCALAR, x, order="ordered"),
    "tap": lambda fn, x: (hc.tap(fn, x), x)[1],
    "host": lambda fn, x: hc.host(fn, result=hc.results.like(0))(x),
}
JAXS_OWN = {
    "pure_callback": lambda fn, x: hc.pure_callback(fn, SCALAR, x),
    "io_callback": lambda fn, x: hc.io_callback(fn, SCALAR, x),
    "debug": lambda fn, x: (hc.debug.callback(fn, x), x)[1],
    "buffer_callback": lambda fn, x: hc.buffers.buffer_callback(into, SCALAR)(x),
}
KINDS = {**NEEDS_A_NAME, **JAXS_OWN}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fn", [plain, lambda v: v, functools.partial(plain)])
def test_exported_without_a_name(kind, fn):
    wanted = "has no name in other processes" if kind in NEEDS_A_NAME else "Use hc.call"
    with pytest.raises(hc.errors.ExportError, match=f"can't be exported: .*{wanted}"):
        hc.export(lambda x: KINDS[kind](fn, x))(1.0)


def test_the_error_says_what_to_write():
    with pytest.raises(NotImplementedError) as error:  # as for JAX's callbacks
        hc.export(lambda x: hc.call(plain, x, x))(1.0)
    assert "@hc.register('my_package.plain', version=1)" in str(error.value)
    assert "test_export_refused.py" in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_serialized_without_a_name(kind):
    compiled = jax.jit(lambda x: KINDS[kind](plain, x)).lower(1.0).compile()
    with pytest.raises(hc.errors.ExportError, match="can't be serialized: "):
        serialize_executable.serialize(compiled)


@pytest.mark.parametrize("serialized", [False, True])
def test_blocks_of_devices(serialized):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
    for f in (
        lambda x: hc.tap(r.seen, x, on="shards"),
        lambda x: hc.debug.callback(r.seen, x, partitioned=True),
    ):
        with pytest.raises(hc.errors.ExportError, match="Give the whole value"):
            if serialized:
                serialize_executable.serialize(jax.jit(f).lower(x).compile())
            else:
                hc.export(f)(x)


class Odd:
    pass


class Unnamed(tuple):
    __slots__ = ()


jax.tree_util.register_pytree_node(
    Unnamed, lambda x: (tuple(x), None), lambda _, xs: Unnamed(xs)
)


def any_of(*args, **kwargs):
    return np.float32(0)


hc.register("tests.any_of")(any_of)


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda x: hc.call(any_of, SCALAR, x, Odd()), r"the argument args\[1\] is <"),
        (lambda x: hc.call(any_of, SCALAR, x, o=b"x"), r"kwargs\['o'\] is b'x'"),
        (lambda x: hc.call(any_of, SCALAR, {1: x}), r"a dict with the keys \[1\]"),
        (lambda x: hc.call(any_of, SCALAR, Unnamed((x,))), "holds a Unnamed, a pytree"),
        (lambda x: hc.print("{}", x, file=sys.stderr), "file= is a stream"),
    ],
)
def test_arguments_that_stay(f, why):
    with pytest.raises(hc.errors.ExportError, match=why):
        hc.export(f)(1.0)


def test_objects_that_stay():
    methods = {"step": SCALAR}
    nameless = hc.Object(lambda: r.Walk(), methods=methods)
    hooked = hc.Object(r.Walk, methods=methods, close=lambda walk: None)
    for env, why in ((nameless, "has no name in other"), (hooked, "close= of the hc")):
        with pytest.raises(hc.errors.ExportError, match=why):
            hc.export(env.step)(1.0)
    compiled = jax.jit(r.walk.step).lower(1.0).compile()
    with pytest.raises(hc.errors.ExportError, match="objects are in this process"):
        serialize_executable.serialize(compiled)


def test_a_pool_of_a_function_that_is_registered_without_it():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        f = jax.vmap(
            lambda x: hc.call(
                hc.host(r.sine, executor=pool), SCALAR, x, vmap_method="parallel"
            )
        )
        with pytest.raises(hc.errors.ExportError, match="is run in a way"):
            hc.export(f)(X)
        np.testing.assert_allclose(f(X), np.sin(X), rtol=1e-6)


def test_no_arrays():
    with pytest.raises(hc.errors.SpecError, match="no array among its arguments"):
        hc.export(lambda: r.feed()[0])()


@pytest.mark.parametrize("order", [-1, True, 1.0])
def test_vjp_order(order):
    with pytest.raises(hc.errors.SpecError, match="vjp_order= of hc.export should be"):
        hc.export(plain, vjp_order=order)


def test_a_number_is_given_again_once_its_program_is_gone(no_program, in_time):
    texts = set()
    for _ in range(3):
        same = lambda x: x
        gone = weakref.ref(same)
        f = jax.jit(lambda x, same=same: hc.call(same, x, x))
        texts.add(re.search(r"count = (\d+)", f.lower(1.0).as_text())[1])
        f(1.0)
        del f, same
        jax.clear_caches()
        assert in_time(lambda: gone() is None)
    assert len(texts) == 1


# --- Names --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a b", ".a", "1a", "a..b"])
def test_names(name):
    with pytest.raises(hc.errors.SpecError, match="hc.register got the name"):
        hc.register(name)(plain)


@pytest.mark.parametrize("name", [3, None, plain])
def test_a_name_that_is_no_text(name):
    with pytest.raises(hc.errors.SpecError, match=r'Write hc.register\("'):
        hc.register(name)


@pytest.mark.parametrize("version", [-1, "1", 1.0, True])
def test_versions(version):
    with pytest.raises(hc.errors.SpecError, match="version= of 'tests.x' should be"):
        hc.register("tests.x", version=version)(plain)


class Unhashable:
    __hash__ = None

    def __call__(self):
        pass


@pytest.mark.parametrize(
    ("thing", "why"), [(3, "not callable"), (Unhashable(), "hashed")]
)
def test_things(thing, why):
    with pytest.raises(hc.errors.SpecError, match=why):
        hc.register("tests.x")(thing)


def test_a_name_is_given_once():
    with pytest.raises(hc.errors.RegistryError, match="'tests.sine' version 2 is reg"):
        hc.register("tests.sine", version=2)(plain)
    with pytest.raises(hc.errors.RegistryError, match="can't get the name 'tests.new'"):
        hc.register("tests.new")(r.sine)
    assert hc.register("tests.sine", version=2)(r.sine) is r.sine


def test_two_versions_side_by_side():
    one = hc.register("tests.both", version=1)(lambda x: x + np.float32(1))
    two = hc.register("tests.both", version=2)(lambda x: x + np.float32(2))
    data = [bytes(hc.export(lambda x, f=f: hc.call(f, x, x))(X)) for f in (one, two)]
    for k, each in enumerate(data, 1):
        np.testing.assert_allclose(hc.load(each).call(X), X + k)


# --- Files --------------------------------------------------------------------------

DATA = bytes(hc.export(lambda x: hc.call(r.sine, x, x, order="ordered"))(X))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "these 0 bytes are not a program that hc.export wrote"),
        (b"PK\x03\x04 a zip file", "are not a program that hc.export wrote"),
        (DATA[:15], "checksum does not fit"),
        (DATA[:20], "checksum does not fit"),
        (DATA[:15] + b"\x09" + DATA[16:], "version 9 of the file layout"),
        (DATA[:100], "checksum does not fit"),
        (DATA[:-1], "checksum does not fit"),
        (DATA + b"x", "checksum does not fit"),
        (DATA[:300] + bytes([DATA[300] ^ 1]) + DATA[301:], "checksum does not fit"),
    ],
)
def test_damaged_files(data, why):
    with pytest.raises(hc.errors.LoadError, match=why):
        hc.load(data)


def test_another_type():
    with pytest.raises(hc.errors.SpecError, match=r"takes bytes, got str\. For a file"):
        hc.load("program.bin")


def test_a_header_that_is_no_json():
    text = b"{"
    head = DATA[:16] + len(text).to_bytes(8, "little")
    with pytest.raises(hc.errors.LoadError, match=r"header .* can't be read"):
        hc.load(head + hashlib.sha256(text).digest() + text)


def rewritten(change):
    """DATA with another header or program, and a checksum that fits."""
    return packed(*change(*unpacked(DATA)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda h, p: ([], p), "header of the exported program can't be read"),
        (lambda h, p: ({}, p), "can't be read: it lacks 'hostcall'"),
        (lambda h, p: (h, b""), "jax.export can't read the program in the file"),
        (lambda h, p: (h, b"\xff" * 64), "jax.export can't read the program"),
    ],
)
def test_foreign_files(change, why):
    with pytest.raises(hc.errors.LoadError, match=why):
        hc.load(rewritten(change))


@pytest.mark.parametrize("face", ["call", "tap"])
def test_a_device_by_name_is_refused_over_one_device_too(face):
    """The file may be loaded on another device, and the name would be ignored."""
    device = jax.devices()[0]

    def f(x):
        if face == "call":
            return hc.call(r.sine, x, x, on=device)
        hc.tap(r.seen, x, on=device)
        return x

    with pytest.raises(
        hc.errors.ExportError, match="it has on=.*may run on other devices"
    ):
        hc.export(jax.jit(f))(np.float32(1))
