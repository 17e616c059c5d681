"""The tables of what hostcall needs of JAX, and of what it replaces: that they are whole.

What becomes of programs without each of these is `make jax-mutation`; a few of them,
chosen by the date, are tried here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from collections import defaultdict
from pathlib import Path

import pytest

from hostcall import _jax
from hostcall._jax import door, needs
from hostcall._jax.needs import CALLED, MODULES, NEEDS, Part

ROOT = Path(__file__).parents[2]
WING = ROOT / "src" / "hostcall" / "_jax"
SCRIPTS = ROOT / "scripts" / "jax_mutation"
_OF_MODULES = {
    "__getattr__",
    "JAX_VERSION",
    "missing",
    "refuse",
    "require",
    "version_of",
}


def _uses() -> tuple[dict[str, set[str]], dict[tuple[str, str], set[tuple]]]:
    """(the names of each module that the files of the wing use, how they call them)."""
    names: dict[str, set[str]] = defaultdict(set)
    calls: dict[tuple[str, str], set[tuple]] = defaultdict(set)
    for path in WING.glob("*.py"):
        tree = ast.parse(path.read_text())
        alias = {
            a.asname or a.name: a.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "hostcall._jax.door"
            for a in node.names
            if a.name in MODULES
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in alias:
                names[alias[node.id]]  # the module itself
            if not isinstance(node, ast.Attribute | ast.Call):
                continue
            of = node.func if isinstance(node, ast.Call) else node
            if not (isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name)):
                continue
            if of.value.id not in alias:
                continue
            module = alias[of.value.id]
            names[module].add(of.attr)
            if isinstance(node, ast.Call) and not any(
                isinstance(a, ast.Starred) for a in node.args
            ):
                words = tuple(sorted(k.arg for k in node.keywords if k.arg))
                calls[module, of.attr].add((len(node.args), words))
    return names, calls


USES, CALLS = _uses()


def test_every_private_name_is_in_the_table():
    listed: dict[str, set[str]] = defaultdict(set)
    for need in NEEDS:
        listed[need.module] |= set(need.names.split())
    # Two settings that moved: versions.py asks the module that has them.
    moved = {"abstract_mesh_context_manager", "device_context"}
    for module in MODULES:
        used = USES.get(module, set())
        assert used - listed[module] == set(), module
        assert listed[module] - used - moved == set(), module


def test_no_file_of_the_wing_goes_around_the_door():
    for path in WING.glob("*.py"):
        if path.name in ("needs.py", "patches.py", "door.py"):
            continue
        text = path.read_text()
        assert "import jax._src" not in text, path
        assert "from jax._src" not in text, path


def test_each_module_and_part_is_used():
    assert {need.module for need in NEEDS} == set(MODULES)
    from hostcall._jax.patches import PATCHES

    parts = {need.part for need in NEEDS} | {patch.part for patch in PATCHES}
    assert parts == set(Part)


def test_functions_are_called_as_the_table_says():
    for key, shape in CALLED.items():
        if CALLS.get(key):
            assert CALLS[key] <= {shape}, key


def test_this_jax_has_all():
    for part in Part:
        assert door.missing(part) == "", part


def test_few_names():
    """A public name is better. Raise this only for what nothing public will do."""
    assert sum(len(need.names.split()) for need in NEEDS) <= 145


def test_what_patch_jax_replaces_is_in_the_table():
    from hostcall._compat.patch import REPLACEMENTS
    from hostcall._compat.redirects import REDIRECTS
    from hostcall._jax.installing import _named
    from hostcall._jax.patches import PATCHED

    attributes = {(_named(p.holder), p.name) for p in PATCHED if not p.is_entry}
    assert attributes == set(REPLACEMENTS)
    lowered = {_named(p.name) for p in PATCHED if p.is_entry}
    assert lowered == {redirect.primitive for redirect in REDIRECTS}


def test_the_pages_are_written_from_the_tables():
    done = subprocess.run(
        [sys.executable, "-c", "import page; assert page.is_current()"],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + "\npython scripts/jax_mutation/page.py"


def test_a_few_mutants_of_today():
    """Each program is right, or refused with the code."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "mutants.py"), "--sample", "2"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- A JAX that has not all -------------------------------------------------------------

_WITHOUT = """
    import sys
    sys.path.insert(0, {scripts!r})
    import mutants
    mutants.change({path!r}, {name!r}, "removed")
"""


def without(path: str, name: str) -> str:
    return _WITHOUT.format(scripts=str(SCRIPTS), path=path, name=name)


