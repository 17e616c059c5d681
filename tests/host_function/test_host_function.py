"""hc.host: calling, results, batches, names, pickling."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

ROW = np.arange(3, dtype=np.float32)


def counted(fn):
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return fn(*args, **kwargs)

    wrapper.calls = 0
    wrapper.__name__ = wrapper.__qualname__ = getattr(fn, "__name__", "f")
    return wrapper


@hc.host(result=hc.results.like(0))
def module_sine(x):
    return np.sin(x)


@module_sine.defjvp
def module_cosine(primals, tangents):
    return np.cos(primals[0]) * tangents[0]


def plain(x):
    return 2 * x


def plain_transpose(ct):
    return 2 * ct


aliased = hc.host(plain, result=hc.results.like(0))
aliased.deftranspose(plain_transpose)


# --- Calling -----------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_it_is_called_like_a_function(wrap):
    np.testing.assert_array_equal(wrap(module_sine)(ROW), np.sin(ROW))
    twice = jax.jit(lambda x: module_sine(module_sine(x)))
    np.testing.assert_array_equal(twice(ROW), np.sin(np.sin(ROW)))


def test_trees_static_objects_and_keywords():
    @hc.host(result=hc.results.same_tree(0))
    def scale(tree, how, factor=2.0):
        assert how == "times"
        return {k: v * factor for k, v in tree.items()}

    tree = {"a": ROW, "b": np.float32(1)}
    out = jax.jit(lambda t: scale(t, "times", factor=3.0))(tree)
    np.testing.assert_array_equal(out["a"], 3 * ROW)
    assert scale(tree, how="times")["b"] == 2


def test_a_keyword_without_a_position_is_refused():
    f = hc.host(lambda x, *, y: x, result=hc.results.like(0))
    with pytest.raises(hc.errors.SpecError, match="by position"):
        f(ROW, y=1)
    with pytest.raises(hc.errors.SpecError, match="missing a required"):
        hc.host(plain, result=hc.results.like(0))(y=1)


def test_typed_keys_as_arguments_and_results():
    f = hc.host(lambda key, x: (key, x), result=lambda key, x: (key, x))
    key = jax.random.key(3)
    out, _ = jax.jit(f)(key, ROW)
    assert jnp.array_equal(jax.random.key_data(out), jax.random.key_data(key))


def test_the_name_is_in_reprs_and_traces():
    shown = "<hostcall.typing.HostFunction module_sine -> like(0) with defjvp>"
    assert repr(module_sine) == shown
    assert module_sine.__name__ == "module_sine"
    assert "module_sine" in str(jax.make_jaxpr(module_sine)(ROW))
    named = hc.host(lambda x: x, result=hc.results.like(0), name="best")
    assert named.__name__ == "best"
    assert "best" in str(jax.make_jaxpr(named)(ROW))


def test_the_error_of_the_function_names_the_users_line():
    def fail(x):
        raise LookupError("no")

    f = hc.host(fail, result=hc.results.like(0))

    def program(x):
        return f(x)

    line = program.__code__.co_firstlineno + 1
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.jit(program)(ROW).block_until_ready()
    assert "LookupError: no" in str(caught.value)
    assert f"{__file__}:{line} in " in str(caught.value)


def test_it_can_be_pickled():
    for f in (module_sine, aliased):
        again = pickle.loads(pickle.dumps(f))
        np.testing.assert_array_equal(again(ROW), f(ROW))
    assert pickle.loads(pickle.dumps(module_sine)) is module_sine
    again = pickle.loads(pickle.dumps(aliased))
    assert again is not aliased
    assert jax.grad(lambda x: again(x).sum())(ROW).tolist() == [2, 2, 2]


def test_calls_with_equal_arguments_compile_once(compiled_during):
    f = jax.jit(lambda x: module_sine(x))
    f(ROW)
    assert compiled_during(lambda: f(ROW + 1)) == 0
    assert compiled_during(lambda: module_sine(ROW)) == 0


def test_options_reach_the_call():
    kinds = []
    f = hc.host(
        lambda x: kinds.append(type(x)) or x, result=hc.results.like(0), arrays="jax"
    )
    jax.block_until_ready(f(ROW))
    assert issubclass(kinds[0], jax.Array)

    @hc.host(result=hc.results.like(0), lend="out")
    def double(x, out):
        np.multiply(x, 2, out=out)

    double.defjvp(lambda p, t: 2 * t[0])
    np.testing.assert_array_equal(jax.jit(double)(ROW), 2 * ROW)
    out, dot = jax.jit(lambda x: jax.jvp(double, (x,), (x,)))(ROW)
    np.testing.assert_array_equal(out, 2 * ROW)
    np.testing.assert_array_equal(dot, 2 * ROW)


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_functions_with_effects(order):
    seen = []
    f = hc.host(
        lambda x: seen.append(float(x)) or x, result=hc.results.like(0), order=order
    )

    @jax.jit
    def program(x):
        f(x)
        return jax.lax.scan(lambda c, r: (c, f(r)), 0.0, ROW)[1]

    jax.block_until_ready(program(np.float32(7)))
    jax.effects_barrier()
    # An unordered call comes once, but at no fixed place beside a loop: on a GPU after it.
    assert sorted(seen) == [0, 1, 2, 7]
    assert order == "unordered" or seen[0] == 7
    assert [v for v in seen if v != 7] == [0, 1, 2]
    with pytest.raises(hc.errors.SpecError, match=r"order=.*make it pure"):
        f.defjvp(lambda p, t: t)


# --- Results -----------------------------------------------------------------------


def test_elementwise_promotes_and_broadcasts(x64):
    f = hc.host(np.hypot, result=hc.results.elementwise)
    cases = [
        ((ROW, 1.0), np.float32),  # Python's numbers have weak types
        ((ROW, 1), np.float32),
        ((ROW, np.float64(1)), np.float64),
        ((np.arange(3), 2), np.float64),
        ((np.ones((2, 1), np.float32), ROW), np.float32),
    ]
    for args, dtype in cases:
        out = jax.jit(f)(*args)
        want = np.hypot(*args)
        assert out.dtype == dtype, args
        assert f(*args).dtype == dtype
        np.testing.assert_allclose(out, want, rtol=1e-6)
        assert out.shape == want.shape


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all", "sequential"])
def test_elementwise_rows_of_unequal_ranks(method, x64):
    f = hc.host(
        lambda x, y: x - y**2, result=hc.results.elementwise, vmap_method=method
    )

    @f.defjvp
    def _(primals, tangents):
        return tangents[0] - 2 * primals[1] * tangents[1]

    square, row = np.arange(9.0).reshape(3, 3), np.array([0.5, 1.0, 2.0])
    cases = [
        ((0, 0), square, row),  # row has as many numbers as square has rows
        ((None, 0), np.arange(5.0), row),
        ((0, None), row, np.arange(5.0)),
        ((1, 0), square, row),
    ]
    for dims, x, y in cases:
        got = jax.jit(jax.vmap(f, dims))(x, y)
        np.testing.assert_array_equal(got, jax.vmap(lambda x, y: x - y**2, dims)(x, y))

    def along(f):
        return jax.vmap(lambda x, y: jax.jvp(f, (x, y), (x, y)))(square, row)

    got, want = along(f), along(lambda x, y: x - y**2)
    np.testing.assert_allclose(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1])


def test_a_function_of_the_arguments():
    def outer(x, y):
        return jax.ShapeDtypeStruct((x.shape[0], y["b"].shape[0]), x.dtype)

    f = hc.host(lambda x, y: np.outer(x, y["b"]), result=outer)
    out = f(ROW, {"b": ROW[:2]})
    np.testing.assert_array_equal(out, np.outer(ROW, ROW[:2]))


def test_infer_runs_once_an_aval():
    fn = counted(lambda x, n: {"s": x.sum() * n, "t": np.stack([x, x])})
    f = hc.host(fn, result="infer")
    program = jax.jit(lambda x: (f(x, 2), f(x + 1, 2)))
    out, _ = program(ROW)
    assert out["s"] == 6
    assert out["t"].shape == (2, 3)
    assert fn.calls == 3  # once on zeros, twice in the program
    f(ROW, 2)
    assert fn.calls == 4
    f(ROW[:2], 2)
    assert fn.calls == 6


SPEC_ERRORS = {
    "like a tree": (hc.results.like(0), ({"a": ROW},), r"hc\.results\.same_tree\(0\)"),
    "like nothing": (
        hc.results.like(2),
        (ROW,),
        r"result=hc\.results\.like\(2\), and was called with 1 argument\.",
    ),
    "same_tree of nothing": (
        hc.results.same_tree(2),
        (ROW,),
        r"result=hc\.results\.same_tree\(2\), and was called with 1 argument\.",
    ),
    "infer": ("infer", ("x",), r"failed on zeros: \w+: .*result="),
    "function": (lambda x: x.nothing, (ROW,), r"failed for \(float32\[3\]\)"),
    "no spec": (object(), (ROW,), "has no shape and dtype"),
}


@pytest.mark.parametrize(
    ("result", "args", "text"), SPEC_ERRORS.values(), ids=SPEC_ERRORS.keys()
)
def test_errors_of_result(result, args, text):
    f = hc.host(lambda x: x + 1, result=result)
    with pytest.raises(hc.errors.SpecError, match=text):
        f(*args)


def test_errors_of_options():
    with pytest.raises(hc.errors.SpecError, match="should be a function"):
        hc.host(3, result=hc.results.like(0))
    with pytest.raises(hc.errors.SpecError, match="A text is 'infer', or a signature"):
        hc.host(plain, result="same")
    for nondiff in (("x",), 1.5, None, [True], np.array(0)):
        with pytest.raises(hc.errors.SpecError, match="nondiff="):
            hc.host(plain, result=hc.results.like(0), nondiff=nondiff)


def two(a, b, *, k=1):
    return a * b


@pytest.mark.parametrize("nondiff", [2, -3, (0, 2), [5], 2**70])
def test_a_position_that_no_argument_has(nondiff):
    with pytest.raises(
        hc.errors.SpecError,
        match=r"nondiff= of `two` should be positions of arguments, from 0 to 1, got"
        r" .* It takes 2 arguments by position",
    ):
        hc.host(two, result=hc.results.like(0), nondiff=nondiff)
    with pytest.raises(hc.errors.SpecError, match="takes 2 arguments by position"):
        hc.host(functools.partial(two, k=3), result=hc.results.like(0), nondiff=nondiff)


class Scaled:
    def __call__(self, a, b):
        return a * b

    def method(self, a, b):
        return a * b


@pytest.mark.parametrize(
    ("fn", "most"),
    [
        (Scaled(), 2),
        (Scaled().method, 2),
        (functools.partial(two, 1), 1),
        (functools.partial(two, b=1), 1),
        (functools.partial(Scaled(), 1), 1),
        (np.multiply, 2),
        (np.sin, 1),
    ],
)
def test_how_many_positions_a_callable_has(fn, most):
    like = hc.results.like(0)
    hc.host(fn, result=like, nondiff=(most - 1, -most))
    for nondiff in (most, -most - 1):
        with pytest.raises(hc.errors.SpecError, match=f"takes {most} argument"):
            hc.host(fn, result=like, nondiff=nondiff)


def test_positions_of_any_number_of_arguments():
    hc.host(lambda *args: args[0], result=hc.results.like(0), nondiff=(3, -9))
    hc.host(two, result=hc.results.like(0), nondiff=(1, -2))
    with pytest.raises(hc.errors.SpecError, match="should be left out, got 0"):
        hc.host(
            lambda: np.float32(1),
            result=jax.ShapeDtypeStruct((), np.float32),
            nondiff=0,
        )


def test_more_rules_than_arguments():
    f = hc.host(two, result=hc.results.like(0))
    with pytest.raises(hc.errors.SpecError, match="3 rules, .* takes 2 arguments"):
        f.defjvps(None, None, lambda t, out, a, b: t)
    for order in ("some", np.ones(3)):
        with pytest.raises(hc.errors.SpecError, match="order="):
            hc.host(plain, result=hc.results.like(0), order=order)
    for name in (5, np.ones(2)):
        with pytest.raises(hc.errors.SpecError, match="name="):
            hc.host(plain, result=hc.results.like(0), name=name)
    with pytest.raises(hc.errors.SpecError, match="should be 'host'"):
        hc.host(plain, result=hc.results.like(0)).defjvp(plain, where="gpu")
    with pytest.raises(hc.errors.SpecError, match="wants a function"):
        hc.host(plain, result=hc.results.like(0)).defvjp(plain, 3)
    with pytest.raises(hc.errors.SpecError, match="was given no rule"):
        hc.host(plain, result=hc.results.like(0)).defjvps(None)
    with pytest.raises(hc.errors.SpecError, match="drop residuals="):
        hc.host(plain, result=hc.results.like(0)).defvjp(
            plain, plain, where="jax", residuals=ROW
        )
    with pytest.raises(hc.errors.SpecError, match="already"):
        module_sine.defjvp(module_cosine)
    with pytest.raises(hc.errors.SpecError, match="drop one of the two"):
        module_sine.deftranspose(plain_transpose)
    with pytest.raises(hc.errors.SpecError, match="drop one of the two"):
        aliased.defjvp(module_cosine)


# --- Batches -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "calls"), [(None, 3), ("expand_dims", 1), ("parallel", 3)]
)
def test_vmap_by_method(method, calls):
    fn = counted(np.sin)
    f = hc.host(fn, result=hc.results.like(0), vmap_method=method)
    out = jax.jit(jax.vmap(f))(ROW)
    np.testing.assert_array_equal(out, np.sin(ROW))
    assert fn.calls == calls
    nested = jax.vmap(jax.vmap(f, 1, 1), 0)(np.ones((2, 3, 4), np.float32))
    np.testing.assert_array_equal(nested, np.sin(np.ones((2, 3, 4), np.float32)))


def test_vmap_by_rule():
    seen = []
    f = hc.host(lambda x, y: x + y, result=hc.results.elementwise)

    @f.defbatch
    def _(size, in_batched, x, y):
        seen.append((size, in_batched))
        return jnp.sin(x) + y, True

    out = jax.vmap(f, (0, None))(ROW, np.float32(1))
    np.testing.assert_allclose(out, np.sin(ROW) + 1, rtol=1e-6)
    assert seen == [(3, (True, False))]
    # The derivative of a batch comes from the rule's code.
    slope = jax.grad(lambda x: jax.vmap(f, (0, None))(x, 1.0).sum())(ROW)
    np.testing.assert_allclose(slope, np.cos(ROW), rtol=1e-6)


@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
@pytest.mark.parametrize("by", ["vmap_method", "defbatch"])
def test_vmap_by_rule_with_any_order(by, order):
    rule = lambda size, in_batched, x: (x * 100, True)
    options = {"vmap_method": rule} if by == "vmap_method" else {}
    f = hc.host(lambda x: x + 1, result=hc.results.like(0), order=order, **options)
    if by == "defbatch":
        f.defbatch(rule)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(ROW), ROW * 100)
    with pytest.raises(hc.errors.BatchingError, match="The mask could not reach"):
        jax.vmap(lambda x: f.where(x > 0)(x))(ROW)


def test_vmap_by_rule_with_a_result_that_all_rows_share():
    f = hc.host(lambda x: (x, x), result=lambda x: (x, x))
    f.defbatch(lambda size, in_batched, x: ((x * 2, jnp.float32(3)), (True, False)))
    for out_axes, shared in (((0, None), 3), (0, [3, 3, 3])):
        doubled, same = jax.jit(jax.vmap(f, out_axes=out_axes))(ROW)
        np.testing.assert_array_equal(doubled, ROW * 2)
        np.testing.assert_array_equal(same, shared)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda x: x, r"should return \(result, batched\)"),
        (lambda x: ((x, x), True), "in the structure of the result"),
        (lambda x: (x[0], True), r"float32\[\].*should be float32\[3\]"),
    ],
)
def test_errors_of_a_batching_rule(answer, text):
    f = hc.host(lambda x: x, result=hc.results.like(0))
    f.defbatch(lambda size, in_batched, x: answer(x))
    with pytest.raises(hc.errors.BatchingError, match=text):
        jax.vmap(f)(ROW)


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    f = jax.shard_map(module_sine, mesh=mesh, in_specs=spec, out_specs=spec)
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(f)(x), np.sin(x))
    _, dot = jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x)
    np.testing.assert_allclose(dot, np.cos(x) * x, rtol=1e-6)


def test_numbers_of_python_as_tangents():
    f = hc.host(np.sin, result=hc.results.like(0))
    f.defjvp(lambda p, t: np.cos(p[0]) * t[0])
    _, dot = jax.jvp(f, (2.0,), (1.0,))
    np.testing.assert_allclose(dot, np.cos(2.0), rtol=1e-6)


def test_elementwise_with_residuals_of_unequal_ranks():
    f32 = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((3,), np.float32)
    f = hc.host(
        lambda x, y: x * y, result=hc.results.elementwise, vmap_method="expand_dims"
    )
    f.defvjp(
        lambda x, y: (x * y, (x, y)),
        lambda kept, ct: ((ct * kept[1]).sum(), ct * kept[0]),
        residuals=f32,
    )
    x, y = jnp.arange(3.0) + 1, jnp.arange(9.0).reshape(3, 3)
    loss = lambda f: lambda x, y: (jax.vmap(f)(x, y) ** 2).sum()
    got = jax.jit(jax.value_and_grad(loss(f), (0, 1)))(x, y)
    want = jax.value_and_grad(loss(lambda x, y: x * y), (0, 1))(x, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_elementwise_rules_that_leave_out_the_argument_of_the_batch():
    f = hc.host(
        lambda x, y: x * np.sin(y),
        result=hc.results.elementwise,
        vmap_method="expand_dims",
    )
    f.defjvps(lambda t, o, x, y: t * np.sin(y), lambda t, o, x, y: t * x * np.cos(y))
    got = jax.vmap(jax.jacfwd(f), (0, None))(jnp.ones(3), 1.0)
    np.testing.assert_allclose(got, np.full(3, np.sin(1.0)), rtol=1e-6)


def test_a_nondifferentiable_argument_that_is_left_out():
    f = hc.host(lambda a, b, c=None: a * b, result=hc.results.like(0), nondiff=(2, -1))
    f.defjvp(lambda p, t: t[0] * p[1])
    _, dot = jax.jvp(lambda a: f(a, 2.0), (1.0,), (1.0,))
    assert dot == 2
