"""`hc.observe(nans=True)`: programs x places, and what their errors say.

The line that makes the first bad value is marked in the source. Where a program can be
run op by op, JAX's own `debug_nans` does that as an oracle: it has to raise too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import pickle
import sys
import textwrap
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.scipy.optimize import minimize
from jax.scipy.special import bessel_jn
from jax.sharding import NamedSharding, PartitionSpec

import hostcall as hc
from hostcall.tools.observing import observe

P = PartitionSpec
f32 = jnp.float32


def marked(fn):
    """`file:line` of the line with the mark in a function's source."""
    lines, first = inspect.getsourcelines(fn)
    (at,) = (i for i, line in enumerate(lines) if "# BAD" in line)
    return f"{inspect.getsourcefile(fn)}:{first + at} "


def raised(f, *args):
    with pytest.raises(FloatingPointError) as caught, observe(nans=True):
        jax.block_until_ready(f(*args))
    return str(caught.value)


def wrapped_in_scan(f):
    return lambda xs: jax.lax.scan(lambda c, x: (c, f(x)), 0, xs)[1]


# --- The functions --------------------------------------------------------------------


def logs(x):
    """Bad at 0 and below."""
    y = x - 1
    z = jnp.log(y)  # BAD
    return 2 * z


def divides(x):
    one = x * 0 + 1
    return one / (x - 1)  # BAD


def root(x):
    """Its derivative at 1 is infinite, and that times zero is NaN."""
    y = x - 1
    z = jnp.sqrt(y)  # BAD
    return z * 0


def overflows(x):
    y = x * 1e30
    return y * 1e30  # BAD


START = 1.0  # the argument that is bad for all of them; 3 is not, but for `overflows`


# --- Places: each makes a program of a function of a scalar ---------------------------


def in_jit(f):
    return jax.jit(f), jnp.float32(START)


def in_inner_jit(f):
    return jax.jit(lambda x: jax.jit(f)(x) + 1), jnp.float32(START)


def in_vmap(f):
    return jax.jit(jax.vmap(f)), jnp.array([7.0, START, 9.0], f32)


def in_scan(f):
    xs = jnp.array([4.0, 5.0, START, 6.0], f32)
    return jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, xs)[1]), xs


def in_carry(f):
    def body(c, x):
        return c + f(x), None

    xs = jnp.array([4.0, 5.0, START, 6.0], f32)
    return jax.jit(lambda xs: jax.lax.scan(body, f32(0), xs)[0]), xs


def in_reversed_scan(f):
    def run(xs):
        return jax.lax.scan(lambda c, x: (c, f(x)), 0.0, xs, reverse=True)[1]

    return jax.jit(run), jnp.array([4.0, 5.0, START, 6.0], f32)


def in_nested_scans(f):
    def inner(c, x):
        return c + f(x), None

    def outer(c, xs):
        return jax.lax.scan(inner, c, xs)[0], None

    xs = jnp.array([[4.0, 5.0], [6.0, START], [4.0, 4.0]], f32)
    return jax.jit(lambda xs: jax.lax.scan(outer, f32(0), xs)[0]), xs


def in_while(f):
    def run(x):
        body = lambda s: (s[0] + 1, s[1] + f(x + 3 - s[0]))
        return jax.lax.while_loop(lambda s: s[0] < 5, body, (0, f32(0)))[1]

    return jax.jit(run), jnp.float32(START - 1)


def in_batched_while(f):
    def run(n, x):
        body = lambda s: (s[0] + 1, s[1] + f(x + 3 - s[0]))
        return jax.lax.while_loop(lambda s: s[0] < n, body, (0, f32(0)))[1]

    run = jax.jit(jax.vmap(run))
    return lambda x: run(jnp.array([1, 5]), x), jnp.full(2, START - 1, f32)


def in_cond(f):
    run = lambda x: jax.lax.cond(x < 2, f, lambda x: x, x)
    return jax.jit(run), jnp.float32(START)


def in_remat(f):
    return jax.jit(jax.checkpoint(f)), jnp.float32(START)


def in_custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvps(lambda t, ans, x: t)
    return jax.jit(lambda x: g(x) * 2), jnp.float32(START)


def in_custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), None), lambda _, ct: (ct,))
    return jax.jit(jax.value_and_grad(lambda x: g(x) * 2)), jnp.float32(START)


def in_backward_rule(f):
    g = jax.custom_vjp(lambda x: x)
    g.defvjp(lambda x: (x, x), lambda x, ct: (f(x) * ct,))

    def loss(x):
        return g(x) * 2  # BAD

    return jax.jit(jax.grad(loss)), jnp.float32(START)


def in_grad(f):
    return jax.jit(jax.value_and_grad(f)), jnp.float32(START)


def in_hessian(f):
    return jax.jit(jax.hessian(f)), jnp.float32(START)


def in_jvp(f):
    return jax.jit(lambda x: jax.jvp(f, (x,), (x,))), jnp.float32(START)


def _mesh():
    return jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def in_shard_map(f):
    def run(x):
        return f(x) + jax.lax.psum(x, "i")

    run = jax.shard_map(run, mesh=_mesh(), in_specs=P("i"), out_specs=P("i"))
    return jax.jit(run), jnp.array([4.0, 5.0, START, 6.0], f32)


def in_scan_in_shard_map(f):
    def body(c, x):
        return c + f(x) + jax.lax.psum(x, "i") * 0, None

    def run(xs):
        return jax.lax.scan(body, xs[0] * 0, xs)[0]

    run = jax.shard_map(run, mesh=_mesh(), in_specs=P(None, "i"), out_specs=P("i"))
    xs = jnp.full((3, 4), 4.0, f32).at[1, 2].set(START)
    return jax.jit(run), xs


def in_sharded_jit(f):
    x = jnp.array([4.0, 5.0, START, 6.0], f32)
    x = jax.device_put(x, NamedSharding(_mesh(), P("i")))
    return jax.jit(f), x


def in_scan_over_shards(f):
    def body(c, x):
        return c + f(x), None

    xs = jnp.full((3, 4), 4.0, f32).at[1, 2].set(START)
    xs = jax.device_put(xs, NamedSharding(_mesh(), P(None, "i")))
    return jax.jit(lambda xs: jax.lax.scan(body, xs[0] * 0, xs)[0]), xs


def beside_calls(f):
    def run(x):
        hc.call(lambda x: None, None, x, order="ordered")
        y = hc.call(lambda x: x, x, x)
        hc.tap(lambda x: None, y, order="ordered")
        return f(y)

    return jax.jit(run), jnp.float32(START)


def in_scan_beside_calls(f):
    def body(c, x):
        hc.call(lambda x: None, None, x, order="ordered")
        return c + f(x), None

    xs = jnp.array([4.0, 5.0, START, 6.0], f32)
    return jax.jit(lambda xs: jax.lax.scan(body, f32(0), xs)[0]), xs


