"""Finds mistakes in how a host function is called, when the call is traced."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter
from typing import Any, NamedTuple

import jax
import numpy as np

from hostcall import _jax
from hostcall._core.captured import has_tracers_text, traced_values
from hostcall._core.counted import counted
from hostcall._core.errors import SpecError
from hostcall._core.source import name_of
from hostcall._core.spec import Static


class Face(NamedTuple):
    """A public function that takes a host function and its arguments.

    Attributes:
        name: its public name, such as `hc.tap`.
        form: how to call it, with places for {fn} and {args}.
        options: its own keywords. It passes all others to the host function.
        jaxs: JAX's names of options, and what to write here instead.
    """

    name: str
    form: str
    options: frozenset[str] = frozenset()
    jaxs: Mapping[str, str] = types.MappingProxyType({})

    def with_argument(self, name: str, argument: str) -> str:
        return self.form.format(fn=name, args=f"..., {argument}")

    def hint(self, keyword: str, others: Collection[str] = ()) -> str:
        """Guesses what an unknown keyword was meant to be.

        `others` are further names that it may be a misspelling of.
        """
        if keyword in self.jaxs:
            return f"In {self.name}, JAX's {keyword}= is {self.jaxs[keyword]}"
        near = get_close_matches(keyword, [*self.options, *others], n=1)
        return f"Did you mean {near[0]}=?" if near else ""


def options_of(function: Callable[..., Any], *others: str) -> frozenset[str]:
    """The keywords that `function` takes itself, without `others`."""
    return frozenset(inspect.signature(function).parameters) - {
        "args",
        "kwargs",
        *others,
    }


def check(
    face: Face,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    marks: Sequence[Any] = (),
    also: Collection[str] = (),
    result: Any = None,
) -> None:
    """Refuses a host function that can't take its arguments, or uses traced values.

    Args:
        face: the public function that the user called.
        fn: the host function.
        args: the user's positional arguments for it.
        kwargs: the user's keyword arguments for it.
        marks: the leaves of the arguments, as in `Template.leaves`.
        also: keywords that hostcall adds.
        result: what the user gave as the result, where that is an argument by position.
    """
    simple = (
        type(fn) is types.FunctionType
        and fn.__code__.co_argcount == len(args)
        and not (kwargs or also or fn.__code__.co_kwonlyargcount)
    )
    if not simple and not _accepts(fn, len(args), (*kwargs, *also)):
        _refuse_arguments(face, fn, len(args), tuple(kwargs), result)
    if _jax.is_tracing():
        refuse_traced(face, fn)
        for mark in marks:
            if isinstance(mark, Static) and has_tracers_text(mark.value):
                _refuse_text(face, fn, mark.value)


def refuse_unneeded(face: str, name: str) -> None:
    """Refuses a pure call without results."""
    raise SpecError(
        f"hostcall: `{name}` returns nothing, and {face} calls it with"
        ' order="pure", the default. A program drops such a call, since nothing needs'
        f" its results. To send values out without waiting, write hc.tap({name}, ...);"
        ' for a call that the program waits for, add order="ordered" (or "unordered")',
        code="hc-dropped",
    )


def refuse_traced(face: Face, fn: Any) -> None:
    """Refuses a function that would use traced values of the program around it."""
    for found in traced_values(fn, set()):
        name = name_of(fn)
        raise SpecError(
            f"hostcall: `{name}` {found.how}, a traced value ({found.aval}) of the"
            f" program around it. It has no value when `{name}` runs on the host. Pass"
            f" it as an argument: {face.with_argument(name, found.name)}, with a"
            " parameter for it",
            code="hc-traced",
        )


def _refuse_text(face: Face, fn: Any, text: str) -> None:
    name = name_of(fn)
    raise SpecError(
        f"hostcall: `{name}` is given the text {text!r}, which contains a traced value:"
        " an f-string is formatted while the program is traced, before its values"
        f" exist. Pass the value, {face.with_argument(name, 'x')}, and format it in the"
        " function",
        code="hc-traced",
    )


# --- Arguments -----------------------------------------------------------------------


def _accepts(fn: Any, n: int, names: Sequence[str]) -> bool:
    """Whether `fn` takes n positional arguments and these keywords; True if unknown.

    A Python function is judged by its code object, which takes 1 us; `inspect` takes
    20 us.
    """
    while isinstance(fn, functools.partial):
        n += len(fn.args)
        names = (*names, *(k for k in fn.keywords if k not in names))
        fn = fn.func
    if isinstance(fn, types.MethodType):
        n, fn = n + 1, fn.__func__
    elif not isinstance(fn, types.FunctionType):
        method = _call_method(fn)
        if isinstance(method, types.FunctionType):
            n, fn = n + 1, method
        elif method is None or isinstance(method, types.WrapperDescriptorType):
            return _signature_accepts(fn, n, names)
        else:
            return True  # a static method or another descriptor: unknown
    code = fn.__code__
    own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional, keyword = own[: code.co_argcount], own[code.co_argcount :]
    if n > len(positional) and not code.co_flags & inspect.CO_VARARGS:
        return False
    # Positional parameters that keywords may still fill.
    free = positional[max(n, code.co_posonlyargcount) :]
    if names and not code.co_flags & inspect.CO_VARKEYWORDS:
        if not set(names) <= {*free, *keyword}:
            return False
    elif any(k in positional[code.co_posonlyargcount : n] for k in names):
        return False
    first_default = len(positional) - len(fn.__defaults__ or ())
    missing = [p for p in positional[n:first_default] if p not in names]
    missing += positional[n : min(code.co_posonlyargcount, first_default)]
    defaults = fn.__kwdefaults__ or ()
    return not missing and all(k in names or k in defaults for k in keyword)


def _call_method(fn: Any) -> Any:
    """The `__call__` in the class of an object; None if the object is itself a class,
    since calling that runs its constructor.
    """
    if isinstance(fn, type):
        return None
    kinds = [kind for kind in type(fn).__mro__ if "__call__" in vars(kind)]
    return vars(kinds[0])["__call__"] if kinds else None


def _signature_accepts(fn: Any, n: int, names: Sequence[str]) -> bool:
    signature = _known_signature(fn)
    if signature is None:
        return True
    try:
        signature.bind(*range(n), **dict.fromkeys(names))
    except TypeError:
        return False
    return True


_of_texts: dict[tuple[str, bool], inspect.Signature | None] = {}
_of_objects: weakref.WeakKeyDictionary[Any, inspect.Signature | None]
_of_objects = weakref.WeakKeyDictionary()


def _known_signature(fn: Any) -> inspect.Signature | None:
    """A cached `_signature` (which takes 20 to 100 us) of a callable written in C.

    A bound C method (`list.append`) is a new object each time, and would keep its list
    alive in a cache. So these are cached by the text of their parameters.
    """
    if isinstance(fn, types.BuiltinFunctionType):
        text = fn.__text_signature__  # type: ignore[attr-defined]
        if text is None:
            return None
        key = text, isinstance(fn.__self__, types.ModuleType)
        if key not in _of_texts:
            _of_texts[key] = _signature(fn)
        return _of_texts[key]
    try:
        if fn not in _of_objects:
            _of_objects[fn] = _signature(fn)
        return _of_objects[fn]
    except TypeError:  # it allows no weak references, or has no hash
        return _signature(fn)


def _signature(fn: Any) -> inspect.Signature | None:
    """A function's signature; None if it has none, as many C functions."""
    if isinstance(fn, np.ufunc):  # NumPy tells it from 2.4 on
        return _ufunc_signature(fn)
    try:
        return inspect.signature(fn, follow_wrapped=not _is_python(fn))
    except (TypeError, ValueError):
        return None


