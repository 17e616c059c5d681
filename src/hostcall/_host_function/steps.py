"""What Python runs for one piece of host code: a `Part`.

A part puts the trees together, calls the user's function, takes apart what it returned,
and checks that.

The call in the middle may run on another thread, in another process or on another
machine (`executor=`). So it is one function (the user's, or one of the few at the end
of this module) and its arguments, with none of JAX's treedefs. A residual that it
computes comes back here, since the next call may go to another worker.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from hostcall._core.errors import DerivativeError
from hostcall._core.source import name_of, source_of
from hostcall._host_function.primitive import Arrays
from hostcall._host_function.residuals import store
from hostcall._host_function.rules import forward_pair
from hostcall._host_function.trees import is_pair, pick, spread, spread_known
from hostcall._runtime import pools

logger = logging.getLogger("hostcall")

# Functions, by name and source, for which the log has said that a rule runs again.
_said: dict[tuple[str, str], object] = {}

# (function to run, its arguments, function that makes arrays of its value, what that
# function needs besides the value).
Steps = tuple[Callable[..., Any], Any, Callable[[Any, Any], Any], Any]


@dataclass(frozen=True)
class Part:
    """The callable that the engine calls; its names are for the engine's messages.

    The function itself gets its arguments as trees. A rule gets all arrays flat, which
    spares the engine the trees. What is the same in every call is looked up once.
    """

    what: Any  # a parts.HostCode

    def __getattr__(self, name: str) -> Any:
        if name in ("__qualname__", "__name__"):
            return name_of(self.what.code)
        if name == "hostcall_source":
            return source_of(self.what.code)
        raise AttributeError(name)

    def __call__(self, *operands: Any, **out: Any) -> Any:
        start = self._start
        if start is None:
            return self._code("value")(*operands, **out)
        run, sent, finish, more = start(operands)
        return tuple(finish(run(*sent), more))

    def hostcall_steps(self, *operands: Any) -> Any:
        """The steps of one row, as `_runtime/rows.py` runs them on an executor."""
        if self._start is None:
            return self._code("value"), operands, _same
        run, sent, finish, more = self._start(operands)
        return run, sent, lambda value: tuple(finish(value, more))

    @cached_property
    def _start(self) -> Callable[[Any], Steps] | None:
        kind = self.what.kind
        return None if kind == "value" else getattr(self, "_" + kind)

    @cached_property
    def _codes(self) -> dict[Any, Any]:
        return {}

    def _code(self, which: str, index: int = 0) -> Any:
        """One of the user's functions, in a form that the executor can send."""
        found = self._codes.get((which, index))
        if found is None:
            function = self.what.function
            found = code_of(function, which, index)
            executor = function.executor
            if executor is not None:
                by_name = pools.by_name(executor)
                found = _Code(found, function, which, index, by_name)
            self._codes[which, index] = found
        return found

    @cached_property
    def _n(self) -> int:
        """How many of the first operands are arrays of the arguments."""
        return len(self.what.trees.template.keys)

    @cached_property
    def _is_flat(self) -> bool:
        return bool(self.what.trees.template.is_flat)

    def _arguments(self, leaves: Any) -> Any:
        if self._is_flat:
            return leaves
        return self.what.trees.template.fill(leaves)[0]

    # --- Forward mode --------------------------------------------------------------

    def _both(self, operands: Any) -> Steps:
        n = self._n
        run, sent = self._push(operands[:n], operands[n:], None, wants_outs=True)
        return run, sent, self._pushed, True

    def _jvp(self, operands: Any) -> Steps:
        n = self._n
        m = n + sum(self.what.nz)
        outs = self.what.trees.result(operands[m:]) if operands[m:] else None
        run, sent = self._push(operands[:n], operands[n:m], outs, wants_outs=False)
        return run, sent, self._pushed, False

    def _push(
        self, arrays: Any, tangents: Any, outs: Any, wants_outs: bool
    ) -> tuple[Callable[..., Any], Any]:
        what, trees = self.what, self.what.trees
        jvp = what.rules.jvp
        assert jvp is not None
        args = self._arguments(arrays)
        dots = spread(tangents, what.nz)
        if jvp.flat:
            return self._code("jvp"), (args, trees.unmasked(dots), trees.out_diff)
        whole = trees.tangents(arrays, dots, lambda x: np.zeros(x.shape, x.dtype))
        fn = self._code("value")
        if jvp.rule is None:
            positions = sorted(set(pick(trees.positions, what.nz)))
            terms = [(self._code("jvp", p), whole[p]) for p in positions]
            return _push_each, (terms, fn if outs is None else None, outs, args)
        like = trees.result_of_zeros
        fn = fn if wants_outs else None
        return _push_whole, (self._code("jvp"), fn, like, args, whole)

    def _pushed(self, value: Any, wants_outs: bool) -> Arrays:
        outs, out_dot = value
        what, trees = self.what, self.what.trees
        if what.rules.jvp.flat:
            return [*outs, *out_dot] if wants_outs else out_dot  # type: ignore[no-any-return]
        leaves = trees.out_leaves(out_dot, "the jvp rule")
        tangents = pick(leaves, trees.out_diff)
        if not wants_outs:
            return tangents
        return [*trees.out_leaves(outs, "the jvp rule"), *tangents]

    # --- Reverse mode --------------------------------------------------------------

    def _forward(self, operands: Any) -> Steps:
        return self._code("forward"), self._arguments(operands), self._keep, None

    def _keep(self, value: Any, _: Any) -> Arrays:
        outs, residual = forward_pair(value, self.what.name)
        leaves = self.what.trees.out_leaves(outs, "the forward rule")
        treedef = self._residual_tree
        if treedef is None:
            return [*leaves, store.put(residual)]
        try:
            return [*leaves, *treedef.flatten_up_to(residual)]
        except (ValueError, TypeError) as error:
            raise DerivativeError(
                f"hostcall: the forward rule of `{self.what.name}` should return"
                f" residuals in the structure of residuals=, {treedef}, got"
                f" {jax.tree_util.tree_structure(residual)}"
            ) from error

    @cached_property
    def _residual_tree(self) -> Any:
        """The structure of `residuals=`; None if residuals stay on the host."""
        if self.what.keeps_objects:
            return None
        return self.what.function.residual_tree

    def _backward(self, operands: Any) -> Steps:
        what, treedef = self.what, self._residual_tree
        if treedef is not None:
            n = treedef.num_leaves
            residual, given = treedef.unflatten(operands[:n]), operands[n:]
            sent = (residual, *self._given(given))
            return self._code("backward"), sent, self._pulled, given
        n = self._n
        handle, given = operands[n], operands[n + 1 :]
        residual, there = store.get(handle, what.take)
        if there:
            sent = (residual, *self._given(given))
            return self._code("backward"), sent, self._pulled, given
        if store.had_to_go(handle):
            self._say_that_it_runs_again()
        codes = self._code("forward"), self._code("backward")
        args = self._arguments(operands[:n])
        again = (*codes, what.name, args, self._given(given))
        return _both_halves, again, self._pulled_again, (handle, given)

    def _say_that_it_runs_again(self) -> None:
        what, new = self.what, object()
        # dict.setdefault is atomic, so one of several threads logs.
        if _said.setdefault((what.name, source_of(what.function.fn)), new) is not new:
            return
        logger.warning(
            "`%s` left more than %d residuals on the host before its backward rule used"
            " them: the oldest were dropped, and its forward rule runs again for each"
            " of those (differentiated at %s). hostcall.configure(residuals=...) keeps"
            " more; with residuals= of defvjp they are arrays of the program",
            what.name,
            store.limit(),
            what.place,
        )

    def _given(self, cotangents: Any) -> tuple[Any, ...]:
        """The arguments of the backward rule besides its residuals."""
        what, trees = self.what, self.what.trees
        if not what.rules.vjp.flat:
            return (trees.cotangents(cotangents),)
        return spread(cotangents, trees.out_diff), trees.unmasked(what.nz)

    def _pulled(self, value: Any, given: Any) -> Arrays:
        what, trees = self.what, self.what.trees
        if what.rules.vjp.flat:
            return self._cotangents(spread(value, what.nz), given)
        leaves = trees.argument_leaves(value, self._positions, "the backward rule")
        return self._cotangents(leaves, given)

    def _pulled_again(self, value: Any, more: Any) -> Arrays:
        (handle, given), (residual, value) = more, value
        store.put_back(handle, residual)
        return self._pulled(value, given)

    @cached_property
    def _positions(self) -> range:
        return range(len(self.what.trees.argument_trees))

    def _cotangents(self, leaves: Arrays, given: Any) -> Arrays:
        """The cotangents of the marked arguments, with zeros for None.

        If the rule works on whole batches, the batch axes come first, and the zeros
        need them too.
        """
        found = pick(leaves, self.what.nz)
        if all(leaf is not None for leaf in found):
            return found
        trees = self.what.trees
        batch: tuple[int, ...] = ()
        for ct, aval in zip(given, trees.out_avals, strict=True):
            batch = ct.shape[: len(ct.shape) - len(aval.shape)]
        avals = pick(trees.in_avals, self.what.nz)
        return [
            np.zeros(batch + aval.shape, aval.dtype) if leaf is None else leaf
            for leaf, aval in zip(found, avals, strict=True)
        ]

    # --- The others ----------------------------------------------------------------

    def _transpose(self, operands: Any) -> Steps:
        what, trees = self.what, self.what.trees
        linear = what.nz[: self._n]
        n = linear.count(False)
        args = self._arguments(spread_known(operands[:n], linear))
        sent = (trees.cotangents(operands[n:]), *trees.nonlinear(args))
        return self._code("transpose"), sent, self._transposed, operands[n:]

    def _transposed(self, value: Any, given: Any) -> Arrays:
        return self._cotangents(self.what.trees.transposed_leaves(value), given)

    def _jacobian(self, operands: Any) -> Steps:
        return self._code("jacobian"), self._arguments(operands), self._blocks, None

    def _blocks(self, value: Any, _: Any) -> Arrays:
        leaves: Arrays = self.what.trees.jacobian_leaves(value)
        return leaves


