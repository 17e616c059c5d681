"""hc.host: derivative rules, compared with JAX's own derivatives."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import test_util

import hostcall as hc

X = np.array([0.3, -1.2, 2.0], dtype=np.float32)
Y = np.array([1.5, 0.4, -0.7], dtype=np.float32)


class Calls(dict):
    """Counts calls by name: `calls.of(name)(fn)` is `fn` with a counter."""

    def of(self, name):
        self[name] = 0

        def decorate(fn):
            @functools.wraps(fn)
            def wrapper(*args, **kwargs):
                self[name] += 1
                return fn(*args, **kwargs)

            return wrapper

        return decorate

    def take(self):
        now = {k: v for k, v in self.items() if v}
        self.update(dict.fromkeys(self, 0))
        return now


# --- One function, x sin(y), with each kind of rules --------------------------------


def value(x, y):
    return x * np.sin(y)


def push(primals, tangents):
    (x, y), (x_dot, y_dot) = primals, tangents
    return np.sin(y) * x_dot + x * np.cos(y) * y_dot


def jax_push(primals, tangents):
    (x, y), (x_dot, y_dot) = primals, tangents
    return jnp.sin(y) * x_dot + x * jnp.cos(y) * y_dot


def fwd(x, y):
    return x * np.sin(y), {"sin": np.sin(y), "slope": x * np.cos(y), "note": "kept"}


def bwd(residuals, ct):
    assert residuals["note"] == "kept"
    return residuals["sin"] * ct, residuals["slope"] * ct


def array_fwd(x, y):
    return x * np.sin(y), (np.sin(y), x * np.cos(y))


def array_bwd(residuals, ct):
    return residuals[0] * ct, residuals[1] * ct


def jax_fwd(x, y):
    return x * jnp.sin(y), (x, y)


def jax_bwd(residuals, ct):
    x, y = residuals
    return jnp.sin(y) * ct, x * jnp.cos(y) * ct


def jacobian(x, y):
    return np.diag(np.sin(y)), np.diag(x * np.cos(y))


def jax_jacobian(x, y):
    return jnp.diag(jnp.sin(y)), jnp.diag(x * jnp.cos(y))


def make(kind, calls=None):
    calls = Calls() if calls is None else calls
    f = hc.host(calls.of("value")(value), result=hc.results.like(0), name="f")
    jvp, halves = calls.of("jvp"), (calls.of("fwd"), calls.of("bwd"))
    for part in kind.split("+"):
        if part == "jvp":
            f.defjvp(jvp(push))
        elif part == "pair":
            f.defjvp(jvp(lambda p, t: (value(*p), push(p, t))))
        elif part == "jaxjvp":
            f.defjvp(jvp(jax_push), where="jax")
        elif part == "jaxpair":
            f.defjvp(lambda p, t: (f(*p), jax_push(p, t)), where="jax")
        elif part == "jvps":
            f.defjvps(
                lambda t, out, x, y: np.sin(y) * t,
                lambda t, out, x, y: x * np.cos(y) * t,
            )
        elif part == "jaxjvps":
            f.defjvps(
                lambda t, out, x, y: jnp.sin(y) * t,
                lambda t, out, x, y: out / jnp.tan(y) * t,
                where="jax",
            )
        elif part == "vjp":
            f.defvjp(halves[0](fwd), halves[1](bwd))
        elif part == "arrays":
            spec = (jax.ShapeDtypeStruct((3,), np.float32),) * 2
            f.defvjp(halves[0](array_fwd), halves[1](array_bwd), residuals=spec)
        elif part == "jaxvjp":
            f.defvjp(jax_fwd, jax_bwd, where="jax")
        elif part == "jacobian":
            f.defjacobian(calls.of("jacobian")(jacobian))
        elif part == "jaxjacobian":
            f.defjacobian(jax_jacobian, where="jax")
    return f


FORWARD = ["jvp", "pair", "jvps", "jaxjvp", "jaxpair", "jaxjvps", "jacobian"]
FORWARD += ["jaxjacobian", "jvp+vjp", "pair+arrays", "jvps+jaxvjp", "jaxjvp+vjp"]
FORWARD += ["jvp+jacobian", "vjp+jacobian", "jaxjvps+vjp", "jaxjvp+jaxvjp"]
REVERSE = ["vjp", "arrays", "jaxvjp", "jaxjvp", "jaxpair", "jaxjvps", "jacobian"]
REVERSE += ["jaxjacobian", "jvp+vjp", "pair+arrays", "jvps+jaxvjp", "jaxjvp+vjp"]
REVERSE += ["jvp+jacobian", "vjp+jacobian", "jaxjvps+vjp", "jaxjvp+jaxvjp"]
BOTH = [kind for kind in FORWARD if kind in REVERSE]
HIGHER = ["jaxjvp", "jaxjacobian", "jvps+jaxvjp", "jaxjvp+jaxvjp"]


def twin(x, y):
    return x * jnp.sin(y)


def loop(f):
    def run(x, y):
        return jax.lax.scan(lambda c, _: (f(c, y), c), x, None, length=3)

    return run


def branches(f):
    def run(x, y):
        return jax.lax.cond(x.sum() > 0, lambda: f(x, y), lambda: 2 * f(y, x))

    return run


def rows(f):
    def run(x, y):
        return jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), y)

    return run


PROGRAMS = {
    "plain": lambda f: f,
    "twice": lambda f: lambda x, y: f(f(x, y), x),
    "scan": loop,
    "cond": branches,
    "vmap": rows,
    "inner jit": lambda f: lambda x, y: jax.jit(f)(x, y) * 2,
    "remat": lambda f: jax.checkpoint(lambda x, y: f(f(x, y), y)),
    "scan of remat": lambda f: loop(jax.checkpoint(f)),
    "vmap of scan": lambda f: rows(loop(f)),
}


# These programs run with every kind of rules, the others with one kind for each path.
SHORT = ("plain", "scan", "vmap")
PATHS = ("jvp", "vjp", "arrays", "jacobian", "jaxjvp", "jvp+vjp")
BOTH_PATHS = ("jaxjvps", "jacobian", "jvp+vjp", "pair+arrays", "jvps+jaxvjp")


def cases(kinds):
    return [
        pytest.param(kind, program, id=f"{kind}-{name}")
        for name, program in PROGRAMS.items()
        for kind in kinds
        if name in SHORT or kind in PATHS
    ]


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), got, want)


def total(f):
    return lambda *args: sum(leaf.sum() for leaf in jax.tree.leaves(f(*args)))


@functools.cache  # of programs, which many kinds of rules share
def forward_of_twin(program):
    out = jax.jvp(program(twin), (X, Y), (Y, X))
    return jax.tree.map(np.asarray, out)


@functools.cache
def reverse_of_twin(program):
    out = jax.value_and_grad(total(program(twin)), (0, 1))(X, Y)
    return jax.tree.map(np.asarray, out)


def more(kind, program, kinds):
    """Whether a test also runs the program operation by operation, and differentiates by
    one argument alone. That compiles much, so only every program and every kind do, not
    every pair.
    """
    paths = [path for path in PATHS if path in kinds]
    turn = list(PROGRAMS.values()).index(program)
    return program is PROGRAMS["plain"] or kind == paths[turn % len(paths)]


@pytest.mark.parametrize(("kind", "program"), cases(FORWARD))
def test_forward(kind, program):
    f, want = program(make(kind)), forward_of_twin(program)
    same(jax.jit(lambda x, y: jax.jvp(f, (x, y), (y, x)))(X, Y), want)
    if more(kind, program, FORWARD):
        same(jax.jvp(f, (X, Y), (Y, X)), want)


@pytest.mark.parametrize(("kind", "program"), cases(REVERSE))
def test_reverse(kind, program):
    f, want = total(program(make(kind))), reverse_of_twin(program)
    both, second = jax.value_and_grad(f, (0, 1)), jax.grad(f, 1)
    same(jax.jit(both)(X, Y), want)
    if more(kind, program, REVERSE):
        same(jax.jit(second)(X, Y), want[1][1])
        same(both(X, Y), want)
        same(second(X, Y), want[1][1])


@pytest.mark.parametrize("kind", BOTH_PATHS)
def test_jacobians_linearize_and_batches_of_derivatives(kind):
    f = make(kind)
    for derive in (jax.jacfwd, jax.jacrev):
        same(jax.jit(derive(f, (0, 1)))(X, Y), derive(twin, (0, 1))(X, Y))
        same(derive(f)(X, Y), derive(twin)(X, Y))
    out, linear = jax.linearize(f, X, Y)
    same(out, twin(X, Y))
    same(linear(Y, X), jax.jvp(twin, (X, Y), (Y, X))[1])
    xs, ys = np.stack([X, Y]), np.stack([Y, X])
    same(jax.vmap(jax.grad(total(f)))(xs, ys), jax.vmap(jax.grad(total(twin)))(xs, ys))
    same(
        jax.jit(jax.vmap(jax.jacfwd(f), (None, 0)))(X, ys),
        jax.vmap(jax.jacfwd(twin), (None, 0))(X, ys),
    )
    same(
        jax.vmap(jax.vmap(jax.jacrev(f), (0, None)), (None, 0))(xs, ys),
        jax.vmap(jax.vmap(jax.jacrev(twin), (0, None)), (None, 0))(xs, ys),
    )
    # By hand, without partial evaluation.
    push = lambda t: jax.jvp(lambda x: f(x, Y), (X,), (t,))[1]
    same(jax.linear_transpose(push, X)(Y)[0], np.sin(Y) * Y)


@pytest.mark.parametrize("kind", [k for k in FORWARD if k in PATHS])
def test_forward_through_while_loop(kind):
    f = make(kind)

    def run(f):
        def body(state):
            return state[0] + 1, f(state[1], Y)

        return lambda x: jax.lax.while_loop(lambda s: s[0] < 3, body, (0, x))[1]

    same(jax.jvp(run(f), (X,), (Y,)), jax.jvp(run(twin), (X,), (Y,)))
    same(jax.jit(jax.jacfwd(run(f)))(X), jax.jacfwd(run(twin))(X))


@pytest.mark.parametrize("kind", HIGHER)
def test_higher_orders(kind):
    f = make(kind)
    smooth = lambda f: lambda x, y: (f(x, y) ** 2).sum()
    if kind != "jvps+jaxvjp":
        same(jax.jit(jax.hessian(smooth(f)))(X, Y), jax.hessian(smooth(twin))(X, Y))
        test_util.check_grads(f, (X, Y), order=2, atol=0.05, rtol=0.05)
    reverse = lambda f: jax.jacrev(jax.jacrev(smooth(f), 1), 1)
    same(reverse(f)(X, Y), reverse(twin)(X, Y))
    same(jax.jit(reverse(f))(X, Y), reverse(twin)(X, Y))

    def hvp(f):
        return jax.grad(lambda x: jax.vjp(smooth(f), x, Y)[1](1.0)[0] @ Y)(X)

    same(hvp(f), hvp(twin))


@pytest.mark.parametrize("kind", FORWARD)
def test_forward_along_tangents_of_tangents(kind):
    """The derivative is linear, so its derivative along tangents needs no new rule."""
    f = make(kind)

    def push(f):
        return lambda t: jax.jvp(f, (X, Y), (t, Y))[1]

    same(jax.jvp(push(f), (X,), (Y,)), jax.jvp(push(twin), (X,), (Y,)))
    if kind in BOTH:
        same(jax.jacrev(push(f))(X), jax.jacrev(push(twin))(X))


def test_functions_that_are_each_others_derivatives():
    sine = hc.host(np.sin, result=hc.results.elementwise, vmap_method="expand_dims")
    cosine = hc.host(np.cos, result=hc.results.elementwise, vmap_method="expand_dims")
    sine.defjvp(lambda p, t: cosine(*p) * t[0], where="jax")
    cosine.defjvp(lambda p, t: -sine(*p) * t[0], where="jax")
    test_util.check_grads(sine, (X,), order=3, atol=0.1, rtol=0.1)
    third = jax.grad(jax.grad(jax.grad(sine)))
    same(jax.jit(jax.vmap(third))(X), -np.cos(X))


def test_the_jacobian_of_a_jacobian(x64):
    """A HostFunction as a rule is JAX code, and may have rules."""
    cube = hc.host(lambda x: x**3, result=hc.results.like(0))
    first = hc.host(
        lambda x: np.diag(3 * x**2),
        result=lambda x: jax.ShapeDtypeStruct((*x.shape, *x.shape), x.dtype),
    )

    @first.defjacobian
    def _(x):
        out = np.zeros((x.size,) * 3)
        out[(np.arange(x.size),) * 3] = 6 * x
        return out

    cube.defjacobian(first)
    x = np.array([1.0, -2.0])
    same(jax.jacfwd(cube)(x), np.diag(3 * x**2))
    energy = lambda x: cube(x).sum()
    same(jax.jit(jax.hessian(energy))(x), np.diag(6 * x))
    same(jax.grad(lambda x: jax.jvp(energy, (x,), (x,))[1])(x), 9 * x**2)
    with pytest.raises(hc.errors.DerivativeError, match="itself differentiated"):
        jax.jacfwd(jax.hessian(energy))(x)


# --- Linear functions ---------------------------------------------------------------

MATRIX = np.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]], dtype=np.float32)


def linear(where, calls=None):
    calls = Calls() if calls is None else calls
    f = hc.host(
        calls.of("value")(lambda a, x: a @ x),
        result=lambda a, x: jax.ShapeDtypeStruct((a.shape[0],), x.dtype),
        nondiff=0,
    )
    f.deftranspose(calls.of("transpose")(lambda ct, a: a.T @ ct), where=where)
    return f


@pytest.mark.parametrize("where", ["host", "jax"])
def test_a_linear_function(where):
    f = functools.partial(linear(where), MATRIX)
    ct = np.array([2.0, -1.0], dtype=np.float32)
    same(jax.linear_transpose(f, X)(ct)[0], MATRIX.T @ ct)
    same(jax.jit(lambda ct: jax.linear_transpose(f, X)(ct))(ct)[0], MATRIX.T @ ct)
    same(jax.jvp(f, (X,), (Y,)), (MATRIX @ X, MATRIX @ Y))
    for derive in (jax.jacfwd, jax.jacrev):
        same(derive(f)(X), MATRIX)
        same(jax.jit(derive(f))(X), MATRIX)
    energy = lambda x: (f(x) ** 2).sum()
    want = 2 * MATRIX.T @ MATRIX
    for outer in (jax.jacfwd, jax.jacrev):
        for inner in (jax.jacfwd, jax.jacrev):
            same(jax.jit(outer(inner(energy)))(X), want)
    test_util.check_grads(f, (X,), order=3, atol=0.1, rtol=0.1)
    xs = np.stack([X, Y])
    same(jax.grad(lambda xs: (jax.vmap(f)(xs) ** 2).sum())(xs), xs @ want)
    same(jax.vmap(jax.grad(energy))(xs), xs @ want)
    # Rows share x, so its cotangents add up.
    many = np.stack([MATRIX, 2 * MATRIX])
    shared = lambda x: jax.vmap(linear(where), (0, None))(many, x).sum()
    same(jax.grad(shared)(X), 3 * MATRIX.sum(0))


def test_a_linear_function_of_several_arguments():
    f = hc.host(lambda x, y: 2 * x + 3 * y["a"], result=hc.results.like(0))
    f.deftranspose(lambda ct: (2 * ct, {"a": 3 * ct}))
    y = {"a": Y}
    x_bar, y_bar = jax.linear_transpose(f, X, y)(X)
    same((x_bar, y_bar), (2 * X, {"a": 3 * X}))
    same(jax.grad(lambda y: f(X, y).sum())(y), {"a": np.full(3, 3.0)})
    same(jax.jvp(lambda x: f(x, y), (X,), (X,)), (2 * X + 3 * Y, 2 * X))


def test_a_linear_function_is_called_once_a_direction():
    calls = Calls()
    f = functools.partial(linear("host", calls), MATRIX)
    jax.jit(jax.grad(lambda x: f(x).sum()))(X).block_until_ready()
    assert calls.take()["transpose"] == 1
    jax.linear_transpose(f, X)(X[:2])
    assert calls.take() == {"transpose": 1}


# --- Calls that are made -------------------------------------------------------------


def run(f, *args):
    return jax.block_until_ready(jax.jit(f)(*args))


def test_forward_mode_is_one_call():
    calls = Calls()
    f = make("pair+vjp", calls)
    run(lambda x, y: jax.jvp(f, (x, y), (y, x)), X, Y)
    assert calls.take() == {"jvp": 1}
    # If nobody needs the tangents of a loop, only the value remains.
    both = lambda c, _: (jax.jvp(f, (c, Y), (c, Y))[0], None)
    run(lambda x: jax.lax.scan(both, x, None, length=3)[0], X)
    assert calls.take() == {"value": 3}


def test_reverse_mode_does_not_run_the_function():
    calls = Calls()
    f = make("jvp+vjp", calls)
    run(jax.grad(total(f)), X, Y)
    assert calls.take() == {"fwd": 1, "bwd": 1}
    jax.grad(total(f))(X, Y)
    assert calls.take() == {"fwd": 1, "bwd": 1}


def test_remat_runs_the_function_and_then_both_rules():
    calls = Calls()
    f = make("vjp", calls)
    # The value is needed too, or the forward pass would be dead code.
    run(jax.value_and_grad(total(jax.checkpoint(f))), X, Y)
    assert calls.take() == {"value": 1, "fwd": 1, "bwd": 1}


def test_a_jacobian_is_one_call():
    calls = Calls()
    f = make("jacobian", calls)
    for derive in (jax.jacfwd, jax.jacrev):
        run(derive(f, (0, 1)), X, Y)
        assert calls.take()["jacobian"] == 1
        derive(f)(X, Y)
        assert calls.take()["jacobian"] == 1
    pullback = jax.vjp(f, X, Y)[1]
    calls.take()
    jax.vmap(pullback)(np.eye(3, dtype=np.float32))
    assert calls.take() == {}


def test_rows_of_tangents_share_one_value():
    calls = Calls()
    f = make("jvp", calls)
    run(lambda x: (f(x, Y), jax.jacfwd(f)(x, Y)), X)
    assert calls.take()["jvp"] == 3
    jax.jacfwd(f)(X, Y)
    assert calls.take() == {"value": 1, "jvp": 3}


@pytest.mark.parametrize("where", ["host", "jax"])
@pytest.mark.parametrize("number", [float, np.float32, np.asarray])
def test_pythons_numbers_as_primals_and_tangents(where, number):
    sine = hc.host(np.sin, result=hc.results.elementwise, vmap_method="expand_dims")
    cosine = hc.host(np.cos, result=hc.results.elementwise, vmap_method="expand_dims")
    rule = np.cos if where == "host" else cosine
    sine.defjvp(lambda p, t: rule(p[0]) * t[0], where=where)
    out, dot = jax.jvp(sine, (number(0.7),), (number(2.0),))
    np.testing.assert_allclose([out, dot], [np.sin(0.7), 2 * np.cos(0.7)], rtol=1e-6)


def test_zero_tangents_make_no_call():
    calls = Calls()
    f = make("jvp+vjp", calls)
    jax.jvp(lambda z: f(X, Y).sum() + z, (1.0,), (1.0,))
    assert calls.take() == {"value": 1}
    run(jax.grad(lambda z: f(X, Y).sum() * z), 1.0)
    assert calls.take() == {"value": 1}

    def unused(x):  # the cotangent of the result is zero
        f(x, Y)
        return x.sum()

    jax.grad(unused)(X)
    assert "bwd" not in calls.take()
    run(jax.grad(unused), X)
    assert calls.take() == {}


def test_only_tangents_that_are_there_are_sent():
    sent = []
    f = hc.host(value, result=hc.results.like(0))

    @f.defjvp
    def _(primals, tangents):
        sent.append(tangents)
        return push(primals, tangents)

    program = jax.make_jaxpr(lambda x: jax.jvp(lambda x: f(x, Y), (x,), (x,)))(X)
    (equation,) = [e for e in program.eqns if e.primitive.name == "host_jvp"]
    assert len(equation.invars) == 3  # two arguments, one tangent
    jax.jvp(lambda x: f(x, Y), (X,), (X,))
    assert sent[0][1].tolist() == [0, 0, 0]


# --- Arguments without tangents -------------------------------------------------------


def test_integers_statics_and_nondiff():
    seen = []
    f = hc.host(
        lambda x, n, how, w: x**n * w,
        result=hc.results.like(0),
        nondiff=(3,),
        name="power",
    )

    @f.defjvp
    def _(primals, tangents):
        seen.append(tangents)
        (x, n, how, w), x_dot = primals, tangents[0]
        assert how == "up"
        return n * x ** (n - 1) * w * x_dot

    def back(residuals, ct):
        x, n, w = residuals
        return n * x ** (n - 1) * w * ct, None, None, None

    f.defvjp(lambda x, n, how, w: (x**n * w, (x, n, w)), back)
    _, dot = jax.jvp(lambda x: f(x, 3, "up", 2.0), (X,), (Y,))
    same(dot, 6 * X**2 * Y)
    (tangents,) = seen
    assert tangents[1].dtype == jax.dtypes.float0
    assert tangents[2] is None
    assert tangents[3] is None
    same(jax.jit(jax.grad(lambda x: f(x, 3, "up", 2.0).sum()))(X), 6 * X**2)
    n_bar = jax.grad(lambda n: f(X, n, "up", 2.0).sum(), allow_int=True)(3)
    assert n_bar.dtype == jax.dtypes.float0
    with pytest.raises(
        hc.errors.DerivativeError, match=r"argument 3, which is in nondiff"
    ):
        jax.grad(lambda w: f(X, 3, "up", w).sum())(2.0)


def test_results_that_are_integers():
    f = hc.host(
        lambda x: {"n": np.int32(x.size), "y": np.sin(x)},
        result=lambda x: {"n": jax.ShapeDtypeStruct((), np.int32), "y": x},
    )
    seen = []

    @f.defjvp
    def _(primals, tangents):
        return {"n": None, "y": np.cos(primals[0]) * tangents[0]}

    def back(c, ct):
        seen.append(ct["n"].dtype)
        return (c * ct["y"],)

    f.defvjp(lambda x: (f.fn(x), np.cos(x)), back)
    out, dot = jax.jvp(f, (X,), (Y,))
    assert out["n"] == 3
    assert dot["n"].dtype == jax.dtypes.float0
    same(dot["y"], np.cos(X) * Y)
    same(jax.grad(lambda x: f(x)["y"].sum())(X), np.cos(X))
    assert seen == [jax.dtypes.float0]


@pytest.mark.parametrize("where", ["host", "jax"])
def test_rules_of_two_arguments_beside_a_result_that_is_an_integer(where):
    n, zero = jax.ShapeDtypeStruct((), np.int32), np.zeros((), jax.dtypes.float0)
    f = hc.host(lambda x, y: (np.int32(x.size), x * y), result=lambda x, y: (n, x))
    f.defjvps(
        lambda t, out, x, y: (zero, t * y),
        lambda t, out, x, y: (zero, x * t),
        where=where,
    )
    _, (_, dot) = jax.jvp(f, (X, X), (Y, 2 * Y))
    same(dot, X * Y + X * 2 * Y)


def test_shares_of_the_tangent_in_jax_code_are_fitted_one_by_one():
    f = hc.host(lambda x, y: (x + y, x * y), result=lambda x, y: (x, x))
    f.defjvps(
        lambda t, out, x, y: ([1.0, 2.0, 3.0], t * y),
        lambda t, out, x, y: (None, t * x),
        where="jax",
    )
    _, dots = jax.jvp(f, (X, Y), (X, Y))
    same(dots, ([1.0, 2.0, 3.0], 2 * X * Y))


def test_zeros_of_a_backward_rule_in_jax_code_for_symbolic_shapes():
    f = hc.host(np.add, result=hc.results.like(0))
    f.defvjp(lambda x, y: (f(x, y), None), lambda _, ct: (ct, None), where="jax")
    (n,) = jax.export.symbolic_shape("n")
    rows = jax.ShapeDtypeStruct((n,), np.float32)
    slopes = jax.grad(lambda x, y: f(x, y).sum(), (0, 1))
    assert [x.shape for x in jax.eval_shape(slopes, rows, rows)] == [(n,), (n,)]
    same(slopes(X, Y), (np.ones(3), np.zeros(3)))


class Both(NamedTuple):
    out: np.ndarray
    tangent: np.ndarray


@pytest.mark.parametrize("where", ["host", "jax"])
def test_a_result_and_its_tangent_in_a_tuple_with_names(where):
    f = hc.host(np.square, result=hc.results.like(0))
    f.defjvp(lambda p, t: Both(p[0] ** 2, 2 * p[0] * t[0]), where=where)
    same(jax.jvp(f, (X,), (Y,)), (X**2, 2 * X * Y))


def test_trees_of_arguments_and_results():
    f = hc.host(lambda p: (p["a"] * p["b"], p["a"].sum()), result="infer")
    f.defjvp(
        lambda p, t: (
            t[0]["a"] * p[0]["b"] + p[0]["a"] * t[0]["b"],
            t[0]["a"].sum(),
        )
    )
    f.defvjp(
        lambda p: ((p["a"] * p["b"], p["a"].sum()), p),
        lambda p, ct: ({"a": p["b"] * ct[0] + ct[1], "b": p["a"] * ct[0]},),
    )
    p = {"a": X, "b": Y}
    g = lambda p: (p["a"] * p["b"], p["a"].sum())
    same(jax.jvp(f, (p,), (p,)), jax.jvp(g, (p,), (p,)))
    same(jax.jit(jax.grad(total(f)))(p), jax.grad(total(g))(p))
    j = hc.host(g, result="infer")
    zero = np.zeros((3, 3), np.float32)
    j.defjacobian(
        lambda p: (
            {"a": np.diag(p["b"]), "b": np.diag(p["a"])},
            {"a": np.ones(3, np.float32), "b": zero[0]},
        )
    )
    same(jax.jacrev(j)(p), jax.jacrev(g)(p))
    same(jax.jvp(j, (p,), (p,)), jax.jvp(g, (p,), (p,)))


def test_whole_batches_reach_the_rules():
    calls = Calls()
    f = hc.host(np.sin, result=hc.results.like(0), vmap_method="expand_dims")
    f.defjvp(calls.of("jvp")(lambda p, t: np.cos(p[0]) * t[0]))
    spec = jax.ShapeDtypeStruct((), np.float32)
    f.defvjp(
        calls.of("fwd")(lambda x: (np.sin(x), np.cos(x))),
        calls.of("bwd")(lambda c, ct: (c * ct,)),
        residuals=spec,
    )
    same(run(jax.vmap(jax.grad(f)), X), np.cos(X))
    assert calls.take() == {"fwd": 1, "bwd": 1}
    same(run(lambda x: jax.jvp(jax.vmap(f), (x,), (x,))[1], X), np.cos(X) * X)
    assert calls.take() == {"jvp": 1}


class Empty:
    """A rule whose truth is False, as that of an empty container."""

    def __init__(self, rule):
        self.rule = rule

    def __len__(self):
        return 0

    def __call__(self, *args):
        return self.rule(*args)


def test_rules_that_are_false():
    x, y = jnp.array([1.0, 2.0, 3.0]), jnp.array([2.0, 4.0, 6.0])
    f = hc.host(lambda x, y: x * x * y, result=hc.results.like(0))
    f.defjvps(lambda t, out, x, y: 2 * x * y * t, Empty(lambda t, out, x, y: x * x * t))
    _, dots = jax.jvp(lambda y: f(x, y), (y,), (jnp.ones(3),))
    np.testing.assert_allclose(dots, x * x)

    g = hc.host(lambda x: x * x, result=hc.results.like(0))
    g.defvjp(Empty(lambda x: (x * x, x)), Empty(lambda x, ct: (2 * x * ct,)))
    np.testing.assert_allclose(jax.grad(lambda x: g(x).sum())(x), 2 * x)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit])
def test_linearize_with_a_backward_rule_and_a_jacobian(mode):
    x = jnp.array([1.0, 2.0])
    f = hc.host(lambda x: np.sin(x), result=hc.results.like(0))
    f.defvjp(
        lambda x: (np.sin(x), np.cos(x)),
        lambda r, ct: (r * ct,),
        residuals=jax.ShapeDtypeStruct((2,), np.float32),
    )
    f.defjacobian(lambda x: np.diag(np.cos(x)))
    _, pushed = jax.linearize(mode(f), x)
    np.testing.assert_allclose(pushed(jnp.ones(2)), np.cos(x), rtol=1e-6)


def test_a_result_is_inferred_once_for_each_dtype():
    calls = []

    def f(x, y):
        calls.append(1)
        return x * y

    host = hc.host(f, result="infer")
    host(jnp.float32(1), 2.0)
    before = len(calls)
    host(jnp.float32(1), np.float32(2))
    assert len(calls) == before + 1  # the call itself


# --- Arrays that outlive 64-bit mode --------------------------------------------------

with jax.enable_x64(True):
    OUTLIVING = jnp.array([1 / 3, 2 / 3, 1.5])


def squares(**rules):
    total = jax.ShapeDtypeStruct((), np.float32)
    f = hc.host(lambda x: np.float32((x * x).sum()), result=total, name="squares")
    for name, rule in rules.items():
        getattr(f, name)(*rule if isinstance(rule, tuple) else (rule,))
    return f


def in_jax(name, *rule):
    f = squares()
    getattr(f, name)(*rule, where="jax")
    return f


RULES_OF_SQUARES = {
    "vjp": squares(
        defvjp=(lambda x: (np.float32((x * x).sum()), x), lambda x, ct: (2 * x * ct,))
    ),
    "jacobian": squares(defjacobian=lambda x: 2 * x),
    "vjp in JAX": in_jax(
        "defvjp",
        lambda x: ((x * x).sum().astype("float32"), x),
        lambda x, ct: (2 * x * ct,),
    ),
    "jvp in JAX": in_jax(
        "defjvp", lambda p, t: 2 * (p[0] * t[0]).sum().astype("float32")
    ),
}


# Of JAX itself, which computes in 32 bits here.
truncates = pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("rule", RULES_OF_SQUARES)
@truncates
def test_gradients_of_arrays_that_outlive_64_bit_mode(rule, masked, mode):
    """As JAX's own: a gradient has the dtype of the argument, and so has its memory."""
    f = RULES_OF_SQUARES[rule]
    program = f.where(True) if masked else f
    got = mode(jax.grad(program))(OUTLIVING)
    assert got.dtype == np.asarray(got).dtype == np.float64
    wanted = 2 * np.asarray(OUTLIVING)
    rtol = 1e-15 if rule == "vjp" else 1e-6  # the others have JAX code
    np.testing.assert_allclose(got, wanted, rtol=rtol)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_tangents_of_arrays_that_outlive_64_bit_mode(masked, mode):
    seen = []

    def rule(primals, tangents):
        seen.extend(x.dtype.name for x in (*primals, *tangents))
        return np.float32(2 * (primals[0] * tangents[0]).sum())

    f = squares(defjvp=rule)
    program = f.where(True) if masked else f
    x = OUTLIVING
    got = mode(lambda x: jax.jvp(program, (x,), (x,))[1])(x)
    assert seen == ["float64"] * 2
    np.testing.assert_allclose(got, 2 * (np.asarray(x) ** 2).sum(), rtol=1e-6)


