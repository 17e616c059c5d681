"""Finds mistakes in how a host function is called, when the call is traced."""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.captured import has_tracers_text, traced_values
from hostcall._core.errors import SpecError, counted, wrong
from hostcall._core.host_code import handle, layers
from hostcall._core.signatures import (
    accepts,
    own_option,
    signature_of,
    takes,
    without_types,
)
from hostcall._core.source import CallableFacts, inspect_callable, name_of, users_frame
from hostcall._core.spec import Opaque


class Face(NamedTuple):
    """A public function that takes a host function and its arguments.

    Attributes:
        name: its public name, such as `hc.tap`.
        form: how to call it, with places for {fn} and {args}.
        options: its own keywords, with their defaults. It passes all others to the host
            function.
        jaxs: JAX's names of options, and what to write here instead.
        gone: options that it had once, and what to write instead.
    """

    name: str
    form: str
    options: Mapping[str, object] = types.MappingProxyType({})
    jaxs: Mapping[str, str] = types.MappingProxyType({})
    gone: Mapping[str, str] = types.MappingProxyType({})

    def given(self, values: Mapping[str, object]) -> dict[str, Any]:
        """Those of its options whose value is not the default."""
        own = self.options
        return {k: v for k, v in values.items() if k in own and v is not own[k]}

    def with_argument(self, name: str, argument: str) -> str:
        return self.form.format(fn=name, args=f"..., {argument}")

    def instead_of_traced(self, name: str, value: str) -> str:
        """What to write if the function `name` uses the traced value `value`."""
        passed = self.with_argument(name, value)
        return f"Pass it as an argument: {passed}, with a parameter for it"

    def hint(self, keyword: str, others: Collection[str] = ()) -> str:
        """Guesses what an unknown keyword was meant to be.

        `others` are further names that it may be a misspelling of.
        """
        if keyword in self.jaxs:
            return f"In {self.name}, JAX's {keyword}= is {self.jaxs[keyword]}"
        near = get_close_matches(keyword, [*self.options, *self.gone, *others], n=1)
        if near and near[0] in self.gone:
            return f"{self.name} has no {near[0]}=: {self.gone[near[0]]}."
        return f"Did you mean {near[0]}=?" if near else ""

    def refuse(self, unknown: Collection[str], word: str = "option") -> None:
        """Refuses keywords that are none of its options; says what to write instead."""
        for keyword in unknown:
            raise SpecError(
                f"hostcall: {self.name} has no {word} {keyword}=."
                f" {self.hint(keyword)}".rstrip(),
                code="hc-arguments",
            )


def options_of(function: Callable[..., Any], *others: str) -> dict[str, object]:
    """The keywords that `function` takes itself, without `others`; their defaults."""
    parameters = inspect.signature(function).parameters.items()
    return {k: p.default for k, p in parameters if k not in {"args", "kwargs", *others}}


def check(
    face: Face,
    fn: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    marks: Sequence[object] = (),
    also: Collection[str] = (),
    result: object = None,
) -> None:
    """Refuses a host function that can't take its arguments, or uses traced values.

    Args:
        face: the public function that the user called.
        fn: the host function.
        args: the user's positional arguments for it.
        kwargs: the user's keyword arguments for it.
        marks: the leaves of the arguments, as in `Template.leaves`.
        also: keywords that hostcall adds: `out`, with lend="out".
        result: what the user gave as the result, where that is an argument by position.
    """
    n = len(args)
    names = (*kwargs, *also)
    plain = type(fn) is types.FunctionType  # most are, with n parameters
    code = fn.__code__ if plain and not names else None
    fits = code is not None and code.co_argcount == n and not code.co_kwonlyargcount
    if not fits and not accepts(fn, n, names):
        _refuse_arguments(face, fn, n, tuple(kwargs), tuple(also), result)
    if kwargs:
        _refuse_swallowed(face, fn, kwargs)
    if _jax.traces_nothing():
        return
    if not plain or fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__:
        refuse_traced(fn, face.instead_of_traced)
    for mark in marks:
        if isinstance(mark, Opaque) and has_tracers_text(mark.value):
            name = name_of(fn)
            instead = face.with_argument(name, "x")
            raise SpecError(
                f"hostcall: `{name}` is given the text {mark.value!r}, which contains"
                " a traced value: an f-string is formatted while the program is"
                " traced, before its values exist. Pass the value,"
                f" {instead}, and format it in the function",
                code="hc-traced",
            )


def refuse_unneeded(face: str, name: str) -> None:
    """Refuses a pure call without results."""
    raise SpecError(
        f"hostcall: `{name}` returns nothing, and {face} calls it with"
        ' order="pure", the default. A program drops such a call, since nothing needs'
        f" its results. To send values out without waiting, write hc.tap({name}, ...);"
        ' for a call that the program waits for, add order="ordered" (or "unordered")',
        code="hc-dropped",
    )


