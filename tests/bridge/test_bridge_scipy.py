"""`hc.bridge.scipy` against closed forms, finite differences and JAX-only solvers."""

from __future__ import annotations

import functools
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc

pytest.importorskip("scipy")

A = jnp.array([[3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, 1.5]])
B = jnp.array([1.0, -2.0, 0.5])
ROWS = jnp.stack([B, 2 * B, B + 1])
ZERO = jnp.zeros(3)


def close(got, want, tol=2e-4):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.shape(a) == jnp.shape(b)
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol)


# --- The same solution three ways, with a closed form ------------------------------------
#
# x is the solution of A x = sin(b): a root, a minimum of a quadratic function, and least
# squares. The args are a pytree.


def residual(x, args):
    return args["a"] @ x - jnp.sin(args["b"])


def energy(x, args):
    return x @ args["a"] @ x / 2 - x @ jnp.sin(args["b"])


def exact(x0, args):
    del x0
    return jnp.linalg.solve(args["a"], jnp.sin(args["b"]))


WAYS = {
    "root": lambda **how: hc.bridge.scipy.root(residual, **how),
    "minimize": lambda **how: hc.bridge.scipy.minimize(
        energy, **{"method": "trust-exact", "tol": 1e-12, **how}
    ),
    "least_squares": lambda **how: hc.bridge.scipy.least_squares(
        residual, **{"tol": 1e-12, **how}
    ),
}
TRANSFORMS = {
    "value": lambda f: f(B),
    "jit": lambda f: jax.jit(f)(B),
    "jvp": lambda f: jax.jvp(f, (B,), (B,)),
    "vjp": lambda f: jax.vjp(f, B)[1](B),
    "jacfwd": lambda f: jax.jacfwd(f)(B),
    "jacrev": lambda f: jax.jacrev(f)(B),
    "hessian": lambda f: jax.hessian(f)(B),
    "third": lambda f: jax.jacfwd(jax.hessian(f))(B),
    "vmap": lambda f: jax.vmap(f)(ROWS),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda b: f(b).sum()))(ROWS),
    "grad of vmap": lambda f: jax.grad(lambda b: (jax.vmap(f)(b) ** 2).sum())(ROWS),
    "vmap of hessian": lambda f: jax.vmap(jax.hessian(lambda b: (f(b) ** 3).sum()))(
        ROWS
    ),
    "remat": lambda f: jax.grad(jax.checkpoint(lambda b: jnp.sin(f(b)).sum()))(B),
    "scan": lambda f: jax.grad(
        lambda b: lax.scan(lambda c, x: (f(c) + x, c), b, ROWS)[0].sum()
    )(B),
    "linearize": lambda f: jax.linearize(f, B)[1](B),
}


def of_b(f):
    return lambda b: f(ZERO, {"a": A, "b": b})


@functools.cache
def wanted(transform):
    """What the closed form gives. It is the same for all ways."""
    run = jax.jit(lambda: TRANSFORMS[transform](of_b(exact)))
    return jax.tree.map(np.asarray, run())


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_closed_form(way, transform):
    """Each transformation runs operation by operation for one of the ways, in turn, and
    compiled for the others. "value" and "jit" are what they say. Two that consist of
    others, with hundreds of operations, are always compiled.
    """
    run = lambda: TRANSFORMS[transform](of_b(WAYS[way]()))
    turn = [*TRANSFORMS].index(transform) + [*WAYS].index(way)
    compiled = turn % len(WAYS) or transform in ("third", "vmap of hessian")
    if transform not in ("value", "jit") and compiled:
        run = jax.jit(run)
    close(run(), wanted(transform), 1e-3)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_64_bits(way, x64):
    args = {"a": jnp.float64(A), "b": jnp.float64(B)}
    solve = way()
    f = lambda args: solve(jnp.zeros(3), args)
    close(f(args), exact(None, args), 1e-9)

    def derivatives(f):
        """The first two, in both modes."""
        first = lambda b: f({**args, "b": b})
        each = (jax.jacrev(first), jax.jacfwd(jax.jacrev(first)), jax.jacfwd(first))
        return jax.jit(lambda b: [derivative(b) for derivative in each])(args["b"])

    close(derivatives(f), derivatives(lambda args: exact(None, args)), 1e-9)
    assert f(args).dtype == jnp.float64
    assert solve(ZERO.astype(jnp.float32), args).dtype == jnp.float32


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_solves_in_float64_from_float32(way):
    solve = way()
    got = solve(ZERO, {"a": A, "b": B})
    want = np.linalg.solve(np.float64(A), np.sin(np.float64(B)))
    np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_check_of_host_functions(way):
    assert hc.testing.check(way(tol=1e-7), (ZERO, {"a": A, "b": B}))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_narrow_dtypes(dtype):
    root = hc.bridge.scipy.root(lambda x, b: x**3 - b)
    x, slope = jax.value_and_grad(lambda b: root(jnp.ones((), dtype), b))(dtype(8))
    assert x.dtype == slope.dtype == dtype
    close((x, slope), (dtype(2), dtype(1 / 12)), 1e-2)


