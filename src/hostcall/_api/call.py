"""`hc.call`: a host function with results."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypeVar, overload

import jax

from hostcall._core import mistakes
from hostcall._core.callback import CallSpec
from hostcall._core.errors import SpecError, counted
from hostcall._core.host_code import HostCode, OfArguments, handle
from hostcall._core.mistakes import check_function, parse_mask
from hostcall._core.option_checks import check
from hostcall._core.options import (
    GONE,
    POLICY,
    WHOLE,
    Arrays,
    CallOptions,
    Fail,
    Lend,
    Policy,
)
from hostcall._core.order import Order
from hostcall._core.result_rules import avals_of, spec_of, varies
from hostcall._core.said_results import (
    default_method,
    leading,
    lined_up,
    lines_up,
    maps_items,
    over_leading_axes,
    rule_of,
)
from hostcall._core.source import inspect_callable, name_of, users_place
from hostcall._core.spec import Opaque, flatten_arguments, parse_fill, parse_result
from hostcall._primitives.make import bind_call

F = TypeVar("F", bound=Callable[..., Any])


def _result_once(call: F) -> F:
    """Refuses a `result` that is given by name behind arguments: the first of them is
    the result already, by its place, and Python's words name neither.
    """

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if "result" in kwargs and len(args) > 1:
            name = name_of(args[0])
            raise SpecError(
                f"hostcall: hc.call calls `{name}` with result= and"
                f" {counted(len(args) - 1, 'positional argument')}, of which the first"
                " is the result, too. The result stands before the arguments: write"
                f" hc.call({name}, result, *args)",
                code="hc-arguments",
            )
        return call(*args, **kwargs)

    return checked  # type: ignore[return-value]


# A `result` that is one array; type checkers see any other tree as Any.
OneArray: TypeAlias = jax.ShapeDtypeStruct | jax.typing.ArrayLike


@overload
def call(
    fn: Callable[..., Any],
    result: None,
    *args: Any,
    order: Order | None = ...,
    vmap_method: str | Callable[..., Any] | None = ...,
    where: Any = ...,
    fill: Any = ...,
    on: Literal["once"] | jax.Device = ...,
    arrays: Arrays | None = ...,
    lend: Lend | None = ...,
    fail: Fail | None = ...,
    tag: str | None = ...,
    **kwargs: Any,
) -> None: ...


@overload
def call(
    fn: Callable[..., Any],
    result: OneArray,
    *args: Any,
    order: Order | None = ...,
    vmap_method: str | Callable[..., Any] | None = ...,
    where: Any = ...,
    fill: Any = ...,
    on: Literal["once"] | jax.Device = ...,
    arrays: Arrays | None = ...,
    lend: Lend | None = ...,
    fail: Fail | None = ...,
    tag: str | None = ...,
    **kwargs: Any,
) -> jax.Array: ...


@overload
def call(  # type: ignore[overload-cannot-match]  # JAX is Any in `make check`
    fn: Callable[..., Any],
    result: Any,
    *args: Any,
    order: Order | None = ...,
    vmap_method: str | Callable[..., Any] | None = ...,
    where: Any = ...,
    fill: Any = ...,
    on: Literal["once"] | jax.Device = ...,
    arrays: Arrays | None = ...,
    lend: Lend | None = ...,
    fail: Fail | None = ...,
    tag: str | None = ...,
    **kwargs: Any,
) -> Any: ...


@_result_once
def call(
    fn: Callable[..., Any],
    result: Any,
    *args: Any,
    order: Order | None = None,
    vmap_method: str | Callable[..., Any] | None = None,
    where: Any = None,
    fill: Any = None,
    on: Literal["once"] | jax.Device = "once",
    arrays: Arrays | None = None,
    lend: Lend | None = None,
    fail: Fail | None = None,
    tag: str | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a Python function from a JAX program, and returns its results to it.

    `fn(*args, **kwargs)` runs on the host each time the program reaches this call, and
    gets NumPy arrays. It may run on another thread than the caller's, without the
    caller's context variables, np.errstate and thread-locals. The pages "Call a
    simulator" and "Options" say more.

    Args:
        fn: any callable except a generator function. It may use JAX. A coroutine
            function (`async def`) runs on hostcall's event loop. Of a `hc.host`
            function the Python function is called, without its rules, and in the way
            that `hc.host` was told: with its `timeout`, `executor` and `concurrency`,
            and with its `order`, `vmap_method`, `arrays`, `lend` and `tag` as defaults.
        result: describes what `fn` returns: a pytree of the same structure, whose
            leaves have `shape` and `dtype`, or are Python numbers, for scalars. None if
            `fn` returns nothing, which needs an `order` other than "pure". Or what
            depends on the arguments, if they have no keywords: a signature such as
            "(n,n)->(n)" (see `hc.host`), a function from their ShapeDtypeStructs to a
            spec, what `hc.results` has, or `...` for a ufunc or a `hc.host` function,
            which say it themselves.
        *args: pytrees. Arrays and numbers reach `fn` as arrays, and typed PRNG keys as
            keys. All other leaves (strings, objects) reach it unchanged.
        order: "pure", the default: `fn` runs as often as the results are needed, or not
            at all.
            "unordered": exactly once, in the order of its program: after all host calls
            before it there, in loops, branches and inner functions too.
            "ordered": also after the ordered calls of the programs that the thread has
            dispatched before, on whatever devices.
        vmap_method: see *Under transformations*. Default: "sequential".
        where: a bool scalar. If it is False, `fn` is not called, and the results are
            `fill`. Under vmap each row has its own.
        fill: one number for all results, or a pytree that broadcasts to `result`.
            Default: zeros.
        on: which device of a jitted program calls, with the whole value: "once", the
            program's first; or the given device, which must be one of the program's.
        arrays: what `fn` gets. "numpy", the default. "jax": jax.Arrays on a CPU device,
            on which it may compute. "dlpack": for torch.from_dlpack and others. "cuda":
            read-only `hc.buffers.Buffer`s of GPU memory; `fn` returns arrays on the
            GPU.
        lend: True: `fn` gets read-only views of XLA's memory, and must not keep them.
            "out": it also gets `out`, arrays like `result`, writes the results into
            them and returns None. False, the default: it owns its arguments.
        fail: in a program over several processes, "together": a failure raises in all
            of them. "alone": in its own. Default: `hc.configure(fail=)`.
        tag: the name of this call in `hc.monitor`. Default: the function's name.
        **kwargs: arguments for `fn`, like `args`: all keywords that are not options.

    Returns:
        A pytree of arrays as described by `result`.

    Raises:
        SpecError: an option or argument is invalid, `fn` can't take the arguments, or
            `fn` uses a traced value of an enclosing function instead of taking it as an
            argument.
        jax.errors.JaxRuntimeError: `fn` failed while the program ran, or exceeded its
            timeout (`CallTimeoutError`), kept a lent view (`EscapeError`), or returned
            what does not fit `result` (`ResultError`). The text has the exception, the
            function's name, and the line of this call. `hc.reraise()` and
            `hc.errors.last_error()` give the exception itself; an eager call raises it
            directly.

    Under transformations:
        jit, scan, while_loop, cond, map: `fn` runs each time the call is reached.
        vmap: "sequential": once per row, in row order. "parallel": all rows at once, on
            threads, the function's executor or the event loop. "expand_dims",
            "broadcast_all", "legacy_vectorized": once, with the batch axis in front;
            arguments without it get one of size 1, are repeated, or are passed as they
            are. A function `rule(axis_size, in_batched, *args, **kwargs) -> (result,
            batched)` of JAX code replaces the call; the flags of keyword arguments are
            the last entry of `in_batched`.
        vmap of cond, of while_loop: JAX computes every branch for every row. Pass the
            condition as `where=` too; then `fn` runs only for the rows that need it.
        jvp, grad, transposition: refused. Use `hc.host` with a rule.
        remat: a pure call runs again in the backward pass; other calls do not.
        shard_map, pmap: once per shard; `hc.current()` says for which. With
            `axis_names`, once per shard along these axes, on the whole block.
        jit over sharded arrays: once, on the whole value.
        jax.export, hc.export: `fn` must be registered (`hc.register`), else
            `ExportError`; arguments that are not arrays must be numbers or texts.

    Cost: 0.4 us for a scalar in a compiled loop, and two copies of each array (none
    with `lend`). A program with a call that is not pure runs on the thread that
    dispatches it. It keeps JAX's fast dispatch on one CPU device and, with jaxlib 0.12
    or later, on one GPU and, if no call is ordered, on several CPU devices; elsewhere a
    dispatch costs 50 to 200 us more. An eager call takes 40 us.
    """
    # First of all, while there are no other local names than the parameters.
    passed = _FACE.given(locals())
    host_code = fn
    options = _NO_OPTIONS
    policy = _NO_POLICY
    callee = None
    if type(fn) is not types.FunctionType and (wrapper := handle(fn)) is not None:
        callee = wrapper._callee()
    if callee is not None:
        # A HostFunction runs as it says, and a method of one gets its `self` in front.
        owner, host_code, options, leading_args = callee
        fn = owner.fn
        args = (*leading_args, *args)
        policy = owner.policy.owned_by(owner)
    facts = check_function(fn, "hc.call(fn, result, *args)", awaits=True)
    name = facts.name
    awaits = facts.awaits
    if passed:
        check(f"`{name}`", {**passed, "awaits": awaits}, fn=fn)
        options = CallOptions.of(passed, options)
    if policy.owner is not None:  # pairs of an option here and one of the function
        check(f"`{name}`", {**options.met(policy), "awaits": awaits}, {})
    if varies(result):
        rule = _rule(fn, name, policy.owner, result, kwargs)
        avals = avals_of(args)
        result = spec_of(rule, avals, name)
        axes_in_front = leading(rule, avals)
        if axes_in_front is not None:
            options = _for_items(rule, options, passed, policy.owner, avals)
            if options.vmap_method in WHOLE:
                args = tuple(lined_up(args, axes_in_front))
            elif any(axes_in_front) and maps_items(rule, options.vmap_method):
                # The same call for each item, which then has no axes in front.
                item = functools.partial(call, policy.owner or fn, rule, **passed)
                return over_leading_axes(item, args, axes_in_front)
    operands, template = flatten_arguments(args, kwargs)
    # With lend="out" the function gets its results as `out`, beside what is passed.
    lent = ("out",) * (options.lend == "out")
    mistakes.check(_FACE, fn, args, kwargs, template.leaves, lent, result)
    if tag is not None:
        mistakes.warn_of_own(_FACE, fn, {"tag": tag})
    results = parse_result(result, name)
    if options.order == "pure" and not results.avals:
        mistakes.refuse_unneeded("hc.call", name)
    mask = None if where is None else parse_mask(where, name, fn=fn)
    callback = CallSpec(
        Opaque(host_code),
        template,
        results,
        parse_fill(fill, results, name),
        options,
        users_place(fn),
        policy,
        known=facts if host_code is fn else None,
    )
    return results.unflatten(bind_call(callback, operands, mask))


