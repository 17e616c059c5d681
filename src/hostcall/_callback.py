"""The user's function with its trees, hashable; and what the engine asks of it.

`Callback` is part of a primitive's parameters: equal callbacks trace to equal
programs, so JAX's caches hit. `CallInfo` belongs to one place of one compiled program
(or one eager call): the engine calls its hooks when something isn't the fast case.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from hostcall import _coerce, _errors, _frames, _job
from hostcall._native import Counters
from hostcall._order import Order
from hostcall._spec import Results, Static, Template
from hostcall._where import Place, name_of, source_of

logger = logging.getLogger("hostcall")

# "free": jax.Arrays that are not committed to their device, as drop-ins hand out.
Arrays = Literal["numpy", "jax", "free", "dlpack", "cuda"]
Lend = Literal[False, True, "out", "buffers"]


@dataclass(frozen=True)
class Callback:
    """A function, how its arguments go in, and how its results come out.

    Attributes:
        fn: the function, compared as `Static` compares.
        template: how (args, kwargs) are put together.
        results: what it returns.
        fills: bytes of each result of a masked row, or None for zeros.
        arrays: what the function gets for an array.
        lend: whether it gets views of XLA's memory, or Buffers of it.
        timeout: seconds, or None.
        executor: for parallel rows; see `_executors`.
        place: the user's line that wrote the call.
    """

    fn: Static
    template: Template
    results: Results
    fills: tuple[bytes | None, ...]
    arrays: Arrays
    lend: Lend
    timeout: float | None
    executor: Static | None
    place: Place = field(compare=False)

    @property
    def function(self) -> Callable[..., Any]:
        return self.fn.value  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        return name_of(self.function)

    def described(self) -> str:
        return f"`{self.name}`, called at {self.place}"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class CallParams:
    """The parameters of one equation of the call primitive.

    Attributes:
        callback: see there.
        avals: of the results of one row.
        order, vmap_method, sharding: as given to `hc.call`.
        masked: the first operand is `where`.
        grid: sizes of the batch axes that rows run over, outermost first.
        batched: for each operand, whether it has each of those axes.
        levels: batch axes that the function itself sees, in front.
        results_as: "tree", the structure of `result`; "leaves" in any containers;
            "nothing", whatever is returned.
        literals: Python's numbers may stand for arrays of 32 bits.
    """

    callback: Callback
    avals: tuple[Any, ...]
    order: Order
    vmap_method: Any
    sharding: Any
    masked: bool
    grid: tuple[int, ...] = ()
    batched: tuple[tuple[bool, ...], ...] = ()
    levels: int = 0
    results_as: Literal["tree", "leaves", "nothing"] = "tree"
    literals: bool = True

    @property
    def out_avals(self) -> list[Any]:
        return [a.update(shape=self.grid + a.shape) for a in self.avals]

    @property
    def runs_where_dispatched(self) -> bool:
        """Whether a program with this call runs on the thread that dispatches it."""
        return self.order != "pure"

    @property
    def is_jaxs_own(self) -> bool:
        """Whether the function is one that JAX itself calls back."""
        return False

    def __repr__(self) -> str:
        parts = [self.callback.name, self.order]
        if self.masked:
            parts.append("where")
        if self.grid:
            parts.append(f"rows={self.grid}")
        return f"<{' '.join(parts)}>"


class CallInfo:
    """One call's description, with the hooks that native code calls.

    `across`: its program is one over several processes; `caller`: the number of the one
    whose results all take, or None.
    """

    across = False
    caller: int | None = None

    def __init__(
        self,
        params: Any,
        devices: dict[int, Any],
        mesh: Any | None,
    ) -> None:
        self.params = params
        self.callback = params.callback
        self.name = self.callback.name
        self.place = self.callback.place
        self.devices = devices  # by ordinal; -1 for an eager call
        self.mesh = mesh
        self.guard: Any = None  # of a program over several devices

    def __repr__(self) -> str:
        return f"<call of {self.name} at {self.place}>"

    # --- Hooks ---------------------------------------------------------------------

    def flatten(self, value: Any) -> list[Any]:
        return _coerce.take_apart(value, self.callback.results.treedef, self.name)

    def coerce(self, number: int, value: Any) -> np.ndarray:
        aval = self.params.avals[number]

        def where() -> str:
            return f"{self.callback.results.paths()[number]} of `{self.name}`"

        return _coerce.coerce(value, aval.dtype, aval.shape, where)

    def on_error(self, error: BaseException, _: Any, row: tuple[int, ...]) -> str:
        text = _errors.text_for_xla(error, self.name, self.place, row)
        if self.across:
            _job.failed(text)
        return text

    def eager_error(self, error: Exception) -> Exception:
        """What an eager call raises in a program's way: the error of a program."""
        raised: Exception = jax.errors.JaxRuntimeError(self.on_error(error, None, ()))
        return raised

    def on_lone_failure(self, ordinal: int, text: str) -> None:
        logger.error(
            "`%s` failed on %s in a program whose devices come to this call one by one"
            " (it stands under control flow that differs between them), so the others"
            " go on. If one of them waits for this device in a collective (psum,"
            " all_gather, ...), XLA ends the process after a minute. All devices fail"
            " together where all come to the call: give the condition as where= in"
            " place of lax.cond. What it failed with: %s",
            self.name,
            self.devices.get(ordinal, f"device {ordinal}"),
            text,
        )

    def on_failure_elsewhere(self, said: str) -> str:
        """The error here for a failure in another process, which said this."""
        where = "another process"
        if said:  # only the caller's words come along
            where = f"process {self.caller}: {_errors.without_number(said)}"
        error = _errors.HostcallError(
            f"hostcall: `{self.name}`, whose results all processes take, failed in"
            f" {where}"
        )
        text = _errors.numbered(error, _errors.summary(error))
        _job.failed(text)
        return text

    def on_escape(
        self, _: Any, held: list[tuple[int, bool]] | None, error: BaseException | None
    ) -> None:
        """First without `held`, to let go of what only looks kept; then to raise."""
        if held is None:
            if error is not None:
                _let_go(error)
            gc.collect()
            return
        names = [
            self.callback.results.paths()[n].replace("result", "out", 1)
            if is_result
            else self.callback.template.paths()[n]
            for n, is_result in held
        ]
        ended = "returned" if error is None else f"raised {type(error).__name__}"
        raise _errors.EscapeError(
            f"hostcall: `{self.name}` kept a view of {', '.join(names)} after it"
            f" {ended} (itself, a slice, a memoryview, a tensor made from it). With"
            f" lend={self.callback.lend!r} the memory is XLA's, which reuses it now:"
            " keep a copy (x.copy()), or drop lend="
        ) from error

    def on_unwritten(self, _: Any, number: int) -> None:
        path = self.callback.results.paths()[number].replace("result", "out", 1)
        aval = self.params.avals[number]
        raise _errors.UnwrittenError(
            f"hostcall: `{self.name}` returned None, but did not write all of {path}"
            f" ({aval.dtype}{list(aval.shape)}). With lend='out' write"
            " out[...] = value, or return the value"
        )


