"""Host code: the function and its rules, as `hc.call` runs them.

`HostCode` is the value of one such call on flat arrays. What Python runs is a `Part`:
it puts the trees together, calls the user's function, and takes apart and checks what
that returned. Both are compared by what they are made of, so that JAX's caches hit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np

from hostcall import _jax
from hostcall._call import call
from hostcall._errors import DerivativeError
from hostcall._host_function import residuals, rules
from hostcall._host_function.primitive import Arrays, Tangents, Value
from hostcall._host_function.trees import Trees, pick, spread
from hostcall._spec import Static
from hostcall._where import Place, name_of, source_of

# value: the function. jvp: tangents of the results. both: results and their tangents.
# forward, backward: the halves of a vjp rule. jacobian, transpose: those rules.
Kind = Literal["value", "jvp", "both", "forward", "backward", "jacobian", "transpose"]


class OfFunction(Value):
    """A value that belongs to a HostFunction, whose name and rules it has."""

    function: Any

    @property
    def name(self) -> str:  # type: ignore[override]
        return str(self.function.__name__)

    @property
    def rules(self) -> rules.Rules:
        return self.function.rules  # type: ignore[no-any-return]


@dataclass(frozen=True)
class HostCode(OfFunction):
    """One call of host code, as a function of flat arrays.

    Attributes:
        function: the HostFunction, compared by identity.
        trees: of the way it is called.
        kind: which of its codes.
        place: the user's line.
        nz: for each array of the arguments, whether it has a tangent here; of a
            transposition, whether the function is linear in it.
        take: a backward rule's residual is used here for the last time, it seems.
    """

    function: Any
    trees: Trees
    kind: Kind
    place: Place = field(compare=False)
    nz: tuple[bool, ...] = ()
    take: bool = True

    @property
    def code(self) -> Callable[..., Any]:
        """What the user wrote."""
        found = self.rules
        by_kind: dict[str, Any] = {"value": self.function.fn}
        if found.jvp:
            by_kind["jvp"] = by_kind["both"] = found.jvp.rule or found.jvp.each[0]
        if found.vjp:
            by_kind |= {"forward": found.vjp.fwd, "backward": found.vjp.bwd}
        if found.jacobian:
            by_kind["jacobian"] = found.jacobian.rule
        if found.transpose:
            by_kind["transpose"] = found.transpose.rule
        return by_kind[self.kind] or self.function.fn  # type: ignore[no-any-return]

    @property
    def avals(self) -> tuple[Any, ...]:  # type: ignore[override]
        trees, results = self.trees, self.trees.results.avals
        if self.kind == "value":
            return results
        if self.kind == "forward":
            return (*results, *self.function.residual_avals)
        if self.kind == "jacobian":
            return trees.jacobian_avals
        if self.kind in ("backward", "transpose"):
            return tuple(pick(trees.in_avals, self.nz))
        return (*results, *trees.out_avals) if self.kind == "both" else trees.out_avals

    @property
    def keeps_objects(self) -> bool:
        vjp = self.rules.vjp
        return (
            self.kind in ("forward", "backward")
            and vjp is not None
            and (vjp.keeps_objects)
        )

    def run(self, args: Arrays) -> Arrays:
        options = self.function.call_options(self.kind, self.keeps_objects)
        if self.kind == "value":
            results = self.trees.results
            spec = results.treedef.unflatten(map(_struct, results.avals, results.keys))
            value = call(Part(self), spec, *self.trees.arguments(args), **options)
            return _blocks(results.treedef.flatten_up_to(value))
        keys = self.trees.results.keys if self.kind in ("both", "forward") else ()
        keys = (*keys, *(None for _ in self.avals[len(keys) :]))
        spec = list(map(_struct, self.avals, keys))
        n = len(self.trees.in_avals) if self.takes_arguments else 0
        whole = self.trees.arguments(args[:n]) if n else ()
        return _blocks(call(Part(self), spec, whole, args[n:], **options))

    @property
    def takes_arguments(self) -> bool:
        """Whether the first operands are the function's arguments."""
        return self.kind != "transpose" and (
            self.kind != "backward" or self.keeps_objects
        )

    def jvp(self, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        del args, tangents
        if self.kind == "value":
            raise rules.no_derivative(self.name, self.place)
        raise rules.not_again(self.name, self.code, self.place)

    def shared(self, dims: Sequence[int | None]) -> Value:
        """Rows that share a residual leave it where it is."""
        if self.kind != "backward" or not self.keeps_objects or not self.take:
            return self
        handle = dims[len(self.trees.in_avals)]
        return replace(self, take=False) if handle is None else self

    def narrowed(self, used: Sequence[bool]) -> Value | None:
        """Nobody wants the residuals: the function itself will do."""
        n = len(self.trees.results.avals)
        if self.kind != "forward" or any(used[n:]):
            return None
        return self.function.site(self.trees, self.place)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self.name if self.kind == "value" else f"{self.kind} of {self.name}"


def _struct(aval: Any, key: Any) -> jax.ShapeDtypeStruct:
    if key is None:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    shape = aval.shape[: aval.ndim - len(_jax.key_data_shape(key))]
    return jax.ShapeDtypeStruct(shape, key)


def _blocks(leaves: Sequence[Any]) -> Arrays:
    return [jax.random.key_data(x) if _jax.is_key_dtype(x.dtype) else x for x in leaves]


# --- On the host -------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What the engine calls. `hostcall_place` and the names are for its messages."""

    what: HostCode

    def __getattr__(self, name: str) -> Any:
        if name in ("__qualname__", "__name__"):
            return name_of(self.what.code)
        if name == "hostcall_source":
            return source_of(self.what.code)
        if name == "hostcall_place":
            return self.what.place
        raise AttributeError(name)

    def __call__(self, *operands: Any, **out: Any) -> Any:
        if self.what.kind == "value":
            return self.what.code(*operands, **out)
        return getattr(self, "_" + self.what.kind)(*operands)

    # Each gets (arguments, other operands), and gives a list.

    def _both(self, args: Any, rest: Arrays) -> Arrays:
        outs, tangents = self._pushed(args, rest, None)
        leaves = self.what.trees.out_leaves(outs, "the jvp rule")
        return [*leaves, *tangents]

    def _jvp(self, args: Any, rest: Arrays) -> Arrays:
        n = sum(self.what.nz)
        outs = self.what.trees.result(rest[n:]) if rest[n:] else None
        return self._pushed(args, rest[:n], outs, wants_outs=False)[1]

    def _pushed(
        self, args: Any, tangents: Arrays, outs: Any, wants_outs: bool = True
    ) -> tuple[Any, Arrays]:
        what, trees = self.what, self.what.trees
        jvp = what.rules.jvp
        assert jvp is not None
        arrays = array_leaves(args, trees)
        dots = spread(tangents, what.nz)
        whole = trees.tangents(arrays, dots, lambda x: np.zeros(x.shape, x.dtype))
        if jvp.rule is None:
            if outs is None:
                outs = what.function.fn(*args)
            out_dot: Any = None
            for position in sorted(set(pick(trees.positions, what.nz))):
                rule = jvp.each[position]
                assert rule is not None
                term = rule(whole[position], outs, *args)
                out_dot = term if out_dot is None else _add(out_dot, term)
        else:
            out_dot = jvp.rule(args, whole)
            if trees.is_pair(out_dot):
                outs, out_dot = out_dot
            elif wants_outs:
                outs = what.function.fn(*args)
        leaves = trees.out_leaves(out_dot, "the jvp rule")
        return outs, pick(leaves, trees.out_diff)

    def _forward(self, args: Any, rest: Arrays) -> Arrays:
        del rest
        outs, residual = self._run_forward(args)
        leaves = self.what.trees.out_leaves(outs, "the forward rule")
        if self.what.keeps_objects:
            return [*leaves, residuals.store.put(residual)]
        treedef = self.what.function.residual_tree
        try:
            return [*leaves, *treedef.flatten_up_to(residual)]
        except (ValueError, TypeError) as error:
            raise DerivativeError(
                f"hostcall: the forward rule of `{self.what.name}` should return"
                f" residuals in the structure of residuals=, {treedef}, got"
                f" {jax.tree_util.tree_structure(residual)}"
            ) from error

    def _run_forward(self, args: Any) -> tuple[Any, Any]:
        vjp = self.what.rules.vjp
        assert vjp is not None
        return forward_pair(vjp.fwd(*args), self.what.name)

    def _backward(self, args: Any, rest: Arrays) -> Arrays:
        what, trees = self.what, self.what.trees
        vjp = what.rules.vjp
        assert vjp is not None
        if what.keeps_objects:
            residual = residuals.store.get(
                rest[0], what.take, lambda: self._run_forward(args)[1]
            )
            rest = rest[1:]
        else:
            treedef = what.function.residual_tree
            residual = treedef.unflatten(rest[: treedef.num_leaves])
            rest = rest[treedef.num_leaves :]
        value = vjp.bwd(residual, trees.cotangents(rest))
        positions = range(len(trees.argument_trees))
        leaves = trees.argument_leaves(value, positions, "the backward rule")
        return self._cotangents(leaves, rest)

    def _transpose(self, known: Any, rest: Arrays) -> Arrays:
        del known
        what, trees = self.what, self.what.trees
        rule = what.rules.transpose
        assert rule is not None
        n = len(trees.in_avals) - sum(what.nz)
        args = trees.arguments(spread_known(rest[:n], what.nz))
        value = rule.rule(trees.cotangents(rest[n:]), *nonlinear(args, trees))
        return self._cotangents(transposed_leaves(value, trees), rest[n:])

    def _cotangents(self, leaves: Arrays, given: Arrays) -> Arrays:
        """None is zero. With whole batches their axes are in front."""
        trees = self.what.trees
        batch: tuple[int, ...] = ()
        for ct, aval in zip(given, trees.out_avals, strict=True):
            batch = ct.shape[: len(ct.shape) - len(aval.shape)]
        avals = pick(trees.in_avals, self.what.nz)
        return [
            np.zeros(batch + aval.shape, aval.dtype) if leaf is None else leaf
            for leaf, aval in zip(pick(leaves, self.what.nz), avals, strict=True)
        ]

    def _jacobian(self, args: Any, rest: Arrays) -> Arrays:
        del rest
        rule = self.what.rules.jacobian
        assert rule is not None
        return self.what.trees.jacobian_leaves(rule.rule(*args))


def array_leaves(args: Any, trees: Trees) -> Arrays:
    leaves = trees.template.treedef.flatten_up_to((args, {}))
    return pick(leaves, [not isinstance(m, Static) for m in trees.template.leaves])


def _add(left: Any, right: Any) -> Any:
    return jax.tree_util.tree_map(lambda a, b: a + b, left, right)


def forward_pair(value: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise DerivativeError(
            f"hostcall: the forward rule of `{name}` should return (out, residuals),"
            f" got {type(value).__name__}"
        )
    return value


# --- Transposition, for host and JAX code ------------------------------------------


def spread_known(known: Sequence[Any], linear: Sequence[bool]) -> list[Any]:
    """The arrays in which the function isn't linear, with None for the others."""
    rest = iter(known)
    return [None if flag else next(rest) for flag in linear]


def nonlinear(args: Any, trees: Trees) -> list[Any]:
    """The arguments in which the function isn't linear."""
    return [arg for i, arg in enumerate(args) if i not in trees.diff_positions]


def transposed_leaves(value: Any, trees: Trees) -> Any:
    """What a transposition rule returned: one value for one linear argument, a tuple
    for several.
    """
    whole = (value,) if len(trees.diff_positions) == 1 else value
    return trees.argument_leaves(whole, trees.diff_positions, "the transposition rule")
