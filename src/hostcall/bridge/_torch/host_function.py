"""The HostFunction of a torch function: what it returns, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from hostcall import _jax
from hostcall._core.errors import SpecError
from hostcall._core.said_results import rule_of
from hostcall._core.source import inspect_callable
from hostcall._host_function.host import positions
from hostcall.bridge._library import LibraryFunction, shaped
from hostcall.bridge._torch.code import OfModule, OnHost
from hostcall.bridge._torch.tensors import NUMPY_DTYPES, array, torch_dtype

tree = jax.tree_util


def make(fn: Callable[..., Any], shown: str, **options: Any) -> TorchFunction:
    """Makes a TorchFunction or a TorchModule from the options of `hc.bridge.torch`."""
    options["nondiff"] = positions(shown, options["nondiff"])
    options["result"] = rule_of(fn, shown, options["result"])
    source = inspect_callable(fn).source
    if isinstance(fn, torch.nn.Module):
        return TorchModule(OfModule(fn, shown, source), **options)
    return TorchFunction(OnHost(fn, shown, source, like=fn), **options)


class TorchFunction(LibraryFunction):
    """A torch function in JAX programs. `hc.bridge.torch` makes it."""

    fn: OnHost
    rules_copy = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its result. See `hc.bridge.torch`."""
        if kwargs:
            args = self._positional(args, kwargs)
        self.fn.check(args)
        return super().__call__(*args)

    def _infer(self, avals: tuple[Any, ...]) -> object:
        """The spec of the result; also finds out whether the function writes."""
        code = self.fn
        code.writes = True  # so that a module gets copies of its own buffers
        try:
            spec, wrote = _describe(code.on_tensors, avals)
        except SpecError:
            raise
        except Exception:
            # Fake tensors have no values: either the function asked for one, or it is
            # wrong. A run on zeros tells.
            spec = super()._infer(avals)
            wrote = True
            # A call with an empty result is never made, so it would go unseen that its
            # size depends on values.
            if _some_empty(tree.tree_leaves(spec)) and not _some_empty(shaped(avals)):
                raise SpecError(_VARYING, code="hc-result-spec") from None
        code.wrote |= wrote
        code.writes = code.wrote
        return spec


class TorchModule(TorchFunction):
    """An nn.Module in JAX programs, called with (params, *args).

    `hc.bridge.torch` makes it.
    """

    def parameters(self) -> dict[str, jax.Array]:
        """Copies of the module's parameters as they are now, by name."""
        return _copies(self.fn.run.named_parameters())

    def buffers(self) -> dict[str, jax.Array]:
        """Copies of the module's buffers by name: `f({**params, **f.buffers()}, x)`."""
        return _copies(self.fn.run.named_buffers())


def _some_empty(specs: Iterable[jax.ShapeDtypeStruct]) -> bool:
    return any(0 in spec.shape for spec in specs)


def _copies(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, jax.Array]:
    return {name: jnp.array(array(x)) for name, x in named}


_VARYING = (
    "hostcall: the result shapes of a function of hc.bridge.torch seem to depend on"
    " values. A compiled program needs fixed shapes: return a mask, or pad the result."
    " If the shapes are in fact fixed, declare them with result="
)


# --- What a function returns, and whether it writes to its arguments -----------------
#
# Nothing is computed: torch runs the function on fake tensors, which have a shape and a
# dtype but no values.


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


def _describe(fn: Callable[..., object], avals: object) -> tuple[object, bool]:
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
            raise SpecError(_VARYING, code="hc-result-spec")
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
