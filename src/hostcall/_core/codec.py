"""Values as JSON, by their types, for other processes.

A `Codec` encodes a value as plain lists, dicts, texts and numbers, and decodes it as
the type that is asked for. Decoding runs no code of the text: constants are numbers and
texts, and everything else is named by a type of ours.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from hostcall import _jax
from hostcall._core.options import that_travel

# What a text says: JSON, which may say anything.
Json: TypeAlias = Any
# A number may have a range, which the codec checks.
Natural: TypeAlias = Annotated[int, range(2**31)]

# How the values of a type are written: functions to JSON, and from it.
Way: TypeAlias = tuple[Callable[[Any], Json], Callable[[Json], Any]]

SIZE = "symbolic size"  # the one key of a dict that stands for such a size


class NotPortable(Exception):
    """Something can't leave the process; the text says why, and completes a sentence
    that ends in "can't be exported: ".
    """


class Malformed(Exception):
    """A text is not what a codec writes; says which part."""


def encode_plain(value: Any, what: str) -> Json:
    """A constant as JSON has it; tuples become lists. NotPortable for anything else."""
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, tuple):
        return [encode_plain(each, what) for each in value]
    if _jax.is_symbolic(value):
        return {SIZE: str(value)}
    raise NotPortable(
        f"{what} is {value!r}. Only None, bools, numbers and texts leave the process;"
        " let the registered function hold everything else"
    )


def encode_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def decode_bytes(given: Json) -> bytes:
    if type(given) is not str:
        raise Malformed(f"the bytes {given!r}")
    return base64.b64decode(given, validate=True)


# Annotations are evaluated once: reading them is slow.
_hints: Callable[[type], dict[str, object]] = functools.cache(
    functools.partial(typing.get_type_hints, include_extras=True)
)


class Codec:
    """Writes and reads constants, tuples, dicts, dataclasses, and types with a way.

    Of a dataclass the fields travel that say nothing else (_core/options.py).
    """

    def __init__(self, ways: Mapping[type, Way]) -> None:
        self._ways = {bytes: (encode_bytes, decode_bytes), **ways}

    def encode(self, value: Any, what: str) -> Json:
        """The value as JSON. Raises NotPortable, which says what it is."""
        kind = type(value)
        for known, (encode, _) in self._ways.items():
            if issubclass(kind, known):
                return encode(value)
        if kind is tuple:
            return [self.encode(each, what) for each in value]
        if kind is dict:
            return {key: self.encode(each, what) for key, each in value.items()}
        if dataclasses.is_dataclass(kind):
            return {
                name: self.encode(getattr(value, name), f"{name}=")
                for name in that_travel(kind)
            }
        return encode_plain(value, what)

    def fields(self, given: Json, cls: type) -> dict[str, Any]:
        """The fields of a dataclass that travel, and no others, each of its type.

        Raises KeyError or Malformed, or what a way raises.
        """
        if not isinstance(given, dict):
            raise Malformed(f"{given!r} in place of fields")
        hints = {name: _hints(cls)[name] for name in that_travel(cls)}
        if unknown := given.keys() - hints.keys():
            raise Malformed(f"the options {sorted(unknown)}")
        return {name: self.decode(given[name], hints[name], name) for name in hints}

    def decode(self, given: Json, hint: Any, what: str) -> Any:
        """The value of this type. 1 is not True, and a number is finite."""
        origin = typing.get_origin(hint)
        inner = typing.get_args(hint)
        if hint is Any:
            return given
        if hint in self._ways:
            return self._ways[hint][1](given)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return hint(**self.fields(given, hint))
        if origin is Annotated:
            found = self.decode(given, inner[0], what)
            if found in inner[1]:
                return found
        elif origin is Literal:
            if any(type(given) is type(each) and given == each for each in inner):
                return given
        elif origin in (typing.Union, types.UnionType):
            if given is None and type(None) in inner:
                return None
            for each in inner:
                with contextlib.suppress(Malformed):
                    return self.decode(given, each, what)
        elif origin is tuple and type(given) is list:
            if inner[-1] is ...:
                inner = inner[:1] * len(given)
            if len(inner) == len(given):
                return tuple(map(self.decode, given, inner, itertools.repeat(what)))
        elif origin is dict and type(given) is dict:
            return {k: self.decode(each, inner[1], what) for k, each in given.items()}
        elif _is_number(given, hint) if hint in (int, float) else type(given) is hint:
            return given
        raise Malformed(f"the option {what}={given!r}")


def _is_number(given: Json, kind: type) -> bool:
    if kind is int:
        return type(given) is int and -(2**63) <= given < 2**63
    return type(given) in (int, float) and math.isfinite(given)


# --- The text -----------------------------------------------------------------------


# How deep lists and dicts may be in each other. What reads them goes down by calls of
# functions, and Python has room for a thousand.
_DEEPEST = 200


def write(given: Json) -> str:
    """The text of what a codec made; equal for equal things, in every process."""
    if _is_too_deep(given):
        raise NotPortable(
            f"its arguments or results are a pytree of more than {_DEEPEST} levels."
            " Pass its leaves in a flat list"
        )
    return json.dumps(given, separators=(",", ":"), sort_keys=True)


def read(text: str | bytes) -> Json:
    """What a text says.

    Raises Malformed, which says why it can't be read.
    """
    try:
        found = json.loads(text)
    except (ValueError, TypeError) as error:
        raise Malformed(f"{type(error).__name__}: {error}") from error
    except RecursionError:
        found = None
    else:
        if not _is_too_deep(found):
            return found
    raise Malformed(f"lists in lists, more than {_DEEPEST} deep")


def _is_too_deep(given: Json) -> bool:
    level = [given]
    for _ in range(_DEEPEST):
        level = [child for part in level for child in children(part)]
        if not level:
            return False
    return True


def children(given: Json) -> Collection[Json]:
    if isinstance(given, dict):
        return given.values()
    return given if isinstance(given, list) else ()
