"""`hostcall.debug`: drop-ins for `jax.debug.callback` and `jax.debug.print`.

Like JAX's, they run in program order, and the program waits for them. A callback that
raises fails the program. `hostcall.tap` and `hostcall.print` do not make it wait.
"""

from hostcall._compat.debugging import callback, print

__all__ = ["callback", "print"]
