"""Ctrl-C while the main thread waits inside JAX for a callback on another thread, and
other signals whose handlers use hostcall.
"""

from __future__ import annotations

import textwrap

import pytest

PROGRAM = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
import hostcall as hc

entered = threading.Event()
caught = threading.Event()  # the main thread is where it catches the interrupt
left = threading.Event()
raised = threading.Event()

def callback(a):
    assert threading.current_thread() is not threading.main_thread()
    entered.set()
    try:
        for _ in range(600):
            time.sleep(0.05)  # 30 s, unless interrupted
            if raised.is_set():  # in the main thread, while this one runs on
                break
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
    raised.set()
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


# What puts Python's handler back in place of the engine's, before a second program runs
# `program` below, and who waits for it.
ASYNCIO = "asyncio.run(asyncio.sleep(0))"
BACK = "signal.signal(signal.SIGINT, signal.signal(signal.SIGINT, print))"
IGNORED = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
PUT_BACK = {
    "by asyncio.run": ("", ASYNCIO, ""),
    "by asyncio.run, before the engine began": (ASYNCIO, "", ""),
    "by signal.signal": ("", BACK, ""),
    "for the first time": (
        IGNORED,
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "",
    ),
    "during the callback, by asyncio.run": ("", "", ASYNCIO),
    "during the callback, by signal.signal": ("", "", BACK),
}


@pytest.mark.parametrize("inside", [False, True], ids=["", "inside asyncio.run"])
@pytest.mark.parametrize("steps", PUT_BACK.values(), ids=PUT_BACK)
def test_python_s_handler_is_put_back(run_python, steps, inside):
    at_first, between, during = steps
    if inside and during == ASYNCIO:
        pytest.skip("asyncio.run can't be called from a running event loop")
    head, tail = PROGRAM.split("x = jnp.ones")
    tail = "x = jnp.ones" + tail.replace("WAIT", "np.asarray(y)")
    # As a user does: if nothing happens, Ctrl-C once more.
    head = head.replace(
        "    os.kill(os.getpid(), signal.SIGINT)\n",
        "    while not left.wait(0.5):\n        os.kill(os.getpid(), signal.SIGINT)\n",
    )
    tail = tail.replace(
        "    caught.set()\n", f"    {during or 'pass'}\n    caught.set()\n"
    )
    tail = tail.replace("try:", "entered.wait()\ntry:")
    if inside:
        tail = "async def inside():\n" + textwrap.indent(tail, "    ")
        tail += "\nasyncio.run(inside())\n"
    first = "jax.jit(lambda v: hc.call(lambda a: a, v, v))(1.0).block_until_ready()"
    done = run_python(
        "\n".join((head, "import asyncio", at_first, first, between, tail))
    )
    assert done.stdout.splitlines() == ["interrupted", "2.0"]


def test_a_handler_of_the_program_decides_while_a_call_runs(run_python):
    done = run_python(
        """
        import os, signal, threading
        import jax, jax.numpy as jnp
        import hostcall as hc
        x = jnp.ones((1000, 1000))
        jax.jit(lambda v: hc.call(lambda a: a, v, v))(x).block_until_ready()
        signal.signal(signal.SIGINT, lambda *_: print("handled"))
        def callback(a):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(1)  # the watcher would have interrupted it by now
            print("ended")
            return a
        y = jax.jit(lambda v: hc.call(callback, v, v @ v) @ v)(x)
        y.block_until_ready()
        """
    )
    assert sorted(done.stdout.split()) == ["ended", "handled"]


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


@pytest.mark.parametrize("thread", ["hostcall-timeout", "hostcall-loop"])
def test_a_handler_of_a_signal_while_a_thread_is_started(run_python, thread):
    """The handler needs the same thread."""
    run_python(f"""
        import signal, threading, jax.numpy as jnp, hostcall as hc
        async def same(x):
            return x
        def work():
            y = hc.call(same, jnp.float32(0), jnp.float32(1))
            done.append(hc.barrier(timeout=60) and float(y) == 1)
        done, interrupted, start = [], [], threading.Thread.start
        def started(self):
            if self.name == {thread!r} and not interrupted:
                interrupted.append(self)
                signal.raise_signal(signal.SIGUSR1)
            start(self)
        signal.signal(signal.SIGUSR1, lambda *_: work())
        threading.Thread.start = started
        work()
        assert done == [True, True]
    """)
