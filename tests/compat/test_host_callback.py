"""`hostcall.host_callback`: the documented behaviour of the module that JAX removed."""

from __future__ import annotations

import logging
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import hostcall as hc
import hostcall.host_callback as hcb


class Stream:
    def __init__(self):
        self.lines = []

    def write(self, text):
        assert text.endswith("\n")
        self.lines.append(text[:-1])


@pytest.fixture
def stream():
    return Stream()


@pytest.fixture
def flags():
    """Sets flags of the removed module for one test."""

    def set_flag(name, value):
        jax.config.update(name, value)

    old = {
        "jax_host_callback_inline": False,
        "jax_host_callback_ad_transforms": False,
        "jax_host_callback_max_queue_byte_size": 256_000_000,
    }
    yield set_flag
    for name, value in old.items():
        jax.config.update(name, value)
    hc.configure(tap_queue_bytes=256_000_000)


def tapped(f, *args):
    """What the taps of `f` received: values and names of transformations."""
    seen = []

    def tap(arg, transforms):
        leaves = [np.asarray(v).tolist() for v in jax.tree.leaves(arg)]
        seen.append((leaves[0] if len(leaves) == 1 else leaves, list(transforms)))

    out = f(lambda v, **more: hcb.id_tap(tap, v, **more), *args)
    hcb.barrier_wait()
    return out, seen


def values(f, *args):
    _, seen = tapped(f, *args)
    assert all(transforms == [] for _, transforms in seen)
    return [value for value, _ in seen]


# --- Taps in every place -------------------------------------------------------------

X = np.float32(3)


def scan(tap):
    return lax.scan(lambda c, x: (tap(c) + x, None), 0.0, jnp.arange(3.0))[0]


def unused_in_scan(tap):
    return lax.scan(lambda c, x: ((tap(x), c)[1], None), 0.0, jnp.arange(3.0))[0]


def while_loop(tap):
    return lax.while_loop(lambda c: tap(c) < 2, lambda c: tap(c * 10) / 10 + 1, 0.0)


def custom_jvp(tap):
    f = jax.custom_jvp(lambda x: tap(x) * 2)
    f.defjvp(lambda p, t: (f(*p), t[0] * tap(p[0] * 10)))
    return jax.jvp(f, (1.0,), (1.0,))


def custom_vjp(tap):
    f = jax.custom_vjp(lambda x: tap(x) * 2)
    f.defvjp(lambda x: (tap(x * 10), x), lambda x, ct: (tap(ct * 100) * x,))
    return jax.grad(f)(1.0)


