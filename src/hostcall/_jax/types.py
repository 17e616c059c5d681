"""Names for what JAX passes to us, where JAX exports no class of its own.

An array that may be traced is a `jax.Array`: tracers count as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.interpreters import ad as _ad
from jax.interpreters import mlir as _mlir
from jaxlib.mlir import ir as _ir

from hostcall._jax.door import core as _core
from hostcall._jax.door import dtypes as _dtypes
from hostcall._jax.door import effects as _effects
from hostcall._jax.door import partial_eval as _src_pe
from hostcall._jax.door import pretty_printer as _pretty_printer
from hostcall._jax.door import pxla as _pxla
from hostcall._jax.door import xla_client as _xla_client

# The shape and dtype of an argument, a result or a variable.
Aval: TypeAlias = jax.core.ShapedArray
# The dtype of a typed PRNG key.
KeyDtype: TypeAlias = _dtypes.ExtendedDType
Device: TypeAlias = jax.Device
# A NumPy dtype, or that of typed keys, for which JAX exports no class.
Dtype: TypeAlias = Any
# The back end that runs programs.
Client: TypeAlias = _xla_client.Client
Effect: TypeAlias = _effects.Effect
Sharding: TypeAlias = jax.sharding.Sharding
Mesh: TypeAlias = jax.sharding.Mesh
TreeDef: TypeAlias = jax.tree_util.PyTreeDef
# A document of the pretty printer.
Doc: TypeAlias = _pretty_printer.Doc
# What orders programs at run time.
Token: TypeAlias = _core.Token
# A program that is ready to run on its devices.
Executable: TypeAlias = _pxla.ExecuteReplicated

# --- Of programs while they are traced ------------------------------------------------

Jaxpr: TypeAlias = _core.Jaxpr
JaxprEquation: TypeAlias = _core.JaxprEqn
Var: TypeAlias = _core.Var
Atom: TypeAlias = _core.Var | _core.Literal
Primitive: TypeAlias = _core.Primitive
Trace: TypeAlias = jax.core.Trace
# What partial evaluation gives to a rule.
JaxprTrace: TypeAlias = _src_pe.JaxprTrace
Tracer: TypeAlias = jax.core.Tracer
# A tangent or cotangent that is known to be zero.
Zero: TypeAlias = _ad.Zero
# The parameters of a primitive's equation, by name: each primitive has its own.
Params: TypeAlias = dict[str, Any]

# --- Of the program that a lowering makes ---------------------------------------------

LoweringContext: TypeAlias = _mlir.LoweringRuleContext
Value: TypeAlias = _ir.Value
LoweringRule: TypeAlias = Callable[..., object]
# What a lowering emits: the values of the results, and the token that comes out.
Emitted: TypeAlias = tuple[list[Value], Value | None]
IrType: TypeAlias = _ir.Type
Operation: TypeAlias = _ir.OpView
Attribute: TypeAlias = _ir.Attribute
