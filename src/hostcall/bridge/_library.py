"""Host functions whose derivatives another library gives: torch, autograd.

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
from typing import Any, NoReturn

import jax

from hostcall._core.errors import PackageError, SpecError
from hostcall._core.host_code import HostCode
from hostcall._core.source import source_of
from hostcall._core.spec import flatten_arguments, is_array_like
from hostcall._host_function.function import HostFunction
from hostcall._host_function.rules import HOST_RESIDUALS, Rule, Vjp

tree = jax.tree_util


def needed(package: str, bridge: str) -> Any:
    """Imports the package of a bridge, when the bridge is used."""
    return PackageError.needed(
        package,
        f"hc.bridge.{bridge}",
        f"hostcall[{bridge}]",
        "write the rules yourself with hc.host",
    )


# Options of `hc.host` that bridges set for the user.
PLAIN: dict[str, Any] = {
    "nondiff": (),
    "order": "pure",
    "lend": False,
    "vmap_method": None,
    "arrays": "numpy",
    "executor": None,
}


class Code(HostCode):
    """Host code that a library can differentiate. Its rules work on flat arrays.

    Attributes:
        derived: (what, name, source) -> the code of a derivative. For "vjp" it is
            (args, cotangents, wanted) -> cotangents of the wanted arrays of `args`;
            `cotangents` has one entry per array of the result, None for zero. For "jvp"
            it is (args, tangents, out_diff) -> results, and the tangents of those
            results that `out_diff` marks; `tangents` has one entry per array of `args`,
            None for zero. Flags are bytes: one leaf, which isn't an array.
        forward: (args, nondiff) -> (result, what the backward pass needs).
        backward: (that, cotangents, wanted) -> the cotangents of the wanted arrays of
            the arguments; None for zero.
    """

    derived: Callable[[str, str, str], Code]
    forward: Callable[[Sequence[Any], Sequence[int]], tuple[Any, Any]]
    backward: Callable[[Any, Sequence[Any], Sequence[bool]], Any]

    def __init__(self, name: str, source: str) -> None:
        self.__name__ = name.rpartition(".")[2]
        self.__qualname__ = name
        self._source = source

    def source(self) -> str:
        return self._source


class LibraryFunction(HostFunction[..., Any]):
    """A function that a library differentiates.

    Attributes:
        derivatives: the highest order of its derivatives.
    """

    _NOT_PICKLED = (*HostFunction._NOT_PICKLED, "_pulled", "_pushed")
    fn: Code

    def __init__(
        self,
        code: Code,
        *,
        derivatives: int,
        advice: str,
        by_graph: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(code, **{**PLAIN, **options})
        self.derivatives, self.advice = derivatives, advice
        if derivatives == 1 and by_graph:
            self.rules.vjp = Vjp(
                self._forward, code.backward, "host", HOST_RESIDUALS, True
            )
            self.rules.jvp = Rule(self._push_on_host, "host", flat=True)
        elif derivatives:
            self.rules.vjp = Vjp(
                self._with_args, self._pull, "jax", HOST_RESIDUALS, True
            )
            self.rules.jvp = Rule(self._push, "jax", flat=True)

    def spec(self, *avals: Any) -> Any:
        """The spec of its result for arguments with these avals."""
        return self._spec(avals, flatten_arguments(avals, {})[1])

    # --- Rules in host code -----------------------------------------------------------

    def _forward(self, *args: Any) -> Any:
        return self.fn.forward(args, self.nondiff_of(len(args)))

    def _push_on_host(self, args: Any, tangents: Any, out_diff: Any) -> Any:
        return self._pushed.fn(args, tangents, bytes(out_diff))

    # --- Rules in JAX code ------------------------------------------------------------

    def _with_args(self, *args: Any) -> Any:
        return self(*args), args

    def _pull(self, args: Any, cotangents: Any, wanted: Any) -> Any:
        return self._pulled(args, cotangents, bytes(wanted))

    def _push(self, args: Any, tangents: Any, out_diff: Any) -> Any:
        return self._pushed(args, tangents, bytes(out_diff))

    @functools.cached_property
    def _pulled(self) -> LibraryFunction:
        def result(args: Any, cotangents: Any, wanted: bytes) -> Any:
            del cotangents
            return _flagged(shaped(args), wanted)

        return self._over("vjp", self.fn.derived, result)

    @functools.cached_property
    def _pushed(self) -> LibraryFunction:
        def result(args: Any, tangents: Any, out_diff: bytes) -> Any:
            del tangents
            outs = tree.tree_leaves(self.spec(*args))
            return outs, _flagged(outs, out_diff)

        return self._over("jvp", self.fn.derived, result)

    def _over(self, what: str, make: Any, result: Any, **more: Any) -> LibraryFunction:
        """A function made from this one, whose rows run in the same way."""
        name = f"{what} of {self.__qualname__}"
        method = self.options["vmap_method"]
        options = {
            "derivatives": max(self.derivatives - 1, 0),
            # With other methods a derived function would get a whole batch, but its
            # spec has the shapes of one row.
            "vmap_method": method if method in ("sequential", "parallel") else None,
            **{key: self.options[key] for key in ("lend", "timeout", "executor")},
            **more,
        }
        code = make(what, name, f"{what} of {source_of(self.fn)}")
        return type(self)(code, advice=self.advice, name=name, result=result, **options)


class TakesNoRules(HostFunction[..., Any]):
    """A function whose derivatives come from another library."""

    def _add(self, kind: str, rule: Any) -> NoReturn:
        del rule
        raise SpecError(
            f"hostcall: `{self.__name__}` is a bridge, whose rules come from the other"
            f" library, so it takes no def{kind}. To give a rule yourself, make the"
            " function with hc.host",
            code="hc-rule",
        )

    def defbatch(self, rule: Any) -> NoReturn:
        """Raises SpecError: a bridge takes no rules."""
        self._add("batch", rule)


def is_operand(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) or is_array_like(leaf)


def shaped(avals: Any) -> list[Any]:
    return [x for x in tree.tree_leaves(avals) if hasattr(x, "shape")]


def _flagged(avals: Sequence[Any], flags: bytes) -> list[Any]:
    """The flagged avals, reduced to shape and dtype."""
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x, flag in zip(avals, flags, strict=True)
        if flag
    ]
