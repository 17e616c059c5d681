"""A function with its trees, as all equations and all plans have it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hostcall import _jax
from hostcall._core.identity import FOLLOWS
from hostcall._core.options import PlaceOptions, Policy
from hostcall._core.source import CallableFacts, Place, inspect_callable
from hostcall._core.spec import Opaque, Results, Template

# Rows of statistics and places of events have names, which live as long as the process.
# A program with ever-new tags (f"step {i}") must not use more and more memory. Changed
# in single steps, without a lock.
_MOST_TAGS = 4096
_tags: dict[str, None] = {}


@dataclass(frozen=True, repr=False)
class CallSpec:
    """A function, how it gets its arguments, and what it returns.

    Its hash is the function's, since JAX asks for it in each trace. Calls of a function
    that differ otherwise are told apart by comparing them.

    Attributes:
        fn: the function, compared as `Opaque` compares.
        template: how to rebuild (args, kwargs) from arrays.
        results: the structure, shapes and dtypes of what it returns.
        fills: for each result, the bytes that a masked row gets, or None for zeros.
        options: of the place that calls it.
        place: the user's line that wrote the call. It is not compared, so equal calls
            on two lines trace to equal programs.
        policy: how the function is run.
        traced: the settings of JAX under which it was traced, so that the function
            runs under them on any thread; None if they were the process's own.
        known: what hostcall knows of the function, if the face has looked already: to
            look takes microseconds, and each eager call does. It follows from `fn`, so
            it takes no part in any comparison.
    """

    fn: Opaque
    template: Template = field(hash=False)
    results: Results = field(hash=False)
    fills: tuple[bytes | None, ...] = field(hash=False)
    options: PlaceOptions = field(hash=False)
    place: Place = field(compare=False)
    policy: Policy = field(default=Policy(), hash=False)
    traced: _jax.Traced | None = field(default_factory=_jax.traced_here, hash=False)
    known: CallableFacts | None = field(default=None, compare=False, metadata=FOLLOWS)

    def __post_init__(self) -> None:
        tag = self.options.tag
        if tag is not None and len(_tags) < _MOST_TAGS:
            _tags[tag] = None

    @property
    def function(self) -> Callable[..., Any]:
        return self.fn.value  # type: ignore[no-any-return]

    @property
    def facts(self) -> CallableFacts:
        """What hostcall knows of the function."""
        return self.known or self._facts

    @functools.cached_property
    def _facts(self) -> CallableFacts:
        return inspect_callable(self.function)

    @property
    def name(self) -> str:
        """By which messages call it."""
        return self.facts.name

    @property
    def shown(self) -> str:
        """By which statistics and profiles call it."""
        return self.options.tag or self.name

    @property
    def lasting_tag(self) -> str | None:
        """The tag, if it is among the first of the process, or else None."""
        tag = self.options.tag
        return tag if tag in _tags else None

    @property
    def counted_as(self) -> str:
        """Under which name its calls are counted; see `costs`."""
        return self.lasting_tag or self.facts.source

    @property
    def label(self) -> str:
        """The name and line by which profilers show its calls."""
        _, _, name = self.shown.rpartition("<locals>.")
        file = os.path.basename(self.place.file)
        return f"{name} ({file}:{self.place.line})"

    def described(self) -> str:
        return f"`{self.name}`, called at {self.place}"

    def __repr__(self) -> str:
        return self.name
