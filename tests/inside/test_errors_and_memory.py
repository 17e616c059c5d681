"""What is kept of errors, and for how long."""

import contextlib
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import late_square

import hostcall as hc
from hostcall._core import callback, coerce, config, failures, ledger

F32 = jax.ShapeDtypeStruct((), jnp.float32)


def test_records_of_failures_do_not_pile_up():
    first = failures.failures_so_far() + 1
    most = 3 * ledger.REMEMBERED
    for _ in range(most + 1):
        failures.mark_reported(failures.store(LookupError()))
    assert len(failures._ledger.records) < most
    assert len(failures._ledger.kept) <= config.MOST_KEPT_ERRORS
    assert all(map(failures.is_reported, range(first, failures.failures_so_far() + 1)))
    assert failures.is_reported(0)  # no host call's
    assert not failures.is_reported(failures.store(LookupError()))


def test_records_that_nobody_reported_do_not_pile_up_and_reported_ones_stay(
    monkeypatch,
):
    monkeypatch.setattr(failures, "_ledger", ledger.Ledger())
    reported = failures.store(LookupError())
    failures.mark_reported(reported)
    for _ in range(3 * ledger.REMEMBERED):
        newest = failures.store(LookupError())
    assert len(failures._ledger.records) < 3 * ledger.REMEMBERED
    assert failures.is_surely_reported(reported)
    assert not failures.is_surely_reported(reported + 1)
    assert failures.is_reported(reported + 1)  # very old ones count as reported
    assert not failures.is_reported(newest)


def test_the_states_of_a_failure():
    """Kept and unreported, then reported, handed over, and released."""
    error = LookupError("kept")
    number = failures.store(error)
    assert failures.kept(number) is error
    assert not failures.is_reported(number)
    assert failures.hand_over_number(number) is error
    assert not failures.is_reported(number)  # a report of it has not been read
    failures.mark_reported(number)
    assert failures.is_reported(number)
    while failures._ledger.kept:
        failures._ledger.release_oldest()
    assert failures.kept(number) is None
    assert failures.hand_over_number(number) is None
    assert failures.is_surely_reported(number)


def test_an_exception_that_is_raised_again_is_one_with_two_failures():
    error = LookupError("of a feed's source")
    first = failures.store(error)
    failures.mark_reported(first)
    second = failures.store(error)
    assert failures.is_reported(first)
    assert not failures.is_reported(second)
    assert failures.kept(first) is failures.kept(second) is error


def test_ever_new_tags_do_not_pile_up(monkeypatch):
    """Names of statistics and events are kept for ever. A collector gets every tag."""

    def seen(x):
        pass

    monkeypatch.setattr(callback, "_MOST_TAGS", len(callback._tags) + 1)
    before = len(hc.monitor.stats())
    with hc.testing.collect() as collected:
        for i in range(4):
            hc.tap(seen, np.float32(i), tag=f"new tag {i}")
    assert [*collected] == [f"new tag {i}" for i in range(4)]
    first, others = [*hc.monitor.stats()][before:]
    assert (first, others.split(" (")[0]) == ("new tag 0", seen.__qualname__)
    assert hc.monitor.stats()[others].calls == 3
    taps = [r.name for r in hc.monitor.flight() if r.kind == "tap"][-4:]
    assert taps == ["new tag 0", *3 * [seen.__qualname__]]


def test_what_old_exceptions_hold_is_let_go(monkeypatch):
    class Holds(Exception):
        pass

    def fail(x):
        raise Holds(np.full(3, x))

    def held():
        return sum(isinstance(o, Holds) for o in gc.get_objects())

    f = jax.jit(lambda x: hc.call(fail, F32, x))

    def fail_often():
        for i in range(3 * config.KEPT_ERRORS):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                f(np.float32(i))
        gc.collect()

    fail_often()
    assert held() >= 2 * config.KEPT_ERRORS  # all are new
    monkeypatch.setattr(config, "KEPT_SECONDS", -1.0)  # all are old
    fail_often()
    assert held() <= config.KEPT_ERRORS


def test_a_barrier_finds_an_old_failure_that_nobody_saw():
    def bad(x):
        raise LookupError(f"at {float(x)}")

    @jax.jit
    def f(x, m):
        return hc.call(bad, F32, x + (m @ m)[0, 0])

    unread = f(1.0, jnp.zeros(late_square(600)))
    failures.failure_of(unread)  # hostcall looks, not the user
    for _ in range(ledger.REMEMBERED + 100):
        with contextlib.suppress(LookupError):
            hc.call(bad, F32, np.float32(2))
        failures.mark_reported(failures.failures_so_far())
    with pytest.raises(jax.errors.JaxRuntimeError, match="at 1"):
        hc.barrier()
    assert hc.barrier()


class Refuses:
    """Speaks of DLPack, and gives what nobody can read."""

    def __dlpack__(self, **options):
        return None

    def __dlpack_device__(self):
        return 99, 0


def test_a_result_that_can_not_be_read_is_let_go():
    """Without the garbage collector: the error makes no cycle that holds the value."""
    refused = Refuses()
    gone = weakref.ref(refused)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(hc.errors.ResultError):
            coerce._as_numpy(refused, lambda: "the result")
        del refused
        assert gone() is None
    finally:
        gc.enable()
