"""Each function that a program can call, as one kind of function: a value in, one out.

These functions are called faces here. Each makes an `op`: in a program, `op(v)` shows `v` to host code and gives
`host.inside(v)`. Faces with a result compute it on the host, taps beside it, and a feed
multiplies it by its next item.
"""

from __future__ import annotations

import ctypes
import io
import itertools
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dtypes import values

import hostcall as hc

_numbers = itertools.count()


class Square:
    """What an op computes of numbers: a feed multiplies the square by its item."""

    @staticmethod
    def inside(v: Any) -> Any:
        return v * v

    @staticmethod
    def item(spec: Any, k: int) -> Any:
        return np.full(spec.shape, k + 1, spec.dtype)

    @staticmethod
    def fed(v: Any, item: Any) -> Any:
        return v * v * item


class Move:
    """What an op does with any dtype: it reverses an array; a feed gives its item."""

    @staticmethod
    def inside(v: Any) -> Any:
        return v[::-1] if v.ndim else v

    @staticmethod
    def item(spec: Any, k: int) -> Any:
        if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(k), spec.shape)
        return values(np.dtype(spec.dtype).name, spec.shape, k)

    @staticmethod
    def fed(v: Any, item: Any) -> Any:
        return item


class Host:
    """What host code sees: `seen` has the value of each call, in the order of calls.

    Attributes:
        spec: of an argument.
        work: Square or Move.
        portable: what a program calls is registered, so that it can be exported.
        exits: closed when the cell is over.
    """

    def __init__(
        self, exits: ExitStack, spec: Any, work: Any, portable: bool = False
    ) -> None:
        self.exits, self.spec, self.portable = exits, spec, portable
        self.work, self.inside = work, work.inside
        self.seen: list[Any] = []
        self.feed: Any = None
        self.text: Any = None

    def fn(self, v: Any) -> Any:
        self.seen.append(v)
        return self.inside(v)

    def named(self, thing: Any) -> Any:
        if self.portable:
            hc.register(f"matrix.n{next(_numbers)}")(thing)
        return thing

    def function(self) -> Callable[..., Any]:
        return self.named(lambda v: self.fn(v))

    def printed(self) -> None:
        """Keeps what is printed, for `events`."""
        self.text = self.exits.enter_context(redirect_stdout(io.StringIO()))

    def events(self) -> list[Any]:
        """What host code has seen, after all programs."""
        jax.effects_barrier()
        hc.barrier()
        if self.feed is not None:
            return [self.item(k) for k in range(self.feed.state()["item"])]
        return self.seen if self.text is None else self.text.getvalue().splitlines()

    def item(self, k: int) -> Any:
        return self.work.item(self.spec, k)

    # --- The oracle ------------------------------------------------------------------

    def plain(self, v: Any) -> Any:
        """`op` without JAX."""
        return self.fn(v)

    def plain_feed(self, v: Any) -> Any:
        item = self.item(len(self.seen))
        self.seen.append(item)
        return self.work.fed(v, item)

    def plain_print(self, v: Any) -> Any:
        self.seen += str(v.item() if v.ndim == 0 else v).splitlines()
        return self.inside(v)


def _like(v: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(v), v.dtype)


def _call(host: Host, order: str) -> Any:
    fn = host.function()
    return lambda v: hc.call(fn, _like(v), v, order=order)


def _host(host: Host, order: str) -> Any:
    f = hc.host(lambda v: host.fn(v), result=hc.results.like(0), order=order)
    if order == "pure":
        f.defjvps(lambda t, _, x: 2 * x * t, where="jax")
    return host.named(f)


class _Thing:
    def __init__(self, host: Host) -> None:
        self.method = host.fn


def _object(host: Host, order: str) -> Any:
    factory = host.named(lambda: _Thing(host))
    thing = hc.Object(factory, methods={"method": host.spec}, order=order)
    return host.exits.enter_context(thing).method


