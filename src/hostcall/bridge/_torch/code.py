"""Functions of tensors as the host code that the engine calls: arrays in, arrays out.

OnHost     a function of tensors: the user's; or a derivative or a batch of another,
           by torch.func, which is pure: it gives the other copies if that one writes
OfModule   an nn.Module, with its parameters as the first argument
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import numpy as np
import torch

from hostcall import _jax
from hostcall._core.array_values import is_numeric
from hostcall._core.errors import DerivativeError, SpecError
from hostcall._host_function.trees import pick
from hostcall.bridge._library import Arrays, Code, Flags, Run
from hostcall.bridge._torch.tensors import array, check_unwritten, own_tensor, tensor

tree = jax.tree_util

P = ParamSpec("P")
R = TypeVar("R")
Tensors: TypeAlias = Sequence[torch.Tensor]
# The leaves of a result, None for those that depend on no input; the tensors of the
# arguments.
Graph: TypeAlias = tuple[list[torch.Tensor | None], list[torch.Tensor]]

# Guards torch.func.jvp against all other calls of a forward rule, on any thread. It
# counts its nesting in one number for all threads, and the level of forward
# differentiation belongs to the process: with two threads in it, one would fail or get
# the tangents of the other. Re-entrant, since one thread may nest them.
_forward = threading.RLock()


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array that a call hands over; other leaves are static."""
    return isinstance(leaf, (np.ndarray, np.generic)) and is_numeric(leaf.dtype)


def has_derivative(x: torch.Tensor) -> bool:
    return bool(x.is_floating_point() or x.is_complex())


def conjugate(x: torch.Tensor) -> torch.Tensor:
    """Maps a cotangent of JAX's to one of torch's, and back.

    They are each other's conjugates: for a holomorphic f, JAX multiplies by f' and
    torch by the conjugate of f'.
    """
    return x.conj() if x.is_complex() else x


