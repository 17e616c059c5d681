"""Taps when a process ends: exit, fork, Ctrl-C, the environment."""

import signal

import pytest
from limits import PROGRAM_SECONDS

PROGRAM = """
import sys, threading, time
import jax, jax.numpy as jnp
import hostcall as hc
def slow(i):
    time.sleep(0.02)  # so that the last are still queued when the script ends
    print(int(i), flush=True)
f = jax.jit(lambda x: jax.lax.fori_loop(
    0, {count}, lambda i, c: (hc.tap(slow, i, order={order!r}), c)[1], x))
"""


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_everything_pending_is_delivered_at_exit(run_python, order):
    done = run_python(PROGRAM.format(order=order, count=20) + "f(0)\n")
    assert done.stdout.split() == [str(i) for i in range(20)]
    assert done.stderr == ""


def test_after_an_uncaught_error_too(run_python):
    source = PROGRAM.format(order="unordered", count=20) + "f(0)\nraise SystemExit(3)\n"
    done = run_python(source, check=False)
    assert done.returncode == 3
    assert done.stdout.split() == [str(i) for i in range(20)]


def test_errors_at_exit_are_logged(run_python):
    done = run_python(
        """
        import jax, hostcall as hc
        def bad(x): raise KeyError("never told")
        jax.jit(lambda x: hc.tap(bad, x))(1)
        """
    )
    assert "KeyError: 'never told'" in done.stderr
    assert "1 tap failed, and no barrier() raised that" in done.stderr


def test_a_tap_that_hangs_at_exit_is_named_and_interrupted(run_python):
    done = run_python(
        """
        import jax, time, hostcall as hc
        def forever(x):
            while True: time.sleep(0.01)
        def after(x): print("after", int(x))
        jax.jit(lambda x: (hc.tap(forever, x), hc.tap(after, x))[0])(1)
        """,
        env={"HOSTCALL_EXIT_TIMEOUT": "0.5"},
    )
    assert done.stdout == "after 1\n"
    assert "the process is ending and waits for the tap `forever`" in done.stderr
    assert "KeyboardInterrupt" in done.stderr


def test_a_full_queue_at_exit_waits_for_the_tap_that_hangs(run_python):
    done = run_python(
        """
        import jax, time, jax.numpy as jnp, hostcall as hc
        hc.configure(tap_queue_bytes=200)
        def forever(x):
            while True: time.sleep(0.01)
        def note(x): print(int(x), flush=True)
        def f(x):
            y = (jnp.ones((300, 300)) @ jnp.ones((300, 300)) * 0).sum() + x
            hc.tap(forever, y, where=y == 0)
            hc.tap(note, y)
        for i in range(8): jax.jit(f)(i)
        """,
        env={"HOSTCALL_EXIT_TIMEOUT": "0.5"},
    )
    assert done.stdout.split() == [str(i) for i in range(8)]
    assert "waits for the tap `forever`" in done.stderr


def test_slow_taps_at_exit_are_not_interrupted(run_python):
    """All together take longer than the limit, each a fiftieth of it: that is also less
    than the limit on a busy machine, where a sleep of 20 ms may take five times as long.
    """
    source = PROGRAM.format(order="unordered", count=80) + "f(0)\n"
    done = run_python(source, env={"HOSTCALL_EXIT_TIMEOUT": "1"})
    assert done.stdout.split() == [str(i) for i in range(80)]
    assert done.stderr == ""


@pytest.mark.filterwarnings("ignore")
def test_fork_with_a_live_worker(run_python):
    done = run_python(
        """
        import os, warnings; warnings.simplefilter("ignore")
        import jax, hostcall as hc
        f = jax.jit(lambda x: hc.tap(lambda v: None, x))
        for i in range(100): f(i)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert hc.barrier(1.0, programs=False)
                try: f(1)
                except Exception as error: assert "forked" in str(error), error
                else: raise AssertionError("a program tapped in the child")
                try: hc.tap(print, 1)
                except hc.errors.HostcallError as error: code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        hc.barrier()
        print("parent goes on")
        """
    )
    assert done.stdout == "parent goes on\n"


@pytest.fixture
def interrupted_when_ready(start_python):
    """What a program prints if it gets a Ctrl-C after it has printed "ready"."""

    def run(source):
        process = start_python(source)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PROGRAM_SECONDS)
        assert process.returncode == 0, out + err
        return out

    return run


@pytest.mark.parametrize("wait", ["hc.barrier()", "hc.barrier(programs=False)"])
def test_ctrl_c_ends_a_wait_and_loses_nothing(wait, interrupted_when_ready):
    source = f"""
    import jax, time, threading, hostcall as hc
    gate = threading.Event()
    def slow(i):
        gate.wait(60); print("tap", int(i), flush=True)
    jax.jit(lambda x: (hc.tap(slow, x), hc.tap(slow, x + 1))[0])(1)
    try:
        print("ready", flush=True)
        {wait}
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    gate.set()
    hc.barrier()
    """
    out = interrupted_when_ready(source)
    assert out.split("\n")[:3] == ["interrupted", "tap 1", "tap 2"]