def _let_go(error: BaseException) -> None:
    """Makes an exception, and all behind it, hold no array of a failed call.

    The frames of its traceback hold the function's arguments: the lines stay, the
    values go. Arrays among its own arguments become copies.
    """
    for current in _frames.chained(error, around=sys.exception()):
        ended = _frames.ended(current.__traceback__)
        cells = [cell for frame in ended for cell in _own_cells(frame)]
        _frames.clear_values(current.__traceback__)
        for cell in cells:
            with contextlib.suppress(ValueError):  # it is empty
                del cell.cell_contents
        if any(isinstance(arg, np.ndarray) for arg in current.args):
            current.args = tuple(
                arg.copy() if isinstance(arg, np.ndarray) else arg
                for arg in current.args
            )


def _own_cells(frame: types.FrameType) -> list[types.CellType]:
    """Cells of the variables that a frame shares with functions made in it. To clear
    a frame leaves those functions, which frames further in may be running.
    """
    inside = gc.get_referents(frame)
    free = {
        id(cell)
        for f in inside
        if isinstance(f, types.FunctionType) and f.__code__ is frame.f_code
        for cell in f.__closure__ or ()
    }
    cells = [x for x in inside if isinstance(x, types.CellType)]
    return [cell for cell in cells if id(cell) not in free]


# --- Costs, kept per function definition -------------------------------------------

_counters: dict[str, Counters] = {}
_lock = threading.Lock()


def counters_of(fn: Callable[..., Any]) -> Counters:
    """The counters that all calls of functions from one `def` share.

    Keyed by source, not by object: a fresh lambda a call must not grow memory.
    """
    key = source_of(fn)
    with _lock:
        found = _counters.get(key)
        if found is None:
            found = _counters[key] = Counters()
        return found


def all_counters() -> dict[str, Counters]:
    with _lock:
        return dict(_counters)


def executor_of(callback: Callback) -> Any:
    return None if callback.executor is None else callback.executor.value
