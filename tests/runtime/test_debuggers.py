"""Trace functions, coverage.py and debugpy see callbacks, whatever thread they run on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap

import jobs
import pytest
from limits import PROGRAM_SECONDS

# The callbacks run on threads of XLA's: one for each device of the shard_map.
PROGRAM = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import sys, threading
import jax, jax.numpy as jnp, numpy as np
import hostcall as hc

ran = {"called": set(), "tapped": set()}

def called(x):
    ran["called"].add(threading.get_ident())
    y = np.sin(x)               # in a callback
    return y

def tapped(x):
    ran["tapped"].add(threading.get_ident())
    total = x.sum()             # in a tap
    return total

spec = jax.sharding.PartitionSpec("x")
def program(x):
    y = hc.call(called, x, x)
    hc.tap(tapped, y)
    return y + 1

mesh = jax.make_mesh((4,), ("x",))
run = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec))
x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, spec))
"""

TRACES = """
lines = {"called": set(), "tapped": set()}
calls = {"called": set(), "tapped": set()}

def trace(frame, event, arg):
    name = frame.f_code.co_name
    if frame.f_globals is globals() and name in lines and event == "line":
        lines[name].add((threading.get_ident(), frame.f_lineno - frame.f_code.co_firstlineno))
    return trace

lowest = {}
depth = {}

def profile(frame, event, arg):
    thread = threading.get_ident()
    depth[thread] = depth.get(thread, 0) + {"call": 1, "return": -1}.get(event, 0)
    lowest[thread] = min(lowest.get(thread, 0), depth[thread])
    name = frame.f_code.co_name
    if frame.f_globals is globals() and name in calls and event == "call":
        calls[name].add(threading.get_ident())
"""


def test_what_threading_holds_reaches_every_thread(run_python):
    run_python(
        PROGRAM
        + TRACES
        + textwrap.dedent("""
        threading.settrace(trace)
        threading.setprofile(profile)
        for _ in range(3):
            run(x).block_until_ready()
        hc.barrier()
        assert len(ran["called"]) >= 2 and threading.get_ident() not in ran["called"], ran
        for name, threads in ran.items():
            assert lines[name] == {(t, n) for t in threads for n in (1, 2, 3)}, (name, lines)
            assert calls[name] == threads, (name, calls)
        # No return without its call, on threads that Python did not start.
        assert {lowest[t] for t in ran["called"]} == {0}, lowest
        """)
    )


def test_threads_without_a_trace_function_get_none(run_python):
    run_python(
        PROGRAM
        + textwrap.dedent("""
        found = []
        def called(x):
            found.append((sys.gettrace(), sys.getprofile()))
            return x
        run(x).block_until_ready()
        hc.barrier()
        assert len(found) == 4 and set(found) == {(None, None)}, found
        """)
    )


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is 3.12's")
def test_without_sys_monitoring(run_python):
    run_python("""
        import sys, jax, numpy as np, hostcall as hc
        del sys.monitoring
        def bad(a):
            raise ValueError("x")
        try:
            jax.jit(lambda x: hc.call(bad, x, x))(np.float32(1))
        except jax.errors.JaxRuntimeError as error:
            assert "ValueError: x" in str(error)
        else:
            raise AssertionError
    """)


def test_a_broken_tracer_fails_no_program(run_python):
    done = run_python(
        PROGRAM
        + textwrap.dedent("""
        def broken():
            raise ValueError("no trace function today")
        threading.gettrace = broken
        assert (run(x) == jnp.sin(x) + 1).all()
        hc.barrier()
        """)
    )
    assert "no trace function today" in done.stderr


@pytest.mark.skipif(sys.version_info < (3, 12), reason="settrace_all_threads is 3.12's")
def test_a_debugger_that_comes_later_reaches_every_thread(run_python):
    run_python(
        PROGRAM
        + TRACES
        + textwrap.dedent("""
        for _ in range(5):
            run(x).block_until_ready()
        hc.barrier()
        known = {name: set(threads) for name, threads in ran.items()}
        threading.settrace_all_threads(trace)
        for _ in range(5):
            run(x).block_until_ready()
        hc.barrier()
        for name, threads in ran.items():
            traced = {thread for thread, _ in lines[name]}
            assert traced and traced <= threads and traced & known[name], (name, traced)
        sys.settrace(None)
        """)
    )


