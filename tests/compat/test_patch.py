"""`hc.patch_jax`: all calls of JAX's callbacks use the engine, however bound."""

from __future__ import annotations

import contextlib
import gc
import py_compile
import subprocess
import sys
import textwrap
import threading
import weakref
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import debug, lax, pure_callback  # before the patch, as most libraries
from jax._src import buffer_callback as jax_buffer_callback
from jax._src import callback as jax_callback
from jax._src import debugging as jax_debugging
from jax.experimental import buffer_callback as buffers
from jax.experimental import io_callback
from jax.extend.core import jaxpr_as_fun
from older_jax import VECTORIZED
from specs import like

import hostcall as hc

EARLY = {
    "pure": pure_callback,
    "io": io_callback,
    "debug": debug.callback,
    "print": debug.print,
}
LATE = {
    "pure": lambda *args, **kw: jax.pure_callback(*args, **kw),
    "io": lambda *args, **kw: jax.experimental.io_callback(*args, **kw),
    "debug": lambda *args, **kw: jax.debug.callback(*args, **kw),
    "print": lambda *args, **kw: jax.debug.print(*args, **kw),
}
JAXS_BUFFER_CALLBACK = buffers.buffer_callback


def in_place():
    """What a patch replaces, as it is now: the functions stay JAX's own."""
    primitives = [
        jax_callback.pure_callback_p,
        jax_callback.io_callback_p,
        jax_debugging.debug_callback_p,
        jax_debugging.debug_print_p,
        jax_buffer_callback.buffer_callback_p,
    ]
    return [
        *(primitive.bind for primitive in primitives),
        jax.effects_barrier,
        jax_callback.emit_python_callback,
        jax.interpreters.mlir.emit_python_callback,
        buffers.Buffer,
        buffers.ExecutionContext,
    ]


def functions():
    return [
        jax.pure_callback,
        jax.experimental.io_callback,
        jax.debug.callback,
        jax.debug.print,
        buffers.buffer_callback,
    ]


ORIGINALS = in_place()
FUNCTIONS = functions()


@pytest.fixture(autouse=True)
def as_before():
    yield
    hc.testing.unpatch_jax()
    assert in_place() == ORIGINALS


@pytest.fixture
def patched():
    with hc.patch_jax():
        yield


def text_of(f, *args):
    return jax.jit(f).lower(*args).as_text()


# --- However bound ------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [EARLY, LATE], ids=["early", "late"])
@pytest.mark.parametrize("ordered", [False, True])
def test_all_four_on_the_engine(bound, ordered, patched, capsys):
    seen = []

    def host(x):
        seen.append((type(x), hc.current().name))
        return x * 2

    def f(x):
        y = bound["pure"](host, like(x), x)
        z = bound["io"](host, like(x), y, ordered=ordered)
        bound["debug"](lambda v: seen.append("debug"), z, ordered=ordered)
        bound["print"]("z = {}", z, ordered=ordered)
        return z

    text = text_of(f, 1.0)
    assert text.count("@hostcall_call") == 4
    assert "python_cpu_callback" not in text
    assert jax.jit(f)(1.0) == 4
    jax.effects_barrier()
    name = "test_all_four_on_the_engine.<locals>.host"
    assert seen == [(type(jnp.ones(())), name)] * 2 + ["debug"]
    assert capsys.readouterr().out == "z = 4.0\n"


@pytest.mark.parametrize("bound", [EARLY, LATE], ids=["early", "late"])
def test_transformed(bound, patched):
    """Functions that were bound before the patch batch by JAX's rules."""
    x = jnp.arange(6.0).reshape(2, 3)

    def f(x):
        y = bound["pure"](np.cos, like(x), x, vmap_method="sequential")
        return bound["io"](lambda v: np.asarray(v) + 1, like(x), y)

    out = jax.jit(jax.vmap(lambda xs: lax.scan(lambda c, x: (c, f(x)), 0, xs)[1]))(x)
    np.testing.assert_allclose(out, np.cos(x) + 1, rtol=1e-6)


