"""What the annotations of one Python function say of arrays.

`python_function` finds the function inside partials, methods and objects with
`__call__`; `parameters_of` reads its annotations, once. `annotations` says what a call
makes of them.
"""

from __future__ import annotations

import inspect
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostcall._core.array_hints import (
    Hint,
    OneOf,
    TreeHint,
    meant,
    mentions_arrays,
    read_hint,
    shown,
)
from hostcall._core.errors import SpecError
from hostcall._core.host_code import is_partial
from hostcall._core.signatures import call_method

# --- The function ---------------------------------------------------------------------


@dataclass(frozen=True)
class PythonFunction:
    """The Python function inside a callable.

    Attributes:
        fn: the function.
        args: arguments that it has already, by position: of partials, and the object
            of a method.
        keywords: the same by name.
    """

    fn: types.FunctionType
    args: tuple[Any, ...]
    keywords: dict[str, Any]


def python_function(fn: Callable[..., Any]) -> PythonFunction | None:
    """What is inside partials, methods and objects with `__call__`.

    None for any other callable, which is asked nothing: it may be a proxy or a Mock.
    """
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while type(fn) is not types.FunctionType:
        if is_partial(fn):
            args = (*fn.args, *args)
            # As Python does: what a partial around it gives comes first.
            keywords = {**fn.keywords, **keywords}
            fn = fn.func
        elif type(fn) is types.MethodType:
            args = (fn.__self__, *args)
            fn = fn.__func__
        else:
            method = call_method(fn)
            if type(method) is not types.FunctionType:
                return None
            args = (fn, *args)
            fn = method
    try:
        inner = inspect.unwrap(fn)
    except ValueError:  # wrappers in a ring
        return None
    if type(inner) is not types.FunctionType:
        return None
    return PythonFunction(inner, args, keywords)


# --- Its annotations ------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """What the annotations of one Python function say.

    Attributes:
        names: of the parameters that may be given by position, in their order.
        hints: the annotation of each parameter; none for those that say nothing.
        rest: the name of `*args`; "" without.
        defaults: of parameters that have one.
        returned: the annotation of the result; None if it says nothing.
        annotation: the same, as the user wrote it.
    """

    names: tuple[str, ...]
    hints: Mapping[str, Hint]
    rest: str
    defaults: Mapping[str, Any]
    returned: Hint | None
    annotation: Any


# Weak keys: a function that is defined anew has annotations of its own.
_known: weakref.WeakKeyDictionary[types.FunctionType, Parameters]
_known = weakref.WeakKeyDictionary()


def parameters_of(fn: types.FunctionType, name: str) -> Parameters | None:
    """What a function's annotations say; None if they say nothing of its result."""
    if "return" not in fn.__annotations__:
        return None
    parameters = _known.get(fn)
    if parameters is None:
        # Two threads may both read them, and then keep what is equal.
        parameters = _read_parameters(fn, name)
        _known[fn] = parameters
    return parameters


def _read_parameters(fn: types.FunctionType, name: str) -> Parameters:
    """`parameters_of`, for a function that is asked about first.

    Raises:
        SpecError: the annotations can't be evaluated, or say half of a result.
    """
    try:
        annotations = typing.get_type_hints(fn)
    except Exception as error:
        raise SpecError(
            f"hostcall: the annotations of `{name}` can't be evaluated:"
            f" {type(error).__name__}: {error}. With `from __future__ import"
            " annotations` they are texts, whose names must stand in the module. Move"
            " what they name there, or say with result= what the function returns",
            code="hc-result-spec",
        ) from error
    annotation = annotations.pop("return", None)
    # A wrapper's own parameters are `*args`: `python_function` has unwrapped it.
    names: list[str] = []
    rest = ""
    defaults: dict[str, Any] = {}
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = parameter.name
        elif parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        ):
            names.append(parameter.name)
        if parameter.default is not parameter.empty:
            defaults[parameter.name] = parameter.default
    hints = {word: read_hint(written) for word, written in annotations.items()}
    return Parameters(
        names=tuple(names),
        hints={word: hint for word, hint in hints.items() if hint is not None},
        rest=rest,
        defaults=defaults,
        returned=_returned(annotation, name),
        annotation=annotation,
    )


def _returned(annotation: Any, name: str) -> Hint | None:
    """The annotation of a result; None if it says nothing of arrays.

    Raises:
        SpecError: it mentions arrays, and does not say how many there are, or which
            shape one has.
    """
    hint = read_hint(annotation)
    why = ""
    # NDArray[np.float32] is an alias of np.ndarray[...], which has no axes either.
    if typing.get_origin(meant(annotation)) is np.ndarray:
        why = (
            "which has a dtype and no shape. Annotate it with jaxtyping, as in"
            " Float[np.ndarray, 'n']"
        )
    elif not mentions_arrays(annotation):
        return None
    elif isinstance(hint, OneOf):
        why = "which is one of several types. A result has one: annotate it"
    elif isinstance(hint, TreeHint):
        why = hint.unsaid("result")
    elif hint is None:
        why = (
            "which does not say how many arrays there are. Annotate a tuple with a"
            " type for each, a TypedDict, a NamedTuple or a dataclass"
        )
    if not why:
        return hint
    raise SpecError(
        f"hostcall: `{name}` is annotated to return {shown(annotation)}, {why}; or say"
        " with result= what it returns",
        code="hc-result-spec",
    )
