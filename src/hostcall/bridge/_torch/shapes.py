"""Finds what a torch function returns, and whether it writes to its arguments.

Nothing is computed: torch runs the function on fake tensors, which have a shape and a
dtype but no values.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hostcall import _jax
from hostcall._core.errors import SpecError
from hostcall.bridge._torch.tensors import NUMPY_DTYPES, TORCH_DTYPES, no_such_dtype

tree = jax.tree_util


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
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._look(func._schema, args, kwargs)
        return func(*args, **kwargs)

    def _look(self, schema: Any, args: Any, kwargs: Any) -> None:
        for number, parameter in enumerate(schema.arguments):
            if parameter.alias_info is None or not parameter.alias_info.is_write:
                continue
            at = args[number] if number < len(args) else kwargs.get(parameter.name)
            for leaf in tree.tree_leaves(at):
                if isinstance(leaf, torch.Tensor):
                    self.wrote |= _memory(leaf) in self.memory


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def describe(fn: Any, avals: Any) -> tuple[Any, bool]:
    """Returns (a spec of what `fn` returns, whether it writes to its arguments).

    Raises:
        SpecError: the shape of a result depends on values, or a result is not a tensor.
        Whatever torch or `fn` raise if `fn` asks for values.
    """
    try:
        return _described(fn, avals, None)
    except DynamicOutputShapeException:
        # A size depends on values. With symbolic sizes the function runs on, and
        # `struct` refuses that only if it is the size of a result.
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        return _described(fn, avals, ShapeEnv())


def _described(fn: Any, avals: Any, sizes: Any) -> tuple[Any, bool]:
    """`sizes` holds the sizes that depend on values; with None they are an error."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes)
    with mode, _Watch() as watch:

        def fake(leaf: Any) -> Any:
            if not hasattr(leaf, "shape"):
                return leaf
            dtype = TORCH_DTYPES.get(np.dtype(leaf.dtype))
            if dtype is None:
                raise SpecError(no_such_dtype(leaf.dtype), code="hc-result-spec")
            tensor = torch.empty(leaf.shape, dtype=dtype, device="cpu")
            watch.memory.add(_memory(tensor))
            return tensor

        tensors = tree.tree_map(fake, avals)
        value = fn(*tensors)
        spec = tree.tree_map(struct, value)
    return spec, watch.wrote


def struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a result as JAX will have them."""
    if isinstance(leaf, torch.Tensor):
        if any(isinstance(n, torch.SymInt) for n in leaf.shape):
            raise SpecError(
                varying(f"it returns {list(leaf.shape)}"), code="hc-result-spec"
            )
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


def varying(what: str) -> str:
    return (
        "hostcall: the result shapes of a function of hc.bridge.torch seem to depend on"
        f" values: {what}. A compiled program needs fixed shapes: return a mask, or pad"
        " the result. If the shapes are in fact fixed, declare them with result="
    )
