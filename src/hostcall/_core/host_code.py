"""Tells hostcall's own callables from a user's, and follows wrappers of either.

A user's callable may have every attribute (a Mock), or run code when it is asked for
one (an xmlrpc proxy). So nothing of hostcall's is looked up on it by name:
`as_host_code` asks for its class, and all that hostcall wants to know of its own
callables are methods of `HostCode`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, TypeGuard, TypeVar

from hostcall._core.errors import SpecError

T = TypeVar("T")
Args = tuple[Any, ...]  # as users give them
Kwargs = dict[str, Any]

# Wrappers within wrappers. Python flattens a partial of a partial by itself, so more
# than a few are a chain that leads back to itself.
_DEPTH = 64


class HostCode:
    """A callable that hostcall makes and that programs call.

    The methods have the answers that also hold for a user's function.

    Attributes:
        travels_as: how it leaves the process with a program: a kind in
            _export/records.py; "" if it doesn't, or only by a registered name.
        travels_alone: whether it leaves the process without any name.
        stays: why it can't leave the process, and what to write; "" if a name helps.
    """

    travels_as: ClassVar[str] = ""
    travels_alone: ClassVar[bool] = False
    stays: ClassVar[str] = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def source(self) -> str:
        """The key of its statistics, a name and a place; "" for those of its code."""
        return ""

    def place(self) -> tuple[str, int, str] | None:
        """(file, line, function) where the user wrote it, if its call may be traced by
        other lines, as in a derivative; None: the line that calls.
        """
        return None

    def inside(self) -> Callable[..., Any] | None:
        """The user's function that messages name, if this only wraps it."""
        return None

    def awaits(self) -> bool:
        """Whether a call makes a coroutine."""
        return False

    def split(
        self, args: Args, kwargs: Kwargs
    ) -> tuple[Callable[..., Any], Any, Callable[[Any], Any]] | None:
        """(what to run elsewhere, its arguments, what makes the result of its value).

        The last runs on the calling thread. None if all of it runs elsewhere.
        """
        return None

    def enter(
        self, current: Any, locks: contextlib.ExitStack, args: Args, kwargs: Kwargs
    ) -> Callable[..., Any] | None:
        """Locks what a row needs until `locks` is closed; returns what to await then.
        None if nothing is locked.

        `current` is what `hc.current()` answers in the row.
        """
        return None

    def lane(self) -> Hashable:
        """What shares one limit of `concurrency=`: equal for all code of one owner."""
        return self

    def result_words(self, number: int) -> tuple[str, str]:
        """What messages call a result, and which shape it has; "" for usual words."""
        return "", ""

    def no_derivative(self) -> str:
        """Why it has no derivative, and what to write; "" for usual words."""
        return ""

    def parts(self) -> object:
        """What tells it from others of its class, for fingerprints; None: its code."""
        return None


class Callee(NamedTuple):
    """A HostFunction that `hc.call` was given.

    Attributes:
        function: the HostFunction.
        code: what calls its Python function, in a form that its executor can send.
        options: those of a call, unless it has its own: CallOptions.
        bound: arguments before those that are given: the object of a method.
    """

    function: Any
    code: Callable[..., Any]
    options: Any
    bound: tuple[Any, ...] = ()


class Handle:
    """What users hold and register, where programs hold something else."""

    def _held(self) -> Any:
        """What programs hold."""
        raise NotImplementedError

    def _definition(self) -> Callable[..., Any] | None:
        """The user's function that it was made of; None for a feed."""
        return vars(self).get("fn")

    def _callee(self) -> Callee | None:
        """What `hc.call` makes of a HostFunction; None if it is called as it is."""
        return None

    def _why_not(self) -> str:
        """Why host code and other faces can't call it; "" if they can."""
        return ""


class TakesMask:
    """A function or rule of hostcall's with `where(mask)`: the same under a mask."""

    def where(self, mask: Any) -> Callable[..., Any]:
        raise NotImplementedError


