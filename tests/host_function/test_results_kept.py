"""What was said of results is kept and shown, for each word that says it.

Each function goes through a pickle, a register and an export, and must say the same
then. The oracle is the function itself, on NumPy arrays.
"""

import functools
import inspect
import pickle
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import hostcall as hc

pytest.importorskip("jaxtyping")
from jaxtyping import Float

A = np.ndarray
X = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
V = X[0]


def matvec(m, v):
    return m @ v


def two(x):
    return np.resize(x, 2)


def annotated(m: Float[A, "batch n"], v: Float[A, "n"]) -> Float[A, "batch"]:
    return m @ v


def triple(n):
    return 3 * n


def tripled(x):
    return np.tile(x, 3)


add = np.frompyfunc(lambda a, b: a + 2 * b, 2, 1)

# (how it is made, arguments, `repr`, `inspect.signature`)
WORDS = {
    "ufunc": (
        lambda: hc.host(scipy.special.jv),
        (1.0, X),
        "jv (ufunc)",
        "(x1, x2, /)",
    ),
    "ufunc of several results": (
        lambda: hc.host(np.frexp),
        (X,),
        "frexp (ufunc)",
        "(x, /)",
    ),
    "generalized ufunc": (
        lambda: hc.host(np.matmul),
        (X, V),
        "matmul '(n?,k),(k,m?)->(n?,m?)'",
        "(x1: '(n?,k)', x2: '(k,m?)', /) -> '(n?,m?)'",
    ),
    "signature": (
        lambda: hc.host(matvec, result="(m,n),(n)->(m)"),
        (X, V),
        "matvec '(m,n),(n)->(m)'",
        "(m: '(m,n)', v: '(n)') -> '(m)'",
    ),
    "signature with a size": (
        lambda: hc.host(two, result="(n)->(k)", sizes={"k": 2}),
        (X,),
        "two '(n)->(k)'",
        "(x: '(n)') -> '(k)'",
    ),
    "signature with a function of sizes": (
        lambda: hc.host(tripled, result="(n)->(k)", sizes={"k": triple}),
        (V,),
        "tripled '(n)->(k)'",
        "(x: '(n)') -> '(k)'",
    ),
    "annotations": (
        lambda: hc.host(annotated),
        (X, V),
        "annotated -> Float[ndarray, 'batch']",
        f"{inspect.signature(annotated)}",
    ),
    "annotations of a partial": (
        lambda: hc.host(functools.partial(annotated, X), name="product"),
        (V,),
        "product -> Float[ndarray, 'batch']",
        f"{inspect.signature(functools.partial(annotated, X))}",
    ),
}


@pytest.fixture(params=WORDS, ids=str)
def word(request):
    return request.param


def expected(f, arguments):
    """What the function returns for each item, in the dtypes of the program."""
    return jax.tree.map(np.asarray, f(*arguments))


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), y)


def test_it_is_shown(word):
    make, _, shown, signature = WORDS[word]
    f = make()
    assert repr(f) == f"<hostcall.typing.HostFunction {shown}>"
    assert str(inspect.signature(f)) == signature
    assert f"{f.__name__}{signature}" in pydoc.plain(pydoc.render_doc(f))


def test_a_pickle_keeps_it(word):
    make, arguments, shown, signature = WORDS[word]
    f = make()
    again = pickle.loads(pickle.dumps(f))
    assert repr(again) == f"<hostcall.typing.HostFunction {shown}>"
    assert str(inspect.signature(again)) == signature
    same(jax.jit(again)(*arguments), expected(f, arguments))


def test_a_registered_function_keeps_it_in_an_export(word):
    make, arguments, shown, _ = WORDS[word]
    f = hc.register("results.kept." + word.replace(" ", "_"))(make())
    assert repr(f) == f"<hostcall.typing.HostFunction {shown}>"
    want = expected(f, arguments)
    same(jax.jit(lambda *args: hc.call(f, ..., *args))(*arguments), want)
    loaded = hc.load(bytes(hc.export(jax.jit(f))(*arguments)))
    same(loaded.call(*arguments), want)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: hc.host(np.sin)(x),
        lambda x: hc.call(np.sin, ..., x),
        lambda x: hc.host(matvec, result="(m,n),(n)->(m)")(jnp.outer(x, x), x),
        lambda x: hc.host(annotated)(jnp.outer(x, x), x),
        lambda x: hc.host(add, dtype=np.float32)(x, x),
    ],
    ids=["ufunc", "ufunc of hc.call", "signature", "annotations", "objects"],
)
def test_without_a_name_an_export_is_refused_with_advice(f):
    with pytest.raises(hc.errors.ExportError) as caught:
        hc.export(jax.jit(f))(V)
    assert "it has no name in other processes" in str(caught.value)
    assert "register(" in str(caught.value)


def test_numbers_of_a_ufunc_of_objects_are_called_as_the_ufunc_is():
    f = hc.register("results.kept.objects")(hc.host(add, dtype=np.float32))
    words = "<lambda> (vectorized)"
    assert repr(f) == f"<hostcall.typing.HostFunction {words} (ufunc)>"
    assert str(inspect.signature(f)) == "(x1, x2, /)"
    assert f.__doc__ == add.__doc__
    loaded = hc.load(bytes(hc.export(jax.jit(f))(V, 1.0)))
    np.testing.assert_array_equal(np.asarray(loaded.call(V, 1.0)), V + 2)


def test_check_draws_sizes(word):
    make, arguments, _, _ = WORDS[word]
    report = hc.testing.check(make(), arguments)
    assert report, report
    assert "passed   sizes: 5 drawn" in str(report)
    # A function of items gets items there too.
    assert "passed   lent arguments" in str(report)


def test_check_draws_sizes_of_axes_that_broadcast():
    column = np.ones((4, 1), np.float32)
    report = hc.testing.check(hc.host(np.add), (column, V))
    assert report, report
    assert "passed   sizes: 5 drawn" in str(report)


@pytest.mark.parametrize(
    "f",
    [
        hc.host(np.negative),
        hc.host(lambda x: -x, result="(n)->(n)"),
        hc.host(lambda x: -x, result="(n)->(n)", vmap_method="expand_dims"),
    ],
    ids=["ufunc", "signature", "signature, whole batches"],
)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_sizes_of_zero(f, shape):
    x = np.ones(shape, np.float32)
    same(jax.jit(f)(x), -x)
    same(jax.vmap(f)(np.ones((2, *shape), np.float32)), -np.ones((2, *shape), x.dtype))


def test_sizes_of_zero_in_annotations():
    def outer(x: Float[A, "n"], y: Float[A, "m"]) -> Float[A, "n m"]:
        return np.outer(x, y)

    assert jax.jit(hc.host(outer))(V, V[:0]).shape == (3, 0)
