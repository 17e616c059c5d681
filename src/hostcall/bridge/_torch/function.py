"""The HostFunction of a torch function: how it is called, and its rules.

    derivatives   vmap_method   reverse mode            forward mode
    0             any           none                    none
    1             not "torch"   host code: a graph      host code: torch.func.jvp
    otherwise                   JAX code over another bridged function, with one order
                                less: torch.func.vjp, or torch.func.jvp, of the first

The second line is the fast way: torch's graph of the forward pass stays on the host,
and the backward pass runs it there. The third can be differentiated and batched again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hostcall._core.errors import SpecError
from hostcall._core.source import name_of, source_of
from hostcall._core.spec import flatten_arguments, is_array_like
from hostcall._host_function.function import HostFunction
from hostcall._host_function.host import checked
from hostcall._host_function.rules import HOST_RESIDUALS, Jvp, Vjp
from hostcall.bridge._torch import host, shapes
from hostcall.bridge._torch.code import (
    Flags,
    Mapped,
    Module,
    Plain,
    Pulled,
    Pushed,
)
from hostcall.bridge._torch.host import OnHost
from hostcall.bridge._torch.tensors import array

tree = jax.tree_util


def make(fn: Callable[..., Any], *, name: str | None, **options: Any) -> TorchFunction:
    """Makes a TorchFunction or a TorchModule from the options of `hc.bridge.torch`."""
    shown = name or name_of(fn)
    options["nondiff"] = checked(shown, options["result"], options["nondiff"])
    code: Plain = Plain(fn)
    made: type[TorchFunction] = TorchFunction
    if isinstance(fn, torch.nn.Module):
        code, made = Module(fn), TorchModule
    on_host = OnHost(code, shown, source_of(fn))
    functools.update_wrapper(on_host, fn, updated=())
    on_host.__qualname__ = shown
    advice = (
        f"It was made with derivatives={options['derivatives']}. Write"
        f" hc.bridge.torch(fn, derivatives={options['derivatives'] + 1}), or keep the"
        " derivative out with jax.lax.stop_gradient on its arguments"
    )
    return made(on_host, advice=advice, name=name, **options)


class TorchFunction(HostFunction[..., Any]):
    """A torch function in JAX programs. `hc.bridge.torch` makes it.

    Attributes:
        derivatives: the highest order of its derivatives.
    """

    _NOT_PICKLED = (*HostFunction._NOT_PICKLED, "_pulled", "_pushed", "_mapped")
    rules_copy = True

    def __init__(
        self,
        on_host: OnHost,
        *,
        derivatives: int,
        advice: str,
        vmap_method: Any,
        **options: Any,
    ) -> None:
        self._by_torch = vmap_method == "torch"
        method = None if self._by_torch else vmap_method
        options |= {"order": "pure", "arrays": "numpy"}
        super().__init__(on_host, vmap_method=method, **options)
        self._code = on_host.code
        self.derivatives = derivatives
        self.advice = advice
        if self._by_torch:
            self.rules.batch = self._batch
        if derivatives == 1 and not self._by_torch:
            vjp = Vjp(self._forward, host.backward, "host", HOST_RESIDUALS, True)
            jvp = Jvp(self._push_on_host, "host", flat=True)
        elif derivatives:
            vjp = Vjp(self._with_args, self._pull, "jax", HOST_RESIDUALS, True)
            jvp = Jvp(self._push, "jax", flat=True)
        else:
            return
        self.rules.vjp, self.rules.jvp = vjp, jvp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its result. See `hc.bridge.torch`."""
        if kwargs:
            args = self._positional(args, kwargs)
        self._code.check(args)
        return super().__call__(*args)

    # --- Results ---------------------------------------------------------------------

    def spec(self, *avals: Any) -> Any:
        """The spec of its result for arguments with these avals."""
        _, template = flatten_arguments(avals, {})
        return self._spec(avals, template)

    def _infer(self, avals: Any) -> Any:
        self._code.watch()
        try:
            spec, wrote = shapes.describe(self._code, avals)
        except SpecError:
            raise
        except Exception:
            # Fake tensors have no values: either the function asked for one, or it is
            # wrong. A run on zeros tells.
            self._code.watched(True)
            spec = super()._infer(avals)
            _check_sizes(avals, spec)
            return spec
        self._code.watched(wrote)
        return spec

    # --- Rules in host code -----------------------------------------------------------

    def _forward(self, *args: Any) -> Any:
        nondiff = self.nondiff_of(len(args))
        return host.forward(self._code, args, nondiff)

    def _push_on_host(self, args: Any, tangents: Any, out_diff: Any) -> Any:
        return self._pushed.fn(args, tangents, Flags(out_diff))

    # --- Rules in JAX code ------------------------------------------------------------

    def _with_args(self, *args: Any) -> Any:
        return self(*args), args

    def _pull(self, args: Any, cotangents: Any, wanted: Any) -> Any:
        return self._pulled(args, cotangents, Flags(wanted))

    def _push(self, args: Any, tangents: Any, out_diff: Any) -> Any:
        return self._pushed(args, tangents, Flags(out_diff))

    @functools.cached_property
    def _pulled(self) -> TorchFunction:
        def result(args: Any, cotangents: Any, wanted: Flags) -> Any:
            del cotangents
            return _flagged(_shaped(args), wanted.flags)

        return self._over("vjp", Pulled(self._code), result, self.derivatives - 1)

    @functools.cached_property
    def _pushed(self) -> TorchFunction:
        def result(args: Any, tangents: Any, out_diff: Flags) -> Any:
            del tangents
            outs = tree.tree_leaves(self.spec(*args))
            return outs, _flagged(outs, out_diff.flags)

        return self._over("jvp", Pushed(self._code), result, self.derivatives - 1)

    def _batch(self, size: int, in_batched: Any, *args: Any) -> Any:
        pairs = zip(tree.tree_leaves(args), tree.tree_leaves(in_batched), strict=True)
        flags = Flags([flag for x, flag in pairs if _is_operand(x)])
        rest = iter(flags.flags)

        def row(x: Any) -> Any:
            if not _is_operand(x):
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
            code = Mapped(self._code, flags)
            made = self._over("vmap", code, wide, self.derivatives)
            # Another thread may have been faster: all use the same one, so that JAX's
            # caches hit.
            mapped = self._mapped.setdefault(key, made)
        return treedef.unflatten(mapped(*args)), True

    @functools.cached_property
    def _mapped(self) -> dict[Any, TorchFunction]:
        return {}

    def _over(self, what: str, code: Any, result: Any, order: int) -> TorchFunction:
        """A function made from this one; its rows run in the same way."""
        method = self.options["vmap_method"]
        method = method if method in _OF_ROWS else None
        source = f"{what} of {source_of(self.fn)}"
        on_host = OnHost(code, f"{what} of {self.__qualname__}", source)
        return TorchFunction(
            on_host,
            derivatives=max(order, 0),
            advice=self.advice,
            vmap_method="torch" if self._by_torch else method,
            name=on_host.__qualname__,
            result=result,
            nondiff=self.nondiff if isinstance(code, Mapped) else (),
            lend=self.options["lend"],
            timeout=self.options["timeout"],
            executor=self.options["executor"],
        )


