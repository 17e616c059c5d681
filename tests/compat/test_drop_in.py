"""The drop-ins, compared with JAX's own callbacks: the same results, refusals
and arguments, in the same order.
"""

from __future__ import annotations

import functools
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from older_jax import NAMES_CALLBACKS
from platforms import late_square
from specs import like

import hostcall as hc

OURS = {
    "pure": hc.pure_callback,
    "io": hc.io_callback,
    "ordered": functools.partial(hc.io_callback, ordered=True),
}
JAXS = {
    "pure": jax.pure_callback,
    "io": io_callback,
    "ordered": functools.partial(io_callback, ordered=True),
}
KINDS = list(OURS)


def outcome(run):
    """What a program returns, or the type and first line of what it raises."""
    try:
        out = jax.tree.map(np.asarray, run())
        jax.effects_barrier()
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    return out


def assert_same(got, wanted):
    got_leaves, got_tree = jax.tree.flatten(got)
    leaves, tree = jax.tree.flatten(wanted)
    assert got_tree == tree
    for a, b in zip(got_leaves, leaves):
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


# --- Values, in every place -------------------------------------------------------------


def sine(x):
    return np.sin(np.asarray(x))


PLACES = {
    "switch": lambda f, x: lax.switch(1, [lambda v: v, f], x),
    "map": lambda f, x: lax.map(f, x),
    "nested jit": lambda f, x: jax.jit(lambda x: jax.jit(f)(x) + 1)(x),
    "vmap of a part": lambda f, x: jax.vmap(lambda v: v + f(x[0]))(x),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind, place):
    x = jnp.arange(6.0).reshape(2, 3)
    run = [
        lambda api=api: PLACES[place](lambda v: api(sine, like(v), v), x)
        for api in (OURS[kind], JAXS[kind])
    ]
    assert_same(outcome(run[0]), outcome(run[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_trees_and_keywords(kind):
    def host(a, *, b):
        return {"sum": a["x"] + b[0], "pair": (np.asarray(b[0]), a["y"] * 2)}

    spec = {"sum": like(1.0), "pair": (like(1.0), like(1))}

    def f(x, api):
        return api(host, spec, {"x": x, "y": 3}, b=[x * 2])

    got, wanted = (
        outcome(lambda api=api: jax.jit(f, static_argnums=1)(1.5, api))
        for api in (OURS[kind], JAXS[kind])
    )
    assert_same(got, wanted)


def test_callbacks_get_jax_arrays_on_a_device_for_host_code():
    seen = []

    def host(x, y):
        seen.append((x, y))
        return x @ x + y  # JAX inside the callback

    x = jnp.arange(4.0).reshape(2, 2)
    out = jax.jit(lambda x: hc.pure_callback(host, like(x), x, 1.0))(x)
    np.testing.assert_array_equal(out, np.asarray(x) @ np.asarray(x) + 1)
    ((a, b),) = seen
    assert isinstance(a, jax.Array)
    assert isinstance(b, jax.Array)
    (device,) = a.devices()
    assert device.client is not jax.devices()[0].client


def test_arguments_of_callbacks_mix_with_the_users_arrays(caplog):
    """The user's arrays, committed or not, mix with the callback's arguments without a
    warning.
    """
    weights = jnp.ones(3)
    committed = jax.device_put(np.ones(3, np.float32), jax.devices()[1])

    def host(x):
        return x * weights + jnp.dot(x, committed)

    x = jnp.arange(3.0)
    out = jax.jit(lambda x: hc.pure_callback(host, like(x), x))(x)
    np.testing.assert_array_equal(out, [3, 4, 5])
    f = jax.jit(lambda x: hc.pure_callback(lambda v: v * 2 + weights, like(x), x))
    np.testing.assert_array_equal(f(x), [1, 3, 5])  # on the device of host code
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("kind", KINDS)
def test_callbacks_that_use_jax_do_not_hang(kind):
    """Sixty programs in flight, each of which waits for JAX inside its callback."""
    square = jax.jit(lambda m: jnp.matmul(m, m, precision="highest"))

    def host(m):
        return np.asarray(square(m))

    f = jax.jit(
        lambda m: jnp.matmul(OURS[kind](host, like(m), m), m, precision="highest")
    )
    m = jnp.eye(*late_square(200))
    outs = [f(m * i) for i in range(60)]
    for i, out in enumerate(outs):
        assert out[0, 0] == i**3


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_arrays_on_demand(kind):
    seen = []

    def host(x):
        seen.append(type(x))
        return x

    x = jnp.arange(3.0)
    OURS[kind](host, like(x), x, arrays="numpy")
    jax.jit(lambda x: OURS[kind](host, like(x), x, arrays="numpy"))(x)
    jax.effects_barrier()
    assert seen == [np.ndarray] * 2


def test_another_choice_of_arrays():
    with pytest.raises(hc.errors.SpecError, match="'jax' or 'numpy', got 'torch'"):
        hc.pure_callback(sine, like(1.0), 1.0, arrays="torch")
    with pytest.raises(hc.errors.SpecError, match="got 'torch'"):
        hc.debug.callback(print, 1.0, arrays="torch")


@pytest.mark.parametrize("dtype", ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"])
@pytest.mark.parametrize("arrays", ["jax", "numpy"])
def test_small_elements(dtype, arrays):
    x = np.arange(2, dtype=np.int32).repeat(5).astype(jnp.dtype(dtype))

    def host(v):
        assert v.dtype == x.dtype
        return v[::-1]

    f = jax.jit(lambda x: hc.pure_callback(host, like(x), x, arrays=arrays))
    np.testing.assert_array_equal(np.asarray(f(x)), x[::-1])


def test_keys_arrive_as_their_blocks():
    seen = []
    key = jax.random.key(3)

    def host(block):
        seen.append((block.dtype, block.shape))
        return np.float32(0)

    f = lambda key: hc.pure_callback(host, like(1.0), key)
    f(key)
    jax.jit(f)(key)
    assert seen == [(np.uint32, (2,))] * 2


def test_an_unused_pure_callback_is_dropped_and_others_are_not():
    seen = []

    @jax.jit
    def f(x):
        hc.pure_callback(lambda v: seen.append("pure") or v, like(x), x)
        hc.io_callback(lambda v: seen.append("io") or v, like(x), x)
        hc.io_callback(lambda v: seen.append("ordered") or v, like(x), x, ordered=True)
        hc.debug.callback(lambda v: seen.append("debug"), x)
        return x

    f(1.0)
    jax.effects_barrier()
    assert sorted(seen) == ["debug", "io", "ordered"]


# --- vmap -----------------------------------------------------------------------------

METHODS = [
    "sequential",
    "sequential_unrolled",
    "expand_dims",
    "broadcast_all",
    "legacy_vectorized",
]


@pytest.mark.parametrize("in_axes", [(0, 0), (1, None), (None, 0), (0, 1)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_vmap_methods(method, nested, in_axes):
    """The values are the same, and the function receives the same shapes in order."""

    def run(api):
        seen = []

        def host(x, y):
            x, y = np.asarray(x), np.asarray(y)
            seen.append((x.shape, y.shape, x.tolist(), y.tolist()))
            return np.cos(x) + y

        def f(x, y):
            return api(host, like(x), x, y, vmap_method=method)

        mapped = jax.vmap(f, in_axes=in_axes)
        if nested:
            mapped = jax.vmap(mapped, in_axes=(0, 0))
        operands = []
        for axis in in_axes:
            n = (2, 3) if axis is None else (4, 2, 3) if axis == 0 else (2, 4, 3)
            shape = (5, *n) if nested else n
            operands.append(jnp.arange(float(np.prod(shape))).reshape(shape))
        out = jax.jit(mapped)(*operands)
        # XLA runs unrolled calls in any order; in a loop they run in row order.
        unrolled = method == "sequential_unrolled"
        return np.asarray(out), sorted(seen) if unrolled else seen

    if method == "legacy_vectorized" and nested and None in in_axes:
        pytest.skip("arguments of such shapes do not broadcast")
    assert_same(run(hc.pure_callback), run(jax.pure_callback))


def test_without_a_method_rows_run_one_after_the_other():
    """As JAX's guide documents; today JAX refuses (tests/compat/test_patch.py)."""
    seen = []

    def host(x):
        seen.append(x.shape)
        return x * 2

    x = jnp.arange(6.0).reshape(3, 2)
    out = jax.vmap(lambda v: hc.pure_callback(host, like(v), v))(x)
    np.testing.assert_array_equal(out, x * 2)
    assert seen == [(2,)] * 3


@pytest.mark.parametrize(
    ("vectorized", "shapes"), [(True, [(3, 2)]), (False, [(2,)] * 3)]
)
def test_vectorized_of_old(vectorized, shapes):
    seen = []

    def host(x):
        seen.append(x.shape)
        return x * 2

    x = jnp.arange(6.0).reshape(3, 2)
    f = lambda v: hc.pure_callback(host, like(v), v, vectorized=vectorized)
    np.testing.assert_array_equal(jax.vmap(f)(x), x * 2)
    assert seen == shapes


def test_vectorized_and_a_method():
    with pytest.raises(ValueError, match="cannot be used together"):
        hc.pure_callback(
            sine, like(1.0), 1.0, vectorized=True, vmap_method="sequential"
        )


def test_another_method():
    wanted = outcome(
        lambda: jax.pure_callback(sine, like(1.0), 1.0, vmap_method="rows")
    )
    got = outcome(lambda: hc.pure_callback(sine, like(1.0), 1.0, vmap_method="rows"))
    assert got == wanted


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("api", ["io", "debug"])
def test_rows_come_in_jaxs_order(api, depth):
    """Under nested vmaps, the rows of the later vmap vary fastest."""
    x = jnp.arange(2.0 * 3 * 4)[: 2 * 3 * 4].reshape(2, 3, 4)

    def run(call):
        seen = []

        def f(v):
            call(lambda row: seen.append(np.asarray(row).tolist()), v)

        for _ in range(depth):
            f = jax.vmap(f)
        jax.jit(f)(x)
        jax.effects_barrier()
        return seen

    ours, jaxs = {
        "io": (
            lambda fn, v: hc.io_callback(fn, None, v),
            lambda fn, v: io_callback(fn, None, v),
        ),
        "debug": (hc.debug.callback, jax.debug.callback),
    }[api]
    got, wanted = run(ours), run(jaxs)
    if api == "io" or depth == 1:
        assert got == wanted
    else:  # JAX's unordered prints come in any order
        assert sorted(got) == sorted(wanted)


def test_ordered_debug_rows_come_in_jaxs_order():
    x = jnp.arange(6.0).reshape(2, 3)

    def run(callback):
        seen = []
        f = lambda v: callback(lambda row: seen.append(float(row)), v, ordered=True)
        jax.jit(jax.vmap(jax.vmap(f)))(x)
        jax.effects_barrier()
        return seen

    assert run(hc.debug.callback) == run(jax.debug.callback) == [0, 3, 1, 4, 2, 5]


# --- Refusals ---------------------------------------------------------------------------


def while_with_a_batched_condition(api):
    def f(n):
        return lax.while_loop(
            lambda i: i < n, lambda i: (api(lambda v: None, None, i), i + 1)[1], 0
        )

    return jax.vmap(f)(jnp.arange(3))


def cond_with_a_batched_predicate(api):
    def f(p):
        return lax.cond(p, lambda: (api(lambda: None, None), 1)[1], lambda: 0)

    return jax.vmap(f)(jnp.array([True, False]))


REFUSED = {
    "jvp": lambda api: jax.jvp(lambda x: api(sine, like(x), x), (1.0,), (1.0,)),
    "transpose": lambda api: jax.linear_transpose(lambda x: api(sine, like(x), x), 1.0)(
        1.0
    ),
    "vmap": lambda api: jax.vmap(lambda x: api(sine, like(x), x))(jnp.arange(3.0)),
    "vmap of cond": cond_with_a_batched_predicate,
    "vmap of while": while_with_a_batched_condition,
    "remat": lambda api: jax.grad(
        jax.checkpoint(lambda x, y: (api(lambda v: v, like(y), y), x)[1])
    )(2.0, 3.0),
    "64 bits": lambda api: api(sine, jax.ShapeDtypeStruct((), np.float64), 1.0),
    "a text": lambda api: api(lambda s: 1.0, like(1.0), "text"),
    "no shape": lambda api: api(sine, 1.0, 1.0),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kind, what):
    if kind == "pure" and what in ("vmap", "vmap of cond", "vmap of while"):
        pytest.skip("hc.pure_callback follows the guide; test_patch.py has the others")
    got, wanted = (
        outcome(lambda: REFUSED[what](api)) for api in (OURS[kind], JAXS[kind])
    )
    if isinstance(wanted, tuple) and isinstance(wanted[0], type):
        assert got[0] is wanted[0]
        if what != "a text" or not NAMES_CALLBACKS.is_missing:
            assert got[1] == wanted[1]
    else:
        assert_same(got, wanted)


# --- What callbacks return ----------------------------------------------------------------

ONE = like(np.zeros(3, np.float32))
RETURNED = {
    "array": (ONE, lambda: np.arange(3, dtype=np.float32)),
    "double": (ONE, lambda: np.arange(3.0)),
    "list of numbers": (ONE, lambda: [1.0, 2.0, 3.0]),
    "in a list": (ONE, lambda: [np.ones(3, np.float32)]),
    "in a dict": (ONE, lambda: {"x": np.ones(3, np.float32)}),
    "jax.Array": (ONE, lambda: jnp.ones(3)),
    "other shape": (ONE, lambda: np.ones((3, 1), np.float32)),
    "other dtype": (ONE, lambda: np.ones(3, np.int32)),
    "half": (ONE, lambda: np.ones(3, np.float16)),
    "nothing": (ONE, lambda: None),
    "too many": (ONE, lambda: (np.ones(3, np.float32),) * 2),
    "too few": ((ONE, ONE), lambda: np.ones(3, np.float32)),
    "other structure": ((ONE, ONE), lambda: {"a": np.ones(3), "b": [np.zeros(3)]}),
    "nested": ((ONE, ONE), lambda: ((np.ones(3), np.ones(3)), None)),
    "three for two": ((ONE, ONE), lambda: ((np.ones(3), np.ones(3)), np.ones(3))),
    "something for nothing": (None, lambda: np.ones(3, np.float32)),
    "nothing for nothing": (None, lambda: None),
    "number": (like(1.0), lambda: 2.5),
    "integer": (like(1), lambda: 7),
    "true": (like(True), lambda: True),
    "integer for a float": (like(1.0), lambda: 7),
    "NumPy scalar": (like(1.0), lambda: np.float64(1.5)),
    "text": (like(1.0), lambda: "text"),
    "strided": (ONE, lambda: np.ones((3, 2), np.float32)[:, 0]),
}


@pytest.mark.parametrize("case", RETURNED)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", ["pure", "io"])
def test_returned(kind, wide, jit, case, request):
    """The same values are accepted and refused as by JAX, with and without 64-bit mode."""
    if wide:
        request.getfixturevalue("x64")
    spec, host = RETURNED[case]

    def run(api):
        f = lambda x: api(lambda v: host(), spec, x)
        return (jax.jit(f) if jit else f)(np.float32(1))

    got, wanted = outcome(lambda: run(OURS[kind])), outcome(lambda: run(JAXS[kind]))
    if isinstance(wanted, tuple) and isinstance(wanted[0], type):
        assert got[0] is wanted[0] is jax.errors.JaxRuntimeError
    else:
        assert_same(got, wanted)


TEXTS = {
    "other shape": "Incorrect output shape for return value #0: Expected: (3,), Actual: (3, 1)",
    "other dtype": "Incorrect output dtype for return value #0: Expected: float32, Actual: int32",
    "too many": "Mismatched number of outputs from callback. Expected: 1, Actual: 2",
    "something for nothing": "Mismatched number of outputs from callback. Expected: 0, Actual: 1",
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_of_wrong_results(case):
    spec, host = RETURNED[case]
    f = jax.jit(lambda x: hc.io_callback(lambda v: host(), spec, x))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        f(1.0)
        jax.effects_barrier()
    text = str(caught.value)
    assert f"RuntimeError: {TEXTS[case]} (in callback `" in text
    assert "test_drop_in.py" in text


def test_integers_that_wrap_around_say_so_once(caplog):
    f = jax.jit(lambda x: hc.pure_callback(lambda v: np.int64(2**40 + 5), like(1), x))
    assert (int(f(1)), int(f(2))) == (5, 5)  # as in JAX
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "returned integers that int32 can't hold" in record.getMessage()
    assert "test_drop_in.py" in record.getMessage()


def test_floats_that_become_infinite_say_so_once(caplog):
    f = jax.jit(lambda x: hc.pure_callback(lambda v: np.float64(1e300), like(1.0), x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy's own, which does not name the function
        assert [float(f(float(n))) for n in range(3)] == [np.inf] * 3  # as in JAX
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "returned numbers that float32 can't hold" in record.getMessage()
    assert "they became infinite, as in JAX outside" in record.getMessage()
    assert "test_drop_in.py" in record.getMessage()


# --- Eager calls ----------------------------------------------------------------------------


def test_an_eager_call_compiles_when_it_comes_again(compiled_during):
    x = np.arange(3, dtype=np.float32)
    spec = like(x)

    def own(v):  # no other test has called it
        return np.sin(np.asarray(v))

    call = lambda: hc.pure_callback(own, spec, x)
    assert compiled_during(call) == 0
    assert compiled_during(call) == 1
    assert compiled_during(call) == 0
    np.testing.assert_array_equal(call(), np.sin(x))


def test_fresh_functions_never_compile(compiled_during):
    def run():
        for i in range(20):
            f = lambda v, i=i: np.asarray(v) + i
            assert int(hc.pure_callback(f, like(1), 1)) == 1 + i

    assert compiled_during(run) == 0


def test_eager_refusals_of_devices():
    """The first call refuses the same as a compiled one."""
    first, second = jax.devices()[:2]
    place = jax.sharding.SingleDeviceSharding(second)
    apart = [jax.device_put(np.float32(1), d) for d in (first, second)]
    for api in (hc.pure_callback, jax.pure_callback):
        for options, operands in (
            ({"sharding": place}, [np.float32(1)]),
            ({}, apart),
            ({"sharding": "cpu"}, [np.float32(1)]),
        ):
            with pytest.raises((ValueError, NotImplementedError)):
                api(lambda *v: v[0], like(1.0), *operands, **options)


class Quantity:
    """A pytree that has a dtype, as arrays with units do."""

    def __init__(self, value):
        self.value = value

    @property
    def dtype(self):
        return self.value.dtype


jax.tree_util.register_pytree_node(
    Quantity, lambda q: ((q.value,), None), lambda _, leaves: Quantity(*leaves)
)


@pytest.mark.parametrize("kind", ["pure", "io"])
def test_a_pytree_with_a_dtype(kind):
    f = lambda api: api(lambda v: Quantity(np.asarray(v) * 2), like(1.0), 3.0)
    assert f(OURS[kind]) == f(JAXS[kind]) == 6


def test_tangents_of_integers_arrive_as_bools():
    zero = np.zeros(2, jax.dtypes.float0)
    seen = []
    host = lambda v: seen.append((v.dtype, v.shape)) or np.float32(1)
    for run in (lambda f: f(), lambda f: jax.jit(f)()):
        run(lambda: hc.pure_callback(host, like(1.0), zero))
        run(lambda: hc.debug.callback(host, zero))
    jax.effects_barrier()
    assert seen == [(np.bool_, (2,))] * 4


def test_bound_methods_and_builtins():
    class Host:
        def double(self, x):
            return np.asarray(x) * 2

    host = Host()
    for _ in range(3):
        assert hc.io_callback(host.double, like(1.0), 2.0) == 4
        assert hc.pure_callback(np.negative, like(1.0), 2.0) == -2
        assert hc.pure_callback(functools.partial(pow, 2), like(1), 3) == 8


def test_eager_operands_of_python_and_numpy():
    seen = []

    def host(*args):
        seen.extend((a.dtype, a.shape) for a in args)

    operands = (1, 2.0, True, 1j, np.int64(3), np.zeros((2, 0)), np.arange(3)[::2])
    hc.io_callback(host, None, *operands)
    mine, seen = seen, []
    io_callback(host, None, *operands)
    jax.effects_barrier()
    assert mine == seen


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("name", ["pure_callback", "io_callback"])
@pytest.mark.parametrize("given", [3, None, "sin", jnp.float32(1)])
def test_a_callback_that_can_not_be_called(given, name, wrap):
    result = jax.ShapeDtypeStruct((), jnp.float32)
    with pytest.raises(
        hc.errors.SpecError,
        match=rf"the first argument should be a function, got .* Write hc\.{name}\(",
    ):
        wrap(lambda x: getattr(hc, name)(given, result, x))(1.0)