PLACES = {
    "twice": (lambda tap: tap(tap(1.0) * 2), [1, 2]),
    "unused": (lambda tap: (tap(1.0), 5.0)[1], [1]),
    "result": (lambda tap: tap(1.0, result=7.0), [1]),
    "scan": (scan, [0, 0, 1]),
    "unused in scan": (unused_in_scan, [0, 1, 2]),
    "while": (while_loop, [0, 0, 1, 10, 2]),
    "cond": (lambda tap: lax.cond(True, lambda: tap(1.0), lambda: tap(2.0)), [1]),
    "switch": (lambda tap: lax.switch(1, [tap, lambda x: tap(x * 2)], 4.0), [8]),
    "nested jit": (lambda tap: tap(jax.jit(lambda x: tap(x) + 1)(1.0)), [1, 2]),
    "custom_jvp": (custom_jvp, [1, 10]),  # in two functions, with no data between
    "custom_vjp": (custom_vjp, [10, 100]),
    "grad": (lambda tap: jax.grad(lambda x: tap(x) ** 2)(3.0), [3]),
    "jvp": (lambda tap: jax.jvp(lambda x: tap(x) ** 2, (3.0,), (1.0,)), [3]),
    "linearize": (lambda tap: jax.linearize(lambda x: tap(x) ** 2, 3.0)[1](1.0), [3]),
    "grad of scan": (
        lambda tap: jax.grad(
            lambda x: lax.scan(lambda c, _: (tap(c) * x, None), 1.0, length=2)[0]
        )(3.0),
        [1, 3],
    ),
    "remat": (
        lambda tap: jax.grad(jax.checkpoint(lambda x: jnp.sin(tap(x) * 2)))(3.0),
        [3, 3],
    ),
    "remat, unused": (
        lambda tap: jax.grad(jax.checkpoint(lambda x: (tap(x), jnp.sin(x))[1]))(3.0),
        [3, 3],
    ),
    "hessian": (lambda tap: jax.hessian(lambda x: tap(x) ** 3)(3.0), [3]),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("place", PLACES)
def test_places(place, jit):
    f, wanted = PLACES[place]
    got = values(lambda tap: (jax.jit(lambda: f(tap)) if jit else lambda: f(tap))())
    assert got == wanted


def test_the_identity():
    tree = {"a": jnp.arange(3), "b": [2.0, (jnp.float32(1),)], "c": ()}
    for wrap in (jax.jit, lambda f: f):
        out, seen = tapped(lambda tap, wrap=wrap: wrap(lambda t: tap(t))(tree))
        assert jax.tree.structure(out) == jax.tree.structure(tree)
        jax.tree.map(np.testing.assert_array_equal, out, tree)
        assert seen == [([[0, 1, 2], 2.0, 1.0], [])]


def test_across_programs():
    seen = []
    f = jax.jit(lambda x: hcb.id_tap(lambda v, _: seen.append(float(v)), x) + 1)
    x = 0.0
    for _ in range(20):
        x = f(x)
    hcb.barrier_wait()
    assert seen == list(range(20))


def test_order_needs_no_data_between():
    """In several functions of one program, in loops, and in several programs."""

    def program(tap, x):
        inner = jax.jit(lambda n: tap(n + 0.5))
        for n in range(5):
            tap(x * 0 + 10 * n)
            inner(x * 0 + 10 * n)
            lax.fori_loop(1, 3, lambda i, c: (tap(10.0 * n + i), c)[1], None)

    def run(tap):
        f = jax.jit(lambda x: program(tap, x))
        for _ in range(20):
            f(jnp.ones(()))

    assert values(run) == [10 * n + i for n in range(5) for i in (0, 0.5, 1, 2)] * 20


def test_batches():
    x, y = jnp.arange(3.0), jnp.arange(6.0).reshape(3, 2)

    def f(tap):
        return jax.vmap(lambda a, b: tap((a, b)), in_axes=(None, 0))(1.0, x)

    _, seen = tapped(f)
    assert seen == [([1.0, [0, 1, 2]], [("batch", {"batch_dims": (None, 0)})])]

    _, seen = tapped(lambda tap: jax.vmap(tap, in_axes=1)(y))
    assert seen == [(y.tolist(), [("batch", {"batch_dims": (1,)})])]

    nested = lambda tap: jax.jit(jax.vmap(jax.vmap(tap), in_axes=1))(y)
    out, seen = tapped(nested)
    np.testing.assert_array_equal(out, y.T)
    ((value, transforms),) = seen
    assert [name for name, _ in transforms] == ["batch", "batch"]
    assert np.size(value) == 6


def test_vmap_of_while():
    def f(tap):
        return jax.vmap(
            lambda n: lax.while_loop(lambda i: i < n, lambda i: tap(i) + 1, 0)
        )(jnp.arange(3))

    out, seen = tapped(f)
    np.testing.assert_array_equal(out, [0, 1, 2])
    assert all(t == [("batch", {"batch_dims": (0,)})] for _, t in seen)
    assert len(seen) == 2


def test_cotangents_that_are_tapped_say_so():
    @jax.custom_jvp
    def f(x):
        return x * 3

    seen = []

    @f.defjvp
    def f_jvp(primals, tangents):
        (dot,) = tangents
        tap = lambda v, transforms: seen.append((float(v), list(transforms)))
        return f(*primals), 3 * hcb.id_tap(tap, dot)

    assert jax.grad(f)(2.0) == 3
    hcb.barrier_wait()
    assert seen == [(3.0, [("transpose", {})])]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pmap_knows_the_device():
    seen = {}

    def tap(arg, transforms, *, device):
        seen[device] = float(arg)

    jax.pmap(lambda x: hcb.id_tap(tap, x, tap_with_device=True))(jnp.arange(4.0))
    hcb.barrier_wait()
    assert seen == {d: float(d.id) for d in jax.devices()}


@pytest.mark.parametrize("index", [0, 2])
def test_sharded_arrays_come_once_and_whole(index):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("x"))
    seen = []

    def tap(arg, transforms, *, device):
        seen.append((arg.tolist(), device))

    def host(arg, *, device):
        seen.append((arg.tolist(), device))
        return arg * 2

    def f(x):
        x = hcb.id_tap(tap, x, tap_with_device=True, device_index=index)
        return hcb.call(
            host, x, result_shape=x, call_with_device=True, device_index=index
        )

    out = jax.jit(f, in_shardings=place, out_shardings=place)(jnp.arange(8.0))
    np.testing.assert_array_equal(out, np.arange(8.0) * 2)
    hcb.barrier_wait()
    whole = (list(range(8)), jax.devices()[index])
    assert seen == [whole, whole]


