"""What JAX keeps in one place in 0.10.2 and in another in 0.12.0.1.

The other files ask for no version. (Where JAX passes other arguments to a rule, the
rule takes both.)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax._src.core import Jaxpr

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

JAXPRS = Jaxpr, ClosedJaxpr


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr in a ClosedJaxpr, which JAX has before 0.12; else the jaxpr itself."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def changed(
    jaxpr: Jaxpr, consts: Sequence[jax.Array] | None = None, **changes: object
) -> Jaxpr:
    """The same with other constants, and other parts of the open jaxpr."""
    inner = open_jaxpr(jaxpr)
    own = {} if consts is None else {"consts": list(consts)}
    if inner is jaxpr:
        return jaxpr.replace(**changes, **own)
    return jaxpr.replace(jaxpr=inner.replace(**changes), **own)
