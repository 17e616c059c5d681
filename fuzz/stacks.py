"""Random stacks of layers (hostcall/_policies) against the function itself."""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import hostcall as hc
from fuzz.draw import Draw
from hostcall import _native
from hostcall._core.callback import CallSpec
from hostcall._core.options import Policy
from hostcall._core.source import Place
from hostcall._core.spec import Opaque, Results, Template, parse_result
from hostcall._engine.hooks import CallHooks
from hostcall._engine.params.equation import CallParams, Equation
from hostcall._engine.params.tap import TapParams
from hostcall._engine.placement import Placement
from hostcall._engine.plans import direct
from hostcall._native import ResultForm
from hostcall._policies.layer import Choices
from hostcall._policies.stack import EngineFunctions, entries
from hostcall._runtime import host_device, workers

POOL = futures.ThreadPoolExecutor(4)
FILLS = np.float32(-1), np.float32(-2)
KINDS = ("alone", "sequential", "parallel", "whole")


class Bad(Exception):
    pass


def reference(x: Any, y: Any) -> dict[str, Any]:
    return {"a": x * 2 + y, "b": x - y}


def choices_of(
    fn: Callable[..., Any],
    *,
    policy: Policy | None = None,
    template: Template | None = None,
    results: Results | None = None,
    tag: str | None = None,
    **options: Any,
) -> Choices:
    """What a plan would say of a function of two float32 numbers."""
    kind: type[Equation] = TapParams if options.get("tap") else CallParams
    callback = CallSpec(
        fn=Opaque(fn),
        template=template or Template.flat(None, None),
        results=results or results_of(()),
        fills=tuple(fill.tobytes() for fill in FILLS),
        policy=policy or Policy(),
        options=kind.takes(tag=tag),
        place=Place("stacks.py", 1, "choices_of"),
    )
    levels = {"levels": options["levels"]} if "levels" in options else {}
    avals = callback.results.avals
    equation = kind(callback=callback, masked=False, avals=avals, **levels)
    return Choices(
        callback=callback,
        results=CallHooks(equation, Placement(devices={})),
        device=host_device.host_device_for(None),
        avals=avals,
        **{"converters": [None] * len(callback.template.keys), **options},
    )


def results_of(shape: tuple[int, ...]) -> Results:
    each = jax.ShapeDtypeStruct(shape, np.float32)
    return parse_result({"a": each, "b": each}, "f")


@dataclass
class Row:
    """What `hc.current()` answers."""

    row: tuple[int, ...] = ()

    def at_row(self, row: tuple[int, ...]) -> Row:
        return Row(tuple(row))