def test_a_device_that_is_not_there():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("x"))
    f = jax.jit(
        lambda x: hcb.id_tap(lambda *_: None, x, device_index=7), in_shardings=place
    )
    with pytest.raises(
        hc.errors.SpecError, match="device_index=7, but the program runs on 4"
    ):
        f(jnp.arange(8.0))


def test_the_program_does_not_wait():
    gate = threading.Event()
    f = jax.jit(lambda x: hcb.id_tap(lambda *_: gate.wait(60), x) + 1)
    assert f(1.0) == 2  # while the callback still runs
    gate.set()
    hcb.barrier_wait()


def test_equal_taps_are_compiled_once(compiled_during):
    class Unhashable:
        __hash__ = None

        def __call__(self, arg, transforms):
            pass

    for fn in (Unhashable(), lambda arg, transforms: None):
        f = lambda x, fn=fn: hcb.id_tap(fn, x)
        x = np.float32(1)
        assert compiled_during(lambda f=f, x=x: [jax.jit(f)(x) for _ in range(3)]) == 1
    hcb.barrier_wait()


# --- id_print -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (3.0, "3."),
        ((1.0, 2.0), "( 1. 2. )"),
        ([1, (2, 3)], "[ 1 ( 2 3 ) ]"),
        ({"b": 1, "a": [2.0]}, "{ a=[ 2. ] b=1 }"),
        ((), "(  )"),
        (np.zeros((0, 2), np.float32), "[]"),
        (np.arange(3), "[0 1 2]"),
    ],
)
def test_printed_values(value, wanted, stream):
    hcb.id_print(value, output_stream=stream)
    jax.jit(lambda: hcb.id_print(value, output_stream=stream))()
    hcb.barrier_wait()
    assert stream.lines == [wanted] * 2


def test_printed_lines(stream):
    x = jnp.arange(2.0)
    hcb.id_print(x, what="x", also=3, output_stream=stream)
    jax.vmap(lambda v: hcb.id_print(v, z=1, output_stream=stream))(x)
    jax.jit(lambda v: hcb.id_print(v, output_stream=stream, tap_with_device=True))(x)
    hcb.id_print(jnp.arange(100), threshold=5, output_stream=stream)
    assert hcb.id_print(x, result=5, output_stream=stream) == 5
    hcb.barrier_wait()
    assert stream.lines == [
        "also: 3 what: x",
        "[0. 1.]",
        "transforms: [('batch', {'batch_dims': (0,)})] z: 1",
        "[0. 1.]",
        f"device: {jax.devices()[0]}",
        "[0. 1.]",
        "[ 0  1  2 ... 97 98 99]",
        "[0. 1.]",
    ]


def test_to_standard_output(capsys):
    hcb.id_print(1.0, what="x")
    hcb.barrier_wait()
    assert capsys.readouterr().out == "what: x\n1.\n"


