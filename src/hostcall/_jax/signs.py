"""Signs: how a thread learns of the programs that it has dispatched.

A program on JAX's fast dispatch (fast_dispatch.py) leaves no token. One of its results
is its *sign*: an array that is ready when the program has ended, and fails if it fails.
A sign has at most `_SMALL` bytes, since it is kept until then. A program without such a
result gets one more, of no bytes, that nobody else sees: its *hidden* result. It costs
a dispatch 0.8 us, so a program that has a small result gets none. One on GPUs or over
several devices gets it always: each device makes it, so it is ready when all have
ended, and nobody can donate it.

How the sign is found, on the dispatching thread and in the same step as the dispatch:

  * A dispatch in Python: `take_sign` finds it among the results (dispatch.py calls it).
  * JAX's fast path, in C++, puts the results together by a tree, in which JAX's own
    nodes make typed keys. Another node is put in here, around the sign: its function
    (native/bindings/dispatch_bindings.cc) gets the sign, and returns the result. So
    programs without host calls pay nothing.

Asking a sign takes jaxlib 0.15 us. If one of the program's calls ran on the dispatching
thread, the program has ended, and the sign is not asked (native/base/last_run.h). The
node knows the program's plans for that.

What a program is, is written where it is lowered and stays with it, also if it is
pickled as an executable: `FastProgram`, the last of what it keeps alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters import mlir as _mlir
from jaxlib.mlir import ir as _ir
from jaxlib.mlir.dialects import func as _func

from hostcall import _native
from hostcall._jax import types as _t
from hostcall._jax.door import sharding_impls as _sharding_impls
from hostcall._jax.door import tree_util as _tree_util
from hostcall._jax.door import xla_client as _xla_client
from hostcall._jax.installing import install
from hostcall._jax.patches import When

# The most bytes of a result that is kept until its program has ended. At most 32
# programs of a device have not. A larger one takes longer to compute than the hidden
# result costs.
_SMALL = 2**16

_HIDDEN = jax.core.ShapedArray((0,), np.dtype(np.bool_))


class FastProgram(NamedTuple):
    """A program with host calls that is lowered without effects.

    Attributes:
        hidden: whether its last result is hidden.
        asks_sign: whether only the sign says that it has ended: it runs on GPUs or on
            several devices, or another library has a custom call in it.
    """

    hidden: bool
    asks_sign: bool

    def __reduce__(self) -> tuple[Callable[..., FastProgram], tuple[bool, bool]]:
        return _unpickled, (self.hidden, self.asks_sign)


def _unpickled(hidden: bool, asks_sign: bool) -> FastProgram:
    """An executable is being loaded, maybe in a process that has traced no call."""
    install(When.CALLS)
    return FastProgram(hidden, asks_sign)


def _mark_of(kept_alive: object) -> FastProgram | None:
    """What a program is, by what it keeps alive."""
    last = kept_alive[-1] if isinstance(kept_alive, list) and kept_alive else None
    return last if isinstance(last, FastProgram) else None


def needs_hidden(jaxpr: _t.Jaxpr) -> bool:
    """Whether a program has no result that can be its sign."""
    return not any(map(_is_small, jaxpr.out_avals))


def _is_small(aval: _t.Aval) -> bool:
    if not isinstance(aval, jax.core.ShapedArray):
        return False
    dtype = aval.dtype
    # No typed key; and JAX makes a float0 of nothing.
    if not isinstance(dtype, np.dtype) or dtype == jax.dtypes.float0:
        return False
    return bool(aval.size * dtype.itemsize <= _SMALL)


def with_hidden(module: _ir.Module) -> None:
    """Adds the hidden result to a program: one more operand of its last operation."""
    main = _ir.SymbolTable(module.operation)["main"]
    old_return = main.body.blocks[0].operations[-1].operation
    with module.context, _ir.Location.unknown():
        with _ir.InsertionPoint(old_return):
            hidden = _mlir.ir_constant(np.zeros(_HIDDEN.shape, _HIDDEN.dtype))
            _func.ReturnOp([*old_return.operands, hidden])
        old_return.erase()
        results = [*main.type.results, hidden.type]
        function_type = _ir.FunctionType.get(main.type.inputs, results)
        main.attributes["function_type"] = _ir.TypeAttr.get(function_type)
        # MLIR wants as many of them as there are results, if there are any.
        if "res_attrs" in main.attributes:
            none = _ir.DictAttr.get({})
            attributes = [*main.attributes["res_attrs"], none]
            main.attributes["res_attrs"] = _ir.ArrayAttr.get(attributes)


# What the names of the engine's custom calls begin with (_engine/targets.py).
_OURS = "hostcall_"


def has_only_ours(module: _ir.Module) -> bool:
    """Whether the engine makes all custom calls of a program."""
    only_ours = True

    def look(operation: _ir.Operation) -> _ir.WalkResult:
        nonlocal only_ours
        if operation.name != "stablehlo.custom_call":
            return _ir.WalkResult.ADVANCE
        target = _ir.StringAttr(operation.attributes["call_target_name"]).value
        only_ours = target.startswith(_OURS)
        # One that is not says all: the walk ends there, before it is True again.
        return _ir.WalkResult.ADVANCE if only_ours else _ir.WalkResult.INTERRUPT

    module.operation.walk(look)
    return only_ours


# --- Compiled programs ----------------------------------------------------------------
#
# JAX's executable that runs a program (ExecuteReplicated) has the hidden result, as any
# other. What users and JAX's dispatch see of the program (MeshExecutable) has not.


class _Layouts(list[Any]):
    """The layouts of a program's arguments. They are the one part of the program that
    JAX gives to its fast path in every way, so they say what the program is.

    Attributes:
        mark: what the program is.
        plans: the addresses of its plans, if a call that ran says that it has ended.
        sharding: of its last result, which is the hidden one if there is one.
    """

    mark: FastProgram
    plans: bytes
    sharding: _t.Sharding


def _plans_of(keepalives: Sequence[object]) -> bytes:
    """The addresses of the plans that a program keeps alive."""
    slots = [getattr(keepalive, "slot", None) for keepalive in keepalives]
    return b"".join(slot.plan for slot in slots if isinstance(slot, _native.Slot))


def compiling_with_hidden(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Tells JAX, which compiles a program, of the hidden result that its module has."""

    @functools.wraps(plain)
    def from_hlo(*args: Any, **options: Any) -> Any:
        mark = _mark_of(options.get("keepalive"))
        if mark is not None and mark.hidden:
            unknown = _sharding_impls.UNSPECIFIED
            options["global_out_avals"] = (*options["global_out_avals"], _HIDDEN)
            options["out_shardings"] = (*options["out_shardings"], unknown)
            options["out_layouts"] = (*options["out_layouts"], None)
            if (refs := options["mut"]) is not None:
                # None: no Ref's new value, which JAX would drop.
                out_mut = [*refs.out_mut, None]
                options["mut"] = refs._replace(out_mut=out_mut)
        return plain(*args, **options)

    return from_hlo


