"""The whole texts of calls that are late, cancelled, closed, blocked, or can't be sent.

They are compared as words, so that lines may break anywhere. Paths, line numbers and
the like are replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import forked
import jax
import jax.numpy as jnp
import numpy as np
import policies
import pytest
from limits import HANG_SECONDS
from loops import close_under
from meshes import line
from platforms import without_xlas_words

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)
SECONDS = 0.3


def failure_of(run):
    """The text of the error that a function raises, and the notes of hostcall."""
    with pytest.raises(BaseException) as caught, hc.reraise():
        jax.block_until_ready(run())
    notes = getattr(caught.value, "__notes__", ())
    return [str(caught.value), *(n for n in notes if n.startswith("hostcall:"))]


def same_words(texts, want):
    text = "\n".join(texts)
    text = re.sub(r'File ".*", line \d+', 'File "FILE", line N', text)
    text = re.sub(r"process \d+", "process N", text)
    text = re.sub(r"called at .+?:\d+", "called at FILE:N", text)
    text = re.sub(r"^[ ~^]+\n", "", text, flags=re.MULTILINE)  # from Python 3.13 on
    assert text.split() == want.split()


def one(fn, **options):
    fn, place = policies.split(fn, options)
    return jax.jit(lambda x: hc.call(fn, F32, x, **place))


def rows(fn, **options):
    fn, place = policies.split(fn, {"vmap_method": "parallel", **options})
    return jax.jit(jax.vmap(lambda x: hc.call(fn, F32, x, **place)))


async def same(x):
    return x


# --- Late ------------------------------------------------------------------------------


@pytest.fixture
def stuck():
    """A function that waits until the test has ended."""
    released = threading.Event()

    def stuck(x):
        released.wait()
        return x

    stuck.__qualname__ = "stuck"
    yield stuck
    released.set()


async def forever(x):
    await asyncio.Event().wait()


ON_A_THREAD = """
    hostcall: `stuck`(float32[]) took longer than timeout=0.3 s; it is stuck in:
      File "FILE", line N, in stuck
        released.wait()
    [hc-timeout] python -m hostcall explain hc-timeout
"""


def test_a_late_call(stuck):
    told = failure_of(lambda: one(stuck, timeout=SECONDS)(1.0))
    same_words(told, ON_A_THREAD)


def test_a_late_row(stuck):
    told = failure_of(lambda: jax.vmap(one(stuck, timeout=SECONDS))(jnp.arange(3.0)))
    same_words(told, ON_A_THREAD)


@pytest.mark.parametrize(
    ("count", "which"), [(3, "row 0 of 3"), (40, "one of rows 0 to 4 of 40")]
)
def test_late_rows_of_an_executor(stuck, count, which):
    pool = ThreadPoolExecutor(2)
    late = rows(stuck, timeout=SECONDS, executor=pool)
    told = failure_of(lambda: late(jnp.arange(float(count))))
    same_words(
        told,
        f"""
        hostcall: `stuck`(float32[]) took longer than timeout=0.3 s; {which}
        [hc-timeout] python -m hostcall explain hc-timeout
        """,
    )


@pytest.mark.parametrize("batch", [False, True])
def test_a_late_coroutine(batch):
    def run():
        if batch:
            return rows(forever, timeout=SECONDS)(jnp.arange(3.0))
        return one(forever, timeout=SECONDS)(1.0)

    same_words(
        failure_of(run),
        f"""
        hostcall: `forever`(float32[]) took longer than timeout=0.3 s;
        {"row 0 of 3" if batch else "it"} waits in:
          File "FILE", line N, in forever
            await asyncio.Event().wait()
          File "FILE", line N, in wait
            await fut
        [hc-timeout] python -m hostcall explain hc-timeout
        """,
    )


# --- Cancelled, closed, blocked --------------------------------------------------------


def test_a_task_that_others_cancel():
    async def cancelled(x):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    cancelled.__qualname__ = "cancelled"
    same_words(
        failure_of(lambda: one(cancelled)(1.0)),
        """
        hostcall: `cancelled` was cancelled, but not by hostcall: something cancelled
        its task, or it raised asyncio.CancelledError
        [hc-worker] python -m hostcall explain hc-worker
        """,
    )


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    hc.configure(loop=made)
    yield made
    hc.configure(loop="own")
    made.close()


def test_a_loop_that_is_closed(loop):
    loop.close()
    same_words(
        failure_of(lambda: one(same)(1.0)),
        """
        hostcall: the event loop given by hc.configure(loop=) is closed. Give a running
        loop, or hc.configure(loop='own') for hostcall's
        [hc-closed] python -m hostcall explain hc-closed
        """,
    )


def test_a_loop_that_is_closed_under_a_call(loop):
    begun, told = threading.Event(), []

    async def waits(x):
        begun.set()
        await asyncio.Event().wait()

    waits.__qualname__ = "waits"
    call = lambda: one(waits)(1.0)
    close_under(loop, lambda: told.extend(failure_of(call)), begun)
    same_words(
        told,
        """
        hostcall: the event loop was closed before the coroutine function `waits` had
        ended. Keep the loop of hc.configure(loop=) open until the programs have ended;
        hostcall's own closes at the end of the process
        [hc-worker] python -m hostcall explain hc-worker
        """,
    )


class Warned(logging.Handler):
    """Keeps the texts of warnings, and says when one came."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts, self.came = [], threading.Event()

    def emit(self, record):
        self.texts.append(record.getMessage())
        self.came.set()


