"""What hostcall keeps of the exceptions that callbacks raised, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import pdb
import sys
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import policies
import pytest

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)


class Mine(Exception):
    pass


@pytest.fixture
def no_collector():
    """Without the garbage collector: objects must die by their reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def call(fn, x, **options):
    return policies.call(fn, F32, x, **options)


def reraised(f, x):
    with contextlib.suppress(Mine, LookupError), hc.reraise():
        f(x)


def reported(f, x):
    with contextlib.suppress(jax.errors.JaxRuntimeError, Mine, LookupError):
        f(x)


def barrier(f, x):
    f(x)
    with contextlib.suppress(Mine, LookupError):
        hc.barrier()


def flushed(f, x):
    f(x)
    hc.barrier(programs=False)


def awaited(fn):
    async def body(x):
        fn(x)

    return lambda x: asyncio.run(body(x))


WAYS = {
    "coroutine": (lambda fn: jax.jit(lambda x: call(awaited(fn), x)), reported),
    "reraise": (lambda fn: jax.jit(lambda x: call(fn, x)), reraised),
    "report": (lambda fn: jax.jit(lambda x: call(fn, x)), reported),
    "eager": (lambda fn: lambda x: call(fn, x), reported),
    "timeout": (lambda fn: jax.jit(lambda x: call(fn, x, timeout=60)), reported),
    "drop-in": (lambda fn: jax.jit(lambda x: hc.pure_callback(fn, F32, x)), reported),
    "eager drop-in": (lambda fn: lambda x: hc.pure_callback(fn, F32, x), reported),
    "debug": (lambda fn: lambda x: hc.debug.callback(fn, x), reported),
    "tap": (lambda fn: jax.jit(lambda x: hc.tap(fn, x)), barrier),
    "taps": (lambda fn: jax.jit(lambda x: hc.tap(fn, x)), flushed),
}


class Local:
    """An object that a frame holds."""


# Without a GIL, the thread that made an object frees it, when it next runs Python code.
FREED_LATER = 0 if getattr(sys, "_is_gil_enabled", lambda: True)() else 1


@pytest.mark.parametrize("kind", [Mine, LookupError])
@pytest.mark.parametrize(("make", "run"), WAYS.values(), ids=WAYS)
def test_only_the_newest_keeps_its_values(make, run, kind, no_collector, caplog):
    alive = []

    def fail(x):
        held = Local()
        alive.append(weakref.ref(held))
        raise kind("no")

    f = make(fail)
    x = np.ones(1000, np.float32)

    def caller():
        own = Local()
        alive.append(weakref.ref(own))
        run(f, x)

    for _ in range(40):
        caller()
        for record in caplog.records:  # the log holds it too
            record.exc_info = None
        assert sum(ref() is not None for ref in alive) <= 2 + 2 * FREED_LATER
    assert len(alive) == 80
    assert isinstance(hc.errors.last_error(), kind)
    with contextlib.suppress(BaseExceptionGroup):
        hc.barrier()


def test_older_failures_keep_their_lines():
    def fails(x):
        raise Mine(f"no {x}")

    f = jax.jit(lambda x: hc.tap(fails, x))
    f(1.0), f(2.0), f(3.0)
    with pytest.raises(BaseExceptionGroup) as caught:
        hc.barrier()
    assert len(caught.value.exceptions) == 3
    for error in caught.value.exceptions:
        lines = traceback.format_exception(error)
        assert "in fails\n    raise Mine(f" in "".join(lines)


def odd():
    """Exceptions that are hard to keep: ones whose class answers for the traceback, and
    one of a function that says nothing of its lines.
    """

    class Answers(ValueError):
        __traceback__ = 5

        def with_traceback(self, trace):
            raise AssertionError

    def plain(x):
        raise Answers

    def bare(x):
        raise Mine

    bare.__code__ = bare.__code__.replace(co_linetable=b"")
    return plain, bare


@pytest.mark.parametrize("fail", odd(), ids=lambda fail: fail.__name__)
def test_a_failure_after_one_that_is_hard_to_keep(fail):
    def next_one(x):
        raise LookupError("the next")

    for fn in (fail, next_one):
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(jax.jit(lambda x, fn=fn: call(fn, x))(1.0))
    assert "LookupError: the next" in str(caught.value)
    assert repr(hc.errors.last_error()) == "LookupError('the next')"


def test_a_failure_that_passes_through_a_callback_is_kept():
    """An eager call gave it to the callback, which let it pass."""

    def inner(x):
        raise Mine("inner")

    def outer(x):
        return call(inner, x)

    def report(fn):
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(jax.jit(lambda x: call(fn, x))(1.0))
        return caught.value

    first = report(outer)
    report(lambda x: [][0])
    with pytest.raises(Mine, match="inner"), hc.reraise():
        raise first


def said(error, command):
    """What the debugger prints in the innermost frame of an exception."""
    out = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO(f"{command}\nq\n"), stdout=out)
    debugger.reset()
    debugger.interaction(None, error.__traceback__)
    return out.getvalue()