def test_the_first_guess_has_no_influence():
    root = hc.bridge.scipy.root(lambda x: x**2 - 2)
    assert jax.grad(root)(1.0) == 0
    assert jax.jvp(root, (1.0,), (1.0,))[1] == 0
    root = hc.bridge.scipy.root(residual)
    assert not jax.jacobian(root)(ZERO, {"a": A, "b": B}).any()


def test_trees_integers_static_arguments_and_keywords():
    @hc.bridge.scipy.root(name="pair")
    def pair(x, args, n, how="sum"):
        assert how == "sum"
        a, b = args
        return [x["p"] ** n - a, (x["q"] - b["c"] * x["p"],)]

    x0 = {"p": jnp.ones(2), "q": jnp.zeros(2)}
    args = (jnp.array([4.0, 9.0]), {"c": jnp.float32(3)})
    close(pair(x0, args, 2), {"p": jnp.array([2.0, 3.0]), "q": jnp.array([6.0, 9.0])})
    slope = jax.jit(jax.grad(lambda args: pair(x0, args, 2, how="sum")["q"].sum()))(
        args
    )
    close(slope, (jnp.array([3 / 4, 3 / 6]), {"c": jnp.float32(5)}))
    assert (
        jax.grad(lambda n: pair(x0, args, n)["p"].sum(), allow_int=True)(2).dtype
        == jax.dtypes.float0
    )


def test_a_function_that_calls_the_host():
    cube = hc.host(lambda x: x**3, result=hc.results.like(0), vmap_method="expand_dims")
    cube.defjvps(lambda t, _, x: 3 * x**2 * t, where="jax")
    root = hc.bridge.scipy.root(lambda x, b: cube(x) - b)
    close(jax.jit(jax.value_and_grad(lambda b: root(1.0, b)))(8.0), (2.0, 1 / 12))


def test_finite_differences_of_a_curve_fit():
    @hc.bridge.scipy.least_squares(tol=1e-14)
    def fit(p, t, y):
        return p["scale"] * jnp.exp(p["rate"] * t) - y

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        t = jnp.linspace(0.0, 1.0, 12)
        y = jnp.asarray(2 * np.exp(-t) + 0.3 * rng.normal(size=12))  # large residuals
        p0 = {"scale": jnp.ones(()), "rate": jnp.zeros(())}
        f = jax.jit(lambda y: fit(p0, t, y)["rate"])
        got, h = jax.grad(f)(y), 1e-5
        want = [(f(y + h * e) - f(y - h * e)) / (2 * h) for e in np.eye(12)]
        close(got, jnp.asarray(want), 1e-6)


# --- Methods and options ------------------------------------------------------------------

PUBLIC = {
    "minimize": (
        "BFGS CG L-BFGS-B TNC SLSQP Newton-CG dogleg trust-ncg trust-krylov trust-exact",
        {"tol": 1e-6},
    ),
    "least_squares": ("trf dogbox lm", {"tol": 1e-10}),
}
EXACT = jax.jit(lambda b: exact(ZERO, {"a": A, "b": b}))
METHODS = [(of, method) for of, (all_, _) in PUBLIC.items() for method in all_.split()]


@pytest.mark.parametrize(("of", "method"), METHODS)
def test_methods(of, method):
    solve = WAYS[of](method=method, **PUBLIC[of][1])
    f = lambda b: solve(ZERO, {"a": A, "b": b})
    close(jax.jit(f)(B), EXACT(B), 1e-3)
    close(jax.jacobian(f)(B), jax.jacobian(EXACT)(B), 1e-3)


