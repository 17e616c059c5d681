"""cache= and transformations: each result equals that of the function without a cache,
and the function runs once for each distinct row.
"""

import asyncio
import gc
import pickle
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import hostcall as hc

X = np.array([0.5, -1.0, 0.5, 2.0], np.float32)  # three distinct rows


def sine(x):
    return np.sin(x)


def cosine(primals, tangents):
    return np.cos(primals[0]) * tangents[0]


def forward(x):
    return np.sin(x), np.cos(x)


def backward(slope, ct):
    return (slope * ct,)


class Counted:
    """A host function with and without a cache, and how often each code of it ran."""

    def __init__(self, fn=sine, result=hc.results.like(0), **options):
        self.ran = {}
        self.plain = hc.host(fn, result=result, **options)
        self.kept = hc.host(self.count(fn), result=result, cache="memory", **options)

    def count(self, fn):
        def counting(*args):
            self.ran[fn.__name__] = self.ran.get(fn.__name__, 0) + 1
            return fn(*args)

        return counting

    def both(self, method, *rules, **options):
        getattr(self.plain, method)(*rules, **options)
        getattr(self.kept, method)(*map(self.count, rules), **options)
        return self

    def check(self, program, *args, times=2):
        """Runs a program of the function, some times, and returns what ran."""
        wanted = program(self.plain)(*args)
        for _ in range(times):
            jax.tree.map(
                np.testing.assert_array_equal, program(self.kept)(*args), wanted
            )
        return self.ran


# --- Under transformations -----------------------------------------------------------

PROGRAMS = {
    "eager": (lambda f: f, X, 1),
    "jit": (jax.jit, X, 1),
    "scan": (lambda f: lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0, x)[1], X, 3),
    "while": (
        lambda f: jax.jit(
            lambda x: jax.lax.fori_loop(0, 5, lambda i, y: f(x[i % 2]) + y, 0.0)
        ),
        X,
        2,
    ),
    "cond": (lambda f: jax.jit(lambda x: jax.lax.cond(x[0] > 0, f, jnp.cos, x)), X, 1),
    "remat": (lambda f: jax.jit(jax.checkpoint(f)), X, 1),
    "vmap of vmap": (lambda f: jax.vmap(jax.vmap(f)), X.reshape(2, 2), 3),
    "where": (lambda f: jax.vmap(lambda x: f.where(x > 0)(x)), X, 2),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_with_a_cache(kind):
    program, x, distinct = PROGRAMS[kind]
    assert Counted().check(program, x) == {"sine": distinct}


