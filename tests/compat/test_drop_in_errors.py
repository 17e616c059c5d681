"""A drop-in's callback that raises: JAX's type and log, our text, the same object."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specs import like

import hostcall as hc


class Broken(Exception):
    pass


KINDS = {
    "pure": (
        lambda fn, x: hc.pure_callback(fn, like(x), x),
        "jax._src.callback",
        "jax.pure_callback failed",
    ),
    "io": (
        lambda fn, x: hc.io_callback(fn, like(x), x),
        "jax._src.callback",
        "jax.io_callback failed",
    ),
    "ordered": (
        lambda fn, x: hc.io_callback(fn, like(x), x, ordered=True),
        "jax._src.callback",
        "jax.io_callback failed",
    ),
    "debug": (
        lambda fn, x: (hc.debug.callback(fn, x), x)[1],
        "jax._src.debugging",
        "jax.debug.callback failed",
    ),
    "debug, ordered": (
        lambda fn, x: (hc.debug.callback(fn, x, ordered=True), x)[1],
        "jax._src.debugging",
        "jax.debug.callback failed",
    ),
}


@pytest.fixture
def error():
    error = Broken("negative")
    yield error
    # A cycle: its frames hold the program, and the program's callback holds it.
    error.__traceback__ = error.__context__ = None


def program(kind, error):
    """Fails if its argument is negative."""
    call, *_ = KINDS[kind]

    def host(x):
        if np.asarray(x) < 0:
            raise error
        return x

    return jax.jit(lambda x: call(host, x) + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_fails_the_same_each_time_and_works_between(kind, error):
    f = program(kind, error)

    def fails():
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            f(-1.0).block_until_ready()
            jax.effects_barrier()
        text = str(caught.value)
        assert "Broken: negative (in callback `program.<locals>.host`" in text
        assert "test_drop_in_errors.py" in text
        assert len(text.splitlines()[0]) < 400
        assert hc.errors.last_error() is error

    fails()
    fails()
    assert f(1.0) == 2
    fails()
    assert f(2.0) == 3
    jax.effects_barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_reraise_gives_the_object(kind, error):
    f = program(kind, error)
    with pytest.raises(Broken) as caught, hc.reraise():
        f(-1.0)
    assert caught.value is error
    names = [entry.name for entry in caught.traceback]
    assert "host" in names


@pytest.mark.parametrize("kind", KINDS)
def test_logged_as_jax_logs(kind, caplog, error):
    f = program(kind, error)
    with pytest.raises(jax.errors.JaxRuntimeError):
        f(-1.0).block_until_ready()
        jax.effects_barrier()
    _, name, message = KINDS[kind]
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR and r.exc_info]
    assert record.name == name
    assert record.getMessage() == message
    assert record.exc_info[1] is error
    assert "Traceback (most recent call last)" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_eager(kind, error):
    """As in a program, except that an eager debug callback raises its own exception, as
    JAX's does.
    """
    call, *_ = KINDS[kind]

    def host(x):
        raise error

    for _ in range(3):  # called eagerly, then compiled, then cached
        with pytest.raises((jax.errors.JaxRuntimeError, Broken)) as caught:
            jax.block_until_ready(call(host, 1.0))
            jax.effects_barrier()
        if kind.startswith("debug"):
            assert caught.value is error
        else:
            assert type(caught.value) is jax.errors.JaxRuntimeError
            assert "Broken: negative (in callback" in str(caught.value)
        assert hc.errors.last_error() is error


def test_an_eager_call_can_be_reraised():
    def host(x):
        raise Broken("once")

    with pytest.raises(Broken), hc.reraise():
        hc.pure_callback(host, like(1.0), 1.0)


@pytest.mark.parametrize("kind", ["pure", "io", "debug"])
def test_ctrl_c_is_raised_as_keyboard_interrupt(kind):
    call, *_ = KINDS[kind]

    def host(x):
        raise KeyboardInterrupt

    f = jax.jit(lambda x: call(host, x))
    for run in (f, lambda x: call(host, x)):
        with pytest.raises(KeyboardInterrupt):
            jax.block_until_ready(run(1.0))
            jax.effects_barrier()


def test_programs_of_jaxs_own_ordered_effect_go_on_after_a_failure(error):
    """A failed ordered drop-in does not fail the next ordered callback, whatever type has
    the effect.
    """
    f = program("ordered", error)
    seen = []
    g = jax.jit(lambda x: hc.io_callback(seen.append, None, x, ordered=True))
    with pytest.raises(jax.errors.JaxRuntimeError):
        f(-1.0).block_until_ready()
    g(jnp.float32(1))
    jax.effects_barrier()
    assert [float(v) for v in seen] == [1.0]
