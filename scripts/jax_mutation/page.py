"""Writes the tables of docs/design/jax_boundary.md: what is needed, and what became of
each mutant (`make jax-mutation`). What is replaced stands on a page for users.

    page.py     the first two, with the outcomes that the page has already
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import mutants

PAGE = mutants.ROOT / "docs" / "design" / "jax_boundary.md"
_MARK = "<!-- {}: written by scripts/jax_mutation -->"


def _put(text: str, name: str, table: str) -> str:
    begin, end = _MARK.format(name), _MARK.format(f"end of {name}")
    before, _, rest = text.partition(begin)
    _, _, behind = rest.partition(end)
    assert rest, f"the page has no mark {begin}"
    return f"{before}{begin}\n\n{table}\n\n{end}{behind}"


def needed() -> str:
    needs, _ = mutants.tables()
    lines = ["| part | names | why nothing public will do | in |", "|---|---|---|---|"]
    for part in needs.Part:
        for need in needs.NEEDS:
            if need.part is not part:
                continue
            home = needs.MODULES[need.module].removeprefix("jax._src.")
            names = [f"`{home}.{name}`" for name in need.names.split()] or [f"`{home}`"]
            shown = ", ".join(names)
            since = f"{need.since} on" if need.since else ""
            until = f"up to {need.until}" if need.until else ""
            within = ", ".join(filter(None, (since, until))) or "all"
            lines.append(f"| {part.value} | {shown} | {need.why} | {within} |")
    return "\n".join(lines)


def replaced() -> str:
    _, patches = mutants.tables()
    lines = ["| what | with hostcall, it | installed at | for |", "|---|---|---|---|"]
    for patch in (*patches.PATCHES, *patches.PATCHED):
        when = patch.when.value if patch.when else "`hc.patch_jax`, until its end"
        row = f"`{patch}`", patch.does, when, patch.part.value
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def mutated(outcomes: dict[str, str]) -> str:
    """A row for each outcome: mutants with equal ones share it."""
    rows: dict[str, list[str]] = {}
    for key, text in outcomes.items():
        path, *name, kind = key.split(" ")
        full = ".".join([path.removeprefix("jax._src."), *filter(None, name)])
        what = f"`{full.replace(':', '.')}` ({kind})"
        rows.setdefault(text, []).append(what)
    lines = ["| what becomes of 32 programs | of JAX (change) |", "|---|---|"]
    lines += [f"| {text} | {', '.join(names)} |" for text, names in rows.items()]
    count = f"{len(outcomes)} of {len(mutants.mutants())} changes have been tried."
    return "\n".join([count, "", *lines])


def write(outcomes: dict[str, str] | None = None) -> None:
    text = PAGE.read_text()
    text = _put(text, "needed", needed())
    if outcomes is not None:
        text = _put(text, "mutants", mutated(outcomes))
    PAGE.write_text(text)
    users = mutants.ROOT / "docs" / "what_changes_in_jax.md"
    users.write_text(_put(users.read_text(), "replaced", replaced()))


def is_current() -> bool:
    """Whether the pages have the tables of the source."""
    page, users = PAGE.read_text(), (PAGE.parents[1] / "what_changes_in_jax.md")
    return needed() in page and replaced() in users.read_text()


def has_mutant(name: str) -> bool:
    return bool(re.search(rf"`[\w.]*{re.escape(name)}`", PAGE.read_text()))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    write()
