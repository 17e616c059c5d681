"""What Python runs for one piece of host code: a `Part`.

A part puts the trees together, calls the user's function, and takes apart and checks
what that returned. The call in the middle may be made on another thread, in another
process or on another machine (`executor=`). So it is a function of the user's, or one
of the few here, and arguments, nothing of JAX's trees; what they left as residuals
comes back, since the next call may go elsewhere.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hostcall import _executors
from hostcall._errors import DerivativeError
from hostcall._host_function.primitive import Arrays
from hostcall._host_function.residuals import store
from hostcall._host_function.rules import forward_pair
from hostcall._host_function.trees import Trees, is_pair, pick, spread, spread_known
from hostcall._spec import Static
from hostcall._where import name_of, source_of

# What to run, its arguments, and what to make of its value.
Steps = tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], Any]]


@dataclass(frozen=True)
class Part:
    """What the engine calls. `hostcall_place` and the names are for its messages."""

    what: Any  # a parts.HostCode

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
        run, args, finish = getattr(self, "_" + self.what.kind)(*operands)
        return finish(run(*args))

    def hostcall_steps(self, *operands: Any) -> Steps:
        """As `_workers.run_rows` wants it."""
        if self.what.kind == "value":
            return self._code("value"), operands, _same
        return getattr(self, "_" + self.what.kind)(*operands)  # type: ignore[no-any-return]

    def _code(self, which: str, index: int = 0) -> Any:
        """One of the user's functions, as it can be sent."""
        function = self.what.function
        fn = code_of(function, which, index)
        executor = function.executor
        if executor is None:
            return fn
        return _Code(fn, function, which, index, _executors.by_name(executor))

    # Each gets (arguments, other operands); finished, it gives a list.

    def _both(self, args: Any, rest: Arrays) -> Steps:
        run, sent, finish = self._push(args, rest, None, wants_outs=True)

        def both(value: Any) -> Arrays:
            outs, tangents = finish(value)
            return [*self.what.trees.out_leaves(outs, "the jvp rule"), *tangents]

        return run, sent, both

    def _jvp(self, args: Any, rest: Arrays) -> Steps:
        n = sum(self.what.nz)
        outs = self.what.trees.result(rest[n:]) if rest[n:] else None
        run, sent, finish = self._push(args, rest[:n], outs, wants_outs=False)
        return run, sent, lambda value: finish(value)[1]

    def _push(self, args: Any, tangents: Arrays, outs: Any, wants_outs: bool) -> Steps:
        what, trees = self.what, self.what.trees
        jvp = what.rules.jvp
        assert jvp is not None
        arrays = array_leaves(args, trees)
        dots = spread(tangents, what.nz)
        whole = trees.tangents(arrays, dots, lambda x: np.zeros(x.shape, x.dtype))
        fn = self._code("value")
        if jvp.rule is None:
            positions = sorted(set(pick(trees.positions, what.nz)))
            terms = [(self._code("jvp", p), whole[p]) for p in positions]
            run: Callable[..., Any] = _push_each
            sent: tuple[Any, ...] = (terms, fn if outs is None else None, outs, args)
        else:
            treedef = trees.results.treedef
            like = treedef.unflatten([0] * treedef.num_leaves)
            run, sent = (
                _push_whole,
                (self._code("jvp"), fn if wants_outs else None, like, args, whole),
            )

        def finish(value: Any) -> tuple[Any, Arrays]:
            outs, out_dot = value
            leaves = trees.out_leaves(out_dot, "the jvp rule")
            return outs, pick(leaves, trees.out_diff)

        return run, sent, finish

    def _forward(self, args: Any, rest: Arrays) -> Steps:
        del rest
        return self._code("forward"), args, self._keep

    def _keep(self, value: Any) -> Arrays:
        what = self.what
        outs, residual = forward_pair(value, what.name)
        leaves = what.trees.out_leaves(outs, "the forward rule")
        if what.keeps_objects:
            return [*leaves, store.put(residual)]
        treedef = what.function.residual_tree
        try:
            return [*leaves, *treedef.flatten_up_to(residual)]
        except (ValueError, TypeError) as error:
            raise DerivativeError(
                f"hostcall: the forward rule of `{what.name}` should return"
                f" residuals in the structure of residuals=, {treedef}, got"
                f" {jax.tree_util.tree_structure(residual)}"
            ) from error

    def _backward(self, args: Any, rest: Arrays) -> Steps:
        what, trees = self.what, self.what.trees
        backward = self._code("backward")
        if not what.keeps_objects:
            treedef = what.function.residual_tree
            residual = treedef.unflatten(rest[: treedef.num_leaves])
            rest = rest[treedef.num_leaves :]
            sent = (residual, trees.cotangents(rest))
            return backward, sent, lambda value: self._pulled(value, rest)
        handle, rest = rest[0], rest[1:]
        cotangent = trees.cotangents(rest)
        residual, there = store.get(handle, what.take)
        if there:
            sent = (residual, cotangent)
            return backward, sent, lambda value: self._pulled(value, rest)

        def finish(value: Any) -> Arrays:
            residual, value = value
            store.put_back(handle, residual)
            return self._pulled(value, rest)

        again = (self._code("forward"), backward, what.name, args, cotangent)
        return _both_halves, again, finish

    def _pulled(self, value: Any, given: Arrays) -> Arrays:
        trees = self.what.trees
        positions = range(len(trees.argument_trees))
        leaves = trees.argument_leaves(value, positions, "the backward rule")
        return self._cotangents(leaves, given)

    def _transpose(self, known: Any, rest: Arrays) -> Steps:
        del known
        what, trees = self.what, self.what.trees
        linear = what.nz[: len(trees.template.keys)]
        n = linear.count(False)
        args = trees.arguments(spread_known(rest[:n], linear))
        sent = (trees.cotangents(rest[n:]), *trees.nonlinear(args))

        def finish(value: Any) -> Arrays:
            return self._cotangents(trees.transposed_leaves(value), rest[n:])

        return self._code("transpose"), sent, finish

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

    def _jacobian(self, args: Any, rest: Arrays) -> Steps:
        del rest
        return self._code("jacobian"), args, self.what.trees.jacobian_leaves