def refuse_traced(fn: Any, instead: Callable[[str, str], str]) -> None:
    """Refuses a function that would use traced values of the program around it.

    Args:
        fn: the function.
        instead: says what to write, given the names of the function and of the value.
    """
    for how, value, tracer in traced_values(fn, set()):
        name = name_of(fn)
        raise SpecError(
            f"hostcall: `{name}` {how}, a traced value ({tracer.aval.str_short()}) of"
            f" the program around it. It has no value when `{name}` runs on the host."
            f" {instead(name, value)}",
            code="hc-traced",
        )


def warn_if_traced(what: str, instead: str) -> None:
    """Warns of a wait that is part of no program, in a function that is being traced.

    Args:
        what: the wait, as a clause: "hc.barrier() is called".
        instead: what it does there, and what to write.
    """
    if _jax.is_staged():
        warnings.warn(
            f"hostcall: {what} while a program is traced, and not when it runs."
            f" {instead}",
            RuntimeWarning,
            stacklevel=3,
        )


def _refuse_arguments(
    face: Face,
    fn: Any,
    n: int,
    names: Sequence[str],
    also: Sequence[str],
    result: object,
) -> None:
    name = name_of(fn)
    signature = signature_of(fn)
    has = ""
    if signature is not None:
        has = f" `{name}` takes {without_types(signature)}."
    begin = f"hostcall: {face.name} calls `{name}` with "
    for k in names:
        if takes(signature, k):
            continue
        said = f"{begin}the keyword {k}=, which it does not take."
        hint = face.hint(k, [] if signature is None else signature.parameters)
        if not hint and face.options:
            hint = f"The options of {face.name} are {', '.join(sorted(face.options))}"
        raise SpecError(f"{said}{has} {hint}".rstrip(), code="hc-arguments")
    given = counted(n, "positional argument")
    if names or also:
        given += f" and {', '.join(f'{k}=' for k in (*names, *also))}"
    form = face.form.format(fn=name, args="*args")
    match = f"Arguments and parameters must match: {form}"
    # An array may describe a result, so it is a mistake only if an argument is missing.
    arrays = (jax.Array, np.ndarray, np.generic)
    if isinstance(result, arrays) and accepts(fn, n + 1, (*names, *also)):
        match = (
            f"The first array ({result.dtype}{list(result.shape)}) was taken for the"
            f" result. What `{name}` returns is described before its arguments:"
            f" {form}, where `result` is a"
            " jax.ShapeDtypeStruct(shape, dtype), or an array of that shape and dtype"
        )
    elif also and accepts(fn, n, names):
        match = _how_to_take_out(fn, signature)
    raise SpecError(f"{begin}{given}.{has} {match}", code="hc-arguments")


def _refuse_swallowed(face: Face, fn: Any, names: Collection[str]) -> None:
    """Refuses what is meant as an option, and goes to a function's `**kwargs`.

    The option would have no effect, and nobody would say so.
    """
    signature = signature_of(fn)
    if signature is None:
        return
    for k in names:
        if k in signature.parameters:
            continue
        if get_close_matches(k, [*face.options, *face.gone], n=1, cutoff=0.8):
            name = name_of(fn)
            raise SpecError(
                f"hostcall: {face.name} has no option {k}=, and would pass it to"
                f" `{name}`, which takes any keyword. {face.hint(k)} If `{name}` shall"
                f" have it: functools.partial({name}, {k}=...), or lambda x, a:"
                f" {name}(x, {k}=a)",
                code="hc-arguments",
            )


def warn_of_own(face: Face, fn: Any, options: Mapping[str, object]) -> None:
    """Warns if an option that is given is also a parameter of the function."""
    for option, value in options.items():
        own = own_option(fn, option, value)
        if own:
            warnings.warn(
                f"hostcall: {option}={value!r} is an option of {face.name}, so"
                f" `{name_of(fn)}` does not get it{own}. If the option is meant, wrap"
                f" the function: lambda *args: {name_of(fn)}(*args)",
                UserWarning,
                stacklevel=_jax_and_own_frames(),
            )


def _jax_and_own_frames() -> int:
    """The `stacklevel` of the user's line, for a warning of this function's caller."""
    user = users_frame()
    frame = sys._getframe(1)
    level = 1
    while frame is not user and frame.f_back is not None:
        frame = frame.f_back
        level = level + 1
    return level


