"""A program that `hc.watch` ends, and the error that it ends with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import hostcall as hc
from hostcall.errors import WatchError

N = 8


def down(x, **options):
    """Counts down from x, and watches the logarithm: it is nan once x is below 0."""

    def body(c, _):
        y = jnp.log(c)
        hc.watch({"y": y}, name="state", also=c, **options)
        return c - 1, y

    return jax.lax.scan(body, x, None, length=N)[1]


def fired(f, *args):
    """The error that a function raises, also if only its results do."""
    # Over several devices JAX would report the failure once more, at its next wait for
    # effects; `reraise` drops that.
    with pytest.raises(WatchError) as caught, hc.reraise():
        jax.block_until_ready(f(*args))
    return caught.value