def test_rows_of_code_that_was_bound_before_are_one_call_of_the_program(patched):
    """Not a loop of the program, which JAX's rules make."""
    x = jnp.arange(6.0)
    seen = []

    def f(x):
        debug.callback(lambda v: seen.append(float(v)), x)
        y = pure_callback(np.cos, like(x), x, vmap_method="sequential")
        return io_callback(lambda v: np.asarray(v) + 1, like(x), y)

    text = text_of(jax.vmap(f), x)
    assert text.count("@hostcall_call") == 3
    assert "while" not in text
    np.testing.assert_allclose(jax.jit(jax.vmap(f))(x), np.cos(x) + 1, rtol=1e-6)
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4, 5]


def test_an_eager_callback_that_was_bound_before_compiles_nothing(patched, monkeypatch):
    x, shape = jnp.float32(1), jax.ShapeDtypeStruct((), jnp.float32)
    compiled = []
    monkeypatch.setattr(
        jax._src.compiler,
        "backend_compile_and_load",
        lambda *args, **kwargs: compiled.append(args),
    )
    out = pure_callback(lambda x: np.asarray(x) + 1, shape, x)
    assert compiled == []
    assert float(out) == 2


def as_a_function(f, x):
    """Its outermost equations are bound again."""
    return jax.jit(jaxpr_as_fun(jax.make_jaxpr(f)(x))).trace


# Ways to keep a program that was traced before the patch.
TRACED = {
    "traced": lambda f, x: lambda x, traced=jax.jit(f).trace(x): traced,
    "jaxpr": as_a_function,
    "jaxpr of a jitted function": lambda f, x: as_a_function(jax.jit(f), x),
}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("way", TRACED)
def test_programs_that_were_traced_before(way, ordered, capsys):
    """Their equations are JAX's; some of them in a loop, which is bound as a whole."""
    seen = []

    def host(x):
        seen.append((type(x), hc.current() is not None))
        return np.asarray(x) + 1

    def fill(ctx, out, x):
        seen.append((type(out), hc.current() is not None))
        np.asarray(out)[...] = np.asarray(x) * 2

    def step(x, _):
        y = jax.pure_callback(host, like(x), x)
        y = jax.experimental.io_callback(host, like(x), y, ordered=ordered)
        y = buffers.buffer_callback(fill, like(x))(y)
        jax.debug.callback(host, y, ordered=ordered)
        jax.debug.print("y = {}", y, ordered=ordered)
        return y, None

    def f(x):
        return lax.scan(step, step(x, None)[0], None, 1)[0]

    x = jnp.ones(())
    trace = TRACED[way](f, x)
    with hc.patch_jax(arrays="numpy"):
        lowered = trace(x).lower()
        assert "python_cpu_callback" not in lowered.as_text()
        out = jax.tree.leaves(lowered.compile()(x))
        jax.effects_barrier()
    assert out == [16]
    kinds = [np.ndarray, np.ndarray, hc.buffers.Buffer, np.ndarray]
    assert seen == [(kind, True) for kind in kinds * 2]
    assert capsys.readouterr().out == "y = 6.0\ny = 16.0\n"


def test_a_pullback_that_was_traced_before(patched):
    hc.testing.unpatch_jax()
    seen = []

    @jax.custom_vjp
    def f(x):
        return x

    def backward(_, ct):
        debug.callback(lambda v: seen.append((float(v), hc.current() is not None)), ct)
        return (ct,)

    f.defvjp(lambda x: (x, None), backward)
    _, pullback = jax.vjp(jax.jit(f), 1.0)
    hc.patch_jax()
    assert pullback(3.0) == (3.0,)
    jax.effects_barrier()
    assert seen == [(3.0, True)]


