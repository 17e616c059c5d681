"""Ctrl-C where no Python code of a user's runs: it comes later instead."""

from __future__ import annotations

import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall import _jax
from hostcall._jax import settings
from hostcall._runtime import host_device, puller


def test_an_interrupt_while_settings_are_set_reaches_the_function(monkeypatch):
    with jax.enable_x64(True):
        spec = jax.ShapeDtypeStruct((), jnp.float64)
        f = jax.jit(lambda x: hc.call(lambda x: x + 1, spec, x))
        assert f(1.0) == 2.0
        plain, left = settings._set, [1]

        def interrupted(name, value):
            if left:
                left.pop()
                raise KeyboardInterrupt
            return plain(name, value)

        monkeypatch.setattr(settings, "_set", interrupted)
        with pytest.raises((KeyboardInterrupt, jax.errors.JaxRuntimeError)) as raised:
            f(1.0).block_until_ready()
        assert "KeyboardInterrupt" in repr(raised.value)
        assert f(1.0) == 2.0


@pytest.mark.parametrize("step", range(4))
def test_an_interrupt_among_several_settings_leaves_none(monkeypatch, step):
    with jax.enable_x64(True), jax.default_matmul_precision("float32"):
        traced = settings.traced_here()
    here, plain, left = settings.traced_here(), settings._set, [step]

    def interrupted(name, value):
        plain(name, value)
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt

    monkeypatch.setattr(settings, "_set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        traced.leave(traced.enter())
    assert left[0] < 0
    assert settings.traced_here() == here


def test_a_handler_that_makes_a_host_client_meanwhile_has_the_rung_below(monkeypatch):
    """As a signal handler with an eager call does, in the milliseconds that it takes."""
    made, make = [], _jax.make_host_client

    def interrupted():
        if not made:
            made.append(None)
            host_device.host_device_for(None)
        return make()

    monkeypatch.setattr(host_device, "_ladder", host_device._Ladder())
    monkeypatch.setattr(_jax, "make_host_client", interrupted)
    first = host_device.host_device_for(None).client
    second = host_device.host_device_for(first).client
    third = host_device.host_device_for(second).client
    clients = first, second, third
    assert [host_device.nesting_level(client) for client in clients] == [1, 2, 3]


def test_the_interrupt_does_not_hit_the_next_call(run_python):
    """If the call ends before Python acts on the interrupt, it is withdrawn."""
    done = run_python(
        """
        import jax, jax.numpy as jnp, threading
        import hostcall as hc
        from hostcall import _native

        x = jnp.ones((1000, 1000))
        calls = []

        def callback(a):
            calls.append(threading.current_thread() is threading.main_thread())
            if len(calls) == 1:
                _native.interrupt_calls()
            return a

        f = jax.jit(lambda v: hc.call(callback, v, v @ v / 1000) @ v)
        failed = 0
        for _ in range(5):
            try:
                f(x).block_until_ready()
            except KeyboardInterrupt:
                failed += 1
        print(calls[0], failed, len(calls))
        """
    )
    assert done.stdout.strip() == "False 1 5"


def test_ctrl_c_ends_the_wait_for_a_stuck_call_at_exit(start_python):
    process = start_python(
        """
import os, threading, time
import jax, jax.numpy as jnp
import hostcall as hc
from hostcall import _native
entered = threading.Event()
wait_idle = _native.wait_idle
def stuck(a):
    entered.set()
    while True:
        time.sleep(0.01)
def waits(seconds):  # where Python ignores no KeyboardInterrupt, as it may before
    _native.wait_idle = wait_idle
    os.write(1, b"ready\\n")  # past the buffer
    return wait_idle(seconds)
m = jnp.ones((800, 800))
y = jax.jit(lambda m: hc.call(stuck, m, m @ m) @ m)(m)
entered.wait()
_native.wait_idle = waits
print("buffered", end="")  # the end of a line would write it
""",
        env={"HOSTCALL_EXIT_TIMEOUT": "1e6", "PYTHONUNBUFFERED": ""},
    )
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "buffered")


def test_a_job_whose_caller_was_interrupted_is_not_run(monkeypatch):
    at, go = threading.Event(), threading.Event()

    def source():
        yield np.int32(0)
        at.set()
        go.wait()
        yield np.int32(1)

    with hc.feed(source) as feed:
        assert at.wait(60)

        def interrupted(done, *more, **how):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(puller, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                feed.reset()
        go.set()
        assert [int(feed()[0]) for _ in range(2)] == [0, 1]
        assert feed.state() == {"epoch": 0, "item": 2}
