"""Functions of tensors: the user's, and those that torch.func makes from it.

    Plain       the user's function
    Module      an nn.Module, with its parameters as the first argument
    Derived     a derivative or a batch of another

A Derived is pure: it gives the other function copies if that one writes.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import torch

from hostcall import _jax
from hostcall._core.errors import SpecError
from hostcall.bridge._library import Arrays, Flags, along

tree = jax.tree_util

# Guards torch.func.jvp against all other calls of a forward rule, on any thread. It
# counts its nesting in one number for all threads, and the level of forward
# differentiation belongs to the process: with two threads in it, one would fail or get
# the tangents of the other. Re-entrant, since one thread may nest them.
_forward = threading.RLock()


class Plain:
    """The user's function.

    Attributes:
        writes: whether it may write to its arguments, or a module to its own buffers;
            True until it has been watched.
        keeps: whether it may keep its arguments until the next call.
        buffers: the buffers of a module, by name: entries of its first argument that
            have no derivative.
    """

    keeps = False
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({})

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.writes = True
        self._wrote = False  # ever

    def __call__(self, *args: Any) -> object:
        return self.fn(*args)

    def watch(self) -> None:
        """Called before it runs under a `_Watch` that sees its writes."""
        self.writes = True  # so that it gets copies of its own buffers

    def watched(self, wrote: bool) -> None:
        """Called after it ran with some shapes; `wrote` says whether it wrote.

        One write makes it a writer for all shapes. Programs that were traced before
        that, and found no write, are right with copies too.
        """
        self._wrote |= wrote
        self.writes = self._wrote

    def check(self, args: Arrays) -> None:
        """Raises SpecError for arguments that it can't take."""
        for leaf in tree.tree_leaves(args):
            if isinstance(leaf, jax.Array) and _jax.is_key_dtype(leaf.dtype):
                raise SpecError(
                    "hostcall: a function of hc.bridge.torch was called with a"
                    " jax.random key, which torch can't use. Draw the numbers in JAX"
                    " and pass them, or pass jax.random.key_data(key)"
                )
            if isinstance(leaf, torch.Tensor):
                raise SpecError(
                    "hostcall: a function of hc.bridge.torch was called with a"
                    " torch.Tensor. Like any function in JAX code, it takes JAX and"
                    " NumPy arrays: pass jnp.asarray(tensor.numpy(force=True))"
                )


class Module(Plain):
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

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.buffers = dict(module.named_buffers())
        self.names = {**dict(module.named_parameters()), **self.buffers}
        # An RNN keeps its weights in a list of its own, beside its parameters.
        self.keeps = any(isinstance(m, torch.nn.RNNBase) for m in module.modules())
        self._idle = [self._copy()]

    def __reduce__(self) -> tuple[type[Module], tuple[torch.nn.Module]]:
        return Module, (self.fn,)

    def _copy(self) -> tuple[torch.nn.Module, Places]:
        tensors = [*self.fn.parameters(), *self.fn.buffers()]
        try:
            copied = copy.deepcopy(self.fn, {id(x): x for x in tensors})
        except Exception as error:
            raise SpecError(
                f"hostcall: `{type(self.fn).__qualname__}` can't be copied"
                f" ({type(error).__name__}: {error}), but concurrent calls need a copy"
                " each. Bridge a function that calls it: hc.bridge.torch(lambda"
                " params, x: torch.func.functional_call(module, params, (x,)))"
            ) from error
        return copied, _places(copied, self.names)

    # The parameters come first.
    def __call__(  # type: ignore[override]
        self, params: Mapping[str, torch.Tensor], *args: object
    ) -> object:
        # list.pop and list.append are atomic, so the list of idle copies needs no lock.
        try:
            module, places = self._idle.pop()
        except IndexError:  # all are in use
            module, places = self._copy()
        copies = {}
        if self.buffers and self.writes:
            given = (name for name in self.buffers if name not in params)
            copies = {name: self.buffers[name].clone() for name in given}
            params = {**params, **copies}
        try:
            _put(places, params)
            value = module(*args)
        finally:
            _put(places, self.names)
            self._idle.append((module, places))
        self._wrote |= any(x._version for x in copies.values())
        return value

    def check(self, args: Arrays) -> None:
        super().check(args)
        name = type(self.fn).__qualname__
        if not args or not isinstance(args[0], Mapping):
            raise SpecError(
                f"hostcall: the first argument of the module `{name}` should be a dict"
                " of its parameters, got"
                f" {type(args[0]).__name__ if args else 'nothing'}. Write"
                " f(f.parameters(), x), or f({}, x) to use the module's own parameters",
                code="hc-arguments",
            )
        unknown = [key for key in args[0] if key not in self.names]
        if unknown:
            raise SpecError(
                f"hostcall: the module `{name}` has no parameters or buffers"
                f" {unknown}. It has {list(self.names)}",
                code="hc-arguments",
            )


