"""hc.buffers.buffer_callback: works in place on XLA's memory, under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.buffer_callback import buffer_callback
from meshes import grid, line
from specs import spec

import hostcall as hc

JaxRuntimeError = jax.errors.JaxRuntimeError
MODES = {"eager": lambda f: f, "jit": jax.jit}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
EFFECTS = {
    "pure": {},
    "has_side_effect": {"has_side_effect": True},
    "unordered": {"order": "unordered"},
    "ordered": {"order": "ordered"},
}
effects = pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS)


def affine(ctx, out, x, y):
    np.asarray(out)[...] = np.asarray(x) * 2 + np.asarray(y)


@modes
@effects
def test_calls(mode, effect):
    f = mode(hc.buffers.buffer_callback(affine, spec(3, 4), **effect))
    x, y = jnp.arange(12.0).reshape(3, 4), jnp.ones((3, 4))
    for _ in range(3):
        np.testing.assert_array_equal(f(x, y), x * 2 + y)


@modes
def test_trees(mode):
    def host(ctx, out, tree, *, more):
        assert isinstance(ctx, hc.buffers.ExecutionContext)
        assert isinstance(out, dict)
        (a, none), (b,) = tree["a"], tree["b"]
        assert none is None
        leaves = [out["s"], *out["t"], a, b, more]
        assert all(isinstance(leaf, hc.buffers.Buffer) for leaf in leaves)
        np.asarray(out["s"])[...] = np.asarray(a).sum() + np.asarray(more)
        np.asarray(out["t"][0])[...] = np.asarray(b)[::-1]

    f = hc.buffers.buffer_callback(host, {"s": spec(), "t": (spec(3, dtype="int32"),)})
    tree = {"a": (jnp.ones(4), None), "b": [jnp.arange(3)]}
    out = mode(f)(tree, more=2.5)
    assert out["s"] == 6.5
    np.testing.assert_array_equal(out["t"][0], [2, 1, 0])


@modes
def test_what_buffers_and_contexts_say(mode):
    seen = {}

    def host(ctx, out, x, y):
        assert ctx.stage == hc.buffers.ExecutionStage.EXECUTE
        with pytest.raises(JaxRuntimeError, match="XLA FFI GPU context is not avail"):
            _ = ctx.stream
        assert (out.shape, out.dtype, out.writeable) == ((2, 3), np.int16, True)
        assert (x.shape, x.dtype, x.writeable) == ((3,), np.float32, False)
        assert (x.ndim, x.size, x.nbytes) == (1, 3, 12)
        assert (y.shape, y.ndim, y.size) == ((), 0, 1)
        assert x.ptr == np.asarray(x).ctypes.data
        assert not hasattr(x, "__cuda_array_interface__")
        assert x.__dlpack_device__() == (1, 0)
        assert repr(x) == "<Buffer float32(3,), read-only>"
        assert repr(out) == "<Buffer int16(2, 3), writeable>"
        np.asarray(out)[...] = 1
        seen.update(device=ctx.device, also=x.device, run=ctx.run)

    device = jax.devices()[1]
    x, y = jax.device_put((jnp.ones(3), jnp.int32(1)), device)
    with hc.reraise():
        out = mode(hc.buffers.buffer_callback(host, spec(2, 3, dtype="int16")))(x, y)
    np.testing.assert_array_equal(out, np.ones((2, 3)))
    assert seen["device"] == seen["also"] == device
    assert (seen["run"] == -1) == (mode is MODES["eager"])
    assert out.devices() == {device}


def test_equal_callbacks_are_compiled_once(compiled_during):
    def host(ctx, out, x):
        np.asarray(out)[...] = np.asarray(x)

    def run():
        # Wrapped again each time, as when a user wraps inside a function.
        return hc.buffers.buffer_callback(host, spec())(jnp.float32(1))

    run()
    run()
    assert compiled_during(run) == 0


def test_fresh_lambdas_compile_nothing(compiled_during):
    def run():
        for _ in range(20):
            host = lambda ctx, out, x: affine(ctx, out, x, x)
            assert hc.buffers.buffer_callback(host, spec())(jnp.float32(1)) == 3

    run()
    assert compiled_during(run) == 0


# --- Effects -------------------------------------------------------------------------


@pytest.mark.parametrize("effect", [e for e in EFFECTS if e != "pure"])
def test_effects_run_once_and_in_order(effect):
    seen = []

    def host(ctx, out, n):
        seen.append(int(np.asarray(n)))
        np.asarray(out)[...] = 0

    f = hc.buffers.buffer_callback(host, spec(dtype="int32"), **EFFECTS[effect])

    @jax.jit
    def program(x):
        for n in range(10):
            f(x * 0 + n)
        lax.fori_loop(10, 15, lambda i, c: (f(i), c)[1], None)

    program(jnp.int32(0))
    jax.effects_barrier()
    assert sorted(seen) == list(range(15))
    assert [n for n in seen if n < 10] == list(range(10))
    if effect == "ordered":
        assert seen == list(range(15))


def test_unused_pure_callbacks_are_dropped():
    seen = []
    f = hc.buffers.buffer_callback(lambda *_: seen.append(1), spec())
    assert jax.jit(lambda x: (f(x), x)[1])(1.0) == 1
    assert seen == []


def test_no_arguments_and_no_results():
    seen = []
    f = hc.buffers.buffer_callback(
        lambda *args: seen.append(len(args)), (), has_side_effect=True
    )
    assert jax.jit(f)() == ()
    assert f() == ()
    jax.effects_barrier()
    assert seen == [2, 2]


# --- vmap ----------------------------------------------------------------------------

METHODS = [
    "sequential",
    "sequential_unrolled",
    "expand_dims",
    "broadcast_all",
    "legacy_vectorized",
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 1), (1, 0)])
@modes
def test_vmap(method, axes, mode):
    if method == "legacy_vectorized" and None in axes:
        pytest.skip("arguments of such shapes do not broadcast")
    f = hc.buffers.buffer_callback(affine, spec(3), vmap_method=method)
    rng = np.random.default_rng(1)
    args = [
        rng.normal(size=(3,) if axis is None else (3, 4) if axis else (4, 3))
        for axis in axes
    ]
    args = [jnp.asarray(x, jnp.float32) for x in args]
    out = mode(jax.vmap(f, axes))(*args)
    plain = jax.vmap(lambda x, y: x * 2 + y, axes)(*args)
    np.testing.assert_allclose(out, plain, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS[:4])
def test_vmap_of_vmap(method):
    f = hc.buffers.buffer_callback(affine, spec(2), vmap_method=method)
    x, y = jnp.arange(8.0).reshape(4, 2), jnp.arange(6.0).reshape(2, 3)
    out = jax.jit(jax.vmap(jax.vmap(f, (0, None)), (None, 1)))(x, y)
    plain = jax.vmap(jax.vmap(lambda x, y: x * 2 + y, (0, None)), (None, 1))(x, y)
    np.testing.assert_array_equal(out, plain)


def test_rows_are_one_call_of_the_program():
    f = hc.buffers.buffer_callback(affine, spec(), vmap_method="sequential")
    text = jax.jit(jax.vmap(f)).lower(jnp.ones(100), jnp.ones(100)).as_text()
    assert text.count("custom_call @hostcall_buffer") == 1
    assert "while" not in text


def test_vmap_needs_a_method():
    f = hc.buffers.buffer_callback(affine, spec())
    with pytest.raises(NotImplementedError, match="vmap is only supported"):
        jax.vmap(f)(jnp.ones(3), jnp.ones(3))
    with pytest.raises(ValueError, match="vmap_method must be on of the allowed"):
        hc.buffers.buffer_callback(affine, spec(), vmap_method="paralel")


def test_rows_of_a_failing_callback():
    def host(ctx, out, x):
        if np.asarray(x) == 2:
            raise ZeroDivisionError("two")
        np.asarray(out)[...] = 1

    f = hc.buffers.buffer_callback(host, spec(), vmap_method="sequential")
    with pytest.raises(ZeroDivisionError, match="two"), hc.reraise():
        jax.block_until_ready(jax.jit(jax.vmap(f))(jnp.arange(4.0)))


# --- Derivatives ---------------------------------------------------------------------


def test_derivatives_are_refused():
    f = hc.buffers.buffer_callback(affine, spec())
    x = jnp.float32(1)
    with pytest.raises(ValueError, match=r"Buffer callbacks do not support JVP\. Pl"):
        jax.grad(lambda x: f(x, x))(x)
    with pytest.raises(ValueError, match=r"Buffer callbacks do not support transpose"):
        jax.linear_transpose(lambda x: f(x, x), x)(x)


# --- Aliases -------------------------------------------------------------------------


def add_in_place(ctx, out, *args, **more):
    for leaf in jax.tree.leaves(out):
        np.asarray(leaf)[...] += 1


@modes
def test_an_alias_has_the_inputs_values_and_memory(mode):
    places = []

    def host(ctx, out, x):
        assert not x.writeable
        places.append(out.ptr == x.ptr)
        np.asarray(out)[...] *= 2

    x = jnp.arange(6.0).reshape(2, 3)
    f = mode(hc.buffers.buffer_callback(host, spec(2, 3), input_output_aliases={0: 0}))
    for _ in range(3):
        np.testing.assert_array_equal(f(x), x * 2)
        np.testing.assert_array_equal(x, np.arange(6.0).reshape(2, 3))
    assert places == [True] * 3


@modes
def test_aliases_count_leaves(mode):
    """Leaves inside tuples and dicts count too."""
    f = hc.buffers.buffer_callback(
        add_in_place,
        [spec(2), spec(3)],
        input_output_aliases={1: 1, 2: 0},
    )
    out = mode(f)({"a": 7, "b": (jnp.arange(3.0), jnp.arange(2.0))}, k=jnp.ones(4))
    np.testing.assert_array_equal(out[0], [1, 2])
    np.testing.assert_array_equal(out[1], [1, 2, 3])


@pytest.mark.parametrize("effect", ["pure", "unordered", "ordered"])
def test_aliases_with_tokens(effect):
    f = hc.buffers.buffer_callback(
        add_in_place, spec(3), input_output_aliases={1: 0}, **EFFECTS[effect]
    )
    program = jax.jit(lambda x: f(x * 5, f(x, x)), donate_argnums=0)
    np.testing.assert_array_equal(program(jnp.arange(3.0)), [2, 3, 4])


@pytest.mark.parametrize("method", METHODS[:4])
@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)])
def test_aliases_under_vmap(method, axes):
    def host(ctx, out, x, y):
        assert out.ptr == x.ptr
        np.asarray(out)[...] += np.asarray(y)

    f = hc.buffers.buffer_callback(
        host, spec(3), vmap_method=method, input_output_aliases={0: 0}
    )
    args = [jnp.arange(3.0) if a is None else jnp.ones((4, 3)) * 2 for a in axes]
    with hc.reraise():
        out = jax.jit(jax.vmap(f, axes))(*args)
    np.testing.assert_array_equal(out, np.broadcast_to(args[0] + args[1], (4, 3)))


@pytest.mark.parametrize(
    ("aliases", "error"),
    [
        ({2: 0}, r"'2:0' with input index 2 outside the range \[0, 2\)"),
        ({-1: 0}, r"'-1:0' with input index -1 outside the range \[0, 2\)"),
        ({0: 1}, r"'0:1' with output index 1 outside the range \[0, 1\)"),
        ({1: 0}, r"'1:0' referring to an input with abstract value .*int32\[2\]"),
        ({0: 0, 1: 0}, r"'1:0' referring to"),
    ],
)
def test_aliases_that_do_not_fit(aliases, error):
    f = hc.buffers.buffer_callback(add_in_place, spec(2), input_output_aliases=aliases)
    with pytest.raises(ValueError, match=error):
        f((jnp.ones(2), jnp.zeros(2, jnp.int32)))


def test_memory_is_shared_by_two_at_most():
    f = hc.buffers.buffer_callback(
        add_in_place, spec(2), input_output_aliases={0: 0, 1: 0}
    )
    with pytest.raises(ValueError, match="another input is mapped to output 0 too"):
        f(jnp.ones(2), jnp.ones(2))


# --- Errors --------------------------------------------------------------------------


@modes
@effects
def test_its_exception_is_raised(mode, effect):
    raised = []

    def host(ctx, out):
        raised.append(KeyError("x"))
        raise raised[-1]

    f = mode(hc.buffers.buffer_callback(host, spec(), **effect))
    with pytest.raises(JaxRuntimeError, match="KeyError: 'x'"):
        jax.block_until_ready(f())
    with pytest.raises(KeyError) as caught, hc.reraise():
        jax.block_until_ready(f())
    assert caught.value is raised[-1]
    raised.clear()  # the tracebacks and the program form a cycle


@modes
@effects
def test_values_are_not_returned(mode, effect):
    f = mode(hc.buffers.buffer_callback(lambda ctx, out: 3, spec(), **effect))
    text = (
        "ValueError: buffer_callback callback must not return any values. It returned"
        " <class 'int'>: write to `out`"
    )
    with pytest.raises(JaxRuntimeError, match=text):
        jax.block_until_ready(f())


def test_a_program_goes_on_after_a_failure():
    def host(ctx, out, x):
        if np.asarray(x) < 0:
            raise ValueError("negative")
        np.asarray(out)[...] = np.sqrt(np.asarray(x))

    f = jax.jit(hc.buffers.buffer_callback(host, spec(), order="ordered"))
    for _ in range(3):
        with pytest.raises(ValueError, match="negative"), hc.reraise():
            jax.block_until_ready(f(jnp.float32(-1)))
        assert f(jnp.float32(4)) == 2


async def asynchronous(ctx, out):
    pass


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: hc.buffers.buffer_callback(3, spec()),
            hc.errors.SpecError,
            r"hc.buffers.native\(address\)",
        ),
        (
            lambda: hc.buffers.buffer_callback(affine, spec(), order="any"),
            hc.errors.SpecError,
            "one of 'pure', 'unordered', 'ordered', got 'any'",
        ),
        (
            lambda: hc.buffers.buffer_callback(
                affine, spec(), order="pure", has_side_effect=True
            ),
            hc.errors.SpecError,
            "contradict",
        ),
        (
            lambda: hc.buffers.buffer_callback(affine, spec())("a"),
            TypeError,
            "not a valid JAX",
        ),
        (
            lambda: hc.buffers.buffer_callback(affine, {"a": 1.5}),
            hc.errors.SpecError,
            r"`affine` has the leaf 1.5, which has no shape and dtype",
        ),
        (
            lambda: hc.buffers.buffer_callback(affine, spec())(np.int64(2**40 + 5), 1),
            hc.errors.SpecError,
            "holds 1099511627781",
        ),
        *(
            (
                lambda wrong=wrong: hc.buffers.buffer_callback(
                    affine, spec(), input_output_aliases=wrong
                ),
                hc.errors.SpecError,
                "should be a dict of numbers",
            )
            for wrong in ([(0, 0)], {"a": 0}, {0.5: 0})
        ),
        (
            lambda: hc.buffers.buffer_callback(asynchronous, spec()),
            hc.errors.SpecError,
            "`asynchronous` is a coroutine function",
        ),
    ],
)
def test_bad_input(make, error, text):
    with pytest.raises(error, match=text):
        make()


# --- Devices, platforms --------------------------------------------------------------


def test_sharded_values_come_once_and_whole():
    seen = []

    def host(ctx, out, x):
        seen.append((ctx.device, x.shape))
        np.asarray(out)[...] = np.asarray(x) * 2

    f = hc.buffers.buffer_callback(host, spec(8, 2), has_side_effect=True)
    sharding = jax.NamedSharding(line(), jax.P("x"))
    x = jax.device_put(jnp.arange(16.0).reshape(8, 2), sharding)
    out = jax.jit(lambda x: f(x * 1) + 1)(x)
    np.testing.assert_array_equal(out, x * 2 + 1)
    ((device, shape),) = seen
    assert device in sharding.device_set
    assert shape == (8, 2)


def test_shard_map():
    seen = []

    def host(ctx, out, x):
        seen.append((ctx.device.id, np.array(x).tolist()))
        np.asarray(out)[...] = np.asarray(x) * 2

    mesh = line()
    f = hc.buffers.buffer_callback(host, spec(2), has_side_effect=True)
    g = jax.shard_map(f, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(jax.jit(g)(x), x * 2)
    assert sorted(seen) == [(i, [2.0 * i, 2.0 * i + 1]) for i in range(4)]


def test_effects_on_some_axes_only_are_refused():
    mesh = grid()
    f = hc.buffers.buffer_callback(lambda *_: None, spec(), has_side_effect=True)
    g = jax.shard_map(
        lambda x: (f(), x)[1], mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"),
        axis_names={"x"},
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="manual over some"):
        jax.jit(g)(jnp.arange(8.0))


def test_a_failure_on_several_devices():
    def host(ctx, out, x):
        raise RuntimeError("all of them")

    f = hc.buffers.buffer_callback(host, spec(8))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(line(), jax.P("x")))
    with pytest.raises(RuntimeError, match="all of them"), hc.reraise():
        jax.block_until_ready(jax.jit(f)(x))


def test_values_of_two_meshes_of_one_device():
    """Lowering does not ask for the program's devices."""
    one = np.array(jax.devices()[:1]).reshape(1, 1)
    f = hc.buffers.buffer_callback(affine, spec(2, 2))
    x, y = (
        jax.device_put(
            jnp.ones((2, 2)), jax.NamedSharding(jax.sharding.Mesh(one, axes), jax.P())
        )
        for axes in (("a", "b"), ("x", "y"))
    )
    np.testing.assert_array_equal(jax.jit(f)(x, y), x * 3)


