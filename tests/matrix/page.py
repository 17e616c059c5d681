"""Writes docs/matrix.md from the table that test_matrix.py sweeps: `make matrix`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from dtypes import DTYPES
from faces import COLUMNS, FACES
from programs import TRANSFORMATIONS
from table import KEY, OK, Hole, of_dtype, of_transformation

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"

HEAD = """\
# What works where

The first table says what each function of hostcall does under each transformation of JAX, with
each `order=`. The second one says which dtypes it takes. Each cell is tested by programs that are
compared with the same program in plain Python (`tests/matrix`):

- **ok**: the program has the same values, and host code sees the same values, each exactly once.
  The order is the same too, except between devices.
- **twice**: the same, but host code sees each value a second time.
- **numbers**: the same, but host code sees a key as an array of numbers.
- Anything else is an error that is raised before the program runs, with this
  [code](errors.md) or type.

The numbers in brackets lead to the [reasons](#why).

"""

TAIL = """\

The programs are written like this:

- `hc.tap` and `hc.print` have `rows="each"`, drop-ins under `vmap` have `vmap_method="sequential"`.
- The pure `hc.host` has a rule for derivatives in JAX code; the others have none.
- "Beside" a loop means that the function is called in each step, with a carried value that is not
  differentiated, while another one is.
- `hc.feed` gives an item to each row of a `vmap` (`rows=`).
- `hc.buffers.native` is machine code in an `hc.buffers.buffer_callback`.
- The first table's values are float32. The dtypes are tested with each order, and with jit, vmap,
  scan, cond and shard_map in turn: each of these with each dtype, but not with all orders. Other
  transformations do not look at dtypes, or need a derivative, which few dtypes have.
- An order that is not in the first table does not exist: methods of an `hc.Object` and taps have
  effects, so none of them is pure; `hc.feed` is ordered; `hc.tap_through` has no `order=`: it runs if the
  program uses its value.
- `hostcall.host_callback` is not in the tables: its functions are calls and taps, and
  `tests/compat/test_host_callback.py` has their programs.
- Dtypes of 64 bits need `jax_enable_x64`. `key<fry>` is the dtype of `jax.random.key`.

## Go on

[Options](options.md), [which of them do I want](choosing.md), and `vmap` of `cond` and
`while_loop`, where `where=` says which rows call: [call a simulator](calling.md).
"""


def merged(keys: Iterable[str], cells: Callable[[str], tuple[Hole, ...]]) -> dict:
    """Keys with equal cells, in one group: {cells: keys}."""
    groups: dict[tuple[Hole, ...], list[str]] = {}
    for key in keys:
        groups.setdefault(cells(key), []).append(key)
    return groups


def table(rows: list, columns: list, title: str, cell: Callable, notes: list) -> str:
    """A table of Markdown, with equal columns merged, and equal orders of a face."""
    groups = merged(columns, lambda column: tuple(cell(row, column) for row in rows))
    heads = [title, *(", ".join(names) for names in groups.values())]
    lines = [heads, ["---"] * len(heads)]
    shown: dict = {}
    for row in rows:
        cells = tuple(cell(row, names[0]) for names in groups.values())
        shown.setdefault((row[0], cells), []).append(row[1])
    for (face, cells), orders in shown.items():
        whole = not orders[0] or len(orders) == len(FACES[face][0]) == 1
        name = f"`{face}`" + ("" if whole else f" {', '.join(orders)}")
        lines.append([name, *(_cell(hole, notes) for hole in cells)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(hole: Hole, notes: list) -> str:
    if hole is OK:
        return OK.shown
    if hole.why not in notes:
        notes.append(hole.why)
    return f"{hole.shown} ({notes.index(hole.why) + 1})"


def _item(number: str, note: str) -> str:
    """A line of a list, wrapped as the other pages are."""
    indent = " " * len(number)
    return textwrap.fill(f"{number}{note}", 100, subsequent_indent=indent) + "\n"


def text() -> str:
    notes: list[str] = []
    transformed = table(
        COLUMNS,
        list(TRANSFORMATIONS),
        "",
        lambda row, name: of_transformation(*row, name),
        notes,
    )
    typed = table(
        [(face, "") for face in FACES],
        [*DTYPES, KEY],
        "",
        lambda row, dtype: of_dtype(row[0], dtype),
        notes,
    )
    why = "".join(_item(f"{i}. ", note) for i, note in enumerate(notes, 1))
    return f"{HEAD}{transformed}\n{typed}\n## Why\n\n{why}{TAIL}"


if __name__ == "__main__":
    PAGE.write_text(text())
