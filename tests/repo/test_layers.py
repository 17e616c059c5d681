"""The house: which wing may import which, and who opens JAX (docs/design/house.md)."""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hostcall import _native

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hostcall"
NATIVE = ROOT / "native"

# Bottom to top. A wing imports those below it; wings of one line don't know each other.
WINGS: list[tuple[str, ...]] = [
    ("_native",),
    ("_jax",),
    ("_core",),
    ("_runtime",),
    ("_policies",),
    ("_job",),
    ("_engine",),
    ("_primitives",),
    ("_host_function", "_api"),
    ("_compat", "bridge", "_export"),
    ("faces",),  # hostcall/*.py: names and a docstring
    ("tools",),
    ("_cli",),
]
# A lowering asks `_export` for a text if its program leaves the process, and imports it
# then (tests/export/test_export_unused.py).
LATE = {("_primitives", "_export")}
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


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


@functools.cache
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
    parts = {p.relative_to(PACKAGE).parts for p in PACKAGE.rglob("*.py")}
    folders = {there[0] for there in parts if len(there) > 1}
    assert folders | {"_native", "faces"} == set(LEVEL)


def test_a_wing_imports_only_wings_below_it():
    wrong = []
    for name, path in modules().items():
        mine = wing_of(name)
        for other in own_imports(path):
            there = wing_of(other)
            if name == "" and there == "tools":
                continue  # the front page names the tools, and imports them lazily
            if (mine, there) in LATE:
                continue
            if there != mine and LEVEL[there] >= LEVEL[mine]:
                wrong.append(f"{name} ({mine}) imports {other} ({there})")
    assert not wrong


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


def test_only_one_wing_opens_jax():
    wrong = []
    for name, path in modules().items():
        if wing_of(name) == "_jax":
            # Only the door opens JAX's modules, by the table of what is needed.
            assert not any(i.startswith("jax._src") for i in imports(path)), name
            continue
        private = {i for i in imports(path) if i.startswith("jax._src")}
        replaced = re.findall(
            r"^\s*(?:setattr\(jax|jax[\w.]*\.\w+ = ).*", path.read_text(), re.MULTILINE
        )
        if private or (replaced and name != "_compat.patch"):
            wrong.append((name, private, replaced))
    assert not wrong


TOOLS = {n for n in modules() if wing_of(n) in ("_cli", "tools")} | {"__main__"}


_PRIVATE = re.compile(
    r"(from|import) hostcall(\.\w+)*(\.| import (\(\s*)?(\w+, )*)_[a-z]|\bhc\._[a-z]"
)


def test_tests_of_private_parts_stand_apart():
    """Those that import private modules are in tests/inside, or in a file that is called
    so. Of those here, this one looks at the house; helpers are no tests.
    """
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if _PRIVATE.search(path.read_text())
        and path.parent.name not in ("inside", "repo")
        and not path.stem.endswith("_inside")
    ]
    assert found == []


def test_what_tests_import_by_name_has_one_name():
    """pytest puts each folder of tests in front of sys.path as it comes to it, so of two
    modules of one name, a test gets the one that another test imported before it.
    """
    folders = [ROOT / "tests", ROOT / "examples" / "demo"]
    times = Counter(p.stem for folder in folders for p in folder.rglob("*.py"))
    assert {stem for stem in times if times[stem] > 1} <= {"conftest"}


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_tools_use_public_names_only(name):
    private = {i for i in own_imports(modules()[name]) if i.startswith("_")}
    # By it hostcall knows its own callables, and asks them why they can't be exported.
    # `call_counted` is a call with an option that only hc.watch has. `PerProcess` is what a
    # forked child starts anew: one hook does that for all. Names that are gone are
    # refused in one way, and so are misspelt options. Threads and waits of all wings
    # have one form. `hc.observe` has the door rewrite programs. An error of `errors` is
    # raised in place of JAX's report.
    allowed = {
        "_core.errors",
        "_core.gone",
        "_core.host_code",
        "_core.process",
        "_core.daemon",
        "_core.suggestions",
        "_core.wait",
    }
    allowed |= {"_api.call", "_jax"}
    doors = (
        "execution",
        "fragments",
        "jaxprs",
        "pauses",
        "places",
        "rewriting",
        "rewritten_programs",
    )
    doors += ("tracing", "user_lines")
    allowed |= {f"_jax.{door}" for door in doors}
    assert private - TOOLS <= allowed


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


def _functions(text: str, ending: str) -> set[str]:
    """Functions whose heads begin a line, by what follows their parameters."""
    qualifiers = "inline|template|static|constexpr|using|struct|class|return"
    parameters = r"\((?:[^(){};]|\([^()]*\))*\)"
    head = rf"^(?!(?:{qualifiers})\b)\w[\w:<>*&, ]*[ *&]([\w:]+){parameters}\s*{ending}"
    return set(re.findall(head, text, re.MULTILINE))