def in_inner_scan_beside_calls(f):
    def inner(c, x):
        hc.tap(lambda x: None, x)
        return c + f(x), None

    def outer(c, xs):
        return jax.lax.scan(inner, c, xs)[0], None

    xs = jnp.array([[4.0, 5.0], [6.0, START], [4.0, 4.0]], f32)
    return jax.jit(lambda xs: jax.lax.scan(outer, f32(0), xs)[0]), xs


def from_a_call(f):
    run = lambda x: f(hc.call(lambda x: x, x, x))
    return jax.jit(run), jnp.float32(START)


def into_a_buffer(f):
    def body(i, buffer):
        return buffer.at[i].set(f(5.0 - i))

    return jax.jit(lambda b: jax.lax.fori_loop(0, 8, body, b)), jnp.zeros(8, f32)


def before_a_loop(f):
    def run(x):
        y = f(x)
        return jax.lax.scan(lambda c, _: (c + y, None), x, None, length=3)[0]

    return jax.jit(run), jnp.float32(START)


def alone(f):
    return f, jnp.float32(START)


# JAX attributes the equations of a rule of custom_vjp to the line that calls the function.
RULES = {in_backward_rule: in_backward_rule}
STEP = {  # where the error has to name a step
    in_scan: "step 2 of the scan",
    in_carry: "step 2 of the scan",
    in_reversed_scan: "step 2 of the scan",
    in_nested_scans: "step 1 of the scan",
    in_while: "step 2 of the while",
    in_batched_while: "of the while",
    in_scan_in_shard_map: "step 1 of the scan",
    in_scan_over_shards: "step 1 of the scan",
    in_scan_beside_calls: "step 2 of the scan",
    in_inner_scan_beside_calls: "step 1 of the scan",
}
PLACES = [
    *(in_jit, in_inner_jit, in_vmap, in_scan, in_carry, in_reversed_scan),
    *(in_nested_scans, in_while, in_batched_while, in_cond, in_remat, in_custom_jvp),
    *(in_custom_vjp, in_backward_rule, in_grad, in_hessian, in_jvp, in_shard_map),
    *(in_scan_in_shard_map, in_sharded_jit, in_scan_over_shards, beside_calls),
    *(in_scan_beside_calls, in_inner_scan_beside_calls, from_a_call, into_a_buffer),
    *(before_a_loop, alone),
]
MESHES = (in_shard_map, in_scan_in_shard_map, in_sharded_jit, in_scan_over_shards)


DERIVATIVES = (
    *(in_custom_jvp, in_custom_vjp, in_backward_rule, in_grad, in_hessian, in_jvp),
)
# Derivatives are other operations for each function. Elsewhere the functions take turns.
LINES = [
    (place, f)
    for turn, place in enumerate(PLACES)
    for f in ((logs, divides) if place in DERIVATIVES else ((logs, divides)[turn % 2],))
]


@pytest.mark.parametrize(("place", "f"), LINES, ids=lambda part: part.__name__)
def test_names_the_line(place, f):
    if place in MESHES and jax.device_count() < 4:
        pytest.skip("needs four devices")
    program, x = place(f)
    text = raised(program, x)
    assert marked(RULES.get(place, f)) in text
    assert STEP.get(place, "") in text
    if place is in_nested_scans:
        assert "step 1 of the scan" in text.split("step", 1)[1]
    if place is not in_hessian:
        assert ("backward pass" in text) == (place is in_backward_rule)


@pytest.mark.parametrize("place", PLACES, ids=lambda p: p.__name__)
def test_good_values_raise_nothing_and_stay(place):
    if place in MESHES and jax.device_count() < 4:
        pytest.skip("needs four devices")
    program, x = place(lambda x: jnp.sin(x) * 2)
    expected = program(x)
    with observe(nans=True):
        found = program(x)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.sharding == b.sharding


def test_overflow():
    text = raised(jax.jit(overflows), jnp.float32(1))
    assert marked(overflows) in text
    assert "inf" in text
    assert "1e+30" in text


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    "shape", [(7,), (64, 128), (1 << 17,), (2, 256, 256), (9999, 2)]
)
def test_one_nan_in_a_large_array(shape, dtype):
    """From the maximum of a large array XLA's CPU drops NaNs."""
    program = jax.jit(lambda x: jnp.log(x) * 2)
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda i, c: jnp.log(x) + i, x))
    for at in (0, math.prod(shape) // 2, -1):
        x = np.ones(shape, np.float32)
        x.reshape(-1)[at] = -1
        for f in (program, looped):
            with (
                pytest.raises(FloatingPointError, match="log made"),
                observe(nans=True),
            ):
                jax.block_until_ready(f(jnp.asarray(x, dtype)))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap])
def test_operands_at_the_bad_element_and_its_index(wrap):
    text = raised(jax.jit(wrap(lambda x: 1 / x)), jnp.array([2.0, 4.0, 0.0]))
    assert "inf at [2], from 1, 0 (" in text
    assert ("under vmap" in text) == (wrap is jax.vmap)


def test_backward_pass_of_a_scan():
    """A derivative that is infinite, times a cotangent that is 0, is NaN."""

    def body(c, x):
        y = jnp.where(c > 0, c, 0) ** 0.5  # BAD
        return c - 1, y * (x != 2)

    def loss(c):
        return jax.lax.scan(body, c, jnp.arange(4.0))[1].sum()

    text = raised(jax.jit(jax.grad(loss)), 2.0)
    assert marked(body) in text
    assert "step 2 of the scan" in text


@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap, wrapped_in_scan])
def test_the_first_of_two_bad_values_that_meet_in_one(wrap):
    """It may have come by more lines than the other."""

    def f(x):
        inverse = 1 / x  # BAD
        log = jnp.log(x)
        longer = 2 * (inverse + 1)
        return longer * 2 + log

    x = jnp.array([1.0, 0.0])
    assert marked(f) in raised(jax.jit(wrap(f)), x)


def test_chain_of_lines():
    def chain(x):
        a = jnp.log(x)
        b = a * 2
        c = b + 1
        return c

    text = raised(jax.jit(chain), 0.0)
    after = text.split("It went on through")[1]
    assert after.index("b = a * 2") < after.index("c = b + 1")


def test_later_calls_of_a_compiled_program():
    program = jax.jit(logs)
    with pytest.raises(FloatingPointError, match="log"), observe(nans=True):
        assert program(3.0) < 2
        assert program(4.0) > 2
        program(1.0)


