"""Compositions of transformations, of a host function and of the same in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hostcall as hc

X = np.array([0.3, -1.2, 0.8], dtype=np.float32)

# Each maps a function of one array (of any shape) to another such function.
STEPS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: (
        lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]
    ),
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: f(2 * x), x),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x * 2])).sum(0),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.cos(x))[0],
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.cos(x)),
    "map": lambda f: lambda x: jax.lax.map(f, jnp.stack([x, x + 1])).sum(0),
}
DERIVATIVES = ("jvp", "vjp", "linearize")


def smooth(kind):
    """sin, with derivative rules of one kind."""
    f = hc.host(np.sin, result=hc.results.like(0))
    g = hc.host(np.cos, result=hc.results.like(0))
    if kind == "jax":
        f.defjvp(lambda p, t: g(*p) * t[0], where="jax")
        g.defjvp(lambda p, t: -f(*p) * t[0], where="jax")
    else:
        f.defjvp(lambda p, t: np.cos(p[0]) * t[0])
        f.defvjp(lambda x: (np.sin(x), np.cos(x)), lambda c, ct: (c * ct,))
    return f


def compose(steps, f):
    for step in steps:
        f = STEPS[step](f)
    return f


@pytest.mark.parametrize("kind", ["host", "jax"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=4))
def test_compositions(kind, steps):
    orders = [s for s in steps if s in DERIVATIVES]
    limit = 1 if kind == "host" else 2
    for extra in orders[limit:]:
        steps = [*steps]
        steps.remove(extra)
    got = compose(steps, smooth(kind))(X)
    want = compose(steps, jnp.sin)(X)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)
