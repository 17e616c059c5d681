"""Reports the programs that a thread dispatches, when it dispatches them.

JAX dispatches in two ways. The first call of a program, and every call of a program
with effects, goes through Python (`tell_of_dispatches` wraps that). Other calls take
JAX's fast path in C++, which calls a hook (`POST_HOOK`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import api as _api
from jax._src import dispatch as _dispatch
from jax._src.interpreters import pxla as _pxla

from hostcall._jax.effects import _is_same

# JAX calls `hook(function, args, kwargs, results)` after each dispatch on its fast
# path. A thread's own hook replaces the process's hook, which `jax.debug_nans` sets.
POST_HOOK = _api._post_hook_state

_telling = threading.Lock()
_is_telling = False


def tell_of_dispatches(tell: Callable[[Sequence[Any], Sequence[Any]], None]) -> None:
    """Calls `tell(results, tokens)` after each dispatch that JAX makes in Python.

    Those are the first dispatch of each program, and every dispatch of a program with
    effects. Only the first call in a process has an effect.

    `tokens` are those of the program's effects. They are passed along because JAX keeps
    only the newest ones, and replaces them at the next dispatch.
    """
    global _is_telling
    if _is_telling:
        return
    with _telling:  # two threads may come here at once; wrap only once
        if _is_telling:
            return
        plain = _pxla.ExecuteReplicated.__call__

        @functools.wraps(plain)
        def call(self: Any, *args: Any) -> Any:
            results = plain(self, *args)
            tell(results, _tokens_of(self))
            return results

        _pxla.ExecuteReplicated.__call__ = call
        _is_telling = True


def _tokens_of(program: Any) -> list[Any]:
    """The tokens that `program` left when the calling thread has just dispatched it."""
    if not (
        program.has_unordered_effects
        or program.ordered_effects
        or program.has_host_callbacks
    ):
        return []
    tokens = _dispatch.runtime_tokens
    found = [tokens.output_runtime_tokens.get(d) for d in program._local_devices]
    # A scan, not a look-up: a look-up calls the effect's `__hash__`, which drops the
    # token of a failed program (see `drop_failed_token`).
    for effect, token in list(tokens.current_tokens.items()):
        if any(_is_same(effect, ordered) for ordered in program.ordered_effects):
            found.append(token)
    return [token for token in found if token is not None]
