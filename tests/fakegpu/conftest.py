"""The driver, for all tests of this folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def driver(pytestconfig):
    """The driver's functions; it is as new again after each test."""
    if pytestconfig.getoption("--platform") != "fakegpu":
        pytest.skip("--platform fakegpu")
    driver = pytestconfig.pluginmanager.getplugin("rules").driver
    yield driver
    driver.fakeReset()
