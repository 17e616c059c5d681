"""What a torch function returns, and whether it writes to its arguments.

Nothing is computed: torch runs the function on fake tensors, which have a shape and a
dtype but no values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from hostcall import _jax
from hostcall._core.errors import SpecError
from hostcall.bridge._torch.tensors import NUMPY_DTYPES, torch_dtype

tree = jax.tree_util

VARYING = (
    "hostcall: the result shapes of a function of hc.bridge.torch seem to depend on"
    " values. A compiled program needs fixed shapes: return a mask, or pad the result."
    " If the shapes are in fact fixed, declare them with result="
)


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Sees each operation, and notes whether one writes to the memory of some tensors.

    The tensors' versions would not do: writes to `x.data`, or in inference mode, don't
    count in them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()
        self.wrote = False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        _: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        parameters = func._schema.arguments
        # The operation may get fewer arguments than it has parameters.
        names = [parameter.name for parameter in parameters]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        for parameter in parameters:
            if parameter.alias_info and parameter.alias_info.is_write:
                # A tensor, or a list of them.
                for leaf in tree.tree_leaves(arguments.get(parameter.name)):
                    if isinstance(leaf, torch.Tensor):
                        self.wrote |= _memory(leaf) in self.memory
        return func(*args, **kwargs)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def describe(fn: Callable[..., object], avals: object) -> tuple[object, bool]:
    """Returns (a spec of what `fn` returns, whether it writes to its arguments).

    Raises:
        SpecError: the shape of a result depends on values, or it is not a tensor.
        Whatever torch or `fn` raise if `fn` asks for values.
    """
    # A size that depends on values is symbolic, which `_struct` refuses in a result.
    sizes = ShapeEnv(allow_scalar_outputs=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes)
    with mode, _Watch() as watch:

        def fake(leaf: object) -> object:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            dtype = torch_dtype(np.dtype(leaf.dtype))
            tensor = torch.empty(leaf.shape, dtype=dtype, device="cpu")
            watch.memory.add(_memory(tensor))
            return tensor

        tensors = tree.tree_map(fake, avals)
        result = fn(*tensors)
        return tree.tree_map(_struct, result), watch.wrote


def _struct(leaf: object) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a result as JAX will have them."""
    if isinstance(leaf, torch.Tensor):
        if any(isinstance(n, torch.SymInt) for n in leaf.shape):
            raise SpecError(VARYING, code="hc-result-spec")
        dtype = NUMPY_DTYPES[leaf.dtype]
    elif isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic)):
        dtype = np.asarray(leaf).dtype
    else:
        kind = type(leaf)
        raise SpecError(
            f"hostcall: a function of hc.bridge.torch returned {kind.__module__}."
            f"{kind.__qualname__}, which is neither a tensor nor a pytree of tensors."
            " Return tensors in tuples, lists and dicts, such as tuple(x.max(0))",
            code="hc-result-spec",
        )
    return jax.ShapeDtypeStruct(np.shape(leaf), _jax.canonical_dtype(dtype))