def test_a_missing_part_is_refused_where_it_is_used(run_python):
    run_python(
        without("jax._src.linear_util", "wrap_init")
        + """
    import jax, numpy as np, hostcall as hc
    assert jax.jit(lambda x: hc.call(np.square, x, x, order="ordered"))(3.0) == 9
    try:
        with hc.observe(nans=True):
            pass
    except hc.errors.HostcallError as error:
        assert error.code == "hc-jax"
        text = str(error)
    assert "hc.observe can't work with jax" in text
    assert "jax._src.linear_util.wrap_init" in text
    assert 'pip install "jax>=0.9.0,<=' in text
    assert "newer hostcall" in text
    """
    )


def test_without_what_everything_needs_the_import_says_so(run_python):
    run_python(
        without("jax._src.effects", "EffectTypeSet")
        + """
    try:
        import hostcall
    except ImportError as error:
        text = str(error)
    assert "hostcall can't be imported under jax" in text
    assert "jax._src.effects.EffectTypeSet" in text, text
    assert 'pip install "jax>=0.9.0,<=' in text
    """
    )


def test_without_a_public_name_the_import_says_so_too(run_python):
    run_python("""
    import jax.interpreters.mlir
    del jax.interpreters.mlir.LoweringRuleContext
    try:
        import hostcall
    except ImportError as error:
        text = str(error)
    assert "hostcall can't be imported under jax" in text
    assert "LoweringRuleContext" in text and "newer hostcall" in text, text
    """)


def test_fast_dispatch_falls_back_with_one_line(run_python):
    run_python(
        without("jax._src.tree_util", "dispatch_registry")
        + """
    import logging
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hostcall").addHandler(handler)
    import jax, numpy as np, hostcall as hc
    seen = []
    def note(x):
        seen.append(float(x))
    for _ in range(2):
        program = jax.jit(lambda x: hc.call(note, None, x, order="ordered"))
        for each in range(3):
            program(float(each))
    jax.effects_barrier()
    assert seen == [0, 1, 2] * 2
    (line,) = said
    assert "fast dispatch" in line and "dispatch_registry" in line, line
    """
    )


def test_a_forked_child_refuses_programs_if_jax_does_not_say_what_it_has_started(
    run_python,
):
    run_python(
        without("jax._src.xla_bridge", "_backends")
        + """
    import os, warnings, jax, numpy as np, hostcall as hc
    warnings.simplefilter("ignore")
    program = jax.jit(lambda x: hc.call(np.square, x, x))
    assert program(3.0) == 9
    child = os.fork()
    if child == 0:
        try:
            program(4.0)
        except hc.errors.HostcallError as error:
            os._exit("multiprocessing's 'spawn'" not in str(error))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    """
    )


def test_a_jax_newer_than_the_tested_ones_is_used_with_one_line(run_python):
    run_python("""
    import logging, jax
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hostcall").addHandler(handler)
    import numpy as np, hostcall as hc
    from hostcall._jax import door, installing
    door.NEWEST = installing.NEWEST = "0.8.3"  # as if this JAX came later
    assert said == []
    for _ in range(2):
        assert jax.jit(lambda x: hc.call(np.square, x, x))(3.0) == 9
    (line,) = said
    assert line.endswith("newer than the newest that hostcall was tested with, 0.8.3"), line
    """)


@pytest.mark.parametrize(
    ("function", "count", "names", "fits"),
    [
        (lambda a, b: 0, 2, (), True),
        (lambda a, b: 0, 3, (), False),
        (lambda a, b: 0, 1, (), False),
        (lambda a, b=1: 0, 1, (), True),
        (lambda a, *, b: 0, 1, (), False),
        (lambda a, *, b: 0, 1, ("b",), True),
        (lambda a, *, b=1: 0, 1, (), True),
        (lambda a: 0, 1, ("b",), False),
        (lambda *a, **b: 0, 7, ("b", "c"), True),
        (len, 7, (), True),  # it does not say
    ],
)
def test_what_fits(function, count, names, fits):
    assert door._fits(function, count, names) == fits


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0.9.0", (0, 9, 0)), ("0.12.0.1", (0, 12, 0, 1)), ("0.13.0.dev3", (0, 13, 0))],
)
def test_versions(text, wanted):
    assert door.version_of(text) == wanted


def test_what_stands_for_something_missing_raises_where_it_is_used():
    missing = door.Missing(Part.OBSERVE, "jax._src.somewhere.name")
    _ = missing.attribute | int
    for use in (
        lambda: missing(1),
        lambda: missing.deeper.still(),
        lambda: missing["key"],
        lambda: 1 in missing,
        lambda: list(missing),
        lambda: bool(missing),
        lambda: missing == 1,
        lambda: isinstance(1, missing),
        lambda: types.new_class("Inner", (missing,)),
    ):
        with pytest.raises(Exception, match="hc.observe can't work with jax") as error:
            use()
        assert error.value.code == "hc-jax"


def test_the_versions_are_said_once():
    assert f'pip install "jax>={needs.OLDEST},<={needs.NEWEST}"' == _jax.INSTALL
