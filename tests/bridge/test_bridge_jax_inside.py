"""How often a program of `hc.bridge.jax` runs on the other device, and how long it lives."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import pytest

import hostcall as hc
from hostcall.bridge._jax import DeviceProgram

W = jnp.arange(6.0).reshape(2, 3) / 7
X = jnp.array([0.3, -0.2, 0.8])
XS = jnp.stack([X, 2 * X, X - 1, -X])


def model(w, x):
    return jnp.tanh(w @ x).sum() + (jnp.sin(x) * x**2).sum()


@pytest.fixture
def runs(monkeypatch):
    """The names of the programs that run on the other device."""
    names = []
    run = DeviceProgram.__call__

    def counted(self, *arrays):
        names.append(self.__name__)
        return run(self, *arrays)

    monkeypatch.setattr(DeviceProgram, "__call__", counted)
    return names


def test_a_batch_is_one_run(runs):
    f = hc.bridge.jax(model)
    jax.vmap(f, (None, 0))(W, XS)
    assert runs == ["model"]
    runs.clear()
    jax.vmap(jax.grad(f), (None, 0))(W, XS)
    assert runs[-1] == "vjp of model"
    assert len(runs) <= 2
    runs.clear()
    jax.jit(jax.vmap(jax.grad(f), (None, 0)))(W, XS)
    assert runs == ["vjp of model"]


def test_a_gradient_in_a_program_is_one_run(runs):
    f = hc.bridge.jax(model)
    jax.jit(jax.grad(f))(W, X)
    assert runs == ["vjp of model"]  # nobody asks for the value
    runs.clear()
    jax.jit(jax.jacrev(lambda x: f(W, x) * x))(X)
    assert sorted(runs) == ["model", "vjp of model"]


def test_programs_die_with_jaxs_caches():
    f = hc.bridge.jax(lambda x: jnp.sin(x).sum())
    for _ in range(3):
        jax.jit(jax.grad(f))(jnp.ones(3))
        assert len(f._programs) == 1
        jax.clear_caches()
        gc.collect()
    assert len(f._programs) == 0
