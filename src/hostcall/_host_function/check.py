"""`hc.testing.check`: tests a host function and its rules against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.errors import SpecError
from hostcall._host_function.checks import Check, Checks
from hostcall._host_function.function import HostFunction


@dataclass(frozen=True)
class Report:
    """What `hc.testing.check` found: true if nothing failed. Prints a line a check."""

    function: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "failed")

    def __bool__(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        title = f"hc.testing.check of `{self.function}`"
        return "\n".join([title, *map(str, self.checks)])

    __repr__ = __str__


def check(
    f: HostFunction[..., Any],
    *examples: Any,
    rtol: float | None = None,
    seed: int = 0,
    threads: int = 4,
) -> Report:
    """Tests a host function and its rules against each other.

        assert hc.testing.check(f, (x, y), (x2, y2))      # in a test: shows the report

    For each example it checks:

      * the result against `result=`;
      * a second call, and the compiled program, against the first call;
      * vmap against a loop, with all arguments batched and with each alone;
      * forward derivatives against differences;
      * reverse derivatives against forward ones, or against differences;
      * that a function with a transpose is linear, and its transpose by inner products;
      * whether the function keeps or writes to memory that it is lent;
      * calls from several threads at once against calls one by one;
      * for a ufunc, a signature or annotations, what comes for other sizes against what
        they say.

    Complex arguments move in both parts, so rules are checked by JAX's conventions
    whether or not the function is holomorphic.

    Args:
        f: a function that `hc.host` made.
        *examples: each a tuple of arguments, or one argument, where the function is
            smooth.
        rtol: for derivatives, relative to the size of the whole array; default 2e-2 for
            32 bits (and complex64, which has two 32-bit parts), 1e-4 for 64.
        seed: for the random directions and cotangents.
        threads: how many threads call at once.

    Returns:
        A `Report`, true if nothing failed. A check that does not apply (no such rule, a
        function with effects, or differences too inexact to tell) is "left out", with
        the reason.

    Raises:
        SpecError: there is no example, or `f` is not a HostFunction.

    Cost: some hundred calls of the function, ten for each argument, and as many
    compilations.
    """
    if not isinstance(f, HostFunction):
        raise SpecError(
            f"hostcall: check() takes what hc.host made, got {f!r}. Write"
            " hc.testing.check(hc.host(f, result=...), example)"
        )
    if not examples:
        raise SpecError(
            "hostcall: check() needs an example of arguments: check(f, (x, y))"
        )
    checks: list[Check] = []
    for number, example in enumerate(examples):
        args = example if isinstance(example, tuple) else (example,)
        label = f" (example {number})" if len(examples) > 1 else ""
        random = np.random.default_rng(seed)
        dtypes = [x.dtype for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
        with _jax.able_to_hold(*dtypes):
            checks += Checks(
                f=f, args=args, rtol=rtol, random=random, threads=threads
            ).run(label)
    return Report(f.__name__, tuple(checks))
