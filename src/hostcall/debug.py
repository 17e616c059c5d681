"""`hostcall.debug`: drop-ins for `jax.debug.callback` and `jax.debug.print`.

Like JAX's they are delivered before the program goes on, in its order, and a callback
that raises fails the program. `hostcall.tap` and `hostcall.print` do not make the
program wait.
"""

from hostcall._compat.debug import callback, print

__all__ = ["callback", "print"]
