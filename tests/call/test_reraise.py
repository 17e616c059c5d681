"""`hc.reraise()` raises failures of its own thread and block, each once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from limits import holds_in_time
from meshes import line
from platforms import late_square

import hostcall as hc

JaxRuntimeError = jax.errors.JaxRuntimeError
F32 = jax.ShapeDtypeStruct((), jnp.float32)
SQUARE = late_square(300)

orders = pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])


@pytest.fixture
def ones():
    """An operand so large that XLA runs the program on one of its own threads."""
    return jax.block_until_ready(jnp.ones(SQUARE))


def late(v, ones):
    """Returns `v` after computing a large product."""
    return v + 0 * (ones @ ones)[0, 0]


def check(v):
    """Returns `v`, but raises if it is negative."""
    if v < 0:
        raise KeyError(float(v))
    return v


def program(order="pure", result=F32, fn=check):
    """A program that calls `fn` some time after it was dispatched."""
    if result is None:
        inner, fn = fn, lambda v: inner(v) and None
    return jax.jit(lambda v, ones: hc.call(fn, result, late(v, ones), order=order))


def failed_with(caught):
    return caught.value.args[0]


# --- Failures that were handled, or are of another thread --------------------------


@orders
def test_what_was_handled_inside_is_not_raised(order, ones):
    step = program(order)
    for _ in range(3):
        with hc.reraise():
            with pytest.raises(JaxRuntimeError, match="KeyError"):
                step(-1.0, ones).block_until_ready()
            assert step(2.0, ones) == 2
        jax.effects_barrier()


def test_what_another_thread_has_handled_is_not_raised(ones):
    step, caught = program(), []

    def look(y):
        try:
            y.block_until_ready()
        except JaxRuntimeError as error:
            caught.append(error)

    with hc.reraise():
        y = step(-1.0, ones)
        thread = threading.Thread(target=look, args=(y,))
        thread.start()
        thread.join()
    assert len(caught) == 1


@pytest.mark.parametrize("inside", [False, True], ids=["inline", "on XLA's thread"])
def test_a_callback_that_falls_back(inside, ones):
    inner = program()

    def host(v):
        try:
            return np.asarray(inner(-v, ones))
        except JaxRuntimeError:
            return np.float32(7)

    outer = jax.jit(lambda v: hc.call(host, F32, late(v, ones) if inside else v))
    with hc.reraise():
        y = outer(1.0)
    assert y == 7


def test_a_block_inside_a_callback_waits_for_its_own_programs_only(ones):
    inner, raised = program(), []

    def host(v):
        try:
            with hc.reraise():
                inner(-v, ones)
        except KeyError as error:
            raised.append(error.args[0])
        with hc.reraise():
            inner(v, ones)
        return v

    outer = program(fn=host)
    for _ in range(3):
        with hc.reraise():
            y = outer(1.0, ones)  # alive, and not ready before its callback returns
        assert y == 1
    assert raised == [-1.0] * 3


@orders
def test_requests_on_eight_threads_get_their_own(order, ones):
    step, wrong = program(order), []
    step(1.0, ones)

    def serve(thread):
        for i in range(20):
            value = float(100 * thread + i + 1) * (-1) ** i
            try:
                with hc.reraise():
                    y = step(value, ones)
                got = float(y)
            except KeyError as error:
                got = error.args[0]
            if got != value:
                wrong.append((value, got))

    threads = [threading.Thread(target=serve, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_decorated_function_on_threads_and_in_itself(ones):
    step, wrong = program(), []

    @hc.reraise()
    def serve(value, depth=0):
        if depth < 2:
            serve(abs(value), depth + 1)
        return step(value, ones)

    def run(thread):
        for i in range(10):
            value = float(100 * thread + i + 1) * (-1) ** i
            try:
                got = float(serve(value))
            except KeyError as error:
                got = error.args[0]
            if got != value:
                wrong.append((value, got))

    threads = [threading.Thread(target=run, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_tasks_that_interleave_on_one_thread(ones):
    step = program()

    async def request(value, start, end):
        await start.wait()
        with hc.reraise():
            y = step(value, ones)
            await asyncio.sleep(0)  # the other tasks enter their blocks
            end.set()
        return float(y)

    async def serve():
        events = [asyncio.Event() for _ in range(7)]
        events[0].set()
        values = [1.0, -2.0, 3.0, -4.0, -5.0, 6.0]
        tasks = [
            request(value, events[i], events[i + 1]) for i, value in enumerate(values)
        ]
        return await asyncio.gather(*tasks, return_exceptions=True)

    got = asyncio.run(serve())
    assert [g if isinstance(g, float) else g.args[0] for g in got] == [
        1.0, -2.0, 3.0, -4.0, -5.0, 6.0
    ]  # fmt: skip


def test_what_was_dispatched_before_the_block_is_not_waited_for(ones):
    gate = threading.Event()

    def host(v):
        assert gate.wait(30)
        return check(v)

    before = program(fn=host)(-1.0, ones)
    with hc.reraise():
        pass
    assert not before.is_ready()
    gate.set()
    with pytest.raises(KeyError), hc.reraise():
        before.block_until_ready()


# --- Results that nobody keeps -------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "result"),
    [("pure", F32), *((o, r) for o in ("unordered", "ordered") for r in (F32, None))],
)
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("successes_before", [0, 2])
def test_a_program_whose_results_nobody_keeps(
    order, result, after, successes_before, ones
):
    step = program(order, result)
    for _ in range(successes_before):
        step(1.0, ones)
    with pytest.raises(KeyError) as caught, hc.reraise():
        step(-1.0, ones)
        for _ in range(after):  # their tokens replace that of the first
            step(2.0, ones)
    assert failed_with(caught) == -1
    assert isinstance(caught.value.__context__, JaxRuntimeError)
    with hc.reraise():  # raised only once
        pass
    jax.effects_barrier()


def test_of_several_the_first_is_raised_and_the_others_are_the_next_blocks(ones):
    step = program()
    with pytest.raises(KeyError) as outer, hc.reraise():
        with pytest.raises(KeyError) as inner, hc.reraise():
            step(1.0, ones)
            step(-2.0, ones)
            step(-3.0, ones)
        assert failed_with(inner) == -2
    assert failed_with(outer) == -3


def test_a_block_that_is_left_by_another_error_hands_its_programs_on(ones):
    step = program()
    with pytest.raises(KeyError) as caught, hc.reraise():
        try:
            with hc.reraise():
                step(-2.0, ones)
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
    assert failed_with(caught) == -2


def test_many_programs_behind_one_that_takes_long(ones):
    """The block keeps only results that are not ready, and finds a failure among them."""
    gate = threading.Event()
    wait = jax.jit(
        lambda v: hc.call(lambda v: (gate.wait(30), v)[1], F32, late(v, ones))
    )
    step = jax.jit(lambda v: hc.call(check, F32, v))
    device = jax.devices()[1]
    with pytest.raises(KeyError) as caught, hc.reraise():
        wait(0.0)
        far = jax.device_put(1.0, device)
        refs = [weakref.ref(step(far)) for _ in range(200)]
        with contextlib.suppress(JaxRuntimeError):
            step(-far)
        assert sum(ref() is not None for ref in refs) < 100
        program()(-3.0, ones)
        gate.set()
    assert failed_with(caught) == -3


def test_a_loop_that_gives_its_state_away(ones):
    def body(state, v, ones):
        return state + hc.call(check, F32, late(v, ones))

    step = jax.jit(body, donate_argnums=0)
    for bad in (0, 3, 9, None):
        raises = (
            pytest.raises(KeyError) if bad is not None else contextlib.nullcontext()
        )
        with raises as caught, hc.reraise():
            state = jnp.zeros(1000)
            for i in range(10):
                state = step(state, -1.0 - i if i == bad else 1.0, ones)
        if bad is not None:
            assert failed_with(caught) == -1 - bad


def test_a_result_is_given_away_after_its_step_has_failed(ones):
    """Then only steps that were dispatched after the failure can tell of it."""

    def body(state, v, ones):
        return state + hc.call(check, F32, late(v, ones), tag="given away")

    step = jax.jit(body, donate_argnums=0)

    def failed():
        found = hc.monitor.stats().get("given away")
        return 0 if found is None else found.errors

    for n, bad in enumerate((0, 3, 8)):
        with pytest.raises(KeyError) as caught, hc.reraise():
            state = jnp.zeros(1000)
            for i in range(10):
                state = step(state, -1.0 - i if i == bad else 1.0, ones)
                if i == bad:
                    assert holds_in_time(lambda n=n: failed() == n + 1)
            assert holds_in_time(state.is_ready)
        assert failed_with(caught) == -1 - bad


def test_results_of_any_kind(ones):
    def body(v, ones):
        v = hc.call(check, F32, late(v, ones))
        key = jax.random.fold_in(jax.random.key(0), v.astype(int))
        return {"keys": [key] * 5, "rest": [v + i for i in range(5)]}

    step, keys = jax.jit(body), jax.jit(lambda v, ones: body(v, ones)["keys"])
    for program in (step, keys, keys):
        with hc.reraise():
            program(1.0, ones)
        for _ in range(2):
            with pytest.raises(KeyError), hc.reraise():
                program(-1.0, ones)


def test_a_block_keeps_little(ones):
    """The block neither waits for large results that nobody keeps, nor keeps them."""
    gate = threading.Event()
    wait = program(fn=lambda v: (gate.wait(30), v)[1])
    step = jax.jit(lambda x, v: jnp.full((4_000_000,), v) + x)
    alive = []
    with hc.reraise():
        first = wait(1.0, ones)
        for _ in range(20):
            alive.append(weakref.ref(step(first, 1.0)))
        assert sum(ref() is not None for ref in alive) <= 4  # 16 MB each
        gate.set()
    del first


def test_the_report_works_if_the_exception_is_gone(ones):
    step = program()
    with pytest.raises(JaxRuntimeError, match=r"KeyError: -1\.0"), hc.reraise():
        y = step(-1.0, ones)
        while not y.is_ready():
            y.is_ready()
        for i in range(1100):  # more than are kept
            with contextlib.suppress(KeyError):
                hc.call(check, F32, -2.0 - i)


def test_jaxs_own_hook_still_runs():
    with jax.debug_nans(True):
        f = jax.jit(lambda v: v / v)
        f(jnp.float32(1))
        for _ in range(2):
            with pytest.raises(FloatingPointError), hc.reraise():
                f(jnp.float32(0))
    assert np.isnan(f(jnp.float32(0)))


def test_a_block_in_a_traced_function():
    def f(x):
        with hc.reraise():
            return x

    text = (
        r"a block of hc.reraise\(\) begins while a program is traced, and not when it"
        " runs. It can't raise what the program's callbacks raise. Put it around the"
        " call of the program"
    )
    with pytest.warns(RuntimeWarning, match=text) as warned:
        jax.jit(f)(1.0)
    assert warned[0].filename == __file__
    assert jax.grad(f)(1.0) == 1


def test_a_block_in_a_function_that_runs_while_it_is_transformed():
    """No warning, and no transfer that a guard would refuse."""

    def f(x):
        with hc.reraise():
            return x * x

    x = jnp.arange(4.0)
    with jax.transfer_guard("disallow"):
        jax.vmap(f)(x)
    assert jax.grad(f)(2.0) == 4
    jax.shard_map(f, mesh=line(), in_specs=P("x"), out_specs=P("x"))(x)
