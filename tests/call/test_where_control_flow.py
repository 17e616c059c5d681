"""vmap of cond and while_loop with `where=`: no call that Python would not make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc

pytestmark = [
    pytest.mark.parametrize("order", ["pure", "unordered", "ordered"]),
    pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"]),
    pytest.mark.parametrize("method", ["sequential", "broadcast_all"]),
]


class Host:
    """x + 1 on the host; `seen` has every number that reached it."""

    def __init__(self, order, method):
        self.options = {"order": order, "vmap_method": method}
        self.seen = []

    def increment(self, x):
        self.seen.extend(np.ravel(x).tolist())
        return x + np.int32(1)

    def __call__(self, x, where):
        return hc.call(self.increment, x, x, where=where, **self.options)

    def check(self, want):
        jax.effects_barrier()
        assert self.seen == want
        self.seen.clear()


def test_cond(method, wrap, order):
    host = Host(order, method)

    def f(p, x):
        return lax.cond(p, lambda v: host(v, where=p), lambda v: -v, x)

    g = wrap(jax.vmap(f))
    x = np.arange(10, 14, dtype=np.int32)
    for mask in [[False, True, False, False], [False] * 4, [True] * 4]:
        p = np.array(mask)
        np.testing.assert_array_equal(g(p, x), np.where(p, x + 1, -x))
        host.check(x[p].tolist())


def test_both_branches_of_cond(method, wrap, order):
    true, false = Host(order, method), Host(order, method)

    def f(p, x):
        return lax.cond(p, lambda v: true(v, p), lambda v: -false(v, ~p), x)

    p, x = np.array([False, True, False, False]), np.arange(10, 14, dtype=np.int32)
    want = np.where(p, x + 1, -(x + 1))
    np.testing.assert_array_equal(wrap(jax.vmap(f))(p, x), want)
    true.check([11])
    false.check([10, 12, 13])


def test_switch(method, wrap, order):
    hosts = [Host(order, method) for _ in range(3)]

    def f(i, x):
        branches = [
            lambda v, n=n, host=host: host(v, i == n) * 10 + n
            for n, host in enumerate(hosts)
        ]
        return lax.switch(i, branches, x)

    i, x = np.array([2, 0, 2, 1]), np.arange(4, dtype=np.int32)
    np.testing.assert_array_equal(wrap(jax.vmap(f))(i, x), (x + 1) * 10 + i)
    for n, host in enumerate(hosts):
        host.check(x[i == n].tolist())


def test_while(method, wrap, order):
    host = Host(order, method)

    def f(x):
        return lax.while_loop(lambda v: v < 3, lambda v: host(v, where=v < 3), x)

    g = wrap(jax.vmap(f))
    for starts in [[2, 1, 3, 0], [3, 3, 3, 3], [0, 3, 9, 1]]:
        x = np.array(starts, np.int32)
        np.testing.assert_array_equal(g(x), np.maximum(x, 3))
        # In each iteration, the rows that are not done yet, as in a loop for each row.
        host.check([v + t for t in range(3) for v in starts if v + t < 3])


def test_while_with_a_count_a_row(method, wrap, order):
    host = Host(order, method)

    def f(n, x):
        def body(state):
            i, v = state
            return i + 1, host(v, where=i < n)

        return lax.while_loop(lambda s: s[0] < n, body, (jnp.int32(0), x))[1]

    n, x = np.arange(3, dtype=np.int32), np.arange(0, 30, 10, dtype=np.int32)
    np.testing.assert_array_equal(wrap(jax.vmap(f))(n, x), x + n)
    host.check([10, 20, 21])  # 3 calls; every row in every iteration would be 6


def test_cond_in_nested_vmap_and_scan(method, wrap, order):
    host = Host(order, method)

    def f(p, x):
        def step(carry, _):
            return lax.cond(p, lambda v: host(v, p), lambda v: v - 1, carry), None

        return lax.scan(step, x, None, length=2)[0]

    p = np.array([[True, False], [False, True], [False, False]])
    x = np.arange(0, 60, 10, dtype=np.int32).reshape(3, 2)
    want = np.where(p, x + 2, x - 2)
    np.testing.assert_array_equal(wrap(jax.vmap(jax.vmap(f)))(p, x), want)
    host.check([0, 30, 1, 31])
