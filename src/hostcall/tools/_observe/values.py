"""`hc.observe("loss", to=...)`: hands on the values of the user's variables."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

import hostcall as hc
from hostcall._jax import jaxprs
from hostcall._jax.rewriting import Insertion, Level
from hostcall.tools import sinks
from hostcall.tools._observe import labels, names
from hostcall.tools._observe.where import Where
from hostcall.tools._progress import drawing
from hostcall.tools.recorder import Recorder, Sink


class Record(NamedTuple):
    """What is known of a value.

    Attributes:
        name: the variable, such as `loss`; "" of a value that `select` chose.
        part: which leaf of the variable's pytree it is, in the order in which they are
            computed.
        parts: how many leaves the pytree has.
        file: the path of the user's source.
        line: the number of the user's line in it.
        function: the function that the line is in.
        text: the source text of the line.
        primitive: the name of JAX's operation that computes it.
        backward: whether a backward pass computes it.
        vmaps: how many vmaps are around it. JAX keeps neither which axes of a value
            have their rows, nor whether the value depends on the row.
        loops: the line of each loop around it, such as `train.py:20`, outermost first.
        steps: for each of these, the number of its step. In a backward pass that of the
            step which is differentiated. Under vmap, an array with an element for each
            row of a while loop.
        device: the device whose shard it is, inside shard_map.
    """

    name: str
    part: int
    parts: int
    file: str
    line: int
    function: str
    text: str
    primitive: str
    backward: bool
    vmaps: int
    loops: tuple[str, ...]
    steps: tuple[int | np.ndarray, ...] = ()
    device: jax.Device | None = None

    def __str__(self) -> str:
        name = self.name or self.text
        if self.parts > 1:
            name += f".{self.part}"
        at = [
            f"step {step} of {loop}"
            for loop, step in zip(self.loops, self.steps, strict=False)
        ]
        location = ", ".join([f"{labels.short(self.file)}:{self.line}", *reversed(at)])
        return f"{name} ({location}{', backward' * self.backward})"


def _results_of(level: Level) -> Iterator[names.Variable]:
    """All arrays that a level computes, as if they were variables."""
    for at, at_place in enumerate(level.places):
        line = at_place.users_line
        place = (line.file, line.function, line.line) if line else ("", "", 0)
        outs = [v for v in at_place.eqn.outvars if not jaxprs.is_dropped(v)]
        for part, var in enumerate(outs):
            if jaxprs.is_array(var):
                yield names.Variable("", var, at, place, part, len(outs))


def _record_of(level: Level, v: names.Variable) -> Record:
    file, function, line = v.place
    place = level.places[v.at]
    return Record(
        *(v.name, v.part, v.parts, file, line, function),
        labels.text_in(file, line),
        place.eqn.primitive.name,
        place.is_backward,
        place.vmaps,
        tuple(map(labels.line_of, level.loops)),
    )


To: TypeAlias = "Callable[[Record, Any], object] | Recorder | Sink | None"
_SINKS = sinks.csv, sinks.jsonl, sinks.sqlite, sinks.tensorboard, sinks.live


class Values:
    """Puts taps behind the equations that compute the chosen values."""

    def __init__(
        self,
        names: Sequence[str],
        select: Callable[[Record], object] | None,
        to: To,
        scope: Where,
    ) -> None:
        self._names = names
        self._select = select
        self._to = to
        self._scope = scope
        self._found: set[str] = set()
        self._others: set[str] = set()
        self._untold: set[str] = set()
        # Variables in files that are not looked at, each with one of these.
        self._elsewhere: dict[str, str] = {}

    def look(self, level: Level) -> Iterator[Insertion]:
        for v in names.variables(level, self._wants, self._untold):
            file, function, _ = v.place
            if not self._scope.has_variable(file, function):
                self._elsewhere.setdefault(v.name, labels.short(file))
                continue
            self._found.add(v.name)
            yield self._insertion(level, _record_of(level, v), v)
        if self._select is None:
            return
        for v in _results_of(level):
            if not self._scope.has(level.places[v.at]):
                continue
            if self._select(record := _record_of(level, v)):
                yield self._insertion(level, record, v)

    def _wants(self, name: str) -> bool:
        self._others.add(name)
        return any(fnmatchcase(name, pattern) for pattern in self._names)

    def _insertion(self, level: Level, record: Record, v: names.Variable) -> Insertion:
        name = record.name or f"{record.function}:{record.line}"
        if record.parts > 1:
            name += f".{record.part}"
        to: Any = self._to or _printed
        has_devices = bool(level.meshes)

        def hand(value: np.ndarray, *steps: np.ndarray) -> None:
            numbers = tuple(int(x) if not x.shape else x for x in steps)
            call = hc.current() if has_devices else None  # half of what the rest costs
            to(record._replace(steps=numbers, device=call and call.device), value)

        def hand_column(values: np.ndarray, steps: np.ndarray | None) -> None:
            if steps is None:
                steps = np.asarray(hc.current().steps)  # type: ignore[union-attr]
            when = np.full(len(values), time.time())
            to({"step": steps, "time": when, name: values})

        for handler in (hand, hand_column):
            handler.__name__ = handler.__qualname__ = f"hc.observe({name})"

        def fn(value: jax.Array, *steps: jax.Array) -> None:
            step = steps[-1] if steps and steps[-1].ndim == 0 else None
            if isinstance(to, Recorder):
                to(step=step, **{name: value})
            elif isinstance(to, _SINKS):
                hc.tap(hand_column, value, step, batch=256)
            else:
                hc.tap(hand, value, *steps)

        return Insertion(fn, [v.var, *level.steps], v.at)

    def _file_elsewhere(self, name: str) -> str | None:
        files = (f for v, f in self._elsewhere.items() if fnmatchcase(v, name))
        return next(files, None)

    def warn(self) -> None:
        """Warns of names that were not found, at the end of the block."""
        for name in self._names:
            if any(fnmatchcase(name_found, name) for name_found in self._found):
                continue
            text = f"hostcall: hc.observe found no variable {name!r} in the programs"
            if any(fnmatchcase(part, name) for part in self._untold):
                text += (
                    " that it can tell from others: the statement assigns to a tuple."
                    " Give it a statement of its own"
                )
            elif file := self._file_elsewhere(name):
                text += (
                    " in the files that it looks at. There is one in"
                    f" {file}: only={file.split('/')[0]!r} looks there"
                )
            else:
                near = get_close_matches(name, sorted(self._others - {name}), 3, 0.5)
                text += " that were compiled in the block. "
                if near:
                    text += f"Did you mean {' or '.join(map(repr, near))}? "
                text += "A compiled function has to assign to it, and to use its value"
            warnings.warn(text, RuntimeWarning, stacklevel=5)


def _printed(record: Record, value: np.ndarray) -> None:
    text = np.array2string(np.asarray(value), threshold=8, precision=6)
    drawing.write_line(f"{record} = {text}")
