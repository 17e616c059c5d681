"""What an exported program is and needs: `Exported.manifest`, and how files hold it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

import hostcall
from hostcall._core import registry
from hostcall._core.errors import LoadError
from hostcall._engine import portable
from hostcall._primitives import travel


@dataclasses.dataclass(frozen=True)
class HostCode:
    """Host code that an exported program calls (`Manifest.calls`).

    Attributes:
        name, version: as given to `hc.register`; None and 0 for `hc.print`.
        kind: "call", "tap", "feed", "print" or "method step"; for a `hc.host` function
            "value", or the rule that is called: "forward", "backward", "jvp", ...
        order: "pure", "unordered" or "ordered".
        arguments: dtype and sizes of each array that the call gets, such as
            "float32[b,3]".
        results: the same, of what it returns.
        places: at how many places of the program it is called like this.
    """

    name: str | None
    version: int
    kind: str
    order: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    places: int

    def __str__(self) -> str:
        name = "hc.print" if self.name is None else f"{self.name} v{self.version}"
        times = f", at {self.places} places" if self.places > 1 else ""
        return _on_one_line(
            f"{name}: {self.order} {self.kind}, ({', '.join(self.arguments)}) ->"
            f" ({', '.join(self.results)}){times}"
        )


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What an exported program is and needs (`Exported.manifest`).

    Attributes:
        function: the name of the exported function.
        hostcall, jax: the versions that exported it.
        platforms: where it runs.
        vjp_order: how many derivatives are in the file.
        calls: its host code.
    """

    function: str
    hostcall: str
    jax: str
    platforms: tuple[str, ...]
    vjp_order: int
    calls: tuple[HostCode, ...]

    def __str__(self) -> str:
        lines = "".join(f"\n  {call}" for call in self.calls) or "\n  no host code"
        head = (
            f"{self.function} for {', '.join(self.platforms)}, vjp_order="
            f"{self.vjp_order}, by hostcall {self.hostcall} and jax {self.jax}"
        )
        return _on_one_line(head) + lines


def _on_one_line(text: str) -> str:
    """The text with escapes for what could hide another line in a terminal: the names
    of functions and of symbolic sizes come from the file.
    """
    return text if text.isprintable() else repr(text)[1:-1]


def names_in(manifest: Manifest) -> list[registry.Name]:
    """The registered names that the program needs, each once."""
    names = [
        registry.Name(call.name, call.version)
        for call in manifest.calls
        if call.name is not None
    ]
    return list(dict.fromkeys(names))


def manifest_of(
    exported: jax.export.Exported, vjp_order: int, texts: Sequence[str]
) -> Manifest:
    return Manifest(
        function=exported.fun_name,
        hostcall=hostcall.__version__,
        jax=jax.__version__,
        platforms=tuple(exported.platforms),
        vjp_order=vjp_order,
        calls=tuple(_described(*each) for each in Counter(texts).items()),
    )


def _described(text: str, places: int) -> HostCode:
    told = travel.parse(text)
    kind, more = told["function"]
    if kind == "object":
        kind = f"method {more['method']}"
    (name,) = portable.names_in(told) or [registry.Name("", 0)]
    grid = told["params"]["grid"]
    if kind == "registered":
        kind = told["equation"]
    elif kind == "host":
        kind = more["kind"]
    return HostCode(
        name=name.name or None,
        version=name.version,
        kind=kind,
        order=told["params"]["order"],
        arguments=tuple(_spec(dtype, sizes) for dtype, *sizes in told["operands"]),
        results=tuple(_spec(d, [*grid, *sizes]) for d, *sizes in told["avals"]),
        places=places,
    )


def _spec(dtype: str, sizes: Sequence[Any]) -> str:
    shown = [next(iter(n.values())) if isinstance(n, dict) else str(n) for n in sizes]
    return f"{dtype}[{','.join(shown)}]"


# --- Reading ------------------------------------------------------------------------

# What the JSON of each field is; a list stands for a list of such values.
_CALL: dict[str, Any] = {
    "name": (str, type(None)),
    **{"version": int, "kind": str, "order": str, "places": int},
    **{"arguments": [str], "results": [str]},
}
_MORE = ("objects", "format")  # what is in no Manifest
_HEADER: dict[str, Any] = {
    **{"function": str, "hostcall": str, "jax": str, "vjp_order": int},
    **{"platforms": [str], "calls": [dict], "objects": [dict], "format": int},
}


def read_manifest(header: Any) -> tuple[Manifest, list[Any]]:
    """(manifest, descriptions of the objects) of a file. Raises LoadError."""
    _check(header, _HEADER, "")
    if header["format"] != travel.FORMAT:
        raise LoadError(
            "hostcall: the exported program describes its calls in version"
            f" {header['format']} of hostcall's format, and this hostcall reads version"
            f" {travel.FORMAT}. Load it with hostcall {header['hostcall']}, which wrote"
            " it, or export it again"
        )
    for number, call in enumerate(header["calls"]):
        _check(call, _CALL, f"calls[{number}].")
    calls = []
    for call in header["calls"]:
        arrays = {key: tuple(call[key]) for key in ("arguments", "results")}
        calls.append(HostCode(**{**call, **arrays}))
    fields = {key: value for key, value in header.items() if key not in _MORE}
    fields |= {"platforms": tuple(header["platforms"]), "calls": tuple(calls)}
    return Manifest(**fields), header["objects"]


def _check(told: Any, wanted: dict[str, Any], where: str) -> None:
    if not isinstance(told, dict):
        raise _malformed(f"{where[:-1] or 'it'} is a {type(told).__name__}, no object")
    for key in sorted(told.keys() ^ wanted.keys()):
        what = "is missing" if key in wanted else "is not known here"
        raise _malformed(f"{where}{key} {what}")
    for key, kind in wanted.items():
        value = told[key]
        if isinstance(kind, list):
            fits = isinstance(value, list) and all(type(v) is kind[0] for v in value)
        elif kind is int:
            fits = type(value) is int and value >= 0
        else:
            fits = isinstance(value, kind)
        if not fits:
            raise _malformed(f"{where}{key} is {value!r}")


def _malformed(what: str) -> LoadError:
    return LoadError(
        "hostcall: the manifest of the exported program lacks a field, or has one of"
        f" another type ({what}). Another version of hostcall may have written it"
    )
