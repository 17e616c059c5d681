"""How docstrings of hostcall become reference pages.

An indented paragraph in them is a program or a table: it becomes a literal block, as if
the line before it ended in "::". Fields of named tuples are described in `Attributes:`.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer


def literal_blocks(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    for at, line in enumerate(lines):  # `Buffer`s: RST wants an end behind a mark
        lines[at] = re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line)
    for at in range(len(lines) - 1, 1, -1):
        before = lines[at - 2]
        starts = lines[at].startswith("    ") and not lines[at - 1]
        if starts and before and before[0] != " " and not before.endswith("::"):
            if before.endswith(":"):
                lines[at - 2] += ":"
            else:  # on a line of its own, so that summaries do not have it
                lines[at - 1 : at] = ["", "::", ""]


def skip_fields(
    app: Any, what: str, name: str, thing: Any, skip: bool, options: Any
) -> bool | None:
    text = getattr(thing, "__doc__", None) or ""
    return True if text.startswith("Alias for field number") else None


def one_signature(
    app: Any, what: str, name: str, thing: Any, options: Any, given: str, returns: str
) -> tuple[str, str] | None:
    """Overloads are for type checkers: readers get the one with all that they share."""
    try:
        module = ModuleAnalyzer.for_module(getattr(thing, "__module__", ""))
        module.analyze()
        module.overloads.clear()
    except PycodeError:  # a value, or a module without a source
        pass
    # Sphinx writes Callable[..., Any] so.
    return given and (given.replace("[[...]", "[..."), returns)


def setup(app: Any) -> dict[str, bool]:
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", literal_blocks, priority=100)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-signature", one_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
