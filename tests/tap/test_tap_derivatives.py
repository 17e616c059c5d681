"""`hc.derivatives.tap_tangent` and `hc.derivatives.tap_cotangent`: taps of derivatives."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc

ORDERS = pytest.mark.parametrize("order", ["unordered", "ordered"])
EAGER_AND_JIT = pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit], ids=["eager", "jit"]
)
BOTH = pytest.mark.parametrize(
    "tap", [hc.derivatives.tap_tangent, hc.derivatives.tap_cotangent]
)
X, DOT = np.float32(1.25), np.float32(3)


class Taps:
    """Taps the derivatives of a value; `taken()` returns what was delivered since."""

    def __init__(self, kind, **options):
        self.kind, self.options = kind, options
        self.seen = []

    def __call__(self, x, **more):
        return self.kind(self.host, x, **self.options, **more)

    def host(self, dot):
        self.seen.append(dot)

    def taken(self):
        hc.barrier()
        taken, self.seen = self.seen, []
        return taken

    def check(self, want):
        np.testing.assert_allclose(self.taken(), want, rtol=1e-5)


# --- Programs, with the tangents and the cotangents at their tap ---------------------


def straight(tap):
    return lambda x: jnp.sin(tap(x * x))


def scan(tap):
    """x -> x^8; after iteration k the value is x^(2^k)."""
    return lambda x: lax.scan(lambda c, _: (tap(c * c), None), x, None, length=3)[0]


def remat(tap):
    return jax.checkpoint(straight(tap))


def remat_in_scan(tap):
    step = jax.checkpoint(lambda c, _: (tap(c * c), None))
    return lambda x: lax.scan(step, x, None, length=3)[0]


def cond(tap):
    return lambda x: lax.cond(x > 1, straight(tap), tap, x)


def nested_jit(tap):
    inner = jax.jit(lambda v: tap(v * v))
    return lambda x: jnp.sin(inner(x))


def fori(tap):
    return lambda x: lax.fori_loop(0, 3, lambda _, c: tap(c * c), x)


ONCE = ([2 * X], [np.cos(X * X)])
TURNS = ([2 * X, 4 * X**3, 8 * X**7], [1, 2 * X**4, 4 * X**6])
WANT = {
    straight: ONCE,
    remat: ONCE,
    cond: ONCE,
    nested_jit: ONCE,
    scan: TURNS,
    fori: TURNS,
    remat_in_scan: TURNS,
}
PROGRAMS = pytest.mark.parametrize("program", WANT, ids=lambda p: p.__name__)
# Each program in both orders and both modes, and each order in both modes: a program has
# one of the two pairs of them, the next program the other.
WAYS = pytest.mark.parametrize(
    ("program", "wrap", "order"),
    [
        pytest.param(program, wrap, order, id=f"{program.__name__}-{mode}-{order}")
        for n, program in enumerate(WANT)
        for k, (mode, wrap) in enumerate({"eager": lambda f: f, "jit": jax.jit}.items())
        for order in (("unordered", "ordered")[(n + k) % 2],)
    ],
)


@WAYS
def test_jvp_taps_tangents(order, wrap, program):
    taps = Taps(hc.derivatives.tap_tangent, order=order)
    f = program(taps)
    got = wrap(lambda x, dot: jax.jvp(f, (x,), (dot,)))(X, DOT)
    want = jax.jvp(program(lambda v: v), (X,), (DOT,))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    taps.check(np.multiply(WANT[program][0], DOT))


@WAYS
def test_vjp_taps_cotangents(order, wrap, program):
    taps = Taps(hc.derivatives.tap_cotangent, order=order)
    f = program(taps)
    got = wrap(lambda x, ct: jax.vjp(f, x)[1](ct))(X, DOT)
    want = jax.vjp(program(lambda v: v), X)[1](DOT)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    taps.check(np.multiply(WANT[program][1], DOT))


@WAYS
def test_grad_of_tap_tangent_taps_nothing_and_is_right(order, wrap, program):
    taps = Taps(hc.derivatives.tap_tangent, order=order)
    plain = program(lambda v: v)
    f = program(taps)
    for derivative in (jax.grad, jax.value_and_grad, jax.jacrev):
        got, want = wrap(derivative(f))(X), derivative(plain)(X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), got, want)
    taps.check([])


@WAYS
def test_jvp_of_tap_cotangent_taps_nothing_and_is_right(order, wrap, program):
    taps = Taps(hc.derivatives.tap_cotangent, order=order)
    f = program(taps)
    got = wrap(lambda x: jax.jvp(f, (x,), (DOT,)))(X)
    want = jax.jvp(program(lambda v: v), (X,), (DOT,))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(wrap(jax.jacfwd(f))(X) * DOT, want[1], rtol=1e-6)
    taps.check([])


@BOTH
@PROGRAMS
@EAGER_AND_JIT
def test_a_plain_run_taps_nothing(wrap, program, tap):
    taps = Taps(tap)
    want = program(lambda v: v)(X)
    np.testing.assert_allclose(wrap(program(taps))(X), want, rtol=1e-6)
    taps.check([])


def test_jvp_of_while_taps_tangents_of_each_turn():
    taps = Taps(hc.derivatives.tap_tangent, order="ordered")
    f = lambda x: lax.while_loop(lambda c: c < 5, lambda c: taps(c * c), x)
    out, dot = jax.jit(lambda x: jax.jvp(f, (x,), (DOT,)))(X)
    np.testing.assert_allclose([out, dot], [X**8, 8 * X**7 * DOT], rtol=1e-5)
    taps.check(np.multiply(TURNS[0], DOT))


def test_linearize_taps_tangents_when_they_come():
    taps = Taps(hc.derivatives.tap_tangent)
    _, linear = jax.linearize(straight(taps), X)
    taps.check([])
    for dot in (DOT, 2 * DOT):
        np.testing.assert_allclose(linear(dot), dot * 2 * X * np.cos(X * X), 1e-5)
        taps.check([2 * X * dot])


# --- vmap, and derivatives of derivatives --------------------------------------------

XS = np.array([0.5, X, 2], np.float32)


@pytest.mark.parametrize("rows", ["each", "batched"])
@pytest.mark.parametrize("inside", [False, True], ids=["vmap of it", "of vmap"])
@ORDERS
def test_vmap(order, inside, rows):
    tangents = Taps(hc.derivatives.tap_tangent, order=order, rows=rows)
    cotangents = Taps(hc.derivatives.tap_cotangent, order=order, rows=rows)

    def both(x):
        return jnp.sin(cotangents(tangents(x * x)))

    if inside:
        batch = lambda x: jax.vmap(both)(x)
        forward = lambda x: jax.jvp(batch, (x,), (jnp.ones_like(x),))[1]
        backward = jax.grad(lambda x: batch(x).sum())
    else:
        forward = jax.vmap(lambda x: jax.jvp(both, (x,), (jnp.ones_like(x),))[1])
        backward = jax.vmap(jax.grad(both))
    want = 2 * XS * np.cos(XS * XS)
    np.testing.assert_allclose(jax.jit(forward)(XS), want, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(backward)(XS), want, rtol=1e-5)
    shape = (3,) if rows == "each" else (1, 3)
    tangents.check((2 * XS).reshape(shape))
    cotangents.check(np.cos(XS * XS).reshape(shape))


@BOTH
@EAGER_AND_JIT
def test_where_for_each_row(wrap, tap):
    taps = Taps(tap, rows="each")
    f = lambda x: jnp.sin(taps(x * x, where=x > 1))
    if tap is hc.derivatives.tap_tangent:
        want = 2 * XS
        wrap(jax.vmap(lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))))(XS)
    else:
        want = np.cos(XS * XS)
        wrap(jax.vmap(jax.grad(f)))(XS)
    taps.check(want[1:])
    off = Taps(tap, where=False)
    wrap(lambda x: jax.jvp(straight(off), (x,), (x,)))(X)
    wrap(jax.grad(straight(off)))(X)
    off.check([])


SQUARES = np.diag(2 * XS)


@EAGER_AND_JIT
def test_jacobians_deliver_their_columns_and_rows(wrap):
    tangents, cotangents = (
        Taps(hc.derivatives.tap_tangent),
        Taps(hc.derivatives.tap_cotangent),
    )
    np.testing.assert_allclose(wrap(jax.jacfwd(lambda x: tangents(x * x)))(XS), SQUARES)
    tangents.check([SQUARES])
    np.testing.assert_allclose(
        wrap(jax.jacrev(lambda x: cotangents(x * x)))(XS), SQUARES
    )
    cotangents.check([np.eye(3)])


@EAGER_AND_JIT
@ORDERS
def test_second_derivatives(order, wrap):
    plain = lambda x: jnp.sin(x) ** 3
    second = jax.grad(jax.grad(plain))(X)
    tangents = Taps(hc.derivatives.tap_tangent, order=order)
    cotangents = Taps(hc.derivatives.tap_cotangent, order=order)
    f = lambda x: cotangents(tangents(jnp.sin(x))) ** 3
    ct, dot = 3 * np.sin(X) ** 2, np.cos(X)
    for derivative, taps, want in (
        (jax.grad(jax.grad(f)), cotangents, ct),
        (jax.hessian(f), cotangents, ct),
        (jax.jacrev(jax.jacfwd(f)), tangents, dot),
        (jax.jacfwd(jax.jacfwd(f)), tangents, dot),
    ):
        np.testing.assert_allclose(wrap(derivative)(X), second, rtol=1e-5)
        np.testing.assert_allclose(np.ravel(taps.taken()), [want], rtol=1e-5)
        tangents.taken(), cotangents.taken()


# --- Trees ---------------------------------------------------------------------------


@BOTH
@EAGER_AND_JIT
def test_leaves_without_a_derivative_come_as_none_and_go_through(wrap, tap):
    taps, through = Taps(tap), []
    key, n = jax.random.key(7), np.arange(3)

    def f(x):
        tree = {"x": (x * x, 2.0), "n": n, "key": key, "name": "a", "flag": True}
        out = taps({**tree, "none": None, "z": x * (1 + 2j), "unused": x[:1]})
        through.append((out["name"], out["none"], out["key"].dtype))
        return (out["x"][0] * out["n"] + out["z"].real + out["x"][1]).sum()

    if tap is hc.derivatives.tap_tangent:
        _, dot = wrap(lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),)))(XS)
        np.testing.assert_allclose(dot, (2 * XS * n + 1).sum(), rtol=1e-5)
        want = {"x": (2 * XS, 0), "z": np.full(3, 1 + 2j), "unused": np.ones(1)}
    else:
        np.testing.assert_allclose(wrap(jax.grad(f))(XS), 2 * XS * n + 1, rtol=1e-5)
        want = {"x": (n, 3), "z": np.ones(3), "unused": np.zeros(1)}
    assert set(through) == {("a", None, key.dtype)}
    (got,) = taps.taken()
    nothing = dict.fromkeys(("n", "key", "name", "flag", "none"))
    assert {name: got.pop(name) for name in nothing} == nothing
    jax.tree.map(np.testing.assert_allclose, got, want)


@BOTH
@pytest.mark.parametrize("wrong", [{"ordr": "ordered"}, {"order": "pure"}], ids=str)
def test_wrong_options_are_refused_where_they_are_written(wrong, tap):
    with pytest.raises((TypeError, hc.errors.SpecError)):
        tap(print, X, **wrong)


@BOTH
def test_a_tap_knows_the_users_line(tap):
    places = []
    f = lambda x: tap(lambda _: places.append(hc.current().place), x * x)
    jax.jvp(f, (X,), (X,))
    jax.grad(f)(X)
    hc.barrier()
    line = inspect.getsourcelines(f)[1]
    assert [(place.file, place.line) for place in places] == [(__file__, line)]
