"""Bad values that were found: their texts, and what is to be done with them."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import numpy as np

import hostcall as hc
from hostcall._core.errors import ReplacesReport
from hostcall._jax.places import EqnPath
from hostcall.tools._observe import labels
from hostcall.tools._observe.causes import Origin, RuleCall, Search
from hostcall.tools._progress import drawing


class BadValue(FloatingPointError, ReplacesReport):
    """The error of a bad value, which its users know as a FloatingPointError."""

    def __reduce__(self) -> tuple[type[FloatingPointError], tuple[object, ...]]:
        return FloatingPointError, self.args


BadValue.__name__ = BadValue.__qualname__ = "FloatingPointError"
BadValue.__module__ = "builtins"


class BadRecord(NamedTuple):
    """A bad value and what made it.

    Attributes:
        file, line, function, text: the user's line, and its source text.
        primitive: the name of JAX's operation.
        value, element: the bad value, and its index in the array.
        operands: what the operation got, as texts.
        backward: whether a backward pass made it.
        vmaps: how many vmaps are around it.
        loops: the line of each loop around it, outermost first.
        steps: for each of these, the number of its step.
        device: the device that made it, inside shard_map.
        message: what the error says.
    """

    file: str
    line: int
    function: str
    text: str
    primitive: str
    value: float
    element: tuple[int, ...]
    operands: tuple[str, ...]
    backward: bool
    vmaps: int
    loops: tuple[str, ...]
    steps: tuple[int | np.ndarray, ...]
    device: jax.Device | None
    message: str


OnBad: TypeAlias = "Literal['raise', 'report'] | Callable[[BadRecord], object]"


class Reports:
    """Does what `on_bad=` says with bad values that were found.

    Attributes:
        on_bad: "raise", "report", or a function of a `BadRecord`.
    """

    def __init__(self, on_bad: OnBad) -> None:
        self.on_bad = on_bad
        self._lock = threading.Lock()  # between devices, and the block's end
        self._times: Counter[str] = Counter()
        self._latest: deque[object] = deque(maxlen=256)

    def found(self, chain: list[Origin]) -> str:
        """Tells of a value, by its way from what made it. Returns the place's name."""
        text = _text(chain)
        if self.on_bad == "raise":
            raise BadValue(text)
        origin = chain[-1]
        call = hc.current()
        name = f"{origin.place.eqn.primitive.name} at {labels.path_of(origin.place)}"
        name += " (backward)" * origin.place.is_backward
        # A bad value that a step has made may be a result of the program too.
        run = None if call is None else (call.run, call.device)
        with self._lock:
            event = run, name, str(_numbers(origin.steps))
            is_known = event in self._latest
            self._latest.append(event)
        if is_known:
            return name
        if callable(self.on_bad):
            self.on_bad(_record_of(origin, text))
            return name
        if self.count(name) == 1:
            drawing.write_line(text)
        return name

    def not_again(self, place: EqnPath, steps: RuleCall, search: Search) -> None:
        """Tells of a bad value whose origin is not found."""
        text = _not_again(place, steps, search)
        if self.on_bad == "raise":
            raise BadValue(text)
        unknown = Origin(place, steps, None, (), np.nan, [])
        if callable(self.on_bad):
            self.on_bad(_record_of(unknown, text))
        else:
            drawing.write_line(text)

    def count(self, name: str) -> int:
        with self._lock:
            self._times[name] += 1
            return self._times[name]

    def report(self) -> None:
        """Says at the end of a block which places made bad values, how often."""
        with self._lock:
            times = self._times
            self._times = Counter()
        if times and self.on_bad == "report":
            counts_by_place = [f"  {name}: {n}" for name, n in times.most_common()]
            head = "hostcall: hc.observe found bad values made by"
            drawing.write_line("\n".join([head, *counts_by_place]))


def _not_again(place: EqnPath, steps: RuleCall, search: Search) -> str:
    steps_text = labels.steps_of(place, steps)
    in_steps = f", in {steps_text}" if steps_text else ""
    why = (
        "It was finite when the host ran the equations again, since XLA rounds"
        " otherwise where it fuses them: the cause is near, such as a number close to 0"
        " in a division or a logarithm"
    )
    if skipped := search.skipped:
        why = f"What made it is not known: the host can't run {', '.join(skipped)}"
    return (
        f"hostcall: the result of {place.eqn.primitive.name} at"
        f" {labels.path_of(place)} is not finite{in_steps}."
        f" {why}.\n    {labels.text_of(place)}"
    )


def _numbers(steps: RuleCall) -> RuleCall:
    return tuple(int(x) if not np.ndim(x) else np.asarray(x) for x in steps)


def _record_of(origin: Origin, text: str) -> BadRecord:
    place = origin.place
    call = hc.current()
    line = place.users_line
    file, function, number = line[:3] if line else ("", "", 0)
    device = call.device if call is not None and call.mesh_shape else None
    return BadRecord(
        file=file,
        line=number,
        function=function,
        text=labels.text_of(place),
        primitive=place.eqn.primitive.name,
        value=origin.value,
        element=origin.element,
        operands=tuple(origin.operands),
        backward=place.is_backward,
        vmaps=place.vmaps,
        loops=tuple(map(labels.line_of, place.loops)),
        steps=_numbers(origin.steps),
        device=device,
        message=text,
    )


_LINES_AT_MOST = 12


def _text(chain: list[Origin]) -> str:
    """The text of the error for a chain that ends with what made the value."""
    *passed, origin = chain
    place = origin.place
    circumstances = ["backward pass" if place.is_backward else "forward pass"]
    circumstances.append("under vmap" * bool(place.vmaps))
    steps = labels.steps_of(place, origin.steps)
    call = hc.current()
    circumstances.append(f"in {steps}" * bool(steps))
    if call is not None and call.mesh_shape:
        circumstances.append(f"on {call.device}")
    at = f" at [{', '.join(map(str, origin.element))}]" * bool(origin.element)
    got = f", from {', '.join(origin.operands)}" * bool(origin.operands)
    lines = [
        f"hostcall: {place.eqn.primitive.name} made the first bad value,"
        f" {origin.value:.6g}{at}{got} ({', '.join(filter(None, circumstances))})",
        *labels.shown(place),
    ]
    links = [_told(link) for link in reversed(passed) if link.place.lines]
    texts = [text for text, _ in itertools.groupby(links) if text != _told(origin)]
    if texts:
        lines.append("  It went on through")
        lines += [f"    {text}" for text in texts[:_LINES_AT_MOST]]
        if len(texts) > _LINES_AT_MOST:
            lines.append(f"    and {len(texts) - _LINES_AT_MOST} more lines")
    return "\n".join(lines)


def _told(link: Origin) -> str:
    backward = "(backward) " * link.place.is_backward
    return f"{labels.path_of(link.place)} {backward} {labels.text_of(link.place)}"