# The methods under which each row is a call. With the others a derived function would
# get a whole batch, but its spec has the shapes of one row.
_OF_ROWS = ("sequential", "parallel")


class TorchModule(TorchFunction):
    """An nn.Module in JAX programs, called with (params, *args).

    `hc.bridge.torch` makes it.
    """

    def __init__(self, on_host: OnHost, **options: Any) -> None:
        forward = inspect.signature(on_host.code.fn.forward)
        first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY)
        rest = list(forward.parameters.values())
        on_host.__signature__ = forward.replace(parameters=[first, *rest])
        super().__init__(on_host, **options)

    def parameters(self) -> dict[str, jax.Array]:
        """Copies of the module's parameters as they are now, by name."""
        return _copies(self._code.fn.named_parameters())

    def buffers(self) -> dict[str, jax.Array]:
        """Copies of the module's buffers by name: `f({**params, **f.buffers()}, x)`."""
        return _copies(self._code.fn.named_buffers())


def _copies(named: Any) -> dict[str, jax.Array]:
    return {name: jnp.array(array(x)) for name, x in named}


def _check_sizes(avals: Any, spec: Any) -> None:
    """Refuses an empty result of non-empty zeros: its size may depend on values.

    A call with an empty result is never made, so the mistake would go unseen.
    """
    if any(0 in x.shape for x in _shaped(avals)):
        return
    if any(0 in x.shape for x in tree.tree_leaves(spec)):
        raise SpecError(
            shapes.varying("for zeros it returned an empty array"),
            code="hc-result-spec",
        )


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) or is_array_like(leaf)


def _shaped(avals: Any) -> list[Any]:
    return [x for x in tree.tree_leaves(avals) if hasattr(x, "shape")]


def _flagged(avals: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The flagged avals, reduced to shape and dtype."""
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x, flag in zip(avals, flags, strict=True)
        if flag
    ]
