"""The layers of a call, each around a plain function, and how they are put together.

fuzz/stacks.py compares random stacks with the function itself.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from limits import HANG_SECONDS

import hostcall as hc
from hostcall import _native
from hostcall._core.options import Policy
from hostcall._core.spec import Opaque, Template
from hostcall._engine import plans
from hostcall._native import ResultForm
from hostcall._policies import on_loop
from hostcall._policies.here import Here, OnThread
from hostcall._policies.layer import RowContext, TimedFunction
from hostcall._policies.on_executor import OnExecutor
from hostcall._policies.on_loop import OnLoop
from hostcall._policies.stack import Checked, Trees, entries
from hostcall._policies.unmasked import Unmasked, UnmaskedTap
from hostcall._runtime import delivery, host_device, workers

sys.path.insert(0, str(Path(__file__).parents[2]))
try:
    from fuzz.stacks import Row, choices_of, results_of
finally:
    sys.path.pop(0)

F32 = np.float32
POOL = ThreadPoolExecutor(2)


class Bad(Exception):
    pass


def timed(fn, timeout=None):
    return TimedFunction(
        fn, workers.ThreadSettings(host_device.host_device_for(None)), timeout
    )


# --- What runs the function ------------------------------------------------------------

RUNS = {
    "here": lambda fn, timeout: Here(fn),
    "thread": lambda fn, timeout: OnThread(timed(fn, timeout)),
    "loop": lambda fn, timeout: OnLoop(timed(fn, timeout), 2),
    "default pool": lambda fn, timeout: OnExecutor(timed(fn, timeout)),
    "executor": lambda fn, timeout: OnExecutor(timed(fn, timeout), POOL),
}
LATE = [kind for kind in RUNS if kind != "here"]


def form_of(kind, fn):
    """The function, in the form that goes to what runs it."""

    async def coroutine(*args, **kwargs):
        await asyncio.sleep(0)
        return fn(*args, **kwargs)

    return coroutine if kind == "loop" else fn


def rows_of(*xs):
    return [((x,), {"y": 1}) for x in xs]


def at(*numbers):
    return RowContext([(n,) for n in numbers])


@pytest.fixture
def failed_rows(monkeypatch):
    """The rows that a layer names to the engine, outside of any call of the engine's."""
    rows = []
    monkeypatch.setattr(_native, "failed_row", rows.append)
    return rows


@pytest.fixture
def in_a_call():
    """This thread is in a call, as `hc.current()` says."""
    token = workers.answer.set((None, Row))
    yield
    workers.answer.reset(token)


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_results_are_in_row_order(kind, count, in_a_call):
    seen = set()

    def fn(x, *, y):
        if kind != "here":
            seen.add((x, hc.current().row))
        return x * 2 + y

    runs = RUNS[kind](form_of(kind, fn), None)
    where = at(*range(count))
    assert runs.rows(rows_of(*range(count)), where) == [2 * x + 1 for x in range(count)]
    assert kind == "here" or seen == {(x, (x,)) for x in range(count)}


@pytest.mark.parametrize("kind", RUNS)
def test_the_first_row_that_fails_is_named(kind, failed_rows):
    """By row order: on an executor the second one fails first."""
    late = threading.Event()

    def fn(x, *, y):
        if x == 1 and kind in ("default pool", "executor"):
            assert late.wait(HANG_SECONDS)
        if x == 2:
            late.set()
        if x:
            raise Bad(x)

    runs = RUNS[kind](form_of(kind, fn), None)
    with pytest.raises(Bad) as caught:
        runs.rows(rows_of(0, 1, 2), at(5, 6, 7))
    assert caught.value.args == (1,)
    # Only what runs rows at the same time is given those of a batch.
    assert failed_rows == ([] if kind in ("here", "thread") else [(6,)])


def test_rows_of_two_calls_that_fail_with_one_exception(monkeypatch, failed_rows):
    """As of a future that both await: each call says which of its own rows that was."""
    bad, wait = Bad(), on_loop.wait

    async def fn(x, *, y):
        if x:
            raise bad

    def number_of_the_first_that_fails(*xs):
        with pytest.raises(Bad):
            OnLoop(timed(fn)).rows(rows_of(*xs), RowContext([0, 1, 2]))
        return failed_rows.pop()

    def wait_for_another(*args):
        done = wait(*args)
        monkeypatch.setattr(on_loop, "wait", wait)
        assert number_of_the_first_that_fails(0, 0, 1) == 2
        return done

    monkeypatch.setattr(on_loop, "wait", wait_for_another)
    assert number_of_the_first_that_fails(0, 1) == 1


