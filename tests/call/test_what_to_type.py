"""Mistakes of a first day, in each face: the error says what to type next."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import hostcall as hc

X = np.arange(3, dtype=np.float32)


def same(x):
    return x


def made():
    return hc.host(same, result=hc.results.like(0))


# The options of hc.host alone.
OF_A_FUNCTION = (
    "timeout",
    "executor",
    "concurrency",
)

# Mistake -> (what makes it, what the error should say).
MISTAKES = {
    **{
        f"{option}= of a call": (
            lambda option=option: hc.call(same, X, X, **{option: 1}),
            rf"hc\.call has no {option}=: .* hc\.call\(hc\.host\(fn, {option}=\.\.\.\)",
        )
        for option in OF_A_FUNCTION
    },
    "an effect under grad": (
        lambda: jax.grad(
            lambda x: (hc.call(same, None, x, order="ordered"), x)[1]  # no result
        )(1.0),
        r"write hc\.tap\(same, \.\.\.\)",
    ),
    "a ragged list": (
        lambda: hc.call(lambda x: [[1.0], [1.0, 2.0]], X, X),
        "Change what the function returns, or what result= declares",
    ),
    "a rule of one parameter": (
        lambda: made().defjvp(same),
        r"called as rule\(primals, tangents\), but `same` takes \(x\)",
    ),
    "a mask of a host function": (
        lambda: made()(X, where=True),
        r"For a mask write same\.where\(mask\)\(x\)",
    ),
    "a backward rule of one": (
        lambda: made().defvjp(lambda x: (x, None), same),
        r"called as bwd\(residuals, cotangent\), but `same` takes \(x\)",
    ),
    "differences of a plain function": (
        lambda: hc.derivatives.finite_difference(same),
        r"finite_difference\(hc\.host\(f, result=\.\.\.\)\)",
    ),
    "register without a name": (
        lambda: hc.register(same),
        r'Write hc\.register\("my_package\.simulate"\)',
    ),
    "a feed's function returns an item": (
        lambda: jax.jit(hc.feed(lambda: 3))(),
        "returned 3, which can't be iterated.*yield item",
    ),
    "a front name that is not there": (lambda: hc.calls, "no attribute 'calls'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_says_what_to_type(name):
    make, text = MISTAKES[name]
    kinds = (hc.errors.HostcallError, AttributeError)
    with pytest.raises(kinds) as caught, hc.reraise():
        jax.block_until_ready(make())
    assert re.search(text, str(caught.value)), str(caught.value)


def test_a_rule_with_any_parameters_is_accepted():
    f = made()
    f.defjvp(lambda *both: both[1][0])
    g = made()
    g.defvjp(lambda x: (x, None), lambda residuals, cotangent, scale=1: (cotangent,))
    tangent = jax.jvp(f, (X,), (X,))[1]
    cotangent = jax.grad(lambda x: g(x).sum())(X)
    assert tangent.tolist() == X.tolist()
    assert cotangent.tolist() == [1, 1, 1]
