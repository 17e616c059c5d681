"""What a thread has dispatched: who hears of it, in which order it runs, and how it is
waited for.

JAX dispatches in two ways. The first call of a program, and every call of a program
with tokens, goes through Python (`ExecuteReplicated.__call__`, which is wrapped here;
patches.py has all that is).
Other calls take JAX's fast path in C++, which calls a hook (`POST_HOOK`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.interpreters import mlir as _mlir
from jaxlib.mlir import ir as _ir

from hostcall import _native
from hostcall._jax.devices import explicit_transfer
from hostcall._jax.door import api as _api
from hostcall._jax.door import compiler as _compiler
from hostcall._jax.door import core as _core
from hostcall._jax.door import dispatch as _dispatch
from hostcall._jax.door import pxla as _pxla
from hostcall._jax.door import xla_client as _xla_client
from hostcall._jax.signs import leaves_sign, take_sign
from hostcall._jax.types import Device, Effect, Executable, Token

# What JAX raises for a program that failed: JaxRuntimeError, and ValueError on its fast
# path. hostcall turns the ValueError into a JaxRuntimeError (native/base/report.h),
# except, on Python 3.11, under a debugger or where a thread of XLA's made the call.
REPORTS = (jax.errors.JaxRuntimeError, ValueError)

# --- Programs that do nothing -------------------------------------------------------
#
# XLA runs one behind what the thread has dispatched to its device before, and behind
# the tokens that it gets. It needs one of the device's 32 places, which may all be
# waiting in callbacks, so a wait dispatches none, but for `wait_for_all_on`.


def run_nothing(device: Device, *tokens: Token) -> Token:
    """Dispatches a program that does nothing, after these tokens; returns its own."""
    operands = ", ".join(f"%{i}: tensor<0xi1>" for i in range(len(tokens)))
    program = _compiled(f"func.func public @main({operands})", device)
    return program.execute_sharded(list(tokens), with_tokens=True).consume_token()


@functools.cache
def _compiled(main: str, device: Device) -> _xla_client.LoadedExecutable:
    options = _compiler.get_compile_options(
        1, 1, np.array([[device]]), backend=device.client
    )
    with _mlir.make_ir_context(), _ir.Location.unknown():
        return _compiler.backend_compile_and_load(
            device.client,
            _ir.Module.parse(f"module @nothing {{ {main} {{ return }} }}"),
            _pxla._create_device_list((device,)),
            options,
            [],
        )


# --- Waits ----------------------------------------------------------------------------


def wait_for_programs() -> None:
    """Waits for the programs without tokens that this thread has dispatched."""
    handlers.wait()


def wait_for_all_on(device: Device) -> None:
    """Waits for all that this thread has dispatched to a CPU device.

    It needs a free place of the device, and is for programs whose results are gone.
    """
    run_nothing(device).block_until_ready()


def tokens() -> list[Token]:
    """What is ready when the programs with tokens have ended that this thread has
    dispatched.
    """
    latest = _dispatch.runtime_tokens
    return [*latest.current_tokens.values(), *latest.output_runtime_tokens.values()]


def forget_all_tokens() -> None:
    """For a forked child, in which no program ends."""
    _dispatch.runtime_tokens.clear()


def wait_for_effects(
    is_failure: Callable[[BaseException], bool] = lambda error: False,
) -> list[BaseException]:
    """Waits for the programs with effects that this thread has dispatched.

    Unlike `jax.effects_barrier`, which in 0.10.2 stops at the first failed program and
    fails on the same one at the next wait, this waits for all of them.

    Args:
        is_failure: whether a KeyboardInterrupt or SystemExit raised by the wait is a
            callback's own exception. Any other one is raised.

    Returns:
        The exceptions that programs with tokens failed with, each once.
    """
    wait_for_programs()
    # By its text: each token of a failed program raises an object of its own.
    by_text: dict[str, BaseException] = {}
    for token in tokens():
        try:
            token.block_until_ready()
        except (KeyboardInterrupt, SystemExit, jax.errors.JaxRuntimeError) as error:
            # A Ctrl-C of the user ends the wait; one that a callback raised is what
            # its program failed with.
            if not (isinstance(error, Exception) or is_failure(error)):
                raise
            by_text.setdefault(str(error), error)
    _dispatch.runtime_tokens.clear()
    return list(by_text.values())


def is_token_ready(token: object) -> bool:
    """Whether an ordered effect's token is ready; False for other tokens, which JAX
    gives no way to ask.
    """
    return isinstance(token, _core.Token) and bool(token._buf.is_ready())


def forget_tokens(forgotten: Sequence[Token]) -> None:
    """Removes these tokens from those that JAX's next wait for effects waits for."""
    tokens = _dispatch.runtime_tokens
    ids = set(map(id, forgotten))
    for latest in (tokens.output_runtime_tokens, tokens.current_tokens):
        remaining = [(key, t) for key, t in list(latest.items()) if id(t) not in ids]
        if len(remaining) < len(latest):
            latest.clear()
            latest.update(remaining)


# --- Who hears of a dispatch ----------------------------------------------------------

# What is called with the results and tokens of a dispatch.
Listener: TypeAlias = Callable[[Sequence[jax.Array], Sequence[Token]], None]

# JAX calls `hook(function, args, kwargs, results)` after each dispatch on its fast
# path. A thread's own hook replaces the process's hook, which `jax.debug_nans` sets.
POST_HOOK = _api._post_hook_state