def _how_to_take_out(fn: Any, signature: inspect.Signature | None) -> str:
    """What to write if lend="out" was given for a function without `out`."""
    known = () if signature is None else signature.parameters.values()
    own = [str(p).partition(":")[0].partition("=")[0] for p in known]
    short = name_of(fn).rpartition(".")[2]
    head = f"{'f' if '<' in short else short}({', '.join([*own, 'out'])})"
    return (
        'lend="out" also passes out=, the arrays of the results, for the function to'
        f" write into: write def {head}, or leave out lend="
    )


# --- What several public functions take ----------------------------------------------


def check_callable(fn: object, usage: str) -> None:
    """Refuses what can't be called. `usage` is how to call the public function."""
    if not callable(fn):
        raise SpecError(
            f"hostcall: the first argument should be a function, got {fn!r}. Write"
            f" {usage}"
        )


def check_function(
    fn: Any, usage: str, awaits: bool = False, returns: bool = True
) -> CallableFacts:
    """Returns what is known of a function; refuses what is not a plain one.

    Calling a coroutine or generator function runs none of its code.

    Args:
        fn: what the user gave.
        usage: how to call the public function.
        awaits: the caller runs coroutine functions on the event loop.
        returns: the caller uses what the function returns.
    """
    check_callable(fn, usage)
    plain = type(fn) in (types.FunctionType, np.ufunc)  # most are
    for each in () if plain else layers(fn):
        made = handle(each)
        if made is not None and (why := made._why_not()):
            raise SpecError(why, code="hc-result-spec")
    seen = inspect_callable(fn)
    if seen.awaits and not awaits:
        refuse_coroutines(fn)
    if seen.yields:
        instead = (
            "Make the generator outside the program, and pass a function that takes its"
            ' next value: lambda: next(generator), with order="ordered"'
            if returns
            else "What a tap returns is ignored, so nothing would run the generator:"
            " write a function without `yield`. If a generator should get the values,"
            " start it outside the program, and pass its method generator.send"
        )
        raise SpecError(
            f"hostcall: `{seen.name}` is a generator function: calling it only makes a"
            f" generator. {instead}",
            code="hc-coroutine",
        )
    return seen


def refuse_coroutines(fn: Any) -> None:
    """Refuses a coroutine function where nothing would await what it returns."""
    seen = inspect_callable(fn)
    if seen.awaits:
        name = seen.name
        raise SpecError(
            f"hostcall: `{name}` is a coroutine function: calling it only makes a"
            " coroutine, which nothing here awaits. hc.call, hc.host, hc.Object and"
            " hc.tap run coroutine functions. Or pass a function that runs it:"
            f" lambda *args: asyncio.run({name}(*args))",
            code="hc-coroutine",
        )


def of_a_number(
    function: Callable[..., Any], what: str, number: str, name: str
) -> Callable[[Any], Any]:
    """Calls a user's function with a number, or without one if it requires none.

    `what`, `number` and `name` are what messages call the function, the number, and an
    argument for it.
    """
    if accepts(function, 0, ()):
        return lambda number: function()
    if accepts(function, 1, ()):
        return function
    signature = signature_of(function)
    assert signature is not None  # without one, all arguments are accepted
    needed = [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    raise SpecError(
        f"hostcall: {what} should require no argument, or only {number}, but it"
        f" requires {', '.join(needed)}. Write lambda: ... or lambda {name}: ...",
        code="hc-arguments",
    )


def first_default(function: Callable[..., Any]) -> str:
    """The first parameter of a function that requires none; "" if it has none."""
    signature = signature_of(function)
    if signature is None or not accepts(function, 0, ()):
        return ""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next((p.name for p in signature.parameters.values() if p.kind in kinds), "")


def parse_mask(
    where: object,
    name: str,
    option: str = "where",
    fn: Callable[..., Any] | None = None,
) -> jax.Array | np.ndarray:
    """The mask as an array. `fn` is the function, if its own keywords come with it."""
    mask = where if isinstance(where, jax.Array) else np.asarray(where)
    if mask.dtype != np.bool_ or mask.shape != ():
        own = "" if fn is None else own_option(fn, option, where)
        raise SpecError(
            f"hostcall: {option}= of `{name}` should be one bool, got"
            f" {mask.dtype}{list(mask.shape)}. For one bool per row, vmap the function"
            f" that makes the call{own}",
            code="hc-option",
        )
    return mask


def of_all_processes(processes: object, limit: object, who: str, alone: str) -> bool:
    """Whether all processes take part; refuses wrong options. `alone` is the remedy."""
    if processes is None:
        return False
    if processes != "all":
        raise wrong("processes", who, "'all'", processes, f". Leave it out for {alone}")
    if not isinstance(limit, (int, float)) or not limit > 0:
        raise wrong("limit", who, "a number of seconds above 0", limit)
    return True
