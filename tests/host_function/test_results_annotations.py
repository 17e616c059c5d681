"""Results that a function's annotations declare, in jaxtyping's words."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import hostcall as hc

jaxtyping = pytest.importorskip("jaxtyping")
from jaxtyping import Bool, Complex, Float, Float32, Inexact, Int, Num, Shaped  # noqa: E402

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
    ("kind", "given", "want"),
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
def test_the_dtype_is_one_that_the_annotation_allows(kind, given, want):
    f, returned = annotated("a b", "a", kind)
    returned[0] = (2,)
    with jax.enable_x64(True):
        assert hc.host(f)(jnp.zeros((2, 3), given)).dtype == want


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
    def power(x: Float[A, "n"], n, how: str = "sum") -> Float[A, ""]:
        return getattr(np, how)(x**n)

    assert hc.host(power)(X[0], 2) == 5
    assert jax.jit(lambda x: hc.host(power)(x, 2, "max"))(X[0]) == 4


def test_an_own_result_comes_first():
    f = hc.host(matvec, result=lambda m, v: jax.ShapeDtypeStruct((2,), np.float16))
    assert f(X, X[0]).dtype == np.float16


# --- Bad input --------------------------------------------------------------------------


def no_meaning(x: Float[A, "n"]) -> Float[A, "n+"]: ...
def unknown(x: Float[A, "n"]) -> Float[A, "m"]: ...
def calls(x: Float[A, "n"]) -> Float[A, "{print(n)}"]: ...
def attribute(x: Float[A, "n"]) -> Float[A, "{n.real}"]: ...
def negative(x: Float[A, "n"]) -> Float[A, "n-9"]: ...
def many(x: Bool[A, "n"]) -> jaxtyping.Float8e5m2[A, "n"]: ...
def integers(x: Int[A, "n"]) -> Int[A, "n"]: ...
def without_shape(x) -> npt.NDArray[np.float32]: ...
def nowhere(x: Float[A, "n"]) -> NotThere[A, "n"]: ...
def shorter(x: Float[A, "n"]) -> Float[A, "n"]:
    return x[:1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hc.host(matvec)(X, X[0, :2]), "argument `v` of `matvec` is float32[2], which is not Float[ndarray, 'n']: it has n=2, and argument `m` has n=3"),
        (lambda: hc.host(matvec)(X[0], X[0]), "it has 1 axes, and the annotation 2 axes"),
        (lambda: hc.host(integers)(X[0]), "argument `x` of `integers` is float32[3], which is not Int[ndarray, 'n']: its dtype is float32"),
        (lambda: hc.host(no_meaning)(X[0]), "is annotated Float[ndarray, 'n+'], which has no meaning"),
        (lambda: hc.host(unknown)(X[0]), "which has no meaning: 'm' has no size. The arguments name n"),
        (lambda: hc.host(calls)(X[0]), "an expression of sizes has numbers, names"),
        (lambda: hc.host(attribute)(X[0]), "an expression of sizes has numbers, names"),
        (lambda: hc.host(negative)(X[0]), "which is (-6,) for these arguments. A size is at least 0"),
        (lambda: hc.host(without_shape), "has a dtype and no shape. Annotate it with jaxtyping"),
        (lambda: hc.host(nowhere), "the annotations of `nowhere` can't be evaluated: NameError"),
        (lambda: hc.host(matvec, dtype=np.float32), "neither a signature as result= nor a ufunc"),
        (lambda: hc.host(lambda x: x)(X), "has no result=, so it can only be given to hc.call"),
    ],
)  # fmt: skip
def test_what_is_refused_when_it_is_traced(call, said):
    with pytest.raises(hc.errors.SpecError) as caught:
        call()
    assert said in str(caught.value)


def test_a_function_that_returns_another_shape_than_it_is_annotated():
    with pytest.raises(
        hc.errors.ResultError,
        match=r"of `shorter` should be float32\[3\], got float32\[1\]",
    ):
        hc.host(shorter)(X[0])


def test_a_function_that_hc_call_describes_needs_no_meaning():
    def f(x: Any) -> Any:
        return x

    assert hc.call(hc.host(f), X, X).shape == X.shape
