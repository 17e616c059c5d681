"""Strictness for every test: four devices, no leftovers, no silent hang."""

from __future__ import annotations

import faulthandler
import gc
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

# Before JAX is imported: four CPU devices, so that sharding is real.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import platforms
import pytest

import hostcall as hc
from hostcall import _native
from hostcall._core import failures
from hostcall._runtime import tap_failures

# For one test, on a busy machine; the slowest take 20 s on an idle one.
HANG_SECONDS = 240
# For programs that tests run; it only catches hangs.
PROGRAM_SECONDS = 180

# Gives programs that tests run Python's handler for SIGINT: a suite that a shell
# started
# in the background inherits SIGINT ignored, and passes that on.
_PRELUDE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
STDERR = pytest.StashKey[TextIO]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform",
        default="cpu",
        choices=platforms.PLATFORMS,
        help="where programs run (tests/platforms.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    platforms.set_up(config.getoption("--platform"))
    # Before output is captured, or the stacks of a hang would be lost with the capture.
    config.stash[STDERR] = os.fdopen(os.dup(2), "w")


def pytest_collection_finish() -> None:
    # Imported modules stay for ever, so the collection after each test may skip them.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    platform = config.getoption("--platform")
    if platform == "cpu":
        return
    few = platform == "cuda" and len(jax.devices()) < 4
    for item in items:
        reason = platforms.why_not(item, platform, few)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_hang(pytestconfig: pytest.Config) -> Iterator[None]:
    """A test that hangs dumps all stacks and ends the run."""
    faulthandler.dump_traceback_later(
        HANG_SECONDS, exit=True, file=pytestconfig.stash[STDERR]
    )
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def nothing_left(no_hang: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Checks that a test leaves no running call or tap, and no slot of its programs."""
    yield
    for record in caplog.get_records("call"):
        # The frames of its exception hold the test's compiled programs.
        record.exc_info, record.args = None, ()
    jax.effects_barrier()
    assert hc.barrier(30, programs=False), "a tap was not delivered"
    raised, _ = tap_failures.take()
    assert not raised, "a tap failed, and the test did not take its error"
    assert _native.tap_queue()["bytes"] == 0
    assert hc.monitor.status() == []
    assert _native.in_flight() == 0
    failures._kept.clear()  # the newest 32 errors, whose frames hold programs
    jax.clear_caches()
    assert holds_in_time(lambda: _native.live_slots() == 0), (
        "a compiled program outlived its test"
    )


def holds_in_time(condition: Callable[[], bool]) -> bool:
    """Whether a condition becomes true while dead objects are collected and buried.

    A thread of XLA may hold a program for a moment after its results are ready, and
    hostcall's watcher may still be burying.
    """
    limit = time.monotonic() + HANG_SECONDS / 4
    while time.monotonic() < limit:
        gc.collect()
        _native.bury()
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def in_time() -> Callable[[Callable[[], bool]], bool]:
    """See `holds_in_time`."""
    return holds_in_time


@pytest.fixture
def x64() -> Iterator[None]:
    """Runs the test in JAX's 64-bit mode."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def compiled_during() -> Callable[[Callable[[], object]], int]:
    """Counts the programs that are compiled while a function runs."""

    def count(run: Callable[[], object]) -> int:
        events: list[str] = []
        listener = lambda name, *_, **__: events.append(name)
        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            run()
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)
        return sum("backend_compile" in name for name in events)

    return count


Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]


def _command(source: str, args: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-c", _PRELUDE + textwrap.dedent(source), *args]


@pytest.fixture
def run_python() -> Run:
    """Runs a program in a fresh interpreter, with this one's environment and paths."""

    def run(
        source: str,
        *args: str,
        env: dict[str, str] | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            _command(source, args),
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            env={**os.environ, **(env or {})},
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def start_python() -> Iterator[Start]:
    """Starts such a program, for a test that sends it signals once it says "ready"."""
    started: list[subprocess.Popen[str]] = []

    def start(
        source: str, *args: str, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            _command(source, args),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        if line != "ready\n":
            out, err = process.communicate(timeout=PROGRAM_SECONDS)
            raise AssertionError(line + out + err)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")
