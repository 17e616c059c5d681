"""The flight recorder: what it keeps, and when it is printed."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time

import clocks
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall.monitor import FlightRecord

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)

HEAD = """
import faulthandler, os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
import hostcall as hc
x = jnp.float32(1)
spec = jax.ShapeDtypeStruct((), jnp.float32)
def slow(a):
    print("ready", flush=True)
    time.sleep(600)  # until the test ends the process
    return a
def quick(a):
    return a
f = jax.jit(lambda a: hc.call(quick, spec, a, tag="quick tag"))
f(x).block_until_ready()
"""


def mine(since: float) -> list[FlightRecord]:
    """What was recorded since then; other tests were recorded before."""
    return [r for r in hc.monitor.flight() if r.start >= since - 1e-3]


def test_a_call_and_a_tap_are_recorded():
    def double(x):
        return x * 2

    @jax.jit
    def step(x):
        y = hc.call(double, jax.ShapeDtypeStruct((4,), jnp.float32), x)
        hc.tap(lambda y: None, y, tag="seen")
        return y

    since = time.time()
    step(jnp.ones(4)).block_until_ready()
    hc.barrier()
    records = {r.kind: r for r in mine(since)}
    assert set(records) == {"call", "tap", "delivery"}
    call, tap, delivery = (records[k] for k in ("call", "tap", "delivery"))
    assert call.name.endswith("double")
    assert tap.name == delivery.name == "seen"
    assert call.place is not None
    assert call.place.file == __file__
    assert (call.nbytes, tap.nbytes, delivery.nbytes) == (32, 16, 16)
    assert call.run == tap.run == delivery.run is not None
    assert call.device == tap.device == jax.devices()[0].id
    assert {r.state for r in records.values()} == {"ended"}
    assert since <= call.start <= tap.start <= delivery.start <= time.time()
    assert 0 <= call.waited <= call.seconds


def test_outside_of_programs_there_is_no_device():
    since = time.time()
    hc.call(lambda x: x, SCALAR, np.float32(1))
    hc.tap(lambda x: None, np.float32(1))
    hc.barrier()
    call, *taps = mine(since)
    assert (call.device, call.run) == (None, None)
    assert [t.kind for t in taps] == ["tap", "delivery"]


def test_failures_and_dropped_taps_are_marked():
    def fails(x):
        raise ValueError("no")

    since = time.time()
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.jit(lambda x: hc.call(fails, SCALAR, x))(1.0).block_until_ready()
    (call,) = mine(since)
    assert (call.state, call.name.rsplit(".", 1)[-1]) == ("failed", "fails")


def test_masked_and_skipped_ones_are_not_recorded():
    @jax.jit
    def step(x):
        hc.call(lambda x: x, SCALAR, x, where=x < 0, order="unordered")
        hc.tap(lambda x: None, x, where=x < 0)

    since = time.time()
    step(1.0)
    hc.barrier()
    assert mine(since) == []


def test_a_call_that_hangs_outlives_a_thousand_others():
    entered, leave = threading.Event(), threading.Event()

    def hangs(x):
        entered.set()
        assert leave.wait(60)
        return x

    since = time.time()
    hanging = jax.jit(lambda x: hc.call(hangs, SCALAR, x, order="unordered"))
    thread = threading.Thread(target=hanging, args=(1.0,))
    thread.start()
    assert entered.wait(60)
    many = jax.jit(
        lambda x: jax.lax.fori_loop(
            0, 3000, lambda i, c: hc.call(lambda c: c, SCALAR, c), x
        )
    )
    many(1.0).block_until_ready()
    flight = hc.monitor.flight()
    (found,) = (r for r in flight if r.name.endswith("hangs") and r.start >= since)
    assert found.state == "running"
    assert found.seconds > 0
    assert flight.index(found) == 0
    assert len(flight) == 1024
    leave.set()
    thread.join()


def test_the_name_stays_when_the_program_is_gone():
    since = time.time()

    def once():
        def short_lived(x):
            return x

        jax.jit(lambda x: hc.call(short_lived, SCALAR, x))(1.0).block_until_ready()

    once()
    jax.clear_caches()
    (call,) = mine(since)
    assert call.name.endswith("short_lived")
    assert call.place is not None


def test_devices_that_wait_for_each_other_are_recorded():
    mesh = jax.make_mesh((2,), ("i",))
    spread = jax.NamedSharding(mesh, jax.P("i"))

    @jax.jit
    def step(x):
        return hc.call(lambda x: x, jax.ShapeDtypeStruct((4,), jnp.float32), x)

    since = time.time()
    step(jax.device_put(jnp.ones(4), spread)).block_until_ready()
    team = [r for r in mine(since) if r.kind == "team"]
    assert sorted(r.device for r in team if r.device is not None) == [0, 1]
    assert len({r.run for r in team}) == 1


def test_it_prints_as_a_table():
    hc.call(lambda x: x, SCALAR, np.float32(1), tag="in the table")
    flight = hc.monitor.flight()
    head, *lines = str(flight).splitlines()
    assert head.split()[:2] == ["seconds", "ago"]
    assert len(lines) == len(flight)
    assert "in the table, " in lines[-1]
    assert __file__ in lines[-1]
    assert repr(flight).splitlines()[0] == head
    assert str(hc.monitor.Flight()) == "no call or tap has been recorded"


def test_timeouts_log_what_runs_once(caplog):
    """A program may use timeouts as ordinary control: no table, and nothing again."""
    for _ in range(120):
        hc.call(lambda x: x, SCALAR, np.float32(1))  # fills the recorder
    clocks.log_flights_again()
    leave = threading.Event()

    def slow(x):
        leave.wait(60)
        return x

    async def waits(x):
        await asyncio.sleep(60)  # until its limit
        return x

    for fn in (slow, slow, waits):
        f = jax.jit(lambda x, fn=fn: hc.call(hc.host(fn, timeout=0.1), SCALAR, x))
        with pytest.raises(jax.errors.JaxRuntimeError, match="took longer than"):
            f(1.0).block_until_ready()
    leave.set()
    (text,) = (r.getMessage() for r in caplog.records)
    first, second, *calls, last = text.splitlines()
    assert f"{first}\n{second}" == (
        "a call takes longer than its timeout. Running now:\n" + second
    )
    assert re.match(r"  .*slow, for \d+\.\d+ s, called at .*test_flight\.py:", second)
    assert len(calls) < 8
    assert "hc.monitor.status() shows the stacks" in last
    assert "hc.monitor.flight() the newest calls" in last
    caplog.clear()


def test_timeouts_log_nothing_with_the_recorder_off(caplog):
    clocks.log_flights_again()
    hc.configure(flight="off")
    try:
        f = hc.host(lambda x: threading.Event().wait(2), result=SCALAR, timeout=0.05)
        with pytest.raises(hc.errors.CallTimeoutError):
            f(jnp.float32(1))
    finally:
        hc.configure(flight="sigterm")
    assert not caplog.records


def test_a_deadlock_logs_it(caplog):
    clocks.log_flights_again()
    mesh = jax.make_mesh((2,), ("i",))
    x = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("i")))
    inner = jax.jit(lambda v: v * 2)
    inner(x)

    @jax.jit
    def outer(x):
        spec = jax.ShapeDtypeStruct((4,), jnp.float32)
        return hc.call(lambda v: np.asarray(inner(mine)), spec, x, tag="starts it")

    mine = x
    with pytest.raises(hc.errors.DeadlockError), hc.reraise():
        outer(x).block_until_ready()
    texts = [r.getMessage() for r in caplog.records]
    (text,) = (t for t in texts if "flight recorder, a callback would deadlock" in t)
    assert "starts it, " in text


def test_sigterm_writes_it(start_python):
    process = start_python(
        HEAD + "jax.jit(lambda a: hc.call(slow, spec, a))(x).block_until_ready()"
    )
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "hostcall flight recorder, SIGTERM: 2 events" in err
    assert "ended    call" in err
    assert "quick tag, " in err
    assert "running  call" in err
    assert "slow, <string>" in err


def test_sigterm_ends_a_process_whose_stderr_nobody_reads(start_python):
    process = start_python(f"""{HEAD}
