"""The driver, for all tests of this folder."""

from __future__ import annotations

import pytest
from modes import MODES


@pytest.fixture(autouse=True)
def driver(pytestconfig):
    """The driver's functions; it is as new again after each test."""
    if pytestconfig.getoption("--platform") != "fakegpu":
        pytest.skip("--platform fakegpu")
    driver = pytestconfig.pluginmanager.getplugin("rules").driver
    yield driver
    driver.fakeReset()


@pytest.fixture(params=MODES)
def mode(request, driver):
    """Each way in which the driver is hostile, and none."""
    MODES[request.param](driver)