def test_options_reach_scipy():
    args = {"a": A, "b": B}
    cubic = lambda x: x**3 - 9
    stopped = hc.bridge.scipy.root(cubic, options={"maxfev": 1}, full_output=True)
    assert not stopped(1.0)[1].success
    for of, options in {
        "minimize": {"maxiter": 1},
        "least_squares": {"max_nfev": 1},
    }.items():
        how = {"method": "BFGS"} if of == "minimize" else {}
        stopped = WAYS[of](options=options, full_output=True, **how)
        assert not stopped(ZERO, args)[1].success
        assert WAYS[of](full_output=True, tol=1e-8)(ZERO, args)[1].success


def test_compiled_once():
    traces = []

    def f(x, b):
        traces.append(x.dtype)
        return x**3 - b

    root = hc.bridge.scipy.root(f)
    x0 = jnp.ones(2)
    root(x0, x0)
    before = len(traces)
    assert jnp.float64 in traces
    for b in (2.0, 3.0, 4.0):
        close(root(x0, b * x0), b ** (1 / 3) * x0)
        close(jax.jit(lambda b: root(x0, b))(b * x0), b ** (1 / 3) * x0)
    assert len(traces) == before


# --- Bounds -------------------------------------------------------------------------------

BOUNDED = [("minimize", m) for m in ("L-BFGS-B", "TNC", "SLSQP")]
BOUNDED += [("least_squares", m) for m in ("trf", "dogbox")]


@pytest.mark.parametrize(("of", "method"), BOUNDED)
def test_bounds(of, method):
    """What is free solves the equations of what is free."""
    args = {"a": A, "b": B}
    low = jnp.array([-jnp.inf, -0.5, -jnp.inf])
    solve = WAYS[of](method=method, tol=1e-10, bounds=(low, 10.0))

    def reduced(a, b):
        fixed = jnp.array([0.0, -0.5, 0.0])
        matrix, right = a, jnp.sin(b)
        if of == "least_squares":
            matrix, right = a.T @ a, a.T @ right
        free = np.array([0, 2])
        found = jnp.linalg.solve(matrix[free][:, free], (right - matrix @ fixed)[free])
        return fixed.at[free].set(found)

    got = jax.jit(lambda b: solve(ZERO, {**args, "b": b}))
    want = lambda b: reduced(A, b)
    found = got(B)
    close(found, jax.jit(want)(B), 1e-3)
    assert found[1] == -0.5
    close(jax.jacobian(got)(B), jax.jit(jax.jacobian(want))(B), 1e-3)
    close(jax.vmap(got)(ROWS)[0], found)


@pytest.mark.parametrize("most", [np.inf, 1e300, jnp.float32(9)])
def test_bounds_of_a_tree(most):
    low = {"p": 0.0, "q": np.array([1.0, -np.inf])}
    high = {"p": most, "q": most} if most == np.inf else most

    @hc.bridge.scipy.minimize(bounds=(low, high), tol=1e-10)
    def near(x, c):
        total = ((x["p"] - c) ** 2).sum() + ((x["q"] - c) ** 2).sum()
        return {"total": total[None]}  # one number, in a tree

    x0 = {"p": jnp.float32(2), "q": jnp.ones(2)}
    close(near(x0, -3.0), {"p": jnp.float32(0), "q": jnp.array([1.0, -3.0])})
    slope = jax.jacobian(near, 1)(x0, -3.0)
    close(slope, {"p": jnp.float32(0), "q": jnp.array([0.0, 1.0])})


# --- What has no solution, or no derivative ----------------------------------------------

FAILS = {
    "root": lambda **how: hc.bridge.scipy.root(lambda x: x**2 + 1, name="none", **how),
    "minimize": lambda **how: hc.bridge.scipy.minimize(
        lambda x: jnp.exp(-x), name="none", tol=1e-300, options={"maxiter": 3}, **how
    ),
    "least_squares": lambda **how: hc.bridge.scipy.least_squares(
        lambda x: jnp.exp(-x), name="none", options={"max_nfev": 3}, **how
    ),
}
MESSAGES = {
    "root": "iteration is not making good progress",
    "minimize": "Maximum number of iterations has been exceeded",
    "least_squares": "maximum number of function evaluations",
}


