"""jax-tqdm's names and signatures, on `hc.progress`.

To move a program over, import these in place of the package's:

    from hostcall.tools.jax_tqdm import PBar, loop_tqdm, scan_tqdm

The bars are those of `hc.progress`: they are redrawn in intervals of time, do not make
the program wait, and follow its rules for several loops, vmap and devices.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike

import hostcall as hc
from hostcall.tools.progress import Body

Decorator = Callable[[Body], Body]


class PBar(NamedTuple):
    """A carry with the number of its bar. Under vmap each row has a bar.

    Attributes:
        id: the number of the bar. It is kept; hostcall finds the bar's place itself.
        carry: the carry of the loop.
    """

    id: Any
    carry: Any

    def replace(self, **changes: Any) -> PBar:
        """One with other values: `bar.replace(carry=carry)`."""
        return self._replace(**changes)


def scan_tqdm(
    n: int, print_rate: int | None = None, tqdm_type: str = "auto", **kwargs: Any
) -> Decorator:
    """Decorates the body of a `lax.scan` over jnp.arange(n), or over a tuple with it.

    Args:
        n: the number of steps.
        print_rate: shows one in so many steps, up to `n`. Default: a step each 0.05 s.
        tqdm_type: "auto", "std" or "notebook": which of tqdm's bars.
        **kwargs: arguments for tqdm's bar, such as `desc` and `unit`. jax-tqdm ignores
            `total`, `mininterval`, `maxinterval` and `miniters`, and so does this.

    Raises:
        ValueError: `tqdm_type` or `print_rate` has another value.
    """
    show = _shower(n, print_rate, tqdm_type, kwargs)

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def run(carry: Any, x: Any) -> Any:
            step = x[0] if isinstance(x, tuple) else x
            show(step, carry)
            if not isinstance(carry, PBar):
                return body(carry, x)
            carry_of_body, y = body(carry.carry, x)
            return PBar(carry.id, carry_of_body), y

        return run

    return decorate


def loop_tqdm(
    n: int, print_rate: int | None = None, tqdm_type: str = "auto", **kwargs: Any
) -> Decorator:
    """Decorates the body of a `lax.fori_loop` from 0 to n. Takes the arguments of
    `scan_tqdm`.
    """
    show = _shower(n, print_rate, tqdm_type, kwargs)

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def run(i: Any, value: Any) -> Any:
            show(i, value)
            if not isinstance(value, PBar):
                return body(i, value)
            return PBar(value.id, body(i, value.carry))

        return run

    return decorate


_TYPES = ("auto", "std", "notebook")
# Arguments of tqdm's bars that would contradict what this passes, as in jax-tqdm.
_IGNORED = ("total", "mininterval", "maxinterval", "miniters")


def _shower(
    n: int, print_rate: int | None, tqdm_type: str, kwargs: dict[str, Any]
) -> Callable[[ArrayLike, object], None]:
    """The function (step, carry) that shows a step."""
    if tqdm_type not in _TYPES:
        words = " or ".join(map(repr, _TYPES))
        raise ValueError(f"tqdm_type should be {words}, got {tqdm_type!r}")
    if print_rate is not None and not 1 <= print_rate <= n:
        raise ValueError(
            f"print_rate should be at least 1 and at most the number of steps, {n},"
            f" got {print_rate}"
        )
    arguments = {name: kwargs[name] for name in kwargs if name not in _IGNORED}
    desc = arguments.pop("desc", f"Running for {n:,} iterations")
    desc = arguments.pop("message", desc)  # jax-tqdm takes either, and this one first
    unit = arguments.pop("unit", "it")
    bar: Any = "auto"
    if arguments or tqdm_type != "auto":
        tqdm = importlib.import_module(f"tqdm.{tqdm_type}").tqdm
        bar = functools.partial(tqdm, **arguments)

    def show(step: ArrayLike, carry: object) -> None:
        if jnp.issubdtype(jnp.result_type(step), jnp.floating):  # jnp.arange(6.0)
            step = jnp.asarray(step).astype(int)
        hc.progress(
            step,
            n,
            every=print_rate or 0.05,
            desc=desc,
            unit=unit,
            rows="each" if isinstance(carry, PBar) else "batched",
            bar=bar,
        )

    return show
