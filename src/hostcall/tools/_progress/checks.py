"""The checks of what `hc.progress` is given. They run while a program is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall.tools._values import need


def check(
    step: Any, total: Any, initial: Any, bar: Any, rows: Any, metrics: dict[str, Any]
) -> None:
    counter = "the x of a scan over jnp.arange(n)"
    if step is None:
        counter += " (that of hc.progress.scan, in place of xs=None)"
    _need(
        _is_scalar(step, jnp.integer),
        "the step should be an integer scalar, the loop's counter: the index of a"
        f" fori_loop, or {counter}",
        step,
    )
    _need(
        total is None or _is_scalar(total, jnp.integer),
        "total= should be an int or an integer scalar, the number of steps, or None if"
        " it is not known",
        total,
    )
    _need(
        type(initial) is int,
        "initial= should be an int, the number of the first step, which is part of the"
        " compiled program",
        initial,
    )
    _need(
        rows in ("batched", "each"),
        "rows= should be 'batched' (one bar for the batch) or 'each' (a bar for each"
        " row)",
        rows,
    )
    _need(
        bar == "auto" if isinstance(bar, str) else callable(bar),
        "bar= should be 'auto' (tqdm), or a function that returns a bar",
        bar,
    )
    for name, value in metrics.items():
        _refuse_options_of_others(name, value, total)
        _need(
            isinstance(value, str)
            or _is_scalar(value, jnp.integer, jnp.floating, jnp.bool_),
            "keywords that are not options of hc.progress are metrics, and the metric"
            f" {name}= should be a real scalar, such as x.mean(), or a text",
            value,
        )
    if isinstance(bar, str):
        _check_package()


# Options of hc.tap and of tqdm whose names are hardly those of metrics.
_OF_TAPS = ("always", "arrays", "on", "order", "remat", "when_full", "where")
_OF_TQDM: tuple[str, ...] = ("ascii", "bar_format", "color", "colour", "leave")
_OF_TQDM += ("dynamic_ncols", "ncols", "nrows", "unit_divisor", "unit_scale")
_INTERVALS = ("maxinterval", "mininterval", "miniters")


def _refuse_options_of_others(name: str, value: Any, total: Any) -> None:
    """Refuses what would be shown as a metric, and was meant as an option."""
    # An array is a metric by any name, but for a mask.
    if name != "where" and isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return
    written = type(value) in (bool, int, float, str)
    if name in _OF_TAPS:
        what = "an option of hc.tap, and hc.progress can't take it"
        instead = "Leave it out; every= says how often the bar is drawn"
    elif name in _INTERVALS or (name == "sample" and type(value) is float):
        what = "an option of hc.tap" if name == "sample" else "an option of tqdm"
        instead = "Write every=, an interval in seconds (a float) or in steps (an int)"
    elif name in _OF_TQDM:
        said = f"{name.replace('color', 'colour')}={repr(value) if written else '...'}"
        what = "an option of tqdm"
        instead = f"Write bar=functools.partial(tqdm.tqdm, {said})"
    elif name == "disable":
        what = "an option of tqdm"
        instead = "Set HOSTCALL_PROGRESS=0 in the environment to run without bars"
    elif name == "n" and type(value) is int and total is None:
        what = "the number of steps, perhaps"
        instead = f"Write it as the second argument, hc.progress(i, {value})"
    else:
        return
    raise hc.errors.SpecError(
        f"hostcall: hc.progress has no option {name}=, and keywords that it does not"
        f" know are metrics. This one is {what}. {instead}. A metric needs another"
        " name",
        code="hc-option",
    )


def check_body(body: Any, face: str) -> None:
    _need(
        callable(body),
        f"the first argument of hc.progress.{face} should be the body of the loop (the"
        " decorator of jax-tqdm, which takes a number of steps, is"
        f" hostcall.tools.jax_tqdm.{face}_tqdm)",
        body,
    )


def _check_package() -> None:
    """Imports what draws the bar, so that its absence is told where it is asked for."""
    package = hc.errors.PackageError.needed(
        "tqdm",
        "hc.progress(bar='auto')",
        "hostcall[progress]",
        "set HOSTCALL_PROGRESS=0 in the environment to run without bars",
    )
    # Makes tqdm's lock. If the first bar is drawn while the process ends, it is too
    # late: multiprocessing, which the lock belongs to, has ended before, and from
    # Python 3.14 on warns of a lock that is left.
    package.tqdm.get_lock()


def _is_scalar(value: Any, *kinds: Any) -> bool:
    if not isinstance(value, (bool, int, float, np.generic, np.ndarray, jax.Array)):
        return False
    dtype = getattr(value, "dtype", type(value))
    return np.shape(value) == () and any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _need(is_right: bool, wanted: str, got: Any) -> None:
    need(is_right, f"hc.progress: {wanted}", got)
