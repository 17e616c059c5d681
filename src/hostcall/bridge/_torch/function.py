"""The HostFunction of a torch function: what it returns, and its batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hostcall._core.errors import SpecError
from hostcall._core.source import name_of, source_of
from hostcall._host_function.host import checked
from hostcall.bridge._library import LibraryFunction, is_operand, shaped
from hostcall.bridge._torch import shapes
from hostcall.bridge._torch.code import Module, Plain
from hostcall.bridge._torch.host import OnHost
from hostcall.bridge._torch.tensors import array

tree = jax.tree_util


def make(
    fn: Callable[..., Any],
    *,
    name: str | None,
    derivatives: int,
    result: Any,
    nondiff: Any,
    **options: Any,
) -> TorchFunction:
    """Makes a TorchFunction or a TorchModule from the options of `hc.bridge.torch`."""
    shown = name or name_of(fn)
    is_module = isinstance(fn, torch.nn.Module)
    on_host = OnHost(Module(fn) if is_module else Plain(fn), shown, source_of(fn))
    functools.update_wrapper(on_host, fn, updated=())
    on_host.__qualname__ = shown
    if is_module:
        forward = inspect.signature(fn.forward)  # type: ignore[attr-defined]
        first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY)
        rest = list(forward.parameters.values())
        on_host.__signature__ = forward.replace(parameters=[first, *rest])
    made = TorchModule if is_module else TorchFunction
    return made(
        on_host,
        advice=f"It was made with derivatives={derivatives}. Write"
        f" hc.bridge.torch(fn, derivatives={derivatives + 1}), or keep the derivative"
        " out with jax.lax.stop_gradient on its arguments",
        name=name,
        derivatives=derivatives,
        result=result,
        nondiff=checked(shown, result, nondiff),
        **options,
    )


class TorchFunction(LibraryFunction):
    """A torch function in JAX programs. `hc.bridge.torch` makes it."""

    _NOT_PICKLED = (*LibraryFunction._NOT_PICKLED, "_mapped")
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
        self.fn.code.check(args)
        return super().__call__(*args)

    def _infer(self, avals: Any) -> Any:
        code = self.fn.code
        code.watch()
        try:
            spec, wrote = shapes.describe(code, avals)
        except SpecError:
            raise
        except Exception:
            # Fake tensors have no values: either the function asked for one, or it is
            # wrong. A run on zeros tells.
            code.watched(True)
            spec = super()._infer(avals)
            _check_sizes(avals, spec)
            return spec
        code.watched(wrote)
        return spec

    def _batch(self, size: int, in_batched: Any, *args: Any) -> Any:
        pairs = zip(tree.tree_leaves(args), tree.tree_leaves(in_batched), strict=True)
        flags = bytes(flag for x, flag in pairs if is_operand(x))
        rest = iter(flags)

        def row(x: Any) -> Any:
            if not is_operand(x):
                return x
            return jax.ShapeDtypeStruct(x.shape[1:] if next(rest) else x.shape, x.dtype)

        spec = self.spec(*tree.tree_map(row, args))
        leaves, treedef = tree.tree_flatten(spec)
        wide = [jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in leaves]
        if size == 0:  # torch.func.vmap refuses an empty batch
            return treedef.unflatten([jnp.zeros(x.shape, x.dtype) for x in wide]), True
        key = flags, tuple((x.shape, x.dtype) for x in wide), treedef
        mapped = self._mapped.get(key)
        if mapped is None:
            code = functools.partial(self.fn.mapped, flags)
            order = self.derivatives
            made = self._over(
                "vmap", code, wide, derivatives=order, nondiff=self.nondiff
            )
            # Another thread may have been faster: all use the same one, so that JAX's
            # caches hit.
            mapped = self._mapped.setdefault(key, made)
        return treedef.unflatten(mapped(*args)), True

    @functools.cached_property
    def _mapped(self) -> dict[Any, LibraryFunction]:
        return {}

    def _over(self, what: str, make: Any, result: Any, **more: Any) -> LibraryFunction:
        if self._by_torch:
            more["vmap_method"] = "torch"
        return super()._over(what, make, result, **more)


class TorchModule(TorchFunction):
    """An nn.Module in JAX programs, called with (params, *args).

    `hc.bridge.torch` makes it.
    """

    def parameters(self) -> dict[str, jax.Array]:
        """Copies of the module's parameters as they are now, by name."""
        return _copies(self.fn.code.fn.named_parameters())

    def buffers(self) -> dict[str, jax.Array]:
        """Copies of the module's buffers by name: `f({**params, **f.buffers()}, x)`."""
        return _copies(self.fn.code.fn.named_buffers())


def _copies(named: Any) -> dict[str, jax.Array]:
    return {name: jnp.array(array(x)) for name, x in named}


def _check_sizes(avals: Any, spec: Any) -> None:
    """Refuses an empty result of non-empty zeros: its size may depend on values.

    A call with an empty result is never made, so the mistake would go unseen.
    """
    if any(0 in x.shape for x in shaped(avals)):
        return
    if any(0 in x.shape for x in tree.tree_leaves(spec)):
        raise SpecError(
            shapes.varying("for zeros it returned an empty array"),
            code="hc-result-spec",
        )
