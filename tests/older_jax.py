"""What JAX itself can't do in the older versions of the range, by name.

A test that needs such a thing names it: with `@SMALL_CALLBACKS.skip`, or by asking
`SMALL_CALLBACKS.is_missing`. tests/repo/test_older_jax.py tries each in plain JAX, under
the JAX that runs the tests: so none of them hides a fault of hostcall's, and one whose
versions have left the range is found there. docs/design/jax_boundary.md tells users.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jaxlib
import pytest


class Lack(NamedTuple):
    """Something that JAX can't do before a version.

    Attributes:
        since: the first version that can.
        here: the version that runs the tests, of jax or of jaxlib.
        reason: what happens instead, for the reports of pytest.
    """

    since: tuple[int, ...]
    here: tuple[int, ...]
    reason: str

    @property
    def is_missing(self) -> bool:
        return self.here < self.since

    @property
    def skip(self) -> pytest.MarkDecorator:
        return pytest.mark.skipif(self.is_missing, reason=self.reason)


_JAX = jax.__version_info__
_JAXLIB = jaxlib.version.__version_info__

SMALL_CALLBACKS = Lack(
    (0, 10, 2), _JAX, "JAX's own callbacks read elements of less than a byte wrong"
)
STACKS_OF_INT2 = Lack(
    (0, 10, 1), _JAXLIB, "XLA ends the process where it compiles a stack of int2"
)
OPTIONS_ALONE = Lack(
    (0, 10, 1), _JAX, "JAX's debug functions can't get their options alone"
)
VECTORIZED = Lack((0, 10), _JAX, "jax.pure_callback still refuses the name")
NAMES_CALLBACKS = Lack(
    (0, 9, 2), _JAX, "JAX names a function of its own, with its address"
)
LOOPS_LINEARIZED_TWICE = Lack(
    (0, 10, 2), _JAX, "JAX can't linearize twice through a loop that is under remat"
)
PLAIN_REPORTS = Lack(
    (0, 10, 1), _JAXLIB, "XLA's reports of programs over devices begin with a prefix"
)
LOST_JOBS_ABORT = Lack(
    (0, 9, 2), _JAXLIB, "a process that another one has left exits with 1"
)
NUMPY_PRIMALS = Lack(
    (0, 9, 2), _JAX, "derivative rules get NumPy's arrays in a class without methods"
)
