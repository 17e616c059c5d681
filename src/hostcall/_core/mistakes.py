"""Finds mistakes in how a host function is called, when the call is traced."""

from __future__ import annotations

import inspect
import re
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
        defaults = self.options
        return {
            name: value
            for name, value in values.items()
            if name in defaults and value is not defaults[name]
        }

    def with_argument(self, name: str, argument: str) -> str:
        return self.form.format(fn=name, args=f"..., {argument}")

    def instead_of_traced(self, name: str, value: str) -> str:
        """What to write if the function `name` uses the traced value `value`."""
        passed = self.with_argument(name, value)
        return f"Pass it as an argument: {passed}, with a parameter for it"

    def hint(self, keyword: str, parameters: Collection[str] = ()) -> str:
        """Guesses what an unknown keyword was meant to be.

        `parameters` are the function's, of which it may be a misspelling too.
        """
        if keyword in self.jaxs:
            return f"In {self.name}, JAX's {keyword}= is {self.jaxs[keyword]}"
        names = [*self.options, *self.gone, *parameters]
        for nearest in get_close_matches(keyword, names, n=1):
            if nearest in self.gone:
                return f"{self.name} has no {nearest}=: {self.gone[nearest]}."
            return f"Did you mean {nearest}=?"
        return ""

    def refuse(self, unknown: Collection[str], word: str = "option") -> None:
        """Refuses keywords that are none of its options; says what to write instead."""
        for keyword in unknown:
            hint = self.hint(keyword)
            text = f"hostcall: {self.name} has no {word} {keyword}=. {hint}"
            raise SpecError(text.rstrip(), code="hc-arguments")


def options_of(function: Callable[..., Any], *left_out: str) -> dict[str, object]:
    """The keywords that `function` takes itself, without `left_out`; their defaults."""
    no_options = {"args", "kwargs", *left_out}
    parameters = inspect.signature(function).parameters.items()
    return {
        name: parameter.default
        for name, parameter in parameters
        if name not in no_options
    }


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
    is_plain = type(fn) is types.FunctionType  # most are, with n parameters
    # A quick look first: to ask for a signature takes longer than the rest.
    code = fn.__code__ if is_plain and not names else None
    fits = code is not None and code.co_argcount == n and not code.co_kwonlyargcount
    if not fits and not accepts(fn, n, names):
        _refuse_arguments(face, fn, n, tuple(kwargs), tuple(also), result)
    if kwargs:
        _refuse_swallowed(face, fn, kwargs)
    if _jax.traces_nothing():  # so there is no traced value that it could use
        return
    # All else that a plain function uses is global. A traced value there is noticed
    # when the function runs (`failures.text_for_xla`).
    if not is_plain or fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__:
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
    for phrase, value, tracer in traced_values(fn, set()):
        name = name_of(fn)
        raise SpecError(
            f"hostcall: `{name}` {phrase}, a traced value"
            f" ({tracer.aval.str_short()}) of the program around it. It has no value"
            f" when `{name}` runs on the host."
            f" {instead(name, value)}",
            code="hc-traced",
        )