def test_donated_arguments():
    @functools.partial(jax.jit, donate_argnums=0)
    def program(x, y):
        return x - 1 + jnp.log(y)  # BAD

    with observe(nans=True):
        x = program(jnp.ones(3), jnp.ones(3))
        x = program(x, jnp.ones(3))
    np.testing.assert_array_equal(x, [-1, -1, -1])
    assert "log made" in raised(program, x, jnp.zeros(3))


# --- What is no error -----------------------------------------------------------------


def not_taken(x):
    return jnp.where(x > 0, jnp.log(x), 0)


def unused(x):
    return x + 0 * (jnp.log(x) > 0)


def given_infinity(x):
    return jnp.minimum(jnp.inf, x) + jnp.array([jnp.inf, 1.0]).min()


def running_minimum(x):
    """The carried value is infinite until the third step."""

    def body(low, i):
        low = jnp.where(i < 2, low, jnp.minimum(low, x.sum()))
        return low, low

    return jax.lax.scan(body, jnp.inf, jnp.arange(4))


def masked(x):
    """Rows of -inf, as in attention."""
    scores = jnp.where(x[:, None] > x[None, :], -jnp.inf, x[:, None])
    return jax.nn.softmax(scores), jnp.max(jnp.where(x > 9, x, -jnp.inf))


def stopped_rows(x):
    """A row that has stopped is computed on, and would be bad."""

    def run(n):
        body = lambda s: (s[0] - 1, jnp.log(s[0].astype(f32)))
        return jax.lax.while_loop(lambda s: s[0] > 0, body, (n, f32(0)))[1]

    return jax.vmap(run)(jnp.array([1, 5])) + x.sum()


@pytest.mark.parametrize(
    "f",
    [not_taken, unused, given_infinity, running_minimum, masked, stopped_rows],
    ids=lambda f: f.__name__,
)
def test_is_no_error(f):
    x = jnp.array([-1.0, 2.0, 0.0])
    with observe(nans=True):
        found = jax.jit(f)(x)
    np.testing.assert_array_equal(found[0], jax.jit(f)(x)[0])


def test_nan_that_was_given():
    with observe(nans=True):
        assert jnp.isnan(jax.jit(lambda x: x * 2)(jnp.nan))


@pytest.mark.parametrize(
    "f",
    [jnp.fft.fft, lambda x: jnp.linalg.solve(jnp.eye(4), x), lambda x: x[::-1]],
    ids=["fft", "solve", "reversed"],
)
def test_nan_that_was_given_to_what_mixes_elements(f):
    with observe(nans=True):
        assert jnp.isnan(jax.jit(f)(jnp.array([1.0, jnp.nan, 2.0, 3.0]))).any()


@pytest.mark.parametrize(
    "f",
    [
        jnp.linalg.pinv,
        lambda x: jax.lax.linalg.schur(x)[0],
        lambda x: jax.lax.linalg.hessenberg(x)[0],
        lambda x: jax.lax.linalg.tridiagonal(x @ x.T)[0],
        lambda x: jax.lax.linalg.tridiagonal_solve(*jnp.ones((3, 4)), x),
        lambda x: jax.lax.linalg.symmetric_product(x, x),
        lambda x: jax.lax.ragged_dot(x, jnp.ones((2, 4, 4)), jnp.array([2, 2])),
        lambda x: jax.lax.pad(x, 0.0, [(-1, 1, 0), (1, -1, 0)]),
        lambda x: jax.lax.top_k(x, 4)[0],
        lambda x: jax.lax.approx_max_k(x, 4)[0],
        lambda x: jax.scipy.linalg.qr(x, pivoting=True)[0],
        lambda x: jax.scipy.linalg.polar(x)[0],
    ],
    ids=[
        *("svd", "schur", "hessenberg", "tridiagonal", "tridiagonal_solve"),
        *("symmetric_product", "ragged_dot", "pad", "top_k", "approx_max_k"),
        *("pivoted_qr", "polar"),
    ],
)
def test_nan_that_was_given_to_what_mixes_elements_of_matrices(f):
    x = (jnp.eye(4) + jnp.arange(16.0).reshape(4, 4) / 7).at[2, 1].set(jnp.nan)
    with observe(nans=True):
        assert jnp.isnan(jax.jit(f)(x)).any()


def test_nan_that_was_given_as_bits():
    with observe(nans=True):
        assert jnp.isnan(jax.jit(jnp.frexp)(jnp.array([1.0, jnp.nan]))[0]).any()


def test_nan_that_was_given_beside_calls():
    """Calls are not made again, neither those that return something more."""
    made = []

    def host(x):
        made.append(1)
        return x, x

    @jax.jit
    def f(x):
        y, _ = hc.call(host, (x, x), x)
        z = jax.jit(lambda x: hc.call(host, (x, x), x)[0])(y)
        return z * 2

    f(jnp.nan)
    made.clear()
    with observe(nans=True):
        assert jnp.isnan(f(jnp.nan))
    assert len(made) == 2


def test_nan_of_an_infinity_that_was_given():
    text = raised(jax.jit(lambda x: x - x), jnp.inf)
    assert "sub made the first bad value, nan, from inf, inf" in text


def test_nan_that_a_host_call_returned():
    program = jax.jit(lambda x: hc.call(lambda x: x * np.nan, x, x) + 1)
    assert "call made the first bad value" in raised(program, f32(1))


def mine(run_alone=None):
    """An operation that computes a logarithm in programs, and something else alone."""
    mine_p = Primitive("mine")
    mine_p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(mine_p, mlir.lower_fun(jnp.log, multiple_results=False))
    if run_alone is not None:
        mine_p.def_impl(run_alone)
    return jax.jit(lambda x: mine_p.bind(x) * 2)


def test_what_the_host_makes_otherwise():
    text = raised(mine(lambda x: jnp.float32(1)), f32(0))
    assert "the result of mul at test_observe_nans.py:" in text
    assert "It was finite when the host ran" in text


def test_what_the_host_can_not_make_again():
    assert "the host can't run mine (" in raised(mine(), f32(0))


# --- Several devices ------------------------------------------------------------------


needs_devices = pytest.mark.skipif(
    "jax.device_count() < 4", reason="needs four devices"
)


@needs_devices
def test_a_call_that_names_shardings():
    """The host would need all devices to make it again, which wait for the host."""
    sharding = NamedSharding(_mesh(), P("i"))
    named = jax.jit(logs, in_shardings=sharding, out_shardings=sharding)
    program = jax.jit(lambda x: named(x) + 1)
    x = jax.device_put(jnp.array([4.0, START, 5.0, 6.0]), sharding)
    assert marked(logs) in raised(program, x)
    with observe(nans=True):
        assert jnp.isnan(program(x.at[1].set(jnp.nan))).any()


