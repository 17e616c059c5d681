"""`hc.monitor.report`: the table. inside/test_findings.py has the rule of each remedy."""

from __future__ import annotations

import io
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import hostcall as hc

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def test_waits_for_a_full_queue_are_counted():
    leave = threading.Event()
    before = hc.monitor.tap_queue().limit
    hc.configure(tap_queue_bytes=64)
    try:
        program = jax.jit(
            lambda x: [
                hc.tap(lambda x: leave.wait(60), x, tag="report queue") for _ in "12345"
            ]
        )
        thread = threading.Thread(target=program, args=(1.0,))
        thread.start()
        while not hc.monitor.tap_queue().blocked:
            time.sleep(1e-3)
        waiting = [r for r in hc.monitor.flight() if r.state == "waiting"]
        assert [r.name for r in waiting] == ["report queue"]
    finally:
        leave.set()
        thread.join()
        hc.configure(tap_queue_bytes=before)
    hc.barrier()
    assert hc.monitor.stats()["report queue"].wait_seconds > 0


def test_the_table():
    @jax.jit
    def program(x):
        return hc.call(lambda x: x, SCALAR, x, tag="in the report")

    for _ in range(3):
        program(1.0).block_until_ready()
    hc.barrier()
    out = io.StringIO()
    found = hc.monitor.report(out)
    text = out.getvalue()
    head, *lines = text.splitlines()
    assert head.split()[0] == "seconds"
    (line,) = (line for line in lines if line.endswith("  in the report"))
    seconds, python, gil, queue, _, times, _ = map(float, line.split()[:7])
    assert times == 3
    assert seconds == pytest.approx(python + gil + queue, abs=2e-4)
    assert "programs waited for Python: " in text
    assert "Python waited in hc.barrier for programs and taps: " in text
    assert 0 < len(found) <= 5
    assert [f.seconds for f in found] == sorted(
        (f.seconds for f in found), reverse=True
    )
    for each in found:
        assert each.name in text
        assert each.remedy in text


def test_it_prints_to_stdout(capsys):
    hc.call(lambda: None, None, order="unordered", tag="no text \ud800")
    hc.monitor.report()
    said = capsys.readouterr().out
    assert "programs waited for Python" in said
    assert "no text \\ud800" in said