def test_long_trees_take_several_lines(stream):
    hcb.id_print(tuple(np.arange(12.0) for _ in range(3)), output_stream=stream)
    hcb.barrier_wait()
    (text,) = stream.lines
    row = "[ 0.  1.  2.  3.  4.  5.  6.  7.  8.  9. 10. 11.]"
    assert text == f"( {row}\n  {row}\n  {row} )"


# --- call ----------------------------------------------------------------------------------

DOUBLE = lambda x: np.asarray(x) * 2
CALLS = {
    "eager": lambda call: call(2.0),
    "jit": lambda call: jax.jit(call)(2.0),
    "scan": lambda call: lax.scan(lambda c, _: (call(c), None), 1.0, length=2)[0],
    "while": lambda call: lax.while_loop(lambda c: call(c) < 8, lambda c: call(c), 1.0),
    "cond": lambda call: lax.cond(True, call, lambda x: x, 2.0),
    "remat": lambda call: jax.checkpoint(call)(2.0),
}


@pytest.mark.parametrize("place", CALLS)
def test_call(place):
    call = lambda x: hcb.call(DOUBLE, x, result_shape=np.float32(0))
    assert CALLS[place](call) == 4
    hcb.barrier_wait()


def test_call_of_trees():
    def host(arg):
        return {"sum": arg["a"] + arg["b"][0], "none": ()}

    out = hcb.call(host, {"a": 1.0, "b": [2.0]}, result_shape={"sum": 0.0, "none": ()})
    assert float(out["sum"]) == 3
    for nothing in (None, ()):
        seen = []
        f = lambda x: (
            hcb.call(lambda v: seen.append(v) or nothing, x, result_shape=nothing),
            x,
        )[1]
        jax.jit(f)(1.0)
        hcb.barrier_wait()
        assert len(seen) == 1


@jax.tree_util.register_pytree_node_class
class Box:  # two are equal only if they are one
    def __init__(self, *held):
        self.held = held

    def tree_flatten(self):
        return self.held, None

    @classmethod
    def tree_unflatten(cls, _, held):
        return cls(*held)


def test_call_of_a_tree_that_is_not_compared():
    x = np.ones(2, np.float32)
    out = hcb.call(lambda x: Box(x + 1), x, result_shape=Box(x))
    assert out.held[0].tolist() == [2, 2]


def test_call_of_jax_on_another_device():
    other = jax.devices()[2]
    square = jax.jit(lambda m: m @ m)

    def host(m):
        return square(jax.device_put(m, other))

    m = jnp.eye(50) * 2
    f = jax.jit(lambda m: hcb.call(host, m, result_shape=m))
    np.testing.assert_array_equal(f(m), np.eye(50) * 4)


@pytest.mark.parametrize("shape", ["text", print, object()])
def test_result_shapes_that_say_nothing(shape):
    with pytest.raises(ValueError, match="result_shape should be a pytree of values"):
        hcb.call(DOUBLE, 1.0, result_shape=shape)


def test_call_refuses_transformations():
    call = lambda x: hcb.call(DOUBLE, x, result_shape=np.float32(0))
    with pytest.raises(NotImplementedError, match="only for id_tap, not for call"):
        jax.vmap(call)(jnp.arange(3.0))
    with pytest.raises(NotImplementedError, match="JVP rule is implemented only for"):
        jax.grad(call)(1.0)


# --- Wrong arguments -----------------------------------------------------------------


def test_refusals():
    with pytest.raises(TypeError, match=r"Support for \*\*kwargs in ``id_tap``"):
        hcb.id_tap(print, 1.0, what="x")
    with pytest.raises(TypeError, match="Expected a callable"):
        hcb.id_tap("print", 1.0)
    with pytest.raises(TypeError, match="not a valid JAX type"):
        hcb.id_tap(print, "text")
    with pytest.raises(TypeError, match="not a valid JAX type"):
        hcb.id_tap(print, 1.0, result="text")
    with pytest.raises(TypeError, match="not a valid JAX type"):
        hcb.call(print, "text")
    with pytest.raises(AttributeError, match="has no 'outfeed_receiver'"):
        hcb.outfeed_receiver