def test_other_platforms_are_refused():
    f = jax.jit(hc.buffers.buffer_callback(affine, spec()))
    with pytest.raises(ValueError, match="not supported on tpu backend"):
        f.trace(1.0, 1.0).lower(lowering_platforms=("tpu",))


def test_a_callback_uses_jax_and_calls():
    def inner(ctx, out, x):
        np.asarray(out)[...] = np.asarray(x) + 1

    def host(ctx, out, x):
        value = jax.jit(lambda x: jnp.sin(x) * 2)(np.array(x))
        value = hc.buffers.buffer_callback(inner, spec(4))(value)
        np.asarray(out)[...] = value

    f = jax.jit(hc.buffers.buffer_callback(host, spec(4)))
    x = np.linspace(-1, 1, 4, dtype=np.float32)
    np.testing.assert_allclose(f(x), np.sin(x) * 2 + 1, rtol=1e-6)


def test_recursion():
    """A nested call of the same program gets its own Buffers."""

    def host(ctx, out, n):
        k = int(np.asarray(n))
        np.asarray(out)[...] = 1 if k == 0 else k * int(f(jnp.int32(k - 1)))

    f = jax.jit(hc.buffers.buffer_callback(host, spec(dtype="int32")))
    assert f(jnp.int32(6)) == 720


