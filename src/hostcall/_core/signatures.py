"""What a callable takes: its parameters, and whether given arguments fit them.

`inspect.signature` takes 20 to 100 us, and may run code of the object that it is asked
about: a Mock has every attribute, a proxy asks a server. So each question is answered
without it where the type of the callable allows that: from the code of a Python
function, or from what a ufunc is. What does ask `inspect` keeps the answer.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
import weakref
from collections.abc import MutableMapping, Sequence
from inspect import Parameter
from typing import Any

import jax
import numpy as np

from hostcall._core.host_code import is_partial, layers
from hostcall._core.source import name_of

# Python 3.14: leaves a place among a partial's arguments to the caller.
_PLACEHOLDER = getattr(functools, "Placeholder", object())


def accepts(fn: Any, n: int, names: Sequence[str]) -> bool:
    """Whether `fn` takes n positional arguments and these keywords; True if unknown.

    The answer for a Python function is kept, since `inspect` takes 20 us.
    """
    for part in layers(fn):
        fn = part
        if not is_partial(fn):
            break
        n += sum(argument is not _PLACEHOLDER for argument in fn.args)
        # A keyword of the call comes in place of the partial's own.
        names = (*names, *(word for word in fn.keywords if word not in names))
    if type(fn) is np.ufunc and not names:  # `inspect` would take 15 us each time
        return fn.nin <= n <= fn.nin + 1  # the last one is `out`
    if type(fn) is types.MethodType and type(fn.__func__) is types.FunctionType:
        n = n + 1
        fn = fn.__func__
    elif type(fn) is not types.FunctionType:
        method = call_method(fn)
        if type(method) is types.FunctionType:
            n = n + 1
            fn = method
        elif method is None or isinstance(method, types.WrapperDescriptorType):
            return _binds(_known_signature(fn), n, names)
        else:
            return True  # a static method or another descriptor: unknown
    defaults = fn.__defaults__ or ()
    kwdefaults = fn.__kwdefaults__ or ()
    return _fits(fn.__code__, len(defaults), frozenset(kwdefaults), n, tuple(names))


@functools.lru_cache(maxsize=1024)
def _fits(
    code: types.CodeType,
    defaults: int,
    kwdefaults: frozenset[str],
    n: int,
    names: tuple[str, ...],
) -> bool:
    """Whether a function with this code and so many defaults takes the arguments."""
    # Another function with this code, so that the cache keeps no closure of the user's.
    cells = tuple(types.CellType() for _ in code.co_freevars)
    like = types.FunctionType(code, {}, argdefs=(None,) * defaults, closure=cells)
    like.__kwdefaults__ = dict.fromkeys(kwdefaults)
    return _binds(inspect.signature(like), n, names)


def call_method(fn: Any) -> Any:
    """The `__call__` in the class of an object; None if the object is itself a class,
    since calling that runs its constructor.
    """
    if isinstance(fn, type):
        return None
    # In the dictionaries: `getattr` would bind the method, or run a descriptor's code.
    for kind in type(fn).__mro__:
        if "__call__" in vars(kind):
            return vars(kind)["__call__"]
    return None


def _binds(
    signature: inspect.Signature | None,
    n: int,
    names: Sequence[str],
    partial: bool = False,
) -> bool:
    """Whether the arguments fit; with `partial`, more may come. True if unknown."""
    try:
        if signature is not None:
            bind = signature.bind_partial if partial else signature.bind
            bind(*range(n), **dict.fromkeys(names))
    except TypeError:
        return False
    return True


# Without a lock: two threads may both make an entry, and then store equal ones.
_Signatures = MutableMapping[object, inspect.Signature | None]
_of_texts: _Signatures = {}
_of_objects: _Signatures = weakref.WeakKeyDictionary()


def _known_signature(fn: Any) -> inspect.Signature | None:
    """A cached `signature_of` (which takes 20 to 100 us) of a callable written in C.

    A bound C method (`list.append`) is a new object each time, and would keep its list
    alive in a cache. So these are cached by the text of their parameters.
    """
    cache = _of_objects
    key = fn
    if type(fn) is types.BuiltinFunctionType:
        text = fn.__text_signature__  # type: ignore[attr-defined]
        cache = _of_texts
        key = (text, isinstance(fn.__self__, types.ModuleType))
    try:
        if key not in cache:
            cache[key] = signature_of(fn)
        return cache[key]
    except TypeError:  # it allows no weak references, or has no hash
        return signature_of(fn)


def signature_of(fn: Any) -> inspect.Signature | None:
    """A function's signature; None if it has none, as many C functions."""
    # A Python wrapper may take other arguments than the function that it wraps, so its
    # own signature counts.
    is_python = type(fn) in (types.FunctionType, types.MethodType)
    try:
        return inspect.signature(fn, follow_wrapped=not is_python)
    except Exception:  # also what an object's own `__signature__` raises
        return _ufunc_signature(fn) if type(fn) is np.ufunc else None


