"""`hc.call` eagerly, under jit, and under what composes with jit and derivatives."""

import dataclasses
import functools
import re
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc

Point = namedtuple("Point", "x y")


@jax.tree_util.register_pytree_node_class
class Pair:
    """A pytree node of the user's, with something in it that isn't a leaf."""

    def __init__(self, left, right, label):
        self.left, self.right, self.label = left, right, label

    def tree_flatten(self):
        return (self.left, self.right), self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(*children, label)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["name"]
)
@dataclasses.dataclass
class Layer:
    weight: object
    name: str


@dataclasses.dataclass(frozen=True)
class Config:
    """A leaf that is no array: hashable, compared by value."""

    size: int


class Unhashable:
    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("an unhashable leaf is compared by identity")


def counted(fn):
    """`fn`, with a list `seen` that grows by (args, kwargs) a call."""

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        wrapper.seen.append((args, kwargs))
        return fn(*args, **kwargs)

    wrapper.seen = []
    return wrapper


def like(value):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype), value)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def sine(x):
    return np.sin(x)


def cosine(x):
    return np.cos(x)


ROW = np.arange(3, dtype=np.float32)
GRID = np.arange(6, dtype=np.int32).reshape(2, 3)
EAGER_AND_JIT = pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit], ids=["eager", "jit"]
)

TREES = {
    "scalar": np.float32(1.5),
    "array": ROW,
    "tuple": (ROW, GRID),
    "list": [ROW, GRID],
    "dict": {"b": ROW, "a": GRID},
    "namedtuple": Point(ROW, GRID),
    "none leaves": (None, ROW, {"z": None}),
    "only none": None,
    "empty containers": {"a": {}, "b": (), "c": [], "d": [(), {"e": ROW}]},
    "registered class": Pair(ROW, GRID, "label"),
    "registered dataclass": Layer(ROW, "dense"),
    "nested": [{"p": Point(Pair(ROW, (GRID,), "deep"), None)}, (), [Layer(GRID, "n")]],
}


@EAGER_AND_JIT
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_pytrees_go_in_and_out(tree, wrap):
    def double(value, *, also):
        return jax.tree.map(lambda a: a * 2, value), {"also": also}

    want = double(tree, also=tree)
    host = counted(double)
    # Not "pure": that call would be dropped where the tree has no leaves.
    f = wrap(lambda t: hc.call(host, like(want), t, also=t, order="unordered"))
    assert_same(f(tree), want)
    jax.effects_barrier()
    [((value,), kwargs)] = host.seen
    assert list(kwargs) == ["also"]
    for seen in (value, kwargs["also"]):
        assert_same(seen, tree)
        assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(seen))


@EAGER_AND_JIT
def test_meta_fields_of_nodes_arrive(wrap):
    host = counted(lambda pair, layer: pair.left + layer.weight)
    pair, layer = Pair(ROW, ROW, "left"), Layer(ROW, "dense")
    got = wrap(
        lambda x: hc.call(host, ROW, pair, layer=dataclasses.replace(layer, weight=x))
    )(ROW)
    [((seen,), kwargs)] = host.seen
    assert (seen.label, kwargs["layer"].name) == ("left", "dense")
    assert_same(got, ROW + ROW)


@EAGER_AND_JIT
@pytest.mark.parametrize(
    "numbers", [(1, 2.5, True), (np.int8(1), np.float32(2.5), np.bool_(True))]
)
def test_numbers_arrive_as_arrays(numbers, wrap):
    host = counted(lambda *values: np.float32(sum(map(float, values))))
    got = wrap(lambda: hc.call(host, np.float32(0), *numbers))()
    [(seen, _)] = host.seen
    assert [(type(a), a.shape) for a in seen] == [(np.ndarray, ())] * 3
    assert [a.dtype.kind for a in seen] == ["i", "f", "b"]
    assert_same(got, np.float32(4.5))


STATICS = ["text", Config(3), Unhashable(), {1, 2}, object(), len, np.dtype("int8")]


