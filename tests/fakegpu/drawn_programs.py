"""Programs drawn at random: host calls and taps between kernels, in loops, branches and rows.

All numbers are whole and below 31, so that every dtype holds them exactly, and two runtimes
have to agree in each bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from fuzz.draw import Draw

MODULUS = 31
DTYPES = ("float32", "int32", "float16", "bfloat16", "int8", "uint8", "uint32")
SHAPES = ((), (3,), (2, 3), (1,), (0,))
ORDERS = ("pure", "unordered", "ordered")
METHODS = ("sequential", "parallel", "expand_dims", "broadcast_all")
DEEPEST = 2


class Bad(Exception):
    """What host functions of programs that fail raise."""


class Called(NamedTuple):
    """One call of a host function."""

    site: int
    method: str  # how rows are called
    device: int | None
    shape: tuple[int, ...]
    values: bytes


@dataclasses.dataclass
class Log:
    """What the host functions of a program were called with, in their order."""

    calls: list[Called] = dataclasses.field(default_factory=list)
    pure: list[Called] = dataclasses.field(default_factory=list)
    taps: list[Called] = dataclasses.field(default_factory=list)
    failing: tuple[int, int] | None = (
        None  # the site, and the first value it can't take
    )

    def fail(self, site: int, value: Any) -> None:
        if self.failing is None or self.failing[0] != site:
            return
        if np.any(np.asarray(value).astype(np.int64) >= self.failing[1]):
            raise Bad(site)

    def clear(self) -> None:
        for entries in (self.calls, self.pure, self.taps):
            entries.clear()


def _called(site: int, method: str, value: Any) -> Called:
    current = hc.current()
    device = current.device if current is not None else None
    array = np.asarray(value)
    number = None if device is None else device.id
    return Called(site, method, number, array.shape, array.tobytes())


def _changed(value: Any, site: int) -> Any:
    """What host functions compute, element by element."""
    wide = np.asarray(value).astype(np.int64)
    return ((wide * (site % 5 + 2) + site) % MODULUS).astype(np.asarray(value).dtype)


def _small(x: Any, like: Any) -> Any:
    return (x % MODULUS).astype(like.dtype)


def _sum(x: Any) -> Any:
    return jnp.sum(x.astype(jnp.int32))


# --- Steps --------------------------------------------------------------------------
# Each takes an array and a number, which counts the iterations of loops, and gives an
# array of the same shape.


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Work of the device alone."""

    kind: str
    site: int

    def run(self, log: Log, x: Any, n: Any) -> Any:
        wide = x.astype(jnp.int32)
        if self.kind == "affine":
            return _small(wide * 3 + self.site + n, x)
        if self.kind == "native":  # in the array's own dtype
            return jnp.where(x >= MODULUS - 1, jnp.zeros_like(x), x + 1)
        if self.kind == "sum":
            return _small(wide + jnp.sum(wide), x)
        if self.kind == "random":
            key = jax.random.fold_in(jax.random.key(self.site), n)
            bits = jax.random.bits(key, x.shape, jnp.uint32) % MODULUS
            return _small(wide + bits.astype(jnp.int32), x)
        if x.ndim == 0:
            return x
        if self.kind == "flip":
            return jnp.flip(x, -1)
        if self.kind == "sort":
            return jnp.sort(x, -1)
        assert self.kind == "cumsum"
        return _small(jnp.cumsum(wide, -1), x)


KERNELS = ("affine", "native", "sum", "random", "flip", "sort", "cumsum")


@dataclasses.dataclass(frozen=True)
class Call:
    site: int
    order: str
    method: str
    masked: bool
    pair: bool  # two results, in a dictionary

    def run(self, log: Log, x: Any, n: Any) -> Any:
        def host(value: Any) -> Any:
            entries = log.pure if self.order == "pure" else log.calls
            entries.append(_called(self.site, self.method, value))
            log.fail(self.site, value)
            out = _changed(value, self.site)
            return {"b": out, "a": np.array(value)} if self.pair else out

        spec: Any = jax.ShapeDtypeStruct(x.shape, x.dtype)
        if self.pair:
            spec = {"a": spec, "b": spec}
        options: dict[str, Any] = {"order": self.order, "vmap_method": self.method}
        if self.masked:
            options["where"] = (_sum(x) + n) % 2 == 0
        out = hc.call(host, spec, x, **options)
        if not self.pair:
            return out
        mixed = out["a"].astype(jnp.int32) + out["b"].astype(jnp.int32)
        return _small(mixed, x)


@dataclasses.dataclass(frozen=True)
class Tap:
    site: int
    order: str
    each_row: bool  # else under vmap one call has the values of all rows

    def run(self, log: Log, x: Any, n: Any) -> Any:
        def host(value: Any, number: Any) -> None:
            called = _called(self.site, "tap", value)
            numbers = np.asarray(number).tobytes()
            log.taps.append(called._replace(values=called.values + numbers))

        rows = {"rows": "each"} if self.each_row else {}
        hc.tap(host, x, n, order=self.order, **rows)
        return x


