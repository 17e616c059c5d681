"""Results that a function's annotations declare, in jaxtyping's words."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pickle
from typing import Any, NamedTuple, TypedDict

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

import hostcall as hc

jaxtyping = pytest.importorskip("jaxtyping")
from jaxtyping import (  # noqa: E402
    Bool,
    Complex,
    Float,
    Float32,
    Float64,
    Inexact,
    Int,
    Key,
    Num,
    Shaped,
)

A = np.ndarray
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def matvec(m: Float[A, "batch n"], v: Float[A, "n"]) -> Float[A, "batch"]:
    return m @ v


class Parts(TypedDict):
    total: Float[A, ""]
    positive: Bool[A, "n"]


class Pair(NamedTuple):
    real: Float[A, "n"]
    both: Complex[A, "n"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    x: Float[A, "n"]
    p: Shaped[A, "n n"]


# --- Shapes and dtypes ------------------------------------------------------------------

# Annotations of the argument and of the result, and the shape for an argument (2, 3).
SHAPES = {
    "names": ("a b", "b a", (3, 2)),
    "sizes": ("2 b", "b 4", (3, 4)),
    "anything": ("_ b", "b", (3,)),
    "any axes": ("... b", "b", (3,)),
    "named axes": ("*a b", "b *a", (3, 2)),
    "no further axes": ("*z a b", "*z a", (2,)),
    "axes between": ("a *z b", "b *z a", (3, 2)),
    "expressions": ("a b", "a+1 2*b b-a", (3, 6, 1)),
    "braces": ("a b", "{a*b} {max(a,b)//2}", (6, 1)),
    "words for readers": ("rows=2 b", "columns=b", (3,)),
    "a scalar": ("a b", "", ()),
}


def annotated(argument, result, kind=Float):
    def f(x):
        return np.zeros(SHAPE[0], x.dtype)

    SHAPE = [None]
    f.__annotations__ = {"x": kind[A, argument], "return": kind[A, result]}
    return f, SHAPE


@pytest.mark.parametrize(("argument", "result", "shape"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_shape_follows_from_the_names(wrap, argument, result, shape):
    f, returned = annotated(argument, result)
    returned[0] = shape
    assert wrap(hc.host(f))(X).shape == shape
    assert wrap(lambda x: hc.call(f, ..., x))(X).shape == shape


def test_a_program_with_annotations():
    f = hc.host(matvec)
    v = np.ones(3, np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(X, v)), X @ v)
    rows = jax.vmap(f, (0, None))(np.stack([X, X + 1]), v)
    np.testing.assert_array_equal(np.asarray(rows), [X @ v, (X + 1) @ v])
    again = pickle.loads(pickle.dumps(f))
    np.testing.assert_array_equal(np.asarray(again(X, v)), X @ v)


@pytest.mark.parametrize(
    ("kind", "argument", "want"),
    [
        (Float, np.float32, np.float32),
        (Float, np.float64, np.float64),
        (Float, jnp.bfloat16, jnp.bfloat16),
        (Float32, np.float32, np.float32),
        (Int, np.int32, np.int32),
        (Int, np.int64, np.int64),
        (Inexact, np.complex64, np.complex64),
        (Num, np.int32, np.int32),
        (Shaped, np.uint8, np.uint8),
        (Bool, np.bool_, np.bool_),
        (Complex, np.complex128, np.complex128),
    ],
)
def test_the_dtype_is_one_that_the_annotation_allows(kind, argument, want):
    f, returned = annotated("a b", "a", kind)
    returned[0] = (2,)
    with jax.enable_x64(True):
        assert hc.host(f)(jnp.zeros((2, 3), argument)).dtype == want


def test_a_result_of_another_kind_than_the_arguments():
    def spectrum(x: Float[A, "n"]) -> Complex[A, "n//2+1"]:
        return np.fft.rfft(x)

    def power(z: Complex[A, "n"]) -> Float[A, "n"]:
        return np.abs(z)

    def mean(x: Int[A, "n"]) -> Float[A, ""]:
        return x.mean()

    z = hc.host(spectrum)(X[0])
    assert (z.shape, z.dtype) == ((2,), np.complex64)
    assert hc.host(power)(z).dtype == np.float32
    assert hc.host(mean)(jnp.arange(3)).dtype == np.float32
    assert hc.host(power)(jnp.ones(2, np.complex64)).shape == (2,)


def test_axes_that_broadcast():
    def add(x: Float[A, "#a #b"], y: Float[A, "#a #b"]) -> Float[A, "a b"]:
        return x + y

    got = hc.host(add)(np.ones((2, 1), np.float32), np.ones((1, 3), np.float32))
    assert got.shape == (2, 3)

    row = np.ones((1, 3), np.float32)
    assert hc.host(add)(row, row).shape == (1, 3)


@pytest.mark.parametrize(
    ("result", "shape"),
    [("{width}", (4,)), ("n {2*width}", (3, 8)), ("{x.shape[0]+width}", (7,))],
)
def test_braces_have_arguments(result, shape):
    def f(x, width=4):
        return np.zeros(shape, np.float32)

    f.__annotations__ = {"x": Float[A, "n"], "return": Float[A, result]}
    assert hc.host(f)(X[0]).shape == shape
    assert hc.host(functools.partial(f, width=4))(X[0]).shape == shape


def test_names_of_arguments_that_a_partial_has_or_that_have_defaults():
    def f(x: Float[A, "n"], y: Float[A, "m"] = X[0, :2]) -> Float[A, "n m"]:
        return x[:, None] * y

    assert hc.host(f)(X[0]).shape == (3, 2)
    assert hc.host(functools.partial(f, y=X[0]))(X[0]).shape == (3, 3)
    assert hc.host(functools.partial(f, X[0]))(X[0, :1]).shape == (3, 1)


def test_a_keyword_that_has_a_default():
    def f(x: Float[A, "n"], *, k: int = 2) -> Float[A, "{k} n"]:
        return np.stack([x] * k)

    assert hc.host(f)(X[0]).shape == (2, 3)
    assert hc.host(functools.partial(f, k=3))(X[0]).shape == (3, 3)


def test_any_number_of_arguments():
    def total(*xs: Float[A, "n"]) -> Float[A, "n"]:
        return np.sum(xs, axis=0)

    np.testing.assert_allclose(jax.jit(hc.host(total))(X[0], X[1]), X[0] + X[1])
    np.testing.assert_allclose(jax.vmap(hc.host(total))(X, X), 2 * X)


def test_one_of_several_types():
    def f(x: Float[jaxtyping.ArrayLike, "n"], y: Int[A, "n"] | None) -> Float[A, "n"]:
        return x

    assert hc.host(f)(X[0], np.arange(3)).shape == (3,)
    assert hc.host(f)(X[0], None).shape == (3,)


def test_typed_keys():
    def f(key: Key[A, ""], x: Float[A, "n"]) -> Float[A, "n"]:
        return x

    assert hc.host(f)(jax.random.key(0), X[0]).tolist() == X[0].tolist()


def test_float64_reaches_the_function_and_is_rounded():
    def f(x: Float64[A, "n"]) -> Float64[A, "n"]:
        assert x.dtype == np.float64
        return x

    got = hc.host(f, float64=True)(X[0])
    assert got.dtype == np.float32


# --- Against jaxtyping itself -----------------------------------------------------------

# The words of jaxtyping's own tests.
WORDS = ["a", "b", "3", "4", "_", "_a", "#a", "#3", "a=3", "rows=a"]
MANY = ["", "...", "*a", "*_a", "*#c", "#*c", "*c"]


@st.composite
def shapes_of(draw):
    """The annotation of an argument, and a shape."""
    words = draw(st.lists(st.sampled_from(WORDS), max_size=3))
    many = draw(st.sampled_from(MANY))
    words.insert(draw(st.integers(0, len(words))), many)
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=4))
    return " ".join(filter(None, words)), tuple(shape)


def takes(dims, shapes, kind=Float, dtypes=(np.float32, np.float32)):
    """Whether a function with these annotations takes these arguments."""

    def f(x, y):
        raise AssertionError("traced only")

    f.__annotations__ = {"x": kind[A, dims[0]], "y": kind[A, dims[1]]}
    f.__annotations__["return"] = Float32[A, ""]
    specs = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    try:
        jax.eval_shape(hc.host(f), *specs)
    except hc.errors.SpecError:
        return False
    return True


def fits(dims, shapes, kind=Float, dtypes=(np.float32, np.float32)):
    """What jaxtyping says."""
    with jaxtyping.jaxtyped("context"):
        return all(
            isinstance(np.zeros(shape, dtype), kind[A, dim])
            for dim, shape, dtype in zip(dims, shapes, dtypes, strict=True)
        )


@hypothesis.settings(max_examples=300)
@hypothesis.given(shapes_of(), shapes_of())
def test_arguments_fit_if_jaxtyping_says_so(x, y):
    dims = x[0], y[0]
    shapes = x[1], y[1]
    assert takes(dims, shapes) == fits(dims, shapes)


DTYPES = [np.bool_, np.int8, np.int32, np.int64, np.uint8, np.float16, jnp.bfloat16]
DTYPES += [np.float32, np.float64, np.complex64]


@pytest.mark.parametrize("kind", [Bool, Complex, Float, Float32, Inexact, Int, Num, Shaped, jaxtyping.UInt, jaxtyping.Integer, jaxtyping.Real, jaxtyping.BFloat16, jaxtyping.Complex64])  # fmt: skip
def test_dtypes_fit_if_jaxtyping_says_so(kind):
    with jax.enable_x64(True):
        for dtype in DTYPES:
            call = (("", ""), ((), ()), kind, (dtype, dtype))
            assert takes(*call) == fits(*call), dtype


# --- Trees ------------------------------------------------------------------------------


def test_trees_of_annotations():
    def parts(x: Float[A, "n"]) -> Parts:
        return {"total": x.sum(), "positive": x > 0}

    def pair(x: Float[A, "n"]) -> Pair:
        return Pair(x, x + 1j)

    def step(s: State, by: Float[A, "n"]) -> tuple[State, Float[A, ""]]:
        return State(s.x + by, s.p), by.sum()

    got = jax.jit(hc.host(parts))(X[0])
    assert got["total"] == 3
    assert got["positive"].tolist() == [False, True, True]
    assert isinstance(hc.host(pair)(X[0]), Pair)
    state, total = jax.jit(hc.host(step))(
        State(X[0], np.eye(3, dtype=np.float32)), X[1]
    )
    assert isinstance(state, State)
    assert state.x.tolist() == [3, 5, 7]
    assert total == 12


# As equinox builds its Modules: a frozen dataclass with an __init__ of its own, which
# computes, and with fields that are no leaves.
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, init=False)
class Layer:
    w: Float[A, "m n"]
    kind: str = "linear"

    def __init__(self, w):
        object.__setattr__(self, "w", 2 * w)
        object.__setattr__(self, "kind", "linear")

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("w"), self.w)], self.kind

    @classmethod
    def tree_unflatten(cls, kind, children):
        layer = object.__new__(cls)
        object.__setattr__(layer, "w", children[0])
        object.__setattr__(layer, "kind", kind)
        return layer

    def __call__(self, x: Float[A, "n"]) -> Float[A, "m"]:
        return self.w @ x

    @hc.host
    def hosted(self, x: Float[A, "n"]) -> Float[A, "m"]:
        return self.w @ x


def test_modules():
    def grown(layer: Layer, by: Float[A, "k"]) -> tuple[Layer, Float[A, "m k"]]:
        return Layer(layer.w / 2), layer.w[:, :1] * by

    layer, columns = jax.jit(hc.host(grown))(Layer(X), X[0])
    assert isinstance(layer, Layer)
    np.testing.assert_array_equal(np.asarray(layer.w), 2 * X)
    assert columns.shape == (2, 3)
    # Its fields have the sizes that no argument has.
    np.testing.assert_allclose(hc.host(Layer(X))(X[0]), 2 * X @ X[0])
    np.testing.assert_allclose(
        jax.jit(lambda layer: layer.hosted(X[0]))(layer), 2 * X @ X[0]
    )


def test_modules_of_equinox():
    eqx = pytest.importorskip("equinox")

    class Module(eqx.Module):
        w: Float[A, "m n"]
        kind: str = eqx.field(static=True, default="linear")

        def __call__(self, x: Float[A, "n"]) -> Float[A, "m"]:
            return self.w @ x

    def doubled(module: Module) -> Module:
        return Module(2 * module.w)

    doubled.__annotations__ = {"module": Module, "return": Module}
    got = jax.jit(hc.host(doubled))(Module(X))
    assert isinstance(got, Module)
    np.testing.assert_array_equal(np.asarray(got.w), 2 * X)
    np.testing.assert_allclose(hc.host(Module(X))(X[0]), X @ X[0])


class Model:
    scale = 2.0

    @hc.host
    def __call__(self, x: Float[A, "n"]) -> Float[A, "n"]:
        return self.scale * x

    def plain(self, x: Float[A, "n"]) -> Float[A, ""]:
        return self.scale * x.sum()


def test_methods_partials_and_wrapped_functions():
    assert hc.host(Model().plain)(X[0]) == 6
    assert Model().__call__(X[0]).tolist() == [0, 2, 4]
    f = hc.host(functools.partial(matvec, v=np.ones(3, np.float32)))
    assert f(X).tolist() == [3, 12]

    @functools.wraps(matvec)
    def logged(*args):
        return matvec(*args)

    assert hc.host(logged)(X, X[0]).tolist() == [5, 14]


def test_arguments_without_annotations_and_static_ones():
    def power(x: Float[A, "n"], n, reduction: str = "sum") -> Float[A, ""]:
        return getattr(np, reduction)(x**n)

    assert hc.host(power)(X[0], 2) == 5
    assert jax.jit(lambda x: hc.host(power)(x, 2, "max"))(X[0]) == 4


def test_it_is_shown():
    f = hc.host(matvec)
    assert repr(f) == "<hostcall.typing.HostFunction matvec -> Float[ndarray, 'batch']>"
    assert inspect.signature(f) == inspect.signature(matvec)


@hc.register("annotations.matvec")
def registered(m: Float[A, "batch n"], v: Float[A, "n"]) -> Float[A, "batch"]:
    return m @ v


def test_a_registered_and_an_exported_function_keep_it():
    hosted = hc.host(registered, vmap_method="expand_dims")
    f = hc.register("annotations.hosted")(hosted)
    v = X[0]
    for call in (hc.host(registered), f, lambda m, v: hc.call(f, ..., m, v)):
        np.testing.assert_allclose(call(X, v), X @ v)
    n, b = jax.export.symbolic_shape("n,b")
    specs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((b, n), (n,))]
    loaded = hc.load(bytes(hc.export(jax.jit(f))(*specs)))
    np.testing.assert_allclose(loaded.call(X, v), X @ v)
    np.testing.assert_allclose(loaded.call(X[:, :2], v[:2]), X[:, :2] @ v[:2])


def test_check_draws_sizes():
    report = hc.testing.check(hc.host(matvec), (X, X[0]))
    assert "passed   sizes: 5 drawn" in str(report)

    def three(x: Float[A, "n"]) -> Float[A, "n"]:
        return np.resize(x, 3)

    report = hc.testing.check(hc.host(three), X[0])
    assert not report
    assert "failed   sizes: ResultError: " in str(report)

    def step(s: State, *xs: Float[A, "*b #n"]) -> tuple[State, Float[A, "*b n"]]:
        return s, sum(x + s.x for x in xs)

    state = State(X[0], np.eye(3, dtype=np.float32))
    report = hc.testing.check(hc.host(step), (state, X, X[:, :1]))
    assert "passed   sizes: 5 drawn" in str(report)


# --- Other words come first ------------------------------------------------------------


def test_an_own_result_comes_first():
    f = hc.host(matvec, result=lambda m, v: jax.ShapeDtypeStruct((2,), np.float16))
    assert f(X, X[0]).dtype == np.float16


@pytest.mark.parametrize(
    "returned", [Any, "NotThere", npt.NDArray[np.float32], list[Float[A, "n"]]]
)
def test_a_function_that_hc_call_describes_needs_no_meaning(returned):
    def f(x):
        return x

    f.__annotations__ = {"x": Any, "return": returned}
    assert hc.call(hc.host(f), X, X).shape == X.shape
    with pytest.raises(hc.errors.SpecError, match="hc-result-spec"):
        hc.host(f)(X)
