"""What a thread dispatches, told as it happens."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import api as _api
from jax._src import dispatch as _dispatch
from jax._src.interpreters import pxla as _pxla

from hostcall._jax.effects import _is_same

# --- What a thread dispatches (_reraise) ---------------------------------------------

# `hook(function, args, kwargs, results)` after each dispatch on JAX's fast path. The
# calling thread's own stands in for the process's, which `jax.debug_nans` sets.
POST_HOOK = _api._post_hook_state

_telling = threading.Lock()
_is_telling = False


def tell_of_dispatches(tell: Callable[[Sequence[Any], Sequence[Any]], None]) -> None:
    """From now on calls `tell(results, tokens)` after each dispatch that JAX makes in
    Python: the first of each program, and all of those with effects. Once a process.

    Tokens are those of effects, for JAX forgets them when the next program comes.
    """
    global _is_telling
    if _is_telling:
        return
    with _telling:
        if _is_telling:
            return
        _is_telling = True
        plain = _pxla.ExecuteReplicated.__call__

        @functools.wraps(plain)
        def call(self: Any, *args: Any) -> Any:
            results = plain(self, *args)
            tell(results, _tokens_of(self))
            return results

        _pxla.ExecuteReplicated.__call__ = call


def _tokens_of(program: Any) -> list[Any]:
    """Those that the calling thread's last dispatch of a program has left."""
    if not (
        program.has_unordered_effects
        or program.ordered_effects
        or program.has_host_callbacks
    ):
        return []
    tokens = _dispatch.runtime_tokens
    found = [tokens.output_runtime_tokens.get(d) for d in program._local_devices]
    # Not by look-up, for the sake of hashes that heal (see `drop_failed_token`).
    for effect, token in list(tokens.current_tokens.items()):
        if any(_is_same(effect, ordered) for ordered in program.ordered_effects):
            found.append(token)
    return [token for token in found if token is not None]
