"""The programs on the pages of the tools run, and print what the pages say."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

import hostcall as hc
from hostcall._core import config

DOCS = Path(__file__).parents[2] / "docs"
PROGRAM = re.compile(
    r"^```py(?:thon)?\n(.*?)^```(?:\n```text\n(.*?)^```)?", re.M | re.S
)
PAGES = {
    "progress": 3,
    "recording": 5,
    "tracing": 5,
    "waiting": 9,
    "watches": 3,
    "watching": 6,
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def logged(monkeypatch):
    """What the page's sinks for wandb and mlflow send them."""
    rows: list[dict[str, float]] = []
    wandb = types.SimpleNamespace(log=rows.append)
    mlflow = types.SimpleNamespace(
        log_metrics=lambda values, step: rows.append({**values, "step": step})
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return rows


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page(page, logged, capsys):
    cells = PROGRAM.findall((DOCS / f"{page}.md").read_text())
    assert len(cells) == PAGES[page]
    names: dict[str, object] = {}
    for source, wanted in cells:
        exec(compile(source, f"<docs/{page}.md>", "exec"), names)
        hc.barrier()
        out = capsys.readouterr().out
        assert not wanted or out == wanted
    if page == "recording":
        assert [(row["step"], row["loss"]) for row in logged] == [(0, 1.5), (0, 1.5)]


def test_a_page_names_every_setting_of_the_flight_recorder():
    text = (DOCS / "tracing.md").read_text()
    for setting in ("signals", "off"):
        assert f'hc.configure(flight="{setting}")' in text
        assert setting in config.FLIGHTS
    assert "flight" in (hc.configure.__doc__ or "")


def test_each_picture_is_there():
    for page in PAGES:
        for picture in re.findall(
            r"\]\((pictures/.*?)\)", (DOCS / f"{page}.md").read_text()
        ):
            assert (DOCS / picture).read_text().rstrip().endswith("</svg>")
