"""`hc.watch`: looks for bad values while a compiled program runs.

The check is part of the program. Where it fails, a masked call (`hc.call(where=...)`)
brings the values to the host and raises `WatchError`; elsewhere the engine passes the
call without Python. The engine also counts the executions of the call (`call_counted`).
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import hostcall as hc
from hostcall._api.call import call_counted
from hostcall._core.host_code import HostCode, text_of
from hostcall._core.suggestions import suggests
from hostcall.errors import SpecError, WatchError
from hostcall.tools._traced_lines import UserLine, users_lines
from hostcall.tools._values import (
    ARRAYS,
    need,
    without_derivative,
    wrong,
)

logger = logging.getLogger("hostcall")

T = TypeVar("T")
Check = Literal["finite"] | Callable[[Any], jax.Array]
Action = Literal["raise", "log"] | Callable[[WatchError], object]


# Options that it had once, and what to write instead.
_GONE = {
    "keep": "hc.Recorder beside the watch records what was before (the page 'Watches'"
    " shows it)"
}


@suggests("hc.watch", gone=_GONE)
def watch(
    x: T,
    check: Check = "finite",
    *,
    also: Any = None,
    action: Action = "raise",
    where: ArrayLike | None = None,
    cotangents: bool = False,
    name: str | None = None,
) -> T:
    """Returns `x`, and ends the program with a `WatchError` if `x` is bad.

    Call it anywhere in a program, or outside of one:

        def body(carry, batch):
            carry = hc.watch(update(carry, batch), also=batch)
            return carry, None

    The error has the bad values (`.values`), `also` (`.also`), and where it was
    (`.step`, `.row`, `.device`, `.place`). Its method `save(path)` writes them to a
    file, and `hc.tools.load_failure(path)` reads it. What was before is recorded by
    `hc.Recorder` beside the watch.

    Args:
        x: a pytree of arrays and numbers.
        check: "finite": no floating or complex number in `x` is nan or infinite. Or a
            function of `x`, in JAX, whose result is a bool scalar: False is bad.
        also: another pytree that the error should have, such as the inputs of `x`. Its
            leaves may be of any type.
        action: "raise": the program ends with the error. "log": the logger "hostcall"
            gets its text, the first three times and then after each tenfold number, and
            the program goes on. A function is called
            with the error, which it may raise; else the program goes on.
        where: a bool scalar. If it is False, the check counts as passed. Under vmap
            each row has its own.
        cotangents: checks the cotangents of `x` as well, each time reverse-mode
            differentiation reaches this place. JAX then refuses forward mode here.
        name: what messages call `x`. Default: "x".

    Returns:
        `x` itself. The watch is never removed, whether or not the result is used.

    Raises:
        SpecError: an argument is invalid, or nothing in `x` can be checked.
        WatchError: `x` is bad. A compiled program raises it where JAX raises the
            JaxRuntimeError of a failed callback: at the call of the jitted function, or
            where a result is first read.

    Under transformations:
        jit, scan, while_loop, fori_loop, cond, map: checks each time it is reached.
        vmap: each row is checked, and the first bad one raises, with its values. For
            cond and while_loop, JAX computes all branches for all rows: pass the
            condition as `where=` too.
        jvp, grad: the primal value is checked; for others see `cotangents`.
        checkpoint: the forward pass checks, the recomputation does not.
        shard_map: each device checks its shard. If one is bad, all fail together.
        jit over sharded arrays: `x` and `also` are gathered in each execution, so that
            one device can hand them over; watch a norm there, or inside shard_map.

    Cost: the check, and about 0.2 us on a CPU; more if XLA then can't fuse what
    computes `x`. Like any call that is not pure, it costs the program JAX's fast
    dispatch (about 50 us a dispatch instead of 4). Results are the same, but for about
    one rounding (1 ulp of a product that is watched): XLA no longer fuses it into a
    multiply-add (FMA), and a loop carries such a difference on.
    """
    _check_options(check, action, name)
    # JAX calls the backward rule later, when this line is not on the stack any more.
    lines = users_lines() if cotangents else ()
    fired = _Fired(name or "x", check, action, lines)
    _look(x, also, where, fired)
    return _with_cotangents(fired, x) if cotangents else x


def load_failure(path: str | os.PathLike[str]) -> WatchError:
    """Reads a file that `WatchError.save` wrote. No code in the file is run.

    Args:
        path: the file.

    Returns:
        The error, with the same attributes, to look at or to raise. Dicts, lists and
        tuples come back as they were; a namedtuple, a dataclass or another node of a
        pytree as a dict of its fields. `.device` is a name.

    Raises:
        SpecError: the file is of another kind, damaged, or of a newer hostcall.
    """
    return WatchError.load(path)


# --- In the program -------------------------------------------------------------------


def _look(x: Any, also: Any, where: ArrayLike | None, fired: _Fired) -> None:
    """Puts the check and the call into the program."""
    # The call has no derivative, and needs none: nothing comes back from it.
    x, also = without_derivative((x, also))
    bad = ~_passes(x, fired)
    if where is not None:
        bad &= where
    call_counted(fired, bad, x, also)


def _passes(x: Any, fired: _Fired) -> jax.Array:
    """Whether all is well with `x`: a bool scalar of the program."""
    if fired.check == "finite":
        return _is_finite(x, fired)
    try:
        passes = jnp.asarray(fired.check(x))
    except _WANTS_NUMBERS as error:
        # JAX's own message speaks of jit, which the user may not have written here.
        raise wrong(
            f"check= of hc.watch({fired.name}) is part of the program, and"
            f" `{fired.called}` used a traced value as a number, as bool(), float(),"
            " `if` and NumPy do. Write it with jnp, and let it return a bool scalar"
            " that is computed: lambda x: jnp.isfinite(x).all()"
        ) from error
    if passes.shape != () or passes.dtype != bool:
        raise wrong(
            f"check= of hc.watch({fired.name}) should return a bool scalar,"
            f" got {passes.dtype}{list(passes.shape)}. Reduce it with jnp.all, for"
            " example"
        )
    return passes


def _is_finite(x: Any, fired: _Fired) -> jax.Array:
    leaves = jax.tree.leaves(x)
    finite = [jnp.isfinite(leaf).all() for leaf in leaves if _can_be_bad(leaf)]
    if finite:
        return functools.reduce(jnp.logical_and, finite)
    # A check that can never fail is a mistake: often of a dtype, so the text names it.
    kinds = set()
    for leaf in leaves:
        is_array = isinstance(leaf, ARRAYS)
        kinds.add(str(leaf.dtype) if is_array else type(leaf).__name__)
    raise SpecError(
        f"hostcall: nothing in hc.watch({fired.name}) can be nan or infinite: it"
        f" has {', '.join(sorted(kinds)) or 'no leaves'}. Give floating or complex"
        " arrays, or a function as check="
    )


# What JAX raises if Python or NumPy wants the number of a traced value.
_WANTS_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _with_cotangents(fired: _Fired, x: T) -> T:
    """`x`, whose cotangent is looked at in the backward pass."""
    fired_by_cotangent = replace(fired, name=f"cotangent of {fired.name}")

    def backward(_: None, cotangent: T) -> tuple[T]:
        _look(cotangent, also=None, where=None, fired=fired_by_cotangent)
        return (cotangent,)

    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), backward)
    result: T = identity(x)
    return result


# --- On the host ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Fired(HostCode):
    """The function of the call. Equal for equal lines, so that JAX's caches hit.

    Attributes:
        name: what messages call the watched value.
        check, action: as in `hc.watch`.
        lines: the user's lines that called `hc.watch`, if the backward pass, which has
            none of them, may make the call; the innermost first.
    """

    name: str
    check: Check
    action: Action
    lines: tuple[UserLine, ...] = ()
    stays = (
        "hc.watch raises its error in this process, with this source. Leave it out, or"
        " return the check as a result of the program"
    )

    @property
    def __name__(self) -> str:
        return f"hc.watch({self.name})"

    @property
    def called(self) -> str:
        """The name of the user's check."""
        return text_of(self.check, "__qualname__") or repr(self.check)

    def place(self) -> tuple[str, int, str] | None:
        if not self.lines:
            return None
        innermost = self.lines[0]
        return innermost.file, innermost.line, innermost.function

    def __call__(self, values: Any, also: Any) -> None:
        current = hc.current()
        assert current is not None, "programs call this"
        error = WatchError(
            "\n".join(self._text(values, current)),
            values=values,
            also=also,
            step=current.execution or 0,
            row=current.row,
            device=current.device,
            place=current.place,
            name=self.name,
        )
        if self.action == "raise":
            raise error
        if self.action == "log":
            _log(self, error)
        else:
            self.action(error)

    def _text(self, values: Any, current: hc.typing.Current) -> Iterator[str]:
        """The lines of a WatchError's text."""
        finite = self.check == "finite"
        fault = "is not finite" if finite else "did not pass its check"
        row = ""
        if current.row:
            index = current.row[0] if len(current.row) == 1 else current.row
            row = f", in row {index}"
        device = "" if current.device is None else f", on {current.device}"
        yield (
            f"hostcall: {self.name} {fault} at step {current.execution or 0}"
            f" (executions of this place in this run, from 0){row}{device}; watched at"
            f" {current.place}"
        )
        if not finite:
            yield f"  The check is `{self.called}`."
        # With a check of the user's too: its bad values are often these.
        leaves, _ = jax.tree_util.tree_flatten_with_path(values)
        lines = [_bad_values(self.name, path, leaf) for path, leaf in leaves]
        lines = [line for line in lines if line]
        yield from lines[:_LEAVES_AT_MOST]
        if len(lines) > _LEAVES_AT_MOST:
            yield f"  and {len(lines) - _LEAVES_AT_MOST} more leaves"
        yield (
            "  The error's .values and .also have the arrays. Write them to a file with"
            " .save(path), and read it with hostcall.tools.load_failure(path)."
        )
        yield (
            "  To see how it came about, give inputs as also=, and record what was"
            " before with hc.Recorder."
        )


