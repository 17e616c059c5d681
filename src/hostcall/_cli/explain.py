"""Prints what an error's code means: what happened, why, what to do, with a program.

The texts are the files hostcall/explain/*.md, one for each kind of mistake. A code has
a section in one of them: its heading is the code, and its first sentence the meaning.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.resources
import importlib.util
import re
import sys

SHORT = "print what an error's code means, or list all codes"

# From a heading that is a code to the next heading, or to the end of the file.
_SECTION = re.compile(r"^## (hc-[a-z0-9-]+)\n.*?(?=^## |\Z)", re.M | re.S)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "code", nargs="?", help="a code, such as hc-escape (default: list all codes)"
    )


def main(options: argparse.Namespace) -> int:
    """Prints a section, or the codes with their meanings; returns the exit status."""
    by_code = sections()
    if options.code is None:
        width = max(map(len, by_code))
        for name, section in by_code.items():
            print(f"{name:<{width}}  {meaning(section)}")
        return 0
    # As it stands in a message, "[hc-escape]", or only its last words.
    name = "hc-" + options.code.strip("[]").lower().removeprefix("hc-")
    if name not in by_code:
        near = difflib.get_close_matches(name, by_code, n=3)
        hint = f"The nearest are {', '.join(near)}. " if near else ""
        # This ends the process.
        options.refuse(
            f"there is no code {options.code!r}. {hint}Without a code, all are listed"
        )
    _show(by_code[name])
    return 0


def _show(section: str) -> None:
    """Prints a section: rendered on a terminal if rich is installed, else as it is."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        markdown = importlib.import_module("rich.markdown").Markdown(section)
        importlib.import_module("rich.console").Console().print(markdown)
    else:
        print(section, end="")


def sections() -> dict[str, str]:
    """The sections by their codes, in the order of the alphabet."""
    folder = importlib.resources.files("hostcall") / "explain"
    texts = {}
    for file in folder.iterdir():
        if file.name.endswith(".md"):
            for match in _SECTION.finditer(file.read_text(encoding="utf-8")):
                texts[match[1]] = match[0].rstrip() + "\n"
    return dict(sorted(texts.items()))


def meaning(section: str) -> str:
    """The meaning of a code, which its section's first sentence gives."""
    _, first_paragraph, *_ = section.split("\n\n")  # the heading is before it
    return first_paragraph.removesuffix(".")
