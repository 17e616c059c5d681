"""What a failing callback raises: the exception object, and the text that JAX shows."""

import contextlib
import ctypes
import struct
import sys
import threading
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import late_square

import hostcall as hc

JaxRuntimeError = jax.errors.JaxRuntimeError
F32 = jax.ShapeDtypeStruct((), jnp.float32)
MONITORING = sys.version_info >= (3, 12)
# What JAX raises if a thread of XLA's made the call. Python 3.11 can't change the
# ValueError of JAX's fast path then, nor know that somebody was told.
REPORT = JaxRuntimeError if MONITORING else (JaxRuntimeError, ValueError)
TOLD = contextlib.nullcontext() if MONITORING else contextlib.suppress(REPORT)
ORDERS = ("pure", "unordered", "ordered")
MODES = {"eager": lambda f: f, "jit": jax.jit}

orders = pytest.mark.parametrize("order", ORDERS)
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


class Flaky:
    """Doubles its argument, but raises for negative numbers; records what it raised."""

    def __init__(self, make=lambda: LookupError("negative")):
        self.make = make
        self.raised = []

    def double(self, x):
        if x < 0:
            self.raised.append(self.make())
            raise self.raised[-1]
        return 2 * x


@pytest.fixture
def flaky():
    """Makes `Flaky`s."""
    made = []

    def make(*args):
        made.append(Flaky(*args))
        return made[-1]

    yield make
    for one in made:
        # function -> exception -> frame -> program -> function is a cycle that runs
        # through XLA, where the garbage collector can't see it.
        one.raised.clear()


# --- The object --------------------------------------------------------------------


@modes
@orders
@pytest.mark.parametrize("successes_before", [0, 1, 2])
def test_reraise_gives_the_raised_object(flaky, mode, order, successes_before):
    bad = flaky()
    step = mode(lambda x: hc.call(bad.double, F32, x, order=order))
    for _ in range(successes_before):
        assert step(2.0) == 4
    for _ in range(2):
        with pytest.raises(LookupError) as caught, hc.reraise():
            step(-1.0)
        error = caught.value
        assert error is bad.raised[-1]
        assert hc.errors.last_error() is error
        assert "double" in [f.name for f in traceback.extract_tb(error.__traceback__)]
        assert isinstance(error.__context__, JaxRuntimeError) == (mode is jax.jit)
        assert step(3.0) == 6
    assert len(bad.raised) == 2


@orders
def test_reraise_waits_for_a_program_that_was_only_dispatched(flaky, order):
    bad = flaky()
    step = jax.jit(lambda x: hc.call(bad.double, F32, jnp.sin(x).sum(), order=order))
    x = jax.block_until_ready(jnp.full((2_000_000,), -1.0))
    assert step(-x) > 0
    unread = []  # JAX may drop a pure call with an unused result
    with pytest.raises(LookupError) as caught, hc.reraise():
        unread.append(step(x))
    assert caught.value is bad.raised[0]
    assert isinstance(caught.value.__context__, REPORT)
    hc.barrier()


@modes
def test_reraise_as_decorator(flaky, mode):
    bad = flaky()
    step = mode(lambda x: hc.call(bad.double, F32, x))

    @hc.reraise()
    def run(x):
        return step(x)

    assert run(1.0) == 2
    with pytest.raises(LookupError) as caught:
        run(-1.0)
    assert caught.value is bad.raised[0]
    assert run(1.0) == 2


def test_reraise_leaves_other_errors_alone():
    with pytest.raises(ZeroDivisionError), hc.reraise():
        1 / 0
    other = JaxRuntimeError("INTERNAL: not hostcall's")
    with pytest.raises(JaxRuntimeError) as caught, hc.reraise():
        raise other
    assert caught.value is other


def test_reraise_forgets_what_was_caught_before_it(flaky):
    bad = flaky()
    with pytest.raises(JaxRuntimeError):
        jax.block_until_ready(jax.jit(lambda: hc.call(bad.double, F32, -1.0))())
    with hc.reraise():
        assert hc.call(bad.double, F32, 1.0) == 2