def test_the_environment_sets_the_limit(run_python):
    done = run_python(
        """
        import jax, hostcall as hc
        hc.tap(lambda x: None, 1)
        hc.barrier()
        print(hc.monitor.tap_queue().limit)
        """,
        env={"HOSTCALL_TAP_QUEUE_BYTES": "1e6"},
    )
    assert done.stdout == "1000000\n"


def test_a_process_without_taps_starts_no_worker(run_python):
    done = run_python(
        """
        import jax, threading, hostcall as hc
        jax.jit(lambda x: hc.call(lambda v: v, x, x))(1.0)
        hc.barrier(); assert hc.barrier(programs=False)
        print([t.name for t in threading.enumerate() if "taps" in t.name])
        """
    )
    assert done.stdout == "[]\n"


def test_ctrl_c_where_a_full_queue_waits_for_a_tap_that_hangs(interrupted_when_ready):
    source = """
    import jax, time, hostcall as hc
    hc.configure(tap_queue_bytes=200)
    def forever(i):
        while not hc.monitor.tap_queue().blocked: time.sleep(0.01)
        print("ready", flush=True)
        while True: time.sleep(0.01)
    f = jax.jit(lambda x: [hc.tap(forever, x, where=x == 0), hc.tap(print, x)])
    try:
        for i in range(5): jax.block_until_ready(f(i))
        jax.effects_barrier()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    try: hc.barrier()
    except KeyboardInterrupt: print("the tap too", flush=True)
    """
    out = interrupted_when_ready(source)
    assert "interrupted" in out
    assert "0" in out
    assert out.endswith("the tap too\n")


@pytest.mark.parametrize("size", [(), (300, 300)], ids=["inline", "thread"])
def test_ctrl_c_while_a_program_waits_for_space(interrupted_when_ready, size):
    """Each tap is short, but the program would go on with more taps for minutes."""
    source = f"""
    import jax, time, jax.numpy as jnp, hostcall as hc
    hc.configure(tap_queue_bytes=200)
    seen, over = [], []
    def slow(i):
        seen.append(int(i))
        # After the interrupt nothing blocks any more, and a tap may still be under way.
        while not (hc.monitor.tap_queue().blocked or over): time.sleep(0.001)
        if len(seen) == 1: print("ready", flush=True)
        time.sleep(0.02)  # each tap takes its time
    @jax.jit
    def f(x):
        def body(i, c):
            hc.tap(slow, i)
            return c
        return jax.lax.fori_loop(0, 100_000, body, x)
    try:
        f(jnp.ones({size})).block_until_ready()
    except KeyboardInterrupt:
        over.append(True)
        print("interrupted", flush=True)
    hc.monitor.discard_taps()
    try: hc.barrier()
    except KeyboardInterrupt: pass  # the tap that was being delivered
    assert seen == list(range(len(seen))) and len(seen) < 10_000
    assert jax.jit(lambda v: v + 1)(1) == 2
    hc.tap(lambda v: print("and on"), 1)
    """
    assert interrupted_when_ready(source) == "interrupted\nand on\n"


def test_sigterm_delivers_what_is_queued(start_python):
    process = start_python(
        PROGRAM.format(order="unordered", count=20)
        + "f(0)\nprint('ready', flush=True)\nthreading.Event().wait()\n"
    )
    process.terminate()
    out, err = process.communicate(timeout=PROGRAM_SECONDS)
    assert process.returncode == -signal.SIGTERM
    assert out.split() == [str(i) for i in range(20)]
    flight = err.splitlines()  # the flight recorder: a title, a heading, a line each
    assert "SIGTERM" in flight[0]
    assert " for seconds " in flight[1]
    assert all(" tap " in line or " delivery " in line for line in flight[2:])


def test_sigterm_ends_a_process_whose_tap_hangs(start_python):
    process = start_python(
        """
        import jax, threading, hostcall as hc
        entered = threading.Event()
        def hangs(x):
            entered.set()
            threading.Event().wait()
        jax.jit(lambda x: [hc.tap(hangs, x), hc.tap(print, x)])(1)
        entered.wait()
        print("ready", flush=True)
        threading.Event().wait()
        """,
        env={"HOSTCALL_EXIT_TIMEOUT": "0.3"},
    )
    process.terminate()
    out, err = process.communicate(timeout=PROGRAM_SECONDS)
    assert process.returncode == -signal.SIGTERM
    assert out == ""
    assert "SIGTERM ends the process. Not delivered within" in err


def test_a_program_with_its_own_handler_of_sigterm_keeps_it(run_python):
    done = run_python(
        """
        import signal
        import jax, hostcall as hc
        signal.signal(signal.SIGTERM, lambda *a: print("mine"))
        hc.tap(print, 1)
        hc.barrier()
        signal.raise_signal(signal.SIGTERM)
        """
    )
    assert done.stdout == "1\nmine\n"
