"""Host functions called only where a condition holds: `f.where(mask)(x)`."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), np.float32)
WHOLE = ("expand_dims", "broadcast_all")
X = np.array([0.3, -1.2, 2.0, -0.5], dtype=np.float32)
MASK = X > 0


class Seen:
    """A host function with rules, all of which record their arguments."""

    def __init__(self, kind, **options):
        self.xs = []
        self.f = f = hc.host(self.note(np.sin), result=hc.results.like(0), **options)
        note, cos = self.note, np.cos
        if kind == "jvp":
            f.defjvp(note(lambda p, t: cos(p[0]) * t[0]))
        elif kind == "both":
            f.defjvp(note(lambda p, t: (np.sin(p[0]), cos(p[0]) * t[0])))
        elif kind == "jvps":
            f.defjvps(lambda t, out, x: self.note(cos)(x) * t)
        elif kind == "vjp":
            f.defvjp(note(lambda x: (np.sin(x), cos(x))), note(lambda c, ct: (c * ct,)))
        elif kind == "residuals":
            spec = jax.ShapeDtypeStruct((), np.float32)
            fwd = note(lambda x: (np.sin(x), cos(x)))
            f.defvjp(fwd, note(lambda c, ct: (c * ct,)), residuals=spec)
        elif kind == "jacobian":
            f.defjacobian(note(cos))
        elif kind == "jvp and vjp":
            f.defjvp(note(lambda p, t: cos(p[0]) * t[0]))
            f.defvjp(note(lambda x: (np.sin(x), cos(x))), note(lambda c, ct: (c * ct,)))
        elif kind == "jax jvp":
            f.defjvp(lambda p, t: jnp.cos(p[0]) * t[0], where="jax")
        elif kind == "jax both":
            rule = lambda p, t: (jnp.sin(p[0]), jnp.cos(p[0]) * t[0])
            f.defjvp(rule, where="jax")
        elif kind == "jax vjp":
            fwd = lambda x: (jnp.sin(x), jnp.cos(x))
            f.defvjp(fwd, lambda c, ct: (c * ct,), where="jax")
        elif kind == "jax jacobian":
            f.defjacobian(jnp.cos, where="jax")

    def note(self, fn):
        def noted(*args):
            first = args[0][0] if isinstance(args[0], tuple) else args[0]
            self.xs.append(np.asarray(first).copy())
            return fn(*args)

        return noted


KINDS = {
    "jvp": "f",
    "both": "f",
    "jvps": "f",
    "vjp": "r",
    "residuals": "r",
    "jacobian": "fr",
    "jvp and vjp": "fr",
    "jax jvp": "fr",
    "jax both": "fr",
    "jax vjp": "r",
    "jax jacobian": "fr",
}
MODES = [(k, m) for k, modes in KINDS.items() for m in modes]
FILL = 7.0


def oracle(mask, x):
    return jnp.where(mask, jnp.sin(x), FILL)


def derivative(g, mode):
    """(value, slope) of a function of (mask, x), for one row."""
    if mode == "r":
        return lambda mask, x: jax.value_and_grad(g, 1)(mask, x)
    return lambda mask, x: jax.jvp(lambda x: g(mask, x), (x,), (jnp.ones_like(x),))


SOME = [("both", "f"), ("vjp", "r"), ("residuals", "r"), ("jax jvp", "r")]
METHODS = [
    *(("sequential", *pair) for pair in MODES),
    *(("parallel", *pair) for pair in SOME),
    *(("expand_dims", *pair) for pair in SOME),
]


@pytest.mark.parametrize(("method", "kind", "mode"), METHODS)
def test_derivatives_of_rows_that_do_not_call(method, kind, mode):
    seen = Seen(kind, vmap_method=method)
    g = lambda mask, x: seen.f.where(mask, FILL)(x)
    ours = jax.jit(jax.vmap(derivative(g, mode)))(MASK, X)
    want = jax.vmap(derivative(oracle, mode))(MASK, X)
    for a, b in zip(ours, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    jax.block_until_ready(ours)
    if not (kind.startswith("jax") and kind != "jax jvp"):
        assert seen.xs
    rows = {float(x) for xs in seen.xs for x in xs.ravel()}
    assert rows.isdisjoint(X[~MASK].tolist())


@pytest.mark.parametrize(("kind", "mode"), SOME)
def test_derivatives_without_vmap(kind, mode):
    seen = Seen(kind)
    g = lambda mask, x: seen.f.where(mask, FILL)(x)
    program, want = jax.jit(derivative(g, mode)), derivative(oracle, mode)
    for mask, x in zip(MASK, X, strict=True):
        np.testing.assert_allclose(program(mask, x), want(mask, x), rtol=1e-6)
    jax.effects_barrier()
    rows = {float(x) for x in seen.xs}
    assert rows.isdisjoint(X[~MASK].tolist())


@pytest.mark.parametrize("where", ["host", "jax"])
def test_linear_functions(where):
    calls = []

    def double(x):
        calls.append(x.copy())
        return 2 * x

    f = hc.host(double, result=hc.results.like(0))
    f.deftranspose(lambda ct: 2 * ct, where=where)
    g = lambda mask, x: f.where(mask, FILL)(x) ** 2
    want = lambda mask, x: jnp.where(mask, 2 * x, FILL) ** 2
    for d in (jax.jvp, None):
        if d is None:
            ours = jax.vmap(jax.grad(jax.grad(g, 1), 1))(MASK, X)
            theirs = jax.vmap(jax.grad(jax.grad(want, 1), 1))(MASK, X)
        else:
            ours = jax.vmap(derivative(g, "f"))(MASK, X)
            theirs = jax.vmap(derivative(want, "f"))(MASK, X)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert calls


def test_remat_scan_and_a_cond_in_a_batch():
    """What masks are for: JAX computes both branches of a batched cond."""
    seen = Seen("vjp")

    @jax.checkpoint
    def step(x, _):
        mask = x > 0
        f = seen.f.where(mask)
        return jax.lax.cond(mask, lambda x: x + 0.1 * f(x), lambda x: x, x), None

    def whole(x):
        return jax.lax.scan(step, x, length=3)[0]

    def plain(x):
        for _ in range(3):
            x = jnp.where(x > 0, x + 0.1 * jnp.sin(x), x)
        return x

    ours = jax.jit(jax.vmap(jax.value_and_grad(whole)))(X)
    np.testing.assert_allclose(ours, jax.vmap(jax.value_and_grad(plain))(X), rtol=1e-6)
    assert {float(x) for x in seen.xs}.isdisjoint(X[~MASK].tolist())


def test_fills_in_the_structure_of_the_result():
    spec = lambda x: {"n": jax.ShapeDtypeStruct((2,), np.int32), "x": x}
    f = hc.host(lambda x: {"n": np.arange(2, dtype=np.int32), "x": x}, result=spec)
    f.defjvp(lambda p, t: {"n": np.zeros(2, np.int32), "x": t[0]})
    g = lambda mask, x: f.where(mask, {"n": [5, 6], "x": -1.0})(x)
    off = jax.jit(g)(False, 2.0)
    assert off["n"].tolist() == [5, 6]
    assert off["x"] == -1
    assert g(True, 2.0)["n"].tolist() == [0, 1]
    _, dot = jax.jvp(lambda x: g(False, x)["x"], (2.0,), (1.0,))
    assert dot == 0


def test_functions_with_effects():
    seen = []
    f = hc.host(lambda x: seen.append(float(x)), result=None, order="ordered")
    jax.vmap(lambda m, x: f.where(m)(x))(MASK, X)
    jax.effects_barrier()
    assert seen == X[MASK].tolist()


def test_what_is_refused():
    f = hc.host(np.sin, result=hc.results.like(0))
    with pytest.raises(hc.errors.SpecError, match="where= of `sin` should be one bool"):
        f.where(X > 0)(X)
    with pytest.raises(hc.errors.SpecError, match="fill= of `sin` is 'x'"):
        f.where(True, "x")(X)
    f.defbatch(lambda size, batched, x: (f(x), True))
    with pytest.raises(
        hc.errors.BatchingError, match="The mask could not reach your rule"
    ):
        jax.vmap(lambda m, x: f.where(m)(x))(MASK, X)


# --- Rows without a call have finite derivatives -------------------------------------


def logarithm(kind):
    log = hc.host(np.log, result=hc.results.like(0))
    if kind == "jvp":
        log.defjvp(lambda p, t: t[0] / p[0], where="jax")
    elif kind == "vjp":
        log.defvjp(lambda x: (jnp.log(x), 1 / x), lambda r, ct: (r * ct,), where="jax")
    elif kind == "jacobian":
        log.defjacobian(lambda x: 1 / x, where="jax")
    return log


@pytest.mark.parametrize("kind", ["jvp", "vjp", "jacobian"])
def test_rules_in_jax_code_that_are_infinite_there(kind):
    log = logarithm(kind)
    first = jax.grad(lambda x: log.where(x > 0)(x))
    x = jnp.array([0.0, 2.0])
    assert jax.vmap(first)(x).tolist() == [0, 0.5]
    assert jax.jit(jax.vmap(jax.grad(first)))(x).tolist() == [0, -0.25]


def test_a_number_of_python_as_a_tangent():
    f = hc.host(np.multiply, result=hc.results.like(0))
    f.defjvp(lambda p, t: t[0] * p[1] + p[0] * t[1], where="jax")
    for mask, slope in ((True, 4), (False, 0)):
        g = lambda x, mask=mask: f.where(mask)(x, 4.0)
        assert jax.jvp(g, (3.0,), (1.0,))[1] == slope


@pytest.mark.parametrize("method", ["sequential", "parallel", *WHOLE])
def test_rows_that_differ_in_the_mask_only(method):
    sine = hc.host(np.sin, result=hc.results.like(0), vmap_method=method)
    mask, x = jnp.array([True, False, True]), jnp.ones(3)
    got = jax.jit(jax.vmap(lambda m: sine.where(m)(x)))(mask)
    np.testing.assert_allclose(got, jnp.where(mask[:, None], np.sin(x), 0), rtol=1e-6)
    one = hc.host(lambda: np.float32(1), result=F32, vmap_method=method)
    got = jax.vmap(lambda m: one.where(m, -1)())(mask)
    assert got.tolist() == [1, -1, 1]


def test_finite_differences():
    seen = []
    f = hc.host(
        lambda x: (seen.append(float(x)), np.sqrt(x))[1], result=hc.results.elementwise
    )
    hc.derivatives.finite_difference(f)
    x = jnp.array([-1.0, 4.0])
    slopes = jax.vmap(jax.grad(lambda x: f.where(x > 0)(x)))(x)
    np.testing.assert_allclose(slopes, [0, 0.25], rtol=1e-4)
    assert min(seen) > 0


# --- In a class ------------------------------------------------------------------------


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    @hc.host(result=hc.results.like(1))
    def sine(self, x):
        """A sine."""
        return self.scale * np.sin(x)

    sine.defvjp(
        lambda self, x: (self.scale * np.sin(x), np.cos(x)),
        lambda cos, ct: (None, 3 * ct * cos),
    )

    @staticmethod
    @hc.host(result=hc.results.like(0))
    def plain(x):
        return 2 * x

    ufunc = hc.host(np.sin, result=hc.results.like(0))


def test_methods():
    s = Scaled(np.float32(3))
    value, slope = jax.jit(jax.value_and_grad(s.sine))(np.float32(0.3))
    np.testing.assert_allclose([value, slope], [3 * np.sin(0.3), 3 * np.cos(0.3)], 1e-6)
    assert s.plain(X).tolist() == (2 * X).tolist()
    np.testing.assert_allclose(s.ufunc(X), np.sin(X), rtol=1e-6)
    assert isinstance(Scaled.sine, hc.typing.HostFunction)
    assert Scaled.sine.__doc__ == "A sine."
    assert Scaled.sine(s, X[0]) == s.sine(X[0])
    assert jax.vmap(s.sine)(X).shape == X.shape
    masked = jax.vmap(lambda m, x: s.sine.where(m, -1)(x))(MASK, X)
    np.testing.assert_allclose(masked, np.where(MASK, 3 * np.sin(X), -1), rtol=1e-6)
    assert s.sine == s.sine
    assert hash(s.sine) == hash(s.sine)
    assert s.sine != Scaled(1).sine


class Counted:
    @classmethod
    @hc.host(result=hc.results.like(1))
    def twice(cls, x):
        return 2 * x


def test_class_methods_are_pickled_by_name():
    assert Counted.twice(X).tolist() == (2 * X).tolist()
    function = Counted.twice.__func__
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function
