"""Runs the programs of tests in forks of a process that has imported JAX.

Importing JAX takes half a second of a core, which is most of what a small program takes.
So one process imports it and waits, with one thread and no backend, and each program runs
in a fork of it. For JAX and hostcall, which the program imports, that is a new process.
Only what is read when Python starts or JAX is imported differs; `serves` names it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

# A supervisor waits for the program, so that the nursery can serve the next one. The
# program runs at the top level, so that Python ends in it as it does after `python -c`.
_NURSERY = """
import gc, json, os, socket, sys
import jax, jax.numpy, numpy
gc.collect(), gc.freeze()  # collections in a fork would copy the pages of all objects
channel, supervisors = socket.socket(fileno=int(sys.argv[1])), []
while True:
    request, fds, *_ = socket.recv_fds(channel, 1 << 20, 3)
    if not request:
        os._exit(0)
    if (supervisor := os.fork()) == 0:
        if (program := os.fork()) == 0:
            break
        os.write(fds[2], b"%d " % program)
        os.close(fds[0]), os.close(fds[1])
        os.write(fds[2], b"%d" % os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))
        os._exit(0)
    for fd in fds:
        os.close(fd)
    supervisors += [supervisor]
    supervisors = [each for each in supervisors if os.waitpid(each, os.WNOHANG)[0] == 0]
os.dup2(fds[0], 1), os.dup2(fds[1], 2)
for fd in (*fds, channel.detach()):
    os.close(fd)
source, sys.argv[1:], env, folder = json.loads(request)
os.environ.clear(), os.environ.update(env), os.chdir(folder)
sys.excepthook = lambda kind, error, trace, show=sys.excepthook: (
    show(kind, error.with_traceback(trace and trace.tb_next), None))  # without this frame
for name in set(globals()) - {"source"}:
    if not name.startswith("__"):
        del globals()[name]
del name
exec(compile(globals().pop("source"), "<string>", "exec"))
"""
# What a process reads when it starts, or when it imports JAX.
_READ_BEFORE = ("PYTHON", "JAX_", "TF_", "HOSTCALL_PATCH")
# Tools that have to see a process start.
_TOOLS = {"COVERAGE_PROCESS_START", "LD_PRELOAD", "TSAN_OPTIONS"}
_STARTED_WITH = dict(os.environ)

_lock = threading.Lock()  # of what follows, and of a message in the channel
_channel: socket.socket | None = None
_process: subprocess.Popen[bytes] | None = None


def serves(
    env: Mapping[str, str], started_with: Mapping[str, str] = _STARTED_WITH
) -> bool:
    """Whether a program with these variables may run in a fork."""
    changed = {*env.items()} ^ {*started_with.items()}
    return (
        sys.platform == "linux"  # macOS has no such sockets
        and _TOOLS.isdisjoint({*env, *_STARTED_WITH})
        and not any(name.startswith(_READ_BEFORE) for name, _ in changed)
    )


def run(
    command: list[str], env: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """What subprocess.run returns for `[sys.executable, "-c", source, *args]`.

    A process of its own if a fork can't serve.
    """
    if not serves(env):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=env
        )
    request = json.dumps([command[2], command[3:], dict(env), os.getcwd()]).encode()
    pipes = [os.pipe() for _ in range(3)]  # output, errors, and the process
    with _lock:
        socket.send_fds(_connected(), [request], [write for _, write in pipes])
    for _, write in pipes:
        os.close(write)
    reads = [read for read, _ in pipes]
    got = {read: bytearray() for read in reads}
    limit = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        for read in reads:
            waiting.register(read, selectors.EVENT_READ)
        while waiting.get_map():
            if time.monotonic() > limit:
                os.kill(int(got[reads[2]].split()[0]), signal.SIGKILL)
                out, errors = (bytes(got[read]) for read in reads[:2])
                raise subprocess.TimeoutExpired(command, seconds, out, errors)
            for key, _ in waiting.select(1.0):
                if data := os.read(key.fd, 1 << 16):
                    got[key.fd] += data
                else:
                    waiting.unregister(key.fd)
    for read in reads:
        os.close(read)
    out, errors, process = (got[read].decode() for read in reads)
    return subprocess.CompletedProcess(command, int(process.split()[1]), out, errors)


def _connected() -> socket.socket:
    """The channel to the nursery, which is started first if there is none."""
    global _channel, _process
    if _channel is None:
        _channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            _process = subprocess.Popen(
                [sys.executable, "-c", _NURSERY, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # OpenBLAS would start a thread for each core.
                env={**_STARTED_WITH, "OPENBLAS_NUM_THREADS": "1"},
            )
    return _channel


def close() -> None:
    """Ends the nursery."""
    if _channel is not None and _process is not None:
        _channel.close()
        _process.wait()
