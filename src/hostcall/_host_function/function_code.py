"""Host code of a HostFunction: the function itself, or one of its rules in Python.

A `FunctionCode` is one such piece. In a program it is a value of flat arrays
(`primitive`): `run` makes it a call of hostcall's, with its options, trees and fills.
When the program runs, the engine calls the same object. It puts the trees together,
calls the user's function, takes apart what that returned, and checks it.

The call in the middle may run on another thread, in another process or on another
machine (`executor=`); see `sendable`. A residual that it computes comes back here,
since the next call may go to another worker.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.fingerprint import fingerprint
from hostcall._core.host_code import HostCode
from hostcall._core.source import name_of, source_of
from hostcall._core.spec import Results, Template
from hostcall._engine.callback import Callback
from hostcall._engine.options import WHOLE
from hostcall._host_function import rules, sendable
from hostcall._host_function.kept import options_of
from hostcall._host_function.primitive import Arrays, Tangents, Value
from hostcall._host_function.residuals import say_that_it_runs_again, store
from hostcall._host_function.results import aligned, elementwise
from hostcall._host_function.trees import pick, spread
from hostcall._primitives.call.make import make
from hostcall._runtime import executors, workers

# (function to run, its arguments, function that makes arrays of its value).
Steps = tuple[Callable[..., Any], Any, Callable[[Any], Any]]

# An array of host code may be nested lists of numbers.
_add = partial(jax.tree.map, operator.add)


@dataclass(frozen=True)
class FunctionCode(Value, HostCode):
    """One piece of host code. It is compared by what it is made of, so that JAX's
    caches hit.

    The function itself gets its arguments as trees. A rule gets all arrays flat, which
    spares the engine the trees. What is the same in every call is looked up once.

    Attributes:
        site: the call of the HostFunction that it belongs to.
        kind: which of the function's codes is called.
        avals: of its results.
        nz: for each array of the arguments, whether it has a tangent here; for a
            transposition, whether the function is linear in it.
        take: whether a backward rule may take its residual out of the store, because
            this looks like the last use.
    """

    travels_as = "host"

    site: Any  # a site.Site
    kind: rules.Kind
    avals: tuple[Any, ...] = field(compare=False)
    nz: tuple[bool, ...] = ()
    take: bool = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.site.trees.name  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self.name if self.kind == "value" else f"{self.kind} of {self.name}"

    @property
    def code(self) -> Callable[..., Any]:
        """The user's function that names it in messages."""
        return sendable.code_of(self.site.function, self.kind)

    @cached_property
    def keeps_objects(self) -> bool:
        """Whether it leaves its residual in the store, or looks there for it."""
        if self.kind not in ("forward", "backward"):
            return False
        return self.site.function.rules.vjp.keeps_objects  # type: ignore[no-any-return]

    @cached_property
    def _takes_arguments(self) -> bool:
        """Whether the first operands are the function's arguments."""
        return self.kind != "transpose" and (
            self.kind != "backward" or self.keeps_objects
        )

    @property
    def words(self) -> str:
        """What messages about its value call it, with the function's name."""
        return rules.RULES[self.kind][1]

    def result_words(self, number: int) -> tuple[str, str]:
        if self.kind != "jacobian":
            return "", ""
        trees, rule = self.site.trees, name_of(self.code)
        which = f"the Jacobian of {trees.jacobian_paths[number]} that `{rule}`, a rule"
        return f"{which} of `{trees.name}`, returned", (
            "A Jacobian has the axes of the result, then those of the argument"
        )

    # --- In a program --------------------------------------------------------------

    def run(self, args: Arrays) -> Arrays:
        site = self.site
        self.describe()
        options = self.options()
        args, mask = self._unmasked(args)
        if site.function.result is elementwise and options["vmap_method"] in WHOLE:
            args = aligned(args, site.trees, self.kind, options)
        template, results = self._form(len(args))
        trees = template, results, self._fills()
        callback = Callback.of(self, trees, site.place, options, site.function)
        return make(callback, args, mask)

    def describe(self) -> None:
        """Says for `name_of` and `source_of`, which the engine asks, what this is."""
        code = self.code
        vars(self).update(__qualname__=name_of(code), _source=source_of(code))

    def source(self) -> str:
        return str(vars(self).get("_source", ""))

    def options(self) -> dict[str, Any]:
        """The options of its calls, as `make` takes them."""
        function = self.site.function
        label: tuple[Any, ...] = self.kind, self.nz
        # version= says which code computes the value; a rule can be set again.
        if function.options.get("cache") is not None and self.kind != "value":
            found = function.differences
            how = None if found is None else (found.scheme, found.step)
            label += fingerprint(self.code), how
        options = options_of(function.options, label, self.site.trees)
        if self.kind != "value":
            options |= {"lend": bool(options["lend"]), "coalesce": None, "wait": None}
        if self.keeps_objects:
            options["cache"] = None  # one backward rule takes the residual
            # A residual that is kept may be an argument.
            options["lend"] = options["lend"] and function.rules_copy
            if options["vmap_method"] != "parallel":
                options["vmap_method"] = "sequential"
        return options

    def _form(self, n: int) -> tuple[Template, Results]:
        """The trees of the call: the function has its own, a rule `n` flat arrays."""
        trees = self.site.trees
        if self.kind == "value":
            return trees.template, trees.results
        keys = trees.results.keys if self.kind in ("both", "forward") else ()
        keys = (*keys, *(None for _ in self.avals[len(keys) :]))
        marks = trees.template.keys if self._takes_arguments else ()
        template = Template.flat(*marks, *(None for _ in range(n - len(marks))))
        return template, Results.flat(self.avals, keys)

    def _fills(self) -> tuple[bytes | None, ...]:
        fills: tuple[bytes | None, ...] = ()
        if self.kind in ("value", "both", "forward"):
            fills = self.site.trees.fills or ()
        return (*fills, *(None for _ in self.avals[len(fills) :]))

    def _unmasked(self, operands: Arrays) -> tuple[Arrays, Any]:
        """(the operands without the mask, the mask or None)."""
        if not self.site.trees.masked:
            return operands, None
        if self._takes_arguments:
            at = len(self.site.trees.in_avals) - 1
        else:
            at = 0 if self.kind == "backward" else self.nz.count(False) - 1
        return [*operands[:at], *operands[at + 1 :]], operands[at]

    def jvp(self, args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        del args, tangents
        if self.kind != "value":
            raise self._not_again()
        advice = self.site.function.advice
        raise rules.no_derivative(self.name, self.site.place, advice)

    def _not_again(self) -> Exception:
        advice = self.site.function.advice
        return rules.not_again(self.name, self.code, self.site.place, advice)

    def shared(self, dims: Sequence[int | None]) -> Value:
        """A backward rule does not take out a residual that the rows share."""
        if self.kind != "backward" or not self.keeps_objects or not self.take:
            return self
        handle = dims[len(self.site.trees.in_avals)]
        return replace(self, take=False) if handle is None else self

    def narrowed(self, used: Sequence[bool]) -> Value | None:
        """The function itself, if nothing uses the forward rule's residuals."""
        if self.kind != "forward" or any(used[len(self.site.avals) :]):
            return None
        return self.site  # type: ignore[no-any-return]

    # --- When the program runs -----------------------------------------------------

    def __call__(self, *operands: Any, **out: Any) -> Any:
        if self.kind == "value":
            return self._code("value")(*operands, **out)
        run, sent, finish = self.split(operands, {})
        return finish(run(*sent))

    def split(self, args: Any, kwargs: Any) -> Steps:
        del kwargs
        if self.kind == "value":
            return self._code("value"), args, workers.same
        run, sent, finish = getattr(self, f"_{self.kind}")(args)
        return run, sent, lambda value: tuple(finish(value))

    def awaits(self) -> bool:
        return self._awaits

    @cached_property
    def _awaits(self) -> bool:
        return sendable.awaits(self.site.function, self.kind)

    def lane(self) -> Any:  # the function and its rules are one
        return self.site.function.fn

    def parts(self) -> Any:
        return self.kind, self.code

    @cached_property
    def _codes(self) -> dict[Any, Any]:
        return {}

    def _code(self, which: str, index: int | None = None) -> Any:
        """One of the user's functions, in a form that the executor can send."""
        found = self._codes.get((which, index))
        if found is None:
            function = self.site.function
            found = sendable.code_of(function, which, index)
            executor = function.options["executor"]
            if executor is not None:
                again = sendable.code_of, (function, which, index)
                found = sendable.Sendable(found, again, executors.by_name(executor))
            self._codes[which, index] = found
        return found

    # --- The steps of a rule -------------------------------------------------------
    #
    # Each takes the operands without the mask. `traced` replaces what is different in
    # JAX code, which stands first.

    def _arguments(self, leaves: Any) -> Any:
        template = self.site.trees.template
        return leaves if template.is_flat else template.fill(leaves)[0]

    def _linear(self, arrays: Any) -> Any:
        """Tangents or cotangents among the operands."""
        return arrays

    def _zeros(self, like: Any) -> Any:
        return np.zeros(like.shape, like.dtype)

    def _kept(self, residual: Any) -> Arrays:
        """The arrays that a forward rule's residual becomes in the program."""
        if self.keeps_objects:
            return [store.put(residual)]
        treedef = self.site.function.rules.vjp.residuals.treedef
        structure = "residuals in the structure of residuals="
        found: Arrays = self.site.trees.leaves_of(
            treedef, residual, self.words, structure
        )
        return found

    def _residual(self, operands: Any) -> tuple[Any, Any]:
        """(the residual in these operands of a backward rule, the cotangents)."""
        treedef = self.site.function.rules.vjp.residuals.treedef
        n = treedef.num_leaves
        return treedef.unflatten(operands[:n]), operands[n:]

    def _completed(self, leaves: Arrays, cotangents: Any) -> Arrays:
        """The cotangents of arguments, with zeros for None.

        If the rule works on whole batches, the batch axes come first, and the zeros
        need them too, as the cotangents of the results have them.
        """
        if not any(leaf is None for leaf in leaves):
            return leaves
        # All cotangents of the results have the same batch axes.
        ct, out = cotangents[-1], self.site.trees.out_avals[-1]
        batch = ct.shape[: len(ct.shape) - len(out.shape)]
        return [
            np.zeros(batch + aval.shape, aval.dtype) if leaf is None else leaf
            for leaf, aval in zip(leaves, self.avals, strict=True)
        ]

    @cached_property
    def _n(self) -> int:
        """How many of the first operands are arrays of the arguments."""
        return len(self.site.trees.template.keys)

    def _several(self, steps: Any, *sent: Any) -> tuple[Callable[..., Any], Any]:
        return sendable.awaited if self._awaits else sendable.driven, (steps, *sent)

    def _jvp(self, operands: Any) -> Steps:
        trees, jvp = self.site.trees, self.site.function.rules.jvp
        n = self._n
        m = n + sum(self.nz)
        args = self._arguments(operands[:n])
        dots = spread(self._linear(operands[n:m]), self.nz)
        if jvp.flat:
            sent = args, trees.unmasked(dots), trees.out_diff
            return self._code("jvp"), sent, self._pushed
        whole = trees.tangents(operands[:n], dots, self._zeros)
        if jvp.rule is None:
            outs = trees.results.fill(operands[m:]) if operands[m:] else None
            fn = self._code("value") if outs is None else None
            positions = sorted(set(pick(trees.positions, self.nz)))
            terms = [(self._code("jvp", p), whole[p]) for p in positions]
            several = self._several(sendable.push_each, terms, fn, outs, args)
        else:
            fn = self._code("value") if self.kind == "both" else None
            given = self._code("jvp"), fn, trees.result_of_zeros, args, whole
            several = self._several(sendable.push_whole, *given)
        return *several, self._pushed

    _both = _jvp

    def _pushed(self, value: Any) -> Arrays:
        trees, jvp = self.site.trees, self.site.function.rules.jvp
        both, (outs, touts) = self.kind == "both", value
        if not jvp.flat:
            outs = trees.out_leaves(outs, self.words) if both else ()
            terms = [touts]
            if jvp.rule is None:  # a rule may return None for zero
                terms = [term for term in touts if term is not None] or touts[:1]
            leaves = [
                self._term(pick(trees.out_leaves(term, self.words), trees.out_diff))
                for term in terms
            ]
            touts = [reduce(_add, column) for column in zip(*leaves, strict=True)]
        return [*outs, *touts] if both else touts

    def _term(self, leaves: Arrays) -> Arrays:
        """One argument's share of the tangents."""
        return leaves

    def _forward(self, operands: Any) -> Steps:
        def finish(value: Any) -> Arrays:
            trees = self.site.trees
            outs, residual = rules.forward_pair(value, trees.name)
            return [*trees.out_leaves(outs, self.words), *self._kept(residual)]

        return self._code("forward"), self._arguments(operands), finish

    def _backward(self, operands: Any) -> Steps:
        if self.keeps_objects:
            handle, given = operands[self._n], operands[self._n + 1 :]
            residual, there = store.get(handle, self.take)
            if not there:
                return self._both_halves(operands[: self._n], handle, given)
        else:
            residual, given = self._residual(operands)
        sent = (residual, *self._given(given))
        return self._code("backward"), sent, lambda value: self._pulled(value, given)

    def _both_halves(self, leaves: Any, handle: Any, given: Any) -> Steps:
        """The forward rule again, as the store has dropped its residual."""
        if store.had_to_go(handle):
            say_that_it_runs_again(
                self.name, source_of(self.site.function.fn), self.site.place
            )
        codes = self._code("forward"), self._code("backward")
        sent = (*codes, self.name, self._arguments(leaves), self._given(given))

        def finish(value: Any) -> Arrays:
            store.put_back(handle, value[0])
            return self._pulled(value[1], given)

        return *self._several(sendable.both_halves, *sent), finish

    def _given(self, cotangents: Any) -> tuple[Any, ...]:
        """The arguments of the backward rule besides its residuals."""
        trees = self.site.trees
        if not self.site.function.rules.vjp.flat:
            return (trees.cotangents(cotangents),)
        return spread(cotangents, trees.out_diff), trees.unmasked(self.nz)

    def _pulled(self, value: Any, given: Any) -> Arrays:
        if self.site.function.rules.vjp.flat:
            return self._completed(list(value), given)
        leaves = self.site.trees.argument_leaves(value, self.words)
        return self._completed(pick(leaves, self.nz), given)

    def _transpose(self, operands: Any) -> Steps:
        trees, still = self.site.trees, [not flag for flag in self.nz[: self._n]]
        n, positions = sum(still), trees.diff_positions
        args = self._arguments(spread(operands[:n], still))
        given = self._linear(operands[n:])

        def finish(value: Any) -> Arrays:
            whole = (value,) if len(positions) == 1 else value
            leaves = trees.argument_leaves(whole, self.words, positions)
            return self._completed(pick(leaves, self.nz), given)

        others = [arg for i, arg in enumerate(args) if i not in positions]
        return self._code("transpose"), (trees.cotangents(given), *others), finish

    def _jacobian(self, operands: Any) -> Steps:
        args = self._arguments(operands)
        return self._code("jacobian"), args, self.site.trees.jacobian_leaves


_jax.hold_weakly_in_caches(FunctionCode)
