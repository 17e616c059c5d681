"""What hostcall keeps of the exceptions that callbacks raised, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import io
import logging
import pdb
import sys
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import policies
import pytest
from platforms import late_square

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
        jax.block_until_ready(f(x))


def reported(f, x):
    with contextlib.suppress(jax.errors.JaxRuntimeError, Mine, LookupError):
        jax.block_until_ready(f(x))
        jax.effects_barrier()


def barrier(f, x):
    f(x)
    with contextlib.suppress(Mine, LookupError):
        hc.barrier()


def flushed(f, x):
    f(x)
    hc.barrier(programs=False)


def late(x):
    """Its argument, after a product with which XLA runs a program on its own thread."""
    side = late_square(300)[0]
    square = jnp.outer(x[:side], x[:side])
    return x + 0 * (square @ square)[0, 0]


def awaited(fn):
    async def body(x):
        fn(x)

    return lambda x: asyncio.run(body(x))


WAYS = {
    "coroutine": (lambda fn: jax.jit(lambda x: call(awaited(fn), x)), reported),
    "reraise": (lambda fn: jax.jit(lambda x: call(fn, x)), reraised),
    "late": (lambda fn: jax.jit(lambda x: call(fn, late(x))), reraised),
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


class Refuses:
    """An attribute that can't be read."""

    def __get__(self, error, kind=None):
        raise RuntimeError("an attribute of the user's")


class Answers(ValueError):
    """Its class answers for the traceback."""

    __traceback__ = 5

    def with_traceback(self, trace):
        raise AssertionError


class Chained(ValueError):
    """Its class answers for what is behind it, and for its arguments."""

    __cause__ = 5
    __context__ = Refuses()
    args = Refuses()


class Members(ExceptionGroup):
    exceptions = Refuses()


class Closed(ValueError):
    """None of its attributes can be read, not even its class."""

    __class__ = Refuses()
    __notes__ = Refuses()

    def __getattribute__(self, name):
        raise RuntimeError("no attributes")


class Kind(type):
    __name__ = Refuses()


class Nameless(ValueError, metaclass=Kind):
    """Its class does not tell its name."""


class Text(str):
    def __format__(self, spec):
        raise RuntimeError("no format")

    __add__ = __radd__ = replace = encode = Refuses()


class Odd(ValueError):
    """Its text is a string with methods of its own."""

    def __str__(self):
        return Text("odd")


ODD = {
    "traceback": Answers,
    "chain": Chained,
    "group": lambda: Members("some", [Mine("a member")]),
    "attributes": Closed,
    "metaclass": Nameless,
    "text": Odd,
}


def fails_with(make):
    def fail(x):
        raise make()

    return fail


def without_lines(x):
    raise Mine


# Code that was made or changed may say nothing of its lines.
without_lines.__code__ = without_lines.__code__.replace(co_linetable=b"")

HARD_TO_KEEP = {n: fails_with(make) for n, make in ODD.items()} | {
    "no lines": without_lines
}


def jitted(**options):
    return lambda fn: jax.jit(lambda x: call(fn, x, **options))


PLACES = {
    "jit": jitted(),
    "ordered": jitted(order="ordered"),
    "lend": jitted(lend=True),
    "timeout": jitted(timeout=60),
    "drop-in": lambda fn: jax.jit(lambda x: hc.pure_callback(fn, F32, x)),
    "debug": lambda fn: jax.jit(lambda x: hc.debug.callback(fn, x)),
}


def report_of(program):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(program(1.0))
        jax.effects_barrier()
    return str(caught.value)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("fail", HARD_TO_KEEP.values(), ids=HARD_TO_KEEP)
def test_a_failure_that_is_hard_to_keep_is_told_and_so_is_the_next(fail, place):
    def next_one(x):
        raise LookupError("the next")

    own = report_of(place(fail))
    assert "an attribute of the user's" not in own
    assert "no attributes" not in own
    kept = hc.errors.last_error()
    assert type(kept) in (Mine, Members, *ODD.values())
    assert vars(type)["__name__"].__get__(type(kept)) in own
    assert "LookupError: the next" in report_of(place(next_one))
    assert repr(hc.errors.last_error()) == "LookupError('the next')"


@pytest.mark.parametrize("fail", HARD_TO_KEEP.values(), ids=HARD_TO_KEEP)
def test_a_tap_failure_that_is_hard_to_keep_reaches_the_barrier(fail):
    jax.jit(lambda x: hc.tap(fail, x))(1.0)
    with pytest.raises(Exception) as caught:
        hc.barrier()
    assert caught.type in (Mine, Members, *ODD.values())


class Broken(logging.Handler):
    """A handler of logs that fails, as one may whose disk is full."""

    def __init__(self):
        super().__init__()
        self.got = 0

    def emit(self, record):
        self.got += 1
        raise OSError("no space left")


@pytest.fixture
def broken_log():
    handler = Broken()
    loggers = [logging.getLogger(name) for name in ("hostcall", "jax")]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)


def test_a_log_that_fails_does_not_hide_what_is_logged(broken_log):
    def fail(x):
        raise Mine("the user's")

    for place in ("drop-in", "debug"):
        assert "Mine: the user's" in report_of(PLACES[place](fail))
    with pytest.raises(Mine):
        hc.debug.callback(fail, 1.0)
    jax.jit(lambda x: hc.tap(fail, x))(1.0)
    with pytest.raises(Mine):
        hc.barrier()
    assert broken_log.got


def test_a_failure_where_the_stack_is_full_is_told(monkeypatch):
    """Reporting it needs more frames than are left."""
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", lambda _: ignored.append(1))

    def fail(x):
        raise Mine("at the bottom")

    f = jax.jit(lambda x: hc.call(fail, F32, x))
    x = jnp.float32(1)
    report_of(f)
    said = []

    def down(frames):
        if frames:
            return down(frames - 1)
        return jax.block_until_ready(f(x))

    here = len(inspect.stack(0))
    for frames in range(sys.getrecursionlimit() - here - 60, sys.getrecursionlimit()):
        try:
            down(frames)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            said.append(str(error))
        except RecursionError:  # the program was not even dispatched
            break
    else:
        pytest.fail("the stack never was full")
    assert said
    assert all("Mine: at the bottom" in text for text in said), said
    assert any("failed to report more of it" in text for text in said) == bool(ignored)


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
    ones = jnp.ones(late_square(300))

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

    m = jnp.zeros(late_square(600))
    read, unread = f(1.0, m), f(2.0, m)
    with pytest.raises(jax.errors.JaxRuntimeError, match="at 1"):
        read.block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="at 2"):
        hc.barrier()
    assert hc.barrier()
    with pytest.raises(jax.errors.JaxRuntimeError, match="at 2"):
        unread.block_until_ready()
