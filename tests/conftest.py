"""Rules for every test: it has four devices, leaves nothing behind, and may not hang."""

from __future__ import annotations

import faulthandler
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import TextIO

# Set before JAX is imported. With four CPU devices, sharding is real.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
# XLA makes its machine code without LLVM's optimizations, which saves a third of the time
# of compiling: half of the suite's. The tests are about calls, which such code surrounds.
# With JAX_DISABLE_MOST_OPTIMIZATIONS=0, programs are those that users run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import compiled
import fakegpus
import fast
import hypothesis
import jax
import nursery
import platforms
import pytest
from limits import HANG_SECONDS, PROGRAM_SECONDS, holds_in_time

# Stands before programs that tests run.
#   * Python's handler for SIGINT: if a shell started the suite in the background, the
#     suite and its child processes inherit an ignored SIGINT.
#   * A line is written when it is printed. Into a pipe, Python writes when its buffer is
#     full or the process ends: what is killed, forked or left by os._exit says nothing.
_PRELUDE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.stdout.reconfigure(line_buffering=True)
"""
# Stands before programs that get SIGINT. While Python collects garbage it calls a function of
# JAX, and drops what is raised there, also a KeyboardInterrupt that arrives just then.
_NO_COLLECTIONS = "import gc\ngc.disable()\n"
# `pytest --hypothesis-profile many` for a search; by default the same examples in every
# run, and few, since most are compiled.
for name, examples in (("few", 25), ("many", 300)):
    hypothesis.settings.register_profile(
        name,
        max_examples=examples,
        derandomize=name == "few",
        database=None,
        deadline=None,
    )
hypothesis.settings.load_profile("few")

# Helpers with asserts that tests call: pytest shows what such an assert compared.
pytest.register_assert_rewrite("cells")

GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
STDERR = pytest.StashKey[TextIO]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform",
        default="cpu",
        choices=platforms.PLATFORMS,
        help="where programs run (tests/platforms.py)",
    )
    parser.addoption(
        "--fast",
        action="store_true",
        help="three minutes: smoke, what is touched, and a share of all (tests/fast.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    global hc, _native, delivery, device_order, failures
    platform = config.getoption("--platform")
    driver = platforms.set_up(platform)
    if driver is not None:
        config.pluginmanager.register(fakegpus.Rules(driver), "rules")
    if platform == "fakegpu":
        config.pluginmanager.register(fakegpus.Judge(driver), "judge")
    compiled.once()
    if config.getoption("--fast"):
        config.pluginmanager.register(fast.Fast(), "fast")

    # After it: hostcall registers its handlers when it is imported.
    import hostcall as hc
    from hostcall import _native
    from hostcall._core import failures
    from hostcall._jax import device_order
    from hostcall._runtime import delivery

    if platform in ("fakegpu", "cuda") and jax.default_backend() != "gpu":
        raise pytest.UsageError(f"--platform {platform}: JAX starts no GPU here")

    # A copy from before pytest captures output, so that a hang's stacks are not lost.
    config.stash[STDERR] = os.fdopen(os.dup(2), "w")


def pytest_report_teststatus(report: object) -> tuple[str, str, str] | None:
    return fakegpus.status(report)


def pytest_unconfigure() -> None:
    nursery.close()


def pytest_collection_finish() -> None:
    # Imported modules are never freed, so collections after tests may skip them.
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
    """If a test hangs, dumps all stacks and ends the run."""
    faulthandler.dump_traceback_later(
        HANG_SECONDS, exit=True, file=pytestconfig.stash[STDERR]
    )
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def nothing_left(
    no_hang: None, caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config
) -> Iterator[None]:
    """Checks that the test left no running call, no queued tap, and no live slot (without
    the GIL, its file: nothing_left_by_the_file).
    """
    yield
    for record in caplog.get_records("call"):
        # A logged exception keeps frames alive, which hold the test's programs.
        record.exc_info, record.args = None, ()
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        if jax.default_backend() == "cpu":
            raise
        platforms.forget_failed_effects()
    device_order.start_anew()  # else later tests' ordered programs are dispatched slower
    assert delivery.flush(30), "a tap was not delivered"
    assert delivery.take() is None, "a tap failed, and the test did not take its error"
    assert hc.monitor.tap_queue().nbytes == 0
    # A thread of XLA may not have left the handler of a call whose results are there.
    assert _idle() or holds_in_time(_idle), hc.monitor.status()
    while failures._ledger.kept:  # the frames of the last errors hold programs too
        failures._ledger.release_oldest()
    # A test that a refused kernel ended leaves an error, whose frames hold its programs
    # until the next test: they would be waited for in vain.
    judge = pytestconfig.pluginmanager.getplugin("judge")
    if GIL and (judge is None or not judge.launched()):
        _no_program()


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_the_file() -> Iterator[None]:
    """Without the GIL, a collection looks at all objects of the process, frozen or not.

    It takes half as long as a test, so there is one for each file.
    """
    yield
    if not GIL:
        _no_program()


def _idle() -> bool:
    return hc.monitor.status() == [] and _native.in_flight() == 0


def _no_program() -> None:
    """Checks that no compiled program with host calls lives."""
    _native.bury()
    if not _native.live_slots():
        return
    # JAX's caches hold programs of operations outside of jit, and of blocks of hc.observe.
    # Not all caches are dropped unless that is needed: the next tests would trace, lower
    # and compile again what JAX has from this one.
    for drop in (compiled.drop_operations_of_jaxprs, compiled.drop_lowered):
        drop()
        gc.collect()
        _native.bury()
        if not _native.live_slots():
            break
    else:
        jax.clear_caches()
        assert holds_in_time(lambda: _native.live_slots() == 0), (
            "a compiled program outlived its test"
        )
    gc.freeze()  # what JAX's caches hold: later collections may skip it


@pytest.fixture
def no_program() -> None:
    """For tests that count live programs: none of an earlier test is among them."""
    _no_program()


@pytest.fixture
def live() -> Callable[[], int]:
    """Counts the slots of calls that live, which the programs that make them hold."""
    return _native.live_slots


@pytest.fixture
def in_time() -> Callable[[Callable[[], bool]], bool]:
    """The function `holds_in_time`."""
    return holds_in_time


@pytest.fixture
def x64() -> Iterator[None]:
    """Runs the test in JAX's 64-bit mode."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def wide(request: pytest.FixtureRequest) -> None:
    """64-bit mode for the tests whose `dtype` needs it."""
    import dtypes  # after platforms.set_up: it names JAX's types

    case = getattr(request.node, "callspec", None)
    if case is not None and case.params.get("dtype") in dtypes.WIDE:
        request.getfixturevalue("x64")


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compiles the test's programs as users' are, for tests that compare last digits."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


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


def _command(source: str, args: tuple[str, ...], interrupted: bool) -> list[str]:
    prelude = _PRELUDE + _NO_COLLECTIONS * interrupted
    return [sys.executable, "-c", prelude + textwrap.dedent(source), *args]


@pytest.fixture
def run_python() -> Run:
    """Runs a program in a new interpreter, with the environment of this one."""

    def run(
        source: str,
        *args: str,
        env: dict[str, str] | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **(env or {})}
        done = nursery.run(
            _command(source, args, "SIGINT" in source), env, PROGRAM_SECONDS
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def start_python() -> Iterator[Start]:
    """Starts a program and waits until it prints "ready", so that a test can signal it."""
    started: list[subprocess.Popen[str]] = []

    def start(
        source: str, *args: str, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            _command(source, args, interrupted=True),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        started.append(process)
        out = process.stdout
        assert out is not None
        # Byte by byte: `communicate` does not see what a buffer here would hold.
        line = b""
        while not line.endswith(b"\n") and (more := os.read(out.fileno(), 1)):
            line += more
        if line != b"ready\n":
            rest, err = process.communicate(timeout=PROGRAM_SECONDS)
            raise AssertionError(line.decode() + rest + err)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
