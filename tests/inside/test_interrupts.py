"""Ctrl-C where no Python code of a user's runs: it comes later instead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import hostcall as hc
from hostcall import _jax
from hostcall._jax import settings
from hostcall._runtime import host_device


def test_an_interrupt_while_settings_are_set_reaches_the_function(monkeypatch):
    with jax.enable_x64(True):
        spec = jax.ShapeDtypeStruct((), jnp.float64)
        f = jax.jit(lambda x: hc.call(lambda x: x + 1, spec, x))
        assert f(1.0) == 2.0
        plain, left = settings._set, [1]

        def interrupted(name, value):
            if left:
                left.pop()
                raise KeyboardInterrupt
            return plain(name, value)

        monkeypatch.setattr(settings, "_set", interrupted)
        with pytest.raises((KeyboardInterrupt, jax.errors.JaxRuntimeError)) as raised:
            f(1.0).block_until_ready()
        assert "KeyboardInterrupt" in repr(raised.value)
        assert f(1.0) == 2.0


@pytest.mark.parametrize("step", range(4))
def test_an_interrupt_among_several_settings_leaves_none(monkeypatch, step):
    with jax.enable_x64(True), jax.default_matmul_precision("float32"):
        traced = settings.traced_here()
    here, plain, left = settings.traced_here(), settings._set, [step]

    def interrupted(name, value):
        plain(name, value)
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt

    monkeypatch.setattr(settings, "_set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        traced.leave(traced.enter())
    assert left[0] < 0
    assert settings.traced_here() == here


def test_a_handler_that_makes_a_host_client_meanwhile_has_the_rung_below(monkeypatch):
    """As a signal handler with an eager call does, in the milliseconds that it takes."""
    made, make = [], _jax.make_host_client

    def interrupted():
        if not made:
            made.append(None)
            host_device.above(None)
        return make()

    monkeypatch.setattr(host_device, "_ladder", host_device._Ladder())
    monkeypatch.setattr(_jax, "make_host_client", interrupted)
    first = host_device.above(None).client
    second = host_device.above(first).client
    third = host_device.above(second).client
    clients = first, second, third
    assert [host_device.level(client) for client in clients] == [1, 2, 3]
