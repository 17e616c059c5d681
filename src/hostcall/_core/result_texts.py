"""What messages say about results that are not what `result=` declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hostcall._core.counted import counted


def a_shape(value: Any, treedef: Any, avals: Sequence[Any]) -> str:
    """What to write if result= looks like a shape, such as (3,), of this array."""
    n = len(avals)
    if not isinstance(value, (np.ndarray, jax.Array)) or value.ndim != n or n == 0:
        return ""
    structure = jax.tree_util.tree_structure
    if treedef not in (structure((0,) * n), structure([0] * n)) or not all(
        aval.shape == () and np.dtype(aval.dtype).kind == "i" for aval in avals
    ):
        return ""
    return (
        f"Is result= meant as a shape? It declares {counted(n, 'integer')}. For an"
        f" array write jax.ShapeDtypeStruct({value.shape}, dtype)"
    )


def instead(have: np.dtype, want: np.dtype) -> str:
    """Says what an array that is not numeric holds, and what to return instead."""
    if have.names:
        fields = ", ".join(map(repr, have.names))
        return (
            f"structured, with the fields {fields}. Return one of them,"
            f" x[{have.names[0]!r}], or declare a result for each"
        )
    if have.kind in "Mm":
        of = "dates" if have.kind == "M" else "durations"
        spans = "(x - x[0])" if have.kind == "M" else "x"
        return f"{of} ({have}). Return seconds, {spans} / np.timedelta64(1, 's')"
    if have.kind == "O":
        return f"Python objects. Return np.asarray(x, '{want}') if they are numbers"
    if have.kind == "V":
        return f"bytes ({have}). Return x.view('{want}') if they hold such numbers"
    return f"strings ({have}). Return np.asarray(x, '{want}') to read them as numbers"


def named(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def shape_hint(got: tuple[int, ...], want: tuple[int, ...]) -> str:
    if want == () and int(np.prod(got)) == 1:
        return "Return x.item() or x.reshape(()) for a scalar"
    if [n for n in got if n != 1] == [n for n in want if n != 1]:
        return f"Return x.reshape({want})"
    return "Change what the function returns, or what result= declares"