def test_statistics():
    def copied_once(ctx, out, x):
        np.asarray(out)[...] = np.asarray(x)

    f = hc.buffers.buffer_callback(copied_once, spec(8))
    jax.jit(lambda x: f(f(x)))(jnp.ones(8)).block_until_ready()
    (stats,) = [s for name, s in hc.monitor.stats().items() if "copied_once" in name]
    assert stats.calls == 2
    assert stats.bytes_in == stats.bytes_out == 64


CALLBACKS = {
    "without ctx": (
        lambda out, x: None,
        "hc.buffers.buffer_callback calls `<lambda>` with (ctx, out, x), and it takes (out, x)."
        " The first two are the context of the call, and the Buffers of the results to"
        " write into: write def f(ctx, out, *args)",
    ),
    "of C": (
        np.float32,
        "hc.buffers.buffer_callback calls `float32` with (ctx, out, x)",
    ),
    "one argument more": (lambda ctx, out, x, y: None, "it takes (ctx, out, x, y)."),
}


@pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(("callback", "text"), CALLBACKS.values(), ids=CALLBACKS)
def test_a_callback_that_does_not_take_its_arguments(mode, callback, text):
    call = hc.buffers.buffer_callback(callback, jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(hc.errors.SpecError) as caught:
        mode(call)(jnp.ones(3))
    assert text in str(caught.value)
    assert caught.value.code == "hc-arguments"


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_results_of_64_bits_in_32_bit_mode(dtype, mode):
    """As with JAX's own."""

    def third(ctx, out, x):
        np.copyto(np.asarray(out), (np.asarray(x).astype("f8") / 3).astype(dtype))

    x = jnp.array([2.0**40, 3.0])
    for wrap, shape in ((lambda f: f, x.shape), (jax.vmap, ())):
        result = np.zeros(shape, dtype)
        theirs, ours = (
            mode(wrap(make(third, result, vmap_method="sequential")))(x)
            for make in (buffer_callback, hc.buffers.buffer_callback)
        )
        assert ours.dtype == theirs.dtype == np.asarray(ours).dtype == dtype
        np.testing.assert_array_equal(ours, theirs)
        assert np.asarray(ours)[0] == np.float64(2.0**40 / 3).astype(dtype)