def _rule(
    fn: Callable[..., Any],
    name: str,
    owner: Any,
    result: Any,
    kwargs: Mapping[str, object],
) -> Any:
    """What a `result` that is no spec says; `owner` is the HostFunction, if any."""
    rule = owner.result if owner is not None and result is ... else result
    if not isinstance(rule, OfArguments):
        rule = rule_of(fn, name, rule)
    if rule is ... or rule == "infer":
        raise SpecError(
            f"hostcall: `{name}` does not say what it returns, and hc.call does not try"
            " it out. Give a result: jax.ShapeDtypeStruct(shape, dtype), a function"
            " from the arguments' specs, a signature such as '(n)->()', or"
            " hc.results.like(0)",
            code="hc-result-spec",
        )
    if kwargs:
        raise SpecError(
            f"hostcall: `{name}` is called with the keyword arguments {sorted(kwargs)},"
            " and what it returns follows from its arguments by position. Pass them by"
            " position, or put them into a function around it (a lambda, or"
            " functools.partial)",
            code="hc-arguments",
        )
    return rule


def _for_items(
    rule: Any,
    options: CallOptions,
    passed: Mapping[str, object],
    owner: Any,
    avals: Sequence[Any],
) -> CallOptions:
    """The options of a call whose result says what an item is."""
    method = options.vmap_method
    if "vmap_method" not in passed:
        # A HostFunction's own method holds here too, since `call` lines the axes up.
        owners_method = None if owner is None else owner.options.vmap_method
        method = owners_method or default_method(rule)
    if method in WHOLE and not lines_up(rule, avals):
        method = "sequential"
    return replace(options, vmap_method=method)