@dataclass
class Case:
    """A function with its options, and what was seen of its calls."""

    kind: str
    awaits: bool
    flat: bool
    policy: Policy
    masked: bool
    xs: np.ndarray
    ys: np.ndarray
    mask: np.ndarray
    bad: float | None
    devices: int
    sizes: list[int] = field(default_factory=list)  # of calls
    running: int = 0
    most: int = 0
    wrong: list[Any] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of errors

    @classmethod
    def drawn(cls, draw: Draw) -> Case:
        kind, awaits, flat = draw.choice(KINDS), draw.bool(), draw.bool()
        n = draw.choice([1, 2, 5, 9])
        sent = kind == "parallel" and not awaits and draw.bool()
        policy = Policy(
            timeout=60.0 if draw.bool() else None,
            executor=Opaque(POOL) if sent else None,
            concurrency=draw.choice([1, 2, 32]) if awaits else None,
        )
        masked = draw.bool()
        xs = [draw.int(0, n - 1) for _ in range(n)] if draw.bool() else range(n)
        return cls(
            kind,
            awaits,
            flat,
            policy,
            masked,
            np.array(xs, np.float32),
            np.array([draw.int(0, 2) for _ in range(n)], np.float32),
            np.array([not masked or draw.int(0, 4) < 3 for _ in range(n)]),
            float(draw.int(0, n - 1)) if draw.int(0, 2) == 0 else None,
            draw.choice([1, 1, 3]),
        )

    # --- The function -----------------------------------------------------------------

    def function(self) -> Callable[..., Any]:
        def plain(x: Any, y: Any) -> Any:
            self._note(x)
            if self.bad is not None and np.any(np.asarray(x) == self.bad):
                raise Bad(self.bad)
            return reference(x, y)

        async def coroutine(x: Any, y: Any) -> Any:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await asyncio.sleep(0)
                return plain(x, y)
            finally:
                self.running -= 1

        return coroutine if self.awaits else plain

    def _note(self, x: Any) -> None:
        self.sizes.append(np.size(x))
        if self.kind == "parallel":
            row = hc.current().row  # type: ignore[union-attr]
            if self.xs[row] != x:
                self.wrong.append((row, x))

    # --- What the engine does ---------------------------------------------------------

    @property
    def rows(self) -> list[int]:
        """The rows that the function is wanted for."""
        return [
            i
            for i in range(1 if self.kind == "alone" else len(self.xs))
            if self.mask[i]
        ]

    def made(self) -> EngineFunctions:
        whole = self.kind == "whole"
        given = ((0,), {"y": 0})
        named = Template(jax.tree.structure(given), (None, None))
        fn = self.function()
        choices = choices_of(
            fn,
            policy=self.policy,
            template=None if self.flat else named,
            results=results_of((len(self.xs),) if whole else ()),
            levels=int(whole),
            grid=self.kind in ("sequential", "parallel"),
            parallel=self.kind == "parallel",
            compressed=whole and self.masked,
        )
        self.hooks: Any = choices.results
        layered = (whole and self.masked) or self.kind == "parallel" or self.awaits
        if not (layered or self.policy.layered):
            made = EngineFunctions(direct(choices.callback), choices.form)
            assert (made.function is fn) == self.flat
            return made
        made = entries(choices)
        assert (made.runner is not None) == (self.kind == "parallel")
        return made

    def execution(self, made: EngineFunctions) -> list[np.ndarray]:
        outs = [np.full(self.xs.shape, fill) for fill in FILLS]

        def store(where: Any, value: Any) -> None:
            leaves = (
                value if (made.form is ResultForm.TUPLE) else (value["a"], value["b"])
            )
            for out, leaf in zip(outs, leaves, strict=True):
                out[where] = leaf

        if self.kind == "whole":
            masks = [self.mask] if self.masked else []
            store(slice(None), made.function(*masks, self.xs, self.ys))
        elif made.runner is not None:
            rows = [(self.xs[i], self.ys[i]) for i in self.rows]
            if rows:
                values = made.runner(rows, [(i,) for i in self.rows])
                assert len(values) == len(rows)
                for i, value in zip(self.rows, values, strict=True):
                    store(i, value)
        else:
            for i in self.rows:
                store(i, made.function(self.xs[i], self.ys[i]))
        return outs

    # --- What must come of it ---------------------------------------------------------

    def check(self) -> None:
        made = self.made()
        outcomes = self.on_devices(made)
        failing = [i for i in self.rows if self.xs[i] == self.bad]
        for outcome in outcomes:
            if failing:
                assert isinstance(outcome, Bad), outcome
            else:
                assert isinstance(outcome, list), repr(outcome)
                self.compare(outcome)
        if made.runner is not None:
            for text in self.texts:
                assert f", row {failing[0]}, called at " in text, (text, failing)
        assert not self.wrong, self.wrong
        if self.awaits and self.policy.concurrency:
            assert self.most <= self.policy.concurrency
        if not failing:
            self.count()

    def compare(self, outs: list[np.ndarray]) -> None:
        known = np.zeros(len(self.xs), bool)
        known[self.rows] = True
        want = reference(self.xs, self.ys)
        for out, value, fill in zip(outs, want.values(), FILLS, strict=True):
            if self.kind == "whole" and not self.masked:
                known[:] = True
            np.testing.assert_array_equal(out, np.where(known, value, fill))

    def count(self) -> None:
        """How many rows the function got."""
        if self.kind == "whole":
            got = len(self.sizes)
            each = min(1, len(self.rows)) if self.masked else 1
        else:
            got, each = sum(self.sizes), len(self.rows)
        assert got == each * self.devices, (got, each)

    def on_devices(self, made: EngineFunctions) -> list[Any]:
        outcomes: list[Any] = [None] * self.devices
        failed: dict[int, tuple[int, ...]] = {}  # by thread, the row that a layer names

        def note(row: tuple[int, ...]) -> None:
            failed[threading.get_ident()] = row

        def device(number: int) -> None:
            workers.answer.set((None, Row))
            try:
                outcomes[number] = self.execution(made)
            except BaseException as error:
                outcomes[number] = error
                row = failed.pop(threading.get_ident(), ())
                self.texts.append(self.hooks.on_error(error, row))

        threads = [
            threading.Thread(target=contextvars.Context().run, args=(device, number))
            for number in range(self.devices)
        ]
        engines = _native.failed_row  # there is no call of the engine's to note it
        _native.failed_row = note
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        finally:
            _native.failed_row = engines
        assert not any(thread.is_alive() for thread in threads), "it hangs"
        return outcomes


def seeds() -> list[bytes]:
    chosen = random.Random(0)
    return [chosen.randbytes(48) for _ in range(60)]


def one(data: bytes) -> None:
    case = Case.drawn(Draw(data))
    try:
        case.check()
    except BaseException:
        print(case)
        raise
