"""The layers of the package: imports go downwards only, and one file opens JAX."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "hostcall"

# Lower layers know nothing of higher ones. Within a layer imports are free of rings.
LAYERS: list[tuple[str, ...]] = [
    ("_native", "_jax", "_interpreter"),
    ("_config", "_where", "_frames", "_errors", "_reraise"),
    (
        "_order",
        "_spec",
        "_coerce",
        "_dlpack",
        "_host_device",
        "_pools",
        "_executors",
        "_workers",
        "_rows",
        "_collectors",
        "_captured",
        "_mistakes",
        "_tap_failures",
        "_delivery",
        "_watcher",
        "_lifecycle",
        "_fork",
        "_job",
        "_object_group",
        "_object_spec",
    ),
    (
        "_callback",
        "_context",
        "_compress",
        "_tap_info",
        "_drop_in",
        "_buffers",
        "_device_views",
        "_guards",
        "_handlers",
        "_targets",
        "_throttle",
    ),
    (
        "_primitives",
        "_primitives.across",
        "_primitives.emit",
        "_primitives.parts",
        "_primitives.call",
        "_primitives.call.primitive",
        "_primitives.call.batching",
        "_primitives.call.lowering",
        "_primitives.tap",
        "_primitives.tap.primitive",
        "_primitives.tap.derivatives",
        "_primitives.tap.shards",
        "_primitives.tap.lowering",
        "_primitives.drop_in",
        "_primitives.drop_in.primitive",
        "_primitives.drop_in.parts",
        "_primitives.drop_in.lowering",
        "_primitives.buffer",
        "_primitives.buffer.primitive",
        "_primitives.buffer.lowering",
    ),
    ("_call", "_sync", "_tap", "_print", "_collect", "_callbacks", "debug"),
    (
        "_host_function",
        "_host_function.primitive",
        "_host_function.batching",
        "_host_function.derivatives",
        "_host_function.rules",
        "_host_function.residuals",
        "_host_function.results",
        "_host_function.trees",
        "_host_function.steps",
        "_host_function.parts",
        "_host_function.linear",
        "_host_function.pairs",
        "_host_function.calls",
        "_host_function.method",
        "_host_function.function",
        "_host_function.host",
        "_host_function.difference_error",
        "_host_function.differences",
    ),
    ("_buffer", "_object", "_check", "_checks", "_check_slopes"),
    (
        "bridge",
        "bridge._torch",
        "bridge._torch_code",
        "bridge._torch_function",
        "bridge._torch_host",
        "bridge._torch_shapes",
        "bridge._torch_tensors",
        "bridge._programs",
        "bridge._jax",
        "bridge._jax_programs",
        "bridge._autograd",
        "bridge._autograd_programs",
        "bridge._value_and_grad",
        "bridge._sympy",
        "bridge._sympy_code",
    ),
    ("_hooks",),
    ("_outside_call",),
    ("host_callback",),
    ("_patch",),
    ("",),  # hostcall/__init__.py
    ("_demo", "_run"),
    ("_demo_bessel",),
    ("_demo_lynx", "_demo_sunspots"),
    ("_demo_jobs",),
    ("__main__",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


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


def test_every_module_has_a_layer():
    assert set(modules()) - set(LEVEL) == set()


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_downwards(name):
    for other in own_imports(modules()[name]):
        assert LEVEL[other] <= LEVEL[name], f"{name} imports {other}, which is above"


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


@pytest.mark.parametrize("name", sorted(set(modules()) - {"_jax"}))
def test_only_one_file_opens_jax(name):
    private = {
        i for i in imports(modules()[name]) if i.startswith(("jax._src", "jaxlib"))
    }
    assert private == set()


TOOLS = {name for name in LEVEL if LEVEL[name] > LEVEL[""]}


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_tools_use_public_names_only(name):
    if name not in modules():
        pytest.skip(f"{name} is not part of this checkout")
    private = {i for i in own_imports(modules()[name]) if i.startswith("_")}
    assert private - TOOLS == set()


def test_the_front_page_lists_every_public_name():
    import hostcall

    for name in hostcall.__all__:
        assert name in (hostcall.__doc__ or ""), f"{name} is not on the front page"


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
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent.parent / "native").glob("*.*")]
    long = {p.name: n for p in files if (n := len(p.read_text().splitlines())) > 400}
    # The door to JAX is one file on purpose.
    assert set(long) <= {"_jax.py"}, long