@dataclasses.dataclass(frozen=True)
class HostFunction:
    """`hc.host`, by itself or its gradient."""

    site: int
    gradient: bool

    def run(self, log: Log, x: Any, n: Any) -> Any:
        def host(value: Any) -> Any:
            log.pure.append(_called(self.site, "sequential", value))
            return _changed(value, self.site)

        function = hc.host(host, result=hc.results.like(0))
        if not self.gradient or not jnp.issubdtype(x.dtype, jnp.floating):
            return function(x)
        function.defvjp(
            lambda value: (_changed(value, self.site), value),
            lambda value, cotangent: (_changed(value, self.site + 1) * cotangent,),
        )
        gradient = jax.grad(lambda x: jnp.sum(function(x)).astype(jnp.float32))
        return gradient(x)


@dataclasses.dataclass(frozen=True)
class Loop:
    kind: str
    times: int
    body: Block

    def run(self, log: Log, x: Any, n: Any) -> Any:
        def step(i: Any, x: Any) -> Any:
            return self.body.run(log, x, n + i)

        if self.kind == "fori":
            return jax.lax.fori_loop(0, self.times, step, x)
        if self.kind == "fori to a value":
            return jax.lax.fori_loop(0, n % (self.times + 1), step, x)
        if self.kind == "while":
            most = _sum(x) % (self.times + 1)
            done, out = jax.lax.while_loop(
                lambda state: state[0] < most,
                lambda state: (state[0] + 1, step(state[0], state[1])),
                (jnp.int32(0), x),
            )
            return _small(out.astype(jnp.int32) + done, x)
        assert self.kind == "scan"
        out, sums = jax.lax.scan(
            lambda x, i: (step(i, x), _sum(x)), x, jnp.arange(self.times)
        )
        return _small(out.astype(jnp.int32) + jnp.sum(sums), x)


LOOPS = ("fori", "fori to a value", "while", "scan")


@dataclasses.dataclass(frozen=True)
class Branch:
    branches: tuple[Block, ...]
    by_number: bool  # else by the values, which under vmap each row has of its own

    def run(self, log: Log, x: Any, n: Any) -> Any:
        which = (n if self.by_number else _sum(x) + n) % len(self.branches)
        functions = [
            lambda x, block=block: block.run(log, x, n) for block in self.branches
        ]
        if len(functions) == 2:
            return jax.lax.cond(which == 1, *functions, x)
        return jax.lax.switch(which, functions, x)


@dataclasses.dataclass(frozen=True)
class Rows:
    count: int
    body: Block

    def run(self, log: Log, x: Any, n: Any) -> Any:
        wide = x.astype(jnp.int32)
        rows = _small(jnp.stack([wide + 7 * row for row in range(self.count)]), x)
        out = jax.vmap(lambda row: self.body.run(log, row, n))(rows)
        return _small(jnp.sum(out.astype(jnp.int32), 0), x)


@dataclasses.dataclass(frozen=True)
class Inner:
    """A jitted function inside."""

    body: Block

    def run(self, log: Log, x: Any, n: Any) -> Any:
        return jax.jit(lambda x, n: self.body.run(log, x, n))(x, n)


Step = Kernel | Call | Tap | HostFunction | Loop | Branch | Rows | Inner


@dataclasses.dataclass(frozen=True)
class Block:
    steps: tuple[Step, ...]

    def run(self, log: Log, x: Any, n: Any) -> Any:
        for step in self.steps:
            x = step.run(log, x, n)
        return x

    @property
    def whole(self) -> list[Step]:
        """These steps, and those inside."""
        found: list[Step] = []
        for step in self.steps:
            found.append(step)
            inner = [step.body] if isinstance(step, Loop | Rows | Inner) else []
            if isinstance(step, Branch):
                inner = list(step.branches)
            for block in inner:
                found += block.whole
        return found


# --- Drawing ------------------------------------------------------------------------


class Drawn:
    """Draws blocks whose calls and taps have a number each."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.sites = 0

    def block(self, depth: int) -> Block:
        count = self.draw.int(1, 3 if depth == 0 else 2)
        return Block(tuple(self.step(depth) for _ in range(count)))

    def step(self, depth: int) -> Step:
        draw = self.draw
        self.sites += 1
        kinds: list[Callable[[int], Step]]
        kinds = [self.call, self.call, self.call, self.tap, self.host, self.kernel]
        if depth < DEEPEST:
            kinds += [self.loop, self.loop, self.branch, self.rows, self.rows]
            kinds += [self.inner]
        return draw.choice(kinds)(depth)

    def kernel(self, depth: int) -> Step:
        return Kernel(self.draw.choice(KERNELS), self.sites)

    def call(self, depth: int) -> Step:
        draw = self.draw
        order, method = draw.choice(ORDERS), draw.choice(METHODS)
        return Call(self.sites, order, method, draw.int(0, 3) == 0, draw.bool())

    def tap(self, depth: int) -> Step:
        order = self.draw.choice(("unordered", "ordered"))
        return Tap(self.sites, order, self.draw.bool())

    def host(self, depth: int) -> Step:
        return HostFunction(self.sites, self.draw.bool())

    def loop(self, depth: int) -> Step:
        kind, times = self.draw.choice(LOOPS), self.draw.int(0, 3)
        return Loop(kind, times, self.block(depth + 1))

    def branch(self, depth: int) -> Step:
        count, by_number = self.draw.int(2, 3), self.draw.bool()
        blocks = tuple(self.block(depth + 1) for _ in range(count))
        return Branch(blocks, by_number)

    def rows(self, depth: int) -> Step:
        return Rows(self.draw.int(1, 3), self.block(depth + 1))

    def inner(self, depth: int) -> Step:
        return Inner(self.block(depth + 1))
