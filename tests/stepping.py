"""The beginning of a program that steps an object, for tests of several folders."""

from __future__ import annotations

# An object whose method a loop calls ten times, and which says when it is closed.
STEPPING = """
import os, sys, time, jax, jax.numpy as jnp, numpy as np
import hostcall as hc
I32 = jax.ShapeDtypeStruct((), jnp.int32)
# engine
class Host:
    def step(self, x):
        time.sleep(0.01)  # so that a test meets it in the loop
        print("step", flush=True)
        return x
    def close(self):
        print("closed", flush=True)
env = hc.Object(Host, methods={"step": I32})
f = jax.jit(lambda n: jax.lax.fori_loop(0, 10, lambda i, c: env.step(c), n))
"""
