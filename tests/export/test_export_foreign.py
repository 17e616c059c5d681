"""Files that somebody else wrote: `hc.load` refuses what `hc.export` never writes.

The StableHLO is edited here. (test_export_forged.py: texts that the engine reads.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registered as r

import hostcall as hc

pytest.importorskip("flatbuffers")
from fuzz.stablehlo import (
    CONFIG,
    edited,
    mlir_of,
    packed,
    replaced,
    telling,
    told_in,
    unpacked,
    with_text,
)

X = jnp.arange(4, dtype=jnp.float32)
(N,) = jax.export.symbolic_shape("n")
MANY = jax.ShapeDtypeStruct((N,), np.float32)


def call(x):
    return hc.call(r.sine, x, x)


def ordered(x):
    return hc.call(r.sine, x, x, order="ordered")


def tap(x):
    hc.tap(r.seen, x)
    return x + 1


CALL, ORDERED, TAP = (bytes(hc.export(f)(X)) for f in (call, ordered, tap))
LINKED = bytes(hc.export(ordered)(MANY))


# --- Every kind of call can be loaded as it was written -------------------------------


def rows(x):
    return jax.vmap(lambda v: hc.call(r.sine, v, v, where=v > 1, fill=7))(x)


FACES = {
    "call": (call, X),
    "ordered": (ordered, X),
    "unordered": (lambda x: hc.call(r.sine, x, x, order="unordered"), X),
    "rows": (rows, X),
    "symbolic": (call, MANY),
    "symbolic ordered": (ordered, MANY),
    "symbolic rows": (rows, MANY),
    "tap": (tap, X),
    "tap through": (lambda x: hc.tap_through(r.seen, x), MANY),
    "tap always": (lambda x: (hc.tap(r.seen, x, every=2, always=x[0] > 1), x)[1], X),
    "print": (lambda x: (hc.print("{:.1f} {a[b]}", x, a={"b": x}), x)[1], X),
    "host": (r.cube, X[0]),
    "feed": (lambda x: r.feed()[0] + x, X),
    "object": (lambda x: r.walk.step(1.0) + x, X),
    "key": (lambda k: jax.random.key_data(hc.call(r.drawn, k, k)), jax.random.key(1)),
    "int4": (call, X.astype(jnp.int4)),
    "bfloat16": (call, X.astype(jnp.bfloat16)),
    "complex": (call, X.astype(jnp.complex64)),
    "float8": (call, X.astype(jnp.float8_e4m3fn)),
}


@pytest.mark.parametrize("name", FACES)
def test_each_kind_of_call_can_be_loaded(name):
    f, x = FACES[name]
    exported = hc.export(f)(x)
    loaded = hc.load(bytes(exported))
    assert loaded.manifest == exported.manifest
    assert loaded.manifest.calls
    assert list(loaded.objects) == list(exported.objects)
    # Also as part of another program, and with the edits that change nothing.
    again = hc.export(lambda x: loaded.exported.call(x))(x)
    assert [c.name for c in again.manifest.calls] == [
        c.name for c in loaded.manifest.calls
    ]
    assert hc.load(edited(bytes(again))).manifest == again.manifest


# --- Functions that nobody registered -------------------------------------------------


def refused(data, why):
    with pytest.raises(hc.errors.LoadError, match=why):
        hc.load(data)


def named_by_number(x, module):
    """(attributes, program) of a call of this process that has no name."""
    called = []

    def secret(x):
        called.append(x)
        return x

    own = jax.jit(lambda x: hc.call(secret, x, x))
    text = own.lower(x).as_text()
    compiled = own.lower(x).compile()
    key, count = (
        re.search(rf"{name} = (\S+) : ui64", text)[1] for name in ("key", "count")
    )
    return f"count = {count} : ui64, key = {key} : ui64", called, compiled


@pytest.mark.parametrize("with_text_too", [False, True])
def test_the_number_of_a_function_of_this_process(with_text_too):
    attributes, called, compiled = named_by_number(X, None)
    if with_text_too:
        text = CONFIG.search(mlir_of(hc.load(CALL).exported))[0]
        attributes += ", " + text.partition("{")[2].removesuffix("}")
    refused(edited(CALL, replaced(attributes)), "where only the text 'text' should be")
    assert not called
    compiled(X)
    assert len(called) == 1


def test_the_number_of_one_of_jaxs_callbacks():
    """It counts the callbacks of the program around the loaded one."""

    def change(text):
        text = replaced("index = 0 : ui64")(text)
        return text.replace("@hostcall_call", "@xla_ffi_python_cpu_callback")

    refused(edited(CALL, change), "xla_ffi_python_cpu_callback")


@pytest.mark.parametrize("size", [64, 200_000])
def test_memory_is_not_passed_even_if_jax_loads_the_program(size):
    """JAX's own loader asks nothing. The engine compares sizes before it reads."""
    attributes, called, compiled = named_by_number(jnp.zeros(size), None)
    _, program = unpacked(CALL)
    exported = jax.export.deserialize(bytearray(program))
    forged = with_text(exported, replaced(attributes)(mlir_of(exported)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="other arrays to a call"):
        jax.block_until_ready(forged.call(X))
    assert not called
    compiled(jnp.zeros(size))


# --- Targets ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["raw", "verdict", "link", "tap", "buffer", "buffer_graph", "call_", "x"],
)
@pytest.mark.parametrize("size", [0, 1])
def test_targets_that_no_export_has(target, size):
    x = jnp.zeros(size, jnp.int8)
    data = bytes(hc.export(call)(x))
    refused(
        edited(
            data, lambda text: text.replace("@hostcall_call", f"@hostcall_{target}")
        ),
        f"hostcall_{target}|a link between two calls",
    )


