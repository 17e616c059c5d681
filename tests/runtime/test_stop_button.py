"""Ctrl-C in a notebook: the stop button ends a cell that waits for host code."""

from __future__ import annotations

import pytest
from limits import PROGRAM_SECONDS

STUCK = """
import time, jax, jax.numpy as jnp, hostcall as hc
def stuck(x):
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
jax.jit(lambda x: hc.call(stuck, x, x))(1.0).block_until_ready()
"""
MANY = """
def short(x):
    if x == 100:
        print("ready", flush=True)
    return x + 1
loop = jax.jit(lambda x: jax.lax.fori_loop(0, 10**9, lambda i, c: hc.call(short, c, c), x))
print(float(loop(0.0)))
"""


@pytest.mark.filterwarnings("ignore")  # of the packages that run the kernel
def test_the_stop_button(monkeypatch, tmp_path):
    """It ends a cell in one long call and in many short ones; the kernel lives on."""
    jupyter = pytest.importorskip("jupyter_client.manager")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    manager, client = jupyter.start_new_kernel(startup_timeout=PROGRAM_SECONDS)

    def stop(message):
        if "ready" in message["content"].get("text", ""):
            manager.interrupt_kernel()

    def run(cell):
        reply = client.execute_interactive(
            cell, output_hook=stop, timeout=PROGRAM_SECONDS
        )
        return reply["content"]

    try:
        for _ in range(2):  # the kernel puts Python's handler back for each cell
            assert run(STUCK)["ename"] == "KeyboardInterrupt"
        assert run(MANY)["ename"] == "KeyboardInterrupt"
        assert (
            run("assert jax.jit(lambda x: hc.call(abs, x, x))(-1.0) == 1")["status"]
            == "ok"
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
