"""The programs on the pages of the tools run, and print what the pages say."""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
import types
from pathlib import Path

import pytest

import hostcall as hc

DOCS = Path(__file__).parents[2] / "docs"
PROGRAM = re.compile(
    r"^```py(?:thon)?\n(.*?)^```(?:\n```text\n(.*?)^```)?", re.M | re.S
)
PAGES = {
    "observing": 3,
    "progress": 3,
    "recording": 6,
    "running": 9,
    "watches": 5,
    "watching": 8,
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def to_wandb(monkeypatch):
    """What the page's sink for wandb sends it."""
    rows: list[dict[str, float]] = []
    wandb = types.SimpleNamespace(log=rows.append)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return rows


class FakeRun:
    """A run of mlflow, active on the thread that started it."""

    info = types.SimpleNamespace(run_id="the user's")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def to_mlflow(monkeypatch, tmp_path):
    """Returns a function that says what each run of mlflow got, by the run's id.

    The package mlflow itself (mlflow-skinny) where it is installed.
    """
    if importlib.util.find_spec("mlflow") is None:
        runs: dict[str, list[tuple[int, float]]] = {}

        def log_metrics(values, step, run_id="a new one"):
            runs.setdefault(run_id, []).append((step, values["loss"]))

        fake = types.SimpleNamespace(start_run=FakeRun, log_metrics=log_metrics)
        monkeypatch.setitem(sys.modules, "mlflow", fake)
        return lambda: runs
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())

    def logged():
        client = mlflow.MlflowClient()
        ids = [e.experiment_id for e in client.search_experiments()]
        found = [run.info.run_id for run in client.search_runs(ids)]
        mlflow.set_tracking_uri(before)
        return {
            one: [(m.step, m.value) for m in client.get_metric_history(one, "loss")]
            for one in found
        }

    return logged


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page(page, to_wandb, to_mlflow, optimized, capsys):
    cells = PROGRAM.findall((DOCS / f"{page}.md").read_text())
    assert len(cells) == PAGES[page]
    names: dict[str, object] = {}
    place = f"<docs/{page}.md>"
    for source, wanted in cells:
        # As notebooks do: hc.observe reads the source of a variable's line.
        linecache.cache[place] = len(source), None, source.splitlines(True), place
        exec(compile(source, place, "exec"), names)
        hc.barrier()
        out = capsys.readouterr().out
        assert not wanted or out == wanted
    if page == "recording":
        assert [(row["step"], row["loss"]) for row in to_wandb] == [(0, 1.5)]
        run = names["run"]
        assert to_mlflow() == {run.info.run_id: [(0, 1.5)]}  # and no other run


def test_a_page_names_every_setting_of_the_flight_recorder():
    text = (DOCS / "watching.md").read_text()
    with pytest.raises(hc.errors.SpecError, match="flight=") as caught:
        hc.configure(flight="wrong")
    settings = {*re.findall(r"'(\w+)'", str(caught.value))} - {"wrong"}
    assert settings > {"signals", "off"}
    for setting in settings - {"sigterm"}:  # the default
        assert f'hc.configure(flight="{setting}")' in text
    assert "flight" in (hc.configure.__doc__ or "")


def test_each_picture_is_there():
    for page in PAGES:
        for picture in re.findall(
            r"\]\((pictures/.*?)\)", (DOCS / f"{page}.md").read_text()
        ):
            assert (DOCS / picture).read_text().rstrip().endswith("</svg>")
