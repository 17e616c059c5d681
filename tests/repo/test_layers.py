"""The house: which wing may import which, and who opens JAX (docs/design/house.md)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hostcall"
NATIVE = ROOT / "native"

# Bottom to top. A wing imports those below it; wings of one line don't know each other.
WINGS: list[tuple[str, ...]] = [
    ("_native",),
    ("_jax",),
    ("_core",),
    ("_runtime",),
    ("_engine",),
    ("_primitives",),
    ("_host_function", "_api"),
    ("_compat", "bridge"),
    ("faces",),  # hostcall/*.py: names and a docstring
    ("_cli",),
]
LEVEL = {wing: level for level, wings in enumerate(WINGS) for wing in wings}


def wing_of(module: str) -> str:
    if module == "__main__":
        return "_cli"
    first = module.split(".")[0]
    return (
        first
        if (first and (PACKAGE / first).is_dir()) or first == "_native"
        else "faces"
    )


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, those inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_imports(path: Path) -> set[str]:
    known = {*modules(), "_native"}
    own = set()
    for name in imports(path):
        inner = name.removeprefix("hostcall").removeprefix(".")
        if name.startswith("hostcall") and inner in known and inner:
            own.add(inner)
    return own


def test_every_folder_is_a_wing():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir()} - {"__pycache__"}
    assert folders | {"_native", "faces"} == set(LEVEL)


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_wing_imports_only_wings_below_it(name):
    mine = wing_of(name)
    for other in own_imports(modules()[name]):
        there = wing_of(other)
        below = there == mine or LEVEL[there] < LEVEL[mine]
        assert below, f"{name} ({mine}) imports {other} ({there})"


def test_no_import_ring():
    graph = {name: own_imports(path) for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in done:
            return
        for other in graph.get(name, ()):
            if not name.startswith(other):  # a package's own __init__
                visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", sorted(modules()))
def test_only_one_wing_opens_jax(name):
    if wing_of(name) == "_jax":
        return
    assert not {i for i in imports(modules()[name]) if i.startswith("jax._src")}
    text = modules()[name].read_text()
    replaced = re.findall(
        r"^\s*(?:setattr\(jax|jax[\w.]*\.\w+ = ).*", text, re.MULTILINE
    )
    assert name == "_compat.patch" or not replaced, replaced


TOOLS = {name for name in modules() if wing_of(name) == "_cli"} | {"__main__"}


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_tools_use_public_names_only(name):
    private = {i for i in own_imports(modules()[name]) if i.startswith("_")}
    assert private - TOOLS == set()


# Bottom to top, as above. Folders of one line don't include each other.
FOLDERS: list[tuple[str, ...]] = [
    ("base",),
    ("queue",),
    ("cuda",),
    ("plan",),
    ("buffer",),
    ("invoke",),
    ("handlers",),
    ("bindings",),
]
HEIGHT = {name: level for level, names in enumerate(FOLDERS) for name in names}
SOURCES = sorted(p for p in NATIVE.rglob("*") if p.suffix in (".h", ".cc"))


def test_every_native_folder_has_its_height():
    assert {p.parent.name for p in SOURCES} == set(HEIGHT)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_native_folder_includes_only_folders_below_it(path):
    mine = path.parent.name
    included = re.findall(r'#include "(\w+)/\w+\.h"', path.read_text())
    for there in set(included) - {mine}:
        assert HEIGHT[there] < HEIGHT[mine], f"{path.name} includes from {there}/"


# --- The front page -------------------------------------------------------------------

# Faces of names and a docstring; host_callback also says what it has not.
FACES = ("buffers", "debug", "derivatives", "errors", "monitor", "testing")


def listed(page: str) -> set[str]:
    return set(re.findall(r"\w+", page))


def test_the_front_page_lists_every_public_name():
    import hostcall

    public = {name for name in dir(hostcall) if not name.startswith("_")}
    assert public == {*hostcall.__all__, "print"}
    assert public - listed(hostcall.__doc__ or "") == set()
    for name in public:
        getattr(hostcall, name)


def test_the_map_names_every_wing():
    import hostcall

    wings = {wing for line in WINGS for wing in line} - {"faces", "_cli"}
    assert wings - listed(hostcall.__doc__ or "") == set()


@pytest.mark.parametrize("name", FACES)
def test_a_face_is_a_docstring_and_names(name):
    path = PACKAGE / f"{name}.py"
    module = ast.parse(path.read_text())
    _, *rest, last = module.body
    assert all(isinstance(node, ast.ImportFrom) for node in rest)
    assert isinstance(last, ast.Assign)
    assert ast.unparse(last.targets[0]) == "__all__"
    names = ast.literal_eval(last.value)
    assert names == sorted(names)
    brought = {a.name for n in rest if isinstance(n, ast.ImportFrom) for a in n.names}
    assert brought == set(names)
    assert set(names) - listed(ast.get_docstring(module) or "") == set()


def test_what_importing_brings(run_python):
    run_python("""
        import sys, jax
        before = set(sys.modules)
        import hostcall as hc
        brought = {m for m in set(sys.modules) - before if m.startswith("hostcall.")}
        public = {m for m in brought if not m.split(".")[1].startswith("_")}
        assert public == {"hostcall.debug"}, public
        later = ("_host_function", "bridge", "_compat.patch", "_api.object")
        for module in later:
            assert not any(m.startswith(f"hostcall.{module}") for m in brought), module
        for name in ("SpecError", "status", "check", "Buffer", "tap_tangent"):
            assert not hasattr(hc, name)
        assert hc.errors.SpecError.__mro__[1] is hc.HostcallError
        from hostcall import *
        assert print is not hc.print and tap is hc.tap and testing is hc.testing
    """)


def test_the_native_stub_matches():
    from hostcall import _native

    stub = ast.parse((PACKAGE / "_native.pyi").read_text())
    named = {n.name for n in stub.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    real = {n for n in dir(_native) if not n.startswith("__")}
    assert named == real
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            methods = {
                n.name
                for n in node.body
                if isinstance(n, ast.FunctionDef) and not n.name.startswith("__")
            }
            public = {
                n for n in dir(getattr(_native, node.name)) if not n.startswith("__")
            }
            assert methods == public, node.name


def test_no_file_grows_too_large():
    files = [*PACKAGE.rglob("*.py"), *NATIVE.rglob("*.h"), *NATIVE.rglob("*.cc")]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in files}
    assert not {name: n for name, n in lengths.items() if n > 400}