# --- Errors ----------------------------------------------------------------------------------


class Broken(Exception):
    pass


def test_a_tap_that_raises_stops_nothing(caplog):
    seen = []

    def fail(arg, transforms):
        raise Broken(f"at {float(arg)}")

    @jax.jit
    def f(x):
        x = hcb.id_tap(fail, x) * 2
        return hcb.id_tap(lambda v, _: seen.append(float(v)), x)

    assert f(1.0) == 2
    with pytest.raises(hcb.CallbackException) as caught:
        hcb.barrier_wait("test")
    assert "There were exceptions during callback processing. Last one was: Tr" in str(
        caught.value
    )
    assert "Broken: at 1.0" in str(caught.value)
    assert isinstance(caught.value.__cause__, Broken)
    assert hcb.TapFunctionException is hcb.CallbackException
    assert seen == [2.0]
    assert "threw exception at 1.0" in caplog.text
    hcb.barrier_wait()  # raised once


WRONG = {
    "raises": (lambda x: 1 / 0, "ZeroDivisionError"),
    "structure": (lambda x: (x, x), "should have returned a result with pytree"),
    "shape": (
        lambda x: np.zeros(3, np.float32),
        "should have returned a result with abs",
    ),
    "dtype": (lambda x: np.int32(1), "should have returned a result with abstract"),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_a_call_that_goes_wrong(case, jit):
    host, text = WRONG[case]
    f = lambda x: hcb.call(host, x, result_shape=x)
    with pytest.raises(
        (jax.errors.JaxRuntimeError, TypeError, ZeroDivisionError)
    ) as caught:
        (jax.jit(f) if jit else f)(np.float32(1)).block_until_ready()
    assert text in str(caught.value) or text == type(caught.value).__name__
    with pytest.raises(hcb.CallbackException) as after:
        hcb.barrier_wait()
    assert text in str(after.value)
    ok = jax.jit(lambda x: hcb.call(DOUBLE, x, result_shape=x))(np.float32(1))
    assert ok == 2  # the process goes on


def test_waiting_inside_a_callback_is_refused():
    said = []

    def tap(arg, transforms):
        try:
            hcb.barrier_wait()
        except hc.errors.HostcallError as error:
            said.append(str(error))

    jax.jit(lambda x: hcb.id_tap(tap, x))(1.0)
    hcb.barrier_wait()
    assert "inside a tap would wait for the tap itself" in said[0]


# --- Flags -------------------------------------------------------------------------------------


def test_inline(flags):
    flags("jax_host_callback_inline", True)
    seen = []

    def tap(arg, transforms, device=None):
        seen.append((type(arg), threading.current_thread(), device))

    assert hcb.id_tap(tap, 2.0) == 2
    assert hcb.id_tap(tap, 2.0, tap_with_device=True) == 2
    assert hcb.call(lambda x: x + 1, 2.0, result_shape=0.0) == 3
    here = threading.current_thread()
    assert seen == [(np.ndarray, here, None), (np.ndarray, here, jax.devices()[0])]


def test_derivatives_are_tapped_on_demand(flags):
    flags("jax_host_callback_ad_transforms", True)
    f = lambda tap: lambda x: tap(x * 2) ** 2
    with pytest.warns(FutureWarning, match="hc|hostcall.derivatives.tap_tangent"):
        out, seen = tapped(lambda tap: jax.jvp(f(tap), (3.0,), (1.0,)))
    assert [float(v) for v in out] == [36, 24]
    assert seen == [([6.0, 2.0], [("jvp", {})])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        back = ("jvp", {}), ("transpose", {})
        for grad in (jax.grad, lambda f: jax.jit(jax.grad(f))):
            out, seen = tapped(lambda tap, grad=grad: grad(f(tap))(3.0))
            assert out == 24
            assert seen == [(6.0, []), (12.0, list(back))]
        out, seen = tapped(lambda tap: jax.linearize(f(tap), 3.0)[1](1.0))
        assert out == 24
        assert seen == [(6.0, []), ([6.0, 2.0], [("jvp", {})])]
        x = jnp.array([1.0, 3.0])
        out, seen = tapped(lambda tap: jax.vmap(jax.grad(f(tap)))(x))
        np.testing.assert_array_equal(out, 8 * x)
        batch = ("batch", {"batch_dims": (0,)})
        assert seen == [([2.0, 6.0], [batch]), ([4.0, 12.0], [*back, batch])]
        out, seen = tapped(
            lambda tap: lax.scan(lambda c, v: (c + jax.grad(f(tap))(v), None), 0.0, x)[
                0
            ]
        )
        assert out == 32
        assert seen == [(2.0, []), (4.0, list(back)), (6.0, []), (12.0, list(back))]


def test_the_queues_size(flags):
    flags("jax_host_callback_max_queue_byte_size", 1_000_000)
    hcb.id_tap(lambda *_: None, 1.0)
    hcb.barrier_wait()
    assert hc.monitor.tap_queue().limit == 1_000_000


def test_from_the_environment(run_python):
    done = run_python(
        """
        import jax
        import hostcall.host_callback as hcb
        import threading
        here = []
        hcb.id_tap(lambda *_: here.append(threading.current_thread()), 1.0)
        print(here == [threading.main_thread()], jax.config.read("jax_host_callback_outfeed"))
        """,
        env={"JAX_HOST_CALLBACK_INLINE": "1", "JAX_HOST_CALLBACK_OUTFEED": "true"},
    )
    assert done.stdout.split() == ["True", "True"]


def test_the_log(caplog):
    caplog.set_level(logging.DEBUG, logger="hostcall.host_callback")
    jax.jit(lambda x: hcb.id_tap(lambda *_: None, x))(1.0)
    hcb.barrier_wait("here")
    assert "Outside call invoking call_func" in caplog.text
    assert "barrier_wait[here]: done" in caplog.text


# --- The process --------------------------------------------------------------------------------


def test_pending_taps_are_delivered_at_exit(run_python):
    done = run_python(
        """
        import time, jax
        import hostcall.host_callback as hcb
        def slow(arg, transforms):
            time.sleep(0.05)  # so that the last are still queued at the end
            print(float(arg), flush=True)
        f = jax.jit(lambda x: hcb.id_tap(slow, x))
        for i in range(5):
            f(float(i))
        """
    )
    assert done.stdout.split() == [f"{i}.0" for i in range(5)]


def test_under_its_old_name():
    with pytest.raises(ImportError):
        from jax.experimental import host_callback
    with hc.patch_jax():
        import jax.experimental.host_callback as old
        from jax.experimental import host_callback as also

        assert old is also is hcb
    with pytest.raises(ImportError):
        from jax.experimental import host_callback  # noqa: F401


def test_stop_outfeed_receiver_waits():
    seen = []
    hcb.id_tap(lambda v, _: seen.append(float(v)), 1.0)
    hcb.stop_outfeed_receiver()
    assert seen == [1.0]
    hcb.id_tap(lambda v, _: seen.append(float(v)), 2.0)
    hcb.barrier_wait()
    assert seen == [1.0, 2.0]


@pytest.mark.filterwarnings("ignore:The flag jax_host_callback_ad:FutureWarning")
def test_taps_with_derivatives_under_checkpoint(flags):
    flags("jax_host_callback_ad_transforms", True)

    def f(tap):
        return jax.grad(jax.checkpoint(lambda x: (tap(x) ** 2).sum()))(jnp.ones(2))

    out, seen = tapped(f)
    np.testing.assert_array_equal(out, 2 * np.ones(2))
    # Forward, where the values are computed again, and backward.
    ways = [tuple(name for name, _ in transforms) for _, transforms in seen]
    assert ways == [(), (), ("jvp", "transpose")]