def test_native_functions_are_defined_in_the_folder_that_declares_them():
    sources = [(path, path.read_text()) for path in SOURCES]
    defined = {
        (path.parent.name, name)
        for path, text in sources
        if path.suffix == ".cc"
        for name in _functions(text, r"\{")
    }
    declared = {
        (path.parent.name, name)
        for path, text in sources
        if path.suffix == ".h"
        for name in _functions(text, ";")
    }
    assert len(declared) > 50
    assert declared - defined == set()
    classes = {
        (path.parent.name, name)
        for path, text in sources
        for name in re.findall(
            r"^(?:class|struct)(?: alignas\(\d+\))? (\w+)", text, re.M
        )
    }
    methods = {(there, name.split("::")[0]) for there, name in defined if "::" in name}
    assert methods - classes == set()


# --- The front page -------------------------------------------------------------------

# Faces of names and a docstring; host_callback also says what it has not.
FACES = (
    "buffers",
    "debug",
    "derivatives",
    "errors",
    "monitor",
    "results",
    "testing",
    "typing",
)


def listed(page: str) -> set[str]:
    return set(re.findall(r"\w+", page))


def test_the_front_page_lists_every_public_name():
    import hostcall

    public = {name for name in dir(hostcall) if not name.startswith("_")}
    assert public == {*hostcall.__all__, "print"}
    assert public - listed(hostcall.__doc__ or "") == set()
    for name in public:
        getattr(hostcall, name)


def test_names_that_have_gone_are_told():
    import hostcall

    for name, instead in hostcall._GONE.items():
        assert name not in dir(hostcall)
        module, _, there = instead.rpartition(".")
        if " " not in instead:
            assert getattr(importlib.import_module(module), there) is not None
    with pytest.raises(AttributeError, match=r"is now hostcall\.typing\.Feed"):
        hostcall.Feed
    with pytest.raises(AttributeError, match=r"loky\.get_reusable_executor"):
        hostcall.retrying


def test_names_of_the_modules_are_told_where_they_are():
    import hostcall

    parts = [getattr(hostcall, part) for part in hostcall._PARTS]
    public = {*hostcall.__all__, *hostcall._GONE, "breakpoint", "print"}
    names = {name for part in parts for name in part.__all__} - public
    assert {"SpecError", "sinks", "collect", "status", "check"} <= names
    for name in names:
        with pytest.raises(AttributeError, match=r"\. It is hostcall\.") as caught:
            getattr(hostcall, name)
        *_, part, there = str(caught.value).split(".")
        assert there == name
        assert name in getattr(hostcall, part).__all__
    with pytest.raises(AttributeError, match="no attribute 'nowhere'$"):
        hostcall.nowhere


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
    imports = [a for n in rest if isinstance(n, ast.ImportFrom) for a in n.names]
    # `__getattr__` says of names that are gone what to write instead.
    brought = {a.name for a in imports if a.asname != "__getattr__"}
    assert brought == set(names)
    assert set(names) - listed(ast.get_docstring(module) or "") == set()


def test_what_importing_brings(run_python):
    run_python("""
        import sys, jax
        before = set(sys.modules)
        import hostcall as hc
        brought = {m for m in set(sys.modules) - before if m.startswith("hostcall.")}
        public = {m for m in brought if not m.split(".")[1].startswith("_")}
        assert public == set(), public
        later = ("_host_function", "bridge", "_compat", "_api.object", "_primitives.drop_in")
        for module in later:
            assert not any(m.startswith(f"hostcall.{module}") for m in brought), module
        for name in ("SpecError", "status", "check", "Buffer", "tap_tangent"):
            assert not hasattr(hc, name)
        assert hc.errors.SpecError.__mro__[1] is hc.errors.HostcallError
        from hostcall import *
        assert print is not hc.print and tap is hc.tap and testing is hc.testing
    """)


STUB = {
    node.name: node
    for node in ast.parse((PACKAGE / "_native.pyi").read_text()).body
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
}


def test_the_native_stub_has_the_names_of_the_module():
    assert set(STUB) == {n for n in dir(_native) if not n.startswith("__")}
    for node in STUB.values():
        if not isinstance(node, ast.ClassDef):
            continue
        real = getattr(_native, node.name)
        if issubclass(real, enum.Enum):
            assert _assigned(node) == set(real.__members__), node.name
            continue
        methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        methods = {n for n in methods if not n.startswith("__")}
        assert methods == {n for n in dir(real) if not n.startswith("__")}, node.name


def _signatures() -> dict[str, tuple[ast.FunctionDef, ast.FunctionDef]]:
    """Name -> (the stub's, the module's) of what nanobind knows a signature of.

    mypy's stubtest takes no function of nanobind's for one; nanobind's own tool that
    writes stubs reads the same attribute. Left out are structs: those read their fields
    themselves.
    """
    found = {}
    for name, node in STUB.items():
        whole = getattr(_native, name)
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for each in members:
            if not isinstance(each, ast.FunctionDef):
                continue
            if each.name == "__buffer__" and sys.version_info < (3, 12):
                continue  # Python code can't see that protocol
            real = whole if each is node else whole.__dict__[each.name]
            real = getattr(real, "fget", real)
            for text, *_ in getattr(real, "__nb_signature__", ()):
                if "**kwargs" in text:
                    continue
                text = re.sub(r"\\\d+", "...", text).replace("def (", "def get(")
                (made,) = ast.parse(text + ": ...").body
                assert isinstance(made, ast.FunctionDef)
                found[f"{name}.{each.name}"] = each, made
    return found


