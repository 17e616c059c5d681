"""What JAX keeps in one place in 0.10.2 and in another in 0.12.0.1.

The other files ask for no version. (Where JAX passes other arguments to a rule, the
rule takes both.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.core import Jaxpr
from jax._src.interpreters.partial_eval import (
    make_jaxpr_effects as _make_jaxpr_effects,
)

try:
    from jax._src.core import ClosedJaxpr
except ImportError:  # one type with the open jaxpr since 0.12
    ClosedJaxpr = Jaxpr
try:
    from jax._src.mesh import abstract_mesh_context_manager, device_context
except ImportError:
    from jax._src.config import abstract_mesh_context_manager, device_context
try:
    from jax._src.callback import mesh_lib as _mesh_lib
except ImportError:
    _mesh_lib = None

MESH_SETTINGS = abstract_mesh_context_manager, device_context

# In JAX 0.10 a callback of JAX's own still sees the meshes of the dispatching thread,
# and Pallas's interpreter, which runs in such callbacks, reads the TPU kind from them.
CALLBACKS_HIDE_MESHES = _mesh_lib is not None


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr in a ClosedJaxpr, which JAX has before 0.12; else the jaxpr itself."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def closed_as(jaxpr: Jaxpr, new: Jaxpr) -> Jaxpr:
    """An open jaxpr made of `jaxpr`, closed if that is."""
    return new if open_jaxpr(jaxpr) is jaxpr else jaxpr.replace(jaxpr=new)


def changed(
    jaxpr: Jaxpr, consts: Sequence[jax.Array] | None = None, **parts: Any
) -> Jaxpr:
    """The same with other constants, other parts of the open jaxpr, and the effects
    that follow from these.
    """
    inner = open_jaxpr(jaxpr)
    names = "constvars", "invars", "outvars", "eqns"
    of = [parts.get(name, getattr(inner, name)) for name in names]
    parts["effects"] = _make_jaxpr_effects(*of)
    own = {} if consts is None else {"consts": list(consts)}
    if inner is jaxpr:
        return jaxpr.replace(**parts, **own)
    return jaxpr.replace(jaxpr=inner.replace(**parts), **own)