@EAGER_AND_JIT
@pytest.mark.parametrize("static", STATICS, ids=lambda s: type(s).__name__)
def test_other_leaves_reach_the_function_as_the_identical_object(static, wrap):
    host = counted(lambda a, tree, *, option: a + tree["x"])
    f = wrap(lambda x: hc.call(host, ROW, x, {"s": [static], "x": x}, option=static))
    for _ in range(2):
        assert_same(f(ROW), ROW + ROW)
    assert len(host.seen) == 2
    for args, kwargs in host.seen:
        assert args[1]["s"][0] is static
        assert kwargs["option"] is static


def test_a_function_without_arguments_and_results():
    host = counted(lambda: None)
    assert jax.jit(lambda: hc.call(host, None, order="unordered"))() is None
    jax.effects_barrier()
    assert host.seen == [((), {})]


# --- Tracing ---------------------------------------------------------------------------


def equation(static, fn=sine):
    traced = jax.make_jaxpr(lambda x: hc.call(lambda_free, ROW, x, static, fn))(ROW)
    return traced.eqns[0].params


def lambda_free(x, static, fn):
    return fn(x)


def test_equal_calls_trace_to_equal_equations():
    shared = Unhashable()
    assert equation(Config(3)) == equation(Config(3))
    assert hash(equation(Config(3))["params"]) == hash(equation(Config(3))["params"])
    assert equation(shared) == equation(shared)
    assert equation(Config(3)) != equation(Config(4))
    assert equation("a") != equation("b")
    assert equation("a", sine) != equation("a", cosine)
    assert equation(Unhashable()) != equation(Unhashable())


def test_jit_traces_once_for_one_static_leaf():
    traces = []

    @functools.partial(jax.jit, static_argnames="config")
    def inner(x, config):
        traces.append(config)
        return hc.call(lambda_free, ROW, x, config, sine)

    outer = jax.jit(lambda x: inner(inner(x, Config(1)), Config(1)))
    for _ in range(3):
        np.testing.assert_array_equal(inner(ROW, Config(1)), np.sin(ROW))
        np.testing.assert_array_equal(outer(ROW), np.sin(np.sin(ROW)))
    assert traces == [Config(1)]
    inner(ROW, Config(2))
    assert traces == [Config(1), Config(2)]


def test_nested_jit_calls_once_a_place():
    host = counted(sine)
    inner = jax.jit(lambda x: hc.call(host, ROW, x, order="unordered"))
    got = jax.jit(lambda x: jax.jit(lambda y: inner(y) + inner(y + 1))(x))(ROW)
    assert_same(got, np.sin(ROW) + np.sin(ROW + 1))
    assert len(host.seen) == 2


@pytest.mark.parametrize(
    ("order", "calls"), [("pure", 0), ("unordered", 1), ("ordered", 1)]
)
def test_only_a_pure_call_is_dropped_when_unused(order, calls):
    host = counted(sine)

    @jax.jit
    def f(x):
        hc.call(host, ROW, x, order=order)
        return x + 1

    assert_same(f(ROW), ROW + 1)
    jax.effects_barrier()
    assert len(host.seen) == calls


def test_map_calls_once_an_element_in_order():
    host = counted(sine)
    got = jax.jit(lambda xs: lax.map(lambda x: hc.call(host, ROW[0], x), xs))(ROW)
    assert_same(got, np.stack([np.sin(x) for x in ROW]))
    assert [float(args[0]) for args, _ in host.seen] == ROW.tolist()


@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
def test_donated_argument_is_the_functions_to_keep(order):
    host = counted(lambda x: x * 2)
    f = jax.jit(lambda x: hc.call(host, x, x, order=order) + x, donate_argnums=0)
    x = jnp.arange(1000.0)
    values = [np.arange(1000, dtype=np.float32)]
    for _ in range(4):
        x = f(x)
        values.append(values[-1] * 2 + values[-1])
    np.testing.assert_array_equal(x, values[-1])
    for (args, _), want in zip(host.seen, values, strict=False):
        np.testing.assert_array_equal(args[0], want)
    assert len(host.seen) == 4


