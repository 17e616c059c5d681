"""The HostFunction of a torch function: what it returns, and its batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hostcall import _jax
from hostcall._core.errors import SpecError
from hostcall._core.source import source_of
from hostcall._host_function.host import checked
from hostcall.bridge._library import LibraryFunction, is_operand, shaped
from hostcall.bridge._torch.code import Module, Plain
from hostcall.bridge._torch.host import OnHost
from hostcall.bridge._torch.tensors import (
    NUMPY_DTYPES,
    TORCH_DTYPES,
    array,
    no_such_dtype,
)

tree = jax.tree_util


def make(fn: Callable[..., Any], shown: str, **options: Any) -> TorchFunction:
    """Makes a TorchFunction or a TorchModule from the options of `hc.bridge.torch`."""
    is_module = isinstance(fn, torch.nn.Module)
    code = Module(fn) if is_module else Plain(fn)
    on_host = OnHost(code, shown, source_of(fn), fn)
    if is_module:
        forward = inspect.signature(fn.forward)  # type: ignore[attr-defined]
        first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY)
        rest = list(forward.parameters.values())
        on_host.__signature__ = forward.replace(parameters=[first, *rest])
    options["nondiff"] = checked(shown, options["result"], options["nondiff"])
    return (TorchModule if is_module else TorchFunction)(on_host, **options)


class TorchFunction(LibraryFunction):
    """A torch function in JAX programs. `hc.bridge.torch` makes it."""

    fn: OnHost
    rules_copy = True

    def __init__(self, on_host: OnHost, *, vmap_method: Any, **options: Any) -> None:
        self._by_torch = vmap_method == "torch"
        method = None if self._by_torch else vmap_method
        super().__init__(
            on_host, vmap_method=method, by_graph=not self._by_torch, **options
        )
        if self._by_torch:
            self.rules.batch = self._batch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its result. See `hc.bridge.torch`."""
        if kwargs:
            args = self._positional(args, kwargs)
        self.fn.run.check(args)
        return super().__call__(*args)

    def _infer(self, avals: tuple[Any, ...]) -> object:
        code = self.fn.run
        code.watch()
        try:
            spec, wrote = _describe(code, avals)
        except SpecError:
            raise
        except Exception:
            # Fake tensors have no values: either the function asked for one, or it is
            # wrong. A run on zeros tells.
            spec, wrote = super()._infer(avals), True
            _check_sizes(avals, spec)
        code.watched(wrote)
        return spec

    def _batch(self, size: int, in_batched: object, *args: object) -> tuple[Any, bool]:
        leaves, form = tree.tree_flatten(args)
        at = [i for i, x in enumerate(leaves) if is_operand(x)]
        all_flags = tree.tree_leaves(in_batched)
        flags = bytes(all_flags[i] for i in at)
        for i, flag in zip(at, flags, strict=True):
            shape, dtype = leaves[i].shape, leaves[i].dtype
            leaves[i] = jax.ShapeDtypeStruct(shape[1:] if flag else shape, dtype)
        leaves, treedef = tree.tree_flatten(self.spec(*form.unflatten(leaves)))
        wide = [jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in leaves]
        if size == 0:  # torch.func.vmap refuses an empty batch
            return treedef.unflatten([jnp.zeros(x.shape, x.dtype) for x in wide]), True
        mapped = self.derivative("vmap", flags, tuple(wide))
        return treedef.unflatten(mapped(*args)), True

    def _make(self, what: str, *given: Any) -> LibraryFunction:
        if what != "vmap":
            return super()._make(what)
        flags, wide = given
        same = {"derivatives": self.derivatives, "nondiff": self.nondiff}
        return self._over("vmap", flags, result=list(wide), **same)

    def _over(self, what: str, *flags: bytes, **more: Any) -> LibraryFunction:
        if self._by_torch:
            more["vmap_method"] = "torch"
        return super()._over(what, *flags, **more)


class TorchModule(TorchFunction):
    """An nn.Module in JAX programs, called with (params, *args).

    `hc.bridge.torch` makes it.
    """

    def parameters(self) -> dict[str, jax.Array]:
        """Copies of the module's parameters as they are now, by name."""
        return _copies(self.fn.run.fn.named_parameters())

    def buffers(self) -> dict[str, jax.Array]:
        """Copies of the module's buffers by name: `f({**params, **f.buffers()}, x)`."""
        return _copies(self.fn.run.fn.named_buffers())


def _copies(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, jax.Array]:
    return {name: jnp.array(array(x)) for name, x in named}


def _check_sizes(avals: object, spec: object) -> None:
    """Refuses an empty result of non-empty zeros: its size may depend on values.

    A call with an empty result is never made, so the mistake would go unseen.
    """
    if any(0 in x.shape for x in shaped(avals)):
        return
    if any(0 in x.shape for x in tree.tree_leaves(spec)):
        raise SpecError(
            _varying("for zeros it returned an empty array"), code="hc-result-spec"
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
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        for number, parameter in enumerate(func._schema.arguments):
            if parameter.alias_info is None or not parameter.alias_info.is_write:
                continue
            at = args[number] if number < len(args) else kwargs.get(parameter.name)
            for leaf in tree.tree_leaves(at):
                if isinstance(leaf, torch.Tensor):
                    self.wrote |= _memory(leaf) in self.memory
        return func(*args, **kwargs)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _describe(fn: Plain, avals: object) -> tuple[object, bool]:
    """Returns (a spec of what `fn` returns, whether it writes to its arguments).

    Raises:
        SpecError: the shape of a result depends on values, or a result is not a tensor.
        Whatever torch or `fn` raise if `fn` asks for values.
    """
    try:
        return _described(fn, avals, None)
    except DynamicOutputShapeException:
        # A size depends on values. With symbolic sizes the function runs on, and
        # `_struct` refuses that only if it is the size of a result.
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        return _described(fn, avals, ShapeEnv())


def _described(fn: Plain, avals: object, sizes: object) -> tuple[object, bool]:
    """`sizes` holds the sizes that depend on values; with None they are an error."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes)
    with mode, _Watch() as watch:

        def fake(leaf: object) -> object:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            dtype = TORCH_DTYPES.get(np.dtype(leaf.dtype))
            if dtype is None:
                raise SpecError(no_such_dtype(leaf.dtype), code="hc-result-spec")
            tensor = torch.empty(leaf.shape, dtype=dtype, device="cpu")
            watch.memory.add(_memory(tensor))
            return tensor

        tensors = tree.tree_map(fake, avals)
        value = fn(*tensors)
        spec = tree.tree_map(_struct, value)
    return spec, watch.wrote


def _struct(leaf: object) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a result as JAX will have them."""
    if isinstance(leaf, torch.Tensor):
        if any(isinstance(n, torch.SymInt) for n in leaf.shape):
            raise SpecError(
                _varying(f"it returns {list(leaf.shape)}"), code="hc-result-spec"
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


def _varying(what: str) -> str:
    return (
        "hostcall: the result shapes of a function of hc.bridge.torch seem to depend on"
        f" values: {what}. A compiled program needs fixed shapes: return a mask, or pad"
        " the result. If the shapes are in fact fixed, declare them with result="
    )