@pytest.fixture
def warned():
    handler = Warned()
    logging.getLogger("hostcall").addHandler(handler)
    yield handler
    logging.getLogger("hostcall").removeHandler(handler)


def test_a_loop_that_does_not_run(loop, warned):
    caller = threading.Thread(target=lambda: one(same)(1.0).block_until_ready())
    caller.start()
    assert warned.came.wait(HANG_SECONDS)
    runs = threading.Thread(target=loop.run_forever)
    runs.start()
    caller.join(HANG_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    runs.join(HANG_SECONDS)
    same_words(
        warned.texts,
        """
        hostcall: a program waits for the coroutine function `same`, but the event loop
        given by hc.configure(loop=) does not run. Run it on another thread, or leave
        out loop= for hostcall's own
        """,
    )


def test_a_loop_that_is_blocked(warned):
    entered, caller = threading.Event(), None

    async def blocks(x):
        entered.set()
        warned.came.wait(HANG_SECONDS)
        return x

    blocker = threading.Thread(target=lambda: one(blocks)(1.0).block_until_ready())
    caller = threading.Thread(target=lambda: one(same)(1.0).block_until_ready())
    blocker.start()
    assert entered.wait(HANG_SECONDS)
    caller.start()
    caller.join(HANG_SECONDS)
    blocker.join(HANG_SECONDS)
    same_words(
        warned.texts,
        """
        hostcall: a program has waited 5 s for the event loop to take up `same`:
        something blocks the loop's thread. If it waits for the program itself, run that
        on another thread: await asyncio.to_thread(program, x). In coroutine functions,
        use await asyncio.sleep and the like in place of calls that block
        """,
    )


# --- It would wait for itself ----------------------------------------------------------


def test_a_program_on_the_thread_of_the_loop():
    async def outer(x):
        return hc.call(same, F32, x)

    same_words(
        failure_of(lambda: one(outer)(1.0)),
        """
        hostcall: a program that calls the coroutine function `same` was run on the
        thread of the event loop that should run it, so it would wait for itself. Run
        the program on another thread: await asyncio.to_thread(program, x)
        [hc-deadlock] python -m hostcall explain hc-deadlock
        """,
    )


def test_a_program_over_devices_that_are_busy():
    x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(line(), jax.P("x")))
    total = jax.jit(jnp.sum)
    program = jax.jit(lambda v: hc.call(lambda _: np.asarray(total(x)), F32, v))
    same_words(
        failure_of(lambda: program(x)),
        """
        hostcall: a callback of a program over several devices started another program
        over some of them. It would wait forever: those devices are busy until the
        callback returns. Compute with NumPy, or on one device (inside a callback, JAX's
        default device is a separate one: jnp.asarray(np.asarray(x))), or move that part
        into the calling program
        [hc-deadlock] python -m hostcall explain hc-deadlock
        """,
    )


def test_a_function_that_runs_its_own_program():
    def program(x):
        return hc.call(program, F32, x)

    same_words(
        failure_of(lambda: program(1.0)),
        """
        hostcall: programs and their host functions are nested 32 deep: a host function
        runs a program that calls a host function, and so on. It probably runs the
        program that called it. If it should compute the same thing, call the Python
        function that the program was made of, with NumPy arrays; a recursion belongs
        inside one host function, or in jax.lax.while_loop
        [hc-recursion] python -m hostcall explain hc-recursion
        """,
    )


