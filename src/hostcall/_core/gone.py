"""Names that modules and classes had once, and what to write instead.

The names of the front page itself are in hostcall/__init__.py, options in the `Face` of
the function that had them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never


def refuse(of: str, names: Mapping[str, str], name: str) -> Never:
    """Raises the AttributeError of a name that `of` has not, and may have had."""
    if name in names:
        raise AttributeError(f"{of} has no {name} any more: {names[name]}")
    raise AttributeError(f"{of} has no attribute {name!r}")


def of_monitor(name: str) -> Never:
    """What `hostcall.monitor` had once."""
    events = (
        "jax.profiler.trace(folder) shows calls, taps and deliveries (the page"
        " 'Watching a program'), and hc.monitor.flight() has the last 1,000"
    )
    refuse("module 'hostcall.monitor'", {"events": events}, name)


def of_bridge(name: str) -> Never:
    """What `hostcall.bridge` had once."""
    autograd = (
        "hc.bridge.value_and_grad(autograd.value_and_grad(fn)) takes autograd's own"
        " value and gradient"
    )
    sympy = (
        'sympy.lambdify(symbols, expression, modules="jax") makes JAX code (the page'
        " 'Functions from other libraries' has a special function that JAX lacks)"
    )
    gone = {"autograd": autograd, "sympy": sympy}
    refuse("module 'hostcall.bridge'", gone, name)
