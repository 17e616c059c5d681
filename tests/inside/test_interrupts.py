"""Ctrl-C where no Python code of a user's runs: it comes later instead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import hostcall as hc
from hostcall._jax import settings


def test_an_interrupt_while_settings_are_set_reaches_the_function(monkeypatch):
    with jax.enable_x64(True):
        spec = jax.ShapeDtypeStruct((), jnp.float64)
        f = jax.jit(lambda x: hc.call(lambda x: x + 1, spec, x))
        assert f(1.0) == 2.0
        plain, left = settings._swap, [1]

        def interrupted(name, value):
            if left:
                left.pop()
                raise KeyboardInterrupt
            return plain(name, value)

        monkeypatch.setattr(settings, "_swap", interrupted)
        with pytest.raises((KeyboardInterrupt, jax.errors.JaxRuntimeError)) as raised:
            f(1.0).block_until_ready()
        assert "KeyboardInterrupt" in repr(raised.value)
        assert f(1.0) == 2.0