def test_a_debug_callback_with_an_effect_of_its_own_keeps_it(patched):
    """As a library may bind it, with rules for that effect."""
    from jax._src import effects

    class Own(effects.Effect):
        pass

    effects.lowerable_effects.add_type(Own)
    own, seen = Own(), []

    def f(x):
        jax_debugging.debug_callback_p.bind(
            x,
            callback=lambda v: seen.append(hc.current() is not None) or (),
            effect=own,
            partitioned=False,
        )
        return x

    assert jax.make_jaxpr(f)(1.0).effects == {own}
    jax.jit(f)(1.0)
    jax.effects_barrier()
    assert seen == [True]


def test_jaxs_log_is_logged(patched, caplog):
    caplog.set_level("INFO", logger="jax._src.debugging")

    @jax.jit
    def f(x):
        debug.log("x is {}", x)
        return x

    assert "@hostcall_call" in f.lower(1.0).as_text()
    f(1.0)
    jax.effects_barrier()
    assert "x is 1.0" in caplog.text


def test_a_coroutine_function_is_refused(patched):
    async def host(x):
        return x

    binds = [
        lambda: pure_callback(host, like(1.0), 1.0),
        lambda: io_callback(host, like(1.0), 1.0),
        lambda: debug.callback(host, 1.0),
    ]
    for bind in binds:
        with pytest.raises(hc.errors.SpecError, match="is a coroutine function"):
            bind()


@pytest.mark.parametrize("bound", [EARLY, LATE], ids=["early", "late"])
def test_errors(bound, patched):
    error = ValueError("no")

    def host(x):
        raise error

    f = jax.jit(lambda x: bound["pure"](host, like(x), x))
    for _ in range(2):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="ValueError: no"
        ) as caught:
            f(1.0).block_until_ready()
        assert "test_patch.py" in str(caught.value)
        assert hc.errors.last_error() is error
    error.__traceback__ = None


@pytest.mark.parametrize("bound", ["early", "late"])
@pytest.mark.parametrize("effect", [False, True])
def test_buffer_callbacks(bound, effect, patched):
    seen = []

    def host(ctx, out, tree, *, k):
        seen.append(type(out["y"]))
        assert ctx.stage == buffers.ExecutionStage.EXECUTE
        np.asarray(out["y"])[...] = np.asarray(tree[0]) * np.asarray(k)

    function = JAXS_BUFFER_CALLBACK if bound == "early" else buffers.buffer_callback
    x = jnp.arange(4.0)
    f = function(host, {"y": like(x)}, has_side_effect=effect, vmap_method="sequential")
    assert "@hostcall_buffer(" in text_of(lambda x: f((x,), k=3.0), x)
    for g in (f, jax.jit(f)):
        np.testing.assert_array_equal(g((x,), k=3.0)["y"], x * 3)
    rows = jax.jit(jax.vmap(lambda x: f((x,), k=2.0)))(jnp.ones((3, 4)))
    np.testing.assert_array_equal(rows["y"], np.full((3, 4), 2))
    assert set(seen) == {hc.buffers.Buffer}
    shared = function(
        lambda ctx, out, x: np.asarray(out).__iadd__(1) is None,
        like(x),
        input_output_aliases={0: 0},
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="must not return any values"):
        jax.block_until_ready(jax.jit(shared)(x))


@pytest.mark.parametrize("bound", [EARLY, LATE], ids=["early", "late"])
def test_refuses_as_the_installed_jax_does(bound, patched):
    f = lambda x: bound["pure"](np.sin, like(x), x)
    with pytest.raises(NotImplementedError, match="vmap is only supported"):
        jax.vmap(f)(jnp.arange(3.0))
    with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
        jax.grad(f)(1.0)


@VECTORIZED.skip
def test_vectorized_is_a_keyword_of_the_callback_today(patched):
    seen = []
    out = jax.pure_callback(
        lambda x, vectorized: seen.append(bool(vectorized)) or x,
        like(1.0),
        1.0,
        vectorized=True,
    )
    assert (float(out), seen) == (1, [True])


