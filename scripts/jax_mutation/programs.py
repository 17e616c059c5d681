"""Thirty small programs with their results in plain Python: hostcall's parts, in turn.

Each is a function that returns (what it got, what it should have got). One process runs
them under a JAX of which something has been taken away (mutants.py), so they use public
names only, and nothing is imported that another one needs.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc

Outcome = tuple[Any, Any]
PROGRAMS: dict[str, Callable[[], Outcome]] = {}


def program(f: Callable[[], Outcome]) -> Callable[[], Outcome]:
    PROGRAMS[f.__name__] = f
    return f


def plain(values: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).tolist(), values)


class Seen(list):
    def note(self, *values: Any) -> None:
        self.append(tuple(np.asarray(x).tolist() for x in values))


def after(seen: Seen) -> Seen:
    hc.barrier()
    return seen


@program
def pure_call() -> Outcome:
    f = jax.jit(lambda x: hc.call(np.square, x, x) + 1)
    return plain(f(jnp.arange(3.0))), [1, 2, 5]


@program
def unordered_call() -> Outcome:
    seen = Seen()

    @jax.jit
    def f(x):
        hc.call(seen.note, None, x, order="unordered")
        return x + 1

    got = plain([f(float(i)) for i in range(3)])
    return (got, after(seen)), ([1, 2, 3], [(0,), (1,), (2,)])


@program
def ordered_call() -> Outcome:
    seen = Seen()

    @jax.jit
    def f(x):
        hc.call(seen.note, None, x, order="ordered")
        hc.call(seen.note, None, x + 10, order="ordered")
        return x

    for i in range(3):
        f(float(i))
    return after(seen), [(0,), (10,), (1,), (11,), (2,), (12,)]


@program
def without_results() -> Outcome:
    seen = Seen()
    f = jax.jit(lambda x: hc.call(seen.note, None, x, order="ordered"))
    for i in range(4):
        f(float(i))
    return after(seen), [(0,), (1,), (2,), (3,)]


@program
def eager_call() -> Outcome:
    return plain(hc.call(np.cumsum, jnp.zeros(3), jnp.ones(3))), [1, 2, 3]


@program
def mixed_orders_in_a_loop() -> Outcome:
    seen = Seen()

    def body(i, x):
        hc.call(lambda i: seen.note(i), None, i, order="unordered")
        hc.call(lambda i: seen.note(i + 10), None, i, order="ordered")
        return x + 1

    got = jax.jit(lambda x: jax.lax.fori_loop(0, 3, body, x))(0.0)
    return (plain(got), after(seen)), (3, [(0,), (10,), (1,), (11,), (2,), (12,)])


@program
def loop_between_calls() -> Outcome:
    seen = Seen()

    def f(x):
        hc.call(lambda: seen.note("before"), None, order="unordered")

        def step(i, x):
            hc.call(lambda i: seen.note(i), None, i, order="unordered")
            return x

        x = jax.lax.fori_loop(0, 2, step, x)
        hc.call(lambda: seen.note("after"), None, order="unordered")
        return x

    jax.jit(f)(1.0)
    return after(seen), [("before",), (0,), (1,), ("after",)]


@program
def vmap_of_a_call() -> Outcome:
    f = jax.vmap(lambda x: hc.call(np.square, x, x))
    return plain(jax.jit(f)(jnp.arange(3.0))), [0, 1, 4]


@program
def where() -> Outcome:
    seen = Seen()

    def f(x):
        return hc.call(lambda x: (seen.note(x), x * 2)[1], x, x, where=x > 1)

    got = jax.jit(jax.vmap(f))(jnp.arange(4.0))
    return (plain(got), sorted(after(seen))), ([0, 0, 4, 6], [(2,), (3,)])


@program
def grad_of_a_host_function() -> Outcome:
    square = hc.host(np.square, result=hc.results.like(0))
    square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))
    got = jax.jit(jax.value_and_grad(lambda x: square(x) * 3))(2.0)
    return plain(got), (12, 12)


@program
def scan_under_grad() -> Outcome:
    seen = Seen()

    def f(x):
        def body(carry, _):
            hc.call(lambda: seen.note("step"), None, order="unordered")
            return carry * x, None

        return jax.lax.scan(body, x, None, length=3)[0]

    got = plain(jax.grad(f)(2.0))
    return (got, after(seen)), (32, [("step",)] * 3)


@program
def scan_under_remat() -> Outcome:
    seen = Seen()

    @jax.checkpoint
    def f(x):
        def body(carry, _):
            hc.tap(seen.note, 7)
            return carry * x, None

        return jax.lax.scan(body, x, None, length=3)[0]

    got = plain(jax.grad(f)(2.0))
    return (got, len(after(seen)) % 3), (32, 0)


@program
def while_under_linearize() -> Outcome:
    seen = Seen()

    def f(x):
        def body(state):
            i, y = state
            hc.call(lambda i: seen.note(i), None, i, order="ordered")
            return i + 1, y * 2

        return jax.lax.while_loop(lambda s: s[0] < 3, body, (0, x))[1]

    value, jvp = jax.linearize(f, 1.0)
    return (plain((value, jvp(1.0))), after(seen)), ((8, 8), [(0,), (1,), (2,)])


@program
def condition_with_rows() -> Outcome:
    seen = Seen()

    def goes_on(x, limit):
        seen.note(x)
        return x < limit

    def f(limit):
        test = lambda x: hc.call(
            goes_on, jax.ShapeDtypeStruct((), np.bool_), x, limit, order="unordered"
        )
        return jax.lax.while_loop(test, lambda x: x + 1, 0.0)

    got = jax.jit(jax.vmap(f))(jnp.array([1.0, 3.0]))
    return (plain(got), len(after(seen))), ([1, 3], 8)


@program
def tap() -> Outcome:
    seen = Seen()

    def body(x, i):
        hc.tap(seen.note, i)
        return x + 1, None

    got = jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(3))[0])(0.0)
    return (plain(got), after(seen)), (3, [(0,), (1,), (2,)])


@program
def feed() -> Outcome:
    with hc.feed(np.float32(i) for i in range(3)) as source:
        f = jax.jit(lambda x: x + source()[0])
        return plain([f(10.0) for _ in range(3)]), [10, 11, 12]


class _Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, x: Any) -> int:
        self.n += int(x)
        return self.n


@program
def host_object() -> Outcome:
    methods = {"add": jax.ShapeDtypeStruct((), np.int32)}
    with hc.Object(_Counter, methods=methods) as counter:
        f = jax.jit(lambda x: counter.add(x))
        return plain([f(i) for i in (1, 2, 3)]), [1, 3, 6]


@program
def drop_in_pure() -> Outcome:
    f = jax.jit(lambda x: hc.pure_callback(lambda x: np.asarray(x) * 2, x, x))
    return plain(f(jnp.arange(3.0))), [0, 2, 4]


@program
def drop_in_io() -> Outcome:
    seen = Seen()
    f = jax.jit(lambda x: hc.io_callback(seen.note, None, x, ordered=True))
    for i in range(3):
        f(float(i))
    return after(seen), [(0,), (1,), (2,)]


@program
def drop_in_debug() -> Outcome:
    seen = Seen()

    @jax.jit
    def f(x):
        hc.debug.callback(seen.note, x, ordered=True)
        return x

    for i in range(3):
        f(float(i))
    return after(seen), [(0,), (1,), (2,)]


@program
def patched() -> Outcome:
    seen = Seen()
    with hc.patch_jax(arrays="numpy"):

        @jax.jit
        def f(x):
            jax.debug.callback(seen.note, x)
            return jax.pure_callback(lambda x: np.asarray(x) * 2, x, x)

        got = plain(f(jnp.arange(3.0)))
        jax.effects_barrier()
    return (got, after(seen)), ([0, 2, 4], [([0, 1, 2],)])


@program
def observe_values() -> Outcome:
    seen = Seen()

    @jax.jit
    def f(x):
        y = x * 2
        return y + 1

    with hc.observe("y", to=lambda record, value: seen.note(value)):
        got = plain(f(3.0))
    return (got, after(seen)), (7, [(6,)])


@program
def observe_nans() -> Outcome:
    f = jax.jit(lambda x: jnp.log(x) + 1)
    try:
        with hc.observe(nans=True):
            f(-1.0)
            hc.barrier()
    except FloatingPointError:
        return "found", "found"
    return "missed", "found"


@program
def exported() -> Outcome:
    name = "jax_mutation.square"
    hc.register(name)(np.square)
    data = bytes(hc.export(lambda x: hc.call(np.square, x, x))(jnp.ones(3)))
    return plain(hc.load(data).call(jnp.arange(3.0))), [0, 1, 4]


@program
def failure() -> Outcome:
    def fails(x):
        raise KeyError("no such key")

    f = jax.jit(lambda x: hc.call(fails, x, x))
    try:
        jax.block_until_ready(f(1.0))
    except (KeyError, jax.errors.JaxRuntimeError) as error:
        return "no such key" in str(error), True
    return "silent", True


@program
def ordered_after_a_failure() -> Outcome:
    seen = Seen()

    def note(x):
        if x == 1:
            raise ValueError("one")
        seen.note(x)

    @jax.jit
    def f(x):
        hc.call(note, None, x, order="ordered")
        return x

    told = 0
    for i in range(4):
        try:
            jax.block_until_ready(f(float(i)))
            jax.effects_barrier()
        except (ValueError, jax.errors.JaxRuntimeError):
            told += 1
    return (after(seen), told), ([(0,), (2,), (3,)], 1)


@program
def barrier_waits() -> Outcome:
    seen = Seen()
    f = jax.jit(lambda x: hc.call(seen.note, None, x, order="unordered"))
    f(1.0)
    jax.effects_barrier()
    return list(seen), [(1,)]


@program
def compiled_ahead() -> Outcome:
    seen = Seen()

    def f(x):
        hc.call(seen.note, None, x, order="ordered")
        return x * 2

    g = jax.jit(f).lower(1.0).compile()
    got = plain([g(float(i)) for i in range(3)])
    return (got, after(seen)), ([0, 2, 4], [(0,), (1,), (2,)])


@program
def shard_map() -> Outcome:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    f = jax.shard_map(
        lambda x: hc.call(np.square, x, x), mesh=mesh, in_specs=spec, out_specs=spec
    )
    return plain(jax.jit(f)(jnp.arange(4.0))), [0, 1, 4, 9]


@program
def typed_keys() -> Outcome:
    key = jax.random.key(3)
    f = jax.jit(lambda k: hc.call(lambda k: k, k, k))
    got = jax.random.key_data(f(key))
    return plain(got), plain(jax.random.key_data(key))


@program
def jax_in_host_code() -> Outcome:
    def host(x):
        return np.asarray(jnp.asarray(x) * 2)

    f = jax.jit(lambda x: hc.call(host, x, x))
    return plain(f(jnp.arange(3.0))), [0, 2, 4]


@program
def reraise() -> Outcome:
    def fails(x):
        raise LookupError("mine")

    f = jax.jit(lambda x: hc.call(fails, None, x, order="unordered"))
    try:
        with hc.reraise():
            f(1.0)
    except LookupError as error:
        return str(error), "mine"
    return "silent", "mine"


def run(name: str) -> str:
    """The outcome of a program in one word, or what was wrong with it."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory():
        warnings.simplefilter("ignore")
        try:
            got, wanted = PROGRAMS[name]()
        except hc.errors.HostcallError as error:
            return "refused" if error.code == "hc-jax" else f"WRONG {error!r}"[:300]
        except BaseException as error:
            text = str(error)
            if "[hc-jax]" in text:  # a program failed with it
                return "refused"
            return f"WRONG {type(error).__name__}: {text}"[:300]
    return "right" if got == wanted else f"WRONG got {got}, wanted {wanted}"[:300]
