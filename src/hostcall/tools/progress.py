"""`hc.progress`: a progress bar for a loop inside a compiled program.

Each step passes one tap, which the engine throttles in seconds; its flag `always` lets
the first and the last step through. `_progress/bars.py` decides on the host which bar a
step moves, and `_progress/drawing.py` draws it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import hostcall as hc
from hostcall.tools._progress import bars
from hostcall.tools._progress.drawing import Factory, need_tqdm
from hostcall.tools._values import dtype_of, is_array, need, refuse_misspelt, wrong

Rows = Literal["batched", "each"]
# The body of a loop, which takes and returns what the user's loop carries.
Body = Callable[[Any, Any], Any]


def _shown_by(show: Callable[[Any, Any], None], body: Body, face: str) -> Body:
    """The body of a loop that first shows its step, of the same arguments."""
    need(
        callable(body),
        f"hc.progress: the first argument of hc.progress.{face} should be the body of"
        " the loop (the decorator of jax-tqdm, which takes a number of steps, is"
        f" hostcall.tools.jax_tqdm.{face}_tqdm)",
        body,
    )

    @functools.wraps(body)
    def wrapped(first: Any, second: Any) -> Any:
        show(first, second)
        return body(first, second)

    return wrapped


class Progress:
    """The type of `hc.progress`, which is its only instance."""

    def __call__(
        self,
        step: ArrayLike,
        total: ArrayLike | None = None,
        *,
        desc: str | None = None,
        unit: str = "it",
        every: int | float = 0.05,
        initial: int = 0,
        bar: Literal["auto"] | Factory = "auto",
        rows: Rows = "batched",
        **metrics: ArrayLike | str,
    ) -> None:
        """Shows a progress bar for the loop around it. The program does not wait.

        Call it in the body of a scan, fori_loop or while_loop, in a jitted step that a
        Python loop calls, or in that Python loop itself:

            def body(carry, i):
                ...
                hc.progress(i, n, desc="fit", loss=loss)

        The bar appears with the first step, is redrawn every `every` seconds, and ends
        with the last step, if `total` is given; steps beyond it are not shown. The page
        "Progress bars" says which bar a step moves, and when a bar closes whose loop
        stops before its last step.

        Args:
            step: the number of the step, an integer scalar: `initial` in the first
                step, `total - 1` in the last.
            total: the number of steps, an int or an integer scalar; None if it is not
                known. Then the bar counts, and may end `every` seconds short.
            desc: the text before the bar.
            unit: what one step is called.
            every: as in `hc.tap`: a float is an interval in seconds, an int n shows one
                in n steps.
            initial: the number of the first step, in a loop that continues an earlier
                one.
            bar: "auto": tqdm, as a widget in notebooks; or a function that is called as
                bar(desc=, total=, unit=, initial=), where `initial` is how many steps
                are done, and returns an object with tqdm's methods `update(n)`,
                `set_postfix_str(text, refresh=False)` and `close()`, such as
                functools.partial(tqdm.tqdm, colour="green"). In a job of several
                processes, "auto" draws in the first one only, or if it does not run the
                program, in that of its first device.
            rows: under vmap, "batched": one bar for the batch; "each": a bar for each
                of the first 16 rows.
            **metrics: numbers or texts to show after the bar, with three digits.

        Raises:
            SpecError: an argument is invalid.
            PackageError: tqdm is needed and not installed.

        Under transformations:
            vmap: shows the slowest row, and metrics as mean [lowest, highest].
            shard_map: one bar for all devices, treated like rows.
            jit over sharded arrays: metrics that are sharded are gathered in each step.
            grad, checkpoint: counts the forward pass, once.

        With HOSTCALL_PROGRESS=0 in the environment when the program is traced, nothing
        is put into it. If stderr is no terminal, there is a line each ten seconds; if
        there is no stderr (`sys.stderr` is None), nothing is drawn. If drawing fails,
        the program goes on, and `hc.barrier()` raises the error.

        Cost: that of a tap that is held back, on the device's thread, and a few
        milliseconds for the drawing of each loop, on another. Results are the
        same, but for about one rounding (1 ulp of a product that is shown): XLA no
        longer fuses it into a multiply-add (FMA).
        """
        if os.environ.get("HOSTCALL_PROGRESS") == "0":
            return
        refuse_misspelt(Progress.__call__, "hc.progress", metrics)
        known = int(total) if isinstance(total, (int, np.integer)) else None
        loop = bars.Loop(known, desc, unit, initial, bar, rows)
        _check(loop, step, total)
        for metric, value in metrics.items():
            _check_metric(metric, value, total)
        shown = {  # as text, a number takes no operand
            name: f"{value:.3g}" if isinstance(value, (int, float)) else value
            for name, value in metrics.items()
        }
        edge = step == initial
        if total is not None:
            edge |= step == total - 1
        loop.tap(step, None if known is not None else total, shown, every, edge)

    def scan(self, body: Body, total: ArrayLike | None = None, **options: Any) -> Body:
        """Wraps the body of a `lax.scan`, so that the scan shows a bar:
        jax.lax.scan(hc.progress.scan(body, n), init, jnp.arange(n)).

        Args:
            body: (carry, x) -> (carry, y), where `x`, or its first element if it is a
                tuple, is the number of the step.
            total: as in `hc.progress`, like all options.
            **options: the options of `hc.progress`, and metrics.
        """

        def show(_: Any, x: Any) -> None:
            self(x[0] if isinstance(x, tuple) else x, total, **options)

        return _shown_by(show, body, "scan")

    def loop(self, body: Body, total: ArrayLike | None = None, **options: Any) -> Body:
        """Wraps the body (i, value) -> value of a `lax.fori_loop`, like `scan`:
        jax.lax.fori_loop(0, n, hc.progress.loop(body, n), init).
        """
        return _shown_by(lambda i, _: self(i, total, **options), body, "loop")

    def close(self) -> None:
        """Closes all bars, once the steps that are queued have been shown.

        Waits for no program: a loop that still runs shows its bar again.
        """
        hc.barrier(programs=False)
        bars.close_all()

    def __repr__(self) -> str:
        return "hc.progress"


progress = Progress()
progress.__doc__ = Progress.__call__.__doc__  # for help(hc.progress)


# --- What it is given, checked while a program is traced ------------------------------


def _check(loop: bars.Loop, step: object, total: object) -> None:
    _check_steps(loop.initial, step, total)
    need(
        loop.rows in ("batched", "each"),
        "hc.progress: rows= should be 'batched' (one bar for the batch) or 'each' (a"
        " bar for each row)",
        loop.rows,
    )
    is_bar = loop.bar == "auto" if isinstance(loop.bar, str) else callable(loop.bar)
    need(
        is_bar,
        "hc.progress: bar= should be 'auto' (tqdm), or a function that returns a bar",
        loop.bar,
    )
    if loop.bar == "auto":
        need_tqdm()


def _check_steps(initial: object, step: object, total: object) -> None:
    """Checks the numbers of steps."""
    counter = "the x of a scan over jnp.arange(n)"
    if step is None:
        counter += " (that of hc.progress.scan, in place of xs=None)"
    need(
        _is_scalar(step, jnp.integer),
        "hc.progress: the step should be an integer scalar, the loop's counter: the"
        f" index of a fori_loop, or {counter}",
        step,
    )
    need(
        total is None or _is_scalar(total, jnp.integer),
        "hc.progress: total= should be an int or an integer scalar, the number of"
        " steps, or None if it is not known",
        total,
    )
    # Swapped arguments: of a loop's two numbers the counter is the one that changes.
    need(
        isinstance(step, jax.core.Tracer) or not isinstance(total, jax.core.Tracer),
        "hc.progress: the step should be the loop's counter, and total= the number of"
        " steps: hc.progress(i, n). The total is a value of the loop, but the step is"
        " not",
        step,
    )
    need(
        type(initial) is int,
        "hc.progress: initial= should be an int, the number of the first step, which is"
        " part of the compiled program",
        initial,
    )
    numbers = (step, total, initial)
    too_large = [n for n in numbers if isinstance(n, int) and abs(n) >= 2**63]
    need(
        not too_large,
        "hc.progress: the numbers of steps should fit into 64 bits",
        too_large[:1],
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
    for what, names in _NO_METRICS.items():
        if is_meant and name in names.split():
            shown = repr(value) if type(value) in (bool, int, float, str) else "..."
            meant = what.format(name.replace("color", "colour"), shown)
            raise wrong(
                f"hc.progress has no option {name}=, and keywords that it does not know"
                f" are metrics. This one is {meant}. A metric needs another name"
            )
    is_number = _is_scalar(value, jnp.integer, jnp.floating, jnp.bool_)
    wanted = (
        "hc.progress: keywords that are not options of hc.progress are metrics, and the"
        f" metric {name}= should be a real scalar, such as x.mean(), or a text"
    )
    need(isinstance(value, str) or is_number, wanted, value)


def _is_scalar(value: Any, *kinds: Any) -> bool:
    dtype = dtype_of(value)
    is_scalar = dtype is not None and np.shape(value) == ()
    return is_scalar and any(jnp.issubdtype(dtype, kind) for kind in kinds)
