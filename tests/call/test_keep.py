"""`keep=` belongs to `hc.watch`: other calls keep no executions."""

from __future__ import annotations

import jax
import pytest

import hostcall as hc
from hostcall.errors import SpecError


def test_calls_keep_no_executions():
    def fn(x):
        here = hc.current()
        assert here.history == ()
        assert here.execution is None
        return x

    assert jax.jit(lambda x: hc.call(fn, x, x, where=x > 0))(1.0) == 1


@pytest.mark.parametrize("fn", [lambda x: x, lambda x, **more: x])
def test_the_error_names_what_keeps(fn):
    with pytest.raises(SpecError, match=r"has no keep=: hc.watch\(x, keep="):
        hc.call(fn, 1.0, 1.0, keep=2)


def test_keep_is_an_argument_of_a_function_that_has_it():
    def fn(x, keep):
        return x + keep

    assert hc.call(fn, 1.0, 1.0, keep=2.0) == 3
