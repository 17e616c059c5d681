"""The codes of errors, such as `hc-escape`, and the line that ends a message with one.

`python -m hostcall explain hc-escape` prints the page of a code, which is the file
docs/errors/hc-escape.md. A message shows one code, as its last line, also if it
quotes another message with a code (docs/design/errors.md).
"""

from __future__ import annotations

import re

# Compiled when a message is first read, not at import.
_LINE = r"\n?\[(hc-[a-z0-9-]+)\] python -m hostcall explain \1(?![a-z0-9-])"


def line(code: str) -> str:
    """The last line of a message with this code."""
    return f"[{code}] python -m hostcall explain {code}"


def ended(text: str, code: str) -> str:
    """The text with the line of this code at its end, and no other such line."""
    return f"{without(text)}\n{line(code)}".lstrip("\n")


def without(text: str) -> str:
    """The text without lines of codes."""
    return re.sub(_LINE, "", text)


def code_in(text: str) -> str | None:
    """The code of a text, the last one if it has more lines of codes."""
    found: list[str] = re.findall(_LINE, text)
    return found[-1] if found else None
