"""Checks of equations that come from a file, before the engine is told of them.

A file may say anything. Options are checked as `hc.call` and `hc.tap` check them, and
the numbers and sizes of operands as their primitives make them. What the checks refuse
is `Malformed`. (The engine compares the bytes of XLA's buffers once more.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, get_type_hints

from hostcall._core.portable import AVALS, Malformed, read_aval, read_record
from hostcall._core.spec import Results, Template
from hostcall._engine.params.call import CallParams
from hostcall._engine.params.equation import Callback
from hostcall._engine.params.feed import FeedParams
from hostcall._engine.params.tap import TapParams

EQUATIONS: dict[str, type] = {"call": CallParams, "tap": TapParams, "feed": FeedParams}

# Options that a text says elsewhere or not at all: the function, or whoever lowers the
# program, knows them better. `keep` is hc.watch's, whose programs don't travel.
_ELSEWHERE = {
    *("callback", "avals", "sharding", "vmap_method", "devices", "device", "keep"),
    *("fn", "template", "results", "fills", "executor", "traced", "cache", "place"),
}


@functools.cache
def options_of(cls: type) -> dict[str, Any]:
    """The options that travel, of an equation or a `Callback`, and their types."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.name not in _ELSEWHERE}


# What the text of an equation says, and the types.
TEXT = {
    "hostcall": int,
    "equation": Literal["call", "tap", "feed"],
    "function": tuple[str, Any],
    "operands": AVALS,
    "template": Template,
    "results": Results,
    "fills": tuple[bytes | None, ...],
    "avals": AVALS,
    "params": Any,
    "callback": Any,
    "parallel": bool,
    "linked": bool,
    "only": tuple[int, ...],
    "team": tuple[Literal["ONCE", "EACH"], int, int | None] | None,
    "mesh": tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]] | None,
    "traced": Any,
    "place": tuple[str, int, str] | None,
}

# What the types don't say, of values other than None.
_MORE: dict[str, Callable[[Any], bool]] = {
    "arrays": lambda value: value not in ("free", "cuda"),
    "lend": lambda value: value != "buffers",
    "timeout": lambda value: value > 0,
    "concurrency": lambda value: value > 0,
    "coalesce": lambda value: value[0] > 0 and value[1] >= 0,
    "levels": lambda value: value >= 0,
    "every": lambda value: 0 < value < 2**31,
    "sample": lambda value: 0 < value <= 1,
    "batch": lambda value: value > 0,
    "leader": lambda value: value >= 0,
    "only": lambda value: all(-1 <= ordinal < 2**31 for ordinal in value),
    "team": lambda value: 0 < value[1] < 2**20 and (value[2] or 0) >= 0,
    "mesh": lambda value: (
        min(value[1], default=1) > 0 and min(value[2], default=0) >= 0
    ),
    "place": lambda value: value[1] >= 0,
}


def read(told: Any) -> dict[str, Any]:
    """What the text of an equation without symbolic sizes says.

    Raises Malformed, and what reading a tree or a text that lacks a part raises.
    """
    found = read_record(told, TEXT)
    kind = found["equation"]
    params = read_record(found["params"], options_of(EQUATIONS[kind]))
    callback = read_record(found["callback"], options_of(Callback))
    for option, value in (found | params | callback).items():
        if value is not None and option in _MORE and not _MORE[option](value):
            raise Malformed(f"the option {option}={value!r}")
    if callback["lend"] and (callback["timeout"] is not None or found["parallel"]):
        raise Malformed("lend= beside timeout= or rows in parallel")
    if callback["coalesce"] and (params["order"] != "pure" or params["levels"]):
        raise Malformed("coalesce= beside effects or whole batches")
    alone = params["order"] == "ordered" or (kind == "tap" and params["rows"] == "each")
    if kind == "tap" and alone and params["batch"] is not None:
        raise Malformed("batch= beside order='ordered' or rows='each'")
    found |= {"params": params, "callback": callback}
    _check_shapes(found, params, kind == "tap")
    return found


def _check_shapes(found: dict[str, Any], params: dict[str, Any], is_tap: bool) -> None:
    operands, grid = found["operands"], params["grid"]
    sizes = params["sizes"] if is_tap else ()
    for shape in (grid, sizes):
        read_aval(["bool", *shape])
    _check_flags("batched", params["batched"], len(operands) if grid else 0, len(grid))
    levels = len(sizes) if is_tap else params["levels"]
    if is_tap:
        _check_flags("flags", params["flags"], levels, len(operands))
    masked, always = int(params["masked"]), int(is_tap and params["always"])
    if len(operands) < masked + always:
        raise Malformed(f"{len(operands)} operands, too few for its masks")
    if always and (operands[-1].dtype != bool or operands[-1].shape):
        raise Malformed(f"always= of {operands[-1]}")
    _check_grid(grid, params["batched"], operands[: len(operands) - always])
    if masked:
        mask = operands[0]
        whole = levels > 0 and mask.ndim > len(grid)  # `Equation.compresses`
        flags = params["batched"][0] if grid else []
        if mask.dtype != bool or (not whole and mask.ndim != sum(flags)):
            raise Malformed(f"where= of {mask}")
    arrays = len(found["template"].keys)
    if arrays != len(operands) - masked - always:
        raise Malformed(f"{len(operands)} operands for {arrays} arguments")
    if is_tap and found["avals"]:
        raise Malformed(f"results {found['avals']} of a tap")
    _check_results(found, 0 if is_tap else levels)


def _check_flags(what: str, flags: Any, rows: int, columns: int) -> None:
    if len(flags) != rows or any(len(each) != columns for each in flags):
        raise Malformed(f"{what}={flags!r}")


def _check_grid(grid: Any, batched: Any, operands: Sequence[Any]) -> None:
    """The leading sizes of each operand are those of the axes that it has."""
    if not grid:
        return
    for operand, flags in zip(operands, batched, strict=False):
        sizes = tuple(size for size, has in zip(grid, flags, strict=True) if has)
        if operand.shape[: len(sizes)] != sizes:
            raise Malformed(f"an operand {operand} in rows of {grid}")


def _check_results(found: dict[str, Any], levels: int) -> None:
    avals, fills, results = found["avals"], found["fills"], found["results"]
    wanted = [len(results.avals), len(results.keys), len(fills)]
    if wanted != [len(avals)] * 3:
        raise Malformed(f"{len(avals)} results with {len(fills)} fills for {wanted}")
    for fill, aval in zip(fills, avals, strict=True):
        if levels > aval.ndim:
            raise Malformed(f"levels={levels} of a result {aval}")
        if fill is None:
            continue
        item = aval.dtype.itemsize
        if len(fill) not in (item, item * math.prod(aval.shape[levels:])):
            raise Malformed(f"a fill of {len(fill)} bytes for {aval}")
        if len(fill) == item and math.prod(aval.shape) * item >= 2**48:
            raise Malformed(f"a fill for {aval}")
