"""HostFunction: a Python function with its rules, which the user holds and calls.

`ruled` has the methods that give it rules. Here is how it is called, and what it is to
other code: to pickle, to `repr`, to a class that has it as a method, to `hc.call`.
"""

from __future__ import annotations

import copyreg
import inspect
import types
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, overload

import jax
import numpy as np

from hostcall import _jax
from hostcall._core import errors, gone, mistakes, result_rules, said_results, ufuncs
from hostcall._core.annotations import Unreadable
from hostcall._core.dimensions import Signature, with_dimensions
from hostcall._core.errors import SpecError
from hostcall._core.host_code import (
    Callee,
    Kwargs,
    TakesMask,
    as_host_code,
    dress,
)
from hostcall._core.mistakes import parse_mask
from hostcall._core.option_checks import check
from hostcall._core.options import WHOLE, CallOptions, Policy
from hostcall._core.signatures import signature_of
from hostcall._core.source import inspect_callable, users_place
from hostcall._core.spec import flatten_arguments, parse_fill, parse_result
from hostcall._host_function import result_specs
from hostcall._host_function.method import Method
from hostcall._host_function.primitives import Arrays, bind
from hostcall._host_function.ruled import Ruled
from hostcall._host_function.rules import (
    P,
    R,
    Rule,
    Rules,
    Tree,
    Trees,
    among,
)
from hostcall._host_function.sendable import Sendable, at_its_name
from hostcall._host_function.site import BoundHostCall

_FACE = mistakes.Face("a hc.host function", "{fn}({args})")


# What a function on the host may say that it takes and returns: its program has
# jax.Arrays in their place.
OnHost: TypeAlias = np.ndarray[Any, Any] | np.generic | complex


# Attributes that HostFunctions had once, and what to write instead.
_GONE = {
    "cache_clear": "what keeps results is around the function, and is cleared there:"
    " clear() of joblib.Memory, cache_clear() of functools.lru_cache",
    "difference_error": "hc.testing.check(f, args) says whether the derivatives agree",
}


class NoResult:
    """For type checkers: of all results, Any alone is this one too."""