def _feed(host: Host, _: str) -> Any:
    feed = hc.feed(map(host.item, itertools.count()), prefetch=1)
    host.feed = host.exits.enter_context(feed)
    host.named(feed)
    return lambda v: host.work.fed(v, feed(rows=v)[0])


def _tap(host: Host, order: str) -> Any:
    fn = host.function()
    return lambda v: (hc.tap(fn, v, order=order, rows="each"), host.inside(v))[1]


def _tap_through(host: Host, _: str) -> Any:
    fn = host.function()
    return lambda v: host.inside(hc.tap_through(fn, v, rows="each"))


def _print(host: Host, order: str) -> Any:
    host.printed()
    return lambda v: (hc.print("{}", v, order=order, rows="each"), host.inside(v))[1]


def _buffer(host: Host, order: str) -> Any:
    def fill(_: Any, out: Any, v: Any) -> None:
        np.asarray(out)[...] = host.fn(np.array(v))

    return lambda v: _in_place(fill, v, order)


def _in_place(fill: Any, v: Any, order: str) -> Any:
    f = hc.buffers.buffer_callback(
        fill, _like(v), order=order, vmap_method="sequential"
    )
    return f(v)


def _native(host: Host, order: str) -> Any:
    pointers = ctypes.POINTER(ctypes.c_void_p)
    count = int(np.prod(host.spec.shape))
    dtype = np.dtype(host.spec.dtype)

    def at(pointer: int) -> Any:
        block = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
        return np.frombuffer(block, dtype).reshape(host.spec.shape)

    @ctypes.CFUNCTYPE(None, pointers, pointers)
    def code(out: Any, args: Any) -> None:
        at(out[0])[...] = host.fn(at(args[0]).copy())

    host.exits.callback(lambda _: None, code)  # keeps the code alive
    native = hc.buffers.native(ctypes.cast(code, ctypes.c_void_p).value)
    return lambda v: _in_place(native, v, order)


def _pure_callback(host: Host, _: str) -> Any:
    fn = host.function()
    return lambda v: hc.pure_callback(fn, _like(v), v, vmap_method="sequential")


def _io_callback(host: Host, order: str) -> Any:
    fn = host.function()
    return lambda v: hc.io_callback(fn, _like(v), v, ordered=order == "ordered")


def _debug_callback(host: Host, order: str) -> Any:
    fn, ordered = host.function(), order == "ordered"
    return lambda v: (hc.debug.callback(fn, v, ordered=ordered), host.inside(v))[1]


def _debug_print(host: Host, order: str) -> Any:
    host.printed()
    ordered = order == "ordered"
    return lambda v: (hc.debug.print("{}", v, ordered=ordered), host.inside(v))[1]


_THREE = ("pure", "unordered", "ordered")
_TWO = ("unordered", "ordered")
# name: (orders, what makes its op)
FACES: dict[str, tuple[tuple[str, ...], Callable[[Host, str], Any]]] = {
    "hc.call": (_THREE, _call),
    "hc.host": (_THREE, _host),
    "hc.Object": (_TWO, _object),
    "hc.feed": (("ordered",), _feed),
    "hc.tap": (_TWO, _tap),
    "hc.tap_through": (("pure",), _tap_through),
    "hc.print": (_TWO, _print),
    "hc.buffers.buffer_callback": (_THREE, _buffer),
    "hc.buffers.native": (_THREE, _native),
    "hc.pure_callback": (("pure",), _pure_callback),
    "hc.io_callback": (_TWO, _io_callback),
    "hc.debug.callback": (_TWO, _debug_callback),
    "hc.debug.print": (_TWO, _debug_print),
}
COLUMNS = [(face, order) for face, (orders, _) in FACES.items() for order in orders]


def plain_of(face: str, host: Host) -> Callable[[Any], Any]:
    """The oracle of a face's `op`, with the events in `host.seen`."""
    if face == "hc.feed":
        return host.plain_feed
    return host.plain_print if face.endswith("print") else host.plain
