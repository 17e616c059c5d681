"""Host functions whose derivatives another library gives: torch, JAX.

`Code` is host code that the library can differentiate. `OverOthers` is the HostFunction
around it: its rules are JAX code that calls another such function, whose code is the
library's vjp, jvp or batch of the first. Therefore JAX can differentiate and batch them
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from hostcall._core.array_values import is_array_like
from hostcall._core.errors import PackageError
from hostcall._core.host_code import HostCode
from hostcall._core.spec import Opaque, Template
from hostcall._host_function.function import HostFunction
from hostcall._host_function.rules import Rule
from hostcall._host_function.trees import pick

tree = jax.tree_util

Function: TypeAlias = HostFunction[..., Any]
# Arrays of one kind (NumPy's, JAX's, a library's own); None may stand for zero.
Arrays: TypeAlias = Sequence[Any]
# One for each array, also as bytes: those are one leaf, which isn't an array.
Flags: TypeAlias = Sequence[int]
Run: TypeAlias = Callable[..., Any]


def needed(package: str, bridge: str) -> Any:
    """Imports the package of a bridge, when the bridge is used."""
    return PackageError.needed(
        package,
        f"hc.bridge.{bridge}",
        f"hostcall[{bridge}]",
        "write the rules yourself with hc.host",
    )


# Why a program with host code of theirs can't leave the process.
MADE_BY_A_BRIDGE = (
    "a bridge makes it when the program is traced, so it can have no name. Register a"
    " hc.host function that calls the library, with rules of its own"
)


class Code(HostCode):
    """Host code that a library differentiates. Its rules work on flat arrays.

    Attributes:
        run: the function of the library's arrays.
        is_array: whether a leaf of the arguments is an array; the others are static.
        leaves: the leaves of a result, as arrays.
        vjp: (f, *xs) -> (f(*xs), a function from its cotangents to those of xs), for an
            f that returns a tuple of arrays that have derivatives.
        jvp: (f, xs, dots) -> (f(*xs), their tangents), for an f that returns a tuple.
        vmap: (f, axes) -> f of batches.
    """

    is_array: Callable[[object], bool]
    leaves: Callable[[Any], Arrays]
    vjp: Callable[..., tuple[Arrays, Callable[[Arrays], Arrays]]]
    jvp: Callable[..., tuple[Arrays, Arrays]]
    vmap: Callable[..., Callable[..., Arrays]]

    def __init__(self, run: Any, name: str, source: str, like: Any = None) -> None:
        """Except for the name it looks like the user's function `like`."""
        self.__name__ = name.rpartition(".")[2]
        if like is not None:
            functools.update_wrapper(self, like, updated=())
        self.run = run
        self.__qualname__ = name
        self._source = source

    def source(self) -> str:
        return self._source

    def pure(self, *args: Any) -> object:
        """Runs it so that it can't write to the arguments."""
        return self.run(*args)

    def derived(self, derivative: str, name: str, *flags: bytes) -> Code:
        run = self.over(derivative, *flags)
        return type(self)(run, name, source=f"{derivative} of {self._source}")

    def over(self, derivative: str, *flags: bytes) -> Run:
        """The function that is a derivative of this one, or a batch of it.

        "vjp" is (args, cotangents, wanted) -> cotangents of the wanted arrays of
        `args`; `cotangents` has one entry per array of the result, None for zero. "jvp"
        is (args, tangents, out_diff) -> the results, and the tangents of those results
        that `out_diff` marks; `tangents` has one entry per array of `args`, None for
        zero. "vmap" is (*args) -> results; the arrays that `flags` marks have a batch
        axis in front, and all results have one.
        """
        if derivative == "vmap":
            return functools.partial(self._mapped, *flags)
        return self._pulled if derivative == "vjp" else self._pushed

    def _of_marked(
        self, args: object, flags: Flags, only: Flags | None = None
    ) -> tuple[Run, Arrays]:
        """(function, arrays): the function of the arrays of `args` that `flags` marks.

        It returns the leaves of the result that `only` marks; without it, all.
        """
        marked = MarkedArrays(args, flags, self.is_array)

        def function(*arrays: object) -> tuple[object, ...]:
            try:
                result = self.pure(*marked.filled(arrays))
                leaves = self.leaves(result)
                return tuple(leaves if only is None else pick(leaves, only))
            except BaseException:
                # The engine clears the frames of the traceback, but the functions in
                # them keep their closures: lent memory would seem kept.
                marked.forget()
                raise

        return function, tuple(marked.arrays)

    def _pulled(self, args: Arrays, cotangents: Arrays, wanted: bytes) -> Arrays:
        has_cotangent = [ct is not None for ct in cotangents]
        function, arrays = self._of_marked(args, wanted, has_cotangent)
        _, pull = self.vjp(function, *arrays)
        nonzero = tuple(pick(cotangents, has_cotangent))
        return list(pull(nonzero))

    def _pushed(
        self, args: Arrays, tangents: Arrays, out_diff: bytes
    ) -> tuple[Arrays, Arrays]:
        has_tangent = [t is not None for t in tangents]
        function, arrays = self._of_marked(args, has_tangent)
        nonzero = tuple(pick(tangents, has_tangent))
        outs, out_tangents = self.jvp(function, arrays, nonzero)
        return list(outs), pick(out_tangents, out_diff)

    def _mapped(self, flags: bytes, *args: object) -> Arrays:
        every_array = [True] * len(flags)
        function, arrays = self._of_marked(args, every_array)
        axes = tuple(0 if flag else None for flag in flags)
        of_batches = self.vmap(function, axes)
        return list(of_batches(*arrays))


