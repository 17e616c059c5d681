"""For type checkers: JAX's modules, by their names in needs.py."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn

from jax._src import api as api
from jax._src import array as array
from jax._src import buffer_callback as buffer_callback
from jax._src import callback as callback
from jax._src import compiler as compiler
from jax._src import config as config
from jax._src import core as core
from jax._src import custom_partitioning as custom_partitioning
from jax._src import debugging as debugging
from jax._src import dispatch as dispatch
from jax._src import distributed as distributed
from jax._src import dtypes as dtypes
from jax._src import effects as effects
from jax._src import ffi as ffi
from jax._src import flattree as flattree
from jax._src import linear_util as linear_util
from jax._src import literals as literals
from jax._src import mesh as mesh
from jax._src import pretty_printer as pretty_printer
from jax._src import shard_map as shard_map
from jax._src import sharding_impls as sharding_impls
from jax._src import source_info_util as source_info_util
from jax._src import stages as stages
from jax._src import tree_util as tree_util
from jax._src import util as util
from jax._src import xla_bridge as xla_bridge
from jax._src.interpreters import batching as batching
from jax._src.interpreters import mlir as mlir
from jax._src.interpreters import partial_eval as partial_eval
from jax._src.interpreters import pxla as pxla
from jax._src.lax import lax as lax
from jax._src.lax import slicing as slicing
from jax._src.lax import windowed_reductions as windowed_reductions
from jax._src.lib import guard_lib as guard_lib
from jax._src.lib import xla_client as xla_client
from jax._src.state import discharge as discharge
from jax.experimental.roofline import roofline as roofline

from hostcall._jax.needs import Part

JAX_VERSION: tuple[int, ...]
export: Any
jaxlib: Any
pallas: Any
key_reuse: Any

def version_of(text: str) -> tuple[int, ...]: ...
def is_newer_than_tested() -> bool: ...
def refuse_by(refusal: Callable[[str], Exception]) -> None: ...
def refuse(part: Part, what: str) -> NoReturn: ...
def missing(part: Part) -> str: ...
def missing_of(part: Part) -> str: ...
def unwrapped(function: Any) -> FunctionType | None: ...
def require(part: Part) -> None: ...
def unfit(what: str) -> ImportError: ...
def unfit_for(error: ImportError | AttributeError) -> ImportError | None: ...
