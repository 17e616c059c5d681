"""How docstrings of hostcall become reference pages.

An indented paragraph in them is a program or a table: it becomes a literal block, as if
the line before it ended in "::". Fields of named tuples are described in `Attributes:`.
A sentence at the end of a section of entries is a paragraph, and no entry. What is
private to hostcall is named by its public name, or by what it is.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer

import hostcall as hc

# Sections whose entries are "name: text", and what such a name looks like.
_WORDS = r"[\w.*]+(?: [\w.]+)*(?:, [\w.*]+(?: [\w.]+)*)*"
_ENTRIES = {
    "Args:": re.compile(r"\*{0,2}\w+(?:, \*{0,2}\w+)*: "),
    "Attributes:": re.compile(r"\w+(?:, \w+)*: "),
    "Fields:": re.compile(r"\w+(?:, \w+)*: "),
    "Raises:": re.compile(r"[\w.]+(?:, [\w.]+)*: "),
    "Under transformations:": re.compile(rf"{_WORDS}: "),
}
# What a signature says in place of a name of hostcall's own that is not public.
_SHOWN = {
    "Factory": "Callable[..., Any]",
    "NativeFunction": "Callable[..., None]",
    "Patch": "ContextManager[object]",
    "Rows": "Literal['batched', 'each']",
    "To": "Callable[[Record, Any], object] | Recorder | Callable[..., object] | None",
}
_PRIVATE = re.compile(r"\b(?:hostcall|jaxlib)(?:\.\w+)*\._\w+(?:\.\w+)*")


def literal_blocks(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    # `Buffer`s: RST wants an end behind a mark. From the front, so that the mark that
    # ends one name is not taken for the one that begins another.
    text = re.sub(r"(``[^`]+``|`[^`]+`)(?=(\w)?)", _ended, "\n".join(lines))
    lines[:] = _sections(text.split("\n"))
    for at in range(len(lines) - 1, 1, -1):
        before = lines[at - 2]
        starts = lines[at].startswith("    ") and not lines[at - 1]
        if starts and before and before[0] != " " and not before.endswith("::"):
            if before.endswith(":"):
                lines[at - 2] += ":"
            else:  # on a line of its own, so that summaries do not have it
                lines[at - 1 : at] = ["", "::", ""]


def _ended(mark: re.Match[str]) -> str:
    return mark[1] + "\\ " * (mark[2] is not None)


def _sections(lines: list[str]) -> list[str]:
    """The docstring, whose sections have only what napoleon takes for entries."""
    made: list[str] = []
    at = 0
    while at < len(lines):
        head = lines[at]
        end = at + 1
        while end < len(lines) and (not lines[end] or lines[end].startswith("    ")):
            end += 1
        body = lines[at + 1 : end]
        if head == "Returns:" and body:
            # A text, not "type: text": napoleon takes what stands before a colon for
            # the type, and there is nothing before this one.
            made += [head, f"    : {body[0].strip()}", *body[1:]]
        elif head in _ENTRIES:
            made += _entries(head, body)
        else:
            made.append(head)
            end = at + 1
        at = end
    return made


def _entries(head: str, body: list[str]) -> list[str]:
    """A section, and behind it as a paragraph the sentence that it ends with."""
    for at, line in enumerate(body):
        starts = line.startswith("    ") and not line.startswith("     ")
        if starts and not _ENTRIES[head].match(line[4:]):
            sentence = [text.strip() for text in body[at:]]
            if at == 0:
                return [f"{head} {sentence[0]}", *sentence[1:], ""]
            return [head, *body[:at], "", *sentence, ""]
    return [head, *body]


@functools.cache
def _public_names() -> dict[str, str]:
    """The public name of each class that is defined in a private module."""
    found = {}
    modules = [getattr(hc, name) for name in dir(hc) if name[0] != "_"]
    for module in (hc, *filter(inspect.ismodule, modules)):
        for name in getattr(module, "__all__", dir(module)):
            thing = getattr(module, name, None)
            if inspect.isclass(thing):
                full = f"{thing.__module__}.{thing.__qualname__}"
                found[full] = f"{module.__name__}.{name}"
    return {**found, "jaxlib._jax.Device": "jax.Device"}


def public_types(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """The types of attributes, which napoleon takes from annotations."""
    known = _public_names()
    for at in range(len(lines) - 1, -1, -1):
        if not re.match(r" *:(?:var)?type ", lines[at]):
            continue
        named = [known.get(found[0]) for found in _PRIVATE.finditer(lines[at])]
        if None in named:
            del lines[at]  # its text says what it is
        else:
            names = iter(named)
            lines[at] = _PRIVATE.sub(lambda _, names=names: next(names), lines[at])


def skip_fields(
    app: Any, what: str, name: str, thing: Any, skip: bool, options: Any
) -> bool | None:
    text = getattr(thing, "__doc__", None) or ""
    return True if text.startswith("Alias for field number") else None


def one_signature(
    app: Any, what: str, name: str, thing: Any, options: Any, given: str, returns: str
) -> tuple[str | None, str | None]:
    """Overloads are for type checkers: readers get the one with all that they share."""
    try:
        module = ModuleAnalyzer.for_module(getattr(thing, "__module__", ""))
        module.analyze()
        module.overloads.clear()
    except PycodeError:  # a value, or a module without a source
        pass
    return _shown(given), _shown(returns)


def _shown(signature: str | None) -> str | None:
    if signature is None:
        return None
    signature = signature.replace("[[...]", "[...")  # Sphinx writes Callable[..., x] so
    names = re.compile(rf"(?:~?(?:\w+\.)+|\b)({'|'.join(_SHOWN)})\b")
    return names.sub(lambda found: _SHOWN[found[1]], signature)


def setup(app: Any) -> dict[str, bool]:
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", literal_blocks, priority=100)
    app.connect("autodoc-process-docstring", public_types, priority=900)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-signature", one_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
