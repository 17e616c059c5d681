"""Eight threads at once. On a Python without the GIL they truly run at once."""

from __future__ import annotations

import itertools
import queue
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

SCALAR = jax.ShapeDtypeStruct((), np.float32)
ROW = jax.ShapeDtypeStruct((4,), np.float32)
THREADS, TIMES = 8, 60


def at_once(work: Callable[[int], None]) -> None:
    """Runs `work(number)` on eight threads that start together; raises its errors."""
    gate, errors = threading.Barrier(THREADS), []

    def run(number):
        gate.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_the_import_leaves_the_gil_off():
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("this Python has a GIL")
    code = "import sys, hostcall; assert not sys._is_gil_enabled()"
    # An error: CPython warns when a module switches the GIL on.
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_arguments_that_some_calls_keep_are_never_filled_again():
    kept = [[] for _ in range(THREADS)]

    def host(x, number):
        if int(x[0]) % 3 == 0:
            kept[int(number)].append((float(x[0]), x))
        return x * 2

    program = jax.jit(lambda x, number: hc.call(host, ROW, x, number))

    def work(number):
        for i in range(TIMES):
            x = np.full(4, 1000 * number + i, np.float32)
            np.testing.assert_array_equal(program(x, number), x * 2)

    at_once(work)
    assert sum(map(len, kept)) == sum(
        (1000 * n + i) % 3 == 0 for n in range(THREADS) for i in range(TIMES)
    )
    for value, array in itertools.chain(*kept):
        np.testing.assert_array_equal(array, np.full(4, value, np.float32))


