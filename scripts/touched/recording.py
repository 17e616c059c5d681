"""A plugin of pytest: what runs during a test is recorded for it (recorder.py)."""

from __future__ import annotations

import time
from collections.abc import Generator

import pytest
import recorder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    recorder.write("", 0.0, recorder.take())  # what imports ran
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        recorder.write(item.nodeid, time.perf_counter() - began, recorder.take())
