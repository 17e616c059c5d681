"""The callable that the engine runs for a torch function: arrays in, arrays out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from hostcall._core.errors import DerivativeError
from hostcall.bridge._library import Code
from hostcall.bridge._torch.code import (
    Mapped,
    Pulled,
    Pushed,
    conjugate,
    has_derivative,
)
from hostcall.bridge._torch.tensors import (
    array,
    check_unwritten,
    is_array,
    own_tensor,
    tensor,
)

tree = jax.tree_util

# torch.set_num_threads sets OpenMP's number for the calling thread only. Another thread
# takes it over in the first of some operations, to which small matrix products don't
# belong: they would run on a team of all cores, on each of XLA's threads. Asking for
# the number takes it over too.
take_over_number_of_threads = torch.get_num_threads


class OnHost(Code):
    """A function of tensors as a function of the host's arrays.

    Attributes:
        code: one of the classes in `code`.
    """

    __signature__: inspect.Signature  # set for a module

    def __init__(self, code: Any, name: str, source: str) -> None:
        super().__init__(name, source)
        self.code = code

    def derived(self, what: str, name: str, source: str) -> Code:
        derivative = {"vjp": Pulled, "jvp": Pushed}[what]
        return OnHost(derivative(self.code), name, source)

    def mapped(self, flags: bytes, _: str, name: str, source: str) -> Code:
        """A batch of it: the arrays in `flags` have a batch axis in front."""
        return OnHost(Mapped(self.code, flags), name, source)

    def __call__(self, *args: Any) -> Any:
        take_over_number_of_threads()
        # Autograd is on in every call, whatever the calling thread has set.
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return self._call(args)
        with torch.inference_mode(False), torch.enable_grad():
            return self._call(args)

    def _call(self, args: Sequence[Any]) -> Any:
        code = self.code
        make = own_tensor if code.writes or code.keeps else tensor
        lent: list[torch.Tensor] = []
        whole: Sequence[Any] = lent
        # Few steps for the usual arguments: once torch has gone through large tensors,
        # the caches are cold, and each line of Python takes ten times as long.
        for arg in args:
            if type(arg) is not np.ndarray or not is_array(arg):
                break
        else:
            for arg in args:
                lent.append(make(arg))
        if len(lent) < len(args):
            leaves, treedef = tree.tree_flatten(args)
            for i, leaf in enumerate(leaves):
                if is_array(leaf):
                    leaves[i] = make(leaf)
                    lent.append(leaves[i])
            whole = treedef.unflatten(leaves)
        value = code(*whole)
        if make is tensor:
            check_unwritten(lent, self.__qualname__)
        if isinstance(value, torch.Tensor):
            return array(value)
        return tree.tree_map(array, value)

    def forward(self, args: Sequence[Any], nondiff: Sequence[int]) -> tuple[Any, Any]:
        """(result, Graph). The graph owns its tensors."""
        code = self.code
        take_over_number_of_threads()
        inputs: list[torch.Tensor] = []

        def enter(leaf: Any, differentiable: bool) -> Any:
            if not is_array(leaf):
                return leaf
            x = own_tensor(leaf)
            inputs.append(x)
            if differentiable and has_derivative(x):
                x.requires_grad_()
            # A leaf of the graph can't be written to in place, but a copy of it can.
            return x.clone() if code.writes else x

        with torch.inference_mode(False), torch.enable_grad():
            whole = []
            for position, arg in enumerate(args):
                may = position not in nondiff
                if position == 0 and code.buffers:
                    names = sorted(arg)  # the order in which JAX flattens a dict
                    parts = {
                        k: enter(arg[k], may and k not in code.buffers) for k in names
                    }
                    whole.append(parts)
                else:
                    whole.append(
                        tree.tree_map(lambda leaf, may=may: enter(leaf, may), arg)
                    )
            value = code(*whole)
        outs = tree.tree_leaves(value)
        recorded = [
            x if isinstance(x, torch.Tensor) and x.requires_grad else None for x in outs
        ]
        return tree.tree_map(array, value), Graph(recorded, inputs)

    @staticmethod
    def backward(
        graph: Graph, cotangents: Sequence[Any], wanted: Sequence[bool]
    ) -> list[Any]:
        """The cotangents of the wanted tensors of the arguments; None for zero."""
        take_over_number_of_threads()
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return OnHost.backward(graph, cotangents, wanted)
        outs, seeds = [], []
        for out, ct in zip(graph.outs, cotangents, strict=True):
            if out is not None and ct is not None:
                outs.append(out)
                seeds.append(conjugate(tensor(ct)).to(out.dtype))
        inputs = [x for x, flag in zip(graph.inputs, wanted, strict=True) if flag]
        if not all(x.requires_grad for x in inputs):
            raise DerivativeError(
                "hostcall: a module of hc.bridge.torch is differentiated with respect"
                " to one of its buffers, which have no derivative. Differentiate with"
                " respect to the parameters only:"
                " lambda params: f({**params, **buffers}, x)"
            )
        if not outs:
            return [None] * len(inputs)
        # The graph is kept: only the residual store knows whether it is needed again.
        found = torch.autograd.grad(
            outs, inputs, seeds, retain_graph=True, allow_unused=True
        )
        return [None if x is None else array(conjugate(x)) for x in found]


class Graph:
    """What a forward pass leaves for its backward pass.

    Attributes:
        outs: the leaves of the result; None for those that depend on no input.
        inputs: the tensors of the arguments.
    """

    __slots__ = ("inputs", "outs")

    def __init__(self, outs: list[Any], inputs: list[torch.Tensor]) -> None:
        self.outs, self.inputs = outs, inputs