class OfArguments:
    """A `result=` that depends on the arguments (_core/result_rules.py)."""

    _takes_batches: ClassVar[bool] = False  # whether the function takes leading axes

    def spec(self, avals: Args, name: str) -> Any:
        """The spec of the results for arguments with a ShapeDtypeStruct for each array.

        `name` is the function's, for messages.
        """
        raise NotImplementedError

    def _shown(self) -> str:
        """What it says, as `repr` of a host function shows it."""
        return f"-> {self!r}"

    def _of_arrays(self) -> str:
        """Why each argument must be one array, as "a ufunc", for messages."""
        return "a function of arrays"

    def _core_axes(self, axes: Sequence[int]) -> tuple[int, ...] | None:
        """As `result_rules.core_axes`."""
        return None

    def _lines_up(self, axes: Sequence[int]) -> bool:
        """Whether a batch may stand in front of arguments with so many axes."""
        return True

    def _is_elementwise(self) -> bool:
        """As `result_rules.is_elementwise`."""
        return False


USERS = HostCode()  # answers for users' functions


def as_host_code(fn: object) -> HostCode:
    """The callable, if hostcall made it; else what answers for a user's function.

    By its type: `isinstance` asks the object for its `__class__`, and a Mock with a
    spec, or a proxy, answers the class of something else.
    """
    return fn if issubclass(type(fn), HostCode) else USERS  # type: ignore[return-value]


def handle(value: object) -> Handle | None:
    """The object, if it is one of hostcall's handles; see `as_host_code`."""
    return value if issubclass(type(value), Handle) else None  # type: ignore[return-value]


def is_function(value: object) -> bool:
    """Whether this is a HostFunction, or a bound one."""
    of_ours = handle(value)
    return of_ours is not None and of_ours._definition() is not None


def is_partial(fn: object) -> TypeGuard[functools.partial[Any]]:
    return issubclass(type(fn), functools.partial)


def layers(fn: Any) -> Iterator[Any]:
    """The callable, and what is inside it: of partials and of hostcall's wrappers.

    Raises:
        SpecError: there is no end to them.
    """
    yield fn
    for _ in range(_DEPTH):
        inner = fn.func if is_partial(fn) else as_host_code(fn).inside()
        if inner is None:
            return
        fn = inner
        yield fn
    raise SpecError(
        f"hostcall: got more than {_DEPTH} callables inside one another, which seem"
        " to hold themselves: a functools.partial can (by its __setstate__)."
        " Calling that would not end either. Pass the function and its arguments in a"
        " lambda",
        code="hc-spec",
    )


def asked(value: object, attribute: str, kind: type[T]) -> T | None:
    """An attribute of Python's own, such as `__code__`, if it has the type that it has
    in Python's own objects.

    None otherwise: a proxy may raise anything, and a Mock with a spec answers a Mock.
    """
    try:
        answer = getattr(value, attribute, None)
    except Exception:
        return None
    return answer if type(answer) is kind else None


def text_of(value: object, attribute: str) -> str:
    """As `asked`, for a text; "" without."""
    return asked(value, attribute, str) or ""


def dress(wrapper: Any, fn: Any) -> None:
    """What functools.update_wrapper does, for a callable that may answer anything.

    `__wrapped__` is left out if Python and JAX could not ask for the signature then.
    """
    for attribute in ("__module__", "__doc__"):
        if text := text_of(fn, attribute):
            setattr(wrapper, attribute, text)
    try:
        inspect.unwrap(fn)
        with contextlib.suppress(TypeError, ValueError):  # JAX does without it then
            inspect.signature(fn)
    except Exception:
        return
    wrapper.__wrapped__ = fn


def own_dictionary(value: object) -> dict[str, Any] | None:
    """The attributes of an object itself, for which `__getattr__` can't answer."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # no dictionary, or a property of that name
        return None
    return attributes if type(attributes) is dict else None


def wrapped(value: object) -> Any:
    """What `functools.wraps` has kept in an object; None without."""
    return (own_dictionary(value) or {}).get("__wrapped__")