@pytest.mark.parametrize("arrays", ["jax", "numpy"])
@pytest.mark.parametrize("bound", [EARLY, LATE], ids=["early", "late"])
def test_arguments_of_callbacks(bound, arrays):
    wanted = np.ndarray if arrays == "numpy" else jax.Array
    seen = []

    def host(x, y):
        seen.append(isinstance(x, wanted) and isinstance(y, wanted))
        return x

    def f(x):
        y = bound["pure"](host, like(x), x, 1.0)
        y = bound["io"](host, like(x), y, 1.0)
        bound["debug"](host, y, 1.0)
        return y

    with hc.patch_jax(arrays=arrays):
        jax.jit(f)(1.0)
        jax.effects_barrier()
    assert seen == [True] * 3


def test_another_choice():
    with pytest.raises(hc.errors.SpecError, match="'jax' or 'numpy', got 'torch'"):
        hc.patch_jax(arrays="torch")


# --- JAX's own users ------------------------------------------------------------------------


def test_programs_that_emit_a_callback_themselves(patched):
    """Called below all primitives, as in tesseract-jax and equinox."""
    from jax.extend.core import Primitive

    seen = []
    primitive = Primitive("emits")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x: [x, x])

    def lower(ctx, x):
        def host(v):
            seen.append((type(v), hc.current().place.file == __file__))  # JAX's own
            return v + 1, v * 2

        results, token, _ = jax.interpreters.mlir.emit_python_callback(
            ctx,
            host,
            None,
            [x],
            ctx.avals_in,
            ctx.avals_out,
            has_side_effect=False,
            returns_token=False,
        )
        assert token is None
        return results

    jax.interpreters.mlir.register_lowering(primitive, lower)
    f = lambda x: primitive.bind(x)
    assert "@hostcall_call" in text_of(f, jnp.arange(3.0))
    out = jax.jit(f)(jnp.arange(3.0))
    np.testing.assert_array_equal(out, [[1, 2, 3], [0, 2, 4]])
    assert seen == [(np.ndarray, True)]


@pytest.mark.parametrize(
    "host",
    [
        lambda v: ([0.0, 1.0, 2.0],),
        lambda v: np.asarray(v)[None],
        lambda v: [jnp.asarray(v)],
        lambda v: (),
        lambda v: (v, v),
    ],
)
def test_what_an_emitted_callback_returns(host, patched):
    """A sequence with one item for each result, as with JAX's own."""
    from jax.extend.core import Primitive

    def run():
        primitive = Primitive("emits")
        primitive.def_abstract_eval(lambda x: x)

        def lower(ctx, x):
            return jax.interpreters.mlir.emit_python_callback(
                ctx,
                host,
                None,
                [x],
                ctx.avals_in,
                ctx.avals_out,
                has_side_effect=True,
                returns_token=False,
            )[0]

        jax.interpreters.mlir.register_lowering(primitive, lower)
        try:
            return np.asarray(jax.jit(primitive.bind)(jnp.arange(3.0))).tolist()
        except jax.errors.JaxRuntimeError as error:
            return "Mismatched number of outputs" in str(error)

    ours = run()
    hc.testing.unpatch_jax()
    assert ours == run()


def test_checkify_with_run_time_errors(patched):
    from jax._src import config
    from jax.experimental import checkify

    with config.xla_runtime_errors(True):

        @jax.jit
        def f(x):
            checkify.check(x > 0, "x is {x}", x=x)
            return x

        assert "@hostcall_call" in f.lower(1.0).as_text()
        f(1.0)
        with pytest.raises(jax.errors.JaxRuntimeError, match="x is -2"):
            f(-2.0).block_until_ready()
            jax.effects_barrier()


def test_pallas_in_interpret_mode(patched, capsys):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def kernel(x_ref, o_ref):
        jax.debug.print("first {}", x_ref[0, 0])
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    f = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
        grid=(2,),
        in_specs=[spec],
        out_specs=spec,
        interpret=pltpu.InterpretParams(),
    )
    x = jnp.arange(16 * 128.0).reshape(16, 128)
    assert "python_cpu_callback" not in text_of(f, x)
    np.testing.assert_array_equal(jax.jit(f)(x), x * 2)
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.split()) == [
        "0.0",
        "1024.0",
        "first",
        "first",
    ]