def test_a_pullback_that_outlives_64_bit_mode():
    sine = hc.host(np.sin, result=hc.results.like(0), name="sine")
    sine.defvjp(lambda x: (np.sin(x), x), lambda x, ct: (np.cos(x) * ct,))
    with jax.enable_x64(True):
        out, pull = jax.vjp(sine, OUTLIVING)
    (got,) = pull(out)
    assert got.dtype == np.asarray(got).dtype == np.float64
    x = np.asarray(OUTLIVING)
    np.testing.assert_allclose(got, np.cos(x) * np.sin(x), rtol=1e-15)


def test_examples_that_outlive_64_bit_mode_are_checked():
    sine = hc.host(
        lambda x: np.sin(x).astype(np.float32),
        result=jax.ShapeDtypeStruct((3,), np.float32),
        name="sine",
    )
    sine.defjvp(lambda p, t: (np.cos(p[0]) * t[0]).astype(np.float32))
    report = hc.testing.check(sine, OUTLIVING)
    assert report, report


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_rule_in_jax_code_that_returns_a_key(mode):
    f = hc.host(lambda x: x.sum(), result=jnp.float32(0), name="f")
    f.defvjp(lambda x: (x.sum(), x), lambda x, ct: (jax.random.key(3),), where="jax")
    with pytest.raises(hc.errors.DerivativeError, match=r"returned key<fry>\[\] where"):
        mode(jax.grad(f))(jnp.ones(2))