os.set_blocking(2, False)
try:
    while os.write(2, b"x" * 4096):
        pass
except BlockingIOError:  # the pipe is full
    os.set_blocking(2, True)
jax.jit(lambda a: hc.call(slow, spec, a))(x).block_until_ready()
""")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


def test_sigterm_writes_nothing_if_that_is_off(start_python):
    process = start_python(
        HEAD + "jax.jit(lambda a: hc.call(slow, spec, a))(x).block_until_ready()",
        env={"HOSTCALL_FLIGHT": "off"},
    )
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert "flight" not in err


def test_a_handler_of_the_programs_own_is_left_alone(run_python):
    own = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('mine'))"
    done = run_python(own + HEAD + "signal.raise_signal(signal.SIGTERM)")
    assert done.stdout == "mine\n"
    assert "flight" not in done.stderr


FATAL = ["SIGSEGV", "SIGABRT", "SIGFPE"]


@pytest.mark.parametrize("name", FATAL)
def test_a_fatal_signal_writes_it(run_python, name):
    done = run_python(
        HEAD + f"hc.configure(flight='signals'); signal.raise_signal(signal.{name})",
        check=False,
    )
    assert done.returncode == -getattr(signal, name)
    assert f"hostcall flight recorder, {name}: 1 events" in done.stderr
    assert "quick tag, <string>" in done.stderr


@pytest.mark.parametrize(
    "crash",
    ["import ctypes; ctypes.string_at(0)", "os.abort()"],
    ids=["fault", "abort"],
)
def test_faulthandler_runs_too(run_python, crash):
    first = "faulthandler.enable(); hc.configure(flight='signals')"
    last = "hc.configure(flight='signals'); faulthandler.enable()"
    begin = "import faulthandler, hostcall as hc"
    for source in (
        f"{HEAD}\n{first}\n{crash}",
        f"{HEAD}\n{last}\n{crash}",
        f"{begin}; {last}\n{HEAD}\n{crash}",  # before the first lowering
    ):
        done = run_python(source, check=False)
        assert done.returncode in (-signal.SIGSEGV, -signal.SIGABRT)
        assert done.stderr.count("hostcall flight recorder, SIG") == 1
        assert done.stderr.count("Fatal Python error: ") == 1
        assert "most recent call first" in done.stderr


def test_fatal_signals_are_left_alone_unless_asked(run_python):
    crash = "signal.raise_signal(signal.SIGSEGV)"
    back = "hc.configure(flight='signals'); hc.configure(flight='sigterm');"
    for setup in ("", back):
        done = run_python(HEAD + setup + crash, check=False)
        assert done.returncode == -signal.SIGSEGV
        assert "flight" not in done.stderr


def test_a_wrong_setting_is_named():
    with pytest.raises(
        hc.errors.SpecError, match=r"one of 'sigterm', 'signals', 'off'"
    ):
        hc.configure(flight="always")  # type: ignore[arg-type]