def on_two_cores(kernel, in_spec, **options):
    """An interpreted kernel over eight blocks. Its callbacks start threads, which rely on
    programs having run when their dispatch returns.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    return jax.jit(
        pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((64, 128), jnp.float32),
            grid=(8,),
            in_specs=[in_spec],
            out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
            interpret=pltpu.InterpretParams(num_cores_or_threads=2, **options),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        )
    )


def test_pallas_interpreted_on_two_cores(patched):
    from jax.experimental import pallas as pl

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    f = on_two_cores(kernel, pl.BlockSpec((8, 128), lambda i: (i, 0)))
    x = jnp.arange(64 * 128.0).reshape(64, 128)
    for _ in range(5):
        np.testing.assert_array_equal(f(x), np.asarray(x) * 2)


def test_exceptions_of_a_core_are_raised_by_the_interpreter(patched):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def kernel(x_ref, o_ref):  # from the fifth block on it reads past the end
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 6, 8), :]

    whole = pl.BlockSpec((32, 128), lambda i: (0, 0))
    f = on_two_cores(kernel, whole, out_of_bounds_reads="raise")
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds read"):
            jax.block_until_ready(f(jnp.ones((32, 128))))
        # JAX 0.9 asks for it after each exception: its interpreter keeps what the failed
        # kernel left, and the next one would fail of that, in plain JAX too.
        pltpu.reset_tpu_interpret_mode_state()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()


def test_inside_a_pallas_kernel_prints_stay_jaxs(patched):
    """On GPU and TPU they are device code, with lowering rules of their own."""
    from jax.experimental import pallas as pl

    def kernel(x_ref, o_ref):
        jax.debug.print("x {}", x_ref[0])
        jax.debug.callback(lambda: None)
        o_ref[...] = x_ref[...]

    def bound():
        f = pl.pallas_call(kernel, out_shape=like(jnp.ones(8)), interpret=True)
        jaxpr = jax.make_jaxpr(f)(jnp.ones(8))
        return [eqn.primitive.name for eqn in jaxpr.eqns[0].params["jaxpr"].eqns]

    by_hostcall = bound()
    hc.testing.unpatch_jax()
    assert bound() == by_hostcall


# --- Patching and unpatching ------------------------------------------------------------------


def test_the_patch_replaces_and_restores():
    hc.patch_jax()
    assert not set(in_place()) & set(ORIGINALS)
    assert functions() == FUNCTIONS
    hc.patch_jax()  # again, with no effect
    hc.testing.unpatch_jax()
    assert in_place() == ORIGINALS
    hc.testing.unpatch_jax()
    assert in_place() == ORIGINALS


def test_context_managers_nest():
    plain = hc.patch_jax()
    assert repr(plain) == "<hostcall.patch_jax(arrays='jax')>"
    hc.testing.unpatch_jax()
    with hc.patch_jax():
        with hc.patch_jax(arrays="numpy"):
            assert type_that_comes() is np.ndarray
        assert type_that_comes() is not np.ndarray
    assert in_place() == ORIGINALS


def test_one_patch_may_have_several_blocks():
    patch = hc.patch_jax(arrays="numpy")
    with patch:
        with patch:
            pass
        assert type_that_comes() is np.ndarray
    assert in_place() == ORIGINALS
    with patch:  # again
        assert type_that_comes() is np.ndarray
    assert in_place() == ORIGINALS


def test_a_block_ends_its_own_patch_only():
    hc.patch_jax(arrays="numpy")
    with hc.patch_jax():
        assert type_that_comes() is not np.ndarray
    assert type_that_comes() is np.ndarray
    with hc.patch_jax():
        hc.testing.unpatch_jax()
        assert in_place() == ORIGINALS
    assert in_place() == ORIGINALS


def type_that_comes():
    seen = []
    pure_callback(lambda x: seen.append(type(x)) or x, like(1.0), 1.0)
    return seen[0]


def test_patches_that_overlap():
    first = hc.patch_jax()
    second = hc.patch_jax(arrays="numpy")
    with first:
        assert second.__enter__() is second
    assert type_that_comes() is np.ndarray  # the second patch remains
    second.__exit__(None, None, None)
    assert in_place() == ORIGINALS
    assert repr(first) == "<hostcall.patch_jax(arrays='jax'), ended>"


def test_our_own_wrapper_is_not_taken_for_jaxs():
    hc.patch_jax()
    ours = jax.effects_barrier
    jax.effects_barrier = wrapper = lambda: ours()
    try:
        hc.testing.unpatch_jax()
        assert jax.effects_barrier is wrapper
        hc.patch_jax()
        jax.effects_barrier()
        ours()
        hc.testing.unpatch_jax()
    finally:
        jax.effects_barrier = ORIGINALS[5]


def test_programs_compiled_before_are_compiled_again():
    seen = []

    def host(x):
        seen.append(hc.current() is not None)
        return x

    f = jax.jit(lambda x: pure_callback(host, like(x), x))
    f(1.0).block_until_ready()
    with hc.patch_jax():
        f(1.0).block_until_ready()
    f(1.0).block_until_ready()
    assert seen == [False, True, False]


def test_who_patched_after_us_stays():
    primitive = jax_callback.pure_callback_p
    hc.patch_jax()
    ours = primitive.bind
    seen = []

    def others(*args, **params):
        seen.append(args)
        return ours(*args, **params)

    primitive.bind = others
    try:
        hc.testing.unpatch_jax()
        assert pure_callback(np.negative, like(1.0), 1.0) == -1
        assert seen == [(1.0,)]
    finally:
        del primitive.bind


def test_from_many_threads():
    problems = []

    def run():
        try:
            for _ in range(50):
                hc.patch_jax()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    hc.testing.unpatch_jax()
    assert in_place() == ORIGINALS


def test_no_back_end_is_started(run_python):
    done = run_python(
        """
        import hostcall as hc
        from jax._src import xla_bridge
        with hc.patch_jax():
            hc.patch_jax(arrays="numpy")
            print(xla_bridge._backends)
        """
    )
    assert done.stdout.strip() == "{}"


def test_effects_barrier_waits_for_taps(patched):
    seen = []
    started = threading.Event()

    def slow(x):
        started.wait(60)
        seen.append(float(x))

    jax.jit(lambda x: hc.tap(slow, x))(1.0)
    threading.Timer(0.1, started.set).start()
    jax.effects_barrier()
    assert seen == [1.0]


def test_platforms_that_the_engine_does_not_serve_keep_jaxs_path(patched):
    """Lowered for a platform that is not available here."""
    f = jax.jit(lambda x: jax.pure_callback(np.sin, like(x), x))
    traced = f.trace(jnp.float32(1))
    with pytest.raises(NotImplementedError, match="multi-platform lowering"):
        traced.lower(lowering_platforms=("cpu", "cuda"))
    early = jax.jit(lambda x: pure_callback(np.sin, like(x), x))
    with pytest.raises(NotImplementedError, match="multi-platform lowering"):
        early.trace(jnp.float32(1)).lower(lowering_platforms=("cpu", "cuda"))


# --- Programs that can't be changed -------------------------------------------------------------

PROGRAM = """
import os, sys
assert "jax" not in sys.modules
os.environ["JAX_ENABLE_X64"] = "1"
import jax
import jax.numpy as jnp
from jax import pure_callback

