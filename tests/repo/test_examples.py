"""Every example runs, and so does the demo. They contain their own asserts."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import hostcall as hc
from hostcall.__main__ import main

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "examples" / "demo")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# Optional packages of examples.
WANTS = {
    "feed_checkpoint": "orbax.checkpoint",
    "progress": "tqdm",
    "recorder": "pyarrow",
    "serve": "aiohttp",
}

RUN = """
    import runpy, sys
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
MAIN = """
    import runpy
    runpy.run_module("hostcall", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, run_python):
    pytest.importorskip("scipy")
    if path.stem in WANTS:
        pytest.importorskip(WANTS[path.stem])
    assert run_python(RUN, str(path)).stdout


def test_there_are_examples():
    assert {p.stem for p in EXAMPLES} >= {
        "bessel",
        "buffers",
        "buffers_gpu",
        "derivatives",
        "environment",
        "feed_checkpoint",
        "old_training",
        "other_device",
        "parallel_rows",
        "profile",
        "progress",
        "recorder",
        "serve",
        "training_log",
        "two_processes",
    }


def test_the_demo(run_python, tmp_path):
    pytest.importorskip("scipy")
    pytest.importorskip("statsmodels")
    path = tmp_path / "fit.png"
    done = run_python(RUN, DEMO, "--quick", "--plot", str(path))
    out = done.stdout
    assert re.search(r"  fitting: 100%\|#+\| 100/100 \[.*, misfit=", done.stderr)
    for heading in ("Lynx and hares", "Bessel functions", "Sunspots"):
        assert f"\n{heading}" in out
    if importlib.util.find_spec("pyarrow") is not None:
        assert re.search(r"\n  recorded while it ran +1600 rows\n", out)
        assert re.search(r"\n    the best start converged in +\d+ steps\n", out)
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert path.exists() == drawn
    assert (str(path) if drawn else "not drawn without matplotlib") in out
    assert out.endswith("All results agree with plain SciPy.\n")


def test_the_help_has_all_commands(run_python, capsys):
    usage = run_python(MAIN, "--help").stdout
    for command in ("run", "explain"):
        assert re.search(rf"^ +{command} +\w", usage, re.M)
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"hostcall {command} [-h]" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys):
    for given, hint in (("explian", " Did you mean explain?"), ("xyz", ""), ("", "")):
        with pytest.raises(SystemExit, match="2"):
            main([given])
        said = capsys.readouterr().err
        assert f"there is no command {given!r}.{hint} The commands are run," in said


def test_the_command_is_installed_and_tells_its_version(capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"hostcall": "hostcall.__main__:main"}
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"hostcall {hc.__version__}\n"


def test_the_report(run_python):
    out = run_python(MAIN).stdout
    assert "engine on gpu" in out
    assert "works (tried: ordered calls in a compiled loop)" in out
    assert re.search(r"  scalar, in a loop +[\d.]+ +[\d.]+ +[\d.]+x\n", out)


def test_a_command_that_has_gone_says_what_to_type(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["costs"])
    said = " ".join(capsys.readouterr().err.split())
    assert "there is no command 'costs' any more: python -m hostcall, without a" in said


def test_the_demo_says_what_it_needs(run_python):
    without_scipy = """
        import importlib.util, runpy, sys
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: (
            None if name == "scipy" else find(name, *rest)
        )
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    done = run_python(without_scipy, DEMO, check=False)
    assert done.returncode == 1
    assert "The demonstration needs scipy." in done.stderr
    assert "pip install scipy" in done.stderr
