"""Signatures as result=: "(m,n),(n)->(m)".

The oracle is `numpy.vectorize`, which has the same grammar, and calls its function for
one item at a time.
"""

import inspect
import pickle
import pydoc

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import hostcall as hc

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def mean_of(x):
    assert x.ndim == 1
    return x.mean(dtype=np.float32)


def matvec(m, v):
    assert (m.ndim, v.ndim) == (2, 1)
    return m @ v


def minmax(x):
    return x.min(), x.max()


# --- Items, and axes in front of them ---------------------------------------------------


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (1, 4), (0, 4)])
def test_axes_in_front_are_items(wrap, shape):
    x = np.resize(X, shape)
    got = wrap(hc.host(mean_of, result="(n)->()"))(x)
    np.testing.assert_array_equal(np.asarray(got), x.mean(-1, dtype=np.float32))
    got = wrap(lambda x: hc.call(mean_of, "(n)->()", x))(x)
    np.testing.assert_array_equal(np.asarray(got), x.mean(-1, dtype=np.float32))


@pytest.mark.parametrize(
    ("m", "v"),
    [
        ((2, 3), (3,)),
        ((5, 2, 3), (3,)),
        ((2, 3), (5, 3)),
        ((5, 2, 3), (4, 1, 3)),
        ((4, 1, 2, 3), (5, 3)),
        ((1, 2, 3), (5, 3)),
    ],
)
def test_axes_in_front_broadcast(m, v):
    m = np.resize(X, m)
    v = np.resize(X, v)
    want = np.vectorize(matvec, signature="(m,n),(n)->(m)")(m, v)
    f = hc.host(matvec, result="(m,n),(n)->(m)")
    np.testing.assert_allclose(jax.jit(f)(m, v), want)
    rows = jax.vmap(f, (0, None))(np.stack([m, m + 1]), v)
    np.testing.assert_allclose(rows[0], want)
    np.testing.assert_allclose(rows[1], f(m + 1, v))


@pytest.mark.parametrize(
    "method", ["expand_dims", "broadcast_all", "sequential", "parallel", None]
)
def test_how_items_reach_the_function(method):
    shapes = []

    def total(x, y):
        shapes.append((x.shape, y.shape))
        return (x * y).sum(-1)

    f = hc.host(total, result="(n),(n)->()", vmap_method=method)
    x, y = X, X[0]
    want = (x * y).sum(-1)
    np.testing.assert_allclose(jax.jit(f)(x, y), want)
    by_item = method in ("sequential", "parallel", None)
    assert shapes == ([((4,), (4,))] * 6 if by_item else [((2, 3, 4), (1, 3, 4))])
    shapes.clear()
    np.testing.assert_allclose(jax.vmap(f, (0, None))(x, y), want)
    batched = {"expand_dims": (1, 3, 4), "broadcast_all": (2, 3, 4)}
    assert shapes == ([((4,), (4,))] * 6 if by_item else [((2, 3, 4), batched[method])])


def test_several_results():
    low, high = jax.jit(hc.host(minmax, result="(n)->(),()"))(X)
    np.testing.assert_array_equal(np.asarray(low), X.min(-1))
    np.testing.assert_array_equal(np.asarray(high), X.max(-1))


@pytest.mark.parametrize(
    ("size", "k"), [(3, 3), (lambda n: n - 1, 3), (lambda n, m: n + m, 7), (0, 0)]
)
def test_a_size_of_a_result_alone(size, k):
    f = hc.host(lambda x: np.resize(x, k), result="(m,n)->(k)", sizes={"k": size})
    assert jax.jit(f)(X).shape == (2, k)
    rule = hc.results.signature("(m,n)->(k)", sizes={"k": size})
    assert hc.call(lambda x: np.resize(x, k), rule, X).shape == (2, k)


def test_fixed_sizes():
    f = hc.host(np.cross, result="(3),(3)->(3)")
    got = jax.jit(f)(X[:, :, :3], X[0, 0, :3] + 1)
    np.testing.assert_allclose(got, np.cross(X[:, :, :3], X[0, 0, :3] + 1))


def test_the_results_dtype():
    x = np.arange(4)
    with jax.enable_x64(True):
        assert hc.host(np.sum, result="(n)->()")(x).dtype == np.int64
        assert (
            hc.host(np.sum, result="(n)->()")(x.astype(np.float32)).dtype == np.float32
        )
        f = hc.host(np.dot, result="(n),(n)->()")
        assert f(x, x.astype(np.float32)).dtype == jnp.promote_types(
            np.int64, np.float32
        )
    f = hc.host(np.argmax, result="(n)->()", dtype=np.int32)
    assert f(X).dtype == np.int32
    f = hc.host(
        lambda x: (x.max(), x.argmax()),
        result="(n)->(),()",
        dtype=(np.float32, np.int32),
    )
    assert [result.dtype for result in jax.jit(f)(X)] == [np.float32, np.int32]