def loading_without_hidden(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Hides that result from whoever sees the loaded program, and marks its layouts."""

    @functools.wraps(plain)
    def load(self: Any) -> Any:
        program = plain(self)
        mark = _mark_of(self.keepalive)
        if mark is None:
            return program
        if mark.hidden:
            program.out_avals = program.out_avals[:-1]
            program._out_shardings = program._out_shardings[:-1]
            program._xla_out_layouts = program._xla_out_layouts[:-1]
        layouts = _Layouts(program._dispatch_in_layouts)
        layouts.mark = mark
        layouts.plans = b"" if mark.asks_sign else _plans_of(self.keepalive)
        layouts.sharding = self.output_shardings[-1]
        program._dispatch_in_layouts = layouts
        return program

    return load


# --- Dispatch in Python ---------------------------------------------------------------


class Dispatched(NamedTuple):
    """What a dispatch in Python has left.

    Attributes:
        results: those that the caller gets.
        hidden: the hidden one, if there is one.
    """

    results: list[Any]
    hidden: list[jax.Array]


def leaves_sign(program: _t.Executable) -> bool:
    return _mark_of(program.keepalive) is not None


def take_sign(program: _t.Executable, results: list[Any]) -> Dispatched:
    """Notes a program that the calling thread has just dispatched, if it is one of
    those that leave a sign.
    """
    mark = _mark_of(program.keepalive)
    if mark is None:
        return Dispatched(results, [])
    hidden: list[jax.Array] = []
    if mark.hidden:
        hidden = results[-1:]
        results = results[:-1]
    candidates = hidden or results
    # The smallest, since it is kept until the program has ended. Typed keys, which are
    # no plain arrays, come last.
    sizes = [
        x.nbytes if isinstance(x, _xla_client.ArrayImpl) else _SMALL + 1
        for x in candidates
    ]
    sign = candidates[sizes.index(min(sizes))]
    _native.dispatched(None, (sign,))
    return Dispatched(results, hidden)


# --- JAX's fast path ------------------------------------------------------------------


class _Noted:
    """A node of a tree, by whose making the sign inside it is noted."""


@functools.cache
def _registry() -> _tree_util.pytree.PyTreeRegistry:
    """JAX's nodes of results, with this one."""
    registry = _tree_util.dispatch_registry
    registry.register_node(_Noted, lambda node: ((), None), _native.dispatched)
    return registry


def _leaf() -> _t.TreeDef:
    return _registry().flatten(0, None)[1]


def _node(children: Sequence[_t.TreeDef], data: object) -> _t.TreeDef:
    return jax.tree_util.PyTreeDef.from_node_data_and_children(
        _registry(), data, list(children)
    )


def _noting(tree: _t.TreeDef, leaf: int, plans: bytes) -> _t.TreeDef:
    """The same tree with a node around a leaf."""
    if tree.node_data() is None and not tree.children():
        return _node([tree], (_Noted, plans))
    children = []
    for child in tree.children():
        inside = 0 <= leaf < child.num_leaves
        children.append(_noting(child, leaf, plans) if inside else child)
        leaf -= child.num_leaves
    return _node(children, tree.node_data())


def _runs_code_of_users(tree: _t.TreeDef) -> bool:
    """Whether making such a tree may run Python code, which may raise."""
    data = tree.node_data()
    if data is not None:
        kind, keys = data
        # A dict hashes its keys, and those of a user's class do so in its code.
        is_of_texts = kind is dict and all(type(key) is str for key in keys)
        if not is_of_texts and kind not in (tuple, list, type(None)):
            return True
    return any(map(_runs_code_of_users, tree.children()))


def fast_path_data(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Puts the node that notes the sign into the tree of results of JAX's fast path."""

    @functools.wraps(plain)
    def data(*args: Any, **named: Any) -> Any:
        fast_path = plain(*args, **named)
        layouts = fast_path.in_device_local_layouts
        if not isinstance(layouts, _Layouts):  # the program leaves no sign
            return fast_path
        tree = fast_path.out_pytree_def
        plans = b"" if _runs_code_of_users(tree) else layouts.plans
        if not layouts.mark.hidden:
            avals = fast_path.out_avals
            sizes = [aval.size * aval.dtype.itemsize for aval in avals]
            tree = _noting(tree, sizes.index(min(sizes)), plans)
            return fast_path._replace(out_pytree_def=tree)
        return fast_path._replace(
            out_pytree_def=_node([tree, _leaf()], (_Noted, plans)),
            out_avals=[*fast_path.out_avals, _HIDDEN],
            out_shardings=[*fast_path.out_shardings, layouts.sharding],
            out_committed=[*fast_path.out_committed, False],
        )

    return data


def report_signs_to(listener: Callable[[jax.Array, bool], object]) -> None:
    """From now on, `listener(sign, is_hidden)` is called where a program was dispatched
    that may not have ended, or that may have failed, by the thread that dispatched it.
    """
    _native.set_hook(_native.Hook.PENDING, listener)
