"""Bessel functions with derivatives of every order.

`jv` is SciPy's function of that name. It has one derivative rule, in JAX code over `jv`
itself, so JAX derives forward and reverse mode of every order from it. `drum` is a
function of two coordinates that shows second derivatives. 64-bit mode is needed.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.special
from text import Array

import hostcall as hc

# SciPy's Bessel function of the first kind: jv(order, z), elementwise.
jv = hc.host(
    scipy.special.jv,
    result=hc.results.elementwise,
    vmap_method="expand_dims",
    nondiff=0,
)


@jv.defjvp(where="jax")
def _slope(primals: Any, tangents: Any) -> Array:
    """J_n' = (J_{n-1} - J_{n+1}) / 2 (DLMF 10.6.1)."""
    order, z = primals
    return 0.5 * (jv(order - 1, z) - jv(order + 1, z)) * tangents[1]


# A drum of radius 1 that was struck in the middle: its first round modes.
WAVE_NUMBERS = scipy.special.jn_zeros(0, 4)
STRENGTHS = np.array([1.0, 0.5, 0.3, 0.2])


def drum(point: Array) -> Array:
    """The drum's height at a point (2,), which isn't its middle."""
    radius = jnp.sqrt(jnp.sum(point**2))
    return jnp.sum(STRENGTHS * jv(0, WAVE_NUMBERS * radius))


def bends(points: np.ndarray) -> np.ndarray:
    """The Hessians of `drum`, (n, 2, 2), at points (n, 2), worked out by hand.

    The second derivative is u''(r) along the radius, and u'(r) / r across it.
    """
    radius = np.sqrt(np.sum(points**2, axis=1, keepdims=True))
    k = WAVE_NUMBERS
    across = scipy.special.jvp(0, k * radius, 1) @ (STRENGTHS * k) / radius[:, 0]
    along = scipy.special.jvp(0, k * radius, 2) @ (STRENGTHS * k**2)
    outward = points / radius
    projector = outward[:, :, None] * outward[:, None, :]
    along, across = along[:, None, None], across[:, None, None]
    hessians: np.ndarray = along * projector + across * (np.eye(2) - projector)
    return hessians


def waves(points: np.ndarray) -> np.ndarray:
    """Traces of the Hessians, (n,): a mode's is -k^2 times its height (Helmholtz)."""
    radius = np.sqrt(np.sum(points**2, axis=1, keepdims=True))
    k = WAVE_NUMBERS
    traces: np.ndarray = scipy.special.jv(0, k * radius) @ (-STRENGTHS * k**2)
    return traces
