"""The callable that the engine runs for a torch function: arrays in, arrays out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import numpy as np
import torch

from hostcall._core.errors import DerivativeError
from hostcall._host_function.trees import pick
from hostcall.bridge._library import Arrays, Code, Flags, is_array
from hostcall.bridge._torch.code import Derived, Plain, conjugate, has_derivative
from hostcall.bridge._torch.tensors import array, check_unwritten, own_tensor, tensor

tree = jax.tree_util

P = ParamSpec("P")
R = TypeVar("R")
# The leaves of a result, None for those that depend on no input; the tensors of the
# arguments.
Graph: TypeAlias = tuple[list[torch.Tensor | None], list[torch.Tensor]]


def _entering_torch(run: Callable[P, R]) -> Callable[P, R]:
    """Sets what torch keeps for each thread, while `run` uses it.

    torch.set_num_threads sets OpenMP's number for the calling thread only. Another
    thread takes it over in the first of some operations, to which small matrix products
    don't belong: they would run on a team of all cores, on each of XLA's threads.
    Asking for the number takes it over too.

    Autograd is on in every call, whatever the calling thread has set.
    """

    @functools.wraps(run)
    def entering(*args: P.args, **kwargs: P.kwargs) -> R:
        torch.get_num_threads()
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return run(*args, **kwargs)
        with torch.inference_mode(False), torch.enable_grad():
            return run(*args, **kwargs)

    return entering


class OnHost(Code):
    """A function of tensors as a function of the host's arrays.

    Attributes:
        run: one of the classes in `code`.
        over: also, with "vmap", a batch: the arrays in `flags` have it as first axis.
    """

    run: Plain
    over = Derived
    __signature__: inspect.Signature  # set for a module

    @_entering_torch
    def __call__(self, *args: Any) -> object:
        code = self.run
        make = own_tensor if code.writes or code.keeps else tensor
        # Few steps for the usual arguments: once torch has gone through large tensors,
        # the caches are cold, and each line of Python takes ten times as long.
        are_arrays = set(map(type, args)) <= {np.ndarray}
        leaves: Sequence[Any] = args
        treedef = None
        if not are_arrays:
            leaves, treedef = tree.tree_flatten(args)
        whole = [make(leaf) if is_array(leaf) else leaf for leaf in leaves]
        value = code(*(whole if treedef is None else treedef.unflatten(whole)))
        if make is tensor:
            check_unwritten(whole, self.__qualname__)
        if isinstance(value, torch.Tensor):
            return array(value)
        return tree.tree_map(array, value)

    @_entering_torch
    def forward(self, args: Arrays, nondiff: Sequence[int]) -> tuple[Any, Graph]:
        """(result, graph). The graph owns its tensors."""
        code = self.run
        inputs: list[torch.Tensor] = []

        # The buffers among the arguments have no derivative.
        still = {id(args[0][name]) for name in code.buffers if name in args[0]}

        def enter(differentiable: bool, leaf: Any) -> object:
            if not is_array(leaf):
                return leaf
            x = own_tensor(leaf)
            inputs.append(x)
            if differentiable and id(leaf) not in still and has_derivative(x):
                x.requires_grad_()
            # A leaf of the graph can't be written to in place, but a copy of it can.
            return x.clone() if code.writes else x

        whole = [
            tree.tree_map(functools.partial(enter, position not in nondiff), arg)
            for position, arg in enumerate(args)
        ]
        value = code(*whole)
        recorded = [
            x if isinstance(x, torch.Tensor) and x.requires_grad else None
            for x in tree.tree_leaves(value)
        ]
        return tree.tree_map(array, value), (recorded, inputs)

    @staticmethod
    @_entering_torch
    def backward(graph: Graph, cotangents: Arrays, wanted: Flags) -> Arrays:
        """The cotangents of the wanted tensors of the arguments; None for zero."""
        recorded, entered = graph
        outs, seeds = [], []
        for out, ct in zip(recorded, cotangents, strict=True):
            if out is not None and ct is not None:
                outs.append(out)
                seeds.append(conjugate(tensor(ct)).to(out.dtype))
        inputs = pick(entered, wanted)
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