class Awkward(Exception):
    """Can't be constructed from its `args`, and has no text."""

    def __init__(self, *, code):
        self.code = code


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def chained():
    error = LookupError("outer")
    error.__cause__ = OSError("inner")
    return error


MAKERS = {
    "no message": lambda: ValueError(),
    "lines": lambda: ValueError("one\ntwo\r\nthree"),
    "not ASCII": lambda: ValueError("Größe ≠ 0 🦜"),
    "NUL": lambda: ValueError("before \0 after"),
    "surrogate": lambda: ValueError("bad \ud800 text"),
    "long": lambda: ValueError("x" * 200_000),
    "looks like ours": lambda: ValueError("[hostcall error 1]"),
    "cause": chained,
    "custom": lambda: Awkward(code=7),
    "str raises": Unspeakable,
    "group": lambda: ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
    "StopIteration": lambda: StopIteration(3),
    "JAX's own type": lambda: JaxRuntimeError("INTERNAL: from a callback"),
}


@modes
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_any_exception_is_raised_as_the_same_object(flaky, mode, make):
    bad = flaky(make)
    step = mode(lambda x: hc.call(bad.double, F32, x))
    for _ in range(2):
        with pytest.raises(type(make())) as caught, hc.reraise():
            step(-1.0)
        assert caught.value is bad.raised[-1]
        assert step(1.0) == 2
    if make is chained:
        assert str(caught.value.__cause__) == "inner"


def recurse(x):
    return recurse(x) + 1