@needs_devices
def test_nan_that_was_given_to_nested_scans_with_collectives():
    def inner(c, x):
        return c + jax.lax.psum(x, "i"), x

    def run(xs):
        outer = lambda c, xs: jax.lax.scan(inner, c, xs)
        return jax.lax.scan(outer, xs[0, 0] * 0, xs)[1]

    each = P(None, None, "i")
    run = jax.shard_map(run, mesh=_mesh(), in_specs=each, out_specs=each)
    xs = jnp.ones((2, 3, 4)).at[1, 1, 2].set(jnp.nan)
    with observe(nans=True):
        assert jnp.isnan(jax.jit(run)(xs)).any()


@needs_devices
def test_a_block_in_a_callback_is_guarded():
    """A program over the devices that wait for the callback would never run."""
    x = jax.device_put(jnp.ones(4), NamedSharding(_mesh(), P("i")))
    inner = jax.jit(lambda x: x * 2)

    def host(value):
        with observe(nans=True):
            inner(x)
        return value

    with pytest.raises(hc.errors.DeadlockError), hc.reraise():
        jax.jit(lambda x: hc.call(host, x, x) + x)(x)


def test_devices_that_part(run_python):
    """One device fails in its own step. The others don't wait for it for ever."""
    run_python(
        """
        import jax, jax.numpy as jnp, hostcall as hc
        from jax.sharding import PartitionSpec as P

        def local(n):
            body = lambda s: (s[0] + 1, s[1] + jnp.log(3 - s[0]))
            step = jax.lax.while_loop(lambda s: s[0] < n[0], body, (n[0] * 0, n[0] * 0))
            return jax.lax.cond(n[0] == 2, jnp.log, jnp.exp, step[1])[None]

        mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
        for worst in (1.0, 5.0):
            try:
                with hc.observe(nans=True):
                    f(jnp.array([1.0, 1.0, worst, 1.0]))
                assert worst == 1
            except FloatingPointError as error:
                assert worst == 5 and "made the first bad" in str(error), error
    """,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    )


# --- Lines inside of functions that JAX or a library jits -----------------------------


@jax.jit
def helper(x):
    y = x - 1
    return jnp.log(y)  # BAD


# None of these has a line of the user's.
JITTED = {
    "cholesky": (jnp.linalg.cholesky, -jnp.eye(3)),
    "inv": (jnp.linalg.inv, jnp.zeros((2, 2))),
    "cumprod": (jnp.cumprod, jnp.full(50, 10.0)),
    "slope of std": (jax.grad(jnp.std), jnp.ones(3)),
    "slope of norm": (jax.grad(jnp.linalg.norm), jnp.zeros(3)),
    "arccosh": (jnp.arccosh, jnp.zeros(2)),
    "remainder": (functools.partial(jnp.remainder, np.ones(2)), jnp.zeros(2)),
    "gamma": (functools.partial(jax.random.gamma, jax.random.key(0)), -jnp.ones(2)),
    "corrcoef": (jnp.corrcoef, jnp.ones((2, 3))),
    "map": (functools.partial(jax.lax.map, jnp.log), jnp.zeros(3)),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap, jax.checkpoint])
@pytest.mark.parametrize("name", JITTED)
def test_a_line_that_calls_a_jitted_function(name, wrap):
    f, x = JITTED[name]
    x = x if wrap is not jax.vmap else x[None]

    def model(x):
        h = x + 0
        bad = f(h)  # BAD
        return bad * 2

    def caller(x):
        return jax.jit(wrap(model))(x)

    assert marked(model) in raised(caller, x)


def test_the_line_inside_a_jitted_function_of_the_users():
    def model(x):
        return helper(helper(x) * 0 + x)

    assert marked(helper.__wrapped__) in raised(jax.jit(model), f32(START))


@needs_devices
def test_a_line_that_calls_a_jitted_function_in_shard_map():
    def local(x):
        bad = jnp.mod(x, 0.0)  # BAD
        return jax.lax.psum(bad, "i")

    f = jax.shard_map(local, mesh=_mesh(), in_specs=P("i"), out_specs=P())
    assert marked(local) in raised(jax.jit(f), jnp.ones(4))


def minimizes(x):
    return minimize(lambda x: jnp.log(x - 0.5).sum(), x, method="BFGS").x


def integrates(x):
    return odeint(lambda y, t: jnp.log(y - t), x[0], jnp.linspace(0, 5, 4), mxstep=30)


def expands(x):
    return bessel_jn(x * 1e-30, v=3, n_iter=5)


