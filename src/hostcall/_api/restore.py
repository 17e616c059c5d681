"""`hc.testing.restore_jax`: puts back what hostcall has replaced in JAX."""

from __future__ import annotations

import jax

from hostcall import _jax


def restore_jax() -> None:
    """Puts back JAX's functions that hostcall has replaced where it was first used.

    JAX's caches are cleared, so that all programs are compiled again. The next host
    call that is traced replaces the functions again. For tests that compare JAX with
    and without hostcall in one process; `python -m hostcall` lists the functions.

    No program with host calls may run meanwhile, and none that was compiled ahead of
    time (`lower().compile()`) or has host calls that a thread waits for may be used
    afterwards. What another library has put in a place since stays there.
    """
    _jax.restore()
    if _jax.back_ends_started():  # else there are no compiled programs yet
        jax.clear_caches()
