"""What JAX keeps in one place in 0.10.2 and in another in 0.12.0.1.

The other files ask for no version. (Where JAX passes other arguments to a rule, the
rule takes both.)
"""

from __future__ import annotations

try:
    from jax._src.core import ClosedJaxpr
except ImportError:  # one type with the open jaxpr since 0.12
    from jax._src.core import Jaxpr as ClosedJaxpr
try:
    from jax._src.mesh import abstract_mesh_context_manager, device_context
except ImportError:
    from jax._src.config import abstract_mesh_context_manager, device_context
try:
    from jax._src.callback import mesh_lib as _mesh_lib
except ImportError:
    _mesh_lib = None

# In JAX 0.10 a callback of JAX's own still sees the meshes of the dispatching thread,
# and Pallas's interpreter, which runs in such callbacks, reads the TPU kind from them.
CALLBACKS_HIDE_MESHES = _mesh_lib is not None

__all__ = [
    "CALLBACKS_HIDE_MESHES",
    "ClosedJaxpr",
    "abstract_mesh_context_manager",
    "device_context",
]
