"""Each test of the tools begins without bars; a recorder for those that ask."""

from __future__ import annotations

import sys

import bars
import pytest

import hostcall as hc
from hostcall.tools._progress import bars as all_bars


@pytest.fixture
def screen():
    return bars.Screen()


@pytest.fixture
def stderr_is(monkeypatch):
    """A function that replaces sys.stderr; pytest does so itself after all fixtures."""

    def replace(file):
        monkeypatch.setattr(sys, "stderr", file)
        monkeypatch.setenv("TERM", "xterm-256color")
        return file

    return replace


@pytest.fixture
def undelayed(monkeypatch):
    """Each step that is delivered is drawn, however fast they come."""
    monkeypatch.setattr(all_bars, "QUIET", 0)


@pytest.fixture
def rec_folder(tmp_path):
    """Where the recorder of a test writes."""
    return tmp_path / "run"


@pytest.fixture
def rec(rec_folder):
    """A recorder that is open during the test."""
    pytest.importorskip("pyarrow")
    with hc.Recorder(rec_folder) as rec:
        yield rec


@pytest.fixture(autouse=True)
def no_bars(nothing_left):
    yield
    hc.progress.close()
    assert all_bars._bars.open == []
    all_bars._bars.closed.clear()
    all_bars._bars.together.clear()
