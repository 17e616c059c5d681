"""A function with its trees, as all equations and all plans have it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any

from hostcall import _jax
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
        looked: what hostcall knows of it, if the face has looked.
        function: the function itself.
        seen: what hostcall knows of it.
        name: by which messages call it.
        shown: by which statistics and profiles call it.
        lasting_tag: the tag, if it is among the first of the process, or else None.
        counted_as: under which name its calls are counted; see `costs`.
    """

    fn: Opaque
    template: Template = field(hash=False)
    results: Results = field(hash=False)
    fills: tuple[bytes | None, ...] = field(hash=False)
    options: PlaceOptions = field(hash=False)
    place: Place = field(compare=False)
    policy: Policy = field(default=Policy(), hash=False)
    traced: _jax.Traced | None = field(default_factory=_jax.traced_here, hash=False)
    looked: InitVar[CallableFacts | None] = None
    function: Callable[..., Any] = field(init=False, compare=False)
    seen: CallableFacts = field(init=False, compare=False)
    name: str = field(init=False, compare=False)
    shown: str = field(init=False, compare=False)
    lasting_tag: str | None = field(init=False, compare=False)
    counted_as: str = field(init=False, compare=False)

    def __post_init__(self, looked: CallableFacts | None) -> None:
        function = self.fn.value
        tag = self.options.tag
        seen = looked or inspect_callable(function)
        if tag is not None and len(_tags) < _MOST_TAGS:
            _tags[tag] = None
        vars(self).update(function=function, seen=seen, name=seen.name)
        lasting = tag if tag in _tags else None
        vars(self).update(shown=tag or seen.name, lasting_tag=lasting)
        vars(self).update(counted_as=lasting or seen.source)

    @property
    def label(self) -> str:
        """The name and line by which profilers show its calls."""
        name = self.shown.rsplit("<locals>.", 1)[-1]
        return f"{name} ({os.path.basename(self.place.file)}:{self.place.line})"

    def described(self) -> str:
        return f"`{self.name}`, called at {self.place}"

    def __repr__(self) -> str:
        return self.name
