"""The names of calls and taps in profiles of JAX's, and in the compiled program."""

from __future__ import annotations

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

import hostcall as hc

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def double(x):
    return x * 2


def names_in(folder) -> set[str]:
    """The operations of XLA's that a profile shows."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return {e["args"]["hlo_op"] for e in events if "hlo_op" in e.get("args", {})}


def test_a_profile_shows_names_and_lines(tmp_path):
    @jax.jit
    def step(x):
        y = hc.call(double, SCALAR, x)
        hc.tap(lambda y: None, y, tag="train/loss")
        return y

    step(1.0).block_until_ready()
    hc.barrier()
    with jax.profiler.trace(str(tmp_path)):
        step(1.0).block_until_ready()
    hc.barrier()
    names = names_in(tmp_path)
    line = step.__wrapped__.__code__.co_firstlineno + 2
    (call,) = (n for n in names if n.startswith("double"))
    (tap,) = (n for n in names if n.startswith("train"))
    assert call.startswith(f"double__test_profiler_py_{line}_")
    assert tap.startswith(f"train_loss__test_profiler_py_{line + 1}_")


WRITES = {
    "call": lambda x: hc.call(double, SCALAR, x, order="ordered"),
    "drop-in": lambda x: hc.pure_callback(double, SCALAR, x),
    "print": lambda x: hc.print("{}", x) or x,
    "buffers": lambda x: hc.buffers.buffer_callback(lambda ctx, out, x: None, SCALAR)(
        x
    ),
}


@pytest.mark.parametrize("kind", WRITES)
def test_each_kind_has_its_name_in_the_program(kind):
    compiled = jax.jit(WRITES[kind]).lower(1.0).compile().as_text()
    (line,) = (line for line in compiled.splitlines() if " custom-call(" in line)
    assert "(test_profiler.py:" in line.split("op_name=", 1)[1]


def test_the_text_of_the_program_is_the_same_without_names():
    def program(tag):
        return jax.jit(lambda x: hc.call(double, SCALAR, x, tag=tag)).lower(1.0)

    first = program("a").as_text()
    assert program("a").as_text().count("custom_call") == 1
    assert "test_profiler.py" not in first
