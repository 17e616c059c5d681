"""What the equations of all kinds of calls and taps have in common, and plain calls.

An equation holds the user's function and its trees, and answers what lowering and
`make_plan` (_engine/plans.py) ask. All are hashable. Equal ones trace to equal
programs, so JAX's caches hit. Whatever belongs to one call site of one compiled program
is in a `Placement` (_engine/placement.py) instead.

Each other kind of equation is one file beside this one, with a subclass, and one file
or folder of _primitives that binds and lowers it. Nothing else names it: the class
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar

import jax

from hostcall import _jax, _native
from hostcall._core.callback import CallSpec
from hostcall._core.fingerprint import fingerprint
from hostcall._core.options import LOCAL_ONLY, CallOptions, PlaceOptions, keyed
from hostcall._core.order import EFFECTS
from hostcall._core.registered import names
from hostcall._engine import targets
from hostcall._engine.hooks import CallHooks
from hostcall._engine.placement import Placement
from hostcall._jax.types import Aval, Effect, Mesh
from hostcall._native import Lend, ResultForm

Function = Callable[..., Any]  # of one array per leaf; it returns what users return
T = TypeVar("T")
_NO_PAIRS: tuple[tuple[int, int], ...] = ()
# What `Equation.native` says of a kind whose results are ignored.
_NATIVE = {
    "form": ResultForm.IGNORED,
    "out_tree": None,
    "counted": False,
    "literals": True,
}
# For each transformation its name in JAX, and the parameters that JAX gave it.
Transforms: TypeAlias = tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Equation:
    """The parameters of one equation of a primitive of hostcall's.

    Attributes:
        callback: the user's function with its trees and its options.
        masked: whether the first operand is the mask `where`.
        grid: the sizes of the batch axes that rows run over, outermost first.
        batched: for each operand, whether it has each of these axes.
        avals: the avals of one row's results.
    """

    callback: CallSpec = field(metadata=LOCAL_ONLY)
    masked: bool
    grid: tuple[int, ...] = ()
    batched: tuple[tuple[bool, ...], ...] = ()
    avals: tuple[Aval, ...] = field(default=(), metadata=LOCAL_ONLY, hash=False)

    @cached_property
    def options(self) -> PlaceOptions:
        """The options of its place."""
        return self.callback.options

    @cached_property
    def effect(self) -> Effect | None:
        """The effect that puts it in order; None if it is pure."""
        return EFFECTS[self.options.order]

    def __init_subclass__(cls) -> None:
        # It has the user's function, which JAX's caches must not keep alive.
        _jax.hold_weakly_in_caches(cls)

    # --- What a kind says of itself -------------------------------------------------

    takes: ClassVar[type[PlaceOptions]]  # the options of its place
    hooks: ClassVar[type[CallHooks]] = CallHooks  # what the engine calls back
    name: ClassVar[str] = ""  # the name of its file, if it has a form as a text
    stays = ""  # why it can't leave the process
    word: ClassVar[str] = "call"  # what reports call it
    participle: ClassVar[str] = "called"  # what is done to its function
    # Whether what its function returns is ignored.
    ignores_results: ClassVar[bool] = False
    target: ClassVar[str] = targets.TARGET  # the handler of its custom call
    keep_if_pure: ClassVar[bool] = False  # whether XLA may not drop one that is pure
    # Whether it may run once along mesh axes over which a shard_map is not manual.
    runs_along_axes: ClassVar[bool] = True

    # --- What a kind may answer in another way. Some have a field for it. -------------

    through = False  # whether the results are the arguments
    # Whether its plan counts executions or has memory. Then no other call may share it.
    is_stateful = False
    # Whether a program with it runs on the thread that dispatches it.
    runs_where_dispatched = False
    always = False  # whether the last operand is a flag that the engine reads
    # Which operands Python reads: not `always`, which the engine never queues.
    python_operands = slice(None)
    on_buffers = False  # whether the function works on XLA's memory
    lends = False  # whether the function gets XLA's memory, in any form
    # (operand, result) pairs of numbers that share memory.
    aliases = _NO_PAIRS
    # The ordinals of a sharded feed's devices, in the order of the ring's lanes.
    devices: ClassVar[tuple[int, ...]] = ()
    levels = 0  # how many leading batch axes the function itself sees
    # For each batch axis that a tap sees, the outermost first: whether each operand has
    # it, and its size. Empty for a call, whose function has them all.
    axes: ClassVar[Sequence[tuple[tuple[bool, ...], int]]] = ()
    method = "sequential"  # how a batch is called: a vmap_method; "own" for a rule
    # JAX's transformations that the function sees, in order of application.
    transforms: ClassVar[Transforms] = ()
    is_jaxs_own = False  # whether the function is one that JAX itself calls back

    @property
    def out_avals(self) -> Sequence[Aval]:
        """The avals of the equation's results."""
        if not self.grid:
            return self.avals
        return [a.update(shape=self.grid + a.shape) for a in self.avals]

    @property
    def shown(self) -> str:
        """What messages call it."""
        return f"`{self.callback.name}`"

    @property
    def checked_as(self) -> str:
        """What an error of JAX's NaN check calls an eager one."""
        return self.callback.described()

    @property
    def native(self) -> dict[str, Any]:
        """The fields of its native plan in which kinds differ.

        `form` is the form of what the function returns, and `literals` says whether
        that may be Python numbers for 32-bit arrays. `counted` says whether executions
        are counted (hc.watch). `out_tree` makes the tree `out=` of lend="out".
        """
        return _NATIVE.copy()  # a caller may change what it gets

    def bare(self) -> Function:
        """What the engine calls with XLA's memory, if the function works on that."""
        raise AssertionError(f"{self!r} gets arrays")

    def native_kind(self, placement: Placement) -> _native.Kind:
        """What the engine does with it in this place (native/plan/kind.h)."""
        raise NotImplementedError

    def blocks_of_whole(
        self, devices: Iterable[int], mesh: Mesh | None, avals: Sequence[Aval]
    ) -> dict[int, tuple[Any, ...]] | None:
        """The blocks of a tap with on="shards" outside of meshes, where each of the
        devices has its arrays whole; None for anything else.
        """
        del devices, mesh, avals
        return None

    # --- The operands -----------------------------------------------------------------
    #
    # What these take has one item for each operand: the operands themselves, or their
    # avals, shapes, flags.

    def mask(self, operands: Sequence[T]) -> Sequence[T]:
        """Only the mask, which is first, if there is one."""
        return operands[: int(self.masked)]

    def arguments(self, operands: Sequence[T]) -> Sequence[T]:
        """The operands that the function gets: without the mask, in front, and the flag
        `always`, at the end.
        """
        return operands[int(self.masked) : len(operands) - self.always]

    def compresses(self, mask: Any) -> bool:
        """Whether the function, which gets whole batches, gets them without the rows
        that this mask drops.
        """
        # The engine reads the axes of the grid. Those that the mask has beyond them
        # belong to the batch that the function sees.
        sees_batch = self.levels > 0
        return sees_batch and bool(mask.ndim > len(self.grid))

    def with_mask(self) -> Self:
        """The same with a mask in front of its operands, one for all rows."""
        assert not self.masked, "an equation has one mask"
        no_axes = (False,) * len(self.grid)
        batched = (no_axes, *self.batched) if self.grid else ()
        return replace(self, masked=True, batched=batched)

    # --- In programs -----------------------------------------------------------------

    def key(self, operands: Sequence[Aval], program: str = "") -> int:
        """The key by which programs find it: equal in all processes for equal ones.

        It says what the call is: the function, who calls it, the avals, the options. A
        program that was compiled in another process looks its calls up here, so it
        finds no call of another kind. It also says where the program runs: JAX 0.10's
        disk cache may return a program that was compiled without host callbacks for one
        that has them, and XLA would run that on a thread of its own.

        It has the name of the program, too: programs that are live at the same time and
        make equal calls then have the same texts in whatever order they are lowered.
        """
        options = self.options
        fields = [*keyed(type(self))(self), *keyed(type(options))(options)]
        # A vmap_method may be a function. Its text would have an address, which differs
        # from process to process, so it is fingerprinted as the callee is.
        rules = [value for value in fields if callable(value)]
        plain = [value for value in fields if not callable(value)]
        avals = [(a.shape, a.dtype.type.__name__) for a in (*operands, *self.avals)]
        # Not the line, which changes with what is written above it.
        caller = (self.callback.place.function, program)
        kind = (avals, self.levels, self.runs_where_dispatched, type(self).__name__)
        text = repr((caller, kind, plain))
        function = self.callback.function
        # What has a registered name is called by that: its code may change.
        registered = names.of(function) if names.names else None
        return fingerprint((registered or function, *rules, text))

    def __repr__(self) -> str:
        details = [self.callback.name, self.options.order, *self._details()]
        return f"<{' '.join(details)}>"

    def _details(self) -> list[str]:
        return ["where"] if self.masked else []


