"""What hostcall replaces in JAX: all of it, in one table.

`import hostcall` replaces nothing. The first use of what needs a replacement installs
it (installing.py), with all others of its `When`: once, in the order of the table.

Beside these, hostcall adds entries of its own to JAX's tables (rules of its own
primitives, its own types of effects, its handlers), which nothing but its own
equations asks for. docs/what_changes_in_jax.md tells users of both.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from hostcall._jax.needs import Part


class When(enum.Enum):
    """What makes hostcall install replacements: the value says it in words."""

    CALLS = "the first host call that is traced, or program with some that is loaded"
    OBSERVE = "the first block of hc.observe"
    FAILURE = "the first exception of host code"
    FORK = "a fork after JAX has started, in the child alone"


# A tuple for the reason that a Need is one (needs.py).
class Patch(NamedTuple):
    """One replacement.

    Attributes:
        holder: the module, and after a colon the class in it, or the table.
        name: what is replaced there; for a table, the primitive that is the key, as
            `module:name`.
        part: what it is for.
        when: it is installed; None for PATCHED.
        does: what JAX does with it that it does not do alone.
        by: the functions of this wing, as `file.function`, that make the replacement of
            what stands there; each gets what the one before it has made. None for
            PATCHED, whose replacements are made by another wing.
        takes: the parameters that the replacement relies on, which must be there.
        has: what must be in what stands there, since JAX calls it there.
        asked_in: the module of JAX whose code calls it.
        is_static: whether it is a static method.
        if_absent: whether it is put there only where JAX has nothing.
    """

    holder: str
    name: str
    part: Part
    when: When | None
    does: str
    by: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    asked_in: str = ""
    is_static: bool = False
    if_absent: bool = False

    @property
    def is_entry(self) -> bool:
        """Whether it is an entry of a table by primitives."""
        return ":" in self.name

    def __str__(self) -> str:
        holder = self.holder.removeprefix("jax._src.").replace(":", ".")
        name = self.name.rpartition(":")[2]
        return f"{holder}[{name}]" if self.is_entry else f"{holder}.{name}"


_PXLA = "jax._src.interpreters.pxla"
_PE = "jax._src.interpreters.partial_eval"
_MLIR = "jax._src.interpreters.mlir"
_DISPATCH = "jax._src.dispatch"
_LOOPS = "jax._src.lax.control_flow.loops"
_SCAN = f"{_LOOPS}:scan_p"
_WHILE = f"{_LOOPS}:while_p"

PATCHES: tuple[Patch, ...] = (
    Patch(
        holder=_PXLA,
        name="_cached_lowering_to_hlo",
        part=Part.ORDER,
        when=When.CALLS,
        does="puts all host calls of a program with effects into one order, and lowers"
        " it as one without effects where it may take JAX's fast dispatch",
        by=("fast_dispatch.lowering_in_order",),
        asked_in=_PXLA,
    ),
    Patch(
        holder=f"{_PXLA}:UnloadedMeshExecutable",
        name="from_hlo",
        part=Part.FAST,
        when=When.CALLS,
        does="compiles a program with host calls with one result more, which tells when"
        " it has ended",
        by=("signs.compiling_with_hidden",),
        asked_in=_PXLA,
        is_static=True,
    ),
    Patch(
        holder=f"{_PXLA}:UnloadedMeshExecutable",
        name="load",
        part=Part.FAST,
        when=When.CALLS,
        does="hides that result from those who run the program",
        by=("signs.loading_without_hidden",),
        asked_in=_PXLA,
    ),
    Patch(
        holder=_PXLA,
        name="MeshExecutableFastpathData",
        part=Part.FAST,
        when=When.CALLS,
        does="has JAX's fast path note what the thread dispatches, for such programs",
        by=("signs.fast_path_data",),
        asked_in="jax._src.pjit",
    ),
    Patch(
        holder=f"{_PXLA}:MeshExecutable",
        name="create_cpp_call",
        part=Part.FAST,
        when=When.CALLS,
        does="dispatches a compiled ordered program in Python where ordered programs"
        " run on several devices",
        by=("device_order.cpp_call_in_order",),
        takes=("self", "params"),
    ),
    Patch(
        holder=f"{_PXLA}:ExecuteReplicated",
        name="__call__",
        part=Part.FAST,
        when=When.CALLS,
        does="keeps ordered programs on several devices in order, and notes what the"
        " thread has dispatched",
        by=("device_order.dispatch_in_order", "dispatch.telling_of_dispatch"),
        takes=("self", "*args"),
    ),
    Patch(
        holder=f"{_DISPATCH}:RuntimeTokenSet",
        name="block_until_ready",
        part=Part.FAST,
        when=When.CALLS,
        does="waits, in jax.effects_barrier, for programs that leave no token too",
        by=("dispatch.waiting_for_all",),
        takes=("self",),
    ),
    Patch(
        holder=f"{_DISPATCH}:RuntimeTokenSet",
        name="get_token_input",
        part=Part.TOKENS,
        when=When.CALLS,
        does="forgets the token of a program that failed, instead of failing the next",
        by=("dispatch.healing_tokens",),
        takes=("self", "eff", "devices"),
        asked_in=_PXLA,
    ),
    Patch(
        holder=_LOOPS,
        name="_scan_known_hoisting",
        part=Part.SCANS,
        when=When.CALLS,
        does="leaves host calls with effects in a scan that is split under linearize",
        by=("hoisting.hoisting_no_calls",),
        asked_in=_LOOPS,
    ),
    Patch(
        holder=_LOOPS,
        name="pe",
        part=Part.SCANS,
        when=When.CALLS,
        does="the same under remat: a view of JAX's module with one function replaced",
        by=("hoisting.partial_eval_in_loops",),
        has=("partial_eval_jaxpr_nounits",),
        asked_in=_LOOPS,
    ),
    Patch(
        holder=f"{_PE}:partial_eval_jaxpr_custom_rules",
        name=_SCAN,
        part=Part.SCANS,
        when=When.CALLS,
        does="says when that function is about scans under remat",
        by=("hoisting.scan_under_remat",),
    ),
    Patch(
        holder=f"{_PE}:custom_partial_eval_rules",
        name=_WHILE,
        part=Part.LOOPS,
        when=When.CALLS,
        does="runs host calls once in a while loop that linearize splits",
        by=("while_loops.split_by_trace",),
    ),
    Patch(
        holder=f"{_PE}:partial_eval_jaxpr_custom_rules",
        name=_WHILE,
        part=Part.LOOPS,
        when=When.CALLS,
        does="the same under remat",
        by=("while_loops.split_under_remat",),
    ),
    Patch(
        holder=f"{_PE}:dce_rules",
        name=_WHILE,
        part=Part.LOOPS,
        when=When.CALLS,
        does="drops what the second of the two loops does not need (before jax 0.12,"
        " which has a rule)",
        by=("while_loops.without_dead_code",),
        if_absent=True,
    ),
    Patch(
        holder=f"{_MLIR}:_lowerings",
        name=_WHILE,
        part=Part.LOOPS,
        when=When.CALLS,
        does="computes a loop's condition with host calls in its body, so that rows"
        " stop one by one",
        by=("loop_conditions.lowering_of_while",),
    ),
    Patch(
        holder=_DISPATCH,
        name="jaxpr_has_prim_requiring_devices",
        part=Part.OBSERVE,
        when=When.OBSERVE,
        does="has JAX find out a program's devices before it is lowered in a block",
        by=("rewritten_programs.requiring_devices",),
        asked_in=_PXLA,
    ),
    Patch(
        holder=_PXLA,
        name="_cached_lowering_to_hlo",
        part=Part.OBSERVE,
        when=When.OBSERVE,
        does="puts what a block observes into the programs that are lowered in it",
        by=("rewritten_programs.lowering_rewritten",),
        asked_in=_PXLA,
    ),
    Patch(
        holder="jax.errors:JaxRuntimeError",
        name="__init__",
        part=Part.REPORTS,
        when=When.FAILURE,
        does="asks whether the report is about an exception of host code",
        by=("dispatch.reporting",),
    ),
    Patch(
        holder=_MLIR,
        name="lower_jaxpr_to_module",
        part=Part.FORK,
        when=When.FORK,
        does="raises",
        by=("execution.refusing",),
    ),
    Patch(
        holder="jax._src.compiler",
        name="compile_or_get_cached",
        part=Part.FORK,
        when=When.FORK,
        does="raises",
        by=("execution.refusing",),
    ),
)

# What `hc.patch_jax` replaces while it lasts: the user's own call does so, therefore
# installing.py does not know of it. _compat/patch.py has what stands there meanwhile,
# and tests/repo/test_boundary.py holds that these are the same.
_CALLBACK = "jax._src.callback"
_DEBUGGING = "jax._src.debugging"
_BUFFERS = "jax.experimental.buffer_callback"
_PRIMITIVES = (
    f"{_CALLBACK}:pure_callback_p",
    f"{_CALLBACK}:io_callback_p",
    f"{_DEBUGGING}:debug_callback_p",
    f"{_DEBUGGING}:debug_print_p",
    "jax._src.buffer_callback:buffer_callback_p",
)


def _while_patched(holder: str, name: str, does: str) -> Patch:
    return Patch(holder=holder, name=name, does=does, part=Part.DROP_INS, when=None)


PATCHED: tuple[Patch, ...] = (
    *(
        _while_patched(each, "bind", "binds hostcall's primitive instead")
        for each in _PRIMITIVES
    ),
    *(
        _while_patched(f"{_MLIR}:_lowerings", each, "lowers it as a host call")
        for each in _PRIMITIVES
    ),
    _while_patched(_CALLBACK, "emit_python_callback", "emits a host call"),
    _while_patched("jax.interpreters.mlir", "emit_python_callback", "the same"),
    _while_patched("jax", "effects_barrier", "waits for taps too"),
    _while_patched(_BUFFERS, "Buffer", "is the class that callbacks get"),
    _while_patched(_BUFFERS, "ExecutionContext", "is the class that callbacks get"),
)