def _ufunc_signature(fn: np.ufunc) -> inspect.Signature:
    numbers = [""] if fn.nin == 1 else [str(k + 1) for k in range(fn.nin)]
    inputs = [Parameter(f"x{k}", Parameter.POSITIONAL_ONLY) for k in numbers]
    outputs = [Parameter("out", Parameter.POSITIONAL_OR_KEYWORD, default=None)]
    if fn.nout > 1:
        outputs = [
            Parameter(f"out{k + 1}", Parameter.POSITIONAL_ONLY, default=None)
            for k in range(fn.nout)
        ]
        outputs.append(Parameter("out", Parameter.KEYWORD_ONLY, default=None))
    options = ["where", "casting", "order", "dtype", "subok", "signature", "sig"]
    if fn.signature is not None:  # over axes, such as np.matmul
        options += ["axes", "axis", "keepdims"]
    keywords = [Parameter(k, Parameter.KEYWORD_ONLY, default=None) for k in options]
    return inspect.Signature([*inputs, *outputs, *keywords])


def _is_python(fn: Any) -> bool:
    """Whether this is Python code. A Python wrapper may take other arguments than the
    function that it wraps, so its own signature counts.
    """
    return isinstance(fn, types.FunctionType | types.MethodType)


def _refuse_arguments(
    face: Face, fn: Any, n: int, names: Sequence[str], result: Any
) -> None:
    name, signature = name_of(fn), _signature(fn)
    takes = "" if signature is None else f" `{name}` takes {_without_types(signature)}."
    begin = f"hostcall: {face.name} calls `{name}` with "
    for k in names:
        if _takes(signature, k):
            continue
        said = f"{begin}the keyword {k}=, which it does not take."
        hint = face.hint(k, [] if signature is None else signature.parameters)
        if not hint and face.options:
            hint = f"The options of {face.name} are {', '.join(sorted(face.options))}"
        raise SpecError(f"{said}{takes} {hint}".rstrip(), code="hc-arguments")
    given = counted(n, "positional argument")
    if names:
        given += f" and {', '.join(f'{k}=' for k in names)}"
    form = face.form.format(fn=name, args="*args")
    match = f"Arguments and parameters must match: {form}"
    # An array may describe a result, so it is a mistake only if an argument is missing.
    arrays = (jax.Array, np.ndarray, np.generic)
    if isinstance(result, arrays) and _accepts(fn, n + 1, names):
        match = (
            f"The first array ({result.dtype}{list(result.shape)}) was taken for the"
            f" result. What `{name}` returns is described before its arguments:"
            f" {form}, where `result` is a"
            " jax.ShapeDtypeStruct(shape, dtype), or an array of that shape and dtype"
        )
    raise SpecError(f"{begin}{given}.{takes} {match}", code="hc-arguments")


def _takes(signature: inspect.Signature | None, keyword: str) -> bool:
    if signature is None:
        return True
    for p in signature.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            return True
        if p.name == keyword and p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL):
            return True
    return False


def _without_types(signature: inspect.Signature) -> str:
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(
        signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
    )