@pytest.mark.parametrize("kind", LATE)
def test_rows_that_are_late_are_left(kind):
    end, begun = threading.Event(), []

    def stuck(x, *, y):
        begun.append(x)
        assert end.wait(HANG_SECONDS)

    async def waits(x, *, y):
        begun.append(x)
        await asyncio.Event().wait()

    runs = RUNS[kind](waits if kind == "loop" else stuck, 0.1)
    count = 1 if kind == "thread" else 50
    start = time.monotonic()
    with pytest.raises(hc.errors.CallTimeoutError, match=r"than timeout=0.1 s"):
        runs.rows(rows_of(*range(count)), at(*range(count)))
    assert time.monotonic() - start < HANG_SECONDS / 4
    before = len(begun)
    end.set()
    # What comes after them is run after them.
    after = RUNS[kind](form_of(kind, lambda x, *, y: x), None)
    assert after.rows(rows_of(*range(9)), at(*range(9))) == list(range(9))
    assert len(begun) == before  # no row begins afterwards


# --- Trees and checks ------------------------------------------------------------------


class Inner:
    """A layer that doubles, and notes what it was given."""

    def __init__(
        self, result=lambda row: [np.asarray(row[0]) * 2, np.asarray(row[-1])]
    ):
        self.given, self.result = [], result

    def rows(self, rows, site):
        self.given += rows
        self.sites = list(site.indices)
        return [self.result(row) for row in rows]


NAMED = Template(jax.tree.structure(((0,), {"y": 0})), (None, None))
STATIC = Template(jax.tree.structure(((0, [0]), {})), (None, Opaque("s")))


@pytest.mark.parametrize(
    ("template", "leaves", "want"),
    [
        (Template.flat(None, None), (1, 2), ((1, 2), {})),
        (NAMED, (1, 2), ((1,), {"y": 2})),
        (STATIC, (1,), ((1, ["s"]), {})),
    ],
)
def test_trees(template, leaves, want):
    inner = Inner(lambda row: "value")
    layer = Trees(inner, choices_of(print, template=template))
    assert layer.rows([leaves, leaves], RowContext()) == ["value"] * 2
    assert inner.given == [want] * 2


def test_collectors_see_what_a_tap_gets():
    seen = []

    def take(tag, args, kwargs):
        seen.append((tag, args, kwargs))

    choices = choices_of(print, template=NAMED, tap=True, tag="loss")
    delivery.state.collectors.append(take)
    try:
        Trees(Inner(), choices).rows([(1, 2)], RowContext())
    finally:
        delivery.state.collectors.remove(take)
    assert seen == [("loss", (1,), {"y": 2})]


@pytest.mark.parametrize("tap", [False, True])
def test_checked(tap):
    inner = Inner(lambda row: {"a": row[0], "b": row[1]})
    choices = choices_of(print, tap=tap, converters=[jnp.asarray, None])
    (got,) = Checked(inner, choices).rows([(F32(1), F32(2))], RowContext())
    assert got == ([] if tap else [1, 2])
    ((x, y),) = inner.given
    assert isinstance(x, jax.Array)
    assert isinstance(y, F32)


def test_checked_refuses_results_of_another_structure():
    with pytest.raises(hc.errors.ResultError, match="f"):
        Checked(Inner(lambda row: (1, 2, 3)), choices_of(print)).rows(
            [(1, 2)], RowContext()
        )


# --- Masks -----------------------------------------------------------------------------

X, Y = np.arange(4, dtype=F32), np.arange(4, dtype=F32) + 10
ONE = np.full(1, 7, F32)


