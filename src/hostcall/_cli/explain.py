"""`python -m hostcall explain`: prints the page of an error's code.

The pages are hostcall/explain/CODE.md. The first line of each is "# CODE: its meaning".
"""

from __future__ import annotations

import argparse
import difflib
import importlib.resources
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Prints a page, or the codes with their meanings; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hostcall explain",
        description="Prints the page of an error's code: what happened, why, and what"
        " to do, with a program. Without a code it lists all of them.",
    )
    parser.add_argument("code", nargs="?", help="a code, such as hc-escape")
    code = parser.parse_args(arguments).code
    found = pages()
    if code is None:
        width = max(map(len, found))
        for name, page in found.items():
            print(f"{name:<{width}}  {meaning(page)}")
        return 0
    name = code.strip("[]").lower()
    name = name if name.startswith("hc-") else f"hc-{name}"
    if name not in found:
        near = difflib.get_close_matches(name, found, n=3)
        hint = f"The nearest are {', '.join(near)}. " if near else ""
        print(
            f"hostcall: there is no code {code!r}. {hint}`python -m hostcall explain`"
            " lists all codes",
            file=sys.stderr,
        )
        return 2
    print(found[name], end="")
    return 0


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
