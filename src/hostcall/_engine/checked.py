"""Checks of equations that come from a file, before the engine is told of them.

A file may say anything. Options are checked as `hc.call` and `hc.tap` check them, and
the numbers and sizes of operands as their primitives make them. What the checks refuse
is `Malformed`. (The engine compares the bytes of XLA's buffers once more.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostcall._core.order import ORDERS
from hostcall._core.portable import Malformed, read_bytes, read_dtype, sizes_in
from hostcall._engine.params.tap import WHEN_FULL

# A size with names, such as "2*b + floordiv(n^2, 4)". JAX multiplies powers out.
_SIZE = re.compile(r"(?:[\w\s+*/,()-]|\^[0-9](?![0-9])){1,1000}")

_Check = Callable[[Any], bool]


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_ordinal(value: Any) -> bool:
    return _is_int(value, -1) and value < 2**31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _one_of(*allowed: Any) -> _Check:
    # By type too: 1 == True.
    return lambda value: any(type(value) is type(a) and value == a for a in allowed)


def _int(least: int) -> _Check:
    return lambda value: _is_int(value, least)


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _flags(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is bool for each in value)


def _lists_of_flags(value: Any) -> bool:
    return isinstance(value, list) and all(map(_flags, value))


def _coalesce(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_int(value[0], 1)
        and _is_number(value[1])
        and value[1] >= 0
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


_BOOL = _one_of(False, True)
_PARAMS: dict[str, dict[str, _Check]] = {
    "call": {
        "order": _one_of(*ORDERS),
        "masked": _BOOL,
        "grid": _is_list,
        "batched": _lists_of_flags,
        "levels": _int(0),
        "results_as": _one_of("tree", "leaves", "nothing"),
        "literals": _BOOL,
    },
    "tap": {
        "order": _one_of(*ORDERS),
        "masked": _BOOL,
        "rows": _one_of("batched", "each"),
        "when_full": _one_of(*WHEN_FULL),
        "remat": _one_of("once", "repeat"),
        "on": _one_of("once", "process", "shards"),
        "every": _or_none(lambda value: _is_number(value) and 0 < value < 2**31),
        "sample": _or_none(lambda value: type(value) is float and 0 < value <= 1),
        "batch": _or_none(_int(1)),
        "always": _BOOL,
        "through": _BOOL,
        "leader": _or_none(_int(0)),
        "grid": _is_list,
        "batched": _lists_of_flags,
        "flags": _lists_of_flags,
        "sizes": _is_list,
    },
}
_PARAMS["feed"] = _PARAMS["call"]
_CALLBACK: dict[str, _Check] = {
    "arrays": _one_of("numpy", "jax", "dlpack"),
    "lend": _one_of(False, True, "out"),
    "timeout": _or_none(lambda value: _is_number(value) and value > 0),
    "concurrency": _or_none(_int(1)),
    "coalesce": _or_none(_coalesce),
    "tag": _or_none(lambda value: type(value) is str),
    "fail": _one_of(None, "alone", "together"),
}


def check_options(told: Any) -> None:
    """Checks what does not depend on sizes. Raises Malformed, KeyError, TypeError."""
    kind, params, callback = told["equation"], told["params"], told["callback"]
    if not isinstance(kind, str) or kind not in _PARAMS:
        raise Malformed(f"an equation of kind {kind!r}")
    for given, checks in ((params, _PARAMS[kind]), (callback, _CALLBACK)):
        if unknown := given.keys() - checks.keys():
            raise Malformed(f"the options {sorted(unknown)}")
        for option, check in checks.items():
            if not check(given[option]):
                raise Malformed(f"the option {option}={given[option]!r}")
    for option in ("parallel", "linked"):
        if not _BOOL(told[option]):
            raise Malformed(f"{option}={told[option]!r}")
    only = told["only"]
    if not isinstance(only, list) or not all(_is_ordinal(each) for each in only):
        raise Malformed(f"the devices {only!r}")
    place = told.get("place", ["", 0, ""])
    if [type(part) for part in place] != [str, int, str]:
        raise Malformed(f"the place {place!r}")
    if told["team"] is not None:
        mode, size, leader = told["team"]
        known = mode in ("ONCE", "EACH") and _is_int(size, 1) and size < 2**20
        if not known or not _or_none(_int(0))(leader):
            raise Malformed(f"the team {told['team']!r}")
    for size in sizes_in(told):
        if not isinstance(size, str) or not _SIZE.fullmatch(size):
            raise Malformed(f"the size {size!r}")
    if told["mesh"] is not None:
        names, sizes, ids = told["mesh"]
        fits = all(type(name) is str for name in names)
        fits = fits and all(_is_int(size, 1) for size in sizes)
        if not fits or not all(_is_int(number, 0) for number in ids):
            raise Malformed(f"the mesh {told['mesh']!r}")
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
    _check_axes("batched", params["batched"], 1 if grid else 0, operands, len(grid))
    levels = len(params["flags"]) if is_tap else params["levels"]
    if is_tap:
        _check_levels(params["flags"], params["sizes"], operands)
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


def _check_axes(
    what: str, flags: Any, rows: int, operands: Sequence[Any], axes: int
) -> None:
    if len(flags) != rows * len(operands) or any(len(each) != axes for each in flags):
        raise Malformed(f"{what}={flags!r} for {len(operands)} operands")


def _check_levels(flags: Any, sizes: Any, operands: Sequence[Any]) -> None:
    if len(flags) != len(sizes) or any(len(each) != len(operands) for each in flags):
        raise Malformed(f"flags={flags!r} for {len(operands)} operands")


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