@pytest.mark.parametrize(
    ("mask", "arrays", "given", "first"),
    [
        ([1, 0, 1, 1], (X, Y), ([0, 2, 3], [10, 12, 13]), [0, -1, 4, 6]),
        ([1, 0, 1, 1], (X, ONE), ([0, 2, 3], [7]), [0, -1, 4, 6]),
        ([0, 1, 1, 0], (ONE, ONE), ([7], [7]), [-1, 14, 14, -1]),
        ([0, 0, 0, 0], (X, Y), None, [-1, -1, -1, -1]),
        ([1, 1, 1, 1], (X, Y), (X, Y), [0, 2, 4, 6]),
    ],
)
def test_unmasked(mask, arrays, given, first):
    inner = Inner()
    layer = Unmasked(inner, choices_of(print, results=results_of((4,)), levels=1))
    if given is not None and len(given[1]) < len(given[0]):
        inner.result = lambda row: [row[0] * 2, np.broadcast_to(row[1], row[0].shape)]
    (outs,) = layer.rows([(np.array(mask, bool), *arrays)], RowContext())
    np.testing.assert_array_equal(outs[0], first)
    if given is None:
        assert inner.given == []
        return
    for got, want in zip(inner.given[0], given, strict=True):
        np.testing.assert_array_equal(got, want)


def test_unmasked_checks_the_results():
    inner = Inner(lambda row: [row[0][:1], row[1]])
    layer = Unmasked(inner, choices_of(print, results=results_of((4,)), levels=1))
    with pytest.raises(hc.errors.ResultError, match=r"float32\[3\]"):
        layer.rows([(np.array([1, 0, 1, 1], bool), X, Y)], RowContext())


@pytest.mark.parametrize("mask", [[1, 0, 1, 1], [0, 0, 0, 0]])
def test_unmasked_tap(mask):
    inner, batch = Inner(), [((True, True, False), 4)]
    assert UnmaskedTap(inner, batch).rows(
        [(np.array(mask, bool), X, 5)], RowContext()
    ) == [()]
    assert len(inner.given) == any(mask)
    for x, y in inner.given:
        np.testing.assert_array_equal(x, X[np.array(mask, bool)])
        assert y == 5


# --- The stack -------------------------------------------------------------------------


def add(x, y):
    return x + y


async def add_later(x, y):
    return x + y


# Whether the engine gives rows together, and takes results one by one.
STACKS = {
    "timeout": (add, {"timeout": 9.0}, {}, "stack"),
    "parallel": (add, {}, {"grid": True, "parallel": True}, "together"),
    "coroutine": (add_later, {}, {}, "stack"),
    "compressed": (add, {}, {"compressed": True, "levels": 1}, "flat"),
    "compressed tap": (add, {}, {"compressed": True, "tap": True}, "stack"),
}


@pytest.mark.parametrize("name", STACKS)
def test_what_the_engine_calls(name):
    fn, policy, options, want = STACKS[name]
    made = entries(choices_of(fn, policy=Policy(**policy), **options))
    assert made.function is not fn
    assert (made.runner is not None) == ("together" in want)
    assert (made.form is ResultForm.TUPLE) == ("flat" in want)
    assert not made.sends
    if want == "stack" and fn is add and "tap" not in name:
        assert made.function(1, 2) == 3


SPEC = jax.ShapeDtypeStruct((), jnp.float32)
PLAIN = {
    "nothing": (lambda x, y: hc.call(add, SPEC, x, y), "itself"),
    "rows": (jax.vmap(lambda x, y: hc.call(add, SPEC, x, y)), "itself"),
    "not batched": (
        lambda x, y: hc.call(add, SPEC, x, y, vmap_method="parallel"),
        "itself",
    ),
    "tree": (lambda x, y: hc.call(add, SPEC, x, y=y), "closure"),
    "timeout": (lambda x, y: hc.call(hc.host(add, timeout=9.0), SPEC, x, y), ""),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_call_has_no_layer(name, monkeypatch):
    made, (run, want) = [], PLAIN[name]
    plan = plans._native.Plan
    monkeypatch.setattr(
        plans._native, "Plan", lambda **given: made.append(given) or plan(**given)
    )
    xs = (jnp.ones(2), jnp.full(2, 2.0)) if name == "rows" else (1.0, 2.0)
    assert (jax.jit(run)(*xs) == 3).all()
    (given,) = made
    assert (given["function"] is add) == (want == "itself")
    assert given["runner"] is None
    if want:
        assert given["function"](1, 2) == 3


def test_a_tap_without_a_tag_has_no_layer(monkeypatch):
    made, plan = [], plans._native.Plan
    monkeypatch.setattr(
        plans._native, "Plan", lambda **given: made.append(given) or plan(**given)
    )
    hc.tap(print, 1.0)
    hc.tap(print, 1.0, tag="loss")
    hc.barrier()
    assert [given["function"] is print for given in made] == [True, False]