# How often each place has failed. `next` is one step for Python, so that threads whose
# programs fail at the same time need no lock.
_times: dict[tuple[str, object], itertools.count[int]] = {}


def _log(fired: _Fired, error: WatchError) -> None:
    """Logs the first three times, and then 10, 100, 1000: a loop may fail each step."""
    counter = _times.setdefault((fired.name, error.place), itertools.count(1))
    count = next(counter)
    is_power_of_ten = str(count).rstrip("0") == "1"
    if count <= 3 or is_power_of_ten:
        logger.warning("%s [time %d at this place]", error, count)


# --- Texts about bad values, and about wrong arguments --------------------------------

_ACTIONS = ("raise", "log")
_LEAVES_AT_MOST = 8  # that the text of an error describes


def _bad_values(name: str, path: Any, leaf: object) -> str:
    """A line on what is not finite in a leaf, or an empty text."""
    if not _can_be_bad(leaf):
        return ""
    array = np.asarray(leaf)
    bad = ~np.isfinite(array)
    if not bad.any():
        return ""
    if array.ndim:
        index = np.argwhere(bad)[0].tolist()
        value = array[tuple(index)]
        text = f"{bad.sum()} of {array.size} numbers, the first is {value} at {index}"
    else:
        text = f"{array[()]}"
    kind = f"{array.dtype}{list(array.shape)}"
    return f"  {name}{jax.tree_util.keystr(path)}: {text} ({kind})"


def _check_options(check: object, action: object, name: object) -> None:
    is_check = check == "finite" or callable(check)
    wanted = '"finite" or a function of the tree that returns a bool'
    need(is_check, f"check= of hc.watch should be {wanted}", check)
    is_action = action in _ACTIONS or callable(action)
    wanted = f"one of {', '.join(map(repr, _ACTIONS))} or a function of the error"
    if action == "breakpoint":  # an action that it had once
        wanted += ", such as lambda error: breakpoint()"
    need(is_action, f"action= of hc.watch should be {wanted}", action)
    is_name = name is None or isinstance(name, str)
    need(is_name, "name= of hc.watch should be a str", name)


def _can_be_bad(leaf: object) -> bool:
    """Whether a leaf has numbers that may be nan or infinite. It may also be a text, an
    object, or an array that JAX does not take, which hc.call passes on.
    """
    # JAX takes no numbers in the other byte order. JAX 0.9.0 has a dtype for them.
    if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
        return False
    try:
        return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    except TypeError:
        return False