@pytest.mark.parametrize("f", [minimizes, integrates, expands])
def test_loops_of_jax_are_at_the_line_that_calls_them(f):
    text = raised(jax.jit(f), jnp.array([1.0, 2.0]))
    assert "step" in text
    assert "unknown line" not in text


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module of an installed package."""
    folder = tmp_path / "site-packages" / "descents"
    folder.mkdir(parents=True)
    source = """
        import jax.numpy as jnp
        def scaled(x):
            return x / jnp.sqrt(x - 1)
    """
    (folder / "rules.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    yield importlib.import_module("descents.rules")
    sys.modules.pop("descents.rules"), sys.modules.pop("descents")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_place_in_a_library_has_the_line_that_led_there(library, wrap):
    step = wrap(library.scaled)

    def update(x):
        return step(x) * 2  # BAD

    text = raised(jax.jit(update), f32(1))
    at = os.path.join("descents", "rules.py")
    assert f"{at}:4 in scaled, called from\n  {marked(update)}" in text
    assert f"{at}:4, called from test_observe_nans.py:" not in text.split("from\n")[0]


def test_a_line_of_a_notebook_names_its_cell(monkeypatch):
    """IPython keeps the source of a cell in a file of a random name."""

    class Shell:
        class compile:
            @staticmethod
            def format_code_name(name):
                return ("Cell", "In[2]") if "831400573" in name else None

    ipython = types.SimpleNamespace(get_ipython=Shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    names = {}
    code = "import jax.numpy as jnp\ndef f(x):\n    return jnp.log(x)\n"
    exec(compile(code, "/tmp/ipykernel_7/831400573.py", "exec"), names)
    text = raised(jax.jit(names["f"]), f32(0))
    assert "  Cell In[2]:3 in f" in text
    assert "831400573" not in text


# --- What is innocent, wherever it passes through -------------------------------------


def padded(x):
    return jnp.where(x > 0, x, jnp.inf)


def padded_beside_a_print(x):
    jax.debug.print("{}", x.sum())
    return padded(x)


def padded_beside_a_callback(x):
    return padded(jax.pure_callback(np.asarray, x, x, vmap_method="sequential"))


def padded_beside_a_tap(x):
    hc.tap(lambda x: None, x)
    return padded(x)


def is_scanned(f):
    return lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, x)[1]


def is_carried(f):
    body = lambda i, s: jnp.where(i == 1, f(s), s)
    return lambda x: jax.lax.fori_loop(0, 3, body, x)


def is_reset_in_a_while(f):
    def body(s):
        i, best = s
        return i + 1, jnp.where(i == 2, f(-best), best - 1)

    return lambda x: jax.lax.while_loop(lambda s: s[0] < 4, body, (0, x))[1]


def is_switched(f):
    return lambda x: jax.lax.switch(1, [jnp.sin, f, jnp.cos], x)


def is_scanned_twice(f):
    outer = lambda c, _: (c, is_scanned(f)(c))
    return lambda x: jax.lax.scan(outer, x, None, length=2)[1]


def has_a_rule(f):
    f = jax.custom_vjp(f)
    f.defvjp(lambda x: (f(x), None), lambda _, ct: (ct,))
    return lambda x: jax.vjp(f, x)[0]


@pytest.mark.parametrize(
    "wrap",
    [
        *(jax.jit, is_scanned, is_carried, is_reset_in_a_while, is_switched),
        *(is_scanned_twice, has_a_rule, jax.checkpoint, jax.vmap),
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(
    "f",
    [padded, padded_beside_a_print, padded_beside_a_callback, padded_beside_a_tap],
    ids=lambda f: f.__name__,
)
def test_an_infinity_that_is_a_literal_is_no_error(f, wrap):
    x = jnp.array([1.0, -1.0])
    program = jax.jit(lambda x: wrap(f)(x) * 2)
    with observe(nans=True):
        found = program(x)
    np.testing.assert_array_equal(found, program(x))


@needs_devices
@pytest.mark.parametrize(
    "f", [padded, padded_beside_a_tap, is_scanned(padded_beside_a_tap)]
)
def test_an_infinity_that_is_a_literal_in_shard_map_is_no_error(f):
    program = jax.shard_map(f, mesh=_mesh(), in_specs=P("i"), out_specs=P("i"))
    with observe(nans=True):
        jax.block_until_ready(jax.jit(program)(jnp.array([1.0, -1.0, 2.0, -3.0])))


def test_what_goes_through_a_call_with_effects_keeps_its_origin():
    def model(x):
        y = jnp.log(x)  # BAD
        return jax.jit(lambda y: padded_beside_a_tap(-y))(y)

    assert marked(model) in raised(jax.jit(model), jnp.array([0.0, 1.0]))


def returned_as_it_is(x):
    """Calls around a callback, which hand on what they were given."""
    beside = lambda x: (jax.pure_callback(np.asarray, x[0], x[0]), x * 2)[1]
    return jax.jit(jax.checkpoint(jax.jit(beside)))(x)


def test_what_was_made_before_nested_calls_around_a_callback():
    def model(x):
        y = jnp.log(x)  # BAD
        return returned_as_it_is(y)

    assert marked(model) in raised(jax.jit(model), jnp.array([0.0, 1.0]))


def test_a_nan_that_is_a_constant_is_handed_to_nested_calls_around_a_callback():
    def model(x):
        return returned_as_it_is(jnp.array([1.0, np.nan])) + x

    text = raised(jax.jit(model), jnp.array([0.0, 1.0]))
    assert "made the first bad value, nan" in text


# --- What makes a bad value beside others ---------------------------------------------

NAN = np.nan
DATA = jnp.array([1.0, NAN, 3.0])


def makes_a_nan_of_one_number(x):
    return jnp.var(x[:1], ddof=1)  # BAD


def chooses_a_nan(x):
    return jnp.where(x < 5, jnp.nan, x)  # BAD


def takes_a_branch_that_is_nan(x):
    return jax.lax.cond(x[0] < 5, lambda: jnp.float32(NAN), lambda: x[0])  # BAD


def has_a_nan_in_its_data(x):
    return ((DATA - x) ** 2).mean()  # BAD


def chooses_from_its_data(x):
    return jnp.where(x < 5, DATA, x)  # BAD


def chooses_a_nan_in_a_loop(x):
    def body(c, i):
        return jnp.where(i == 2, jnp.nan, c), i  # BAD

    return jax.lax.scan(body, x, jnp.arange(4))[0]


def has_a_nan_in_its_data_in_a_loop(x):
    def body(c, _):
        return c + (DATA * c).sum(), None  # BAD

    return jax.lax.scan(body, x[0], None, length=2)[0]


def reads_beyond_the_end(x):
    return x.at[jnp.array([0, 7])].get(mode="fill")  # BAD


CONSTANTS = [
    *(makes_a_nan_of_one_number, chooses_a_nan, takes_a_branch_that_is_nan),
    *(has_a_nan_in_its_data, has_a_nan_in_its_data_in_a_loop, reads_beyond_the_end),
    *(chooses_from_its_data, chooses_a_nan_in_a_loop),
]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
@pytest.mark.parametrize("f", CONSTANTS, ids=lambda f: f.__name__)
def test_a_nan_that_is_a_constant(f, wrap):
    x = jnp.array([1.0, 2.0, 4.0])
    assert marked(f) in raised(jax.jit(lambda x: wrap(f)(x) + 1), x)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.block_until_ready(jax.jit(f)(x))


BESIDE = {  # a function, an argument with a bad value, and what makes one more
    "log": (lambda x: jnp.log(x), [NAN, 0.0, 1.0], "log made"),
    "div": (lambda x: 1 / x, [NAN, 0.0, 1.0], "div made"),
    "div of inf": (lambda x: 1 / x + x, [np.inf, 0.0, 1.0], "div made"),
    "inf - inf": (lambda x: x - x, [NAN, np.inf, 1.0], "sub made"),
    "two results": (lambda x: (x * 2, jnp.sqrt(x[1] - 3)), [NAN, 0, 1], "sqrt made"),
    "sums": (lambda x: jnp.log(x.sum(1)), [[NAN, 1], [0, 0]], "log made"),
    "cumsum": (lambda x: 1 / jnp.cumsum(x), [0.0, 1.0, NAN], "div made"),
    "matmul": (lambda x: x @ (x[1] * 1e30), [[NAN, 1], [1e30, 1]], "dot_general made"),
    "moved": (lambda x: jnp.log(jnp.roll(x, 1)[::-1]), [NAN, 0.0, 1.0], "log made"),
    "gather": (lambda x: jnp.log(x[jnp.array([0, 1, 1])]), [NAN, 0.0, 1], "log made"),
    "scan": (lambda x: jax.lax.map(jnp.log, x), [NAN, 0.0, 1.0], "log made"),
    "jit": (lambda x: jax.jit(jnp.log)(x), [NAN, 0.0, 1.0], "log made"),
    "cond": (lambda x: jax.lax.cond(True, jnp.log, jnp.sin, x), [NAN, 0], "log made"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_bad_value_beside_one_that_was_given(name):
    f, x, what = BESIDE[name]
    assert what in raised(jax.jit(f), jnp.array(x, f32))


@pytest.mark.parametrize(
    "f",
    [
        *(jnp.cumsum, jnp.sort, lambda x: x[jnp.array([2, 1, 0])], jnp.fft.fft),
        *(lambda x: jnp.outer(x, x), lambda x: jnp.convolve(x, x), jnp.cumprod),
        *(lambda x: x.at[0].add(1), lambda x: jnp.pad(x, 2), lambda x: x.max()),
        *(lambda x: jax.lax.map(lambda y: y * x, x), lambda x: jnp.stack([x, x + 1])),
    ],
)
def test_a_value_that_was_given_is_handed_on(f):
    with observe(nans=True):
        assert jnp.isnan(jax.jit(f)(jnp.array([1.0, NAN, 2.0]))).any()


# --- The device that made it ----------------------------------------------------------


def hands_on(kind):
    """A program in which device 2 makes a NaN, and a collective hands it to others."""

    def f(x):
        y = jnp.sqrt(x)  # BAD
        if kind == "all_gather":
            return jax.lax.all_gather(y, "i").sum()
        if kind == "ppermute":
            return jax.lax.ppermute(y, "i", [(i, (i + 1) % 4) for i in range(4)]).sum()
        if kind == "scan":
            step = lambda c, _: (c + jax.lax.pmean(y.sum(), "i"), None)
            return jax.lax.scan(step, f32(0), None, length=3)[0]
        if kind == "gradient":
            return jax.grad(lambda w: jax.lax.pmean((w * y).sum(), "i"))(f32(1))
        return getattr(jax.lax, kind)(y.sum(), "i")

    def run(x):
        return f(x)[None]

    run = jax.shard_map(
        run, mesh=_mesh(), in_specs=P("i"), out_specs=P("i"), check_vma=False
    )
    return f, jax.jit(run)


@needs_devices
@pytest.mark.parametrize(
    "kind", ["psum", "pmean", "pmax", "all_gather", "ppermute", "scan", "gradient"]
)
def test_the_device_that_made_it_tells(kind):
    f, program = hands_on(kind)
    x = jnp.array([1.0, 2, 3, 4, -5, 6, 7, 8])
    for _ in range(3):
        text = raised(program, x)
        assert "sqrt made" in text
        assert marked(f) in text
        assert f"on {jax.devices()[2]}" in text


@needs_devices
def test_a_collective_that_makes_it():
    def f(x):
        return jax.lax.psum(x, "i")  # BAD

    program = jax.shard_map(f, mesh=_mesh(), in_specs=P("i"), out_specs=P())
    text = raised(jax.jit(program), jnp.full(4, 3e38))
    assert marked(f) in text
    assert "inf" in text


def test_with_jax_debug_nans():
    for option, f in ((jax.debug_nans, jnp.sqrt), (jax.debug_infs, lambda x: 1 / x)):
        x = f32(-1) if f is jnp.sqrt else f32(0)
        with option(True):
            assert "made the first bad value" in raised(jax.jit(lambda x: f(x) * 2), x)


def test_types_of_64_bits():
    with jax.enable_x64(True):
        text = raised(jax.jit(lambda x: jnp.exp(x) * 2), np.float64(800))
    assert "exp made" in text


# --- What it costs --------------------------------------------------------------------


def judged():
    """How often a program has asked the host."""
    hc.barrier()
    found = hc.monitor.stats().items()
    return sum(each.calls for name, each in found if "nans=True" in name)


def masked_scores(x):
    step = lambda c, _: (jnp.tanh(c), jnp.where(x > 0, c, -jnp.inf))
    return jax.lax.scan(step, x, None, length=200)[1]


def best_so_far(x):
    step = lambda c, i: (jnp.where(i > 150, jnp.minimum(c, x.sum()), jnp.inf), None)
    return jax.lax.scan(step, jnp.inf, jnp.arange(200))[0]


def forbidden_state(x):
    step = lambda a, o: ((a[:, None] + o).max(0), a)
    scores = jnp.zeros((200, 2, 2)).at[:, :, 1].set(-jnp.inf)
    return jax.lax.scan(step, x, scores)[1]


def drawn_scores(x):
    """As a sampler, it carries a key, and has one for each step."""

    def step(carry, key):
        c, other = carry
        other, drawn = jax.random.split(other)
        c = c + jax.random.uniform(key) * jax.random.uniform(drawn)
        return (c, other), jnp.where(x > 0, c, -jnp.inf)

    first, second = jax.random.split(jax.random.key(0))
    return jax.lax.scan(step, (x, first), jax.random.split(second, 200))[1]


@pytest.mark.parametrize("f", [masked_scores, forbidden_state, drawn_scores])
def test_what_is_innocent_is_judged_once(f):
    program, x = jax.jit(f), jnp.array([1.0, -1.0])
    with observe(nans=True):
        before = judged()
        for _ in range(3):
            program(x)
        assert 0 < judged() - before <= 9  # and not 600


def test_of_nested_calls_around_a_callback_the_innermost_asks():
    wrapped = jax.jit(jax.checkpoint(jax.jit(padded_beside_a_callback)))
    program, x = jax.jit(lambda x: wrapped(x)), jnp.array([1.0, -1.0])
    with observe(nans=True):
        before = judged()
        jax.block_until_ready(program(x))
        assert judged() - before == 1


def times_of_a_solver(x):
    """Times that are not reached yet, filled with infinity times the direction."""
    direction = jnp.where(x[0] < x[1], 1.0, -1.0)
    times = jnp.full(8, direction * jnp.inf)
    step = lambda i, s: (s[0] + x.sum(), s[1].at[i].set(s[0]))
    return jax.lax.fori_loop(0, 5, step, (x[0], times))[1]


@pytest.mark.parametrize("f", [best_so_far, times_of_a_solver])
def test_infinities_that_a_loop_starts_with_are_not_judged(f):
    program, x = jax.jit(f), jnp.array([1.0, -1.0])
    with observe(nans=True):
        jax.block_until_ready(program(x))  # its result may have some
        before = judged()
        inner = jax.jit(lambda x: jnp.nan_to_num(f(x)))
        jax.block_until_ready(inner(x))
        assert judged() == before


def test_a_loops_buffer_of_infinities_is_compared_in_its_pauses():
    program, x = jax.jit(times_of_a_solver), jnp.array([1.0, -1.0])
    expected = program(x)
    assert np.isinf(expected).any()
    with observe(nans=True):
        before = judged()
        found = program(x)
        assert judged() == before
    np.testing.assert_array_equal(expected, found)


@pytest.mark.parametrize("n", [8, 5000])
def test_a_nan_in_the_place_of_an_infinity(n):
    def body(i, buffer):
        root = jnp.sqrt(2.0 - i)  # BAD
        return buffer.at[i].set(root)

    run = lambda buffer: jax.lax.fori_loop(0, 6, body, buffer)
    text = raised(jax.jit(run), jnp.full(n, jnp.inf))
    assert marked(body) in text
    assert "in step 3 of the" in text


def pads(x):
    rows = jnp.concatenate([x, jnp.full(3, jnp.inf)])
    return jnp.where(rows > 0, rows[::-1], -jnp.inf).reshape(5, 1)


def keeps_the_size_before(x):
    """As a solver, whose first step has none before it."""

    def body(i, s):
        y, size, before = s
        new = jnp.tanh(y)
        return new, jnp.abs(new - y).sum(), jnp.where(i < 0, before, size)

    y, size, before = jax.lax.fori_loop(0, 1, body, (x, jnp.inf, 1.0))
    return jnp.where(before < size, y, -y)


def checks_what_it_returns(x):
    """As a solver, which raises an error by a call in a branch."""
    refused = lambda times: jax.pure_callback(np.asarray, times, times)
    times = times_of_a_solver(x)
    return jax.lax.cond(x[0] > 5, refused, lambda times: times, times)


@pytest.mark.parametrize("f", [pads, keeps_the_size_before, checks_what_it_returns])
def test_what_is_only_moved_and_chosen_is_not_judged(f):
    program, x = jax.jit(f), jnp.array([1.0, -1.0])
    expected = program(x)
    with observe(nans=True):
        before = judged()
        found = program(x)
        assert judged() == before
    np.testing.assert_array_equal(expected, found)


def test_a_bad_value_beside_innocent_ones_that_a_branch_hands_on():
    def solve(x):
        times = times_of_a_solver(x)
        rate = jnp.log(x)  # BAD
        host = lambda *both: jax.pure_callback(lambda *both: both, both, *both)
        return jax.lax.cond(x[1] > 5, host, lambda *both: both, times, rate)

    assert marked(solve) in raised(jax.jit(solve), jnp.array([0.0, 1.0]))


def test_an_infinity_times_zero_in_a_loops_start():
    program = jax.jit(lambda x: jax.lax.scan(lambda c, _: (c, c), x * jnp.inf, None, 3))
    with observe(nans=True):
        jax.block_until_ready(program(jnp.float32(2)))
        with pytest.raises(FloatingPointError, match="mul made the first bad value"):
            jax.block_until_ready(program(jnp.float32(0)))


def in_a_buffer(n, bad=-1):
    """A loop that writes rows of a large buffer, as solvers do, and reads none."""

    def body(s):
        i, c, buffer = s
        c = jnp.tanh(c) + jnp.where(i == bad, jnp.log(c * 0 - 1), 0)  # BAD
        write = lambda b: b.at[i].set(c)
        buffer = jax.lax.cond(i % 2 == 0, write, lambda b: b, buffer)
        return i + 1, c, buffer

    start = lambda x: (0, x, jnp.full((n, 8), jnp.inf))
    run = lambda x: jax.lax.while_loop(lambda s: s[0] < 100, body, start(x))[1:]
    return body, jax.jit(run)


@pytest.mark.parametrize("n", [4, 5000])
@pytest.mark.parametrize("bad", [0, 1, 31, 98])
def test_steps_of_a_loop_with_a_large_buffer(n, bad):
    body, program = in_a_buffer(n, bad)
    text = raised(program, jnp.ones(8))
    assert marked(body) in text
    assert f"step {bad} of the while" in text


@pytest.mark.parametrize("n", [4, 5000])
def test_a_large_buffer_that_begins_with_infinities(n):
    _, program = in_a_buffer(n)
    expected = program(jnp.ones(8))
    with observe(nans=True):
        found = program(jnp.ones(8))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_bad_value_in_a_large_buffer_alone(reverse):
    """It is looked at now and then, and the step that made it is found."""

    def body(buffer, x):
        i, y = x
        new = 1 / y  # BAD
        return jax.lax.cond(i >= 0, lambda b: b.at[i].set(new), lambda b: b, buffer), i

    def f(ys):
        xs = jnp.arange(300), ys
        return jax.lax.scan(body, jnp.zeros((5000, 8)), xs, reverse=reverse)

    ys = jnp.ones((300, 8)).at[123, 2].set(0)
    text = raised(jax.jit(f), ys)
    assert marked(body) in text
    assert "step 123 of the scan" in text
    assert "at [2]" in text


# --- What is done with them -----------------------------------------------------------


def test_a_program_that_goes_on(capsys):
    def f(x):
        y = jnp.log(x)  # BAD
        return y * 2

    program = jax.jit(f)
    with observe(nans=True, on_bad="report"):
        for _ in range(3):
            assert program(0.0) == -np.inf
        assert program(1.0) == 0
    told = capsys.readouterr().err
    assert told.count("log made the first bad value") == 1
    assert marked(f) in told
    assert told.count("hc.observe found bad values made by") == 1
    assert "  log at test_observe_nans.py:" in told
    assert told.rstrip().endswith(": 3")


def test_a_loop_that_goes_on():
    """A sampler rejects such steps by itself, and runs to its end."""

    def body(c, x):
        y = jnp.sqrt(x)  # BAD
        return jnp.where(jnp.isnan(y), c, c + y), y

    program, xs = (
        jax.jit(lambda xs: jax.lax.scan(body, 0.0, xs)),
        jnp.array([4, -1, 9.0]),
    )
    records = []
    with observe(nans=True, on_bad=records.append):
        total, ys = program(xs)
    assert total == 5
    np.testing.assert_array_equal(ys, [2, np.nan, 3])
    (record,) = records
    assert f"{record.file}:{record.line} " == marked(body)
    assert (record.primitive, record.steps, record.backward) == ("sqrt", (1,), False)
    assert record.operands == ("-1",)
    assert record.message.startswith("hostcall: sqrt made")


def test_what_a_function_raises_ends_the_program():
    def stop(record):
        raise KeyError(record.primitive)

    with pytest.raises(KeyError, match="log"), observe(nans=True, on_bad=stop):
        jax.jit(logs)(START)


def test_nans_without_infinities():
    """A model may have log(0)."""
    f = lambda x: (
        jnp.exp(jnp.log(x))
        + jax.lax.scan(lambda c, _: (jnp.log(x), c), 0.0, None, length=3)[0]
    )
    with observe(nans=True, infs=False):
        assert jax.jit(f)(0.0) == -np.inf

    def g(x):
        y = jnp.log(x)
        return y - y  # BAD

    block = observe(nans=True, infs=False)
    with pytest.raises(FloatingPointError, match="sub made") as caught, block:
        jax.block_until_ready(jax.jit(g)(0.0))
    assert marked(g) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nans": True, "on_bad": "ignore"}, 'should be "raise", "report", or a func'),
        ({"progress": True, "infs": False}, "Add nans=True"),
    ],
)
def test_mistakes_of_options(options, text):
    with pytest.raises(hc.errors.SpecError, match=text):
        observe(**options)


def test_an_option_of_another_name():
    with pytest.raises(TypeError, match="keyword argument 'nan'. Did you mean 'nans'?"):
        observe(nan=True)


# --- The block ------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch):
    """Counts what JAX traces and compiles."""
    from jax._src import monitoring

    counts = [0]

    def listen(event, *args, **kwargs):
        counts[0] += "jaxpr_trace" in event or "backend_compile" in event

    monitoring.register_event_duration_secs_listener(listen)
    yield counts
    monitoring.clear_event_listeners()


def test_nothing_is_compiled_again_after_the_block(compiled):
    program, x = jax.jit(lambda x: jnp.sin(x) + 1), jnp.ones(3)
    program(x)
    before = compiled[0]
    program(x)
    assert compiled[0] == before
    with observe(nans=True):
        program(x)
        inside = compiled[0]
        assert inside > before
        program(x)
        assert compiled[0] == inside
    program(x)
    assert compiled[0] == inside
    with observe(nans=True):  # an equal block shares its programs
        program(x)
    assert compiled[0] == inside


@pytest.mark.parametrize("what", ["nans=True", "'y', to=lambda *a: None"])
def test_the_first_block_of_a_process_compiles_nothing_again(run_python, what):
    """What the block imports must not change the settings that JAX's caches know."""
    run_python(f"""
        import jax, jax.numpy as jnp, hostcall as hc
        from jax._src import monitoring

        count = [0]
        def listen(event, *args, **kwargs):
            count[0] += "jaxpr_trace" in event or "backend_compile" in event
        f, g, x = jax.jit(lambda x: jnp.sin(x).sum()), jax.jit(lambda x: x * 3), 1.0
        f(x), g(x)
        with hc.observe({what}):
            f(x)
        monitoring.register_event_duration_secs_listener(listen)
        f(x), g(x)
        assert count[0] == 0
    """)