# --- Derivatives ------------------------------------------------------------------------


def custom_sine(kind, host_sine, host_cosine):
    """sin on the host, with its derivative on the host too."""

    def call(fn, x):
        return hc.call(fn, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    if kind == "jvp":
        f = jax.custom_jvp(lambda x: call(host_sine, x))
        f.defjvp(lambda x, t: (f(*x), call(host_cosine, *x) * t[0]))
        return f
    f = jax.custom_vjp(lambda x: call(host_sine, x))
    f.defvjp(
        lambda x: (call(host_sine, x), x), lambda x, ct: (call(host_cosine, x) * ct,)
    )
    return f


@EAGER_AND_JIT
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_custom_derivatives_around_a_call(kind, wrap):
    host_sine, host_cosine = counted(sine), counted(cosine)
    f = custom_sine(kind, host_sine, host_cosine)
    assert_same(wrap(f)(ROW), np.sin(ROW))
    value, gradient = wrap(jax.value_and_grad(lambda x: f(x).sum()))(ROW)
    np.testing.assert_allclose(value, np.sin(ROW).sum(), rtol=1e-6)
    assert_same(gradient, np.cos(ROW))
    assert (len(host_sine.seen), len(host_cosine.seen)) == (2, 1)
    jacobian = wrap(jax.jacrev(f))(ROW)
    np.testing.assert_array_equal(jacobian, np.diag(np.cos(ROW)))
    if kind == "jvp":
        assert_same(
            wrap(jax.jvp)(f, (ROW,), (ROW,))[1]
            if wrap is not jax.jit
            else jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1])(ROW),
            np.cos(ROW) * ROW,
        )


@pytest.mark.parametrize(
    ("order", "calls"), [("pure", 2), ("unordered", 1), ("ordered", 1)]
)
def test_remat_runs_only_a_pure_call_again(order, calls):
    host = counted(sine)

    @jax.checkpoint
    def f(x):
        # Quadratic in x, so that the backward pass wants the call's result.
        return (hc.call(host, ROW, lax.stop_gradient(x), order=order) * x * x).sum()

    value, gradient = jax.jit(jax.value_and_grad(f))(ROW)
    np.testing.assert_allclose(value, (np.sin(ROW) * ROW * ROW).sum(), rtol=1e-6)
    assert_same(gradient, np.sin(ROW) * ROW + np.sin(ROW) * ROW)
    jax.effects_barrier()
    assert len(host.seen) == calls


@EAGER_AND_JIT
def test_stop_gradient_keeps_the_derivative_out(wrap):
    f = wrap(jax.grad(lambda x: (hc.call(sine, ROW, lax.stop_gradient(x)) * x).sum()))
    assert_same(f(ROW), np.sin(ROW))


DERIVATIVES = {
    "jvp": (lambda f: jax.jvp(f, (ROW,), (ROW,)), "has no derivative"),
    "grad": (lambda f: jax.grad(lambda x: f(x).sum())(ROW), "has no derivative"),
    "jit of grad": (
        lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(ROW),
        "has no derivative",
    ),
    "linear_transpose": (
        lambda f: jax.linear_transpose(f, ROW)(ROW),
        "can't be transposed",
    ),
}


@pytest.mark.parametrize(
    ("derive", "what"), DERIVATIVES.values(), ids=DERIVATIVES.keys()
)
def test_a_derivative_is_refused_with_the_remedy(derive, what):
    def f(x):
        return hc.call(sine, ROW, x)

    line = f.__code__.co_firstlineno + 1
    remedy = "linear_call" if "transposed" in what else "stop_gradient"
    with pytest.raises(hc.DerivativeError) as caught:
        derive(f)
    text = str(caught.value)
    assert text.startswith(
        f"hostcall: the call of `sine` {what} ({__file__}:{line} in "
    )
    assert re.search(rf"jax\.custom_vjp.*{remedy}|{remedy}.*jax\.custom_vjp", text)
