"""Meshes of the four devices, and a function that runs others over a mesh."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh


def grid():
    return Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))


def line():
    return Mesh(np.array(jax.devices()), ("x",))


def over(mesh, f, spec, out=None, **options):
    out = spec if out is None else out
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=out, **options))