def test_two_threads():
    program = jax.jit(logs)
    found = {}
    both = threading.Barrier(2, timeout=60)

    def plain():
        both.wait()
        found["plain"] = float(program(1.0))
        both.wait()

    def observed():
        try:
            with observe(nans=True):
                both.wait()
                try:
                    jax.block_until_ready(program(1.0))
                finally:
                    both.wait()
        except FloatingPointError as error:
            found["observed"] = str(error)

    threads = [threading.Thread(target=f) for f in (plain, observed)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found["plain"] == -np.inf
    assert "log made" in found["observed"]


@pytest.mark.parametrize(
    "reads", [jax.block_until_ready, float, np.asarray, lambda x: x + 1]
)
def test_a_handler_inside_the_block_gets_the_error(reads):
    """As under jax_debug_nans."""
    program = jax.jit(lambda x: hc.call(lambda y: y, x, jnp.log(x)) * 2)
    for f in (jax.jit(jnp.log), program):
        with observe(nans=True):
            with pytest.raises(FloatingPointError, match="log made") as caught:
                reads(f(0.0))
            assert type(caught.value).__name__ == "FloatingPointError"
            assert float(f(1.0)) == 0
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)


def test_nested_blocks():
    with observe(nans=True):
        with observe(nans=True):
            assert jax.jit(logs)(3.0) > 0
        with pytest.raises(FloatingPointError), hc.reraise():
            jax.jit(logs)(1.0)


