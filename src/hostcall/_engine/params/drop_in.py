"""Drop-ins run JAX's callbacks as calls; this file has what differs from plain calls.

| kind | JAX's name | results | effect | refuses |
|---|---|---|---|---|
| pure | `jax.pure_callback` | yes | none | derivatives; vmap without a method |
| io | `jax.experimental.io_callback` | yes | IO | derivatives; vmap when ordered |
| debug | `jax.debug.callback`, `jax.debug.print` | no | Debug | |

A drop-in behaves like its original and has the same messages. It uses JAX's effects,
because JAX's rules for control flow look for these. It checks results as JAX does:
first their number (in any container), then shapes and dtypes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np

from hostcall import _jax
from hostcall._core import failures
from hostcall._core.array_values import overflowed
from hostcall._core.callback import CallSpec
from hostcall._core.errors import wrong
from hostcall._core.options import CallOptions
from hostcall._core.order import Order
from hostcall._core.source import Place, is_jaxs, users_place
from hostcall._core.spec import Opaque, Results, Template
from hostcall._engine.hooks import CallHooks
from hostcall._engine.params.equation import CallParams
from hostcall._jax.types import Effect

logger = logging.getLogger("hostcall")

Kind = Literal["pure", "io", "debug"]
PRINT = "debug.print"  # the source of every print: statistics count them together

# JAX's, since its rules for control flow look for these.
_EFFECTS: dict[tuple[Kind, Order], Effect] = {
    ("io", "unordered"): _jax.IO_EFFECT,
    ("io", "ordered"): _jax.ORDERED_IO_EFFECT,
    ("debug", "unordered"): _jax.DEBUG_EFFECT,
    ("debug", "ordered"): _jax.ORDERED_DEBUG_EFFECT,
}


class DropInHooks(CallHooks):
    """The hooks of a drop-in's call, which check and log like JAX."""

    equation: DropInParams
    _warned_of_narrowing = False  # two threads may both warn

    def flatten(self, value: Any) -> list[Any]:
        leaves: list[Any] = jax.tree.leaves(value)
        if len(leaves) != len(self.equation.avals):
            raise RuntimeError(
                "Mismatched number of outputs from callback. Expected:"
                f" {len(self.equation.avals)}, Actual: {len(leaves)}"
            )
        return leaves

    def coerce(self, number: int, value: Any) -> np.ndarray:
        aval = self.equation.avals[number]
        is_array = isinstance(value, (np.ndarray, np.generic, jax.Array))
        # The engine takes a lone result for the array. It may be in a list or a dict.
        if len(self.equation.avals) == 1 and not is_array:
            (value,) = self.flatten(value)
        array = np.asarray(value)
        if self.equation.literals and array.dtype in _NARROW:
            array = self._narrow(array)
        if array.shape != aval.shape:
            raise RuntimeError(
                f"Incorrect output shape for return value #{number}: Expected:"
                f" {aval.shape}, Actual: {array.shape}"
            )
        if array.dtype != aval.dtype:
            raise RuntimeError(
                f"Incorrect output dtype for return value #{number}: Expected:"
                f" {aval.dtype}, Actual: {array.dtype}"
            )
        array = np.asarray(array, order="C")
        # The engine compares dtypes as pointers, and equal ones may be two objects.
        return array if array.dtype is aval.dtype else array.view(aval.dtype)

    def _narrow(self, array: np.ndarray) -> np.ndarray:
        """Converts to 32 bits, as JAX does outside its 64-bit mode.

        Integers may wrap around, and floats become infinite, which is logged once per
        call site.
        """
        with np.errstate(over="ignore"):
            narrow = array.astype(_NARROW[array.dtype])
        if self._warned_of_narrowing:
            return narrow
        if array.dtype.kind in "iu":
            lost = not np.array_equal(narrow, array)
            kind = "integers"
            became = "they wrapped around"
        else:
            lost = overflowed(array, narrow) is not None
            kind = "numbers"
            became = "they became infinite"
        if lost:
            self._warned_of_narrowing = True
            logger.warning(
                "`%s` returned %s that %s can't hold, and %s, as in JAX outside its"
                " 64-bit mode (called at %s). hostcall.call refuses them instead",
                self.name,
                kind,
                narrow.dtype,
                became,
                self.place,
            )
        return narrow

    def on_error(self, error: BaseException, row: tuple[int, ...]) -> str:
        with failures.beside_a_failure("logging it"):
            self.log(error)
        return super().on_error(error, row)

    def eager_error(self, error: Exception) -> Exception:
        if self.equation.kind != "debug":
            return self.error_of_programs(error)
        with failures.beside_a_failure("logging it"):
            self.log(error)
        failures.store(error, handed_over=True)
        return error

    def log(self, error: BaseException) -> None:
        name = f"jax.{self.equation.kind}_callback"
        log = _jax.callback_logger
        if self.equation.kind == "debug":
            name = "jax.debug.callback"
            log = _jax.debug_logger
        log.error("%s failed", name, exc_info=error)