x = jnp.float32(2)
host = lambda v: v * 3
assert "x" not in sys.argv or sys.path[0]
print(sys.argv[1:], __name__, jax.jit(lambda x: pure_callback(host, x, x))(x))
print(jax.effects_barrier.__module__)
assert jax.numpy.arange(3.0).dtype == "float64"  # what was set before counts
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


MAIN = """
    import runpy
    runpy.run_module("hostcall", run_name="__main__", alter_sys=True)
"""


def test_run_a_script(program, run_python):
    done = run_python(MAIN, "run", "--arrays", "numpy", str(program), "--flag", "a b")
    assert done.stdout.splitlines() == [
        "['--flag', 'a b'] __main__ 6.0",
        "hostcall._compat.patch",
    ]


def test_a_script_knows_its_absolute_path(tmp_path, monkeypatch, run_python):
    """As under Python itself, whatever folder it goes to."""
    where = """
        import os, sys, __main__
        os.chdir("/")
        print(__file__, __main__.__file__, sys.argv, sys.path[0], __name__, __spec__)
        def f(): pass
        print(f.__code__.co_filename, f.__module__, __main__.f is f)
    """
    (tmp_path / "where.py").write_text(textwrap.dedent(where))
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "where.py", "x"]
    wanted = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert str(tmp_path / "where.py") in wanted
    assert run_python(MAIN, "run", "where.py", "x").stdout == wanted


