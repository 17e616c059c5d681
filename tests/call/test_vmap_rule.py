"""vmap_method= with a user's function."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.arange(3, dtype=np.float32) * 10
ROW = jax.ShapeDtypeStruct((3,), np.float32)
BATCH = jax.ShapeDtypeStruct((4, 3), np.float32)
EAGER_AND_JIT = pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit], ids=["eager", "jit"]
)


def add(x, y):
    return x + y


@EAGER_AND_JIT
def test_a_rule_replaces_the_call(wrap):
    asked, seen = [], []

    def whole(x, y):
        seen.append((x.shape, y.shape))
        return x + y

    def rule(axis_size, in_batched, x, y):
        asked.append((axis_size, in_batched, x.shape, y.shape))
        return hc.call(whole, BATCH, x, y), True

    def f(x, y):
        return hc.call(add, ROW, x, y, vmap_method=rule)

    np.testing.assert_array_equal(wrap(f)(Y, Y), Y + Y)
    assert asked == []  # a call without vmap is the call itself
    got = wrap(jax.vmap(f, in_axes=(1, None)))(X.T.copy(), Y)
    np.testing.assert_array_equal(got, X + Y)
    assert asked == [(4, (True, False), (4, 3), (3,))]
    assert seen == [((4, 3), (3,))]


def test_a_rule_with_keyword_arguments_and_trees():
    asked = []

    def rule(axis_size, in_batched, tree, name, *, scale, shift):
        asked.append((axis_size, in_batched, name))
        out = tree["a"] * scale[:, None] + tree["b"] + shift
        return {"out": out, "size": jnp.int32(axis_size)}, {"out": True, "size": False}

    def host(tree, name, *, scale, shift):
        raise AssertionError("the rule has no call in it")

    result = {"out": ROW, "size": jax.ShapeDtypeStruct((), np.int32)}
    f = jax.vmap(
        lambda tree, s: hc.call(
            host, result, tree, "name", scale=s, shift=1.0, vmap_method=rule
        ),
        in_axes=({"a": 0, "b": None}, 0),
        out_axes={"out": 1, "size": 0},
    )
    scale = np.arange(4, dtype=np.float32)
    got = jax.jit(f)({"a": X, "b": Y}, scale)
    np.testing.assert_array_equal(got["out"], (X * scale[:, None] + Y + 1).T)
    np.testing.assert_array_equal(got["size"], [4] * 4)
    [(size, in_batched, name)] = asked
    assert (size, name) == (4, "name")
    tree, static, kwargs = in_batched
    assert tree == {"a": True, "b": False}
    assert kwargs == {"scale": True, "shift": False}
    del static  # a leaf that is not an array has no flag


def test_an_unbatched_result_is_the_same_for_every_row():
    seen = []

    def host(x):
        seen.append(x.shape)
        return x

    def rule(axis_size, in_batched, x, y):
        return hc.call(host, ROW, y), False

    f = jax.vmap(lambda x, y: hc.call(add, ROW, x, y, vmap_method=rule), (0, None))
    np.testing.assert_array_equal(jax.jit(f)(X, Y), np.stack([Y] * 4))
    assert seen == [(3,)]


def test_the_call_in_a_rule_is_batched_by_the_vmap_outside():
    asked, seen = [], []

    def whole(x, y):
        seen.append((x.shape, y.shape))
        return x + y

    def rule(axis_size, in_batched, x, y):
        asked.append((axis_size, in_batched, x.shape, y.shape))
        return hc.call(whole, BATCH, x, y[None], vmap_method="expand_dims"), True

    f = jax.vmap(
        jax.vmap(lambda x, y: hc.call(add, ROW, x, y, vmap_method=rule), (0, None)),
        (None, 0),
    )
    ys = np.stack([Y, Y + 1])
    np.testing.assert_array_equal(jax.jit(f)(X, ys), X + ys[:, None])
    assert asked == [(4, (True, False), (4, 3), (3,))]
    assert seen == [((1, 4, 3), (2, 1, 3))]


def test_an_error_of_the_rule_is_raised():
    def rule(axis_size, in_batched, x, y):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jax.vmap(lambda x: hc.call(add, ROW, x, x, vmap_method=rule))(X)


WRONG = {
    "no pair": (
        lambda n, flags, x, y: x,
        "the vmap_method of `add` should return (result, batched), got",
    ),
    "three": (
        lambda n, flags, x, y: (x, True, None),
        "the vmap_method of `add` should return (result, batched), got tuple",
    ),
    "batched shape": (
        lambda n, flags, x, y: (x[0], True),
        "float32[3] for a leaf that should be float32[4, 3]",
    ),
    "unbatched shape": (
        lambda n, flags, x, y: (x, False),
        "float32[4, 3] for a leaf that should be float32[3]",
    ),
    "dtype": (
        lambda n, flags, x, y: (x.astype(jnp.int32), True),
        "int32[4, 3] for a leaf that should be float32[4, 3]",
    ),
    "structure": (lambda n, flags, x, y: ([x, x], True), "`add`"),
    "structure of batched": (lambda n, flags, x, y: (x, [True, False]), "`add`"),
}


@pytest.mark.parametrize(("rule", "text"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_refused(rule, text):
    f = jax.vmap(lambda x: hc.call(add, ROW, x, x, vmap_method=rule))
    with pytest.raises(hc.errors.BatchingError, match=re.escape(text)):
        jax.jit(f)(X)


@pytest.mark.parametrize(
    "answer",
    [([X], True), ({"b": X}, True), ({"a": X}, [True]), ({"a": X}, {"a": "yes"})],
    ids=["list", "other key", "list of flags", "no flag"],
)
def test_an_answer_of_another_structure_is_refused(answer):
    f = jax.vmap(
        lambda x: hc.call(
            add, {"a": ROW}, x, x, vmap_method=lambda n, flags, x, y: answer
        )
    )
    with pytest.raises(hc.errors.BatchingError, match="the vmap_method of `add`"):
        jax.jit(f)(X)


def test_a_rule_and_where_are_refused_together():
    def rule(n, flags, x, y):
        return x, True

    f = jax.vmap(lambda x, w: hc.call(add, ROW, x, x, where=w, vmap_method=rule))
    with pytest.raises(
        hc.errors.BatchingError, match="where= and a vmap_method of your own"
    ):
        f(X, np.ones(4, bool))