# --- Where the user's functions run --------------------------------------------------


def _same(value: Any) -> Any:
    return value


def _push_each(terms: Any, fn: Any, outs: Any, args: Any) -> Any:
    """(result, tangent); the tangent is the sum over the rules of the arguments."""
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
    """(result, tangent), by a rule that returns both or only the tangent."""
    value = rule(args, tangents)
    if is_pair(value, jax.tree_util.tree_structure(like)):
        return value
    return None if fn is None else fn(*args), value


def _both_halves(forward: Any, backward: Any, name: str, args: Any, given: Any) -> Any:
    """(residual, cotangents), if the store has dropped the residual."""
    _, residual = forward_pair(forward(*args), name)
    return residual, backward(residual, *given)


# --- Functions that can be sent ------------------------------------------------------


def code_of(function: Any, which: str, index: int = 0) -> Callable[..., Any]:
    """One of the functions that the user gave to a HostFunction."""
    rules = function.rules
    if which == "value":
        return function.fn  # type: ignore[no-any-return]
    if which == "jvp":
        return rules.jvp.rule or rules.jvp.each[index]  # type: ignore[no-any-return]
    if which in ("forward", "backward"):
        return rules.vjp.fwd if which == "forward" else rules.vjp.bwd  # type: ignore[no-any-return]
    return getattr(rules, which).rule  # type: ignore[no-any-return]


class _Code:
    """A function of the user's that may be sent to a worker.

    Functions are pickled by name. But a decorated function's name now means its
    HostFunction, and rules are often all called `_`. For such a function the
    HostFunction is pickled by name instead, and the worker takes the function from it.
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