def test_a_call_by_the_detour_of_an_mhlo_operation():
    def change(text):
        config = CONFIG.search(text)[0]
        return text.replace("@hostcall_call(", "@mhlo.custom_call(").replace(
            config,
            'mhlo.attributes = {call_target_name = "hostcall_call", '
            + config.removeprefix("mhlo.")
            + "}, mhlo.version = 1 : i64",
        )

    refused(edited(CALL, change), "mhlo.custom_call")


def test_the_engines_targets_read_nothing_that_is_not_there():
    for target in ("link", "verdict"):
        forged = jax.ffi.ffi_call(f"hostcall_{target}", X, has_side_effect=True)
        for x in (jnp.zeros(0, jnp.int8), jnp.zeros(1, jnp.int8), X):
            with pytest.raises(jax.errors.JaxRuntimeError, match="hostcall"):
                jax.block_until_ready(forged(x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="hostcall_other"):
        jax.block_until_ready(jax.ffi.ffi_call("hostcall_other", X)(X))


# --- What a call gets, and what its text says -----------------------------------------


def told(data):
    return told_in(mlir_of(hc.load(data).exported))


def with_told(data, change):
    said = told(data)
    change(said)
    return edited(data, telling(said))


LARGE = [["float32", 10**6]]
TEXTS = {
    "operands": (CALL, lambda t: t.update(operands=LARGE), "whose description says"),
    "fewer": (CALL, lambda t: t.update(operands=[]), "names 0 operands where 1"),
    "results": (CALL, lambda t: t.update(avals=LARGE), "whose description says"),
    "more": (CALL, lambda t: t.update(avals=t["avals"] * 2), "names 2 results with 1"),
    "dtype": (CALL, lambda t: t.update(avals=[["int32", 4]]), "whose description says"),
    "objects": (CALL, lambda t: t.update(avals=[["object", 4]]), "dtype 'object'"),
    "a class": (CALL, lambda t: t.update(avals=[["finfo", 4]]), "dtype 'finfo'"),
    "sizes": (
        CALL,
        lambda t: t.update(operands=[["float32", True]]),
        r"names the shape \[True\]",
    ),
    "rows": (CALL, lambda t: t["params"].update(grid=[3]), "names batched="),
    "a mask": (ORDERED, lambda t: t["params"].update(masked=True), "names 1 operands"),
    "a tap": (CALL, lambda t: t.update(equation="tap"), r"the options \[.levels"),
    "pure": (ORDERED, lambda t: t["options"].update(order="pure"), "description says"),
    "ordered": (CALL, lambda t: t["options"].update(order="ordered"), "XLA may drop"),
    "linked": (ORDERED, lambda t: t.update(linked=True), "whose description says"),
    "not linked": (LINKED, lambda t: t.update(linked=False), "whose description says"),
    "a power": (
        LINKED,
        lambda t: t.update(operands=[["float32", {"symbolic size": "n^99999999"}]]),
        r"the size 'n\^99999999'",
    ),
    "a size that is no text": (
        CALL,
        lambda t: t.update(operands=[["float32", {"symbolic size": []}]]),
        r"the size \[\]",
    ),
    "a size": (LINKED, lambda t: t.update(operands=LARGE), "whose description says"),
    "a name": (
        CALL,
        lambda t: t.update(function=["registered", ["tests.failing", 1]]),
        "has the names 'tests.sine' version 2, and .* calls 'tests.failing' version 1",
    ),
    "devices": (CALL, lambda t: t.update(team=["ONCE", 2, None]), "runs on 1: they"),
    "a kind": (CALL, lambda t: t.update(function=["os", {}]), "of kind 'os'"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_not_of_its_call(name):
    data, change, why = TEXTS[name]
    refused(with_told(data, change), why)


STABLEHLO = {
    "no side effect": (ORDERED, "has_side_effect = true, ", "", "XLA may drop"),
    "no effect of a tap": (
        TAP,
        "has_side_effect = true, ",
        "",
        "XLA may drop|calls none",
    ),
    "aliases": (
        CALL,
        "{mhlo.backend",
        "{output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices"
        " = [], operand_index = 0, operand_tuple_indices = []>], mhlo.backend",
        "take the memory of its operands",
    ),
    "columns first": (
        bytes(hc.export(call)(X.reshape(2, 2))),
        "operand_layouts = [dense<[1, 0]>",
        "operand_layouts = [dense<[0, 1]>",
        "with its own operand_layouts",
    ),
    "a computation": (
        CALL,
        "{mhlo.backend",
        "{called_computations = [@main], mhlo.backend",
        "with its own called_computations",
    ),
    "the old interface": (
        CALL,
        "{mhlo.backend",
        "{api_version = 2 : i32, mhlo.backend",
        "with its own api_version",
    ),
    "sizes of results": (
        LINKED,
        "indices_of_shape_operands = dense<[2, 3]>",
        "indices_of_shape_operands = dense<[1, 2]>",
        "with its own indices_of_shape_operands",
    ),
}


@pytest.mark.parametrize("name", STABLEHLO)
def test_attributes_that_no_export_has(name):
    data, old, new, why = STABLEHLO[name]
    assert old in mlir_of(hc.load(data).exported)
    refused(edited(data, lambda text: text.replace(old, new)), why)


def test_a_text_that_is_no_utf8():
    refused(edited(CALL, replaced(r'text = "\FF\FE"')), "where only the text 'text'")


# --- The manifest ------------------------------------------------------------------------


def test_the_manifest_is_that_of_the_program():
    """An ordered call behind the header of a pure one; derivatives in the file."""
    header, _ = unpacked(CALL)
    _, program = unpacked(ORDERED)
    loaded = hc.load(packed(header, program))
    assert [call.order for call in loaded.manifest.calls] == ["ordered"]
    for order in (0, 1):
        exported = hc.export(r.cube, vjp_order=order)(X[0])
        loaded = hc.load(bytes(exported))
        assert loaded.manifest == exported.manifest
        assert loaded.manifest.vjp_order == order


def test_a_header_that_says_more_or_less_than_the_program():
    header, program = unpacked(CALL)
    refused(packed(header | {"names": []}, program), "calls 'tests.sine' version 2")
    both = [*header["names"], ["tests.failing", 1]]
    refused(
        packed(header | {"names": both}, program),
        "'tests.failing' version 1, and",
    )
    refused(packed(header | {"calls": []}, program), r"options \['calls'\]")


def test_a_manifest_that_hides_its_lines_from_a_terminal():
    hidden = "f\n  no host code\x1b[8m"

    def change(exported):
        return dataclasses.replace(exported, fun_name=hidden)

    header, program = unpacked(CALL)
    exported = change(jax.export.deserialize(bytearray(program)))
    data = packed(header, bytes(exported.serialize()))
    first, *calls = str(hc.load(data).manifest).split("\n")
    assert first.startswith("f\\n  no host code\\x1b[8m for cpu")
    assert [line.split()[0] for line in calls] == ["tests.sine"]


# --- Deep nesting --------------------------------------------------------------------------


def nested(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("depth", [250, 3000, 100_000])
@pytest.mark.parametrize("closed", [True, False])
def test_a_header_of_lists_in_lists(depth, closed):
    for head in (nested(depth), b'{"calls":' + nested(depth) + b"}"):
        said = head if closed else head.rstrip(b"]}")
        size = len(said).to_bytes(8, "little")
        behind = hashlib.sha256(said).digest() + said
        refused(CALL[:16] + size + behind, "can't be read")


@pytest.mark.parametrize("depth", [150, 3000])
@pytest.mark.parametrize("where", ["template", "results", "mesh", "operands", "fills"])
def test_a_text_of_lists_in_lists(depth, where):
    deep = "*"
    for _ in range(depth):
        deep = ["list", None, deep]
    text = json.dumps({**told(CALL), where: None}).replace(
        f'"{where}": null', f'"{where}": {nested_text(depth)}'
    )
    refused(edited(CALL, telling(text)), "the program|exported program")


def nested_text(depth):
    return '["list", null, ' * depth + '"*"' + "]" * depth


def test_a_pytree_that_is_too_deep_is_not_exported():
    tree = X
    for _ in range(250):
        tree = [tree]
    with pytest.raises(hc.errors.ExportError, match="pytree of more than 200 levels"):
        hc.export(lambda x: (hc.tap(r.seen, tree), x)[1])(X)


# --- Objects -----------------------------------------------------------------------------


def stepped(x):
    return r.walk.step(x[0]) + x


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"method": "step.__func__.__globals__.clear"}, "not declared"),
        ({"method": "at"}, "not declared"),
        ({"declared": ("close", "__init__")}, "'__init__' as close="),
        ({"declared": ("save", "step.__func__")}, "as save="),
        ({"methods": ("__reduce__", None)}, "__reduce__"),
    ],
)
def test_methods_that_a_file_may_not_name(change, why):
    data = bytes(hc.export(stepped)(X))

    def changed(told):
        for key, value in change.items():
            if key == "method":
                told[key] = value
            elif key == "methods":
                told[key] = {**told[key], value[0]: told[key]["step"]}
            else:
                told[key] = {**told[key], value[0]: value[1]}
        return told

    forged = with_told(data, lambda t: changed(t["function"][1]))
    with pytest.raises(hc.errors.HostcallError, match=why):
        hc.load(forged)


def test_an_object_of_this_process_keeps_its_methods():
    """A file may know the number of a live object, and declare other methods of it."""
    data = bytes(hc.export(stepped)(X))
    changed = with_told(
        data,
        lambda t: t["function"][1].update(
            method="other", methods={"other": t["function"][1]["methods"]["step"]}
        ),
    )
    refused(changed, "does not declare here")