@dataclass(frozen=True, kw_only=True, repr=False)
class DropInParams(CallParams):
    """The parameters of one equation of a drop-in's primitive.

    Attributes:
        kind: which of JAX's callbacks it replaces.
        partitioned: whether, in a program that is partitioned over devices, each device
            makes the call for its own part.
    """

    kind: Kind
    partitioned: bool = False

    hooks = DropInHooks
    name = ""
    stays = (
        "it stands for one of JAX's own callbacks, whose options name things of this"
        " process. Use hc.call, hc.tap or hc.host"
    )

    # As JAX's own callbacks do, pure ones included.
    runs_where_dispatched = True

    @cached_property
    def effect(self) -> Effect | None:
        return _EFFECTS.get((self.kind, self.options.order))

    @property
    def primitive(self) -> str:
        """The name of the drop-in's primitive, which JAX's primitive has too."""
        is_print = self.callback.facts.host_code.source() == PRINT
        return "debug_print" if is_print else f"{self.kind}_callback"

    @property
    def checked_as(self) -> str:
        return f"{self.primitive} of {super().checked_as}"

    @cached_property
    def is_jaxs_own(self) -> bool:  # type: ignore[override]
        # JAX wraps the user's function of a debug callback in a function of its own.
        return self.kind != "debug" and is_jaxs(self.callback.function)


_NARROW = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (("f8", "f4"), ("i8", "i4"), ("u8", "u4"), ("c16", "c8"))
}


def make_params(
    kind: Kind,
    fn: Callable[..., Any],
    trees: tuple[Template, Results],
    options: Mapping[str, Any],
    place: Place | None = None,
) -> DropInParams:
    """Builds the parameters of a drop-in that calls `fn`.

    `options` are as JAX's functions take them, and `arrays` as an engine's name.
    """
    template, results = trees
    order = "ordered" if options.get("ordered") else "unordered"
    own_order = "pure" if kind == "pure" else order
    call_options = CallOptions.of({**options, "order": own_order})
    fills = (None,) * len(results.avals)
    place = place or users_place()
    callback = CallSpec(Opaque(fn), template, results, fills, call_options, place)
    return DropInParams(
        callback=callback,
        avals=results.avals,
        masked=False,
        results_as="nothing" if kind == "debug" else "leaves",
        literals=not jax.config.jax_enable_x64,
        kind=kind,
        partitioned=options.get("partitioned", False),
    )


def arrays_of(choice: str) -> Literal["numpy", "free"]:
    """Translates the option `arrays=` of a drop-in to the engine's name."""
    if choice not in ("jax", "numpy"):
        hint = ". hostcall.call has 'dlpack' too"
        raise wrong("arrays", "a drop-in", "'jax' or 'numpy'", choice, hint)
    return "free" if choice == "jax" else "numpy"
