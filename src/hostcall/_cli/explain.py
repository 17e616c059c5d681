"""Prints an error's page: what happened, why, and what to do, with a program.

The pages are hostcall/explain/CODE.md. The first line of each is "# CODE: its meaning".
"""

from __future__ import annotations

import argparse
import difflib
import importlib.resources
import importlib.util
import sys

SHORT = "print the page of an error's code, or list all codes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "code", nargs="?", help="a code, such as hc-escape (default: list all codes)"
    )


def main(options: argparse.Namespace) -> int:
    """Prints a page, or the codes with their meanings; returns the exit status."""
    code, found = options.code, pages()
    if code is None:
        width = max(map(len, found))
        for name, page in found.items():
            print(f"{name:<{width}}  {meaning(page)}")
        return 0
    name = "hc-" + code.strip("[]").lower().removeprefix("hc-")
    if name not in found:
        near = difflib.get_close_matches(name, found, n=3)
        hint = f"The nearest are {', '.join(near)}. " if near else ""
        options.refuse(
            f"there is no code {code!r}. {hint}Without a code, all are listed"
        )
    _show(found[name])
    return 0


def _show(page: str) -> None:
    """Prints a page: rendered on a terminal where rich is installed, else as it is."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        markdown = importlib.import_module("rich.markdown").Markdown(page)
        importlib.import_module("rich.console").Console().print(markdown)
    else:
        print(page, end="")


def pages() -> dict[str, str]:
    """The pages by their codes, in the order of the alphabet."""
    folder = importlib.resources.files("hostcall") / "explain"
    texts = {
        file.name.removesuffix(".md"): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.endswith(".md")
    }
    return dict(sorted(texts.items()))


def meaning(page: str) -> str:
    """The meaning of a code, which its page's first line gives."""
    return page.partition("\n")[0].partition(": ")[2]
