"""Which programs are rewritten: those that a thread lowers inside of its blocks.

A block (`rewritten_by`) has uses, which are shown each program that its thread lowers,
and put something into it (rewriting.py). The first block has JAX ask this file about
each program (patches.py). What was compiled before a block is kept, and found again
after it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from hostcall._jax import types as _t
from hostcall._jax.devices import back_ends_started
from hostcall._jax.door import util as _util
from hostcall._jax.execution import ExecutionGuard
from hostcall._jax.fast_dispatch import is_for_export
from hostcall._jax.installing import install, lost
from hostcall._jax.needs import Part
from hostcall._jax.patches import When
from hostcall._jax.rewriting import Level, Use, rewritten

# A thread's open blocks, each with its uses.
_Blocks: TypeAlias = Sequence[Mapping[Hashable, Use]]


class _Rewriting(ExecutionGuard):
    """How the programs are rewritten that a thread lowers.

    It is the thread's value of `jax_no_execution`, which is part of the keys of JAX's
    caches. So programs that were compiled before are kept and found again after.

    JAX hashes and compares this value in each dispatch. Methods for that would cost a
    dispatch some microseconds, so blocks with equal keys share one object, and objects
    are equal if they are the same.
    """

    def __init__(self, uses: Mapping[Hashable, Use], hidden_value: object) -> None:
        super().__init__(hidden_value=hidden_value)
        self.uses = uses


# Those that a cache of JAX's or a thread has, by the hidden value and the uses' keys.
_shared = weakref.WeakValueDictionary[tuple[Hashable, ...], _Rewriting]()


class _Thread(threading.local):
    """The open blocks of a thread, for each value that they have made its own: a host
    function has another one, and its thread may be inside of other blocks.
    """

    def __init__(self) -> None:
        self.blocks: dict[_Rewriting, _Blocks] = {}


_thread = _Thread()


def _here() -> tuple[_Rewriting | None, object]:
    """How this thread rewrites programs, if it does, and its value without that."""
    value = jax.no_execution.get_local()
    if isinstance(value, _Rewriting):
        return value, value.hidden_value
    return None, value


def _blocks_here() -> _Blocks:
    rewriting, _ = _here()
    return () if rewriting is None else _thread.blocks.get(rewriting, ())


def _uses_here() -> Mapping[Hashable, Use]:
    rewriting, _ = _here()
    return {} if rewriting is None else rewriting.uses


def _set_blocks(blocks: _Blocks) -> None:
    before, hidden_value = _here()
    if before is not None:
        _thread.blocks.pop(before, None)
    if not blocks:
        jax.no_execution.set_local(hidden_value)
        return
    uses = {key: use for block in blocks for key, use in block.items()}
    key = hidden_value, *uses
    new = _shared.setdefault(key, _Rewriting(uses, hidden_value))
    _thread.blocks[new] = blocks
    jax.no_execution.set_local(new)


@contextlib.contextmanager
def rewritten_by(uses: Mapping[Hashable, Use]) -> Iterator[None]:
    """A block in which the programs that the calling thread lowers are rewritten, also
    by these uses. Uses with equal keys put the same into a program.

    Tasks or generators that interleave may leave blocks out of order.
    """
    install(When.OBSERVE)
    _set_blocks((*_blocks_here(), uses))
    try:
        yield
    finally:
        _set_blocks([b for b in _blocks_here() if b is not uses])


@contextlib.contextmanager
def not_rewritten() -> Iterator[None]:
    """A block in which the calling thread's programs are left alone."""
    blocks = _blocks_here()
    _set_blocks(())
    try:
        yield
    finally:
        _set_blocks(blocks)


def requiring_devices(needs: Callable[..., Any]) -> Callable[..., bool]:
    @functools.wraps(needs)
    def needs_devices(jaxpr: _t.Jaxpr) -> bool:
        # What is put into a program may need its devices, which JAX finds out before.
        # A program that is only lowered may have none.
        caller = sys._getframe(1)
        if _blocks_here() and caller.f_locals.get("device_assignment") is not None:
            return True
        return bool(needs(jaxpr))

    return needs_devices


def lowering_rewritten(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Has JAX lower programs as the block around wants them."""

    @_util.weakref_lru_cache
    def lowered(jaxpr: _t.Jaxpr, *args: object, **options: object) -> object:
        uses = _uses_here()
        if uses and not is_for_export(options):
            jaxpr = rewritten(jaxpr, list(uses.values()))
        return plain(jaxpr, *args, **options)

    return lowered  # type: ignore[no-any-return]


class _Looker:
    """A use that only notes whether it is shown a program."""

    is_shown = False

    def look(self, level: Level) -> tuple[()]:
        del level
        self.is_shown = True
        return ()


def shows_programs() -> bool:
    """Whether this JAX asks here about the programs that it lowers.

    It is not asked to lower one before it has devices, which the caller may still
    choose. Till then, that it has the function which is replaced has to do.
    """
    install(When.OBSERVE)
    if lost(Part.OBSERVE) or not back_ends_started():
        return not lost(Part.OBSERVE)
    return _shows_one()


@functools.cache
def _shows_one() -> bool:
    looker = _Looker()
    with rewritten_by({looker: looker}):
        jax.jit(lambda x: x).lower(0.0)
    return looker.is_shown