def test_derivatives_of_items():
    f = hc.host(lambda x: (x**2).sum(), result="(n)->()")
    f.defjvps(lambda t, _, x: 2 * (x * t).sum())
    want = jax.grad(lambda x: (x**2).sum())(X)
    for g in (
        f,
        hc.host(lambda x: (x**2).sum(-1), result="(n)->()", vmap_method="expand_dims"),
    ):
        if g is not f:
            g.defvjp(
                lambda x: ((x**2).sum(-1), x), lambda x, ct: (2 * x * ct[..., None],)
            )
            np.testing.assert_allclose(jax.grad(lambda x: g(x).sum())(X), want)
            np.testing.assert_allclose(
                jax.vmap(jax.grad(lambda x: g(x).sum()))(X), want
            )
    np.testing.assert_allclose(jax.jvp(f, (X,), (X,))[1], 2 * (X * X).sum(-1))


def test_a_mask_of_items():
    f = hc.host(mean_of, result="(n)->()")
    np.testing.assert_allclose(f.where(True)(X), X.mean(-1))
    np.testing.assert_array_equal(np.asarray(f.where(False, 7)(X)), np.full((2, 3), 7))
    got = jax.vmap(lambda m, x: f.where(m)(x))(np.array([True, False]), X)
    np.testing.assert_allclose(got, [X[0].mean(-1), np.zeros(3)])


def test_items_with_effects_run_in_order():
    order = []
    f = hc.host(
        lambda x: order.append(float(x[0])) or x[0], result="(n)->()", order="ordered"
    )
    jax.block_until_ready(jax.jit(f)(X))
    assert order == X[..., 0].ravel().tolist()


class Scale:
    by = 2.0

    @hc.host(result="(n)->(n)")
    def scaled(self, x):
        return self.by * x


def test_a_method_and_static_arguments():
    np.testing.assert_array_equal(np.asarray(Scale().scaled(X)), 2 * X)
    f = hc.host(lambda reduction, x: getattr(np, reduction)(x), result="(n)->()")
    np.testing.assert_allclose(jax.jit(lambda x: f("max", x))(X), X.max(-1))
    np.testing.assert_allclose(f("min", X[0, 0]), X[0, 0].min())


def test_it_is_shown_and_pickled():
    f = hc.host(matvec, result="(m,n),(n)->(m)")
    again = pickle.loads(pickle.dumps(f))
    np.testing.assert_array_equal(
        np.asarray(again(X, X[0, 0])), np.asarray(f(X, X[0, 0]))
    )
    for function in (f, again):
        assert (
            repr(function) == "<hostcall.typing.HostFunction matvec '(m,n),(n)->(m)'>"
        )
        assert str(inspect.signature(function)) == "(m: '(m,n)', v: '(n)') -> '(m)'"
        assert "(m: '(m,n)', v: '(n)') -> '(m)'" in pydoc.plain(
            pydoc.render_doc(function)
        )
    # Which of its parameters are arrays is not known.
    power = hc.host(lambda x, n: x**n, result="(n)->(n)")
    assert str(inspect.signature(power)) == "(x, n) -> '(n)'"
    # An annotation of the user's stays.
    total = hc.host(total_of, result="(n)->()")
    assert str(inspect.signature(total)) == "(x: 'np.ndarray') -> '()'"


def total_of(x: "np.ndarray"):
    return x.sum()


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (hc.results.like(1), "-> like(1)"),
        (hc.results.same_tree(0), "-> same_tree(0)"),
        (hc.results.elementwise, "-> elementwise"),
        ("infer", "-> 'infer'"),
        ((X, {"n": 1}), "-> (float32[2, 3, 4], {n: 1})"),
        (lambda m, v: v, ""),
    ],
)
def test_what_was_said_is_shown(result, shown):
    f = hc.host(matvec, result=result)
    words = f"matvec {shown}".strip()
    assert repr(f) == f"<hostcall.typing.HostFunction {words}>"


def test_check_draws_sizes():
    good = hc.host(np.linalg.inv, result="(n,n)->(n,n)")
    report = hc.testing.check(good, np.eye(3, dtype=np.float32))
    assert "passed   sizes: 5 drawn" in str(report)
    # Right for the example alone.
    bad = hc.host(lambda x: x[:3], result="(n)->(k)", sizes={"k": 3})
    report = hc.testing.check(bad, np.ones(4, np.float32))
    assert not report
    assert "failed   sizes: ResultError: " in str(report)
    # Some draws would have a size below 0.
    rest = hc.host(lambda x: x[2:], result="(n)->(k)", sizes={"k": lambda n: n - 2})
    report = hc.testing.check(rest, np.ones(4, np.float32))
    assert report
    assert " drawn" in str(report)


@hc.register("signatures.matvec")
def registered(m, v):
    return m @ v


