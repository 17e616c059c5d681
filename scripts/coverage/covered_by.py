"""A plugin of pytest: what a test's own process covers counts for that test."""

from __future__ import annotations

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    measured = coverage.Coverage.current()
    if measured is None:
        raise pytest.UsageError("run scripts/coverage/run.sh: nothing is measured")
    measured.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        measured.switch_context("")
