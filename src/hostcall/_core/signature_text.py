"""Reads the text of a generalized ufunc's signature: "(m,n),(n)->(m)".

The grammar is NumPy's (NEP 20, which extends NEP 5):

    signature  = arguments "->" results
    arguments  = [ list { "," list } ]        each list is of one argument
    results    = list { "," list }
    list       = "(" [ dimension { "," dimension } ] ")"
    dimension  = (name | size) [ "?" ]

`dimensions` says what a call makes of it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from hostcall._core.errors import SpecError


@dataclass(frozen=True)
class Dimension:
    """One dimension of a list.

    Attributes:
        name: "" if it has a fixed size.
        size: the fixed size; None if it has a name.
        optional: whether it may be missing.
    """

    name: str
    size: int | None
    optional: bool

    @functools.cached_property
    def key(self) -> str:
        """By what its size is looked up: its name, or the digits of its fixed size.

        No name begins with a digit, so these are never equal.
        """
        return self.name if self.size is None else str(self.size)

    def __str__(self) -> str:
        return self.key + "?" * self.optional


# Those of one argument or result, and those of all of them.
Dimensions: TypeAlias = tuple[Dimension, ...]
Lists: TypeAlias = tuple[Dimensions, ...]


def shown(dimensions: Dimensions) -> str:
    return f"({','.join(map(str, dimensions))})"


_TOKEN = re.compile(r"\s*(->|[(),?|]|[^\W\d]\w*|\d+)")
_FORM = (
    "'(m,n),(n)->(m)': a list of dimensions for each argument, '->', and one for each"
    " result"
)


class _Reader:
    """Reads a signature from left to right: each method reads a rule of the grammar."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._position = 0
        # Of each name or size, whether it may be missing.
        self._optional: dict[str, bool] = {}

    def read(self) -> tuple[Lists, Lists]:
        arguments: list[Dimensions] = []
        if self._peek() != "->":
            arguments = self._lists()
        self._take("->", "',' or '->'")
        results = self._lists()
        if self._peek():
            self._fail("',' or the end")
        return tuple(arguments), tuple(results)

    def _lists(self) -> list[Dimensions]:
        lists = [self._list()]
        while self._peek() == ",":
            self._take(",", "','")
            lists.append(self._list())
        return lists

    def _list(self) -> Dimensions:
        self._take("(", "'('")
        dimensions: list[Dimension] = []
        if self._peek() != ")":
            dimensions.append(self._dimension())
            while self._peek() == ",":
                self._take(",", "','")
                dimensions.append(self._dimension())
        self._take(")", "',' or ')'")
        return tuple(dimensions)

    def _dimension(self) -> Dimension:
        word = self._peek()
        if not re.fullmatch(r"\w+", word):
            self._fail("a dimension's name or size")
        self._take(word, "")  # it was seen, so that nothing else is expected
        optional = self._peek() == "?"
        # As in NumPy: a name that is missing in one place has no size in another.
        if self._optional.setdefault(word, optional) != optional:
            self._fail(
                "',' or ')'" if optional else "'?'",
                f" {word} has '?' in one place and none in another. Write it in all or"
                " in none",
            )
        if optional:
            self._take("?", "")
        # NEP 20 has "|1" too. NumPy alone can hand such an argument on as it is: here
        # it would have to be repeated, which the function around it does as well.
        if self._peek() == "|":
            self._fail(
                "',' or ')'",
                " A dimension that broadcasts, as in (n|1), is read by NumPy alone:"
                " broadcast that argument yourself, in a function around this one",
            )
        if word.isdigit():
            return Dimension("", int(word), optional)
        return Dimension(word, None, optional)

    def _peek(self) -> str:
        """The next token; "" at the end; the next character if that starts none."""
        token = _TOKEN.match(self._text, self._position)
        if token is None:
            return self._text[self._position :].strip()[:1]
        return token[1]

    def _take(self, wanted: str, expected: str) -> None:
        token = _TOKEN.match(self._text, self._position)
        if token is None or token[1] != wanted:
            self._fail(expected)
        self._position = token.end()

    def _fail(self, expected: str, advice: str = "") -> NoReturn:
        rest = self._text[self._position :]
        # Messages count columns from 1, and point behind blanks.
        blanks = len(rest) - len(rest.lstrip())
        column = self._position + blanks + 1
        got = repr(self._peek()) if rest.strip() else "the end"
        raise SpecError(
            f"hostcall: result={self._text!r} of `{self._name}` can't be read at column"
            f" {column}: expected {expected}, found"
            f" {got}.{advice or f' Write {_FORM}'}",
            code="hc-result-spec",
        )


@functools.lru_cache(maxsize=256)  # `hc.call` is given the text in each trace
def parsed(text: str, name: str) -> tuple[Lists, Lists]:
    return _Reader(text, name).read()