@pytest.mark.parametrize("kind", ["folder", "zip", "pyc"])
def test_run_other_kinds_of_programs(kind, tmp_path, run_python):
    source = tmp_path / "__main__.py"
    source.write_text("import sys; print('ran', sys.argv[1:])")
    program = tmp_path
    if kind == "zip":
        program = tmp_path / "program.zip"
        with zipfile.ZipFile(program, "w") as file:
            file.write(source, "__main__.py")
    elif kind == "pyc":
        program = tmp_path / "program.pyc"
        py_compile.compile(str(source), str(program))
    done = run_python(MAIN, "run", str(program), "x")
    assert done.stdout == "ran ['x']\n"


def test_run_a_module(program, run_python, monkeypatch):
    monkeypatch.chdir(program.parent)
    done = run_python(MAIN, "run", "-m", "program", "x")
    assert done.stdout.splitlines() == ["['x'] __main__ 6.0", "hostcall._compat.patch"]


def test_running_a_missing_file(run_python):
    done = run_python(MAIN, "run", "nowhere.py", check=False)
    assert done.returncode == 2
    assert "there is no file nowhere.py" in done.stderr


AUTOPATCH = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize(
    ("value", "first", "home"),
    [
        ("1", "jax", "hostcall._compat.patch"),
        ("1", "hostcall", "hostcall._compat.patch"),
        ("numpy", "jax", "hostcall._compat.patch"),
        ("0", "jax", "jax._src.api"),
        ("", "hostcall", "jax._src.api"),
    ],
)
def test_from_the_environment(value, first, home, run_python):
    """As an interpreter does at its start with the package's .pth file."""
    done = run_python(
        f"""
        import site, sys
        site.addsitedir({str(AUTOPATCH)!r})
        assert "jax" not in sys.modules
        import {first}
        import jax, jax.numpy as jnp
        seen = []
        host = lambda v: seen.append(type(v).__name__) or v
        jax.jit(lambda x: jax.pure_callback(host, x, x))(jnp.float32(1))
        jax.effects_barrier()
        print(jax.effects_barrier.__module__, *seen)
        """,
        env={"HOSTCALL_PATCH": value},
    )
    array = "ndarray" if value == "numpy" else "ArrayImpl"
    assert done.stdout.split() == [home, array]


def test_it_is_part_of_the_package():
    """Where hostcall is installed, the .pth file is beside it."""
    home = Path(hc.__file__).parent.parent
    assert (home / "hostcall_autopatch.pth").exists()
    assert (home / "_hostcall_autopatch.py").exists()


def test_nothing_is_left(patched, in_time):
    same = lambda v: v
    gone = weakref.ref(same)
    f = jax.jit(lambda x, same=same: pure_callback(same, like(x), x))
    f(1.0).block_until_ready()
    del same
    gc.collect()
    assert gone() is not None
    del f
    jax.clear_caches()
    assert in_time(lambda: gone() is None)
