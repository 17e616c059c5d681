"""Values as JSON, by their types, for other processes.

A `Codec` encodes a value as plain lists, dicts, texts and numbers, and decodes it as
the type that is asked for. Decoding runs no code of the text: constants are numbers and
texts, and everything else is named by a type of ours.

Whoever reads a text trusts nothing in it. So `decode` goes by the type, never by what
the text says that it is, and takes no value that only equals one of the type: `True` is
no 1, and 1.0 no int.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
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


def encode_plain(value: Any, label: str) -> Json:
    """A constant as JSON has it; tuples become lists. NotPortable for anything else.

    `label` is what the error calls the value.
    """
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, tuple):
        return [encode_plain(item, label) for item in value]
    if _jax.is_symbolic(value):
        return {SIZE: str(value)}
    raise NotPortable(
        f"{label} is {value!r}. Only None, bools, numbers and texts leave the process;"
        " let the registered function hold everything else"
    )


def encode_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def decode_bytes(text: Json) -> bytes:
    if type(text) is not str:
        raise Malformed(f"the bytes {text!r}")
    return base64.b64decode(text, validate=True)


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

    def encode(self, value: Any, label: str) -> Json:
        """The value as JSON. Raises NotPortable, which calls it by its label."""
        kind = type(value)
        for known, (encode, _) in self._ways.items():
            if issubclass(kind, known):
                return encode(value)
        if kind is tuple:
            return [self.encode(item, label) for item in value]
        if kind is dict:
            return {key: self.encode(item, label) for key, item in value.items()}
        if dataclasses.is_dataclass(kind):
            return {
                name: self.encode(getattr(value, name), f"{name}=")
                for name in that_travel(kind)
            }
        return encode_plain(value, label)

    def fields(self, json_fields: Json, cls: type) -> dict[str, Any]:
        """The fields of a dataclass that travel, and no others, each of its type.

        Raises KeyError or Malformed, or what a way raises.
        """
        if not isinstance(json_fields, dict):
            raise Malformed(f"{json_fields!r} in place of fields")
        hints = {name: _hints(cls)[name] for name in that_travel(cls)}
        if unknown := json_fields.keys() - hints.keys():
            raise Malformed(f"the options {sorted(unknown)}")
        return {
            name: self.decode(json_fields[name], hint, name)
            for name, hint in hints.items()
        }

    def decode(self, json_value: Json, hint: Any, label: str) -> Any:
        """The value of this type. 1 is not True, and a number is finite."""
        if hint is Any:
            return json_value
        if hint in self._ways:  # a type that has a text of its own
            _, decode = self._ways[hint]
            return decode(json_value)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return hint(**self.fields(json_value, hint))
        origin = typing.get_origin(hint)
        inner = typing.get_args(hint)
        if origin is Annotated:
            kind, allowed = inner
            value = self.decode(json_value, kind, label)
            if value in allowed:
                return value
        elif origin is Literal:
            # With their types: JSON's true equals 1.
            allowed_values = [(type(value), value) for value in inner]
            if (type(json_value), json_value) in allowed_values:
                return json_value
        elif origin in (typing.Union, types.UnionType):
            if json_value is None and type(None) in inner:
                return None
            # The first type that fits. A value that fits none falls through to the end.
            for kind in inner:
                with contextlib.suppress(Malformed):
                    return self.decode(json_value, kind, label)
        elif origin is tuple and type(json_value) is list:
            if inner[-1] is ...:
                inner = inner[:1] * len(json_value)
            if len(inner) == len(json_value):
                items = zip(json_value, inner, strict=True)
                return tuple([self.decode(item, kind, label) for item, kind in items])
        elif origin is dict and type(json_value) is dict:
            _, kind = inner
            return {k: self.decode(item, kind, label) for k, item in json_value.items()}
        elif hint in (int, float):
            if _is_number(json_value, hint):
                return json_value
        elif type(json_value) is hint:
            return json_value
        raise Malformed(f"the option {label}={json_value!r}")


def _is_number(json_value: Json, kind: type) -> bool:
    if kind is int:
        is_int = type(json_value) is int  # JSON's true is no number
        return is_int and -(2**63) <= json_value < 2**63
    is_number = type(json_value) in (int, float)
    return is_number and math.isfinite(json_value)


# --- The text -----------------------------------------------------------------------


# How deep lists and dicts may be in each other. What reads them goes down by calls of
# functions, and Python has room for a thousand.
_DEEPEST = 200


def write(json_value: Json) -> str:
    """The text of what a codec made; equal for equal things, in every process."""
    if _is_too_deep(json_value):
        raise NotPortable(
            f"its arguments or results are a pytree of more than {_DEEPEST} levels."
            " Pass its leaves in a flat list"
        )
    return json.dumps(json_value, separators=(",", ":"), sort_keys=True)


def read(text: str | bytes) -> Json:
    """What a text says.

    Raises Malformed, which says why it can't be read.
    """
    try:
        json_value = json.loads(text)
    except (ValueError, TypeError) as error:
        raise Malformed(f"{type(error).__name__}: {error}") from error
    except RecursionError:  # deeper than Python's parser goes
        pass
    else:
        if not _is_too_deep(json_value):
            return json_value
    raise Malformed(f"lists in lists, more than {_DEEPEST} deep")


def _is_too_deep(json_value: Json) -> bool:
    # Level by level: a recursion would end as deep as what it is to refuse.
    level = [json_value]
    for _ in range(_DEEPEST):
        level = [child for parent in level for child in children(parent)]
        if not level:
            return False
    return True


def children(json_value: Json) -> Collection[Json]:
    if isinstance(json_value, dict):
        return json_value.values()
    return json_value if isinstance(json_value, list) else ()
