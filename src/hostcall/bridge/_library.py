"""Host functions whose derivatives another library gives: torch, JAX.

    derivatives   reverse mode            forward mode
    0             none                    none
    1             host code: a graph      host code: the library's jvp
    more          JAX code over another such function, with one order less: the
                  library's vjp, or its jvp, of the first

The second line is the fast way: the library's graph of the forward pass stays on the
host, and the backward pass runs it there. The third can be differentiated and batched
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.errors import PackageError, SpecError, wrong
from hostcall._core.host_code import HostCode
from hostcall._core.spec import Opaque, Template, is_array_like, is_numeric
from hostcall._host_function.function import HostFunction
from hostcall._host_function.rules import Rule, among
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


def check_derivatives(bridge: str, shown: str, derivatives: object) -> str:
    """Refuses a wrong derivatives=; returns what errors advise who wants one more."""
    if type(derivatives) is not int or derivatives < 0:
        wanted = "the highest order of derivatives, 0 for none"
        raise wrong("derivatives", f"`{shown}`", wanted, derivatives)
    return (
        f"`{shown}` was made with derivatives={derivatives}. Write hc.bridge.{bridge}"
        f"(fn, derivatives={derivatives + 1}), or keep the derivative out with"
        " jax.lax.stop_gradient on its arguments"
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
        forward: (args, nondiff) -> (result, what the backward pass needs).
        backward: (that, cotangents, wanted) -> the cotangents of the wanted arrays of
            the arguments; None for zero.
    """

    is_array: Callable[[object], bool]
    leaves: Callable[[Any], Arrays]
    vjp: Callable[..., tuple[Arrays, Callable[[Arrays], Arrays]]]
    jvp: Callable[..., tuple[Arrays, Arrays]]
    vmap: Callable[..., Callable[..., Arrays]]
    forward: Callable[[Arrays, Sequence[int]], tuple[object, object]]
    backward: Callable[[Any, Arrays, Flags], Arrays]

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
        return type(self)(
            self.over(derivative, *flags), name, f"{derivative} of {self._source}"
        )

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

    def _along(
        self, args: object, flags: Flags, only: Flags | None = None
    ) -> tuple[Run, Arrays]:
        """(function, arrays): the function of the arrays of `args` that `flags` marks.

        It returns the leaves of its result that `only` marks; without it, all.
        """
        arrays, filled, leaves = along(args, flags, self.is_array)

        def function(*arrays: object) -> tuple[object, ...]:
            try:
                outs = self.leaves(self.pure(*filled(arrays)))
            except BaseException:
                # The engine clears the frames of the traceback, but the functions in
                # them keep their closures: lent memory would seem kept.
                leaves.clear()
                raise
            return tuple(outs if only is None else pick(outs, only))

        return function, tuple(arrays)

    def _pulled(self, args: Arrays, cotangents: Arrays, wanted: bytes) -> Arrays:
        has_cotangent = [ct is not None for ct in cotangents]
        function, arrays = self._along(args, wanted, has_cotangent)
        _, pull = self.vjp(function, *arrays)
        nonzero = tuple(pick(cotangents, has_cotangent))
        return list(pull(nonzero))

    def _pushed(
        self, args: Arrays, tangents: Arrays, out_diff: bytes
    ) -> tuple[Arrays, Arrays]:
        has_tangent = [t is not None for t in tangents]
        function, arrays = self._along(args, has_tangent)
        nonzero = tuple(pick(tangents, has_tangent))
        outs, out_tangents = self.jvp(function, arrays, nonzero)
        return list(outs), pick(out_tangents, out_diff)

    def _mapped(self, flags: bytes, *args: object) -> Arrays:
        function, arrays = self._along(args, [True] * len(flags))
        axes = tuple(0 if flag else None for flag in flags)
        return list(self.vmap(function, axes)(*arrays))


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
        """The function that is this derivative: "vjp" or "jvp", as in `Code.derived`;
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


class LibraryFunction(OverOthers):
    """A function that a library differentiates.

    Attributes:
        derivatives: the highest order of its derivatives.
    """

    fn: Code

    def __init__(
        self,
        code: Code,
        *,
        derivatives: int,
        advice: str,
        vmap_method: Any = None,
        **options: Any,
    ) -> None:
        by_library = vmap_method == "torch"
        rows = None if by_library else vmap_method
        super().__init__(code, vmap_method=rows, **options)
        self.derivatives = derivatives
        self.advice = advice
        self._method = vmap_method
        if by_library:
            self.rules.batch = self._batch
        # The second line of the table above. A graph is that of one row, so a batch
        # that the library itself makes goes by the third.
        if derivatives == 1 and not by_library:
            self.rules.vjp = Rule(self._forward, "host", code.backward, flat=True)
            self.rules.jvp = Rule(self._push_on_host, "host", flat=True)
        elif derivatives:
            self.set_rules()

    def _forward(self, *args: object) -> tuple[object, object]:
        return self.fn.forward(args, among(self.nondiff, len(args)))

    def _push_on_host(self, args: Arrays, tangents: Arrays, out_diff: Flags) -> object:
        return self.derivative("jvp").fn(args, tangents, bytes(out_diff))

    def _batch(self, size: int, in_batched: object, *args: object) -> tuple[Any, bool]:
        are_operands = list(map(is_operand, tree.tree_leaves(args)))
        flags = bytes(pick(tree.tree_leaves(in_batched), are_operands))
        arrays, filled, _ = along(args, [True] * len(flags), is_operand)
        # What one row gets, from which the spec of its results follows.
        row = [
            jax.ShapeDtypeStruct(x.shape[1:] if flag else x.shape, x.dtype)
            for x, flag in zip(arrays, flags, strict=True)
        ]
        leaves, treedef = tree.tree_flatten(self._spec(filled(row)))
        wide = [jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in leaves]
        if size == 0:  # torch.func.vmap refuses an empty batch
            with _jax.able_to_hold(*[x.dtype for x in wide]):
                empty = [jnp.zeros(x.shape, x.dtype) for x in wide]
            return treedef.unflatten(empty), True
        mapped = self.derivative("vmap", flags, tuple(wide))
        return treedef.unflatten(mapped(*args)), True

    def _make(self, derivative: str, *of_vmap: Any) -> LibraryFunction:
        """Makes a derivative; or the function of a batch.

        For the latter, `of_vmap` is which arrays have a batch axis, as bytes, and the
        specs of the results.
        """
        # With other methods a derived function would get a whole batch, but its spec
        # has the shapes of one row.
        of_rows = self._method in ("sequential", "parallel", "torch")
        options: dict[str, Any] = {
            "advice": self.advice,
            "derivatives": max(self.derivatives - 1, 0),
            "result": functools.partial(self._derived_spec, derivative),
            "vmap_method": self._method if of_rows else None,
            "lend": self.options.lend,
        }
        if derivative == "vmap":
            # A batch is no derivative, so it has as many of them, and the arguments of
            # this function.
            _, specs = of_vmap
            options["result"] = list(specs)
            options["derivatives"] = self.derivatives
            options["nondiff"] = self.nondiff
        name = f"{derivative} of {self.__qualname__}"
        code = self.fn.derived(derivative, name, *of_vmap[:1])
        function = type(self)(code, name=name, **options)
        # The timeout, the executor and the limits count for derivatives as well.
        function.policy = self.policy
        return function

    def _derived_spec(
        self, derivative: str, args: Arrays, _: object, flags: bytes
    ) -> object:
        if derivative == "vjp":
            # A cotangent is shaped like its argument.
            return pick(shaped(args), flags)
        outs = tree.tree_leaves(self._spec(tuple(args)))
        return outs, pick(outs, flags)


class TakesNoRules(Function):
    """A function whose derivatives come from another library."""

    def _where(self, usage: str, *_: object) -> NoReturn:
        self._add(usage.partition("(")[0].removeprefix("def"), None)

    def _add(self, kind: str, rule: object) -> NoReturn:
        del rule
        raise SpecError(
            f"hostcall: `{self.__name__}` is a bridge, whose rules come from the other"
            f" library, so it takes no def{kind}. To give a rule yourself, make the"
            " function with hc.host",
            code="hc-rule",
        )


def split(args: object, kwargs: object) -> tuple[Template, Arrays]:
    """(what rebuilds both, their arrays, or what stands for these)."""
    leaves, treedef = tree.tree_flatten((args, kwargs))
    flags = [
        is_operand(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves
    ]
    marks = tuple(
        None if flag else Opaque(leaf) for leaf, flag in zip(leaves, flags, strict=True)
    )
    return Template(treedef, marks), pick(leaves, flags)


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array that a call hands over; other leaves are static."""
    return isinstance(leaf, (np.ndarray, np.generic)) and is_numeric(leaf.dtype)


def is_operand(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) or is_array_like(leaf)


def shaped(avals: object) -> list[jax.ShapeDtypeStruct]:
    leaves = tree.tree_leaves(avals)
    return [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]


def along(
    args: object, flags: Flags, is_array: Callable[[object], bool]
) -> tuple[Arrays, Callable[[Arrays], Any], list[Any]]:
    """(arrays, filled, leaves): the arrays of `args` that the flags mark.

    `filled` takes others in their places, and returns `args` with them. `leaves` is
    what it keeps of `args`.
    """
    leaves, treedef = tree.tree_flatten(args)
    array_numbers = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    marked = pick(array_numbers, flags)

    def filled(replacements: Arrays) -> Any:
        # The other leaves stay, static ones and arrays that are not marked.
        complete = list(leaves)
        for i, array in zip(marked, replacements, strict=True):
            complete[i] = array
        return treedef.unflatten(complete)

    return [leaves[i] for i in marked], filled, leaves
