"""What an exported program is and needs: `Exported.manifest`.

A file does not hold it: it is read from the program, so that no file can say otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hostcall._core import registry
from hostcall._core.portable import Told
from hostcall._engine import portable


@dataclasses.dataclass(frozen=True)
class NamedCode:
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
    calls: tuple[NamedCode, ...]

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


def described(told: Told, places: int) -> NamedCode:
    """What a call is, given what its text says."""
    kind, more = told["function"]
    (name,) = portable.names_in(told) or [registry.Name("", 0)]
    grid = told["params"]["grid"]
    if kind == "object":
        kind = f"method {more['method']}"
    elif kind == "registered":
        kind = told["equation"]
    elif kind == "host":
        kind = more["kind"]
    return NamedCode(
        name=name.name or None,
        version=name.version,
        kind=kind,
        order=told["options"]["order"],
        arguments=tuple(_spec(dtype, sizes) for dtype, *sizes in told["operands"]),
        results=tuple(_spec(d, [*grid, *sizes]) for d, *sizes in told["avals"]),
        places=places,
    )


def _spec(dtype: str, sizes: Sequence[Any]) -> str:
    shown = [next(iter(n.values())) if isinstance(n, dict) else str(n) for n in sizes]
    return f"{dtype}[{','.join(shown)}]"