def _seed(cotangent: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """JAX's cotangent of a result, as torch wants it.

    Its dtype may differ: JAX has the result in 32 bits where torch has it in 64.
    """
    return conjugate(cotangent).to(out.dtype)


def _cloned(leaf: Any) -> object:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _is_key(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and _jax.is_key_dtype(leaf.dtype)


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
        writes: whether it may write to its arguments, or a module to its own buffers;
            True until `_infer` has watched it run on fake tensors.
        wrote: whether it was seen to. One write makes it a writer for all shapes;
            programs that were traced before that are right with copies too.
        keeps: whether it may keep its arguments until the next call.
        buffers: the buffers of a module, by name: entries of its first argument that
            have no derivative.
    """

    writes = True
    wrote = False
    keeps = False
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({})

    vmap = staticmethod(torch.func.vmap)

    @staticmethod
    def is_array(leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor)

    @staticmethod
    def leaves(value: object) -> Tensors:
        return list(map(torch.as_tensor, tree.tree_leaves(value)))

    @staticmethod
    def vjp(f: Run, *xs: torch.Tensor) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
        flags: list[bool] = []

        # The user may say that an integer tensor is a floating result.
        def differentiable(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs = f(*xs)
            flags[:] = map(has_derivative, outs)
            return tuple(pick(outs, flags))

        outs, pull = torch.func.vjp(differentiable, *xs)

        def pullback(cotangents: Tensors) -> Tensors:
            if not outs:  # which torch's own refuses
                return [torch.zeros_like(x) for x in xs]
            pairs = zip(pick(cotangents, flags), outs, strict=True)
            seeds = tuple(_seed(ct, out) for ct, out in pairs)
            return list(map(conjugate, pull(seeds)))

        return outs, pullback

    @staticmethod
    def jvp(f: Run, xs: Tensors, dots: Tensors) -> tuple[Tensors, Tensors]:
        with _forward:
            return torch.func.jvp(f, xs, dots)  # type: ignore[no-any-return]

    def derived(self, derivative: str, name: str, *flags: bytes) -> OnHost:
        run = self.over(derivative, *flags)
        # Not of a module's own class: its parameters are arguments like all others.
        code = OnHost(run, name, source=f"{derivative} of {self.source()}")
        code.writes = False  # `pure` gives the function copies
        code.keeps = self.keeps
        return code

    def on_tensors(self, *args: Any) -> object:
        return self.run(*args)

    def pure(self, *args: Any) -> object:
        if self.writes:
            args = tree.tree_map(_cloned, args)
        return self.on_tensors(*args)

    def check(self, args: Arrays) -> None:
        """Raises SpecError for arguments that it can't take."""
        refused = ""
        leaves = tree.tree_leaves(args)
        if any(map(_is_key, leaves)):
            refused = (
                "a jax.random key, which torch can't use. Draw the numbers in JAX and"
                " pass them, or pass jax.random.key_data(key)"
            )
        elif any(map(self.is_array, leaves)):
            refused = (
                "a torch.Tensor. Like any function in JAX code, it takes JAX and NumPy"
                " arrays: pass jnp.asarray(tensor.numpy(force=True))"
            )
        if refused:
            raise SpecError(
                f"hostcall: a function of hc.bridge.torch was called with {refused}"
            )

    @_entering_torch
    def __call__(self, *args: Any) -> object:
        make = own_tensor if self.writes or self.keeps else tensor
        # Few steps for the usual arguments: once torch has gone through large tensors,
        # the caches are cold, and each line of Python takes ten times as long.
        are_arrays = set(map(type, args)) <= {np.ndarray}
        leaves: Sequence[Any] = args
        treedef = None
        if not are_arrays:
            leaves, treedef = tree.tree_flatten(args)
        tensors = [make(leaf) if is_array(leaf) else leaf for leaf in leaves]
        arguments = tensors if treedef is None else treedef.unflatten(tensors)
        value = self.on_tensors(*arguments)
        if make is tensor:
            check_unwritten(tensors, self.__qualname__)
        if isinstance(value, torch.Tensor):
            return array(value)
        return tree.tree_map(array, value)

    @_entering_torch
    def forward(self, args: Arrays, nondiff: Sequence[int]) -> tuple[Any, Graph]:
        """(result, graph). The graph owns its tensors."""
        inputs: list[torch.Tensor] = []
        # The buffers among the arguments have no derivative.
        buffers = {id(args[0][name]) for name in self.buffers if name in args[0]}

        def enter(differentiable: bool, leaf: Any) -> object:
            if not is_array(leaf):
                return leaf
            x = own_tensor(leaf)  # the graph keeps it after the call
            inputs.append(x)
            if differentiable and id(leaf) not in buffers and has_derivative(x):
                x.requires_grad_()
            # A leaf of the graph can't be written to in place, but a copy of it can.
            return x.clone() if self.writes else x

        arguments = []
        for position, arg in enumerate(args):
            enter_argument = functools.partial(enter, position not in nondiff)
            arguments.append(tree.tree_map(enter_argument, arg))
        value = self.on_tensors(*arguments)
        recorded: list[torch.Tensor | None] = []
        for leaf in tree.tree_leaves(value):
            is_recorded = isinstance(leaf, torch.Tensor) and leaf.requires_grad
            recorded.append(leaf if is_recorded else None)
        return tree.tree_map(array, value), (recorded, inputs)

    @staticmethod
    @_entering_torch
    def backward(graph: Graph, cotangents: Arrays, wanted: Flags) -> Arrays:
        """The cotangents of the wanted tensors of the arguments; None for zero."""
        recorded, entered = graph
        outs = []
        seeds = []
        for out, ct in zip(recorded, cotangents, strict=True):
            if out is not None and ct is not None:
                outs.append(out)
                seeds.append(_seed(tensor(ct), out))
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
        gradients = torch.autograd.grad(
            outs, inputs, seeds, retain_graph=True, allow_unused=True
        )
        return [None if x is None else array(conjugate(x)) for x in gradients]


# For the name of each tensor of a module, where the module has it; a tied one has
# several places.
Places: TypeAlias = dict[str, list[tuple[dict[str, torch.Tensor], str]]]


class OfModule(OnHost):
    """An nn.Module as a function of (params, *args).

    The given tensors are put into the module while it runs, so two threads can't use
    one module at once. Each call takes a copy of the module's structure, which shares
    its tensors, from `_idle`, or makes a new one: there are as many copies as calls ran
    at once. `_put` does what torch.func.functional_call does, without looking up names
    in each call.

    A buffer that a call doesn't give is the module's own. A module that writes to such
    buffers (a BatchNorm in train mode) gets copies of them, and of its arguments;
    whether it writes is found out together with its shapes.
    """

    def __init__(self, module: torch.nn.Module, name: str, source: str) -> None:
        super().__init__(module, name, source, module)
        forward = inspect.signature(module.forward)
        first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [first, *forward.parameters.values()]
        self.__signature__ = forward.replace(parameters=parameters)
        self.buffers = dict(module.named_buffers())
        self.names = {**dict(module.named_parameters()), **self.buffers}
        # An RNN keeps its weights in a list of its own, beside its parameters.
        self.keeps = any(isinstance(m, torch.nn.RNNBase) for m in module.modules())
        self._idle = [self._copy()]

    def __reduce__(self) -> tuple[type[OfModule], tuple[object, ...]]:
        return OfModule, (self.run, self.__qualname__, self.source())

    def _copy(self) -> tuple[torch.nn.Module, Places]:
        """A copy of the module that shares its tensors, and where each stands in it."""
        # What deepcopy takes for copied already, it shares.
        shared = {id(x): x for x in self.names.values()}
        try:
            copied = copy.deepcopy(self.run, shared)
        except Exception as error:
            raise SpecError(
                f"hostcall: `{type(self.run).__qualname__}` can't be copied"
                f" ({type(error).__name__}: {error}), but concurrent calls need a copy"
                " each. Bridge a function that calls it: hc.bridge.torch(lambda"
                " params, x: torch.func.functional_call(module, params, (x,)))"
            ) from error
        # The copy shares the tensors, so they say which name stands where in it.
        names_by_id = {id(x): name for name, x in self.names.items()}
        places = Places()
        for part in copied.modules():
            for tensors in (part._parameters, part._buffers):
                for key, x in tensors.items():
                    name = names_by_id.get(id(x))
                    if name is not None:
                        places.setdefault(name, []).append((tensors, key))
        return copied, places

    # The parameters come first.
    def on_tensors(  # type: ignore[override]
        self, params: Mapping[str, torch.Tensor], *args: object
    ) -> object:
        # list.pop and list.append are atomic, so the list of idle copies needs no lock.
        try:
            module, places = self._idle.pop()
        except IndexError:  # all are in use
            module, places = self._copy()
        copies = {}
        if self.writes:
            for name, own_buffer in self.buffers.items():
                if name not in params:
                    copies[name] = own_buffer.clone()
        try:
            _put(places, params)
            _put(places, copies)
            value = module(*args)
        finally:
            # Also after an error: the copy may not keep tensors of this call.
            _put(places, self.names)
            self._idle.append((module, places))
        # A tensor's version counts the writes to it.
        self.wrote |= any(x._version for x in copies.values())
        return value

    def check(self, args: Arrays) -> None:
        super().check(args)
        name = type(self.run).__qualname__
        parameters = args[0] if args else None
        wrong: object = type(parameters).__name__
        if isinstance(parameters, Mapping):
            wrong = [key for key in parameters if key not in self.names]
        if wrong:
            raise SpecError(
                f"hostcall: the first argument of the module `{name}` should be a dict"
                f" of its parameters and buffers {list(self.names)}, got {wrong}. Write"
                " f(f.parameters(), x), or f({}, x) to use the module's own parameters",
                code="hc-arguments",
            )


def _put(places: Places, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, x in tensors.items():
        for owner, key in places[name]:
            owner[key] = x