FROM_C = {
    "recursion": (recurse, RecursionError),
    "memory": (lambda x: np.empty(2**60, np.uint8), MemoryError),
    "ctypes": (lambda x: ctypes.CDLL(None).no_such_symbol, AttributeError),
    "numpy": (lambda x: np.linalg.inv(np.zeros((2, 2))), np.linalg.LinAlgError),
    "struct": (lambda x: struct.unpack("i", b""), struct.error),
    "decoding": (lambda x: b"\xff".decode(), UnicodeDecodeError),
    "division": (lambda x: 1 // 0, ZeroDivisionError),
    "arity": (lambda *args: (lambda: 0)(*args), TypeError),
}


@modes
@pytest.mark.parametrize(("fn", "kind"), FROM_C.values(), ids=FROM_C)
def test_errors_raised_by_c_code(mode, fn, kind):
    step = mode(lambda x: hc.call(fn, F32, x))
    for _ in range(2):
        with pytest.raises(kind), hc.reraise():
            step(1.0)
        assert isinstance(hc.errors.last_error(), kind)


@modes
@orders
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_are_raised_unchanged(flaky, mode, order, kind):
    bad = flaky(lambda: kind("stop"))
    step = mode(lambda x: hc.call(bad.double, F32, x, order=order))
    for _ in range(2):
        with pytest.raises(kind) as caught:
            jax.block_until_ready(step(-1.0))
        assert caught.value is bad.raised[-1]
        assert step(1.0) == 2


# --- The text ----------------------------------------------------------------------


@orders
def test_text_and_type_are_the_same_on_first_and_later_calls(order):
    def broken(x):
        if x < 0:
            raise LookupError("nothing there")
        return x

    call = lambda x: hc.call(broken, F32, x, order=order)
    step, texts = jax.jit(call), []
    for x in (-1.0, 1.0, -1.0, -1.0):
        if x > 0:
            assert step(x) == x
            continue
        with pytest.raises(Exception) as caught:
            jax.block_until_ready(step(x))
        assert type(caught.value) is JaxRuntimeError
        texts.append(str(caught.value))
    for text in texts:
        assert "LookupError: nothing there" in text
        assert f"`{broken.__qualname__}`" in text
        assert f"{__file__}:{call.__code__.co_firstlineno}" in text
        assert "\n" not in text
        assert len(text) < 600


@pytest.mark.parametrize(
    ("axes", "where"), [((4,), ", row 2,"), ((2, 3), ", row (1, 2),")], ids=str
)
@pytest.mark.parametrize("order", ["pure", "ordered"])
def test_text_names_the_row_that_failed(axes, where, order):
    bad = 2 if len(axes) == 1 else 5

    def host(x):
        if x == bad:
            raise ValueError("this row")
        return x

    batched = lambda x: hc.call(host, F32, x, order=order)
    for _ in axes:
        batched = jax.vmap(batched)
    rows = jnp.arange(np.prod(axes), dtype=jnp.float32).reshape(axes)
    with pytest.raises(JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(batched)(rows))
    assert where in str(caught.value)
    with pytest.raises(ValueError) as caught:
        batched(rows)
    assert caught.value.args == ("this row",)


# --- The type, on JAX's fast path too ---------------------------------------------------


@orders
@pytest.mark.parametrize("successes_before", [0, 1, 3])
def test_the_type_is_the_same_on_every_call(flaky, order, successes_before):
    bad = flaky()
    step = jax.jit(lambda x: hc.call(bad.double, F32, x, order=order))
    for _ in range(successes_before):
        step(2.0)
    for _ in range(3):
        with pytest.raises(JaxRuntimeError, match="LookupError: negative") as caught:
            jax.block_until_ready(step(-1.0))
            jax.effects_barrier()
        assert type(caught.value) is JaxRuntimeError
        assert caught.traceback[0].path == Path(__file__)
        assert step(3.0) == 6
    assert sys.gettrace() is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("successes_before", [0, 1, 3])
def test_exits_and_interrupts_are_raised_unchanged(kind, successes_before):
    def host(x):
        if x < 0:
            raise kind("mine")
        return x

    step = jax.jit(lambda x: hc.call(host, F32, x))
    for _ in range(successes_before):
        step(2.0)
    with pytest.raises(kind, match="mine"):
        jax.block_until_ready(step(-1.0))
    assert step(3.0) == 3


def test_a_trace_function_of_somebody_else_stays():
    seen = []

    def trace(frame, event, arg):
        seen.append(event)
        return trace

    def host(x):
        if x < 0:
            raise LookupError
        return x

    step = jax.jit(lambda x: hc.call(host, F32, x))
    step(2.0)
    sys.settrace(trace)
    try:
        with contextlib.suppress(JaxRuntimeError, ValueError):
            step(-1.0)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(None)
    assert "exception" in seen


@pytest.mark.skipif(not MONITORING, reason="sys.monitoring is 3.12's")
def test_the_type_is_the_same_under_a_debugger(flaky):
    bad = flaky()
    step = jax.jit(lambda x: hc.call(bad.double, F32, x))
    step(2.0)
    sys.settrace(lambda frame, event, arg: None)
    try:
        with pytest.raises(JaxRuntimeError):
            jax.block_until_ready(step(-1.0))
    finally:
        sys.settrace(None)


@orders
def test_the_type_is_the_same_where_a_thread_of_xla_made_the_call(order):
    """Such a failure is raised where the program was dispatched, and nowhere else."""
    threads = set()

    def host(x):
        threads.add(threading.get_ident())
        if x > 0:
            raise LookupError("late")
        return x

    @jax.jit
    def step(x, scale):  # two branches, which XLA runs beside each other
        square = x[:250_000].reshape(500, 500)
        first = hc.call(host, F32, scale * (square @ square).sum(), order=order)
        second = hc.call(host, F32, scale * abs(jnp.fft.fft(x)).sum(), order=order)
        return first + second + jnp.sort(x).sum() + (jnp.sin(square) @ square).sum()

    x = jax.block_until_ready(jnp.full(300_000, 1.0))
    step(x, -1.0).block_until_ready()
    threads.clear()
    limit = time.monotonic() + 300
    runs = 0
    here = {threading.get_ident()}
    while runs < 5 or threads == here:  # XLA decides which thread it is
        with pytest.raises(REPORT, match="LookupError: late"):
            step(x, 1.0).block_until_ready()
        with TOLD:
            hc.barrier()
            jax.effects_barrier()
        runs += 1
        assert time.monotonic() < limit


def test_a_value_error_made_of_a_report_stays(flaky):
    bad = flaky()
    step = jax.jit(lambda x: hc.call(bad.double, F32, x))
    step(2.0)
    with pytest.raises(JaxRuntimeError) as caught:
        jax.block_until_ready(step(-1.0))
    for text in [str(caught.value), f"INTERNAL: {caught.value}", "[hostcall error 0]"]:
        with pytest.raises(ValueError) as mine:
            raise ValueError(text)
        assert type(mine.value) is ValueError


def test_a_failure_that_comes_out_later_leaves_no_trace_function():
    """The program runs on one of XLA's threads, while this thread goes on."""

    def host(x):
        raise LookupError("late")

    step = jax.jit(lambda m: hc.call(host, F32, (m @ m)[0, 0]))
    late = step(jnp.ones(late_square(500)))
    assert sys.gettrace() is None
    with pytest.raises(JaxRuntimeError, match="late"):
        late.block_until_ready()
    with pytest.raises(ValueError, match="somebody else's"):
        raise ValueError("somebody else's")


# --- jax_debug_nans, jax_debug_infs ---------------------------------------------------


def nan(*args):
    return np.float32(np.nan)


def infinite(*args):
    return np.float32(np.inf)


def nan_into(ctx, out, x):
    np.asarray(out)[...] = np.nan


def zero_over_zero(x):
    return hc.call(lambda x: x, F32, x) / x


FORBIDDEN = {
    "call": (lambda x: hc.call(nan, F32, x), "nan", "`nan`"),
    "infinity": (lambda x: hc.call(infinite, F32, x), "inf", "`infinite`"),
    "ordered": (lambda x: hc.call(nan, F32, x, order="ordered"), "nan", "`nan`"),
    "host": (hc.host(nan, result=hc.results.like(0)), "nan", "`nan`"),
    "pure": (lambda x: hc.pure_callback(nan, F32, x), "nan", "pure_callback of `nan`"),
    "io": (lambda x: hc.io_callback(nan, F32, x), "nan", "io_callback of `nan`"),
    "buffer": (
        lambda x: hc.buffers.buffer_callback(nan_into, F32)(x),
        "nan",
        "buffer_callback of `nan_into`",
    ),
    "another": (zero_over_zero, "nan", "div"),  # the call did not make the NaN
}


@pytest.fixture
def no_special_values():
    jax.config.update("jax_debug_nans", True)
    jax.config.update("jax_debug_infs", True)
    yield
    jax.config.update("jax_debug_nans", False)
    jax.config.update("jax_debug_infs", False)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("mode", ["eager", "jit", "grad"])
@pytest.mark.parametrize("kind", FORBIDDEN)
def test_the_function_that_gave_a_nan_is_named(kind, mode, times, no_special_values):
    f, special, named = FORBIDDEN[kind]
    last = jax.custom_jvp(lambda x: f(x) + 1)
    last.defjvp(lambda primals, tangents: (primals[0], tangents[0] * f(primals[0])))
    run = {"eager": f, "jit": jax.jit(last), "grad": jax.jit(jax.grad(last))}[mode]
    for _ in range(times):  # an eager drop-in is compiled at its second call
        with pytest.raises(FloatingPointError) as caught:
            run(jnp.float32(0))
        text = f"invalid value ({special}) encountered in {named}"
        assert str(caught.value).startswith(text)
        assert (f", called at {__file__}:" in str(caught.value)) == (named != "div")
    jax.effects_barrier()


def test_nans_that_no_result_has_are_allowed(no_special_values):
    f = jax.jit(lambda x: jnp.where(jnp.isnan(hc.call(nan, F32, x)), x, 0.0))
    assert f(jnp.float32(2)) == 2
    masked = lambda x: hc.call(nan, F32, x, where=x > 5)
    assert masked(jnp.float32(2)) == jax.jit(masked)(jnp.float32(2)) == 0
    whole = jax.ShapeDtypeStruct((), jnp.int32)
    assert hc.call(lambda x: np.int32(3), whole, 1.0) == 3


def test_nans_are_allowed_where_nobody_forbids_them():
    assert np.isnan(hc.call(nan, F32, 0.0))
    assert np.isnan(hc.pure_callback(nan, F32, 0.0))
