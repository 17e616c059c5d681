"""hc.testing.check: correct rules pass, and each mistake is found by the check for it."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

X = np.linspace(0.2, 1.2, 5, dtype=np.float32)
Y = np.float32(1.5)


def right():
    f = hc.host(lambda x, y: np.sin(x) * y, result=hc.results.like(0), name="right")
    f.defjvp(lambda p, t: np.cos(p[0]) * p[1] * t[0] + np.sin(p[0]) * t[1])
    f.defvjp(
        lambda x, y: (np.sin(x) * y, (x.copy(), y.copy())),
        lambda res, ct: (
            ct * np.cos(res[0]) * res[1],
            (ct * np.sin(res[0])).sum().astype(np.float32),
        ),
    )
    return f


def statuses(report):
    return {c.name: c.status for c in report.checks}


def test_a_right_function():
    report = hc.testing.check(right(), (X, Y))
    assert report, str(report)
    assert statuses(report) == {
        "result": "passed",
        "purity": "passed",
        "jit": "passed",
        "vmap": "passed",
        "jvp": "passed",
        "vjp": "passed",
        "transpose": "left out",
        "lent arguments": "passed",
        "threads": "passed",
    }
    lines = str(report).splitlines()
    assert lines[0] == "hc.testing.check of `right`"
    assert lines[1] == "passed   result: float32[5]"
    assert "passed   vmap: all arguments, and each alone" in lines
    assert "against the forward derivative" in str(report)


def test_several_examples_and_one_argument():
    f = hc.host(np.cumsum, result=hc.results.like(0))
    report = hc.testing.check(f, X, (X * 2,), jnp.ones(3))
    assert report
    assert [c.name for c in report.checks][:2] == [
        "result (example 0)",
        "purity (example 0)",
    ]
    assert len(report.checks) == 27
    assert "passed   vmap (example 0): one argument" in str(report).splitlines()


def test_a_linear_function():
    a = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    f = hc.host(lambda x: a @ x, result=spec)
    f.deftranspose(lambda ct: a.T @ ct)
    report = hc.testing.check(f, X)
    assert report, str(report)
    assert statuses(report)["transpose"] == "passed"
    wrong = hc.host(lambda x: a @ x, result=spec)
    wrong.deftranspose(lambda ct: a.T @ ct * 2)
    assert {c.name for c in hc.testing.check(wrong, X).failed} >= {"transpose"}
    bent = hc.host(lambda x: a @ x + 1, result=spec)
    bent.deftranspose(lambda ct: a.T @ ct)
    (found,) = [c for c in hc.testing.check(bent, X).failed if c.name == "transpose"]
    assert "not linear" in found.detail


def plain(fn, **options):
    return hc.host(fn, **{"result": hc.results.like(0), **options})


def test_another_result():
    report = hc.testing.check(plain(lambda x: x[:2]), X)
    assert statuses(report) == {"result": "failed"}
    assert "ResultError" in report.failed[0].detail
    assert not report


def test_what_it_raises():
    def fails(x):
        raise KeyError("k")

    (found,) = hc.testing.check(plain(fails), X).checks
    assert (found.status, found.detail) == ("failed", "KeyError: 'k'")


def test_an_impure_function():
    count = iter(range(1000))
    report = hc.testing.check(plain(lambda x: x + next(count)), X)
    assert statuses(report)["purity"] == "failed"
    assert "a second call gives another result" in str(report)


def test_a_wrong_batching_rule():
    f = plain(lambda x: x / np.sqrt((x**2).sum()), vmap_method="expand_dims")
    (found,) = hc.testing.check(f, X).failed
    assert found.name == "vmap"
    assert "vmap over all arguments differs from a loop" in found.detail


def test_wrong_derivatives():
    f = plain(lambda x: np.sin(x))
    f.defjvp(lambda p, t: -np.cos(p[0]) * t[0])
    (found,) = hc.testing.check(f, X).failed
    assert found.name == "jvp"
    assert "differs from differences" in found.detail
    g = plain(lambda x: np.sin(x))
    g.defvjp(lambda x: (np.sin(x), x), lambda x, ct: (ct * np.sin(x),))
    report = hc.testing.check(g, X)
    assert statuses(report)["jvp"] == "left out"
    (found,) = report.failed
    assert found.name == "vjp"
    assert "by differences" in found.detail


def test_no_derivatives_are_no_failure():
    report = hc.testing.check(plain(np.sin), X)
    assert report
    assert statuses(report)["jvp"] == statuses(report)["vjp"] == "left out"
    (jvp,) = [c for c in report.checks if c.name == "jvp"]
    assert "`sin` has no derivative rule" in jvp.detail


def test_arguments_that_are_kept_or_written():
    kept = []

    def keeps(x):
        kept.append(x)
        return x * 2

    def writes(x):
        x *= 2
        return x

    for fn, text in ((keeps, "keeps a view"), (writes, "writes to its arguments")):
        report = hc.testing.check(plain(fn), X)
        assert report, str(report)
        (found,) = [c for c in report.checks if c.name == "lent arguments"]
        assert text in found.detail
        kept.clear()


def test_a_function_that_threads_upset():
    state = {}

    def upset(x):
        state["x"] = x.copy()
        time.sleep(1e-3)  # another thread comes between the lines around it
        return state["x"] * 2

    before = set(threading.enumerate())
    report = hc.testing.check(plain(upset), X)
    assert statuses(report)["threads"] == "failed"
    # "Dummy-": threads of XLA, which stay.
    left = {t.name for t in threading.enumerate() if t not in before}
    assert not [name for name in left if not name.startswith(("hostcall-", "Dummy-"))]


def test_effects_leave_most_out():
    report = hc.testing.check(plain(np.sin, order="ordered"), X)
    assert report
    left = [c for c in report.checks if c.status == "left out"]
    assert len(left) == 8
    assert all("order='ordered'" in c.detail or "linear" in c.detail for c in left)


def test_integers_trees_and_static_arguments():
    def host(tree, n, name):
        assert name == "a"
        return {"y": tree["x"] * n, "n": n + 1}

    spec = {
        "y": jax.ShapeDtypeStruct((5,), jnp.float32),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
    }
    f = hc.host(host, result=spec)
    f.defjvp(lambda p, t: {"y": t[0]["x"] * p[1], "n": None}, where="host")
    report = hc.testing.check(f, ({"x": X}, np.int32(3), "a"))
    assert statuses(report)["vmap"] == "passed", str(report)


def test_wide_numbers_are_compared_more_closely(x64):
    f = plain(np.sin)
    f.defjvp(lambda p, t: np.cos(p[0]) * t[0] * (1 + 1e-3))
    assert hc.testing.check(f, np.linspace(0, 1, 5)).failed
    assert hc.testing.check(f, np.linspace(0, 1, 5), rtol=1e-2)


# --- Complex numbers -------------------------------------------------------------------

_random = np.random.default_rng(3)
Z = (_random.normal(size=4) + 1j * _random.normal(size=4)).astype(np.complex64)
R = _random.normal(size=4).astype(np.float32)
MATRIX = (_random.normal(size=(3, 4)) + 1j * _random.normal(size=(3, 4))).astype("c8")
F32, C64 = (jax.ShapeDtypeStruct((4,), d) for d in (jnp.float32, jnp.complex64))

# Function, tangent of (primals, tangents), cotangents of (primals, ct), result,
# arguments. Holomorphic, not holomorphic, from and to real numbers.
COMPLEX = {
    "square": (
        lambda z: z * z,
        lambda p, t: 2 * p[0] * t[0],
        lambda p, ct: (2 * p[0] * ct,),
        C64,
        (Z,),
    ),
    "large": (
        lambda z: z * z,
        lambda p, t: 2 * p[0] * t[0],
        lambda p, ct: (2 * p[0] * ct,),
        C64,
        (1000 * Z,),
    ),
    "exp": (
        np.exp,
        lambda p, t: np.exp(p[0]) * t[0],
        lambda p, ct: (np.exp(p[0]) * ct,),
        C64,
        (Z,),
    ),
    "conj": (
        np.conj,
        lambda p, t: np.conj(t[0]),
        lambda p, ct: (np.conj(ct),),
        C64,
        (Z,),
    ),
    "to real": (
        lambda z: abs(z) ** 2,
        lambda p, t: 2 * np.real(np.conj(p[0]) * t[0]),
        lambda p, ct: (2 * ct * np.conj(p[0]),),
        F32,
        (Z,),
    ),
    "from real": (
        lambda x: np.exp(1j * x),
        lambda p, t: 1j * np.exp(1j * p[0]) * t[0],
        lambda p, ct: (np.real(1j * np.exp(1j * p[0]) * ct),),
        C64,
        (R,),
    ),
    "of both": (
        lambda z, x: np.conj(z) * x,
        lambda p, t: np.conj(t[0]) * p[1] + np.conj(p[0]) * t[1],
        lambda p, ct: (np.conj(ct * p[1]), np.real(ct * np.conj(p[0]))),
        C64,
        (Z, R),
    ),
}


def ruled(fn, tangent, cotangents, result):
    wide = bool(jax.config.jax_enable_x64)

    def spec(*args):
        dtype = np.result_type(result.dtype, np.float64) if wide else result.dtype
        return jax.ShapeDtypeStruct(args[0].shape, dtype)

    f = hc.host(fn, result=spec)
    f.defjvp(tangent)
    f.defvjp(lambda *p: (fn(*p), p), cotangents)
    return f


@pytest.mark.parametrize("wide", [False, True], ids=["complex64", "complex128"])
@pytest.mark.parametrize(
    ("fn", "tangent", "cotangents", "result", "args"), COMPLEX.values(), ids=COMPLEX
)
def test_complex_rules(fn, tangent, cotangents, result, args, wide):
    with jax.enable_x64(wide):
        if wide:
            args = tuple(x.astype(np.result_type(x, np.float64)) for x in args)
        report = hc.testing.check(ruled(fn, tangent, cotangents, result), args)
        assert report, str(report)
        assert statuses(report)["jvp"] == statuses(report)["vjp"] == "passed"
        # JAX has the same conventions: its own derivatives pass.
        jaxs = {np.exp: jnp.exp, np.conj: jnp.conj}.get(fn)
        if jaxs is not None:
            out, pull = jax.vjp(jaxs, *args)
            np.testing.assert_allclose(pull(out)[0], cotangents(args, out)[0], 1e-5)
        # A wrong rule is found.
        wrong = lambda p, t: tangent(p, t) + abs(tangent(p, t)).max() / 10
        report = hc.testing.check(ruled(fn, wrong, cotangents, result), args)
        assert "jvp" in [check.name for check in report.failed]
        wrong = lambda p, ct: tuple(1.1 * x for x in cotangents(p, ct))
        report = hc.testing.check(ruled(fn, tangent, wrong, result), args)
        assert [check.name for check in report.failed] == ["vjp"]


def test_rules_that_hold_for_real_directions_alone():
    right = COMPLEX["conj"]
    f = ruled(right[0], lambda p, t: t[0], lambda p, ct: (ct,), C64)
    assert [check.name for check in hc.testing.check(f, Z).failed] == ["jvp"]
    g = ruled(np.exp, COMPLEX["exp"][1], lambda p, ct: (np.exp(p[0].conj()) * ct,), C64)
    assert [check.name for check in hc.testing.check(g, Z).failed] == ["vjp"]


def test_a_complex_linear_function():
    spec = jax.ShapeDtypeStruct((3,), jnp.complex64)
    f = hc.host(lambda z: MATRIX @ z, result=spec)
    f.deftranspose(lambda ct: MATRIX.T @ ct)
    report = hc.testing.check(f, Z)
    assert report, str(report)
    assert statuses(report)["transpose"] == "passed"
    wrong = hc.host(lambda z: MATRIX @ z, result=spec)
    wrong.deftranspose(lambda ct: MATRIX.conj().T @ ct)
    assert {"vjp", "transpose"} <= {c.name for c in hc.testing.check(wrong, Z).failed}


# --- Functions with inaccurate differences -------------------------------------------


def sine_with(rule, fn=np.sin):
    f = plain(fn)
    f.defjvp(lambda p, t: rule(p[0]) * t[0])
    return f


HARD = {
    "many periods away": (np.sin, np.cos, 100 * X),
    "fast": (lambda x: np.sin(30 * x), lambda x: 30 * np.cos(30 * x), X),
    "near the end of its domain": (np.log, lambda x: 1 / x, X / 1000),
    "large": (lambda x: 1e6 * np.sin(x), lambda x: 1e6 * np.cos(x), X),
    "on a large value": (lambda x: 1e3 + np.sin(x), np.cos, X),
    "a kink nearby": (lambda x: abs(x - 0.19), lambda x: np.sign(x - 0.19), X),
}


@pytest.mark.parametrize(("fn", "slope", "x"), HARD.values(), ids=HARD)
def test_differences_fit_their_steps_to_the_function(fn, slope, x):
    with np.errstate(all="ignore"):
        report = hc.testing.check(sine_with(slope, fn), x)
        assert report, str(report)
        assert statuses(report)["jvp"] == "passed"
        wrong = sine_with(lambda x: 1.1 * slope(x), fn)
        assert [check.name for check in hc.testing.check(wrong, x).failed] == ["jvp"]


def test_a_function_that_fails_far_from_the_example():
    def root(x):
        if (x < 0).any():
            raise ValueError("negative")
        return np.sqrt(x)

    report = hc.testing.check(sine_with(lambda x: 0.5 / np.sqrt(x), root), X / 1000)
    assert statuses(report)["jvp"] == "passed", str(report)


def test_differences_that_tell_nothing_fail_nothing():
    shaky = lambda x: np.sin(x) + 0.1 * np.sin(1e9 * x)
    report = hc.testing.check(sine_with(np.cos, shaky), X)
    assert statuses(report)["jvp"] == "left out"
    assert "too inexact to check against. Give an example where" in str(report)


def test_bad_input():
    with pytest.raises(hc.errors.SpecError, match="takes what hc.host made"):
        hc.testing.check(np.sin, X)
    with pytest.raises(hc.errors.SpecError, match="needs an example"):
        hc.testing.check(plain(np.sin))


def test_integer_results_and_python_numbers():
    f = hc.host(
        lambda x: (np.sin(x), (x > 0).astype(np.int32), x * 1j),
        result=lambda x: (
            x,
            jax.ShapeDtypeStruct(x.shape, jnp.int32),
            jax.ShapeDtypeStruct(x.shape, jnp.complex64),
        ),
        vmap_method="expand_dims",
    )
    f.defjvp(lambda p, t: (jnp.cos(p[0]) * t[0], None, 1j * t[0]), where="jax")
    report = hc.testing.check(f, np.float32([0.5, 1.5]), 0.7)
    assert report
    assert "passed   jvp (example 1)" in str(report)
