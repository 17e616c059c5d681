"""What `hc.watch` says: of a value that is bad, and of a wrong argument."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall.tools._values import need

_ACTIONS = ("raise", "log", "breakpoint")
_LEAVES_AT_MOST = 8  # that the text of an error describes


def text_of(
    name: str, check: Any, values: Any, here: hc.typing.Current, has_history: bool
) -> str:
    """The text of a WatchError."""
    what = "is not finite" if check == "finite" else "did not pass its check"
    row = here.row[0] if len(here.row) == 1 else here.row
    at_row = f", in row {row}" if here.row else ""
    device = "" if here.device is None else f", on {here.device}"
    lines = [
        f"hostcall: {name} {what} at step {here.execution or 0} (executions of this"
        f" place in this run, from 0){at_row}{device}; watched at {here.place}"
    ]
    if callable(check):
        called = getattr(check, "__qualname__", repr(check))
        lines.append(f"  The check is `{called}`.")
    leaves = jax.tree_util.tree_flatten_with_path(values)[0]
    bad = [said for path, leaf in leaves if (said := _told(name, path, leaf))]
    lines += [f"  {said}" for said in bad[:_LEAVES_AT_MOST]]
    if len(bad) > _LEAVES_AT_MOST:
        lines.append(f"  and {len(bad) - _LEAVES_AT_MOST} more leaves")
    before = ", and .history what was before" if has_history else ""
    lines.append(
        f"  The error's .values and .also have the arrays{before}. Write them to a file"
        " with .save(path), and read it with hostcall.tools.load_failure(path)."
    )
    if not has_history:
        lines.append("  To see how it came about, give keep=3, and inputs as also=.")
    return "\n".join(lines)


def _told(name: str, path: Any, leaf: Any) -> str:
    """What is not finite in a leaf, or an empty text."""
    if not can_be_bad(leaf):
        return ""
    array = np.asarray(leaf)
    bad = ~np.isfinite(array)
    if not bad.any():
        return ""
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    at = f", the first is {array[first]} at {list(first)}" if array.ndim else ""
    count = f"{bad.sum()} of {array.size} numbers" if array.ndim else f"{array[()]}"
    kind = f"{array.dtype}{list(array.shape)}"
    return f"{name}{jax.tree_util.keystr(path)}: {count}{at} ({kind})"


def check_options(check: Any, keep: Any, action: Any, name: Any) -> None:
    need(
        check == "finite" or callable(check),
        'check= of hc.watch should be "finite" or a function of the tree that returns a'
        " bool",
        check,
    )
    need(
        isinstance(keep, int) and not isinstance(keep, bool) and keep >= 0,
        "keep= of hc.watch should be a number of executions, an int of 0 or more",
        keep,
    )
    need(
        action in _ACTIONS or callable(action),
        f"action= of hc.watch should be one of {', '.join(map(repr, _ACTIONS))} or a"
        " function of the error",
        action,
    )
    is_name = name is None or isinstance(name, str)
    need(is_name, "name= of hc.watch should be a str", name)


def can_be_bad(leaf: Any) -> bool:
    """Whether a leaf has numbers that may be nan or infinite."""
    try:
        return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))
    except TypeError:  # a text or an object, which hc.call passes on
        return False