def test_every_call_is_counted():
    def counted_by_all(x):
        if x < 0:
            raise ValueError
        return x

    program = jax.jit(lambda x: hc.call(counted_by_all, SCALAR, x))

    def work(number):
        for i in range(TIMES):
            if i % 10 == 9:
                with pytest.raises(Exception, match="ValueError"):
                    jax.block_until_ready(program(jnp.float32(-1)))
            else:
                assert program(jnp.float32(i)) == i

    at_once(work)
    (cost,) = [s for name, s in hc.monitor.stats().items() if "counted_by_all" in name]
    calls = THREADS * TIMES
    assert (cost.calls, cost.errors) == (calls, calls // 10)
    assert (cost.bytes_in, cost.bytes_out) == (4 * calls, 4 * (calls - calls // 10))


def test_lent_views_that_another_thread_has_dropped_are_no_escapes():
    def host(x, out):
        def read():
            views = [x[i:] for i in range(len(x))]
            out[...] = x + len(views)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    program = jax.jit(lambda x: hc.call(host, ROW, x, lend="out"))

    def work(number):
        for i in range(TIMES):
            x = np.arange(4, dtype=np.float32) + i
            np.testing.assert_array_equal(program(x), x + 4)

    at_once(work)


@pytest.mark.parametrize("lend", [True, "out"])
def test_a_weak_reference_that_another_thread_asks_while_the_call_ends(lend):
    """Either it has made a strong one in time, and is an escape, or it is dead."""
    handed = queue.SimpleQueue()

    def ask():
        while (reference := handed.get()) is not None:
            for _ in range(200):
                array = reference()
                if array is None:
                    break
                array[1:]
                del array

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    lent = []

    def host(x, **out):
        lent[:] = map(weakref.ref, (x, *out.values()))
        for reference in lent:
            handed.put(reference)
        if out:
            out["out"][...] = x + 1
        return None if out else x + 1

    program = jax.jit(lambda x: hc.call(host, ROW, x, lend=lend))
    escaped = []
    for i in range(300):
        x = np.full(4, i, np.float32)
        try:
            np.testing.assert_array_equal(program(x), x + 1)
        except RuntimeError as error:
            escaped.append(str(error))
        else:
            assert [reference() for reference in lent] == [None] * len(lent)
    for _ in askers:
        handed.put(None)
    for asker in askers:
        asker.join()
    assert all("[hc-escape]" in text for text in escaped)


def test_views_that_another_thread_takes_while_the_call_ends():
    """Either the view came in time, and is an escape, or the Buffer refuses it."""
    handed = queue.SimpleQueue()
    refused = []

    def take():
        while (buffer := handed.get()) is not None:
            for read in (np.asarray, memoryview, np.from_dlpack, repr) * 200:
                try:
                    read(buffer)
                except RuntimeError as error:
                    refused.append(str(error))
                    break

    takers = [threading.Thread(target=take) for _ in range(2)]
    for taker in takers:
        taker.start()

    def host(ctx, out, x):
        np.asarray(out)[...] = np.asarray(x) + 1
        handed.put(x)
        newest[:] = [x]

    newest = []
    program = jax.jit(hc.buffers.buffer_callback(host, ROW))
    escaped = []
    for i in range(300):
        x = np.full(4, i, np.float32)
        try:
            np.testing.assert_array_equal(program(x), x + 1)
        except (RuntimeError, ValueError) as error:
            escaped.append(str(error))
    for buffer in (*newest, *[None] * len(takers)):  # the newest once more: too late
        handed.put(buffer)
    for taker in takers:
        taker.join()
    assert refused
    assert all("[hc-escape]" in text for text in escaped)
    assert all("has ended" in text for text in refused)


def test_status_is_read_while_rows_go_on():
    done = threading.Event()
    seen = []

    def read():
        while not done.is_set():
            seen.extend(call.row for call in hc.monitor.status())

    reader = threading.Thread(target=read)
    reader.start()
    program = jax.jit(jax.vmap(lambda x: hc.call(lambda v: v + 1, SCALAR, x)))
    xs = np.arange(50, dtype=np.float32)

    def work(number):
        for _ in range(TIMES // 4):
            np.testing.assert_array_equal(program(xs), xs + 1)

    try:
        at_once(work)
    finally:
        done.set()
        reader.join()
    assert all(len(row) <= 1 and all(0 <= i < 50 for i in row) for row in seen)


def test_taps_of_all_threads_arrive_each_thread_in_its_order():
    got = [[] for _ in range(THREADS)]

    def program(number, i):
        hc.tap(lambda n, i: got[int(n)].append(int(i)), number, i)
        return i + 1

    step = jax.jit(program)

    def work(number):
        for i in range(TIMES):
            step(np.int32(number), np.int32(i)).block_until_ready()

    at_once(work)
    hc.barrier()
    assert got == [list(range(TIMES))] * THREADS


def test_plans_of_eager_calls_and_taps_die_where_their_last_use_ends(in_time):
    got = [[] for _ in range(THREADS)]
    functions = [[] for _ in range(THREADS)]

    def work(number):
        for i in range(TIMES):
            call, tap = lambda v: v + number, lambda v: got[number].append(int(v))
            functions[number] += map(weakref.ref, (call, tap))
            assert hc.call(call, SCALAR, np.float32(i)) == i + number
            hc.tap(tap, np.float32(i))

    at_once(work)
    hc.barrier()
    assert got == [list(range(TIMES))] * THREADS
    assert in_time(lambda: not any(f() for f in itertools.chain(*functions)))


def test_a_feed_gives_each_item_to_one_thread():
    feed = hc.feed(iter(np.arange(THREADS * TIMES, dtype=np.int32)))
    step = jax.jit(lambda: feed()[0])
    took = [[] for _ in range(THREADS)]

    def work(number):
        for _ in range(TIMES):
            took[number].append(int(step()))

    with feed:
        at_once(work)
    assert sorted(itertools.chain(*took)) == list(range(THREADS * TIMES))


def test_a_recorder_keeps_what_all_threads_write(tmp_path):
    pytest.importorskip("pyarrow")
    recorder = hc.Recorder(tmp_path)

    def program(i):
        recorder(i=i)
        return i

    step = jax.jit(program)

    def work(number):
        for i in range(TIMES):
            step(np.int32(1000 * number + i)).block_until_ready()

    at_once(work)
    hc.barrier()
    table = recorder.table()
    recorder.close()
    assert sorted(table["i"].to_pylist()) == [
        1000 * n + i for n in range(THREADS) for i in range(TIMES)
    ]


def test_an_object_is_called_by_one_thread_at_a_time():
    class Account:
        def __init__(self):
            self.sum = 0

        def add(self, x):
            before = self.sum
            for _ in range(100):  # another thread may run meanwhile
                pass
            self.sum = before + int(x)
            return np.int32(self.sum)

    one = jax.ShapeDtypeStruct((), np.int32)
    with hc.Object(Account, methods={"add": one}) as account:
        step = jax.jit(account.add)
        seen = [[] for _ in range(THREADS)]

        def work(number):
            for _ in range(TIMES):
                seen[number].append(int(step(np.int32(1))))

        at_once(work)
    assert sorted(itertools.chain(*seen)) == [*range(1, THREADS * TIMES + 1)]
    assert all(numbers == sorted(numbers) for numbers in seen)


def test_each_thread_gets_the_exception_of_its_own_call():
    class Mine(Exception):
        pass

    def host(x):
        raise Mine(int(x))

    program = jax.jit(lambda x: hc.call(host, SCALAR, x))

    def work(number):
        for i in range(TIMES):
            with pytest.raises(Mine) as caught, hc.reraise():
                program(np.float32(1000 * number + i)).block_until_ready()
            assert caught.value.args == (1000 * number + i,)

    at_once(work)
