"""Formats of hc.print: what it accepts is printed as by str.format, or each element."""

from __future__ import annotations

import io
import re
import string

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import hostcall as hc
from fuzz.draw import Draw

VALUES = [1, -2.5, True, 1j, "text", None, [1, 2], {"k": np.ones(2, np.float32)}]
VALUES += [np.float32(3.25), np.arange(3), np.ones((2, 2), np.float32), np.ones(0)]
VALUES += [ml_dtypes.bfloat16(1.5), np.array(True), np.array([1 + 1j], np.complex64)]
FORMATS = ["{}", "{:.2f}", "{0} {0!r:>9}", "{a} {b[0]:{}}", "{{}} {:,}", "{.shape}"]
FORMATS += ["{0[k]} {a!s}", "{:{:{}}}", "{!x}", "{0:+08.3e} {1:x}", "é {} \u2028 {:%}"]


class Lacking(Exception):
    pass


class Fields(string.Formatter):
    """Raises Lacking where a field names no argument, which hc.print must have seen."""

    def get_value(self, key, args, kwargs):
        if key not in (range(len(args)) if isinstance(key, int) else kwargs):
            raise Lacking(key)
        return super().get_value(key, args, kwargs)

    def get_field(self, name, args, kwargs):
        # string.Formatter numbers "{}" but not "{.shape}", which str.format does.
        if name[:1] in (".", "["):
            raise IndexError
        return super().get_field(name, args, kwargs)


def seeds() -> list[bytes]:
    kinds = [
        bytes([2, 1, 9, 1, 2, 1, 3]),
        bytes([3, 0, 5, 7, 0, 0]),
        bytes([1, 10, 0, 0]),
    ]
    return [kind + b"\0" + fmt.encode() for kind in kinds for fmt in FORMATS]


def one(data: bytes) -> None:
    draw = Draw(data)
    values = [draw.choice(VALUES) for _ in range(draw.int(0, 3))]
    named = {name: draw.choice(VALUES) for name in "ab" if draw.bool()}
    fmt = draw.text()
    if re.search(r"\d{4}", fmt):  # wide fields take as much memory as they say
        return
    out = io.StringIO()
    try:
        hc.print(fmt, *values, file=out, **named)
    except hc.errors.SpecError:
        return
    try:
        hc.barrier()
    except Exception as error:  # the printer's own, or one of an object's __format__
        told = error.__cause__ or error
        assert isinstance(told, (ValueError, TypeError, LookupError, AttributeError)), (
            told
        )
        assert not re.search("recursion|switch|expected|unmatched|Single", str(told)), (
            told
        )
        return
    shown = [delivered(value) for value in values]
    by_name = {name: delivered(value) for name, value in named.items()}
    try:
        Fields().vformat(fmt, shown, by_name)
        expected = fmt.format(*shown, **by_name)
    except (TypeError, ValueError, LookupError, AttributeError):
        return  # arrays take no format specs: hc.print applies them to each element
    assert out.getvalue() == expected + "\n", (out.getvalue(), expected)


def delivered(value):
    """What the function of a tap gets for an argument; small scalars become Python's,
    and Python's numbers in containers stay what they are.
    """

    def leaf(part):
        inside = isinstance(value, (list, dict)) and isinstance(part, (int, float))
        if inside or isinstance(part, str):
            return part
        array = np.asarray(jnp.asarray(part))
        return float(array) if array.dtype == ml_dtypes.bfloat16 else array

    return jax.tree.map(leaf, value)