# --- Calls ----------------------------------------------------------------------------

# By lend=. A plan copies its kind, so one is enough for all plans.
_KINDS = {
    lend: _native.CallKind(lend=way)
    for lend, way in ((False, Lend.COPY), (True, Lend.ARGS), ("out", Lend.OUT))
}
_LEAF = jax.tree.structure(0)
_NOTHING = jax.tree.structure(None)


@dataclass(frozen=True, kw_only=True, repr=False)
class CallParams(Equation):
    """The parameters of one equation of the call primitive.

    Attributes:
        results_as: "tree": the function returns the structure of `result`. "leaves": it
            returns the same leaves in any containers. "nothing": its return value is
            ignored.
        levels: as `Equation` says.
        literals: whether the function may return Python numbers for 32-bit arrays.
    """

    levels: int = 0
    results_as: Literal["tree", "leaves", "nothing"] = "tree"
    literals: bool = True

    takes = CallOptions
    name = "call"

    @cached_property
    def options(self) -> CallOptions:
        options = self.callback.options
        assert isinstance(options, CallOptions), "a call's place has options of a call"
        return options

    @cached_property
    def is_stateful(self) -> bool:  # type: ignore[override]
        return self.on_buffers or self.options.counted

    @property
    def lends(self) -> bool:  # type: ignore[override]
        return self.on_buffers or self.options.lend is not False

    @cached_property
    def method(self) -> str:  # type: ignore[override]
        method = self.options.vmap_method or "sequential"
        return method if isinstance(method, str) else "own"

    @cached_property
    def runs_where_dispatched(self) -> bool:  # type: ignore[override]
        return self.effect is not None

    @property
    def native(self) -> dict[str, Any]:
        options = self.options
        tree = self.callback.results.treedef
        n = tree.num_leaves
        # The engine takes apart one array, a tuple of arrays, and None by itself. Any
        # other TREE is flattened in Python, and compared there with `result`.
        form = ResultForm.TREE
        if self.results_as == "nothing":
            form = ResultForm.IGNORED
        elif self.results_as == "leaves":
            # In whatever containers: only a lone leaf needs none.
            form = ResultForm.LEAF if n == 1 else form
        elif tree == _LEAF:
            form = ResultForm.LEAF
        elif tree == _NOTHING:
            form = ResultForm.NOTHING
        elif n > 0 and tree == jax.tree.structure((0,) * n):
            form = ResultForm.TUPLE
        return {
            "form": form,
            "counted": options.counted,
            "literals": self.literals,
            "out_tree": tree.unflatten if options.lend == "out" else None,
        }

    def native_kind(self, placement: Placement) -> _native.Kind:
        del placement
        return _KINDS[self.options.lend]

    def _details(self) -> list[str]:
        rows = [f"rows={self.grid}"] if self.grid else []
        return super()._details() + rows
