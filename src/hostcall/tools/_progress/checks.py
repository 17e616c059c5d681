"""The checks of what `hc.progress` is given. They run while a program is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall.tools._progress.bars import Loop
from hostcall.tools._values import need


def check(
    loop: Loop, step: object, total: object, metrics: dict[str, jax.typing.ArrayLike]
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
    _check_options(loop)
    for name, value in metrics.items():
        _check_metric(name, value, total)


def _check_options(loop: Loop) -> None:
    _need(
        type(loop.initial) is int,
        "initial= should be an int, the number of the first step, which is part of the"
        " compiled program",
        loop.initial,
    )
    _need(
        loop.rows in ("batched", "each"),
        "rows= should be 'batched' (one bar for the batch) or 'each' (a bar for each"
        " row)",
        loop.rows,
    )
    _need(
        loop.bar == "auto" if isinstance(loop.bar, str) else callable(loop.bar),
        "bar= should be 'auto' (tqdm), or a function that returns a bar",
        loop.bar,
    )
    if loop.bar == "auto":
        _check_package()


_EVERY = "Write every=, an interval in seconds (a float) or in steps (an int)"

# Options of hc.tap and of tqdm whose names are hardly those of metrics: what each is,
# and what to do instead.
_OF_OTHERS = {
    **dict.fromkeys(
        ("always", "arrays", "on", "order", "remat", "when_full", "where"),
        "an option of hc.tap, and hc.progress can't take it. Leave it out; every= says"
        " how often the bar is drawn",
    ),
    **dict.fromkeys(
        (
            *("ascii", "bar_format", "color", "colour", "dynamic_ncols", "leave"),
            *("ncols", "nrows", "unit_divisor", "unit_scale"),
        ),
        "an option of tqdm. Write bar=functools.partial(tqdm.tqdm, {}={})",
    ),
    **dict.fromkeys(
        ("maxinterval", "mininterval", "miniters"), f"an option of tqdm. {_EVERY}"
    ),
    "sample": f"an option of hc.tap. {_EVERY}",
    "disable": "an option of tqdm. Set HOSTCALL_PROGRESS=0 in the environment to run"
    " without bars",
    "n": "the number of steps, perhaps. Write it as the second argument,"
    " hc.progress(i, {1})",
}


def _check_metric(name: str, value: object, total: object) -> None:
    # An array is a metric by any name, but for a mask.
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    is_meant = name in _OF_OTHERS and (name == "where" or not is_array)
    if name == "sample":
        is_meant = type(value) is float
    elif name == "n":
        is_meant = type(value) is int and total is None
    if is_meant:
        shown = repr(value) if type(value) in (bool, int, float, str) else "..."
        meant = _OF_OTHERS[name].format(name.replace("color", "colour"), shown)
        raise hc.errors.SpecError(
            f"hostcall: hc.progress has no option {name}=, and keywords that it does"
            f" not know are metrics. This one is {meant}. A metric needs another name",
            code="hc-option",
        )
    _need(
        isinstance(value, str)
        or _is_scalar(value, jnp.integer, jnp.floating, jnp.bool_),
        "keywords that are not options of hc.progress are metrics, and the metric"
        f" {name}= should be a real scalar, such as x.mean(), or a text",
        value,
    )


def check_body(body: object, face: str) -> None:
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


def _is_scalar(value: object, *kinds: Any) -> bool:
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        dtype: object = value.dtype
    elif isinstance(value, (bool, int, float)):
        dtype = type(value)
    else:
        return False
    return np.shape(value) == () and any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _need(is_right: bool, wanted: str, got: object) -> None:
    need(is_right, f"hc.progress: {wanted}", got)
