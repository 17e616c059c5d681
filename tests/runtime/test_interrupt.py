"""Ctrl-C while the main thread waits inside JAX for a callback on another thread."""

from __future__ import annotations

import pytest

PROGRAM = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
import hostcall as hc

entered = threading.Event()
caught = threading.Event()  # the main thread is where it catches the interrupt
left = threading.Event()

def callback(a):
    assert threading.current_thread() is not threading.main_thread()
    entered.set()
    try:
        for _ in range(600):
            time.sleep(0.05)  # 30 s, unless interrupted
    finally:
        left.set()
    return a

def program(x):  # large enough for XLA to run it on a thread of its own
    for _ in range(3):
        x = x @ x / 1000
    return hc.call(callback, x, x) @ x

def interrupt():
    entered.wait()
    caught.wait()
    os.kill(os.getpid(), signal.SIGINT)

x = jnp.ones((1000, 1000))
y = jax.jit(program)(x)
threading.Thread(target=interrupt).start()
try:
    caught.set()
    WAIT
except KeyboardInterrupt:
    print("interrupted")
# The callback was stopped too, or runs on while JAX itself gave up waiting.
print(jax.jit(lambda v: hc.call(lambda a: a + 1, v, v))(x)[0, 0])
os._exit(0)
"""


@pytest.mark.parametrize(
    "wait", ["np.asarray(y)", "y.block_until_ready()", "y.tolist()"]
)
def test_ctrl_c_is_raised_while_jax_waits(run_python, wait):
    done = run_python(PROGRAM.replace("WAIT", wait))
    assert done.stdout.splitlines() == ["interrupted", "2.0"]


def test_a_program_with_its_own_handler_keeps_it(run_python):
    done = run_python(
        """
        import signal
        import jax
        import hostcall as hc
        seen = []
        signal.signal(signal.SIGINT, lambda *a: seen.append(a[0]))
        x = jax.numpy.float32(1)
        jax.jit(lambda v: hc.call(lambda a: a, v, v))(x)
        signal.raise_signal(signal.SIGINT)
        print(seen == [signal.SIGINT])
        """
    )
    assert done.stdout.strip() == "True"


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