@pytest.mark.parametrize("of", FAILS)
def test_a_failure_raises_with_scipys_message(of):
    text = f"`none` found no solution: .*{MESSAGES[of]}.*scipy.optimize.{of}, method="
    with pytest.raises(hc.errors.HostcallError, match=text), hc.reraise():
        jax.block_until_ready(jax.jit(FAILS[of]())(1.0))


@pytest.mark.parametrize("of", FAILS)
def test_a_failure_is_a_flag_with_full_output(of):
    solve = jax.jit(FAILS[of](full_output=True))
    x, record = solve(1.0)
    assert not record.success
    assert record.nfev > 0
    assert jnp.isfinite(x)


def test_rows_that_fail_are_flagged():
    root = hc.bridge.scipy.root(lambda x, c: x**2 - c, full_output=True)
    c = jnp.array([1.0, -1.0, 4.0])
    x, record = jax.jit(jax.vmap(root, (None, 0)))(1.5, c)
    assert record.success.tolist() == [True, False, True]
    close(x[::2], jnp.array([1.0, 2.0]))
    slopes = jax.vmap(jax.grad(lambda c: root(1.5, c)[0]))(c)
    close(slopes[::2], jnp.array([1 / 2, 1 / 4]))


def test_an_error_of_a_row_says_which():
    root = hc.bridge.scipy.root(lambda x, c: x**2 - c)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="row 1|index 1|\\[1\\]|\\(1,\\)"
    ):
        jax.block_until_ready(
            jax.jit(jax.vmap(root, (None, 0)))(1.5, jnp.array([1.0, -1.0]))
        )


def test_a_singular_jacobian():
    root = hc.bridge.scipy.root(lambda x, c: (x - c) ** 3)
    assert not jnp.isfinite(jax.grad(lambda c: root(c, c))(1.0))  # starts at the root
    close(root(1.0, 1.0), 1.0)


NANS = {  # a first guess and an argument
    "start": (jnp.array([0.0, jnp.nan, 0.0]), B),
    "argument": (ZERO, jnp.array([0.0, jnp.nan, 0.0])),
}


@pytest.mark.parametrize(("of", "method"), [("root", None), *METHODS])
@pytest.mark.parametrize(("x0", "b"), NANS.values(), ids=NANS)
def test_nan_is_no_solution(of, method, x0, b):
    """Some of SciPy's solvers call it one, and some raise an error of their own."""
    how = {} if method is None else {"method": method, "tol": 1e-6}
    solve = WAYS[of] if method else lambda **how: hc.bridge.scipy.root(residual, **how)
    args = {"a": A, "b": b}
    with (
        pytest.raises(hc.errors.HostcallError, match="found no solution"),
        hc.reraise(),
    ):
        jax.block_until_ready(jax.jit(solve(**how))(x0, args))
    x, record = jax.jit(solve(full_output=True, **how))(x0, args)
    assert x.shape == (3,)
    assert not record.success


def test_rows_with_a_nan_are_flagged():
    fit = hc.bridge.scipy.least_squares(lambda x, c: jnp.log(x) - c, full_output=True)
    c = jnp.array([0.0, jnp.nan, 1.0])
    x, record = jax.jit(jax.vmap(fit, (None, 0)))(1.0, c)
    assert record.success.tolist() == [True, False, True]
    close(x[::2], jnp.exp(c[::2]))


def test_an_infinite_gradient_at_a_bound_is_a_minimum():
    least = hc.bridge.scipy.minimize(lambda x: jnp.sqrt(x).sum(), bounds=(0.0, 1.0))
    close(least(jnp.full(2, 0.5)), jnp.zeros(2))


def test_no_minimum():
    falls = hc.bridge.scipy.minimize(
        lambda x: -jnp.exp(x), method="L-BFGS-B", full_output=True
    )
    assert not falls(700.0)[1].success


def test_a_wrong_option_is_not_a_failed_solve():
    wrong = hc.bridge.scipy.least_squares(residual, options={"tr_solver": "none"})
    with pytest.raises(ValueError, match="tr_solver"), hc.reraise():
        jax.block_until_ready(jax.jit(wrong)(ZERO, {"a": A, "b": B}))


