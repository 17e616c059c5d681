"""`hc.call` eagerly and under jit: trees, static leaves, tracing, donation."""

import dataclasses
import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted
from jax import lax

import hostcall as hc

Point = namedtuple("Point", "x y")


@jax.tree_util.register_pytree_node_class
class Pair:
    """A user's pytree node that also holds something that is not a leaf."""

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
    """A leaf that is not an array: hashable, and compared by value."""

    size: int


class Unhashable:
    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("an unhashable leaf is compared by identity")


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
def test_pytrees_as_arguments_and_results(tree, wrap):
    def double(value, *, also):
        return jax.tree.map(lambda a: a * 2, value), {"also": also}

    want = double(tree, also=tree)
    host = counted(double)
    # Not "pure": JAX would drop a pure call whose tree has no leaves.
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


REDUCERS = {
    "reduce": lambda f: lambda x: lax.reduce(x, np.float32(0), f, (0,)),
    "reduce_window": lambda f: (
        lambda x: lax.reduce_window(x, np.float32(0), f, (2,), (1,), "SAME")
    ),
    "apply": lambda f: lambda x: x.at[np.array([1, 2])].apply(lambda y: f(y, y)),
}


INSIDE = {
    "itself": lambda f: f,
    "jit": jax.jit,
    "cond": lambda f: lambda a, b: lax.cond(a > b, f, lambda a, b: a, a, b),
    "fori_loop": lambda f: lambda a, b: lax.fori_loop(0, 2, lambda i, c: f(c, b), a),
}


@pytest.mark.parametrize("face", [hc.call, hc.pure_callback])
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", REDUCERS)
def test_a_call_in_the_function_of_a_reduction_is_refused(name, inside, face):
    """XLA would end the process."""
    spec = jax.ShapeDtypeStruct((), jnp.float32)
    add = lambda a, b: face(np.add, spec, a, b)
    program = jax.jit(REDUCERS[name](INSIDE[inside](add)))
    with pytest.raises(hc.errors.SpecError, match="`add` is called in the function"):
        program(jnp.arange(4.0))