def test_a_registered_and_an_exported_function_keep_it():
    hosted = hc.host(registered, result="(m,n),(n)->(m)", vmap_method="expand_dims")
    f = hc.register("signatures.hosted")(hosted)
    v = X[0, 0]
    np.testing.assert_allclose(f(X[0], v), X[0] @ v)
    np.testing.assert_allclose(hc.call(f, ..., X[0], v), X[0] @ v)
    loaded = hc.load(bytes(hc.export(jax.jit(f))(X[0], v)))
    np.testing.assert_allclose(loaded.call(X[0], v), X[0] @ v)
    n, b = jax.export.symbolic_shape("n,b")
    specs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((b, n), (n,))]
    loaded = hc.load(bytes(hc.export(jax.jit(f))(*specs)))
    np.testing.assert_allclose(loaded.call(X[0], v), X[0] @ v)
    np.testing.assert_allclose(loaded.call(X[1, :2, :3], v[:3]), X[1, :2, :3] @ v[:3])


def test_symbolic_sizes():
    f = hc.host(matvec, result="(m,n),(n)->(m)", vmap_method="expand_dims")
    n, b = jax.export.symbolic_shape("n,b")
    m = jax.ShapeDtypeStruct((b, 2, n), np.float32)
    v = jax.ShapeDtypeStruct((n,), np.float32)
    assert jax.eval_shape(f, m, v).shape == (b, 2)


# --- Against numpy.vectorize ------------------------------------------------------------

NAMES = st.sampled_from("mnk")
SIZES = {"m": 2, "n": 3, "k": 1}


@st.composite
def calls(draw):
    """(signature, shapes of the arguments, shape of an item of the result)."""
    cores = draw(st.lists(st.lists(NAMES, max_size=2), min_size=1, max_size=3))
    known = sorted({name for core in cores for name in core})
    result = draw(st.lists(st.sampled_from(known), max_size=2)) if known else []
    loop = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))
    shapes = []
    for core in cores:
        axes = loop[draw(st.integers(0, len(loop))) :]
        axes = [draw(st.sampled_from([1, size])) for size in axes]
        shapes.append((*axes, *[SIZES[name] for name in core]))
    words = [f"({','.join(core)})" for core in [*cores, result]]
    text = ",".join(words[:-1]) + "->" + words[-1]
    return text, shapes, tuple(SIZES[name] for name in result)


@hypothesis.given(calls(), st.sampled_from([None, "expand_dims"]))
def test_a_signature_against_numpy(call, method):
    text, shapes, item = call
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    words = text.split("->")[0].removesuffix(")").split("),")
    core_axes = [sum(map(str.isalpha, word)) for word in words]

    def one(*args):
        return np.full(item, sum(np.float32(arg.sum()) for arg in args), np.float32)

    def batch(*args):
        """`one` for arguments with axes in front."""
        sums = [
            arg.sum(tuple(range(arg.ndim - n, arg.ndim)))
            for arg, n in zip(args, core_axes)
        ]
        total = np.asarray(sum(sums))
        return np.broadcast_to(total[(..., *[None] * len(item))], total.shape + item)

    want = np.vectorize(one, signature=text, otypes=[np.float32])(*arrays)
    f = hc.host(one if method is None else batch, result=text, vmap_method=method)
    got = f(*arrays)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    rows = jax.vmap(f, (0, *(None,) * (len(arrays) - 1)))(
        np.stack([arrays[0]] * 2), *arrays[1:]
    )
    np.testing.assert_allclose(rows, np.stack([want] * 2), rtol=1e-5, atol=1e-5)


# --- Bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("(n->(n)", 3, "expected ',' or ')', found '->'"),
        ("(n)(n)", 4, "expected ',' or '->', found '('"),
        ("(n),->(n)", 5, "expected '(', found '->'"),
        ("(n)->", 6, "expected '(', found the end"),
        ("(n)->(n)x", 9, "expected ',' or the end, found 'x'"),
        ("(n,)->(n)", 4, "expected a dimension's name or size, found ')'"),
        (
            "(n|1)->(n)",
            3,
            "expected ',' or ')', found '|'. A dimension that broadcasts",
        ),
        ("(n+1)->(n)", 3, "expected ',' or ')', found '+'"),
        ("n->n", 1, "expected '(', found 'n'"),
        ("->->", 3, "expected '(', found '->'"),
        ("(n?)->(n)", 9, "expected '?', found ')'. n has '?' in one place"),
        ("(n),(n?)->()", 7, "expected ',' or ')', found '?'. n has '?' in one place"),
    ],
)
def test_a_text_that_is_no_signature(text, column, said):
    for make in (
        lambda: hc.host(mean_of, result=text),
        lambda: hc.results.signature(text),
    ):
        with pytest.raises(hc.errors.SpecError) as caught:
            make()
        assert f"can't be read at column {column}: {said}" in str(caught.value)
