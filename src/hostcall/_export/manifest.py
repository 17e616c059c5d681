"""The manifest of an exported program: its host code.

A file does not hold it: it is read from the program, so that no file can say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostcall._core.codec import SIZE, Json
from hostcall._core.registered import Name
from hostcall._export.records import name_in
from hostcall._export.texts import Call


@dataclass(frozen=True)
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
        arguments = ", ".join(self.arguments)
        results = ", ".join(self.results)
        times = f", at {self.places} places" if self.places > 1 else ""
        return _on_one_line(
            f"{name}: {self.order} {self.kind}, ({arguments}) -> ({results}){times}"
        )


@dataclass(frozen=True)
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

    def _names(self) -> list[Name]:
        """The registered names that the program needs, each once."""
        names: dict[Name, None] = {}
        for call in self.calls:
            if call.name is not None:  # hc.print has none
                names[Name(call.name, call.version)] = None
        return list(names)

    def __str__(self) -> str:
        platforms = ", ".join(self.platforms)
        head = (
            f"{self.function} for {platforms}, vjp_order={self.vjp_order}, by hostcall"
            f" {self.hostcall} and jax {self.jax}"
        )
        lines = [str(call) for call in self.calls] or ["no host code"]
        return "\n  ".join([_on_one_line(head), *lines])


def _on_one_line(text: str) -> str:
    """The text with escapes for what could hide another line in a terminal: the names
    of functions and of symbolic sizes come from the file.
    """
    return text if text.isprintable() else repr(text)[1:-1]


def described(call: Call, places: int) -> NamedCode:
    """What the manifest says of a call that the program makes at so many places."""
    name = name_in(call.record)
    kind, details = call.record.function
    # For a function with a name the kind of equation says what is done with it.
    if kind == "object":
        kind = f"method {details['method']}"
    elif kind == "registered":
        kind = call.record.equation
    elif kind == "host":
        kind = details["steps"]["kind"]
    operands, results = call.arrays()
    return NamedCode(
        name=name and name.name,
        version=0 if name is None else name.version,
        kind=kind,
        order=call.params.options.order,
        arguments=tuple(map(_shown, operands)),
        results=tuple(map(_shown, results)),
        places=places,
    )


def _shown(array: Json) -> str:
    dtype, *sizes = array
    shown = []
    for size in sizes:
        # A symbolic size is a dict with one entry; see `codec.SIZE`.
        text = size[SIZE] if isinstance(size, dict) else str(size)
        shown.append(text)
    return f"{dtype}[{','.join(shown)}]"
