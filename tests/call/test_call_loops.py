"""Calls in loops and conditionals run as the same Python loop would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc

pytestmark = pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])

INT = jax.ShapeDtypeStruct((), jnp.int32)
BOOL = jax.ShapeDtypeStruct((), jnp.bool_)


class Host:
    """A host function whose calls are logged, and the same for the oracle.

    `log` has one (name, value) for each call; a program calls `on_host`, the oracle
    calls `plain`.
    """

    def __init__(self, order):
        self.order = order
        self.log = []

    def on_host(self, name, fn, x, result=INT):
        def logged(value):
            self.log.append((name, int(value)))
            return result.dtype.type(fn(value))

        return hc.call(logged, result, x, order=self.order)

    def plain(self, name, fn, x, result=INT):
        self.log.append((name, int(x)))
        return result.dtype.type(fn(x))


def check(order, program, *args):
    """Compares `program(call, lib)`, under jit and eagerly, with plain Python."""
    oracle = Host(order)
    want = program(oracle.plain, PlainLax)(*map(np.int32, args))
    assert oracle.log
    for wrap in (jax.jit, lambda f: f):
        host = Host(order)
        got = wrap(program(host.on_host, lax))(*map(jnp.int32, args))
        jax.effects_barrier()
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert host.log == oracle.log


class PlainLax:
    """The loops and conditionals of `jax.lax`, as its documentation writes them in
    Python.
    """

    @staticmethod
    def scan(f, carry, xs, length=None):
        ys = []
        for x in range(length) if xs is None else xs:
            carry, y = f(carry, None if xs is None else x)
            ys.append(y)
        return carry, np.stack(ys)

    @staticmethod
    def while_loop(cond, body, value):
        while cond(value):
            value = body(value)
        return value

    @staticmethod
    def fori_loop(low, high, body, value):
        for i in range(low, high):
            value = body(i, value)
        return value

    @staticmethod
    def cond(pred, true, false, *operands):
        return true(*operands) if pred else false(*operands)

    @staticmethod
    def switch(index, branches, *operands):
        return branches[min(max(int(index), 0), len(branches) - 1)](*operands)


def double(x):
    return x * 2


def increment(x):
    return x + 1


def test_scan(order):
    def program(call, lib):
        def step(carry, x):
            y = call("double", double, x + carry)
            return y % 7, y

        return lambda x: lib.scan(step, x, np.arange(9, dtype=np.int32))

    check(order, program, 3)


@pytest.mark.parametrize("options", [{"unroll": 4}, {"reverse": True}], ids=str)
def test_scan_options(order, options):
    host = Host(order)
    xs = np.arange(8, dtype=np.int32)
    _, ys = jax.jit(
        lambda: lax.scan(
            lambda c, x: (c, host.on_host("double", double, x)), 0, xs, **options
        )
    )()
    jax.effects_barrier()
    np.testing.assert_array_equal(ys, xs * 2)
    want = [("double", x) for x in (xs[::-1] if "reverse" in options else xs)]
    if order != "ordered" and "unroll" in options:
        # Each iteration is a jitted function of its own, and nothing orders them.
        assert sorted(host.log) == want
    else:
        assert host.log == want


@pytest.mark.parametrize("start", [0, 5, 9])
def test_while_condition(order, start):
    def program(call, lib):
        return lambda x: lib.while_loop(
            lambda v: call("condition", lambda n: n < 8, v, BOOL), lambda v: v + 3, x
        )

    check(order, program, start)


def test_while_condition_and_body(order):
    def program(call, lib):
        return lambda x: lib.while_loop(
            lambda v: call("condition", lambda n: n < 8, v, BOOL),
            lambda v: call("body", increment, v),
            x,
        )

    check(order, program, 2)


def test_fori_loop_with_traced_bounds(order):
    def program(call, lib):
        return lambda low, high: lib.fori_loop(
            low, high, lambda i, v: call("body", double, v + i) % 101, high * 0
        )

    check(order, program, 2, 7)


@pytest.mark.parametrize("index", [-5, 0, 1, 2, 9])
def test_switch_calls_only_its_branch(order, index):
    def program(call, lib):
        branches = [
            lambda v, n=n: call(f"branch {n}", lambda m: m + 10 * n, v)
            for n in range(3)
        ]
        return lambda x: lib.switch(x, branches, x)

    check(order, program, index)


def test_nested_scan(order):
    def program(call, lib):
        def row(carry, x):
            def cell(inner, y):
                out = call("cell", increment, x * 10 + y)
                return inner + out, out

            carry, outs = lib.scan(cell, carry, np.arange(3, dtype=np.int32))
            return call("row", double, carry) % 1000, outs

        return lambda x: lib.scan(row, x, np.arange(4, dtype=np.int32))

    check(order, program, 1)


def test_cond_in_scan_in_cond(order):
    def program(call, lib):
        def step(carry, x):
            y = lib.cond(
                (x + carry) % 2 == 0,
                lambda v: call("even", double, v),
                lambda v: lib.switch(
                    v % 3,
                    [
                        lambda u: call("zero", increment, u),
                        lambda u: u + 5,
                        lambda u: call("two", double, u),
                    ],
                    v,
                ),
                x,
            )
            return (carry + y) % 1000, y

        def scanned(v):
            return lib.scan(step, v, np.arange(12, dtype=np.int32))[0]

        return lambda x: lib.cond(x > 0, scanned, lambda v: call("none", double, v), x)

    check(order, program, 1)
    check(order, program, -1)


def test_scan_in_while(order):
    def program(call, lib):
        def body(v):
            def step(c, x):
                c = call("step", increment, c)
                return c, x

            return lib.scan(step, v, np.arange(3, dtype=np.int32))[0]

        return lambda x: lib.while_loop(
            lambda v: call("condition", lambda n: n < 10, v, BOOL), body, x
        )

    check(order, program, 0)


def test_a_loop_whose_results_nobody_wants(order):
    host = Host(order)

    @jax.jit
    def f(x):
        lax.scan(lambda c, v: (c, host.on_host("double", double, v)), 0, x)
        return x + 1

    np.testing.assert_array_equal(f(np.arange(5)), np.arange(5) + 1)
    jax.effects_barrier()
    assert len(host.log) == (0 if order == "pure" else 5)