class HostFunction(Ruled, TakesMask, Generic[P, R]):
    """A Python function with its rules. `hc.host` makes it, and describes its options.

    It is called like any function in JAX code. Its rules are given before its first
    use, each once; each def* method returns the rule, and so can be a decorator.

    Attributes:
        fn: the Python function.
    """

    # What it has beside `fn`: see `Ruled`.
    _NOT_PICKLED: tuple[str, ...] = ("__wrapped__", "_inferred")

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        result: Tree,
        name: str | None = None,
        nondiff: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        self._dress(fn)
        facts = inspect_callable(fn)
        self.__name__ = name or facts.name.rpartition(".")[2]
        self.__qualname__ = name or facts.name
        self.fn = fn
        self.result = result
        self.nondiff = nondiff
        self.rules = Rules(Rule(fn, "host"))
        method = options.get("vmap_method")
        if method is None:
            has_executor = options.get("executor") is not None
            method = said_results.default_method(result, has_executor)
        if callable(method):  # a rule for batches, as `defbatch` sets it
            self.rules.batch = method
            method = None
        options["vmap_method"] = method
        to_check = {**options, "awaits": facts.awaits, "result": result}
        if said_results.is_unsaid(result):  # hc.call may say how batches are called
            to_check.pop("vmap_method", None)
        check(f"`{self.__qualname__}`", to_check)
        self.options = CallOptions.of(options)
        self.policy = Policy.of(options)
        self._inferred: dict[object, Tree] = {}
        self._varies = result_rules.varies(result)
        self._maps_items = said_results.maps_items(result, self.options.vmap_method)
        self._describe()
        self.advice = ""

    def _describe(self) -> None:
        """Says in `__signature__` what `inspect` can't find, or what was said here."""
        ufunc = ufuncs.ufunc_of(self.fn)
        parameters = None if ufunc is None else ufuncs.parameters(ufunc)
        rule = self.result
        if isinstance(rule, ufuncs.OfUfunc):
            rule = rule.dimensions
        if isinstance(rule, Signature):
            # `dress` has asked already: some callables ask a server for it.
            if parameters is None and "__wrapped__" in vars(self):
                parameters = signature_of(self.fn)
            self.__signature__ = with_dimensions(parameters, rule)
        elif parameters is not None:
            self.__signature__ = parameters

    def __repr__(self) -> str:
        text = f"hostcall.typing.HostFunction {self.__qualname__}"
        result = result_rules.shown(self.result)
        if result:
            text += f" {result}"
        rules: list[str] = []
        for kind, rule in vars(self.rules).items():
            if rule is not None and kind != "value":  # that is the function itself
                rules.append(f"def{kind}")
        if rules:
            text += f" with {', '.join(rules)}"
        return f"<{text}>"

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickles by name if the HostFunction stands in its module under its name."""
        at_name = at_its_name(self)
        if at_name is self:
            return self.__qualname__
        # Found through a class, it is a method.
        if isinstance(at_name, (Method, types.MethodType)) and at_name.__func__ is self:
            return getattr, (at_name, "__func__")
        state = vars(self).copy()
        for name in self._NOT_PICKLED:
            state.pop(name, None)
        state["policy"] = self.policy.sent()  # without the executor
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._inferred = {}
        self._dress(self.fn)  # sets `__wrapped__`

    def _dress(self, fn: Callable[..., Any]) -> None:
        # What makes numbers of a ufunc's objects is nothing that `help` should show.
        dress(self, as_host_code(fn).inside() or fn)

    # --- Calling -------------------------------------------------------------------

    @overload
    def __call__(
        self: HostFunction[P, NoResult], *args: P.args, **kwargs: P.kwargs
    ) -> Any: ...
    @overload
    def __call__(
        self: HostFunction[..., OnHost], *args: Any, **kwargs: Any
    ) -> jax.Array: ...
    @overload
    def __call__(
        self: HostFunction[..., tuple[OnHost, ...]], *args: Any, **kwargs: Any
    ) -> tuple[jax.Array, ...]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its result. See `hc.host`."""
        return self._call(args, kwargs, None, None)

    @overload
    def where(
        self: HostFunction[P, NoResult], mask: Any, fill: Any = None
    ) -> Callable[P, Any]: ...
    @overload
    def where(
        self: HostFunction[..., OnHost], mask: Any, fill: Any = None
    ) -> Callable[..., jax.Array]: ...
    @overload
    def where(self, mask: Any, fill: Any = None) -> Callable[P, R]: ...
    def where(self, mask: Any, fill: Any = None) -> Callable[..., Any]:
        """The function, called only if a condition holds: `f.where(x > 0)(x)`.

        Under `vmap` each row has its own condition. JAX runs both branches of a batched
        `cond`, but a masked function runs only for the rows where the mask is True.

        Args:
            mask: a bool scalar. Where it is False, neither the function nor a rule in
                host code is called.
            fill: the result for a False mask: a number, or numbers in the structure of
                the result; zeros by default. Its derivatives are zero.

        Returns:
            A callable that takes the function's arguments.

        Under transformations: as the function itself. Rules in JAX code run for every
        row, and so do the calls in them that have no mask of their own; the results of
        masked rows are dropped. A function with a `defbatch` rule is refused.
        """
        return lambda *args, **kwargs: self._call(args, kwargs, mask, fill)

    if not TYPE_CHECKING:  # a type checker would accept any name, as Any

        def __getattr__(self, name: str) -> Any:
            if name in _GONE:
                gone.refuse("a hc.host function", _GONE, name)
            # JAX asks for `__code__` and the like whenever it traces a function.
            raise AttributeError(f"a hc.host function has no attribute {name!r}")

    def __get__(
        self, instance: object, owner: type | None = None
    ) -> HostFunction[P, R] | Method:
        """Makes a HostFunction in the body of a class a method, as a function is."""
        if instance is None or not isinstance(self.fn, types.FunctionType):
            return self
        return Method(self, instance)

    def __deepcopy__(self, memo: object = None) -> HostFunction[P, R]:
        return self  # as copying a function does; an executor could not be copied

    __copy__ = __deepcopy__

    def _call(self, args: Trees, kwargs: Kwargs, mask: Any, fill: Any) -> Any:
        """The results for these arguments.

        It finds out the spec of the results, takes the arrays out of the arguments, and
        refuses mistakes. Then a pure call binds its primitive, which has derivatives;
        one with effects has none, and is a call in the program at once.
        """
        if kwargs:
            args = self._positional(args, kwargs)
        spec = None
        if self._maps_items:
            avals = result_rules.avals_of(args)
            # Refuses arguments that don't fit the signature. `avals_of` is not asked
            # twice, as `_spec` would: it takes 2 us.
            spec, loop = self.result.bind(avals, self.__name__)
            if loop:
                return self._call_items(args, avals, mask, fill)
        place = users_place()
        operands, template = flatten_arguments(args, {})
        # With lend="out" the engine passes the keyword `out` too.
        also = ("out",) if self.options.lend == "out" else ()
        mistakes.check(_FACE, self.fn, args, {}, template.leaves, also)
        if not self._maps_items:
            spec = self._spec(args)
        if spec is None and self.options.order == "pure":
            # XLA drops a pure call of which nothing is used.
            mistakes.refuse_unneeded("hc.host", self.__name__)
        results = parse_result(spec, self.__name__)
        fills = None
        if mask is not None:
            fills = parse_fill(fill, results, self.__name__)
            # The mask goes along as the last operand, which is in no argument.
            operands.append(parse_mask(mask, self.__name__))
        site = BoundHostCall(
            function=self,
            template=template,
            in_avals=tuple([_jax.ShapedArray(x.shape, x.dtype) for x in operands]),
            results=results,
            nondiff=self.nondiff and among(self.nondiff, len(args)),
            fills=fills,
            place=place,
        )
        outs: Arrays = []
        if self.options.order != "pure":  # no derivatives, and no primitives
            outs = site.run(operands, self.rules.batch)
        # Bridges and `same_tree` may give an empty tree, and then nothing is called.
        elif results.avals:
            outs = bind(_jax.vary_alike(operands), site)
        return results.unflatten(outs)

    def _call_items(self, args: Trees, avals: Trees, mask: Any, fill: Any) -> Any:
        """One call for each item of the arguments, which have axes in front of them."""
        counts = said_results.leading(self.result, avals)
        assert counts is not None, "a signature says what an item is"

        def call_item(*items: Any) -> Any:
            return self._call(items, {}, mask, fill)

        return said_results.over_leading_axes(call_item, args, counts)

    def _callee(self) -> Callee | None:
        # Its Python function as a call has it, which has none of the rules.
        method = self.rules.batch or self.options.vmap_method
        if method in WHOLE and result_specs.says_items(self.result):
            method = None  # the axes of a batch are lined up for `__call__` alone
        options = replace(self.options, vmap_method=method)
        code = self.fn if self.policy.pool is None else Sendable(self)
        return Callee(self, code, options)

    def _why_not(self) -> str:
        if not said_results.is_unsaid(self.result):
            return ""
        if isinstance(self.result, Unreadable):
            return errors.without_code(str(self.result.error))
        return (
            f"hostcall: `{self.__name__}` has no result=, so it can only be given to"
            f" hc.call: hc.call({self.__name__}, result, *args). To call it by itself,"
            " say what it returns: hc.host(fn, result=...)"
        )

    def _held(self) -> HostFunction[P, R]:
        return self

    def _spec(self, args: Trees) -> Tree:
        """The spec of the results for these arguments."""
        if not self._varies:
            return self.result
        if said_results.is_unsaid(self.result):
            raise SpecError(self._why_not(), code="hc-result-spec")
        if not isinstance(self.result, str):
            return result_rules.spec_of(self.result, args, self.__name__)
        # "infer": the function runs on zeros, once for each kind of arguments.
        _, template = flatten_arguments(args, {})
        avals = jax.tree.map(result_rules.aval_of, args)
        arrays = filter(result_rules.is_aval, jax.tree.leaves(avals))
        shapes = tuple([(array.shape, array.dtype) for array in arrays])
        # A result of Python's numbers is wide or not, as JAX's mode says.
        key = template, shapes, bool(jax.config.jax_enable_x64)
        if key not in self._inferred:
            self._inferred[key] = self._infer(avals)
        return self._inferred[key]

    def _infer(self, avals: Trees) -> Tree:
        """The spec of what the function returns; a bridge asks its library."""
        float64 = self.policy.float64
        return result_specs.inferred(self.fn, avals, self.__name__, float64)

    def _positional(self, args: Trees, kwargs: Kwargs) -> Trees:
        """The arguments by position, in place of some by keyword."""
        why = (
            f"it was called with the keyword arguments {sorted(kwargs)}, which can't be"
            " put into its positions. Rules know arguments by position: pass them by"
            " position, or wrap the function in one with positional arguments"
        )
        try:
            bound = inspect.signature(self.fn).bind(*args, **kwargs)
            if not bound.kwargs:
                return bound.args
        except TypeError as error:
            why = str(error)
        except ValueError:
            pass  # a ufunc or a builtin, which has no signature
        if "where" in kwargs:
            why += f". For a mask write {self.__name__}.where(mask)(x)"
        raise SpecError(f"hostcall: `{self.__name__}`: {why}", code="hc-arguments")
