"""A plugin of pytest: what a test's own process covers counts for that test."""

from __future__ import annotations

import sys

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    measured = coverage.Coverage.current()
    if measured is None:
        raise pytest.UsageError("run scripts/coverage/run.sh: nothing is measured")
    measured.switch_context(item.nodeid)
    if sys.version_info >= (3, 14):
        # coverage.py hears there of each line and branch once. Now once for this test.
        sys.monitoring.restart_events()
    try:
        return (yield)
    finally:
        measured.switch_context("")
