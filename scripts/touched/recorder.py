"""Writes which functions of hostcall each test runs: the map of `make test-fast`.

`make test-map` runs the suite with `recording.py`, a plugin of pytest. Python says of
each function that it starts, once for each test (sys.monitoring: Python 3.12 or later).
Programs that tests start are heard as well: `sitecustomize.py`, on their PYTHONPATH,
begins to record in them, and what they ran counts for the test that started them.

Each process leaves a file in the folder RECORD_TO: a JSON line for each test with its
name, its seconds, and its functions. `map.py` makes one map of them.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

FOLDER = "RECORD_TO"
_TOOL = 4  # the number of no tool that Python knows: 3 and 4 are free
_PACKAGE = f"{os.sep}site-packages{os.sep}hostcall{os.sep}"

_names: dict[CodeType, str] = {}  # of hostcall's functions
_ran: set[str] = set()  # since the last test


def function_name(code: CodeType) -> str | None:
    """`_api/call.py::call`, also for what is defined in it. None for others' code."""
    _, package, path = code.co_filename.partition(_PACKAGE)
    if not package:
        return None
    outermost = code.co_qualname.partition(".<locals>")[0]
    return f"{path.replace(os.sep, '/')}::{outermost}"


def start() -> None:
    """Hears from now on which functions start."""
    monitoring = sys.monitoring
    monitoring.use_tool_id(_TOOL, "hostcall's tests")

    def started(code: CodeType, _: int) -> Any:
        name = function_name(code)
        if name is not None:
            _ran.add(name)
        return monitoring.DISABLE  # until the next test

    monitoring.register_callback(_TOOL, monitoring.events.PY_START, started)
    monitoring.set_events(_TOOL, monitoring.events.PY_START)


def take() -> list[str]:
    """The functions that ran since this was called last."""
    functions = sorted(_ran)
    _ran.clear()
    sys.monitoring.restart_events()
    return functions


def write(test: str, seconds: float, functions: list[str]) -> None:
    """Adds a line to this process's file."""
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps([test, seconds, functions]) + "\n")


def record_this_process() -> None:
    """Records what runs in this process. At its end it is written for its test."""
    start()
    # A fork inherits what its parent ran, which the parent writes.
    os.register_at_fork(after_in_child=take)
    atexit.register(_write_program)
    leave = os._exit  # how most forks end, without handlers of atexit

    def write_and_leave(status: int) -> None:
        _write_program()
        leave(status)

    os._exit = write_and_leave


def _write_program() -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "")  # "" in pytest's own processes
    if _ran and test:
        write(test.rpartition(" (")[0], 0.0, sorted(_ran))