def warn_if_traced(event: str, instead: str) -> None:
    """Warns of a wait that is part of no program, in a function that is being traced.

    Args:
        event: the wait, as a clause: "hc.barrier() is called".
        instead: what it does there, and what to write.
    """
    if _jax.is_staged():
        warnings.warn(
            f"hostcall: {event} while a program is traced, and not when it runs."
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
    """Says why a function can't take its arguments: an unknown keyword, too many or too
    few of them, an array where the result should be, or no parameter `out`.
    """
    name = name_of(fn)
    signature = signature_of(fn)
    has = ""
    if signature is not None:
        has = f" `{name}` takes {without_types(signature)}."
    begin = f"hostcall: {face.name} calls `{name}` with "
    for keyword in names:
        if takes(signature, keyword):
            continue
        parameters = [] if signature is None else signature.parameters
        hint = face.hint(keyword, parameters)
        if not hint and face.options:
            hint = f"The options of {face.name} are {', '.join(sorted(face.options))}"
        text = f"{begin}the keyword {keyword}=, which it does not take.{has} {hint}"
        raise SpecError(text.rstrip(), code="hc-arguments")
    keywords = (*names, *also)
    passed = counted(n, "positional argument")
    if keywords:
        passed += f" and {', '.join(f'{keyword}=' for keyword in keywords)}"
    form = face.form.format(fn=name, args="*args")
    match = f"Arguments and parameters must match: {form}"
    # An array may describe a result, so it is a mistake only if an argument is missing.
    arrays = (jax.Array, np.ndarray, np.generic)
    if isinstance(result, arrays) and accepts(fn, n + 1, keywords):
        match = (
            f"The first array ({result.dtype}{list(result.shape)}) was taken for the"
            f" result. What `{name}` returns is described before its arguments:"
            f" {form}, where `result` is a"
            " jax.ShapeDtypeStruct(shape, dtype), or an array of that shape and dtype"
        )
    elif also and accepts(fn, n, names):
        match = _how_to_take_out(fn, signature)
    raise SpecError(f"{begin}{passed}.{has} {match}", code="hc-arguments")


def _refuse_swallowed(face: Face, fn: Any, names: Collection[str]) -> None:
    """Refuses what is meant as an option, and goes to a function's `**kwargs`.

    The option would have no effect, and nobody would say so.
    """
    signature = signature_of(fn)
    if signature is None:
        return
    options = [*face.options, *face.gone]
    for keyword in names:
        if keyword in signature.parameters:
            continue
        # Only what is nearly an option: all else is the function's own.
        if get_close_matches(keyword, options, n=1, cutoff=0.8):
            name = name_of(fn)
            raise SpecError(
                f"hostcall: {face.name} has no option {keyword}=, and would pass it to"
                f" `{name}`, which takes any keyword. {face.hint(keyword)} If `{name}`"
                f" shall have it: functools.partial({name}, {keyword}=...), or"
                f" lambda x, a: {name}(x, {keyword}=a)",
                code="hc-arguments",
            )


def warn_of_own(face: Face, fn: Any, options: Mapping[str, object]) -> None:
    """Warns if an option that is given is also a parameter of the function."""
    for option, value in options.items():
        instead = own_option(fn, option, value)
        if instead:
            name = name_of(fn)
            warnings.warn(
                f"hostcall: {option}={value!r} is an option of {face.name}, so"
                f" `{name}` does not get it{instead}. If the option is meant, wrap"
                f" the function: lambda *args: {name}(*args)",
                UserWarning,
                stacklevel=_jax_and_own_frames(),
            )


def _jax_and_own_frames() -> int:
    """The `stacklevel` of the user's line, for a warning of this function's caller."""
    users = users_frame()
    frame = sys._getframe(1)  # of the caller, for which `stacklevel` is 1
    level = 1
    while frame is not users and frame.f_back is not None:
        frame = frame.f_back
        level = level + 1
    return level


def _how_to_take_out(fn: Any, signature: inspect.Signature | None) -> str:
    """What to write if lend="out" was given for a function without `out`."""
    parameters: list[str] = []
    if signature is not None:
        # Without types and defaults, but with the stars.
        texts = map(str, signature.parameters.values())
        parameters = [re.split("[:=]", text)[0] for text in texts]
    _, _, name = name_of(fn).rpartition(".")
    if "<" in name:  # a lambda
        name = "f"
    head = f"{name}({', '.join([*parameters, 'out'])})"
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
    is_plain = type(fn) in (types.FunctionType, np.ufunc)  # most are
    if not is_plain:
        for layer in layers(fn):
            of_ours = handle(layer)
            why = "" if of_ours is None else of_ours._why_not()
            if why:
                raise SpecError(why, code="hc-result-spec")
    facts = inspect_callable(fn)
    if facts.awaits and not awaits:
        refuse_coroutines(fn)
    if facts.yields:
        instead = (
            "What a tap returns is ignored, so nothing would run the generator: write a"
            " function without `yield`. If a generator should get the values, start it"
            " outside the program, and pass its method generator.send"
        )
        if returns:
            instead = (
                "Make the generator outside the program, and pass a function that takes"
                ' its next value: lambda: next(generator), with order="ordered"'
            )
        raise SpecError(
            f"hostcall: `{facts.name}` is a generator function: calling it only makes a"
            f" generator. {instead}",
            code="hc-coroutine",
        )
    return facts


def refuse_coroutines(fn: Any) -> None:
    """Refuses a coroutine function where nothing would await what it returns."""
    facts = inspect_callable(fn)
    if facts.awaits:
        name = facts.name
        raise SpecError(
            f"hostcall: `{name}` is a coroutine function: calling it only makes a"
            " coroutine, which nothing here awaits. hc.call, hc.host, hc.Object and"
            " hc.tap run coroutine functions. Or pass a function that runs it:"
            f" lambda *args: asyncio.run({name}(*args))",
            code="hc-coroutine",
        )


def of_a_number(
    function: Callable[..., Any], label: str, number: str, name: str
) -> Callable[[Any], Any]:
    """Calls a user's function with a number, or without one if it requires none.

    `label`, `number` and `name` are what messages call the function, the number, and an
    argument for it.
    """
    if accepts(function, 0, ()):
        return lambda number: function()
    if accepts(function, 1, ()):
        return function
    signature = signature_of(function)
    assert signature is not None, "without one, all arguments are accepted"
    needed: list[str] = []
    for parameter in signature.parameters.values():
        takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not takes_any and parameter.default is parameter.empty:
            needed.append(parameter.name)
    raise SpecError(
        f"hostcall: {label} should require no argument, or only {number}, but it"
        f" requires {', '.join(needed)}. Write lambda: ... or lambda {name}: ...",
        code="hc-arguments",
    )


def first_default(function: Callable[..., Any]) -> str:
    """The first parameter of a function that requires none; "" if it has none."""
    signature = signature_of(function)
    if signature is None or not accepts(function, 0, ()):
        return ""
    for parameter in signature.parameters.values():
        if parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        ):
            return parameter.name
    return ""


def parse_mask(
    value: object,
    name: str,
    option: str = "where",
    fn: Callable[..., Any] | None = None,
) -> jax.Array | np.ndarray:
    """The mask as an array. `fn` is the function, if its own keywords come with it."""
    mask = value if isinstance(value, jax.Array) else np.asarray(value)
    if mask.dtype != np.bool_ or mask.shape != ():
        advice = "" if fn is None else own_option(fn, option, value)
        raise SpecError(
            f"hostcall: {option}= of `{name}` should be one bool, got"
            f" {mask.dtype}{list(mask.shape)}. For one bool per row, vmap the function"
            f" that makes the call{advice}",
            code="hc-option",
        )
    return mask


def of_all_processes(processes: object, limit: object, face: str, alone: str) -> bool:
    """Whether all processes take part; refuses wrong options. `alone` is the remedy."""
    if processes is None:
        return False
    if processes != "all":
        advice = f". Leave it out for {alone}"
        raise wrong("processes", face, "'all'", processes, advice)
    if not isinstance(limit, (int, float)) or not limit > 0:
        raise wrong("limit", face, "a number of seconds above 0", limit)
    return True
