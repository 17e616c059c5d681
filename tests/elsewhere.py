"""Platforms that the engine doesn't serve. None is available here: the CPU takes the path
through JAX's own callback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from hostcall import _jax
from hostcall._primitives.call import call_p, lower, lower_through_jax
from hostcall._primitives.lowering import register
from hostcall._primitives.tap import primitive as tap


def calls_here() -> None:
    register(call_p, lower, lower_through_jax)


@contextmanager
def calls() -> Iterator[None]:
    register(call_p, lower_through_jax, lower)
    jax.clear_caches()
    yield
    calls_here()
    jax.clear_caches()


def taps_here() -> None:
    register(tap.tap_p, tap.lower_here, tap.lower_through_jax)


@contextmanager
def taps() -> Iterator[None]:
    register(tap.tap_p, tap.lower_through_jax, tap.lower_here)
    jax.clear_caches()
    yield
    taps_here()
    jax.clear_caches()


@contextmanager
def drop_ins() -> Iterator[None]:
    known = _jax.program_of
    elsewhere = lambda ctx: known(ctx)._replace(platforms=("elsewhere",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_jax, "program_of", elsewhere)
        patch.setattr(_jax, "is_served", lambda ctx: False)
        jax.clear_caches()
        yield
    jax.clear_caches()