def test_one_block_is_entered_once():
    block = observe(nans=True)
    with block, pytest.raises(hc.errors.HostcallError, match="open already"):
        block.__enter__()
    with block:
        pass


def test_in_a_traced_function():
    def f(x):
        with observe(nans=True):
            return x

    with pytest.raises(hc.errors.SpecError, match="while a program is traced"):
        jax.jit(f)(1.0)


def test_off_it_is_not_imported(run_python):
    run_python("""
        import sys
        import hostcall as hc, jax
        jax.jit(lambda x: hc.call(abs, x, x))(1.0)
        parts = "observ", "hostcall._jax.rewr"
        assert not [m for m in sys.modules if any(part in m for part in parts)]
    """)


def test_a_block_before_the_program_chooses_its_devices(run_python):
    run_python(
        """
        import jax, hostcall as hc
        with hc.observe(nans=True):
            jax.config.update("jax_num_cpu_devices", 3)
            assert jax.device_count() == 3
    """,
        env={"XLA_FLAGS": ""},
    )


TAKEN_AWAY = """
del pxla._cached_lowering_to_hlo
import hostcall as hc
hc.observe  # imports what looks for it
"""
PUT_BACK = """
pxla._cached_lowering_to_hlo = plain
"""
# A JAX that passes an argument under another name than hostcall's replacement reads.
OTHER_FORM = """
def before(*args, parameters, **options):
    return plain(*args, lowering_parameters=parameters, **options)
pxla._cached_lowering_to_hlo = before
import hostcall as hc
with hc.observe(nans=True):
    pass  # the first block replaces it
ours = pxla._cached_lowering_to_hlo
assert ours is not before
def after(*args, lowering_parameters, **options):
    return ours(*args, parameters=lowering_parameters, **options)
pxla._cached_lowering_to_hlo = after
"""
WITH_DEVICES = """
assert jax.jit(lambda x: hc.call(abs, x, x))(1.0) == 1
"""


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        (TAKEN_AWAY, False),
        (OTHER_FORM + WITH_DEVICES, False),
        (OTHER_FORM, True),  # no program can be lowered yet, so its end tells
    ],
)
def test_a_jax_that_does_not_show_its_programs(run_python, change, begins):
    run_python(f"""
import jax
from jax._src.interpreters import pxla
plain = pxla.__dict__["_cached_lowering_to_hlo"]
{change}
has_begun = False
try:
    with hc.observe(nans=True):
        has_begun = True
        jax.jit(lambda x: x + 1)(1.0)
    raise SystemExit("no error")
except hc.errors.HostcallError as error:
    assert f"JAX, version {{jax.__version__}}" in str(error)
assert has_begun == {begins}
""")


def test_what_jax_has_at_the_first_use_counts(run_python):
    run_python(f"""
import jax
from jax._src.interpreters import pxla
plain = pxla.__dict__["_cached_lowering_to_hlo"]
{TAKEN_AWAY + PUT_BACK + WITH_DEVICES}
try:
    with hc.observe(nans=True):
        jax.jit(lambda x: x / x)(0.0)
    raise SystemExit("no error")
except FloatingPointError as error:
    assert "nan" in str(error)
""")