METHODS = {
    None: 3,
    "sequential": 3,
    "parallel": 3,
    "expand_dims": 1,  # the batch as a whole
    "broadcast_all": 1,
    "legacy_vectorized": 1,
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("method", METHODS)
def test_equal_rows_run_once(method, wrap):
    found = Counted(vmap_method=method)
    assert found.check(lambda f: wrap(jax.vmap(f)), X) == {"sine": METHODS[method]}


@pytest.mark.parametrize("method", ["sequential", "parallel"])
def test_rows_that_are_there_are_left_out(method):
    found = Counted(vmap_method=method)
    found.check(lambda f: f, X[1], times=1)
    assert found.check(lambda f: jax.jit(jax.vmap(f)), X) == {"sine": 3}


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all"])
def test_a_whole_batch_without_the_masked_rows(method):
    found = Counted(vmap_method=method)
    program = lambda f: jax.vmap(lambda x: f.where(x > 0, 7.0)(x))
    assert found.check(program, X) == {"sine": 1}
    assert found.check(program, -X) == {"sine": 2}
    more = lambda f: jax.vmap(lambda x: f.where(x > 0, 8.0)(x))
    assert found.check(more, X) == {"sine": 3}


@pytest.mark.parametrize("method", ["sequential", "parallel", "expand_dims"])
def test_elementwise_functions(method):
    found = Counted(np.add, hc.results.elementwise, vmap_method=method)
    found.check(lambda f: jax.vmap(f, (0, None)), X, X[:2])


# --- Derivatives ---------------------------------------------------------------------

DERIVATIVES = {
    "jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (2 * x,))),
    "jvp of vmap": lambda f: jax.jit(lambda x: jax.jvp(jax.vmap(f), (x,), (2 * x,))),
    "value and grad": lambda f: jax.jit(jax.value_and_grad(lambda x: f(x).sum())),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
    "grad of remat": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "jacobian": lambda f: jax.jacrev(f),
}


def of_forward_mode(found):
    return found.both("defjvp", cosine)


def of_array_residuals(found):
    residuals = jax.ShapeDtypeStruct((4,), np.float32)
    return found.both("defvjp", forward, backward, residuals=residuals)


def of_a_jacobian(found):
    return found.both("defjacobian", lambda x: np.diag(np.cos(x)))


@pytest.mark.parametrize(
    ("rules", "kind", "ran"),
    [
        (of_forward_mode, "jvp", {"cosine": 1, "sine": 1}),
        (of_forward_mode, "jvp of vmap", {"cosine": 3, "sine": 3}),
        (of_array_residuals, "value and grad", {"forward": 1, "backward": 1}),
        (of_array_residuals, "grad of remat", {"sine": 1, "forward": 1, "backward": 1}),
        (of_array_residuals, "jacobian", {"forward": 1, "backward": 4}),
        (of_a_jacobian, "jvp", {"<lambda>": 1, "sine": 1}),
        (of_a_jacobian, "value and grad", {"<lambda>": 1, "sine": 1}),
    ],
)
def test_each_rule_is_kept_under_its_own_key(rules, kind, ran):
    found = rules(Counted())
    assert found.check(DERIVATIVES[kind], X) == ran


def test_rules_with_residuals_on_the_host_run_each_time():
    found = Counted().both("defvjp", forward, backward)
    assert found.check(DERIVATIVES["value and grad"], X) == {
        "forward": 2,
        "backward": 2,
    }
    found.check(lambda f: f, X)
    assert found.ran["sine"] == 1


def test_finite_differences_and_a_transpose():
    found = Counted(vmap_method="expand_dims")
    for f in (found.plain, found.kept):
        hc.derivatives.finite_difference(f)
    found.check(DERIVATIVES["value and grad"], X, times=1)
    ran = dict(found.ran)
    assert found.check(DERIVATIVES["value and grad"], X) == ran
    twice = Counted(lambda x: 2 * x).both("deftranspose", lambda ct: 2 * ct)
    assert twice.check(lambda f: jax.grad(lambda x: f(x).sum()), X) == {"<lambda>": 2}


# --- Keys ----------------------------------------------------------------------------

NAN = np.float32(np.nan)
PAIRS = {
    "nan": (NAN, NAN, True),
    "another nan": (NAN, np.uint32(0x7FC00001).view(np.float32), False),
    "zeros": (np.float32(0.0), np.float32(-0.0), False),
    "dtypes": (np.float32(0), np.int32(0), False),
    "shapes": (np.zeros(4, np.float32), np.zeros((2, 2), np.float32), False),
    "empty": (np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32), True),
    "bfloat16": (ml_dtypes.bfloat16(1.5), ml_dtypes.bfloat16(1.5), True),
    "two bfloat16": (ml_dtypes.bfloat16(1.5), ml_dtypes.bfloat16(1.25), False),
    "bool": (np.bool_(True), np.bool_(True), True),
    "complex": (np.complex64(1 + 2j), np.complex64(1 + 2j), True),
    "large": (np.ones(5000, np.float32), np.ones(5000, np.float32), True),
    "large, late": (
        np.ones(5000, np.float32),
        np.arange(5000, dtype=np.float32),
        False,
    ),
    "trees": ({"a": X, "b": X[:1]}, {"a": X, "b": X[:1]}, True),
    "other trees": ({"a": X, "b": X[:1]}, {"a": X, "c": X[:1]}, False),
    "lists": ([X, X], (X, X), False),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_arguments_are_equal_if_their_bytes_are(pair):
    one, other, equal = PAIRS[pair]
    found = Counted(lambda x: x, hc.results.same_tree(0))
    found.check(lambda f: f, one, times=1)
    found.check(lambda f: jax.jit(f), other, times=1)
    assert found.ran == {"<lambda>": 1 if equal else 2}


def scaled(x, how):
    return x * len(how) if isinstance(how, str) else x * how["by"]


class Options(dict):
    __hash__ = object.__hash__


def test_static_arguments_are_part_of_the_key():
    found = Counted(scaled)
    by = Options(by=5)
    for how, runs in [("ab", 1), ("abc", 2), ("ab", 2), (by, 3), (Options(by=5), 3)]:
        found.check(lambda f, how=how: lambda x: f(x, how), X, times=1)
        assert found.ran == {"scaled": runs}
    program = jax.jit(lambda x: found.kept(x, by))
    program(X)
    by["by"] = 6  # it is pickled again at each call
    np.testing.assert_array_equal(program(X), 6 * X)


@pytest.mark.parametrize("arrays", ["numpy", "jax", "dlpack"])
def test_kinds_of_arrays_and_typed_keys(arrays):
    found = Counted(lambda x: np.from_dlpack(x), arrays=arrays)
    assert found.check(lambda f: jax.jit(f), X) == {"<lambda>": 1}
    keys = Counted(lambda key, x: (key, x), lambda key, x: (key, x), arrays="jax")
    for seed, runs in [(3, 1), (4, 2), (3, 2)]:
        out, _ = jax.jit(keys.kept)(jax.random.key(seed), X)
        assert out == jax.random.key(seed)
        assert keys.ran == {"<lambda>": runs}


def test_lent_arguments():
    assert Counted(lend=True).check(lambda f: jax.jit(f), X) == {"sine": 1}


# --- What is kept --------------------------------------------------------------------


def test_the_function_may_change_what_it_returned():
    buffer = np.zeros(4, np.float32)

    def reuses(x):
        buffer[:] = x
        return buffer

    f = hc.host(reuses, result=hc.results.like(0), cache="memory")
    first = f(X)
    f(2 * X)
    np.testing.assert_array_equal(f(X), X)
    np.testing.assert_array_equal(first, X)


def test_errors_and_wrong_results_are_not_kept():
    answers = [RuntimeError("no"), np.zeros(7, np.float32), X]

    def fails(x):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    f = jax.jit(hc.host(fails, result=hc.results.like(0), cache="memory"))
    for wanted in (RuntimeError, hc.errors.ResultError):
        with pytest.raises(wanted), hc.reraise():
            jax.block_until_ready(f(X))
    for _ in range(2):
        np.testing.assert_array_equal(f(X), X)
    assert not answers


def test_the_least_recently_used_results_are_dropped():
    found = Counted()
    try:
        hc.configure(cache_bytes=1)  # drops what functions of other tests have left
        hc.configure(cache_bytes=3000)
        rows = [np.full(250, i, np.float32) for i in range(4)]  # 1,200 bytes each
        for i, runs in [(0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)]:
            found.check(lambda f: f, rows[i], times=1)
            assert found.ran == {"sine": runs}, i
        found.check(lambda f: f, np.ones(10_000, np.float32))
        assert found.ran == {"sine": 6}  # too large to be kept
    finally:
        hc.configure(cache_bytes=int(256e6))


def test_cache_clear_and_the_end_of_a_function(in_time):
    found, other = Counted(), Counted()
    for each in (found, other):
        each.check(lambda f: f, X, times=1)
    found.kept.cache_clear()
    assert [each.check(lambda f: f, X)["sine"] for each in (found, other)] == [2, 1]
    # With its last reference go its results.
    large = np.ones(1_000_000, np.float32)
    tracemalloc.start()
    try:
        found.check(lambda f: f, large, times=1)
        assert tracemalloc.get_traced_memory()[0] >= large.nbytes
        del found, other, each
        jax.clear_caches()

        def is_let_go():
            gc.collect()
            Counted().check(lambda f: f, X, times=1)
            return tracemalloc.get_traced_memory()[0] < large.nbytes

        assert in_time(is_let_go)
    finally:
        tracemalloc.stop()


module_sine = hc.host(sine, result=hc.results.like(0), cache="memory")
module_sine.__qualname__ = "another"  # is not found by name


def test_a_pickled_function_has_a_cache_of_its_own():
    module_sine(X)
    again = pickle.loads(pickle.dumps(module_sine))
    stats = hc.monitor.stats
    name = next(key for key in stats() if key.startswith("sine (") and __file__ in key)
    misses = stats()[name].misses
    for _ in range(2):
        np.testing.assert_array_equal(again(X), sine(X))
    assert stats()[name].misses == misses + 1


def test_hits_and_misses_are_counted():
    f = hc.host(sine, result=hc.results.like(0), cache="memory", tag="counted sine")
    for method in (f, jax.vmap(f), jax.vmap(f)):
        method(X)
    found = hc.monitor.stats()["counted sine"]
    assert (found.hits, found.misses) == (5, 4)
    parallel = hc.host(
        sine,
        result=hc.results.like(0),
        cache="memory",
        tag="parallel",
        vmap_method="parallel",
    )
    jax.vmap(parallel)(X)
    found = hc.monitor.stats()["parallel"]
    assert (found.hits, found.misses) == (1, 3)


def test_rows_of_a_coroutine_function():
    ran = []

    async def double(x):
        ran.append(float(x))
        await asyncio.sleep(0)
        return 2 * x

    f = hc.host(
        double, result=hc.results.like(0), cache="memory", vmap_method="parallel"
    )
    for _ in range(2):
        np.testing.assert_array_equal(jax.jit(jax.vmap(f))(X), 2 * X)
        np.testing.assert_array_equal(f(X[0]), 2 * X[0])
    assert sorted(ran) == sorted(set(X.tolist()))