SIGNATURES = _signatures()


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_native_stub_has_the_signatures_of_the_module(name):
    stub, real = SIGNATURES[name]
    assert _parameters(stub.args) == _parameters(real.args)
    said, made = (
        [f.returns, *(a.annotation for a in (*f.args.args, *f.args.kwonlyargs))]
        for f in (stub, real)
    )
    for ours, theirs in zip(said, made, strict=True):
        if theirs is not None:  # `self`
            assert ours is not None
            assert _fits(ast.unparse(ours), ast.unparse(theirs))


def test_most_of_the_stub_has_signatures():
    assert len(SIGNATURES) > 50


def _parameters(of: ast.arguments) -> tuple[object, ...]:
    names = [[a.arg for a in each] for each in (of.posonlyargs, of.args, of.kwonlyargs)]
    return *names, of.vararg and of.vararg.arg, len(of.defaults)


def _fits(ours: str, theirs: str) -> bool:
    """Whether a type of the stub is one of the module's, or says more of it."""
    theirs = re.sub(r"hostcall\.(_native\.)?|collections\.abc\.", "", theirs)
    vague = {"object", "object | None", "typing_extensions.CapsuleType"}
    return ours == theirs or theirs in vague or ours.split("[")[0] == theirs


def _assigned(node: ast.ClassDef) -> set[str]:
    lines = [line for line in node.body if isinstance(line, ast.Assign)]
    return {t.id for line in lines for t in line.targets if isinstance(t, ast.Name)}


# Structs of the engine with a value for each field.
FIELDS: dict[str, dict[str, object]] = {
    "Leaf": {
        "dtype": np.dtype(np.float32),
        "shape": (2, 3),
        "bits": 0,
        "is_signed": False,
        "batched": [],
        "convert": None,
        "fill": None,
    },
    "TeamSettings": {"mode": _native.TeamMode.ONCE, "size": 2, "leader": None},
    "CallKind": {"lend": _native.Lend.ARGS},
    "BufferKind": {"aliases": [-1], "debug": False, "address": 0, "status": True},
    "TapKind": {
        "when_full": _native.WhenFull.BLOCK,
        "nested": False,
        "only": (),
        "linked": False,
        "through": True,
        "every_steps": 0,
        "every_ns": 0,
        "sample": 1.0,
        "always": False,
        "batch": 0,
    },
    "FeedKind": {
        "ring": _native.FeedRing(leaves=[8], lanes=1, capacity=1),
        "devices": [],
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_field_of_a_native_struct_is_named(name):
    make, fields = getattr(_native, name), FIELDS[name]
    (init,) = (n for n in STUB[name].body if isinstance(n, ast.FunctionDef))
    assert [a.arg for a in init.args.kwonlyargs] == list(fields)
    make(**fields)
    for field in fields:
        rest = {key: value for key, value in fields.items() if key != field}
        with pytest.raises(TypeError, match=rf"{name}\(\) needs the field '{field}'"):
            make(**rest)
        with pytest.raises(TypeError, match=f"the field '{field}' can't be <object"):
            make(**{**fields, field: object()})
    with pytest.raises(TypeError, match=rf"{name}\(\) has no field 'other'"):
        make(**fields, other=1)


def test_a_number_is_no_enum():
    with pytest.raises(TypeError, match="the field 'mode' can't be 1, of type int"):
        _native.TeamSettings(mode=1, size=2, leader=None)  # type: ignore[arg-type]


def test_a_plan_names_its_fields():
    (init, *_) = (n for n in STUB["Plan"].body if isinstance(n, ast.FunctionDef))
    first, *_ = fields = [a.arg for a in init.args.kwonlyargs]
    given = {}
    for field in fields:  # in the order in which the engine reads them
        with pytest.raises(TypeError, match=rf"Plan\(\) needs the field '{field}'"):
            _native.Plan(**given)
        given[field] = _OF_A_PLAN.get(field)
    with pytest.raises(TypeError, match=r"Plan\(\) has no field 'other'"):
        _native.Plan(**given, other=1)
    with pytest.raises(TypeError, match=f"the field '{first}' can't be None"):
        _native.Plan(**{**given, first: None})


_OF_A_PLAN = {
    "function": print,
    "args": [],
    "results": [],
    "grid": (),
    "form": _native.ResultForm.LEAF,
    "kind": _native.CallKind(lend=_native.Lend.COPY),
    "counters": _native.Counters(),
    "place": 0,
    "text": "",
    "returns_outcome": False,
    "called_by_other_process": False,
    "sends": False,
    "counted": False,
    "inside": _native.Inside.NEVER,
    "keeps_mesh": False,
    "literals": True,
}
