"""Files of exported programs, the manifests in them, and the texts of their calls."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from fuzz.draw import Draw, change
from hostcall import _jax
from hostcall._api.export import container
from hostcall._primitives import travel

X = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
ROW = jax.ShapeDtypeStruct((4,), np.float32)
MASK = jnp.array(True)
MANY = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), np.float32)
# XLA's types and shapes of the buffers of each call (travel._read_text).
WHOLE, BOOL = [11, 3, 4], [1]
sine = hc.register("fuzz.sine")(lambda x: np.sin(x))
seen = hc.register("fuzz.seen")(lambda x: None)
cube = hc.register("fuzz.cube")(hc.host(lambda x: x**3, result=hc.like(0)))
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
]


@functools.cache
def files() -> list[tuple[bytes, list[tuple[str, list]]]]:
    """Each program as bytes, and its texts with the buffers that they describe."""
    found = []
    for f, args, buffers in CALLS:
        made = hc.export(lambda *args, f=f: (f(*args), 2 * args[0]))(*args)
        ours = ["hostcall_call", "hostcall_tap"]
        texts = _jax.attribute_texts(made.exported, travel.ATTRIBUTE, ours)
        found.append((made.serialize(), [(text, buffers) for text in texts]))
    return found


def seeds() -> list[bytes]:
    edits = [bytes([2 + n % 2, n, n // 8, *range(n, n + 20)]) for n in range(64)]
    whole = [bytes([0]) + data for data, _ in files()]
    texts = [b"\1\0" + text.encode() for _, texts in files() for text, _ in texts]
    return edits + whole + texts


def one(data: bytes) -> None:
    draw = Draw(data)
    kind = draw.int(0, 3)
    try:
        if kind == 0:
            loaded = hc.load(draw.rest())
            str(loaded.manifest)
        elif kind == 1:
            travel._read_text(draw.text(), False, None)
        elif kind == 2:
            header, program = container.unpack(draw.choice(files())[0])
            loaded = hc.load(container.pack(change(draw, header), program))
            assert str(loaded.manifest) and repr(loaded) and loaded.serialize()
        else:
            text, buffers = draw.choice(draw.choice(files())[1])
            told = json.dumps(change(draw, json.loads(text)))
            travel._read_text(told, False, buffers if draw.bool() else None)
    except hc.errors.HostcallError:
        pass