_listeners: set[Listener] = set()


def report_dispatches_to(listener: Listener) -> None:
    """From now on, `listener(results, tokens)` is called after each dispatch that JAX
    makes in Python. The hidden result is among the results (signs.py).

    Those are the first dispatch of each program, and every dispatch of a program with
    tokens.

    `tokens` are those of the program's effects. They are passed along because JAX keeps
    only the newest ones, and replaces them at the next dispatch.
    """
    _listeners.add(listener)


def report_dispatch(results: Sequence[jax.Array], tokens: Sequence[Token]) -> None:
    """Says that the calling thread has dispatched a program."""
    # A copy: another thread may add one meanwhile.
    for listener in list(_listeners):
        listener(results, tokens)


def _tokens_of(program: Executable) -> list[Token]:
    """The tokens that `program` left when the calling thread has just dispatched it."""
    # Without any of these it leaves none: what stands below is of an earlier program.
    if not (
        program.has_unordered_effects
        or program.ordered_effects
        or program.has_host_callbacks
    ):
        return []
    by_device = _dispatch.runtime_tokens.output_runtime_tokens
    unordered = [by_device.get(device) for device in program._local_devices]
    return [
        *(token for token in unordered if token is not None),
        *ordered_tokens_of(program),
    ]


def ordered_tokens_of(program: Executable) -> list[Token]:
    by_effect = _dispatch.runtime_tokens.current_tokens
    effects = program.ordered_effects
    return [by_effect[effect] for effect in effects if effect in by_effect]


_AS_IT_IS = contextlib.nullcontext()


@contextlib.contextmanager
def _keeping_tokens(program: Executable) -> Iterator[None]:
    """Inside, `program` is dispatched, which leaves a sign. What else it leaves goes.

    JAX takes a token from the first dispatch of such a program, since it was compiled
    with host callbacks, and from no later one that would replace it. So a failure that
    was told would be raised once more by a later `jax.effects_barrier`.
    """
    tokens = _dispatch.runtime_tokens.output_runtime_tokens
    former = {device: tokens.get(device) for device in program._local_devices}
    try:
        yield
    finally:
        # A wait in a call that ran here has made another dictionary.
        tokens = _dispatch.runtime_tokens.output_runtime_tokens
        for device, token in former.items():
            if token is None:
                tokens.pop(device, None)
            else:
                tokens[device] = token


# --- What is wrapped ------------------------------------------------------------------


class _Handlers:
    """What the functions below call, which other wings set when they are imported.

    Attributes:
        before_token: gets an effect, and its token if there is one so far, before JAX
            passes the token to the program that it dispatches.
        wait: waits for the calling thread's programs without tokens.
        first_failure: what jax.effects_barrier raises after it has waited.
        quietly: a block in which errors that JAX makes do not count as told.
        report: gets the text of each JaxRuntimeError that is made; what it raises
            replaces the error.
    """

    before_token: Callable[[Effect, Token | None], object]
    wait: Callable[[], object]
    first_failure: Callable[[], BaseException | None]
    quietly: Callable[[], contextlib.AbstractContextManager[None]]
    report: Callable[[str], object]


handlers = _Handlers()

Plain: TypeAlias = Callable[..., Any]


def telling_of_dispatch(plain: Plain) -> Plain:
    """Tells of dispatches that JAX makes in Python."""

    @functools.wraps(plain)
    def call(self: Executable, *args: jax.Array) -> list[jax.Array]:
        # The first dispatch of a program on the fast path comes here too: JAX decides
        # after it whether the next ones may skip Python.
        is_signed = leaves_sign(self)
        keeping = _keeping_tokens(self) if is_signed else _AS_IT_IS
        try:
            with keeping:
                dispatched = plain(self, *args)
        finally:  # what ran here says nothing about the thread's next program
            _native.forget_last_run()
        results, hidden = take_sign(self, dispatched)
        tokens = [] if is_signed else _tokens_of(self)
        report_dispatch([*results, *hidden], tokens)
        return results

    return call


def healing_tokens(plain: Plain) -> Plain:
    """The first token is made by a transfer. JAX makes an implicit one, which a
    transfer guard refuses; here it is explicit.
    """

    @functools.wraps(plain)
    def get_token_input(
        self: _dispatch.RuntimeTokenSet, effect: Effect, devices: Sequence[Device]
    ) -> Token:
        handlers.before_token(effect, self.current_tokens.get(effect))
        with explicit_transfer("explicit_device_put"):
            return plain(self, effect, devices)

    return get_token_input


def waiting_for_all(plain: Plain) -> Plain:
    """`jax.effects_barrier` also waits for programs without tokens, and raises what
    they have failed with.
    """

    @functools.wraps(plain)
    def block_until_ready(self: _dispatch.RuntimeTokenSet) -> None:
        wait_for_programs()
        plain(self)
        if (error := handlers.first_failure()) is not None:
            raise error

    return block_until_ready


def reporting(plain: Plain) -> Plain:
    """The C++ of jaxlib makes a JaxRuntimeError on the thread that reads the result,
    and the constructor of the class is the only Python code that it runs on the way.
    """

    def init(self: jax.errors.JaxRuntimeError, *args: object) -> None:
        plain(self, *args)
        # A user may raise one of these with anything.
        if args and isinstance(args[0], str):
            handlers.report(args[0])

    return init
