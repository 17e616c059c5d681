"""Formats of `hc.print` in files: what they print, and that they read nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registered as r

import hostcall as hc

pytest.importorskip("flatbuffers")
from fuzz.stablehlo import edited, mlir_of, telling, told_in, unpacked

X = np.linspace(0.5, 2.5, 3, dtype=np.float32)
TREE = {"a": X, "b": (X + 1, 2)}


def loaded(fmt, *args, **kwargs):
    """A loaded program that prints these."""

    def f(x):
        hc.print(fmt, *args, **kwargs)
        return x

    return hc.load(bytes(hc.export(f)(X)))


def printed(program, capsys):
    capsys.readouterr()
    program.call(X)
    hc.barrier()
    return capsys.readouterr().out


FORMATS = {
    "one": ("x = {}", (X,), {}),
    "specs": ("{} {:.3f} {n:>5}", (X, 1.5), {"n": 3}),
    "indices": ("{1} {0} {1}", (X, 2), {}),
    "items": ("{0[1]:.1f} {t[a]} {t[b][0]} {t[b][1]} {[0]}", None, {"t": TREE}),
    "trees": ("{}", (TREE,), {}),
    "conversions": ("{!r} {x!s} {y!a}", (X,), {"x": 1.0, "y": "é"}),
    "nested": ("{:{width}.{digits}f}|", (1.5,), {"width": 9, "digits": 2}),
    "nested automatic": ("{:{}} {}|", (1.5, 8, 3), {}),
    "each element": ("{:.2f} {x:{d}}", (X,), {"x": X, "d": ".1e"}),
    "static": ("{} {} {s:>6} {o}", ("text", X), {"s": "right", "o": None}),
    "braces": ("{{}} {} {{x}}", (1,), {}),
    "a named tuple": ("{0[0]} {0[1]:.1f}", (r.Pair(X, X + 1),), {}),
    "colours": ("\x1b[1;31m{}\x1b[0m\t\r", (1,), {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_loaded_program_prints_what_the_function_prints(name, capsys):
    fmt, args, kwargs = FORMATS[name]
    if args is None:
        fmt, args = fmt.replace(" {[0]}", ""), (X,)

    def f(x):
        hc.print(fmt, *args, **kwargs)
        return x

    jax.jit(f)(X)
    hc.barrier()
    here = capsys.readouterr().out
    assert printed(loaded(fmt, *args, **kwargs), capsys) == here != ""


def test_items_of_fields_without_a_name(capsys):
    assert printed(loaded("{[1]} {[0]}", X, X), capsys) == f"{X[1]} {X[0]}\n"


READS = {
    "environment": "{0.ctypes.__init__.__globals__[sys].modules[os].environ}",
    "class": "{0.__class__}",
    "shape": "{0.shape}",
    "behind an item": "{0[0].real}",
    "in a spec": "{0:{0.ndim}}",
    "in the spec's item": "{0:{0[0].nbytes}}",
    "in a conversion": "{0.data!r}",
    "without a name": "{.dtype}",
}


@pytest.mark.parametrize("name", READS)
def test_a_format_that_looks_up_attributes_stays(name):
    with pytest.raises(hc.errors.ExportError, match="fields are names and numbers"):
        loaded(READS[name], X)


@pytest.mark.parametrize("name", READS)
def test_a_format_that_looks_up_attributes_is_not_loaded(name):
    data = forged({"fmt": READS[name]}, "{}")
    with pytest.raises(hc.errors.LoadError, match="fields are names and numbers"):
        hc.load(data)
    # Nor does the engine read it, if JAX's own loader has read the file.
    _, program = unpacked(data)
    exported = jax.export.deserialize(bytearray(program))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="fields are names and numbers"
    ):
        jax.block_until_ready(exported.call(X))


NUMPYS = {n: v for n, v in np.get_printoptions().items() if n != "override_repr"}


def forged(change, fmt="{} {a}"):
    """A file whose print says something else than hc.print lets pass."""

    def f(x):
        hc.print(fmt, x, **({"a": "text"} if "a" in fmt else {}))
        return x

    data = bytes(hc.export(f)(X))
    told = told_in(mlir_of(hc.load(data).exported))
    told["function"][1].update(change)
    return edited(data, telling(told))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"fmt": "{0.ctypes} {a}"}, "fields are names and numbers"),
        ({"fmt": "{0} {a.__class__}"}, "fields are names and numbers"),
        ({"fmt": "{0!x} {a}"}, "conversion !x"),
        ({"fmt": "{0} {a:{a:{a:{a}}}}"}, "format"),
        ({"fmt": "{0:999999999999} {a}"}, "more than 9999"),
        ({"fmt": "{0:.99999} {a}"}, "more than 9999"),
        ({"fmt": "{0"}, "can't be read"),
        ({"fmt": 3}, "fmt=3"),
        ({"end": ["x"]}, "end="),
        ({"numbers": [-1]}, "the numbers .-1,"),
        ({"numbers": ["x"]}, "numbers='x'"),
        ({"options": {**NUMPYS, "formatter": "x"}}, "option formatter"),
        ({"options": {**NUMPYS, "precision": 10**9}}, "option precision"),
        ({"options": {**NUMPYS, "nanstr": {"is": 1}}}, "option nanstr"),
        ({"options": {**NUMPYS, "__class__": 1}}, "options .'__class__'"),
        ({"options": {}}, "lacks 'edgeitems'"),
    ],
)
def test_prints_that_no_export_has(change, why):
    with pytest.raises(hc.errors.LoadError, match=why):
        hc.load(forged(change))


def fails(program, why):
    program.call(X)
    with pytest.raises(Exception, match=why):
        hc.barrier()


def test_only_trees_and_arrays_have_items():
    class Own:  # a pytree of the process, whose look-up runs its code
        def __init__(self, x):
            self.x = x

        def __getitem__(self, item):
            raise AssertionError("a file has run this")

        def __format__(self, spec):
            raise AssertionError("a file has run this")

    jax.tree_util.register_pytree_node(
        Own, lambda o: ((o.x,), None), lambda _, c: Own(*c)
    )
    jax.export.register_pytree_node_serialization(
        Own,
        serialized_name="tests.Own",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: None,
    )
    fails(loaded("{0[secret]}", Own(X)), r"the item \[secret\] of a Own")
    fails(loaded("{0:%x}", Own(X)), "formats a Own")
    fails(loaded("{0[0]} {1}", "text", X), r"the item \[0\] of a str")


def test_a_width_that_the_program_computes():
    program = loaded("{:{width}}|", 1.5, width=jnp.int32(10**8))
    fails(program, "width or precision of more than 9999")


def test_what_a_terminal_would_obey(capsys):
    program = loaded("\x1b]0;title\x07{}\x1b[2J {s}\x9b5n", 1, s="\x1b[6n")
    assert printed(program, capsys) == "\\x1b]0;title\\x071\\x1b[2J \\x1b[6n\\x9b5n\n"
