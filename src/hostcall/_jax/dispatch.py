"""The dispatches of programs and the reports of failed ones: who hears of them, and the
order of ordered ones.

JAX dispatches in two ways. The first call of a program, and every call of a program
with tokens, goes through Python (`ExecuteReplicated.__call__`, which is wrapped here).
Other calls take JAX's fast path in C++, which calls a hook (`POST_HOOK`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
from jax._src import api as _api
from jax._src import dispatch as _dispatch
from jax._src.interpreters import pxla as _pxla

from hostcall._jax.fast_dispatch import marks, run_nothing
from hostcall._jax.types import Executable, Token

# (results, tokens) of a dispatch.
Tell: TypeAlias = Callable[[Sequence[jax.Array], Sequence[Token]], None]

# What JAX raises for a program that failed: JaxRuntimeError, and ValueError on its fast
# path. hostcall turns the ValueError into a JaxRuntimeError (native/base/report.h),
# except, on Python 3.11, under a debugger or where a thread of XLA's made the call.
REPORTS = (jax.errors.JaxRuntimeError, ValueError)

# JAX calls `hook(function, args, kwargs, results)` after each dispatch on its fast
# path. A thread's own hook replaces the process's hook, which `jax.debug_nans` sets.
POST_HOOK = _api._post_hook_state

_tells: set[Tell] = set()


def tell_of_dispatches(tell: Tell) -> None:
    """From now on, `tell(results, tokens)` is called after each dispatch that JAX makes
    in Python.

    Those are the first dispatch of each program, and every dispatch of a program with
    tokens.

    `tokens` are those of the program's effects. They are passed along because JAX keeps
    only the newest ones, and replaces them at the next dispatch.
    """
    _tells.add(tell)


def _tokens_of(program: Executable) -> list[Token]:
    """The tokens that `program` left when the calling thread has just dispatched it."""
    if not (
        program.has_unordered_effects
        or program.ordered_effects
        or program.has_host_callbacks
    ):
        return []
    tokens = _dispatch.runtime_tokens
    found = [tokens.output_runtime_tokens.get(d) for d in program._local_devices]
    return [token for token in found if token is not None] + _ordered_tokens_of(program)


def _ordered_tokens_of(program: Executable) -> list[Token]:
    held = _dispatch.runtime_tokens.current_tokens
    return [held[effect] for effect in program.ordered_effects if effect in held]


# --- Order between programs over one device and over several --------------------------


def wrap_dispatches(
    quietly: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Tells of dispatches, and keeps ordered programs over several CPU devices in order
    with those over one.

    A program over several is not behind the thread's last one, nor is the next one
    behind it (see fast_dispatch.py). So those before it are waited for, and on each
    device a program that does nothing is dispatched after its token.

    `quietly`: inside it, errors that JAX makes do not count as told.
    """
    plain = _pxla.ExecuteReplicated.__call__

    @functools.wraps(plain)
    def call(self: Executable, *args: jax.Array) -> list[jax.Array]:
        devices = self._local_devices
        alone = len(devices) == 1 or devices[0].platform != "cpu"
        if alone or not self.ordered_effects:
            results: list[jax.Array] = plain(self, *args)
        else:
            with quietly():
                for mark in marks():
                    mark.block_until_ready()
            results = plain(self, *args)
            # Of a program that has failed already there is nothing to wait for.
            with quietly(), contextlib.suppress(*REPORTS):
                for token in _ordered_tokens_of(self):
                    for part in token._buf.addressable_shards:
                        run_nothing(part.device, part.data)
        for tell in list(_tells):
            tell(results, _tokens_of(self))
        return results

    _pxla.ExecuteReplicated.__call__ = call


# --- Reports --------------------------------------------------------------------------


def tell_of_reports(tell: Callable[[str], None]) -> None:
    """Calls `tell(text)` whenever a JaxRuntimeError is made.

    If `tell` raises, that exception replaces the JaxRuntimeError. jaxlib's C++ makes
    the error on the thread that reads the result, and the constructor of the class is
    the only Python code that it runs on the way.
    """
    plain = jax.errors.JaxRuntimeError.__init__

    def init(self: jax.errors.JaxRuntimeError, *args: object) -> None:
        plain(self, *args)
        if args and isinstance(args[0], str):
            tell(args[0])

    jax.errors.JaxRuntimeError.__init__ = init  # type: ignore[method-assign]
