"""`hostcall.testing`: helpers for tests of programs that call the host.

check    tests whether a HostFunction and its rules agree
Report   what `check` found; it is true if no check failed
Check    one line of a report
collect  gathers the values of tagged taps, as arrays
restore_jax  puts back what hostcall has replaced in JAX where it was first used
unpatch_jax  restores JAX's functions after `hostcall.patch_jax()`
"""

from hostcall._api.collect import collect
from hostcall._api.restore import restore_jax
from hostcall._compat.patch import unpatch_jax
from hostcall._host_function.check import Report, check
from hostcall._host_function.checks import Check

__all__ = ["Check", "Report", "check", "collect", "restore_jax", "unpatch_jax"]