def array_leaves(args: Any, trees: Trees) -> Arrays:
    leaves = trees.template.treedef.flatten_up_to((args, {}))
    return pick(leaves, [not isinstance(m, Static) for m in trees.template.leaves])


# --- Where the user's functions run --------------------------------------------------


def _same(value: Any) -> Any:
    return value


def _push_each(terms: Any, fn: Any, outs: Any, args: Any) -> Any:
    """(result, tangent): the sum of what a rule an argument gives."""
    if fn is not None:
        outs = fn(*args)
    total: Any = None
    for rule, tangent in terms:
        term = rule(tangent, outs, *args)
        total = term if total is None else jax.tree_util.tree_map(_add, total, term)
    return outs, total


def _add(left: Any, right: Any) -> Any:
    return left + right


def _push_whole(rule: Any, fn: Any, like: Any, args: Any, tangents: Any) -> Any:
    """(result, tangent), by a rule that gives both or the tangent alone."""
    value = rule(args, tangents)
    if is_pair(value, jax.tree_util.tree_structure(like)):
        return value
    return None if fn is None else fn(*args), value


def _both_halves(
    forward: Any, backward: Any, name: str, args: Any, cotangent: Any
) -> Any:
    """(residual, cotangents), where the residual has gone."""
    _, residual = forward_pair(forward(*args), name)
    return residual, backward(residual, cotangent)


# --- Functions that can be sent ------------------------------------------------------


def code_of(function: Any, which: str, index: int = 0) -> Callable[..., Any]:
    """What the user wrote, of a HostFunction."""
    rules = function.rules
    if which == "value":
        return function.fn  # type: ignore[no-any-return]
    if which == "jvp":
        return rules.jvp.rule or rules.jvp.each[index]  # type: ignore[no-any-return]
    if which in ("forward", "backward"):
        return rules.vjp.fwd if which == "forward" else rules.vjp.bwd  # type: ignore[no-any-return]
    return getattr(rules, which).rule  # type: ignore[no-any-return]


class _Code:
    """A function of the user's, on its way to a worker.

    Functions are pickled by name. A decorated one has lost its name to its
    HostFunction, and its rules are often called `_`: then the HostFunction goes, by
    name, and gives the function there.
    """

    def __init__(
        self, fn: Any, function: Any, which: str, index: int, by_name: bool
    ) -> None:
        self._fn = fn
        self._found = function, which, index
        self._by_name = by_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def __reduce__(self) -> Any:
        plain = isinstance(self._fn, types.FunctionType)
        if self._by_name and plain and not _has_its_name(self._fn):
            return code_of, self._found
        return _same, (self._fn,)


def _has_its_name(fn: Any) -> bool:
    found: Any = sys.modules.get(fn.__module__)
    for part in fn.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is fn
