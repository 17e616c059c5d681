"""A multiprocessing context whose workers start in a fifth of spawn's time.

Its processes are forks of a server that has imported JAX, but not hostcall, and has no
backend. They have the server's environment, of the first pool's time. Importing JAX is
most of what a worker of a small test does. test_executors.py has pools of spawn's.
"""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["jax.numpy", "pytest"])
