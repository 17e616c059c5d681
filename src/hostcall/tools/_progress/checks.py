"""The checks of what `hc.progress` is given. They run while a program is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from hostcall.tools._progress.bars import Loop
from hostcall.tools._values import dtype_of, is_array, need


def check(loop: Loop, step: object, total: object, metrics: Mapping[str, Any]) -> None:
    for is_right, wanted, got in _rules(loop, step, total):
        need(is_right, f"hc.progress: {wanted}", got)
    if loop.bar == "auto":
        _check_package()
    for name, value in metrics.items():
        _check_metric(name, value, total)


def _rules(loop: Loop, step: object, total: object) -> Iterator[tuple[bool, str, Any]]:
    """For each argument whether it is right, what was wanted, and what came."""
    counter = "the x of a scan over jnp.arange(n)"
    if step is None:
        counter += " (that of hc.progress.scan, in place of xs=None)"
    yield (
        _is_scalar(step, jnp.integer),
        "the step should be an integer scalar, the loop's counter: the index of a"
        f" fori_loop, or {counter}",
        step,
    )
    yield (
        total is None or _is_scalar(total, jnp.integer),
        "total= should be an int or an integer scalar, the number of steps, or None if"
        " it is not known",
        total,
    )
    yield (
        isinstance(step, jax.core.Tracer) or not isinstance(total, jax.core.Tracer),
        "the step should be the loop's counter, and total= the number of steps:"
        " hc.progress(i, n). The total is a value of the loop, but the step is not",
        step,
    )
    yield (
        type(loop.initial) is int,
        "initial= should be an int, the number of the first step, which is part of the"
        " compiled program",
        loop.initial,
    )
    yield (
        loop.rows in ("batched", "each"),
        "rows= should be 'batched' (one bar for the batch) or 'each' (a bar for each"
        " row)",
        loop.rows,
    )
    yield (
        loop.bar == "auto" if isinstance(loop.bar, str) else callable(loop.bar),
        "bar= should be 'auto' (tqdm), or a function that returns a bar",
        loop.bar,
    )


_EVERY = "Write every=, an interval in seconds (a float) or in steps (an int)"

# Names of constants that are hardly metrics, by what they are and what to do instead.
_NO_METRICS = {
    "an option of hc.tap, and hc.progress can't take it. Leave it out; every= says how"
    " often the bar is drawn": "always arrays on order remat when_full where",
    f"an option of hc.tap. {_EVERY}": "sample",
    "an option of tqdm. Write bar=functools.partial(tqdm.tqdm, {}={})": (
        "ascii bar_format color colour dynamic_ncols leave ncols nrows unit_divisor"
        " unit_scale"
    ),
    f"an option of tqdm. {_EVERY}": "maxinterval mininterval miniters",
    "an option of tqdm. Set HOSTCALL_PROGRESS=0 in the environment to run without"
    " bars": "disable",
    "the number of steps, perhaps. Write it as the second argument, hc.progress(i,"
    " {1})": "n",
}


def _check_metric(name: str, value: object, total: object) -> None:
    # An array is a metric by any name, but for a mask.
    is_meant = not is_array(value) or name == "where"
    if name == "n":
        is_meant = type(value) is int and total is None
    elif name == "sample":
        is_meant = type(value) is float
    if is_meant:
        for what, names in _NO_METRICS.items():
            if name in names.split():
                shown = repr(value) if type(value) in (bool, int, float, str) else "..."
                meant = what.format(name.replace("color", "colour"), shown)
                raise hc.errors.SpecError(
                    f"hostcall: hc.progress has no option {name}=, and keywords that it"
                    f" does not know are metrics. This one is {meant}. A metric needs"
                    " another name",
                    code="hc-option",
                )
    is_number = _is_scalar(value, jnp.integer, jnp.floating, jnp.bool_)
    need(
        isinstance(value, str) or is_number,
        "hc.progress: keywords that are not options of hc.progress are metrics, and the"
        f" metric {name}= should be a real scalar, such as x.mean(), or a text",
        value,
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
    dtype = dtype_of(value)
    is_scalar = dtype is not None and np.shape(value) == ()
    return is_scalar and any(jnp.issubdtype(dtype, kind) for kind in kinds)
