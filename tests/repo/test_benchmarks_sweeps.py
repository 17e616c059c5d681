"""The sweeps of the benchmarks compute what they say, and their pictures are drawn.

Nothing is timed here.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

import hostcall as hc

sweeps = pytest.importorskip("benchmarks.sweeps")
from benchmarks import sweep_parts, sweep_sizes, sweep_texts  # noqa: E402

ROOT = Path(__file__).parents[2]
SMALL = {  # two points or three of each sweep; the tests' process has four devices
    "cost": ("call", "tap", "row"),
    "parts": (1,),
    "steps": (1,),
    "bytes": (4, 1024, 1 << 20),
    "leaves": (1, 3),
    "rows": (1, 5),
    "devices": (1, 4),
    "threads": (1, 3),
}
TIMES = 20


class Entered:
    """Counts how often Python functions are entered, on any thread."""

    def __init__(self):
        self.count, self._lock = 0, threading.Lock()

    def _enter(self):
        with self._lock:
            self.count += 1

    def host(self, x):
        self._enter()
        return x + np.float32(1)

    def nothing(self, *_):
        self._enter()


def test_all_sweeps_are_tested():
    assert (
        set(SMALL) == {sweep.name for sweep in sweeps.SWEEPS} == set(sweep_texts.TEXTS)
    )


@pytest.mark.parametrize(
    ("name", "point"), [(name, p) for name, points in SMALL.items() for p in points]
)
def test_a_sweep_computes_what_its_twin_does(name, point, monkeypatch):
    (sweep,) = (s for s in sweeps.SWEEPS if s.name == name)
    if name == "devices" and len(jax.devices()) < point:
        pytest.skip("too few devices")
    entered = Entered()
    monkeypatch.setattr(sweep_parts, "nothing", entered.nothing)
    monkeypatch.setattr(sweep_parts, "look", entered.nothing)
    monkeypatch.setattr(sweep_sizes, "nothing", entered.nothing)
    programs = sweep.programs(point, TIMES, entered.host)
    assert sweep.base in programs
    for way, program in programs.items():
        entered.count = 0
        got = jax.block_until_ready(program.f(*program.args))
        jax.effects_barrier()
        hc.barrier()
        assert entered.count == program.calls, way
        assert program.per > 0
        if program.twin is not None:
            wanted = program.twin()
            assert jax.tree.structure(got) == jax.tree.structure(wanted)
            jax.tree.map(
                functools.partial(np.testing.assert_array_equal, err_msg=way),
                got,
                wanted,
            )


def test_taps_of_a_sweep_deliver_every_step():
    seen = []
    made = sweep_parts.taps(TIMES, lambda x: seen.append(int(x)))["hostcall"]
    made.f(*made.args).block_until_ready()
    hc.barrier()
    assert seen == list(range(10 * TIMES))


# --- What is kept, and drawn ----------------------------------------------------------


def test_figures_are_medians_and_ratios_are_of_rounds():
    rounds = [{"hostcall": [1.0, 2.0, 4.0], "JAX": [10.0, 60.0, 80.0]}] * 2
    made = sweeps.summed(rounds, "hostcall")
    assert made["JAX"]["median"] == [60.0, 60.0]
    assert made["JAX"]["times"] == [20.0, 20.0]  # of 10, 30, 20
    assert made["hostcall"]["times"] == [1.0, 1.0]
    assert made["hostcall"]["low"] == [1.5, 1.5]
    assert made["hostcall"]["high"] == [3.0, 3.0]


def made_up(name):
    """Figures of a sweep with its own points and series, all different."""
    (sweep,) = (s for s in sweeps.SWEEPS if s.name == name)
    point = SMALL[name][0]
    steps = itertools.count(1)
    series = {}
    for way in sweep.programs(point, 64, lambda x: x):
        figures = [0.01 * 1.5 ** next(steps) for _ in sweep.points]
        series[way] = {
            "median": figures,
            "low": [0.9 * f for f in figures],
            "high": [1.1 * f for f in figures],
            "times": [1.0 for _ in figures],
        }
    return {
        "date": "2001-02-03",
        "seconds": 60,
        "rounds": 3,
        "machine": {
            "CPU": "a <CPU>",
            "cores": "2",
            "Python": "3",
            "jax": "1",
            "hostcall": "0",
        },
        "points": list(sweep.points),
        "series": series,
    }


def words(svg):
    """The text of a picture. A long line of notes is several texts in it."""
    tree = ElementTree.fromstring(svg.read_text())
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    return " ".join(
        "".join(e.itertext()) for e in tree.iter("{http://www.w3.org/2000/svg}text")
    )


def drawn(folder):
    """The command that draws the figures of a folder, when it has ended."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "--draw", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("matplotlib")
    docs = tmp_path_factory.mktemp("docs")
    folder = docs / "pictures"
    for sweep in sweeps.SWEEPS:
        sweeps.save(folder, sweep.name, made_up(sweep.name))
    marks = sweep_texts.places().replace(" -->\n\n<", " -->\nold\n<")
    (docs / "benchmarks.md").write_text(f"before\n{marks}after\n")
    for _ in range(2):  # a second time changes nothing
        done = drawn(folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_a_picture_names_its_series_points_and_machine(folder):
    pictures = pytest.importorskip("benchmarks.sweep_pictures")
    for name, figures in sweeps.load(folder).items():
        said, text = words(folder / pictures.picture(name)), sweep_texts.TEXTS[name]
        for part in (*figures["series"], "a <CPU>", "2001-02-03", text.title):
            assert part in said, name
        assert text.label(figures["points"][0]) in said or len(figures["points"]) == 1


PHONE = 345  # pixels for a picture of a page that is 390 wide


def test_a_phone_shows_all_bars_of_a_picture(folder):
    """They are drawn for its width, and the site does not make them wider there."""
    pictures = pytest.importorskip("benchmarks.sweep_pictures")
    assert "cost" in pictures.BARS  # README's first picture
    style = (ROOT / "docs" / "_static" / "site.css").read_text()
    (fits,) = re.findall(
        r"img:is\(([^)]*)\) \{\s*min-width: 0; max-width: 100%;", style
    )
    assert sorted(re.findall(r'"/([^"]+)"', fits)) == sorted(
        pictures.picture(name) for name in pictures.BARS
    )
    for name in pictures.BARS:
        for place in (folder, ROOT / "docs" / "pictures"):
            svg = (place / pictures.picture(name)).read_text()
            (width,) = re.findall(r'<svg [^>]*width="([\d.]+)pt"', svg)
            shown = min(1, PHONE / (float(width) * 4 / 3))
            letters = [
                float(size)
                for size in re.findall(r"font(?:-size)?: (?:\w+ )?([\d.]+)px", svg)
            ]
            assert min(letters) * 4 / 3 * shown > 7, name


def test_the_page_has_a_table_of_each_sweep(folder):
    text = (folder.parent / "benchmarks.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    figures = sweeps.load(folder)
    assert figures.keys() == SMALL.keys()
    for name in SMALL:
        place = text.split(f"<!-- figures: {name} -->\n")[1].split("<!-- end -->")[0]
        for way in figures[name]["series"]:
            assert place.count(f"| {way} |") + place.count(f"| `{way}` |") == 1, name
        assert "2001-02-03" in place, name


def test_what_was_not_measured_again_stays(tmp_path):
    first, second = made_up("threads"), made_up("cost")
    sweeps.save(tmp_path, "threads", first)
    sweeps.save(tmp_path, "cost", second)
    assert json.loads((tmp_path / sweeps.FILE).read_text()) == {
        "cost": second,
        "threads": first,
    }


def test_how_long_the_last_run_took(tmp_path):
    render = pytest.importorskip("benchmarks.render")
    page = tmp_path / "benchmarks.md"
    assert render.seconds_of(page) == 0
    page.write_text(render.document([], 612.4))
    assert render.seconds_of(page) == 612
    for sweep in sweeps.SWEEPS:
        assert sweeps.seconds_of(tmp_path) == 0
        sweeps.save(tmp_path, sweep.name, {**made_up("threads"), "rounds": 9})
    assert sweeps.seconds_of(tmp_path) == 60 * len(sweeps.SWEEPS)
    sweeps.save(tmp_path, "cost", {**made_up("cost"), "rounds": 3})
    assert sweeps.seconds_of(tmp_path) == 0


def test_drawing_needs_figures(tmp_path):
    done = drawn(tmp_path)
    assert done.returncode != 0
    assert "speed.json: measure it first" in done.stderr


def test_the_pictures_of_the_docs_are_of_the_figures_beside_them():
    pictures = pytest.importorskip("benchmarks.sweep_pictures")
    folder = ROOT / "docs" / "pictures"
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    known = sweeps.load(folder)
    assert set(known) == set(SMALL)
    for name, figures in known.items():
        (sweep,) = (s for s in sweeps.SWEEPS if s.name == name)
        assert figures["points"] == list(sweep.points)
        assert sweep_texts.caption(figures) in words(folder / pictures.picture(name))
        assert sweep_texts.table(name, figures) in page