def line_of(source, mark):
    (line,) = (n for n, text in enumerate(source.splitlines(), 1) if mark in text)
    return line


def test_coverage_reports_lines_of_callbacks(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "run(x).block_until_ready()\nhc.barrier()\n")
    env = {**os.environ, "COVERAGE_FILE": str(tmp_path / "data")}
    env.pop("COVERAGE_PROCESS_START", None)

    def coverage(*args):
        done = subprocess.run(
            [sys.executable, "-m", "coverage", *args],
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            env=env,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    coverage("run", "--include", str(program), str(program))
    coverage("json", "-o", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    (file,) = report["files"].values()
    source = program.read_text()
    for mark in ("# in a callback", "# in a tap"):
        assert line_of(source, mark) in file["executed_lines"]


class Client:
    """The few messages of the Debug Adapter Protocol that a breakpoint needs."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), PROGRAM_SECONDS)
        self.stream = self.socket.makefile("rwb")
        self.sent = 0
        self.early = []

    def send(self, command, **arguments):
        self.sent += 1
        message = {"seq": self.sent, "type": "request", "command": command}
        body = json.dumps({**message, "arguments": arguments}).encode()
        self.stream.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.stream.flush()
        return self.sent

    def read(self):
        size = 0
        while (line := self.stream.readline()) != b"\r\n":
            assert line, "the debugger went away"
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        return json.loads(self.stream.read(size))

    def wait(self, wanted):
        for i, message in enumerate(self.early):
            if wanted(message):
                return self.early.pop(i)
        while not wanted(message := self.read()):
            self.early.append(message)
        return message

    def event(self, name):
        return self.wait(lambda m: m.get("event") == name).get("body")

    def ask(self, command, **arguments):
        number = self.send(command, **arguments)
        answer = self.wait(lambda m: m.get("request_seq") == number)
        assert answer["success"], answer
        return answer.get("body", {})


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("mark", ["# in a callback", "# in a tap"])
def test_debugpy_stops_in_callbacks(tmp_path, in_time, mark):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "run(x).block_until_ready()\nhc.barrier()\n")
    ready = tmp_path / "ready"
    port = jobs.free_port()
    listens = f"""
        import debugpy, runpy
        debugpy.listen(("127.0.0.1", {port}))
        open({str(ready)!r}, "w").close()
        debugpy.wait_for_client()
        runpy.run_path({str(program)!r}, run_name="__main__")
    """
    out = (tmp_path / "out").open("w")
    process = subprocess.Popen(
        [sys.executable, "-Xfrozen_modules=off", "-c", textwrap.dedent(listens)],
        stdout=out,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # debugpy has a process beside this one
    )
    try:
        assert in_time(lambda: ready.exists() or process.poll() is not None)
        client = Client(port)
        client.ask("initialize", adapterID="test", clientID="test")
        attach = client.send("attach", justMyCode=False)
        client.event("initialized")
        line = line_of(program.read_text(), mark)
        source = {"path": str(program)}
        client.ask("setBreakpoints", source=source, breakpoints=[{"line": line}])
        client.ask("configurationDone")
        client.wait(lambda m: m.get("request_seq") == attach)
        stopped = client.event("stopped")
        assert stopped["reason"] == "breakpoint"
        frames = client.ask("stackTrace", threadId=stopped["threadId"])["stackFrames"]
        assert frames[0]["line"] == line
        names = client.ask("scopes", frameId=frames[0]["id"])["scopes"]
        reference = names[0]["variablesReference"]
        found = client.ask("variables", variablesReference=reference)["variables"]
        assert "x" in {variable["name"] for variable in found}
        # Other threads may have stopped there too: this lets all of them go on.
        client.ask("disconnect", terminateDebuggee=False)
        process.wait(PROGRAM_SECONDS)
        assert process.returncode == 0, (tmp_path / "out").read_text()
        client.stream.close()
        client.socket.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out.close()
