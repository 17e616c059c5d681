"""`hc.observe("name", to=...)`: the values of variables, beside a run without jit."""

from __future__ import annotations

import importlib
import sqlite3
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import hostcall as hc
from hostcall import observe
from hostcall.tools import sinks
from hostcall.tools.observing import Record

P = PartitionSpec


class Got:
    """Collects (record, value); also called by the functions themselves, without jit."""

    def __init__(self):
        self.records, self.values = [], {}

    def __call__(self, record, value):
        self.records.append(record)
        name = f"{record.name}.{record.part}" if record.parts > 1 else record.name
        self.values.setdefault(name, []).append(np.asarray(value))

    def check(self, **expected):
        assert self.values.keys() == expected.keys()
        for name, values in expected.items():
            assert len(self.values[name]) == len(values), name
            for a, b in zip(self.values[name], values, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def observed(f, *args, names, **options):
    got = Got()
    with observe(*names, to=got, **options):
        found = f(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(f(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    return got


# --- Functions and what their variables are -------------------------------------------


def parts(x):
    y = x + 1
    z = jnp.sin(y) * 2
    return z.sum()


X = np.linspace(0.1, 0.9, 3, dtype=np.float32)


def test_a_statement():
    got = observed(jax.jit(parts), X, names=["y", "z"])
    got.check(y=[X + 1], z=[np.sin(X + 1) * 2])
    y, z = got.records
    assert isinstance(y, Record)
    assert y.text == "y = x + 1"
    assert y.primitive == "add"
    assert y.function == "parts"
    assert z.line == y.line + 1
    assert z.file == __file__
    assert not y.backward
    assert y.steps == ()
    assert y.loops == ()


def test_patterns_and_attributes():
    class Model:
        def __call__(self, x):
            self.scale = x * 2
            grad_w = self.scale + 1
            grad_b = grad_w + 1
            return grad_b

    got = observed(jax.jit(Model()), X, names=["grad_*", "self.scale"])
    got.check(**{"self.scale": [X * 2], "grad_w": [X * 2 + 1], "grad_b": [X * 2 + 2]})


def test_what_a_function_returns():
    def inner(x):
        a = jnp.exp(x)
        return a / a.sum()

    def outer(x):
        b = inner(x)
        c = inner(b)
        return c * 2

    soft = lambda x: np.exp(x) / np.exp(x).sum()
    got = observed(jax.jit(outer), X, names=["a", "b", "c"])
    got.check(a=[np.exp(X), np.exp(soft(X))], b=[soft(X)], c=[soft(soft(X))])


def test_a_loop_of_python():
    def f(x):
        for _ in range(3):
            x = jnp.tanh(x * 2)
            y = jnp.stack([x, x + 1])
            x += y.sum(0)
        return x

    xs, ys, x = [], [], X
    for _ in range(3):
        xs.append(np.tanh(x * 2))
        ys.append(np.stack([xs[-1], xs[-1] + 1]))
        x = xs[-1] + ys[-1].sum(0)
        xs.append(x)
    observed(jax.jit(f), X, names=["y"]).check(y=ys)
    observed(jax.jit(f), X, names=["x"]).check(x=xs)


def test_an_assignment_inside_an_expression():
    def f(x):
        if (a := x + 1).shape:
            b = (c := a * 2) + jnp.sin(d := c * c)
        g = (h := x * 3)
        return b, d, g * h

    a = X + 1
    b, c, d = a * 2 + np.sin(4 * a * a), a * 2, 4 * a * a
    for name, value in {"a": a, "b": b, "c": c, "d": d, "g": X * 3, "h": X * 3}.items():
        observed(jax.jit(f), X, names=[name]).check(**{name: [value]})


def test_tuples():
    def f(x):
        a, b = x + 1, x * 3
        (c,) = (a * b,)
        return c

    observed(jax.jit(f), X, names=["a", "b"]).check(a=[X + 1], b=[X * 3])

    def pair(x):
        d, e = jnp.split(x, [1])
        return d + e

    with pytest.warns(RuntimeWarning, match="assigns to a tuple"):
        observed(jax.jit(pair), X, names=["d"]).check()


def test_tuples_of_tuples():
    def f(x):
        (a, b), c = (x + 1, x * 3), x * 4
        return a * b - c

    got = observed(jax.jit(f), X, names=["a", "b", "c"])
    got.check(a=[X + 1], b=[X * 3], c=[X * 4])


def test_derivatives():
    def loss_of(w):
        h = jnp.tanh(w)
        loss = (h * h).sum()
        return loss

    def f(w):
        value, grad = jax.value_and_grad(loss_of)(w)
        again = jax.grad(loss_of)(w)
        return value, grad + again

    t = np.tanh(X)
    g = 2 * t * (1 - t * t)
    got = observed(jax.jit(f), X, names=["value", "grad", "again", "h", "loss"])
    assert got.values["h"][0].shape == (3,)
    got.values.pop("h"), got.values.pop("loss")
    got.check(value=[(t * t).sum()], grad=[g], again=[g])
    backward = {r.name for r in got.records if r.backward}
    assert backward == {"grad", "again"}


def test_pytrees():
    def f(p):
        grads = jax.grad(lambda p: (p["a"] ** 2).sum() + (p["b"] ** 3).sum())(p)
        return jax.tree.map(lambda p, g: p - g, p, grads)

    got = observed(jax.jit(f), {"a": X, "b": X}, names=["grads"])
    leaves = [v for values in got.values.values() for v in values]
    assert len(leaves) == 2
    assert {r.parts for r in got.records} == {2}
    for leaf in leaves:
        assert any(np.allclose(leaf, g, rtol=1e-5) for g in (2 * X, 3 * X**2))


def test_an_operation_that_a_statement_has_twice():
    def f(x):
        y = jnp.sin(jnp.sin(x))
        z = y + y + y
        return z * 2

    sin = np.sin(np.sin(X))
    observed(jax.jit(f), X, names=["y", "z"]).check(y=[sin], z=[3 * sin])


def test_statements_of_one_line():
    def f(x):
        # fmt: off
        y = x + 1; z = y * 2; g = lambda x: x - 1; w = g(z)  # noqa: E702
        # fmt: on
        return w

    got = observed(jax.jit(f), X, names=["y", "z", "w"])
    got.check(y=[X + 1], z=[X * 2 + 2], w=[X * 2 + 1])


def test_leaves_that_a_function_makes_one_by_one():
    def f(p):
        new = jax.tree.map(lambda x: x * 2, p)
        several = [jnp.sin(x) for x in new]
        return several

    got = observed(jax.jit(f), [X, X + 1], names=["new", "several"])
    new = [X * 2, X * 2 + 2]
    leaves = {f"new.{i}": [x] for i, x in enumerate(new)}
    leaves |= {f"several.{i}": [np.sin(x)] for i, x in enumerate(new)}
    got.check(**leaves)


def test_scopes_that_are_named_like_transformations():
    def f(x):
        with jax.named_scope("transpose(jvp(vmap(x)))"):
            y = x + 1
        return y * 2

    got = observed(jax.jit(f), X, names=["y"])
    got.check(y=[X + 1])
    (record,) = got.records
    assert (record.backward, record.vmaps) == (False, 0)


def in_jit(f):
    return jax.jit(f)


def in_scan(f):
    def run(x):
        return jax.lax.scan(lambda c, _: (c, f(c)), x, None, length=1)[1].sum()

    return run


def in_carry(f):
    def run(x):
        body = lambda c, _: (c + f(c), None)
        return jax.lax.scan(body, x, None, length=1)[0].sum()

    return run


@pytest.mark.parametrize(
    "op",
    [
        *(jnp.tanh, jax.nn.silu, jax.nn.softmax, jax.nn.relu, jnp.sort, jnp.cbrt),
        *(jax.nn.logsumexp, jnp.linalg.norm, lambda x: jnp.exp(x) / 3),
        *(lambda x: x.at[..., 0].set(x[..., 1]), lambda x: jax.lax.map(jnp.sin, x)),
        lambda x: jax.lax.cond(x.sum() > 0, lambda: jnp.sin(x), lambda: jnp.cos(x)),
    ],
)
def test_what_the_backward_pass_needs_is_no_value(op):
    """The forward pass hands on slopes, masks and indices of the statement.

    Places that records tell apart share a program. JAX moves the statement of `in_scan`
    out of its loop.
    """

    def loss(x):
        y = op(x)
        return (y * y).sum()

    def elsewhere(x):
        return in_jit(loss)(x) + in_carry(loss)(x) + jax.vmap(loss)(x).sum()

    expected = np.ravel(op(jnp.asarray(X)))
    for f, places in ((in_scan(loss), 1), (elsewhere, 3)):
        got = observed(jax.jit(jax.grad(f)), X[None], names=["y"])
        assert len({(r.loops, r.vmaps) for r in got.records}) == places
        (values,) = got.values.values()
        for value in values:
            np.testing.assert_allclose(value.ravel(), expected, rtol=1e-5)


def test_a_derivative_that_is_differentiated():
    def penalty(x):
        slope = jax.grad(lambda x: (x**3).sum())(x)
        return (slope**2).sum()

    for f in (penalty, jax.jit(penalty)):
        got = observed(jax.jit(jax.grad(f)), X, names=["slope"])
        got.check(slope=[3 * X**2])


def test_a_statement_inside_itself():
    def power(n, x):
        if n == 0:
            return x
        y = power(n - 1, x) * 2
        return y

    def f(x):
        for _ in range(2):
            x = jnp.tanh(x)
        return power(3, x)

    t = np.tanh(X)
    ys = [np.tanh(t) * 2**i for i in (1, 2, 3)]
    observed(jax.jit(f), X, names=["x", "y"]).check(x=[t, np.tanh(t)], y=ys)


# --- Places ---------------------------------------------------------------------------


def body(c, x):
    new = c * 0.5 + x
    out = jnp.sin(new)
    return new, out


def run_of(xs, c=0.0):
    news = []
    for x in xs:
        c = c * np.float32(0.5) + x
        news.append(c)
    return news


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
@pytest.mark.parametrize("grad", [False, True])
def test_scan(wrap, grad):
    def f(c, xs):
        return jax.lax.scan(wrap(body), c, xs)[1].sum()

    f = jax.jit(jax.value_and_grad(f) if grad else f)
    xs = np.arange(4, dtype=np.float32)
    got = observed(f, np.float32(0), xs, names=["new", "out"])
    forward = [r.name for r in got.records if not r.backward]
    news = run_of(xs)
    if grad and wrap is jax.checkpoint:  # the backward pass computes them again
        for name, values in (("new", news), ("out", np.sin(news))):
            np.testing.assert_allclose(got.values[name][:4], values, rtol=1e-5)
        return
    assert forward == ["new", "out"] * 4
    got.check(new=news, out=np.sin(news))
    assert [r.steps for r in got.records[::2]] == [(0,), (1,), (2,), (3,)]
    assert got.records[0].loops[0].startswith("test_observe_values.py:")


def test_nested_loops_and_cond():
    def f(n):
        def inner(j, s):
            i, total = s
            odd = jax.lax.cond(j % 2 == 1, lambda t: t + j, lambda t: t, total)
            return i, odd

        def outer(i, total):
            return jax.lax.fori_loop(0, i, inner, (i, total))[1]

        return jax.lax.fori_loop(0, n, outer, 0)

    got = observed(jax.jit(f), 4, names=["odd"])
    steps, odds, total = [], [], 0
    for i in range(4):
        for j in range(i):
            total += j if j % 2 else 0
            steps.append((i, j))
            odds.append(total)
    got.check(odd=odds)
    assert [r.steps for r in got.records] == steps


def test_reversed_scan():
    f = jax.jit(lambda xs: jax.lax.scan(body, 0.0, xs, reverse=True)[1])
    xs = np.arange(3, dtype=np.float32)
    got = observed(f, xs, names=["new"])
    got.check(new=run_of(xs[::-1]))
    assert [r.steps for r in got.records] == [(2,), (1,), (0,)]


def test_while_loop():
    def f(x):
        def step(x):
            half = x / 2
            return half

        return jax.lax.while_loop(lambda x: x > 1, step, x)

    got = observed(jax.jit(f), 10.0, names=["half"])
    got.check(half=[5, 2.5, 1.25, 0.625])
    assert [r.steps for r in got.records] == [(0,), (1,), (2,), (3,)]


def test_vmap():
    got = observed(jax.jit(jax.vmap(parts)), X[:, None], names=["y"])
    got.check(y=[X[:, None] + 1])


def test_conditions():
    def f(x):
        def goes_on(x):
            left = x - 1
            return left > 0

        return jax.lax.while_loop(goes_on, lambda x: x / 2, x)

    got = observed(
        jax.jit(lambda x: jax.lax.map(f, x)), np.float32([5, 1]), names=["left"]
    )
    got.check(left=[4, 1.5, 0.25, -0.375, 0])
    steps = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert [r.steps for r in got.records] == steps
    with pytest.warns(RuntimeWarning, match="no variable 'left'"):  # JAX runs it twice
        observed(jax.jit(jax.vmap(f)), np.float32([5, 1]), names=["left"])


def test_the_axis_of_the_rows_is_not_known():
    """Programs with rows on the first and on the last axis are the same."""
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    found = []
    for axis in (0, 1):
        f = jax.jit(jax.vmap(lambda x: jnp.sin(x), axis, axis))
        got = Got()
        with observe(select=lambda r: r.primitive == "sin", to=got):
            f(x)
        (record,) = got.records
        assert record.vmaps == 1
        found.append((str(jax.make_jaxpr(f)(x)), got.values[""][0]))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_vmap_of_while():
    def f(n):
        def step(s):
            count = s[1] + 1
            return s[0] - 1, count

        return jax.lax.while_loop(lambda s: s[0] > 0, step, (n, 0))[1]

    got = observed(jax.jit(jax.vmap(f)), np.array([1, 3]), names=["count"])
    assert got.values["count"][-1][1] == 3
    assert got.records[-1].steps[0].tolist() == [1, 2]


def test_shard_map():
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x):
        total = jax.lax.psum(x, "i")
        mine = x + total
        return mine * 1

    f = jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    x = np.arange(4, dtype=np.float32)
    got = observed(jax.jit(f), x, names=["mine"])
    found = sorted(
        (r.device.id, v.item())
        for r, v in zip(got.records, got.values["mine"], strict=True)
    )
    assert found == [(i, i + 6.0) for i in range(4)]


def test_sharded_jit():
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.arange(8, dtype=np.float32)
    sharded = jax.device_put(x, NamedSharding(mesh, P("i")))
    got = observed(jax.jit(parts), sharded, names=["y"])
    got.check(y=[x + 1])


def test_custom_rules():
    @jax.custom_vjp
    def g(x):
        inside = x * 3
        return inside

    def backward(x, ct):
        rule = ct * 5
        return (rule,)

    g.defvjp(lambda x: (g(x), x), backward)
    got = observed(
        jax.jit(jax.value_and_grad(lambda x: g(x) * 2)), 1.0, names=["inside"]
    )
    got.check(inside=[3.0])


def test_beside_calls():
    seen = []

    def f(x):
        y = hc.call(lambda x: x + 1, x, x, order="ordered")
        hc.tap(lambda y: seen.append(float(y)), y, order="ordered")
        z = y * 2
        return z

    got = observed(jax.jit(f), np.float32(1), names=["y", "z"])
    got.check(y=[2], z=[4])
    hc.barrier()
    assert seen == [2, 2]


# --- Variables of helpers that are called on their own results ------------------------


def helper(x):
    inner = x * 5
    return inner


def with_a_rule(x):
    f = jax.custom_vjp(helper)
    f.defvjp(lambda x: (helper(x), None), lambda _, ct: (ct * 5,))
    return f(x)


@pytest.mark.parametrize(
    "f", [helper, jax.jit(helper), jax.checkpoint(helper), jax.remat(jax.jit(helper))]
)
def test_a_chain_of_calls(f):
    values = [np.float32(5**n) for n in (1, 2, 3)]

    def chain(x):
        return f(f(f(x)))

    def layers(x):
        for _ in range(3):
            x = f(x)
        return x

    for program in (chain, layers, with_a_rule):
        got = observed(jax.jit(program), np.float32(1), names=["inner"])
        found = sorted(got.values["inner"])
        np.testing.assert_array_equal(found, values[: len(found)])
        assert len(found) == (1 if program is with_a_rule else 3)


@pytest.mark.parametrize("length", [1, 3])
def test_a_body_that_runs_on_its_own_result(length):
    def body(c, _):
        inner = c * 2
        return inner, None

    def f(x):
        c = jax.lax.scan(body, x, None, length=length)[0]
        return jax.lax.scan(body, c, None, length=length)[0]

    def g(x):
        return jax.lax.fori_loop(0, 2 * length, lambda i, c: body(c, i)[0], x)

    values = [np.float32(2.0**n) for n in range(1, 2 * length + 1)]
    for program in (f, g):
        observed(jax.jit(program), np.float32(1), names=["inner"]).check(inner=values)


def test_a_branch_that_runs_on_its_own_result():
    def f(x):
        for _ in range(2):
            x = jax.lax.cond(x > 0, helper, lambda x: x, x)
        return x

    observed(jax.jit(f), np.float32(1), names=["inner"]).check(inner=[5, 25])


# --- Parts of tuples ------------------------------------------------------------------


def loss_of(w):
    return (w**2).sum()


def loss_and_more(w):
    total = (w**2).sum()
    return total, {"mean": w.mean(), "max": w.max()}


def plain(w):
    loss, grads = jax.value_and_grad(loss_of)(w)
    return loss, grads


def with_aux(w):
    (loss, aux), grads = jax.value_and_grad(loss_and_more, has_aux=True)(w)
    return loss, grads, aux


def with_aux_of_grad(w):
    grads, loss = jax.grad(lambda w: (loss_of(w), w.sum()), has_aux=True)(w)
    return loss, grads


def kept(w):
    vg = jax.value_and_grad(loss_of)
    out = vg(w)
    loss, grads = out
    return loss, grads


def by_vjp(w):
    loss, pull = jax.vjp(loss_of, w)
    return loss, pull(1.0)


def step(w):
    (loss, _), grads = jax.value_and_grad(loss_and_more, has_aux=True)(w)
    w = w - 0.1 * grads
    return w, loss


def by_a_step(w):
    state, loss = step(w)
    return loss, state


def by_a_jitted_step(w):
    state, loss = jax.jit(step)(w)
    return loss, state


def in_a_loop(w):
    def body(w, _):
        state, loss = step(w)
        return state, loss

    return jax.lax.scan(body, w, None, length=1)


def by_a_loop(w):
    state, loss = jax.lax.scan(lambda w, _: step(w), w, None, length=1)
    return loss[0], state


def by_a_branch(w):
    loss, grads = jax.lax.cond(
        w[0] < 1,
        lambda w: jax.value_and_grad(loss_of)(w),
        lambda w: (w[0], w),
        w,
    )
    return loss, grads


def by_counting(times):
    def f(w):
        loss, state = jax.lax.fori_loop(
            0, times(w), lambda _, c: step(c[1])[::-1], (w[0], w)
        )
        return loss, state

    return f


def by_a_while_loop(w):
    _, (loss, state) = jax.lax.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, step(c[1][1])[::-1]), (0, (w[0], w))
    )
    return loss, state


def one_time(w):
    return 1


def times_of_a_value(w):
    return w[1].astype(int)


scan_that_counts = by_counting(one_time)
while_loop_that_counts = by_counting(times_of_a_value)


TUPLES = {
    by_a_loop: ["loss", "grads", "state"],
    by_a_branch: ["loss", "grads"],
    scan_that_counts: ["loss", "grads", "state"],
    while_loop_that_counts: ["loss", "grads", "state"],
    by_a_while_loop: ["loss", "grads", "state"],
    plain: ["loss", "grads"],
    with_aux: ["loss", "grads", "aux"],
    with_aux_of_grad: ["loss", "grads"],
    kept: ["loss", "grads"],
    by_vjp: ["loss"],
    by_a_step: ["loss", "grads", "state"],
    by_a_jitted_step: ["loss", "grads", "state"],
    in_a_loop: ["loss", "grads", "state"],
}


@pytest.mark.parametrize("f", TUPLES, ids=lambda f: f.__name__)
def test_parts_of_what_a_call_returns(f):
    """None of the parts is taken for another."""
    expected = {
        "grads": [0, 2, 4],
        "state": [0, 0.8, 1.6],
        "loss": 3.0 if f is with_aux_of_grad else 5.0,
    }
    got = Got()
    with observe(*TUPLES[f], to=got):
        jax.block_until_ready(jax.jit(f)(jnp.arange(3.0)))
    for name, values in got.values.items():
        for value in values if name in expected else ():
            np.testing.assert_allclose(value, expected[name], rtol=1e-6)
    aux_leaves = {"aux.0", "aux.1"}
    found = {"aux" if name in aux_leaves else name for name in got.values}
    assert found == {*TUPLES[f]}
    if f is with_aux:
        aux = [*got.values["aux.0"], *got.values["aux.1"]]
        assert sorted(map(float, aux)) == [1, 2]


LIBRARY = """
import jax

def value_and_grad_from_state(f):
    def value_and_grad(w, *, state):
        known, slopes = state["value"], state["grad"]
        known, slopes = jax.lax.cond(
            jax.numpy.isfinite(known),
            lambda *_: (known, slopes),
            lambda w: jax.value_and_grad(f)(w),
            w,
        )
        return slopes, known
    return value_and_grad

def differentiated(f, w):
    if w is None:
        return None
    else:
        return jax.value_and_grad(f)(w)

def update(f, w):
    known, slopes = differentiated(f, w)
    return {"w": w - 0.1 * slopes}, known
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "searches"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    yield importlib.import_module("searches")
    sys.modules.pop("searches")


def test_parts_that_a_library_returns_in_another_order(library):
    def fit(w):
        state, value = library.update(loss_of, w)
        return state, value

    got = Got()
    with observe("state", "value", to=got):
        jax.jit(fit)(jnp.arange(3.0))
    got.check(state=[[0, 0.8, 1.6]], value=[5])


def test_parts_of_what_a_branch_in_a_library_returns(library):
    """Its `return` statement says in which order."""

    def fit(w):
        def descent(c, _):
            w, state = c
            value_and_grad = library.value_and_grad_from_state(loss_of)
            grad, value = value_and_grad(w, state=state)
            return (w - 0.1 * grad, {"value": jnp.inf, "grad": grad}), value

        start = {"value": jnp.inf, "grad": w}
        return jax.lax.scan(descent, (w, start), None, length=2)[1]

    got = Got()
    with observe("grad", "value", to=got):
        values = jax.jit(fit)(jnp.arange(3.0))
    got.check(grad=[[0, 2, 4], [0, 1.6, 3.2]], value=np.asarray(values))


def test_an_assignment_in_a_lambda():
    f = lambda x: (y := x * 2) + jnp.sin(y)
    observed(jax.jit(f), X, names=["y"]).check(y=[X * 2])


# --- Where they go --------------------------------------------------------------------


def scan_of(n):
    return jax.jit(lambda xs: jax.lax.scan(body, 0.0, xs)[1]), np.arange(n, dtype="f4")


def test_to_a_recorder(rec):
    f, xs = scan_of(50)
    with observe("new", to=rec):
        f(xs)
    table = rec.dataframe()
    assert table["step"].tolist() == list(range(50))
    np.testing.assert_allclose(table["new"], run_of(xs), rtol=1e-5)


def test_to_a_sink(tmp_path):
    f, xs = scan_of(50)
    sink = sinks.sqlite(tmp_path / "run.db")
    with observe("new", to=sink):
        f(xs)
    rows = sqlite3.connect(tmp_path / "run.db").execute(
        "SELECT step, new FROM records ORDER BY step"
    )
    steps, news = zip(*rows.fetchall(), strict=True)
    assert steps == tuple(range(50))
    np.testing.assert_allclose(news, run_of(xs), rtol=1e-5)


def test_printed(capsys):
    with observe("y"):
        jax.jit(parts)(X)
    assert "y (test_observe_values.py:" in capsys.readouterr().err


def test_select():
    got = Got()
    with observe(select=lambda r: r.primitive == "sin", to=got):
        jax.jit(parts)(X)
    assert [r.text for r in got.records] == ["z = jnp.sin(y) * 2"]
    np.testing.assert_allclose(got.values[""][0], np.sin(X + 1), rtol=1e-6)


def test_errors_of_the_function():
    def bad(record, value):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), observe("y", to=bad):
        jax.jit(parts)(X)


# --- The block ------------------------------------------------------------------------


def test_a_name_that_is_not_found():
    with pytest.warns(RuntimeWarning, match="no variable 'zz'.*Did you mean 'z'"):
        observed(jax.jit(parts), X, names=["zz"]).check()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: observe(), "observes nothing"),
        (lambda: observe(3), "should be a str"),
        (lambda: observe("x", to=3), "to= of hc.observe"),
        (lambda: observe("x", select=3), "select= of hc.observe"),
        (lambda: observe(nans=True, to=print), "no values to hand on"),
    ],
)
def test_mistakes(make, text):
    with pytest.raises(hc.errors.SpecError, match=text):
        make()


def test_two_threads():
    f, xs = scan_of(20)
    got = {name: Got() for name in ("new", "out")}
    both = threading.Barrier(2, timeout=60)

    def run(name):
        with observe(name, to=got[name]):
            both.wait()
            f(xs).block_until_ready()
            both.wait()

    threads = [threading.Thread(target=run, args=(name,)) for name in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    got["new"].check(new=run_of(xs))
    got["out"].check(out=np.sin(run_of(xs)))


def test_nested_blocks_add_up():
    f, xs = scan_of(3)
    outer, inner = Got(), Got()
    with observe("new", to=outer):
        with observe("out", to=inner):
            f(xs)
        f(xs)
    outer.check(new=run_of(xs) * 2)
    inner.check(out=np.sin(run_of(xs)))


def test_blocks_that_end_out_of_order():
    """As those of tasks and of generators do."""
    f, xs = scan_of(3)
    got = {"new": Got(), "out": Got()}

    def block(name):
        with observe(name, to=got[name]):
            yield

    blocks = [block(name) for name in got]
    for each in blocks:
        next(each)
    for each in blocks:
        each.close()
        f(xs)
    hc.barrier()
    got["new"].check()
    got["out"].check(out=np.sin(run_of(xs)))


def test_a_block_again():
    f, xs = scan_of(3)
    got = Got()
    block = observe("new", to=got)
    for _ in range(2):
        with block:
            f(xs)
    f(xs)
    hc.barrier()
    got.check(new=run_of(xs) * 2)
