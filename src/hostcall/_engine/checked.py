"""Checks of equations that come from a file, before the engine is told of them.

A file may say anything. Options are checked as `hc.call` and `hc.tap` check them, and
the numbers and sizes of operands as their primitives make them. What the checks refuse
is `Malformed`. (The engine compares the bytes of XLA's buffers once more.)
"""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from hostcall._core.portable import Malformed, read_bytes, read_dtype, sizes_in
from hostcall._engine.params.call import CallParams
from hostcall._engine.params.equation import Callback
from hostcall._engine.params.feed import FeedParams
from hostcall._engine.params.tap import TapParams

# A size with names, such as "2*b + floordiv(n^2, 4)". JAX multiplies powers out.
_SIZE = re.compile(r"(?:[\w\s+*/,()-]|\^[0-9](?![0-9])){1,1000}")

EQUATIONS: dict[str, type] = {"call": CallParams, "tap": TapParams, "feed": FeedParams}

# Options that do not travel: the function, or whoever lowers the program, knows them
# better. `keep` is hc.watch's, whose programs don't travel.
_STAY = {
    *("callback", "avals", "sharding", "vmap_method", "devices", "device", "keep"),
    *("fn", "template", "results", "fills", "executor", "traced", "cache", "place"),
}


@functools.cache
def options_of(cls: type) -> dict[str, Any]:
    """The options that travel, of an equation or a `Callback`, and their types."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.name not in _STAY}


# What a text says besides the options, arrays and trees.
_OTHERS = {
    "parallel": bool,
    "linked": bool,
    "only": tuple[int, ...],
    "team": tuple[Literal["ONCE", "EACH"], int, int | None] | None,
    "mesh": tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]] | None,
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
    "only": lambda value: all(-1 <= ordinal < 2**31 for ordinal in value),
    "team": lambda value: 0 < value[1] < 2**20 and (value[2] or 0) >= 0,
    "mesh": lambda value: (
        min(value[1], default=1) > 0 and min(value[2], default=0) >= 0
    ),
    "place": lambda value: value[1] >= 0,
}


def _fits(value: Any, hint: Any, sizes: bool) -> bool:
    """Whether a value has a type, as JSON has it: a list for a tuple.

    1 is not True, and a number is finite. With `sizes`, an int may be a symbolic one.
    """
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if kind in (Union, types.UnionType):
        return any(_fits(value, each, sizes) for each in inner)
    if kind is tuple:
        if not isinstance(value, list):
            return False
        if inner[-1] is ...:
            inner = (inner[0],) * len(value)
        pairs = zip(value, inner, strict=False)
        return len(value) == len(inner) and all(_fits(*pair, sizes) for pair in pairs)
    if hint is int:
        is_size = sizes and isinstance(value, dict) and bool(sizes_in(value))
        return is_size or _is_int(value, -(2**63))
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**63


def _check(given: Any, options: dict[str, Any]) -> None:
    for option, hint in options.items():
        value = given[option]
        fits = _fits(value, hint, option in ("grid", "sizes"))
        if fits and value is not None and option in _MORE:
            fits = _MORE[option](value)
        if not fits:
            raise Malformed(f"the option {option}={value!r}")


def check_options(told: Any) -> None:
    """Checks what does not depend on sizes. Raises Malformed, KeyError, TypeError."""
    kind, params, callback = told["equation"], told["params"], told["callback"]
    if not isinstance(kind, str) or kind not in EQUATIONS:
        raise Malformed(f"an equation of kind {kind!r}")
    for given, cls in ((params, EQUATIONS[kind]), (callback, Callback)):
        options = options_of(cls)
        if unknown := given.keys() - options.keys():
            raise Malformed(f"the options {sorted(unknown)}")
        _check(given, options)
    _check(told, _OTHERS)
    if "place" in told:
        _check(told, {"place": tuple[str, int, str]})
    for size in sizes_in(told):
        if not isinstance(size, str) or not _SIZE.fullmatch(size):
            raise Malformed(f"the size {size!r}")
    if callback["lend"] and (callback["timeout"] is not None or told["parallel"]):
        raise Malformed("lend= beside timeout= or rows in parallel")
    if callback["coalesce"] and (params["order"] != "pure" or params["levels"]):
        raise Malformed("coalesce= beside effects or whole batches")
    alone = params["order"] == "ordered" or (kind == "tap" and params["rows"] == "each")
    if kind == "tap" and alone and params["batch"] is not None:
        raise Malformed("batch= beside order='ordered' or rows='each'")


def check_shapes(told: Any) -> None:
    """Checks sizes, all of which are known. Raises Malformed, KeyError, TypeError."""
    is_tap, params = told["equation"] == "tap", told["params"]
    operands, grid = told["operands"], params["grid"]
    every = [operands, told["avals"], [["bool", *grid]]]
    every += [[["bool", *params["sizes"]]]] if is_tap else []
    for dtype, *shape in (each for avals in every for each in avals):
        if not isinstance(dtype, str) or not all(_is_int(n, 0) for n in shape):
            raise Malformed(f"the shape {shape!r} of dtype {dtype!r}")
        if math.prod(max(n, 1) for n in shape) * read_dtype(dtype).itemsize > 2**60:
            raise Malformed(f"the shape {shape!r}, too large for an array")
    _check_flags("batched", params["batched"], len(operands) if grid else 0, len(grid))
    levels = 0 if is_tap else params["levels"]
    if is_tap:
        levels = len(params["sizes"])
        _check_flags("flags", params["flags"], levels, len(operands))
    masked, always = int(params["masked"]), int(is_tap and params["always"])
    if len(operands) < masked + always:
        raise Malformed(f"{len(operands)} operands, too few for its masks")
    if always and operands[-1] != ["bool"]:
        raise Malformed(f"always= of {operands[-1]!r}")
    _check_grid(grid, params["batched"], operands[: len(operands) - always])
    if masked:
        dtype, *shape = operands[0]
        whole = levels > 0 and len(shape) > len(grid)  # `Equation.compresses`
        flags = params["batched"][0] if grid else []
        if dtype != "bool" or (not whole and len(shape) != sum(flags)):
            raise Malformed(f"where= of {operands[0]!r}")
    arrays = sum(not isinstance(mark, dict) for mark in told["template"][1])
    if arrays != len(operands) - masked - always:
        raise Malformed(f"{len(operands)} operands for {arrays} arguments")
    if is_tap and told["avals"]:
        raise Malformed(f"results {told['avals']!r} of a tap")
    _check_results(told, 0 if is_tap else params["levels"])


def _check_flags(what: str, flags: Any, rows: int, columns: int) -> None:
    if len(flags) != rows or any(len(each) != columns for each in flags):
        raise Malformed(f"{what}={flags!r}")


def _check_grid(grid: Any, batched: Any, operands: Sequence[Any]) -> None:
    """The leading sizes of each operand are those of the axes that it has."""
    if not grid:
        return
    for (_, *shape), flags in zip(operands, batched, strict=False):
        sizes = [size for size, has in zip(grid, flags, strict=True) if has]
        if shape[: len(sizes)] != sizes:
            raise Malformed(f"an operand of shape {shape} in rows of {grid}")


def _check_results(told: Any, levels: int) -> None:
    avals, fills = told["avals"], told["fills"]
    wanted = [len(told["results"][1]), len(told["results"][2])]
    if wanted != [len(avals)] * 2 or len(fills) != len(avals):
        raise Malformed(f"{len(avals)} results with {len(fills)} fills for {wanted}")
    for fill, (dtype, *shape) in zip(fills, avals, strict=True):
        if levels > len(shape):
            raise Malformed(f"levels={levels} of a result of shape {shape}")
        if fill is None:
            continue
        size = len(read_bytes(fill) or b"")
        item = read_dtype(dtype).itemsize
        if size not in (item, item * math.prod(shape[levels:])):
            raise Malformed(f"a fill of {size} bytes for {dtype}{shape}")
        if size == item and np.prod(shape, dtype=object) * item >= 2**48:
            raise Malformed(f"a fill for {dtype}{shape}")