REFUSED = {
    "without gradient": (
        lambda: hc.bridge.scipy.minimize(energy, method="Nelder-Mead"),
        "may end where the gradient is not zero",
    ),
    "bounds of BFGS": (
        lambda: hc.bridge.scipy.minimize(energy, method="BFGS", bounds=(0, 1)),
        "or take no bounds",
    ),
    "bounds as pairs": (
        lambda: hc.bridge.scipy.minimize(energy, bounds=[(0, 1)] * 3),
        r"bounds= of `energy` should be a tuple \(low, high\)",
    ),
    "loss": (
        lambda: hc.bridge.scipy.least_squares(residual, options={"loss": "huber"}),
        "Another loss= is another problem",
    ),
    "whole batches": (
        lambda: hc.bridge.scipy.root(residual, vmap_method="expand_dims"),
        "one row at a time",
    ),
    "no function": (lambda: hc.bridge.scipy.root(3), r"hc.bridge.scipy.root\(fun\)"),
    "an integer": (lambda: hc.bridge.scipy.root(lambda x: x)(1), "Write 1.0 for 1"),
    "complex": (lambda: hc.bridge.scipy.root(lambda x: x)(1j), "real floating arrays"),
    "another size": (
        lambda: hc.bridge.scipy.root(lambda x: x[:2])(ZERO),
        "as many real floating numbers as the unknown has",
    ),
    "no number": (lambda: hc.bridge.scipy.minimize(lambda x: x)(ZERO), "return one real floating number"),
    "integers": (
        lambda: hc.bridge.scipy.least_squares(lambda x: x.astype(int))(ZERO),
        r"should return real floating numbers for .*, got int32\[3\]",
    ),
    "options as a list": (
        lambda: hc.bridge.scipy.root(residual, options=[("maxfev", 9)]),
        "options= of `residual` should be a dict of options of scipy.optimize.root",
    ),
    "tol as a text": (lambda: hc.bridge.scipy.root(residual, tol="1e-8"), "a number of at least 0"),
    "full_output": (
        lambda: hc.bridge.scipy.root(residual, full_output="no"),
        "full_output= of `residual` should be True or False, got 'no'",
    ),
    "an error": (
        lambda: hc.bridge.scipy.root(lambda x: x @ jnp.ones(2), name="f")(ZERO),
        "`f` failed when it was traced",
    ),
    "bounds that don't fit": (
        lambda: hc.bridge.scipy.minimize(lambda x: x @ x, bounds=(np.zeros(2), 1.0))(ZERO),
        "structure of x",
    ),
    "bounds that cross": (
        lambda: hc.bridge.scipy.minimize(lambda x: x @ x, bounds=(1.0, 0.0))(ZERO),
        "low is below high",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("use", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(use, text):
    with pytest.raises(hc.errors.SpecError, match=text):
        use()


def test_values_of_the_program_in_a_closure_are_refused():
    def run(b):
        return hc.bridge.scipy.root(lambda x: x**3 - b)(1.0)

    with pytest.raises(hc.errors.SpecError, match="uses a traced value of the program"):
        jax.jit(run)(8.0)


def test_without_scipy(monkeypatch):
    for module in ("scipy", "scipy.optimize"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="Install it: pip install scipy;"):
        hc.bridge.scipy.root(residual)


# --- As other host functions ----------------------------------------------------------------


def module_level(x, b):
    return x**3 - b


def test_pickle_and_export():
    again = pickle.loads(pickle.dumps(hc.bridge.scipy.root(module_level)))
    close(jax.grad(again, 1)(1.0, 8.0), 1 / 12)
    pytest.importorskip("flatbuffers")
    named = hc.register("tests.scipy.cube_root")(hc.bridge.scipy.root(module_level))
    exported = hc.export(jax.jit(jax.grad(named, 1)))(jnp.float32(1), jnp.float32(8))
    close(hc.load(bytes(exported)).call(jnp.float32(1), jnp.float32(8)), 1 / 12)


def test_where_parallel_rows_and_a_limit():
    root = hc.bridge.scipy.root(module_level, vmap_method="parallel", timeout=60)
    b = jnp.array([1.0, -jnp.inf, 27.0])
    go = jnp.isfinite(b)
    masked = lambda b, go: root.where(go, fill=0.0)(1.0, b)
    close(jax.jit(jax.vmap(masked))(b, go), jnp.array([1.0, 0.0, 3.0]))
    slopes = jax.jit(jax.vmap(jax.grad(masked)))(b, go)
    close(slopes, jnp.array([1 / 3, 0.0, 1 / 27]))


# --- Over several devices -----------------------------------------------------------------

KINDS = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)


SHARDED = np.eye(4, dtype=np.float32) * 3 + 0.5, np.arange(4, dtype=np.float32)


def derivatives_of(f):
    loss = lambda a, b: (f(jnp.zeros(4), {"a": a, "b": b}) ** 2).sum()

    def run(a, b):
        along = jax.jvp(loss, (a, b), (a, b))
        return along, jax.grad(loss, 1)(a, b), jax.hessian(loss, 1)(a, b)

    return run


@functools.cache
def wanted_of_shards():
    return jax.tree.map(np.asarray, jax.jit(derivatives_of(exact))(*SHARDED))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_sharded_args(way, kind):
    """Explicit axes of a mesh are part of types, which JAX's own code can't mix.

    Each way is compiled for both kinds, and runs operation by operation for one, in turn.
    """
    mesh = jax.make_mesh((2,), ("i",), axis_types=(kind,))
    got = derivatives_of(WAYS[way]())
    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, jax.P("i"))
        sharded = [jax.device_put(x, place) for x in SHARDED]
        close(jax.jit(got)(*sharded), wanted_of_shards(), 1e-3)
        if ([*WAYS].index(way) + KINDS.index(kind)) % 2:
            close(got(*sharded), wanted_of_shards(), 1e-3)


# --- Ctrl-C -------------------------------------------------------------------------------

WHERE = {"the main thread": "b", "a thread of XLA": "b + 0 * (m @ m)[0, 0]"}


@pytest.mark.parametrize("b", WHERE.values(), ids=WHERE)
def test_ctrl_c_ends_a_solve_at_its_next_evaluation(run_python, b):
    done = run_python(
        """
        import os, signal, threading
        import jax, jax.numpy as jnp, numpy as np
        import hostcall as hc

        third, seen = threading.Event(), []
        def note(x):
            seen.append(x)
            if len(seen) == 3:
                third.set()
            elif len(seen) > 3:
                threading.Event().wait(0.05)

        def rosenbrock(x, b):  # takes thousands of evaluations
            hc.call(note, None, jax.lax.stop_gradient(x[0]), order="unordered")
            return (b * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

        solve = hc.bridge.scipy.minimize(rosenbrock, method="CG", tol=1e-12)
        m = jnp.ones((1000, 1000))
        f = jax.jit(lambda x, b, m: solve(x, BASE))

        def interrupt():
            third.wait()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        try:
            print(np.asarray(f(jnp.zeros(200), 100.0, m)))
        except KeyboardInterrupt:
            print("interrupted")
        os._exit(0)
        """.replace("BASE", b)
    )
    assert done.stdout.splitlines() == ["interrupted"]


# --- JAX-only solvers -----------------------------------------------------------------------


def test_optimistix():
    optx = pytest.importorskip("optimistix", reason="optimistix is not installed")
    args = {"a": A, "b": B}
    fn = lambda x, args: residual(x, args) + x**3
    root = hc.bridge.scipy.root(fn)
    theirs = lambda args: optx.root_find(fn, optx.Newton(1e-6, 1e-6), ZERO, args).value
    close(root(ZERO, args), theirs(args))
    close(jax.jacrev(root, 1)(ZERO, args), jax.jacrev(theirs)(args), 1e-3)


def test_jaxopt():
    jaxopt = pytest.importorskip("jaxopt", reason="jaxopt is not installed")
    fn = lambda x, args: energy(x, args) + (x**4).sum()
    ours = hc.bridge.scipy.minimize(fn, tol=1e-8)
    theirs = jaxopt.LBFGS(fun=fn, tol=1e-6)
    f = lambda b: ours(ZERO, {"a": A, "b": b})
    g = lambda b: theirs.run(ZERO, {"a": A, "b": b}).params
    close(f(B), g(B), 1e-3)
    close(jax.jacrev(f)(B), jax.jacrev(g)(B), 1e-2)