def _ufunc_signature(fn: np.ufunc) -> inspect.Signature:
    """What NumPy before 2.4 does not tell, without the names of the options."""
    inputs = positional(fn.nin).parameters.values()
    out = Parameter("out", Parameter.POSITIONAL_OR_KEYWORD, default=None)
    options = Parameter("options", Parameter.VAR_KEYWORD)
    return inspect.Signature([*inputs, out, options])


def positional(n: int) -> inspect.Signature:
    """The signature of a function of `n` arguments that have no names."""
    # As NumPy documents its ufuncs: x, or x1 and x2.
    names = ["x"] if n == 1 else [f"x{k + 1}" for k in range(n)]
    return inspect.Signature(
        [Parameter(name, Parameter.POSITIONAL_ONLY) for name in names]
    )


def most_positions(fn: Any) -> float:
    """How many arguments a function takes by position; infinity for any or unknown.

    Like `accepts`, it asks no object for an attribute: that may be a remote call.
    """
    taken = 0
    named = set[str]()
    for part in layers(fn):
        fn = part
        if not is_partial(fn):
            break
        taken += sum(argument is not _PLACEHOLDER for argument in fn.args)
        named |= set(fn.keywords)
    if type(fn) is np.ufunc:
        return fn.nin - taken
    if type(fn) is types.MethodType and type(fn.__func__) is types.FunctionType:
        taken = taken + 1
        fn = fn.__func__
    elif type(fn) is not types.FunctionType:
        taken = taken + 1
        fn = call_method(fn)
        if type(fn) is not types.FunctionType:
            return math.inf
    code = fn.__code__
    if code.co_flags & inspect.CO_VARARGS:
        return math.inf
    free = code.co_varnames[taken : code.co_argcount]
    # What follows an argument that a partial gives by name can't be given by position.
    for position, name in enumerate(free):
        if name in named:
            return position
    return len(free)


def takes(signature: inspect.Signature | None, keyword: str) -> bool:
    """Whether a function with this signature takes the keyword; True if unknown."""
    return _binds(signature, 0, (keyword,), partial=True)


def without_types(signature: inspect.Signature) -> str:
    """The parameters as messages show them: annotations may be longer than the rest."""
    plain = [
        parameter.replace(annotation=parameter.empty)
        for parameter in signature.parameters.values()
    ]
    bare = signature.replace(
        parameters=plain,
        return_annotation=inspect.Signature.empty,
    )
    return str(bare)


def own_option(fn: Any, option: str, value: object) -> str:
    """What to write if a wrong value of an option was meant for the function itself,
    which has a parameter of that name; an empty text if it has none.
    """
    signature = signature_of(fn)
    if signature is None or option not in signature.parameters:
        return ""
    name = name_of(fn)
    advice = f"write functools.partial({name}, {option}={value!r})"
    # A partial would hold the array as a constant, and a traced one not at all.
    if isinstance(value, (jax.Array, np.ndarray)):
        advice = f"pass it as an argument of lambda x, a: {name}(x, {option}=a)"
    return f". `{name}` has {option}= of its own: to give it that, {advice}"
