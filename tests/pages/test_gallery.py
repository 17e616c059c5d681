"""Every program of the gallery runs, makes a figure, and has what the site needs."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
PROGRAMS = sorted(GALLERY.glob("plot_*.py"))
TAGS = {
    *("buffers", "derivatives", "errors", "feed", "objects", "optimisation"),
    *("parallel", "plots", "recording", "sampling", "simulator", "taps", "training"),
}

# Drawing a figure also draws the first frame of its animation.
RUN = """
    import runpy, sys
    sys.argv = sys.argv[1:]
    names = runpy.run_path(sys.argv[0], run_name="__main__")
    import matplotlib.pyplot as plt
    assert plt.get_fignums(), "no figure"
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()
"""

# What they use of hostcall and its own needs, which an import in them does not show.
USED = {
    "hc.progress": {"tqdm"},
    "progress=True": {"tqdm"},
    "hc.Recorder": {"pandas", "pyarrow"},
}

each = pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)


def imported(tree: ast.Module) -> set[str]:
    """The packages that a program imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    packages = {name.partition(".")[0] for name in names}
    return packages - sys.stdlib_module_names - {"hostcall"}


def test_there_are_programs():
    assert {path.stem for path in PROGRAMS} >= {
        "plot_convex_layer",
        "plot_feed_epoch",
        "plot_first_nan",
        "plot_hudson_bay",
        "plot_live_mcmc",
        "plot_observe",
        "plot_one_line",
        "plot_orbit",
        "plot_pde_adjoint",
        "plot_policy",
        "plot_remote_simulator",
        "plot_sunspots",
        "plot_three_ways",
        "plot_torch_model",
        "plot_trajectory",
    }
    assert {path.name for path in GALLERY.glob("*.py")} == {p.name for p in PROGRAMS}
    # Links to them would break; docs/_ext/paths.py silences a warning.
    assert not any(re.search(r"\s", path.name) for path in PROGRAMS)


@each
def test_program(path, run_python):
    for package in sorted(imported(ast.parse(path.read_text()))):
        if importlib.util.find_spec(package) is None:  # not imported: some are large
            pytest.skip(f"{package} is not installed")
    run_python(RUN, str(path), env={"MPLBACKEND": "Agg"})


@each
def test_what_the_site_needs(path):
    text = path.read_text()
    tree = ast.parse(text)

    title, line, _, *about, needs = (ast.get_docstring(tree) or "\n\n\n").splitlines()
    assert title
    assert line == "=" * len(title)
    assert "".join(about).count(".") >= 2, "two to four sentences"

    packages = imported(tree) - {"jax", "numpy"}  # those come with hostcall
    packages |= {p for name, of in USED.items() if name in text for p in of}
    installed = f"``pip install {' '.join(sorted(packages))}``"
    assert needs == f"Besides hostcall it needs {installed}."

    (tags,) = re.findall(r"^# sphinx_gallery_tags = (.*)", text, re.M)
    tags = ast.literal_eval(tags)
    assert tags
    assert set(tags) <= TAGS
    assert text.count("\n# %%\n") >= 3
    assert isinstance(tree.body[-1], ast.Assert)
