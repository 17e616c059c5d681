"""HostFunction: a Python function with its rules, which the user holds and calls."""

from __future__ import annotations

import copyreg
import functools
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
from hostcall._core.errors import SpecError, counted
from hostcall._core.host_code import (
    Callee,
    Handle,
    Kwargs,
    TakesMask,
    as_host_code,
    dress,
)
from hostcall._core.mistakes import parse_mask
from hostcall._core.options import WHOLE, CallOptions, Option, Policy, check
from hostcall._core.signatures import accepts, most_positions, signature_of
from hostcall._core.source import inspect_callable, name_of, users_place
from hostcall._core.spec import flatten_arguments, parse_fill, parse_result
from hostcall._host_function import result_specs
from hostcall._host_function.primitives import Arrays, bind
from hostcall._host_function.rules import (
    F,
    Function,
    Kind,
    P,
    R,
    Rule,
    Ruled,
    Rules,
    Tree,
    Trees,
    Where,
    among,
)
from hostcall._host_function.sendable import Sendable, at_its_name
from hostcall._host_function.site import BoundHostCall

_WHERE = Option(
    "'host' (Python on NumPy arrays) or 'jax' (JAX code)",
    lambda value: value in ("host", "jax"),
)
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

    # Beside `fn`, each has: `rules`, what the def* methods were given; `options` of the
    # calls that run the function, where these have none of their own; `policy`, how it
    # is run, its rules too; and `rules_copy`, whether rules that keep an argument as a
    # residual copy it.
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
        fields = vars(self.rules).items()
        # The first is the function itself.
        _, *rules = [f"def{kind}" for kind, rule in fields if rule is not None]
        result = result_rules.shown(self.result)
        returning = f" {result}" if result else ""
        having = f" with {', '.join(rules)}" if rules else ""
        return f"<hostcall.typing.HostFunction {self.__qualname__}{returning}{having}>"

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickles by name if the HostFunction stands in its module under its name."""
        at_name = at_its_name(self)
        if at_name is self:
            return self.__qualname__
        # Found through a class, it is a method.
        if isinstance(at_name, (Method, types.MethodType)) and at_name.__func__ is self:
            return getattr, (at_name, "__func__")
        state = {
            name: value
            for name, value in vars(self).items()
            if name not in self._NOT_PICKLED
        }
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
        if kwargs:
            args = self._positional(args, kwargs)
        spec = None
        if self._maps_items:
            avals = result_rules.avals_of(args)
            # Refuses arguments that don't fit the signature. `avals_of` is not asked
            # twice, as `_spec` would: it takes 2 us.
            spec, loop = self.result.bind(avals, self.__name__)
            if loop:
                counts = said_results.leading(self.result, avals)
                assert counts is not None, "a signature says what an item is"
                # One call for each item, each of which comes here again.
                return said_results.over_leading_axes(
                    lambda *items: self._call(items, {}, mask, fill), args, counts
                )
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
        if not self._varies:
            return self.result
        if said_results.is_unsaid(self.result):
            raise SpecError(self._why_not(), code="hc-result-spec")
        if not isinstance(self.result, str):
            return result_rules.spec_of(self.result, args, self.__name__)
        # "infer": the function runs on zeros, once for each kind of arguments.
        _, template = flatten_arguments(args, {})
        avals = jax.tree.map(result_rules.aval_of, args)
        shapes = tuple(
            (leaf.shape, leaf.dtype)
            for leaf in jax.tree.leaves(avals)
            if isinstance(leaf, jax.ShapeDtypeStruct)
        )
        # A result of Python's numbers is wide or not, as JAX's mode says.
        key = template, shapes, bool(jax.config.jax_enable_x64)
        if key not in self._inferred:
            self._inferred[key] = self._infer(avals)
        return self._inferred[key]

    def _infer(self, avals: Trees) -> Tree:
        float64 = self.policy.float64
        return result_specs.inferred(self.fn, avals, self.__name__, float64)

    def _positional(self, args: Trees, kwargs: Kwargs) -> Trees:
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

    # --- Rules ---------------------------------------------------------------------

    @overload
    def defjvp(self, rule: F, *, where: Where = "host") -> F: ...
    @overload
    def defjvp(self, *, where: Where = "host") -> Callable[[F], F]: ...
    def defjvp(self, rule: Any = None, *, where: Where = "host") -> Any:
        """Sets the rule for forward mode.

        Args:
            rule: `rule(primals, tangents)`, both tuples with one entry per argument;
                returns the tangent of the result, or (result, tangent). Tangents that
                JAX knows to be zero are not sent to the host; zeros are made there in
                their place. Tangents of integers are float0 zeros; those of `nondiff`
                and static arguments are None.
            where: "host" for Python on NumPy arrays; "jax" for JAX code, from which JAX
                derives reverse mode and higher orders too.
        """
        return self._give("jvp", where, rule)

    def defjvps(self, *each: Function | None, where: Where = "host") -> None:
        """Sets the rule for forward mode, one argument at a time.

        Args:
            *each: for each argument `rule(tangent, result, *primals)`, which returns
                that argument's share of the result's tangent. None for an argument
                without a derivative: differentiating with respect to it is an error.
            where: as in `defjvp`, for all rules.
        """
        rules = [rule for rule in each if rule is not None]
        runs_in = self._where("defjvps(*rules)", where, *rules)
        if not rules:
            raise SpecError(
                f"hostcall: defjvps of `{self.__name__}` was given no rule: give one"
                " for each argument that has a derivative",
                code="hc-rule",
            )
        most = most_positions(self.fn)
        if len(each) > most:
            raise SpecError(
                f"hostcall: defjvps of `{self.__name__}` was given"
                f" {counted(len(each), 'rule')}, one for each argument, and it takes"
                f" {counted(int(most), 'argument')} by position",
                code="hc-rule",
            )
        self._add("jvp", Rule(rules[0], runs_in, by_argument=each))

    def defvjp(
        self, fwd: Any, bwd: Any, *, where: Where = "host", residuals: Any = None
    ) -> None:
        """Sets the rules for reverse mode.

        Args:
            fwd: `fwd(*args)`; returns (result, residuals).
            bwd: `bwd(residuals, cotangent)`; returns a tuple with a cotangent for each
                argument, None for zero. The cotangent has the result's structure.
            where: as in `defjvp`, for both. JAX code may have any residuals.
            residuals: for host code. By default residuals are any Python objects and
                stay on the host. At most 1024 are kept (hc.configure(residuals=)); for
                one that was dropped, `fwd` runs again. With a spec (as `result=` of
                `hc.call`) they are arrays of the program, which work in batches too:
                give it for small arrays, and if `fwd` must not run twice.
        """
        runs_in = self._where("defvjp(fwd, bwd)", where, fwd, bwd)
        if residuals is not None and runs_in == "jax":
            raise SpecError(
                f"hostcall: defjvp of `{self.__name__}` has residuals= and JAX code,"
                " whose residuals JAX sees: drop residuals=",
                code="hc-rule",
            )
        if residuals is not None:
            residuals = parse_result(residuals, f"{self.__name__} (residuals=)")
        self._takes_two(bwd, "bwd(residuals, cotangent)")
        self._add("vjp", Rule(fwd, runs_in, bwd, residuals=residuals))

    @overload
    def deftranspose(self, rule: F, *, where: Where = "host") -> F: ...
    @overload
    def deftranspose(self, *, where: Where = "host") -> Callable[[F], F]: ...
    def deftranspose(self, rule: Any = None, *, where: Where = "host") -> Any:
        """Says that the function is linear in all arguments that aren't `nondiff`
        together, and sets its transpose.

        Args:
            rule: `rule(cotangent, *nonlinear)`, where `nonlinear` are the arguments in
                `nondiff` and integer ones; returns the cotangent of the linear
                argument, or a tuple of them if there are several.
            where: as in `defjvp`.
        """
        return self._give("transpose", where, rule)

    @overload
    def defjacobian(self, rule: F, *, where: Where = "host") -> F: ...
    @overload
    def defjacobian(self, *, where: Where = "host") -> Callable[[F], F]: ...
    def defjacobian(self, rule: Any = None, *, where: Where = "host") -> Any:
        """Sets the Jacobian, which serves both modes.

        Args:
            rule: `rule(*args)`; returns, in the structure of the result, the Jacobian
                of each array of it: arrays of shape out.shape + in.shape, in the
                structure of the argument. With several arguments it is a tuple, with an
                entry for each differentiable one.
            where: as in `defjvp`. A HostFunction counts as JAX code, and its own rules
                give derivatives of higher order.
        """
        return self._give("jacobian", where, rule)

    def defbatch(self, rule: F) -> F:
        """Sets the rule for vmap, in JAX code, instead of a `vmap_method`.

        Args:
            rule: `rule(axis_size, in_batched, *args)`; returns (result, batched). The
                batch is the first axis of each batched array. The derivative of a
                batched call is that of this code.
        """
        self._where("defbatch(rule)", "jax", rule)
        self._add("batch", rule)
        return rule

    def _give(self, kind: Kind, runs_in: Where, rule: F | None) -> object:
        """Sets a rule that may be given by a decorator."""
        if rule is None:
            return functools.partial(self._give, kind, runs_in)
        runs_in = self._where(f"def{kind}(rule)", runs_in, rule)
        if kind == "jvp":
            self._takes_two(rule, "rule(primals, tangents)")
        self._add(kind, Rule(rule, runs_in))
        return rule

    def _where(self, usage: str, runs_in: Where, *rules: Function) -> Where:
        """Where the rules run; refuses what can't be rules, and a wrong `runs_in`."""
        shown = f"{usage} of `{self.__name__}`"
        check(shown, {"where": runs_in}, {"where": _WHERE})
        face = mistakes.Face("a rule", f"{self.__name__}({{args}})")
        if any(isinstance(rule, HostFunction) for rule in rules):
            # It is called in the program, where its own rules give derivatives.
            runs_in = "jax"
        for rule in rules:
            if not callable(rule):
                raise SpecError(
                    f"hostcall: {shown} wants a function, got {rule!r}", code="hc-rule"
                )
            facts = inspect_callable(rule)
            this = f"the rule `{facts.name}`"
            if facts.awaits and runs_in == "jax":
                raise SpecError(
                    f"hostcall: {this} of `{self.__name__}` is a coroutine function and"
                    " JAX code, which JAX traces and can't await: make it a plain one",
                    code="hc-coroutine",
                )
            if facts.awaits:
                options = vars(self.options) | vars(self.policy)
                check(this, {**options, "awaits": True}, {})
            # A rule that is given inside of jit may hold traced values in its closure.
            if runs_in == "host" and not _jax.traces_nothing():
                mistakes.refuse_traced(rule, face.instead_of_traced)
        return runs_in

    def _takes_two(self, rule: Function, form: str) -> None:
        if not accepts(rule, 2, ()):
            raise SpecError(
                f"hostcall: a rule of `{self.__name__}` is called as {form}, but"
                f" `{name_of(rule)}` takes {signature_of(rule)}",
                code="hc-rule",
            )


class Method(Handle, TakesMask):
    """A HostFunction of a class, bound to an object.

    Equal to another for the same function and object, as Python's bound methods are.
    The object is argument 0, and static unless it is a pytree.
    """

    def __init__(self, function: HostFunction[..., Any], instance: object) -> None:
        self.__func__ = function
        self.__self__ = instance
        self._bound = types.MethodType(function, instance)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        return self._bound(*args, **kwargs)

    def _held(self) -> Function:
        return self.__func__._held()

    def _definition(self) -> Function:
        return self.__func__.fn

    def _callee(self) -> Callee | None:
        callee = self.__func__._callee()
        return callee and callee._replace(bound=(self.__self__,))

    def _why_not(self) -> str:
        return self.__func__._why_not()

    def where(self, mask: Any, fill: Any = None) -> Function:
        return functools.partial(self.__func__.where(mask, fill), self.__self__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"

    def __eq__(self, method: object) -> bool:
        return isinstance(method, Method) and method._bound == self._bound

    def __hash__(self) -> int:
        return hash(self._bound)

    def __reduce__(self) -> tuple[object, ...]:
        return self._bound.__reduce__()  # type: ignore[return-value]
