"""Writes tests/repo/api.txt: every public name with its signature (`make api`).

The text is the same on every Python: annotations stand as the source has them, and what
Python adds to classes by itself is left out.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hostcall as hc
import hostcall.host_callback
from hostcall._cli import explain

HERE = Path(__file__).parent
SNAPSHOT = HERE / "api.txt"
CHANGELOG = HERE.parents[1] / "CHANGELOG.md"
_SECTION = re.compile(
    r"^(Args|Attributes|Cost|Fields|Memory|Raises|Returns|Source|Under transformations)"
    r":(?: |$)",
    re.M,
)
# The module of the bases by which hostcall knows its own objects.
_PRIVATE = "hostcall._core.host_code"
# Made by functions that are listed: their constructors are not for users.
_MADE = (
    "Buffer", "Current", "ExecutionContext", "Exported", "Feed", "HostFunction", "Run"
)  # fmt: skip
_SPECIAL = ("__call__", "__enter__", "__iter__", "__getitem__", "__len__", "__bool__")


def lines() -> list[str]:
    told: dict[int, str] = {}
    # This module is imported as JAX's was: it is no name of the front page.
    modules = [*_modules(hc), hostcall.host_callback]
    found = [line for module in modules for line in _of_module(module, told)]
    return found + [f"code {code}" for code in explain.sections()]


def _modules(module: ModuleType) -> Iterator[ModuleType]:
    yield module
    for name in _names(module):
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            yield from _modules(thing)


def _names(module: ModuleType) -> list[str]:
    if module is hc:
        names = dir(module)  # also those that a star import leaves out
    else:
        here = module.__name__
        own = [
            n for n, v in vars(module).items() if _module_of(v) == here and callable(v)
        ]
        names = getattr(module, "__all__", own)
    return sorted(name for name in names if name[0] != "_")


def _module_of(thing: Any) -> str | None:
    return getattr(thing, "__module__", None)


def _of_module(module: ModuleType, told: dict[int, str]) -> Iterator[str]:
    for name in _names(module):
        thing, full = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.ismodule(thing):
            yield f"{full}: module"
        elif id(thing) in told:
            yield f"{full}: {told[id(thing)]}"
        else:
            told[id(thing)] = full
            yield from _of_thing(thing, full)


def _of_thing(thing: Any, full: str) -> Iterator[str]:
    if inspect.isclass(thing):
        bases = ", ".join(
            "object" if base.__module__ == _PRIVATE else base.__name__
            for base in thing.__bases__
            if base.__module__ != _PRIVATE or len(thing.__bases__) == 1
        )
        yield f"class {full}({bases}){_sections(thing)}"
        if isinstance(code := getattr(thing, "code", None), str):
            yield f"{full}.code = {code!r}"
        yield from _members(thing, full)
    elif callable(thing):
        yield f"{full}{_signature(thing)}{_sections(thing)}"
    else:
        yield f"{full}: {type(thing).__name__}"


def _members(cls: Any, full: str) -> Iterator[str]:
    """What classes of hostcall document: methods, properties and fields."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("hostcall"):
            found |= dict.fromkeys(_attributes(base)) | vars(base)
    if _is_made_by_users(cls):
        yield f"{full}{_signature(cls)}"
    for name, member in sorted(found.items()):
        routine = inspect.unwrap(getattr(member, "__func__", member))
        if name == "code" or (name[0] == "_" and name not in _SPECIAL):
            continue
        if inspect.isroutine(routine):
            if routine.__doc__ or name in _SPECIAL:
                yield f"{full}.{name}{_signature(routine)}{_sections(routine)}"
        elif member is None or getattr(member, "__doc__", None):
            yield f"{full}.{name}"


def _attributes(cls: Any) -> list[str]:
    text = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    section = re.split(r"^\S", text, maxsplit=1, flags=re.M)[0]
    return re.findall(r"^    (\w+):", section, re.M)


def _is_made_by_users(cls: Any) -> bool:
    if cls.__name__ in _MADE or "__init__" not in vars(cls):
        return False
    return not hasattr(cls, "__dataclass_fields__") or "Args" in _sections(cls)


def _signature(thing: Any) -> str:
    try:
        signature = inspect.signature(thing)
    except ValueError:  # of the engine
        return "(...)"
    shown, last = [], None
    for parameter in signature.parameters.values():
        kind = parameter.kind
        if kind == kind.KEYWORD_ONLY and last not in (kind, kind.VAR_POSITIONAL):
            shown.append("*")
        if last == kind.POSITIONAL_ONLY != kind:
            shown.append("/")
        last = kind
        mark = {kind.VAR_POSITIONAL: "*", kind.VAR_KEYWORD: "**"}.get(kind, "")
        text = mark + parameter.name + _annotation(parameter.annotation, ": ")
        if parameter.default is not parameter.empty:
            text += f" = {_value(parameter.default)}"
        shown.append(text)
    if last == inspect.Parameter.POSITIONAL_ONLY:
        shown.append("/")
    return f"({', '.join(shown)}){_annotation(signature.return_annotation, ' -> ')}"


def _annotation(annotation: Any, mark: str) -> str:
    return mark + annotation if isinstance(annotation, str) else ""


def _value(value: Any) -> str:
    shown = repr(value)
    return shown if " at 0x" not in shown and shown[0] != "<" else "..."


def _sections(thing: Any) -> str:
    names = _SECTION.findall(inspect.cleandoc(thing.__doc__ or ""))
    return f"  [{'; '.join(names)}]" if names else ""


def untold(before: list[str], after: list[str], changelog: str) -> list[str]:
    """The names in changed lines that the changelog's first section does not have."""
    section = re.split(r"^## ", changelog, flags=re.M)[1]
    words = set(re.findall(r"[\w-]+", section))
    lines = {*before} ^ {*after}
    changed = [re.match(r"(?:class |code )?([\w.-]+)", line) for line in lines]
    names = {match[1] for match in changed if match}
    # A class that comes, goes or moves takes its members along.
    whole = {
        line.split()[1].partition("(")[0] for line in lines if line[:6] == "class "
    }
    names -= {n for n in names if n.rpartition(".")[0] in whole}
    return sorted(n for n in names if not words & _parts(n))


def _parts(name: str) -> set[str]:
    """What may stand for a name: itself, or for a special method its class."""
    *_, owner, last = ("", *name.split("."))
    return {owner if last.startswith("__") else last}


if __name__ == "__main__":
    new = lines()
    old = SNAPSHOT.read_text().splitlines() if SNAPSHOT.exists() else new
    if missing := untold(old, new, CHANGELOG.read_text()):
        sys.exit(
            f"These changed, and the first section of CHANGELOG.md does not name them:"
            f" {', '.join(missing)}. Say there what changed, then type: make api"
        )
    SNAPSHOT.write_text("".join(f"{line}\n" for line in new))