class OverOthers(Function):
    """A function with rules in JAX code over others, which are made from it.

    The others are functions of the same kind, so they have such rules too: every order
    and both modes work, and none is made before JAX asks for it.
    """

    _NOT_PICKLED = (*HostFunction._NOT_PICKLED, "_made")

    def set_rules(self) -> None:
        # JAX code, so that JAX can differentiate and batch what they call.
        self.rules.vjp = Rule(self._with_args, "jax", self._pull, flat=True)
        self.rules.jvp = Rule(self._push, "jax", flat=True)

    def _with_args(self, *args: object) -> tuple[object, object]:
        return self(*args), args

    def _pull(self, args: Arrays, cotangents: Arrays, wanted: Flags) -> object:
        return self.derivative("vjp")(args, cotangents, bytes(wanted))

    def _push(self, args: Arrays, tangents: Arrays, out_diff: Flags) -> object:
        return self.derivative("jvp")(args, tangents, bytes(out_diff))

    def derivative(self, *key: Any) -> Function:
        """The function that is this derivative: "vjp" or "jvp", as in `Code.over`;
        or another one that `_make` knows.
        """
        function = self._made.get(key)
        if function is None:
            # Another thread may be faster: all use the same one, so that JAX's caches
            # hit. `setdefault` is one step, so it needs no lock.
            function = self._made.setdefault(key, self._make(*key))
        return function

    @functools.cached_property
    def _made(self) -> dict[tuple[object, ...], Function]:
        return {}

    def _make(self, derivative: str, *flags: Any) -> Function:
        raise NotImplementedError


def split(args: object, kwargs: object) -> tuple[Template, Arrays]:
    """(what rebuilds both, their arrays, or what stands for these)."""
    leaves, treedef = tree.tree_flatten((args, kwargs))
    arrays = []
    marks: list[Opaque | None] = []
    for leaf in leaves:
        if is_operand(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            arrays.append(leaf)
            marks.append(None)
        else:
            marks.append(Opaque(leaf))
    return Template(treedef, tuple(marks)), arrays


def is_operand(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) or is_array_like(leaf)


class MarkedArrays:
    """The arrays of a pytree that flags mark, and the pytree around them.

    `flags` has one for each array, and `is_array` says which leaves are arrays:

        tree        {"w": array, "mode": "fast", "b": array}
        flags       1                            0
        arrays      [the array of "w"]
        filled([x]) {"w": x, "mode": "fast", "b": array}
    """

    def __init__(
        self, args: object, flags: Flags, is_array: Callable[[object], bool]
    ) -> None:
        self._leaves, self._treedef = tree.tree_flatten(args)
        array_numbers = [i for i, leaf in enumerate(self._leaves) if is_array(leaf)]
        self._numbers = pick(array_numbers, flags)
        self.arrays = [self._leaves[i] for i in self._numbers]

    def filled(self, replacements: Arrays) -> Any:
        """The tree with others in place of these arrays."""
        leaves = list(self._leaves)
        for i, array in zip(self._numbers, replacements, strict=True):
            leaves[i] = array
        return self._treedef.unflatten(leaves)

    def forget(self) -> None:
        """Lets go of the tree."""
        self._leaves.clear()
        self.arrays.clear()
