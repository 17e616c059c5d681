"""Functions of tensors: the user's, and those that torch.func makes from it.

    Plain       the user's function
    Module      an nn.Module, with its parameters as the first argument
    Mapped      a batch of another, by torch.func.vmap
    Pulled      cotangents through another, by torch.func.vjp
    Pushed      tangents through another, by torch.func.jvp

The last three are pure: each gives its inner function copies if that one writes.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import torch

from hostcall import _jax
from hostcall._core.errors import SpecError

tree = jax.tree_util

# Guards torch.func.jvp against all other calls of a forward rule, on any thread. It
# counts its nesting in one number for all threads, and the level of forward
# differentiation belongs to the process: with two threads in it, one would fail or get
# the tangents of the other. Re-entrant, since one thread may nest them.
_forward = threading.RLock()


class Plain:
    """The user's function.

    Attributes:
        writes: whether it may write to its arguments; True until it has been watched.
        keeps: whether it may keep its arguments until the next call.
        buffers: the buffers of a module, by name: entries of its first argument that
            have no derivative.
    """

    keeps = False
    buffers: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.writes = True
        self._was_seen_writing = False

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)

    def watch(self) -> None:
        """Called before it runs under a `_Watch` that sees its writes."""

    def watched(self, wrote: bool) -> None:
        """Called after it ran with some shapes; `wrote` says whether it wrote.

        One write makes it a writer for all shapes. Programs that were traced before
        that, and found no write, are right with copies too.
        """
        self._was_seen_writing |= wrote
        self.writes = self._was_seen_writing

    def check(self, args: Sequence[Any]) -> None:
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
    at once. `_Slots.put` does what torch.func.functional_call does, without looking up
    names in each call.

    A buffer that a call doesn't give is the module's own. A module that writes to such
    buffers (a BatchNorm in train mode) gets copies of them; whether it writes is found
    out together with its shapes.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.buffers = dict(module.named_buffers())
        self.names = {**dict(module.named_parameters()), **self.buffers}
        self._writes_buffers = False
        self._copies_buffers = True
        # An RNN keeps its weights in a list of its own, beside its parameters.
        self.keeps = any(isinstance(m, torch.nn.RNNBase) for m in module.modules())
        self._idle = [_Slots(self._copy(), self.names)]

    def __reduce__(self) -> Any:
        return Module, (self.fn,)

    def _copy(self) -> torch.nn.Module:
        tensors = [*self.fn.parameters(), *self.fn.buffers()]
        try:
            return copy.deepcopy(self.fn, {id(x): x for x in tensors})  # type: ignore[no-any-return]
        except Exception as error:
            raise SpecError(
                f"hostcall: `{type(self.fn).__qualname__}` can't be copied"
                f" ({type(error).__name__}: {error}), but concurrent calls need a copy"
                " each. Bridge a function that calls it: hc.bridge.torch(lambda"
                " params, x: torch.func.functional_call(module, params, (x,)))"
            ) from error

    def __call__(self, params: Mapping[str, Any], *args: Any) -> Any:
        # list.pop and list.append are atomic, so the list of idle copies needs no lock.
        try:
            slots = self._idle.pop()
        except IndexError:  # all are in use
            slots = _Slots(self._copy(), self.names)
        copies = {}
        if self.buffers and self._copies_buffers:
            given = (name for name in self.buffers if name not in params)
            copies = {name: self.buffers[name].clone() for name in given}
            params = {**params, **copies}
        try:
            slots.put(params)
            value = slots.module(*args)
        finally:
            slots.put_back(params)
            self._idle.append(slots)
        self._writes_buffers |= any(x._version for x in copies.values())
        return value

    def watch(self) -> None:
        self._copies_buffers = True  # so that writes to them can be counted

    def watched(self, wrote: bool) -> None:
        super().watched(wrote)
        self._copies_buffers = self.writes or self._writes_buffers

    def check(self, args: Sequence[Any]) -> None:
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


class _Slots:
    """A module and the places of each of its tensors; a tied tensor has several."""

    def __init__(self, module: torch.nn.Module, names: Mapping[str, Any]) -> None:
        self.module = module
        self._own = dict(names)
        of = {id(x): name for name, x in names.items()}
        self._places: dict[str, list[tuple[Any, str]]] = {name: [] for name in names}
        for part in module.modules():
            for held in (part._parameters, part._buffers):
                for key, x in held.items():
                    if id(x) in of:
                        self._places[of[id(x)]].append((held, key))

    def put(self, tensors: Mapping[str, Any]) -> None:
        for name, x in tensors.items():
            for held, key in self._places[name]:
                held[key] = x

    def put_back(self, names: Mapping[str, Any]) -> None:
        self.put({name: self._own[name] for name in names})


# --- Functions over others -----------------------------------------------------------


class _Derived(Plain):
    """A function over another, which it gives copies if that one writes."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self.writes, self.keeps = False, bool(code.keeps)

    def along(self, args: Any, flags: Sequence[int]) -> tuple[Any, list[torch.Tensor]]:
        """(function, tensors): the inner function, of some of its tensors.

        `flags` marks the tensors of `args` that the function takes; the others keep
        their values. It returns a list of leaves.
        """
        leaves, treedef = tree.tree_flatten(args)
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        at = [i for i, flag in zip(places, flags, strict=True) if flag]

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            whole = list(leaves)
            for i, x in zip(at, tensors, strict=True):
                whole[i] = x
            if self.fn.writes:
                for i in places:
                    whole[i] = whole[i].clone()
            try:
                return _tensors(self.fn(*treedef.unflatten(whole)))
            except BaseException:
                # The engine clears the frames of the traceback, but the functions in
                # them keep their closures, and so the leaves: lent memory would seem
                # kept.
                leaves.clear()
                raise

        return function, [leaves[i] for i in at]


def _tensors(value: Any) -> list[torch.Tensor]:
    """The leaves of a result as tensors; Python's numbers become tensors too."""
    return [
        x if isinstance(x, torch.Tensor) else torch.as_tensor(x)
        for x in tree.tree_leaves(value)
    ]


def has_derivative(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def conjugate(x: torch.Tensor) -> torch.Tensor:
    """Maps a cotangent of JAX's to one of torch's, and back.

    They are each other's conjugates: for a holomorphic f, JAX multiplies by f' and
    torch by the conjugate of f'.
    """
    return x.conj() if x.is_complex() else x


class Mapped(_Derived):
    """(*args) -> results, with a batch axis in front of the tensors in `flags`."""

    def __init__(self, code: Any, flags: bytes) -> None:
        super().__init__(code)
        self._flags = flags

    def __call__(self, *args: Any) -> list[torch.Tensor]:
        function, tensors = self.along(args, [True] * len(self._flags))
        dims = tuple(0 if flag else None for flag in self._flags)
        mapped = torch.func.vmap(lambda *xs: tuple(function(*xs)), dims)
        return list(mapped(*tensors))


class Pulled(_Derived):
    """(args, cotangents, wanted) -> cotangents of the wanted tensors of `args`."""

    def __call__(
        self, args: Any, cotangents: Sequence[Any], wanted: bytes
    ) -> list[torch.Tensor]:
        function, tensors = self.along(args, wanted)
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
            cotangents = ()  # frees what is lent, as in `along`
            raise


class Pushed(_Derived):
    """(args, tangents, out_diff) -> results, and the tangents that `out_diff` marks.

    `tangents` has one entry per tensor, None for zero.
    """

    def __call__(
        self, args: Any, tangents: Sequence[Any], out_diff: bytes
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        function, tensors = self.along(args, [t is not None for t in tangents])
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