# For the name of each tensor of a module, where the module has it; a tied one has
# several places.
Places: TypeAlias = dict[str, list[tuple[dict[str, torch.Tensor], str]]]


def _places(module: torch.nn.Module, names: Mapping[str, torch.Tensor]) -> Places:
    of = {id(x): name for name, x in names.items()}
    places: Places = {name: [] for name in names}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for key, x in held.items():
                if id(x) in of:
                    places[of[id(x)]].append((held, key))
    return places


def _put(places: Places, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, x in tensors.items():
        for held, key in places[name]:
            held[key] = x


# --- Functions over others -----------------------------------------------------------

Tensors: TypeAlias = list[torch.Tensor]
Function: TypeAlias = Callable[..., Any]


class Derived(Plain):
    """A function over another, by torch.func."""

    def __init__(self, what: str, code: Plain, *flags: bytes) -> None:
        super().__init__(functools.partial(_OVER[what], code, *flags))
        self.writes, self.keeps = False, code.keeps


def _along(
    code: Plain, args: Arrays, flags: Flags
) -> tuple[Callable[..., Tensors], Tensors]:
    """(function, tensors): the function `code`, of some of its tensors.

    `flags` marks the tensors of `args` that the function takes; the others keep their
    values. It returns a list of leaves.
    """
    tensors, filled, leaves = along(args, flags, _is_tensor)

    def function(*tensors: torch.Tensor) -> Tensors:
        whole = filled(tensors)
        if code.writes:
            whole = tree.tree_map(lambda x: x.clone() if _is_tensor(x) else x, whole)
        try:
            return _tensors(code(*whole))
        except BaseException:
            # The engine clears the frames of the traceback, but the functions in them
            # keep their closures, and so the leaves: lent memory would seem kept.
            leaves.clear()
            raise

    return function, tensors


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def _tensors(value: object) -> Tensors:
    """The leaves of a result as tensors; Python's numbers become tensors too."""
    leaves = tree.tree_leaves(value)
    return [x if _is_tensor(x) else torch.as_tensor(x) for x in leaves]


def has_derivative(x: object) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def conjugate(x: torch.Tensor) -> torch.Tensor:
    """Maps a cotangent of JAX's to one of torch's, and back.

    They are each other's conjugates: for a holomorphic f, JAX multiplies by f' and
    torch by the conjugate of f'.
    """
    return x.conj() if x.is_complex() else x


def _mapped(code: Plain, flags: bytes, *args: Any) -> Tensors:
    """(*args) -> results, with a batch axis in front of the tensors in `flags`."""
    function, tensors = _along(code, args, [True] * len(flags))
    dims = tuple(0 if flag else None for flag in flags)
    return list(torch.func.vmap(lambda *xs: tuple(function(*xs)), dims)(*tensors))


def _pulled(code: Plain, args: Arrays, cotangents: Arrays, wanted: bytes) -> Tensors:
    """(args, cotangents, wanted) -> cotangents of the wanted tensors of `args`."""
    function, tensors = _along(code, args, wanted)
    seeds: list[torch.Tensor] = []

    def differentiable(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = [
            (out, ct)
            for out, ct in zip(function(*xs), cotangents, strict=True)
            if ct is not None and has_derivative(out)
        ]
        seeds[:] = [conjugate(ct).to(out.dtype) for out, ct in pairs]
        return tuple(out for out, _ in pairs)

    try:
        _, pull = torch.func.vjp(differentiable, *tensors)
        if not seeds:
            return [torch.zeros_like(x) for x in tensors]
        return [conjugate(x) for x in pull(tuple(seeds))]
    except BaseException:
        seeds.clear()
        cotangents = ()  # frees what is lent, as in `_along`
        raise


def _pushed(
    code: Plain, args: Arrays, tangents: Arrays, out_diff: bytes
) -> tuple[Tensors, Tensors]:
    """(args, tangents, out_diff) -> results, and the tangents that `out_diff` marks.

    `tangents` has one entry per tensor, None for zero.
    """
    function, tensors = _along(code, args, [t is not None for t in tangents])
    dots = tuple(t for t in tangents if t is not None)
    with _forward:
        outs, pushed = torch.func.jvp(
            lambda *xs: tuple(function(*xs)), tuple(tensors), dots
        )
    return list(outs), [
        dot if has_derivative(out) else torch.zeros_like(out)
        for out, dot, flag in zip(outs, pushed, out_diff, strict=True)
        if flag
    ]


_OVER: dict[str, Function] = {"vjp": _pulled, "jvp": _pushed, "vmap": _mapped}