@pytest.mark.parametrize("kind", [Mine, LookupError])
@pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_what_the_user_holds_shows_its_values(mode, kind):
    def fail(x):
        raise kind(float(x))

    f, held = mode(lambda x: call(fail, x)), []
    for i in range(5):
        with pytest.raises(kind) as caught, hc.reraise():
            f(np.float32(i))
        held.append(caught.value)
    assert hc.errors.last_error() is held[-1]
    for i, error in enumerate(held):
        assert f"<{float(i)}>" in said(error, "p f'<{float(x)}>'")
        error.__traceback__ = None  # its frames hold this list


@pytest.mark.parametrize("kind", [Mine, LookupError])
def test_a_second_look_gives_the_same_exception(kind):
    ones = jnp.ones((300, 300))

    def fail(x):
        raise kind(float(x))

    f = jax.jit(lambda x: call(fail, x + 0 * (ones @ ones)[0, 0]))
    y = f(1.0)
    errors = []
    for _ in range(3):
        with pytest.raises(kind, match=r"1\.0") as caught, hc.reraise():
            y.block_until_ready()
        errors.append(caught.value)
        with pytest.raises(kind, match=r"2\.0"), hc.reraise():
            f(2.0)
    if kind is Mine:  # a LookupError can't be weakly referenced
        assert errors[0] is errors[1] is errors[2]


@pytest.mark.parametrize(
    "call_it",
    [
        lambda f: hc.call(f, jax.ShapeDtypeStruct((), np.float32), 1.0),
        lambda f: hc.debug.callback(f, 1.0),
    ],
    ids=["call", "debug"],
)
def test_an_eager_error_that_the_user_holds_keeps_its_values(call_it):
    def fail(x):
        held = 5
        raise Mine(held)

    errors = []
    for _ in range(2):
        with pytest.raises(Mine) as caught:
            call_it(fail)
        errors.append(caught)
    assert all(e.traceback[-1].frame.f_locals["held"] == 5 for e in errors)


def test_values_of_the_exception_that_is_handled_around_a_program_stay():
    """A callback on the dispatching thread gets it as the context of its own exception."""

    def fail(x):
        raise Mine

    def around(value):
        raise ValueError

    f = jax.jit(lambda x: call(fail, x))
    contexts = []
    with pytest.raises(ValueError) as caught:
        try:
            around(5)
        finally:
            for _ in range(3):
                with pytest.raises(jax.errors.JaxRuntimeError):
                    jax.block_until_ready(f(1.0))
                contexts.append(hc.errors.last_error().__context__)
    assert contexts == [caught.value] * 3
    assert caught.traceback[-1].frame.f_locals["value"] == 5


@pytest.mark.parametrize("lend", [False, True])
def test_a_generator_that_handled_an_exception_goes_on(lend):
    def lines():
        number = 0
        while True:
            try:
                number += 1
                yield number
            except LookupError:
                number = 100

    numbers = lines()
    next(numbers)

    def fail(x):
        try:
            raise LookupError(x)
        except LookupError as error:
            numbers.throw(error)
            raise Mine from error

    f = jax.jit(lambda x: call(fail, x, lend=lend))
    for i in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(f(np.float32(i)))
        assert next(numbers) == 102


def test_an_error_whose_text_can_not_be_made():
    class Silent(ValueError):
        def __str__(self):
            raise RuntimeError("no text")

    def fail(x):
        raise Silent

    for lend in (False, True):
        f = jax.jit(lambda x, lend=lend: call(fail, x, lend=lend))
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=r"Silent: <its str\(\) raised RuntimeError>",
        ):
            jax.block_until_ready(f(1.0))
        with pytest.raises(Silent), hc.reraise():
            call(fail, np.float32(1), lend=lend)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_stops_the_process_while_a_failure_is_reported(stop):
    """As Ctrl-C may: it comes where the exception's text is made."""

    class Slow(ValueError):
        def __str__(self):
            raise stop(3)

    def fail(x):
        raise Slow

    for order in ("pure", "unordered", "ordered"):
        with pytest.raises(stop) as caught:
            jax.block_until_ready(jax.jit(lambda x, o=order: call(fail, x, order=o))(1))
            hc.barrier()
        assert isinstance(caught.value.__context__, Slow)
    jax.jit(lambda x: hc.tap(fail, x))(1.0)
    with pytest.raises(stop):
        hc.barrier()


def test_a_barrier_passes_over_a_failed_array_that_was_seen():
    """A traceback that somebody keeps also keeps the arrays in its frames."""

    def bad(x):
        raise LookupError(f"at {float(x)}")

    @jax.jit
    def f(x, m):  # XLA runs the product on a thread of its own: f returns before it
        return hc.call(bad, F32, x + (m @ m)[0, 0])

    m = jnp.zeros((600, 600))
    read, unread = f(1.0, m), f(2.0, m)
    with pytest.raises(jax.errors.JaxRuntimeError, match="at 1"):
        read.block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="at 2"):
        hc.barrier()
    assert hc.barrier()
    with pytest.raises(jax.errors.JaxRuntimeError, match="at 2"):
        unread.block_until_ready()