_NO_OPTIONS = CallOptions()
_NO_POLICY = Policy()
_NO_RESULT = parse_result(None, "a watch")


def call_counted(fn: HostCode, where: Any, *args: Any) -> None:
    """`hc.watch`'s call: `fn(*args)` runs where `where` is True, exactly once.

    `hc.current().execution` is then the number of executions of this place on its
    device, whether or not `where` was True.
    """
    facts = inspect_callable(fn)
    operands, template = flatten_arguments(args, {})
    mistakes.check(_FACE, fn, args, {}, template.leaves)
    callback = CallSpec(
        Opaque(fn),
        template,
        _NO_RESULT,
        (),
        CallOptions(order="unordered", counted=True),
        users_place(fn),
        known=facts,
    )
    bind_call(callback, operands, parse_mask(where, facts.name))


_FACE = mistakes.Face(
    "hc.call",
    "hc.call({fn}, result, {args})",
    mistakes.options_of(call, "fn", "result"),
    {
        "ordered": 'order="ordered"',
        "vectorized": 'vmap_method="expand_dims"',
        "has_side_effect": 'order="unordered"',
        "sharding": "on=device",
        "result_shape_dtypes": "the second argument, result",
    },
    {
        "keep": "hc.Recorder beside the call records what was before",
        **{
            option: "it says how the function is run wherever it is called. Write"
            f" hc.call(hc.host(fn, {option}=...), result, *args)"
            for option in POLICY
        },
        **GONE,
    },
)
