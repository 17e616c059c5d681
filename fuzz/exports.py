"""Files of exported programs: manifests, StableHLO, and the texts of calls in it."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hostcall as hc
from fuzz.draw import Draw, change
from fuzz.stablehlo import (
    CONFIG,
    mlir_of,
    packed,
    telling,
    texts_in,
    told_in,
    unpacked,
    with_text,
)
from hostcall._core import options
from hostcall._export import texts

X = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
ROW = jax.ShapeDtypeStruct((4,), np.float32)
MASK = jnp.array(True)
MANY = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), np.float32)
# XLA's types and shapes of the buffers of each call (texts.read_text).
WHOLE, BOOL = [11, 3, 4], [1]
sine = hc.register("fuzz.sine")(lambda x: np.sin(x))
seen = hc.register("fuzz.seen")(lambda x: None)
cube = hc.register("fuzz.cube")(hc.host(lambda x: x**3, result=hc.results.like(0)))
cube.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * x**2 * ct,))
feed = hc.register("fuzz.feed")(hc.feed(lambda: iter(np.ones((9, 4), np.float32))))


@hc.register("fuzz.Sum")
class Sum:
    def add(self, x):
        return np.float32(x.sum())


total = hc.Object(Sum, methods={"add": jax.ShapeDtypeStruct((), np.float32)})
CALLS = [
    (lambda x: hc.call(sine, x, x), (X,), [WHOLE, WHOLE]),
    (lambda x: hc.call(sine, x, x), (MANY,), [WHOLE, WHOLE]),
    (jax.vmap(lambda v: hc.call(sine, ROW, v)), (X,), [WHOLE, WHOLE]),
    (
        lambda x, m: hc.call(sine, x, x, where=m, fill=7),
        (X, MASK),
        [BOOL, WHOLE, WHOLE],
    ),
    (lambda x: hc.tap(seen, x, every=2), (X,), [WHOLE]),
    (lambda x: hc.print("{:.2f} {a}", x, a=x), (X,), [WHOLE, WHOLE]),
    (cube, (X,), [WHOLE, WHOLE]),
    (lambda x: total.add(x) + feed()[0].sum(), (X,), [WHOLE, [11]]),
    (lambda x: hc.call(sine, x, x, order="ordered"), (X,), [WHOLE, WHOLE]),
    (lambda x: hc.call(sine, x, x, order="unordered"), (MANY,), [WHOLE, WHOLE]),
    (lambda x: hc.tap_through(seen, x), (X,), [WHOLE, WHOLE]),
    (
        lambda x, m: (hc.tap(seen, x, every=2, always=m), hc.tap(seen, x, where=m))[0],
        (X, MASK),
        [WHOLE, BOOL],
    ),
    (lambda x: jax.grad(lambda x: cube(x).sum())(x), (X,), [WHOLE, WHOLE]),
    (
        lambda x: lax.scan(lambda c, _: (hc.call(sine, x, c), None), x, None, 2)[0],
        (X,),
        [WHOLE, WHOLE],
    ),
]
# Each value of the options that leave the process; those above have the other ones.
NOT_HERE = ("pure", "cuda", "out", None)
CALLS += [
    (lambda x, how={name: value}: hc.call(sine, x, x, **how), (X,), [WHOLE, WHOLE])
    for name in ("arrays", "lend", "fail", "vmap_method")
    for value in options.CALL[name].values
    if value not in NOT_HERE
]
CALLS += [
    (lambda x, how={name: value}: hc.tap(seen, x, **how), (X,), [WHOLE])
    for name, row in options.TAP.items()
    for value in row.values
    if value not in NOT_HERE
]


NAMELESS = "a file has called a function that has no name"


def secret(x):
    raise AssertionError(NAMELESS)


# A function of this process that no file may call, by the numbers that name it here.
own = jax.jit(lambda x: hc.call(secret, x, x))
NUMBERS = re.findall(r"(?:key|count) = \S+ : ui64", own.lower(X).as_text())
kept = own.lower(X).compile()


@functools.cache
def files() -> list[tuple[bytes, list[tuple[str, list]]]]:
    """Each program as bytes, and its texts with the buffers that they describe."""
    found = []
    for f, args, buffers in CALLS:
        made = hc.export(lambda *args, f=f: (f(*args), 2 * args[0]))(*args)
        held = texts_in(mlir_of(made.exported))
        found.append((made.serialize(), [(text, buffers) for text in held]))
    return found


@functools.cache
def modules() -> list[tuple[Any, str, dict[str, Any], tuple[Any, ...]]]:
    """Each program as JAX and as MLIR has it, its header, and arguments for it."""
    found = []
    for (data, _), (_, args, _) in zip(files(), CALLS, strict=True):
        header, behind = unpacked(data)
        exported = jax.export.deserialize(bytearray(behind))
        found.append((exported, mlir_of(exported), header, args))
    return found


WORDS = ("hostcall_call", "hostcall_tap", "hostcall_link", "hostcall_verdict")
WORDS += ("hostcall_buffer", "hostcall_other", "xla_ffi_python_cpu_callback")
WORDS += ("tensor<3x4xf32>", "tensor<4xf32>", "tensor<?x4xf32>", "tensor<i32>")
WORDS += ("tensor<i1>", "tensor<f32>", "!stablehlo.token", "true", "false", "2 : i32")
_WORD = re.compile(r"@?\b(?:hostcall_\w+|tensor<[^>]*>|true|false)|!stablehlo.token")


def changed_program(draw: Draw, text: str) -> str:
    """The MLIR with other attributes, another description of a call, or other words."""
    what = draw.int(0, 3)
    if what == 0:
        chosen = [number for number in NUMBERS if draw.bool()]
        found = CONFIG.search(text)
        if found is not None and draw.bool():
            chosen.append(found[0].partition("{")[2].removesuffix("}"))
        new = f"mhlo.backend_config = {{{', '.join(chosen)}}}"
        return CONFIG.sub(lambda _: new, text, count=draw.int(1, 2))
    if what == 1:
        return telling(change(draw, told_in(text)))(text)
    for _ in range(what):
        found = draw.choice(list(_WORD.finditer(text)))
        new = draw.choice(WORDS)
        new = "@" + new if found[0].startswith("@") else new
        text = text[: found.start()] + new + text[found.end() :]
    return text


def edited_program(draw: Draw) -> None:
    exported, text, header, args = draw.choice(modules())
    try:
        forged = with_text(exported, changed_program(draw, text))
    except Exception:  # no MLIR
        return
    loaded = hc.load(packed(header, bytes(forged.serialize())))
    given = [jnp.zeros(X.shape, X.dtype) if a is MANY else a for a in args]
    try:
        jax.block_until_ready(loaded.call(*given))
        hc.barrier()
    except Exception as error:  # the function gets what it can't use
        if NAMELESS in str(error):
            raise


def seeds() -> list[bytes]:
    edits = [bytes([2 + n % 3, n, n // 8, *range(n, n + 20)]) for n in range(96)]
    whole = [bytes([0]) + data for data, _ in files()]
    held = [b"\1\0" + text.encode() for _, held in files() for text, _ in held]
    return edits + whole + held


def one(data: bytes) -> None:
    draw = Draw(data)
    kind = draw.int(0, 4)
    try:
        if kind == 0:
            loaded = hc.load(draw.rest())
            str(loaded.manifest)
        elif kind == 1:
            texts.read_text(draw.text(), False, None)
        elif kind == 2:
            header, program = unpacked(draw.choice(files())[0])
            loaded = hc.load(packed(change(draw, header), program))
            assert str(loaded.manifest) and repr(loaded) and loaded.serialize()
        elif kind == 4:
            edited_program(draw)
        else:
            text, buffers = draw.choice(draw.choice(files())[1])
            told = json.dumps(change(draw, json.loads(text)))
            texts.read_text(told, False, buffers if draw.bool() else None)
    except hc.errors.HostcallError:
        pass
