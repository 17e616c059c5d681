"""`hc.testing.collect`: the values of tagged taps, stacked."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc

EAGER_AND_JIT = pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit], ids=["eager", "jit"]
)
X = np.arange(4, dtype=np.float32)


def nothing(*args, **kwargs):
    """A tap function that does nothing: the tests look at what is collected."""


def halving(x, **options):
    """Taps x, x/2 and x/4 under the name "x"."""

    def step(c, _):
        hc.tap(nothing, c, tag="x", order="ordered", **options)
        return c / 2, None

    return lax.scan(step, x, None, length=3)[0]


HALVES = np.stack([X, X / 2, X / 4])


@EAGER_AND_JIT
def test_as_a_context_manager(wrap):
    f = wrap(halving)
    for n in range(2):
        with hc.testing.collect() as seen:
            f(X + n)
            assert seen == {}  # until the block is left
        assert list(seen) == ["x"]
        assert isinstance(seen["x"], np.ndarray)
        np.testing.assert_array_equal(seen["x"], [X + n, (X + n) / 2, (X + n) / 4])


@EAGER_AND_JIT
def test_as_a_transformation(wrap):
    collected = hc.testing.collect(wrap(halving))
    for n in range(2):
        out, seen = collected(X + n)
        np.testing.assert_array_equal(out, (X + n) / 8)
        np.testing.assert_array_equal(seen["x"], [X + n, (X + n) / 2, (X + n) / 4])
    assert collected.__name__ == "halving"
    assert collected.__doc__ == halving.__doc__


def test_a_transformation_passes_all_arguments():
    def f(a, *, b):
        hc.tap(nothing, a, b, tag="both")
        return {"sum": a + b}

    out, seen = hc.testing.collect(jax.jit(f))(1.0, b=2.0)
    assert out == {"sum": 3}
    assert jax.tree.map(np.ndarray.tolist, seen) == {"both": ([1.0], [2.0])}


ARGUMENTS = {
    "one": (((X,), {}), X[None]),
    "several": (((X, 2.0), {}), (X[None], np.float32([2]))),
    "keywords": (((X,), {"k": 2.0}), ((X[None],), {"k": np.float32([2])})),
    "tree": ((({"a": X, "b": [X, None]},), {}), {"a": X[None], "b": [X[None], None]}),
    "static": (((X, "text"), {}), (X[None], ["text"])),
}


@EAGER_AND_JIT
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("times", [1, 3])
def test_each_kind_of_arguments_is_stacked(times, arguments, wrap):
    (args, kwargs), want = ARGUMENTS[arguments]
    run = wrap(lambda: hc.tap(nothing, *args, tag="it", **kwargs))
    with hc.testing.collect() as seen:
        for _ in range(times):
            run()

    if arguments == "static":
        assert seen["it"][1] == ["text"] * times
        seen["it"], want = seen["it"][0], want[0]
    assert jax.tree.structure(seen["it"]) == jax.tree.structure(want)
    want = jax.tree.map(lambda once: np.repeat(once, times, 0), want)
    jax.tree.map(np.testing.assert_array_equal, seen["it"], want)


def test_names_are_kept_apart_and_the_unnamed_left_out():
    @jax.jit
    def f(x):
        hc.tap(nothing, x, tag="a")
        hc.tap(nothing, x + 1, tag="b")
        hc.tap(nothing, x + 2)
        hc.tap(nothing, x + 3, tag="a")
        return hc.tap_through(nothing, x + 4, tag="through")

    with hc.testing.collect() as seen:
        f(1.0)
    assert {name: value.tolist() for name, value in seen.items()} == {
        "a": [1, 4],
        "b": [2],
        "through": [5],
    }


@pytest.mark.parametrize(
    "kind", [hc.derivatives.tap_tangent, hc.derivatives.tap_cotangent]
)
def test_derivatives_are_collected(kind):
    f = lambda x: jnp.sin(kind(nothing, x * x, tag="dot"))
    with hc.testing.collect() as seen:
        if kind is hc.derivatives.tap_tangent:
            jax.jit(lambda x: jax.jvp(f, (x,), (1.0,)))(2.0)
        else:
            jax.jit(jax.grad(f))(2.0)
    want = 4 if kind is hc.derivatives.tap_tangent else np.cos(4.0)
    np.testing.assert_allclose(seen["dot"], [want], rtol=1e-5)


def test_what_does_not_fit_together_stays_a_list():
    shapes = [X, X[:2], X]
    trees = [X, {"a": X}]
    with hc.testing.collect() as seen:
        for x in shapes:
            hc.tap(nothing, x, tag="shapes")
        for x in trees:
            hc.tap(nothing, x, tag="trees")
    for got, want in ((seen["shapes"], shapes), (seen["trees"], trees)):
        assert isinstance(got, list)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@EAGER_AND_JIT
def test_under_vmap(wrap):
    with hc.testing.collect() as seen:
        wrap(jax.vmap(lambda x: halving(x, rows="each")))(X)
    np.testing.assert_array_equal(seen["x"], HALVES.ravel())
    with hc.testing.collect() as seen:
        wrap(jax.vmap(halving))(X)
    np.testing.assert_array_equal(seen["x"], HALVES)


def test_where_and_grad():
    def f(x):
        hc.tap(nothing, x, tag="x", where=x > 1, rows="each")
        return x * x

    out, seen = hc.testing.collect(jax.jit(jax.vmap(jax.grad(f))))(X)
    np.testing.assert_array_equal(out, 2 * X)
    np.testing.assert_array_equal(seen["x"], [2, 3])


def test_values_are_copies():
    def spoil(x):
        x[:] = -1

    with hc.testing.collect() as seen:
        hc.tap(spoil, X, tag="x")
        jax.jit(lambda x: hc.tap(spoil, x, tag="x"))(X)
    np.testing.assert_array_equal(seen["x"], [X, X])


@pytest.mark.parametrize("arrays", ["numpy", "jax", "dlpack"])
@EAGER_AND_JIT
def test_arrays_of_every_kind_become_numpy_arrays(wrap, arrays):
    with hc.testing.collect() as seen:
        wrap(lambda x: hc.tap(nothing, x, tag="x", arrays=arrays))(X)
    assert isinstance(seen["x"], np.ndarray)
    np.testing.assert_array_equal(seen["x"], [X])


@EAGER_AND_JIT
def test_keys_are_collected(wrap):
    keys = jax.random.split(jax.random.key(0), 2)
    f = wrap(lambda key: hc.tap(nothing, key, tag="key"))
    with hc.testing.collect() as seen:
        for key in keys:
            f(key)
    for got, want in zip(seen["key"], keys, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(
            jax.random.key_data(got), jax.random.key_data(want)
        )


# --- When it looks -------------------------------------------------------------------


def test_the_tapped_function_runs_as_ever():
    calls = []
    with hc.testing.collect() as seen:
        jax.jit(lambda x: hc.tap(calls.append, x, tag="x"))(X)
    np.testing.assert_array_equal(calls, seen["x"])


def test_taps_from_before_and_after_are_not_seen():
    go = threading.Event()
    slow = jax.jit(lambda x: hc.tap(lambda _: go.wait(), x, tag="x"))
    slow(1.0)  # still running until collect waits for it
    threading.Timer(0.1, go.set).start()
    with hc.testing.collect() as seen:
        slow(2.0)
    slow(3.0)
    hc.barrier()
    assert seen["x"].tolist() == [2]


def test_nested_collections_see_each_their_own():
    f = jax.jit(lambda x: hc.tap(nothing, x, tag="x", order="ordered"))
    with hc.testing.collect() as outer:
        f(1.0)
        with hc.testing.collect() as inner:
            f(2.0)
        _, transformed = hc.testing.collect(f)(3.0)
        f(4.0)
    f(5.0)
    hc.barrier()
    assert inner["x"].tolist() == [2]
    assert transformed["x"].tolist() == [3]
    assert outer["x"].tolist() == [1, 2, 3, 4]


def test_taps_of_other_threads_are_seen():
    f = jax.jit(lambda x: hc.tap(nothing, x, tag="x"))
    with hc.testing.collect() as seen:
        threads = [threading.Thread(target=f, args=(float(n),)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(seen["x"].tolist()) == [0, 1, 2, 3]


def test_collecting_needs_no_new_program():
    traces = []

    @jax.jit
    def f(x):
        traces.append(x)
        hc.tap(nothing, x, tag="x")

    for n in range(3):
        f(float(n))
        with hc.testing.collect() as seen:
            f(float(n))
        assert seen["x"].tolist() == [n]
    assert len(traces) == 1


# --- Failures ------------------------------------------------------------------------


def test_a_failing_tap_is_raised_at_the_end_with_what_was_seen():
    def failing(x):
        if x == 2:
            raise KeyError("two")

    f = jax.jit(lambda x: hc.tap(failing, x, tag="x", order="ordered"))
    with pytest.raises(KeyError, match="two"), hc.testing.collect() as seen:
        for n in range(4):
            f(float(n))
    assert seen["x"].tolist() == [0, 1, 2, 3]
    with hc.testing.collect() as later:
        pass
    assert later == {}


def test_an_error_of_the_block_is_raised_and_ends_the_collecting():
    f = jax.jit(lambda x: hc.tap(nothing, x, tag="x"))
    with pytest.raises(ZeroDivisionError), hc.testing.collect() as seen:
        f(1.0)
        1 / 0
    f(2.0)
    hc.barrier()
    assert seen["x"].tolist() == [1]


def test_without_a_function_it_is_no_function():
    with pytest.raises(TypeError, match="without a function is a context manager"):
        hc.testing.collect()(X)


def test_a_collector_of_a_collector():
    f = hc.testing.collect(
        hc.testing.collect(jax.jit(lambda x: (hc.tap(nothing, x, tag="x"), x)[1]))
    )
    (out, inner), outer = f(2.0)
    assert out == 2
    np.testing.assert_array_equal(inner["x"], [2])
    np.testing.assert_array_equal(outer["x"], [2])