# --- Executors -------------------------------------------------------------------------


def locks(x):
    return threading.Lock()


def dies(x):
    os._exit(3)


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(1, mp_context=forked.CONTEXT) as pool:
        yield pool


def test_an_executor_that_was_shut_down():
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    told = failure_of(lambda: rows(np.negative, executor=pool)(jnp.arange(3.0)))
    same_words(told, "cannot schedule new futures after shutdown")


def test_a_function_without_a_name_of_its_own(processes):
    mine = lambda x: x
    mine.__qualname__ = "test.<locals>.mine"
    told = failure_of(lambda: rows(mine, executor=processes)(jnp.arange(3.0)))
    head, _, tail = "\n".join(told).partition("another process: ")
    _, _, tail = tail.partition(". This")  # pickle's own words differ between versions
    same_words(
        [head, tail],
        """
        hostcall: `test.<locals>.mine` or its arguments can't be sent to
        executor sends functions by name: define `test.<locals>.mine` at the top level
        of a module, or pass an executor that sends functions by value (Dask, loky) or
        uses threads
        [hc-pickle] python -m hostcall explain hc-pickle
        """,
    )


def test_a_result_that_has_no_pickle(processes):
    told = failure_of(lambda: rows(locks, executor=processes)(jnp.arange(3.0)))
    same_words(
        told[1:],
        """
        hostcall: row 0 of 3 failed. This executor pickles what `locks` returns, and the
        residuals of a forward rule. Return objects that can be pickled, or declare
        array residuals with residuals=
        """,
    )


def test_a_worker_of_a_process_pool_that_dies():
    with ProcessPoolExecutor(1, mp_context=forked.CONTEXT) as pool:
        told = failure_of(lambda: rows(dies, executor=pool)(jnp.arange(3.0)))
    same_words(
        told[1:],
        """
        hostcall: row 0 of 3 of `dies` failed because a worker of executor= has died. It
        may have crashed, run out of memory, been killed, or failed to import the main
        module (with "spawn", a script needs `if __name__ == "__main__":`). Make a new
        executor: this one is broken
        """,
    )


def test_a_worker_of_a_multiprocessing_pool_that_dies():
    with forked.CONTEXT.Pool(1) as pool:
        told = failure_of(lambda: rows(dies, executor=pool)(jnp.arange(3.0)))
    same_words(
        told,
        """
        hostcall: a worker of executor= has died (process N, exit code 3) while it had
        rows of `dies`, perhaps row 0 of 3. The pool has started another worker, but
        does not run those rows again
        """,
    )


# --- What the program's own error says --------------------------------------------------


def test_the_error_of_the_program_says_where_and_which_row(stuck):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        late = rows(stuck, timeout=SECONDS, executor=ThreadPoolExecutor(2))
        jax.block_until_ready(late(jnp.arange(3.0)))
    said = without_xlas_words(str(caught.value))
    text = re.sub(r"hostcall error \d+", "hostcall error N", said)
    same_words(
        [text],
        """
        INTERNAL: CallTimeoutError: hostcall: `stuck`(float32[]) took longer than
        timeout=0.3 s; row 0 of 3 (in callback `stuck`, called at FILE:N in
        rows.<locals>.<lambda>) [hostcall error N]
        [hc-timeout] python -m hostcall explain hc-timeout
        """,
    )


# --- Nothing between the engine and the function ----------------------------------------


def frame_above(run):
    """The file of the frame that calls a function in a compiled program."""
    above = []

    def function(x):
        frame = sys._getframe(1)
        above.append(frame.f_code.co_filename)
        return x

    jax.block_until_ready(run(function))
    return above[-1]


def is_hostcalls(file):
    return file.startswith(os.path.dirname(hc.__file__) + os.sep)


def test_the_engine_calls_a_plain_function_itself():
    """No function of hostcall's stands between: a layer costs more than the call."""
    assert not is_hostcalls(frame_above(lambda fn: one(fn)(1.0)))
    assert not is_hostcalls(frame_above(lambda fn: jax.vmap(one(fn))(jnp.arange(2.0))))
    assert not is_hostcalls(frame_above(lambda fn: one(fn, order="ordered")(1.0)))
    assert not is_hostcalls(frame_above(lambda fn: one(fn, lend=True)(1.0)))
    # It would be seen.
    assert is_hostcalls(frame_above(lambda fn: rows(fn)(jnp.arange(2.0))))
