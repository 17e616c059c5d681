"""The HostFunction of a torch function: its rules, and what it returns.

    derivatives   reverse mode            forward mode
    0             none                    none
    1             host code: a graph      host code: torch.func.jvp
    more          JAX code over another TorchFunction, with one order less: torch's vjp,
                  or its jvp, of the first

The second line is the fast way: torch's graph of the forward pass stays on the host,
and the backward pass runs it there. The third can be differentiated and batched again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hostcall import _jax
from hostcall._core.errors import SpecError
from hostcall._core.said_results import rule_of
from hostcall._core.source import inspect_callable
from hostcall._host_function.host import positions
from hostcall._host_function.rules import Rule, among
from hostcall._host_function.trees import pick
from hostcall.bridge._library import Arrays, Flags, MarkedArrays, OverOthers, is_operand
from hostcall.bridge._torch.code import OfModule, OnHost
from hostcall.bridge._torch.fake_run import VARYING, describe
from hostcall.bridge._torch.tensors import array

tree = jax.tree_util


def make(fn: Callable[..., Any], shown: str, **options: Any) -> TorchFunction:
    """Makes a TorchFunction or a TorchModule from the options of `hc.bridge.torch`."""
    options["nondiff"] = positions(shown, options["nondiff"])
    options["result"] = rule_of(fn, shown, options["result"])
    source = inspect_callable(fn).source
    if isinstance(fn, torch.nn.Module):
        return TorchModule(OfModule(fn, shown, source), **options)
    return TorchFunction(OnHost(fn, shown, source, like=fn), **options)


class TorchFunction(OverOthers):
    """A torch function in JAX programs. `hc.bridge.torch` makes it.

    Attributes:
        derivatives: the highest order of its derivatives.
    """

    fn: OnHost
    rules_copy = True

    def __init__(
        self,
        code: OnHost,
        *,
        derivatives: int,
        advice: str,
        vmap_method: Any = None,
        **options: Any,
    ) -> None:
        by_torch = vmap_method == "torch"
        method_of_rows = None if by_torch else vmap_method
        super().__init__(code, vmap_method=method_of_rows, **options)
        self.derivatives = derivatives
        self.advice = advice
        self._method = vmap_method
        if by_torch:
            self.rules.batch = self._batch
        # The second line of the table above. A graph is that of one row, so a batch
        # that torch itself makes goes by the third.
        if derivatives == 1 and not by_torch:
            self.rules.vjp = Rule(self._forward, "host", code.backward, flat=True)
            self.rules.jvp = Rule(self._push_on_host, "host", flat=True)
        elif derivatives:
            self.set_rules()

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
            spec, wrote = describe(code.on_tensors, avals)
        except SpecError:
            raise
        except Exception:
            # Fake tensors have no values: either the function asked for one, or it is
            # wrong. A run on zeros tells.
            spec = super()._infer(avals)
            wrote = True
            # A call with an empty result is never made, so it would go unseen that its
            # size depends on values.
            if _some_empty(tree.tree_leaves(spec)) and not _some_empty(_shaped(avals)):
                raise SpecError(VARYING, code="hc-result-spec") from None
        code.wrote |= wrote
        code.writes = code.wrote
        return spec

    # --- Derivatives and batches ------------------------------------------------------

    def _forward(self, *args: object) -> tuple[object, object]:
        return self.fn.forward(args, among(self.nondiff, len(args)))

    def _push_on_host(self, args: Arrays, tangents: Arrays, out_diff: Flags) -> object:
        return self.derivative("jvp").fn(args, tangents, bytes(out_diff))

    def _batch(self, size: int, in_batched: object, *args: object) -> tuple[Any, bool]:
        """The batch rule: (results, True), as each of them has the batch axis."""
        are_operands = list(map(is_operand, tree.tree_leaves(args)))
        flags = bytes(pick(tree.tree_leaves(in_batched), are_operands))
        batch = MarkedArrays(args, [True] * len(flags), is_operand)
        # The spec of the results follows from what one row gets.
        row = []
        for operand, has_axis in zip(batch.arrays, flags, strict=True):
            shape = operand.shape[1:] if has_axis else operand.shape
            row.append(jax.ShapeDtypeStruct(shape, operand.dtype))
        row_spec = self._spec(batch.filled(row))
        leaves, treedef = tree.tree_flatten(row_spec)
        wide = [jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in leaves]
        if size == 0:  # torch.func.vmap refuses an empty batch
            with _jax.able_to_hold(*[x.dtype for x in wide]):
                empty = [jnp.zeros(x.shape, x.dtype) for x in wide]
            return treedef.unflatten(empty), True
        mapped = self.derivative("vmap", flags, tuple(wide))
        return treedef.unflatten(mapped(*args)), True

    def _make(
        self, derivative: str, flags: bytes = b"", specs: Arrays = ()
    ) -> TorchFunction:
        """Makes a derivative, or for "vmap" the function of a batch.

        For a batch, `flags` says which arrays have the batch axis, and `specs` are
        those of the results.
        """
        name = f"{derivative} of {self.__qualname__}"
        # With other methods a derived function would get a whole batch, but its spec
        # has the shapes of one row.
        of_rows = self._method in ("sequential", "parallel", "torch")
        options: dict[str, Any] = {
            "name": name,
            "advice": self.advice,
            "vmap_method": self._method if of_rows else None,
            "lend": self.options.lend,
        }
        if derivative == "vmap":
            code = self.fn.derived(derivative, name, flags)
            # It takes the arguments of this function, and has as many derivatives.
            options["result"] = list(specs)
            options["derivatives"] = self.derivatives
            options["nondiff"] = self.nondiff
        else:
            code = self.fn.derived(derivative, name)
            options["result"] = functools.partial(self._derived_spec, derivative)
            options["derivatives"] = max(self.derivatives - 1, 0)
        function = type(self)(code, **options)
        # The timeout, the executor and the limits count for derivatives as well.
        function.policy = self.policy
        return function

    def _derived_spec(
        self, derivative: str, args: Arrays, vectors: object, flags: bytes
    ) -> object:
        """The spec of a derivative, from the specs of its arguments (`Code.over`)."""
        del vectors  # the cotangents or tangents
        if derivative == "vjp":
            # A cotangent is shaped like its argument.
            return pick(_shaped(args), flags)
        outs = tree.tree_leaves(self._spec(tuple(args)))
        return outs, pick(outs, flags)


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


def _shaped(avals: object) -> list[jax.ShapeDtypeStruct]:
    leaves = tree.tree_leaves(avals)
    return [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]


def _some_empty(specs: Iterable[jax.ShapeDtypeStruct]) -> bool:
    return any(0 in spec.shape for spec in specs)


def _copies(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, jax.Array]:
    return {name: jnp.array(array(x)) for name, x in named}
