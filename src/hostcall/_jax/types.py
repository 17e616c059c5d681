"""Names for what JAX passes to us, where JAX exports no class of its own.

An array that may be traced is a `jax.Array`: tracers count as such.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src.interpreters import mlir as _mlir
from jax._src.lib import xla_client as _xla_client
from jax._src.lib.mlir import ir as _ir

# The shape and dtype of an argument, a result or a variable.
Aval: TypeAlias = _core.ShapedArray
# The back end that runs programs.
Client: TypeAlias = _xla_client.Client
Device: TypeAlias = jax.Device
Effect: TypeAlias = _effects.Effect
Jaxpr: TypeAlias = _core.Jaxpr
JaxprEquation: TypeAlias = _core.JaxprEqn
Primitive: TypeAlias = _core.Primitive
Shard: TypeAlias = jax.Shard
Sharding: TypeAlias = jax.sharding.Sharding
Mesh: TypeAlias = jax.sharding.Mesh
TreeDef: TypeAlias = jax.tree_util.PyTreeDef
# What orders programs at run time.
Token: TypeAlias = _core.Token
# Of the program that a lowering makes.
LoweringContext: TypeAlias = _mlir.LoweringRuleContext
Value: TypeAlias = _ir.Value
IrType: TypeAlias = _ir.Type
