"""Coroutine functions that fail, are late, are interrupted, or could not run."""

from __future__ import annotations

import asyncio
import gc
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import policies
import pytest
from limits import holds_in_time

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)


class Mine(Exception):
    pass


async def same(x):
    return x


def rows(fn, **options):
    return jax.jit(
        jax.vmap(lambda x: policies.call(fn, F32, x, vmap_method="parallel", **options))
    )


class Forever:
    """Waits until it is cancelled, except for the rows that fail."""

    def __init__(self, failing=()):
        self.failing, self.cancelled, self.begun = failing, [], []

    async def __call__(self, x):
        self.begun.append(int(x))
        if int(x) in self.failing:
            raise Mine(f"row {int(x)}")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(int(x))
            raise


# --- Failures ----------------------------------------------------------------------


def test_the_first_failure_cancels_the_rows_beside_it():
    forever = Forever(failing={3})
    f = rows(forever, concurrency=8)
    with pytest.raises(Mine, match="row 3"), hc.reraise():
        f(jnp.arange(6.0)).block_until_ready()
    assert forever.cancelled == [0, 1, 2]
    assert forever.begun == [0, 1, 2, 3]  # the others did not begin


def test_the_error_says_which_row():
    f = jax.jit(jax.vmap(rows(Forever(failing={3}), concurrency=8)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"Mine: row 3.*row \(1, 1\)"):
        f(jnp.arange(6.0).reshape(3, 2)).block_until_ready()


def test_plain_rows_say_so_too():
    def plain(x):
        if x == 3:
            raise Mine("plain")
        return x

    with pytest.raises(jax.errors.JaxRuntimeError, match="Mine: plain.*row 3"):
        rows(plain)(jnp.arange(6.0)).block_until_ready()


def test_an_eager_call_raises_the_exception_itself():
    with pytest.raises(Mine, match="row 1"):
        hc.call(Forever(failing={1}), F32, 1.0)


def test_an_exception_without_attributes():
    class Odd(Exception):
        @property
        def __dict__(self):
            raise LookupError("no dict")

    async def fails(x):
        raise Odd

    with pytest.raises(Odd):
        hc.call(fails, F32, 1.0)


def test_rows_that_wait_for_their_turn_never_begin():
    forever = Forever(failing={0})
    with pytest.raises(jax.errors.JaxRuntimeError, match="row 0"):
        rows(forever, concurrency=1)(jnp.arange(9.0)).block_until_ready()
    assert forever.begun == [0]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_the_loop_survives_what_would_end_it(kind):
    async def leave(x):
        raise kind(3)

    with pytest.raises((jax.errors.JaxRuntimeError, kind)):
        jax.jit(lambda x: hc.call(leave, F32, x))(1.0).block_until_ready()
    assert jax.jit(lambda x: hc.call(same, F32, x))(1.0) == 1


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_the_loop_survives_what_ends_a_task_of_the_users(kind, caplog):
    async def leave():
        raise kind(3)

    async def gathers(x):
        await asyncio.gather(leave())

    with pytest.raises((jax.errors.JaxRuntimeError, kind)):
        jax.jit(lambda x: hc.call(gathers, F32, x))(1.0).block_until_ready()
    assert jax.jit(lambda x: hc.call(same, F32, x))(1.0) == 1
    assert "a task on hostcall's event loop raised" in caplog.text


def test_a_loop_whose_thread_does_not_start(run_python):
    done = run_python(
        """
        import threading
        import jax, jax.numpy as jnp
        import hostcall as hc
        F32 = jax.ShapeDtypeStruct((), jnp.float32)
        start, failing = threading.Thread.start, [RuntimeError("no thread")]

        def starts(thread):
            if thread.name == "hostcall-loop" and failing:
                raise failing.pop()
            start(thread)

        threading.Thread.start = starts

        async def same(x):
            return x

        for _ in range(2):
            try:
                print(hc.call(same, F32, 1.0))
            except RuntimeError as error:
                print(error)
        """
    )
    assert done.stdout.splitlines() == ["no thread", "1.0"]


def test_a_task_that_others_cancel():
    async def cancelled(x):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    with pytest.raises(hc.errors.HostcallError, match="but not by hostcall"):
        hc.call(cancelled, F32, 1.0)


def test_errors_leave_no_cycle():
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(jax.errors.JaxRuntimeError):
            rows(Forever(failing={1}))(jnp.arange(3.0)).block_until_ready()
        assert jax.jit(lambda x: hc.call(same, F32, x))(1.0) == 1
    finally:
        gc.enable()


# --- Timeouts ----------------------------------------------------------------------


def test_a_timeout_cancels_and_says_where_it_waits():
    forever = Forever()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        rows(forever, timeout=2.0)(jnp.arange(3.0)).block_until_ready()
    text = str(caught.value)
    assert "CallTimeoutError" in text
    assert "timeout=2.0 s; row 0 of 3 waits in:" in text
    assert "await asyncio.Event().wait()" in text
    assert forever.cancelled == [0, 1, 2]


def test_a_timeout_does_not_wait_for_a_coroutine_that_refuses_to_end():
    release, ended = asyncio.Event(), []

    async def stubborn(x):
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                asyncio.get_running_loop().call_later(2, release.set)
        ended.append(1)

    with pytest.raises(hc.errors.CallTimeoutError, match="took longer than timeout"):
        hc.call(hc.host(stubborn, timeout=2.0), F32, 1.0)
    assert not ended
    assert holds_in_time(lambda: ended == [1])


# --- Loops -------------------------------------------------------------------------


def test_a_program_on_the_thread_of_the_loop():
    f = jax.jit(lambda x: hc.call(same, F32, x, order="unordered"))

    async def outer(x):
        return f(x)

    text = re.escape("await asyncio.to_thread(program, x)")
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.jit(lambda x: hc.call(outer, F32, x))(1.0).block_until_ready()

    async def right(x):
        return await asyncio.to_thread(lambda: np.asarray(f(x)))

    assert jax.jit(lambda x: hc.call(right, F32, x))(1.0) == 1


def test_a_loop_that_is_closed():
    loop = asyncio.new_event_loop()
    hc.configure(loop=loop)
    loop.close()
    try:
        with pytest.raises(hc.errors.HostcallError, match="loop=\\) is closed"):
            hc.call(same, F32, 1.0)
    finally:
        hc.configure(loop="own")


# --- What is refused -----------------------------------------------------------------

OPTIONS = {
    "executor= and is a coroutine": {
        "executor": ThreadPoolExecutor(1),
        "vmap_method": "parallel",
    },
    "lend=True and is a coroutine": {"lend": True},
    "arrays='cuda' and is a coroutine": {"arrays": "cuda"},
    "an int of 1 or more (below 2**31), got 0": {"concurrency": 0},
    "an int of 1 or more (below 2**31), got True": {"concurrency": True},
}


@pytest.mark.parametrize("text", OPTIONS)
@pytest.mark.parametrize("face", ["call", "host"])
def test_options(text, face):
    with pytest.raises(hc.errors.SpecError, match=re.escape(text)):
        if face == "call":
            policies.call(same, F32, 1.0, **OPTIONS[text])
        else:
            hc.host(same, result=F32, **OPTIONS[text])


def test_concurrency_is_for_coroutine_functions():
    with pytest.raises(hc.errors.SpecError, match="not a coroutine function. Make it"):
        hc.call(hc.host(np.sin, concurrency=3), F32, 1.0)
    with pytest.raises(hc.errors.SpecError, match="not a coroutine function. Make it"):
        hc.host(np.sin, result=F32, concurrency=3)


def test_rules_that_could_not_run():
    function = hc.host(lambda x: x, result=hc.results.like(0))
    plain = hc.host(np.cos, result=hc.results.like(0))
    for rule in (
        lambda: function.defjvp(same, where="jax"),
        lambda: function.defbatch(same),
        # A rule that is a HostFunction makes both JAX code.
        lambda: function.defvjp(plain, same),
        lambda: function.defvjp(same, plain),
    ):
        with pytest.raises(hc.errors.SpecError, match="a coroutine function and JAX"):
            rule()
    lends = hc.host(lambda x: x, result=hc.results.like(0), lend=True)
    with pytest.raises(hc.errors.SpecError, match="`same` has lend=True and is"):
        lends.defvjp(same, same)


def test_configure_refuses_what_is_no_loop():
    with pytest.raises(hc.errors.SpecError, match="got 'mine'"):
        hc.configure(loop="mine")


@pytest.mark.parametrize("result", [F32, (F32,)])
def test_a_plain_function_that_returns_a_coroutine(result):
    with pytest.raises(hc.errors.ResultError, match="pass the `async def` function"):
        hc.call(lambda x: same(x), result, 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hc.pure_callback(same, F32, 1.0),
        lambda: hc.io_callback(same, F32, 1.0),
        lambda: hc.debug.callback(same, 1.0),
        lambda: hc.buffers.buffer_callback(same, F32)(1.0),
    ],
)
def test_drop_ins_refuse_coroutine_functions(make):
    with pytest.raises(hc.errors.SpecError, match="`same` is a coroutine function"):
        make()


def test_patched_jax_refuses_them_too():
    with hc.patch_jax():
        for make in (
            lambda x: jax.pure_callback(same, F32, x),
            lambda x: jax.experimental.io_callback(same, F32, x),
            lambda x: jax.debug.callback(same, x),
        ):
            with pytest.raises(hc.errors.SpecError, match="is a coroutine function"):
                jax.jit(make)(1.0)


# --- Processes -----------------------------------------------------------------------

HEAD = """
import asyncio, os, signal, sys, threading
import jax, jax.numpy as jnp, numpy as np
import hostcall as hc
F32 = jax.ShapeDtypeStruct((), jnp.float32)
begun = threading.Event()
cancelled = []

async def forever(x):
    begun.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.append(int(x))
        raise

async def same(x):
    return x

f = jax.jit(jax.vmap(lambda x: hc.call(
    forever, F32, x, vmap_method="parallel", order=ORDER)))
x = jnp.arange(4.0)
"""


@pytest.mark.parametrize("order", ["pure", "unordered"])
def test_ctrl_c_cancels_all_that_wait(run_python, order):
    done = run_python(
        HEAD.replace("ORDER", repr(order))
        + """
def interrupt():
    begun.wait()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    np.asarray(f(x))
except KeyboardInterrupt:
    print("interrupted", cancelled)
print(jax.jit(lambda x: hc.call(same, F32, x))(2.0))
"""
    )
    assert done.stdout.splitlines() == ["interrupted [0, 1, 2, 3]", "2.0"]


def test_the_end_of_the_process_interrupts_what_waits(run_python):
    done = run_python(
        HEAD.replace("ORDER", "'unordered'")
        + """
thread = threading.Thread(target=lambda: f(x), daemon=True)
thread.start()
begun.wait()
""",
        env={"HOSTCALL_EXIT_TIMEOUT": "0.2"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_tasks_that_outlive_their_call_are_cancelled_at_the_end(run_python):
    done = run_python(
        HEAD.replace("ORDER", "'pure'")
        + """
async def starts(x):
    global kept
    kept = asyncio.create_task(after())
    await asyncio.sleep(0)
    return x
async def after():
    try:
        await asyncio.Event().wait()
    finally:
        print("ended", flush=True)
print(hc.call(starts, F32, 1.0))
"""
    )
    assert done.stdout.split() == ["1.0", "ended"]
    assert done.stderr == ""


def test_a_forked_child_ends(run_python):
    done = run_python(
        HEAD.replace("ORDER", "'pure'")
        + """
import warnings
warnings.simplefilter("ignore")
print(hc.call(same, F32, 1.0), flush=True)
pid = os.fork()
if pid == 0:
    try:
        hc.call(same, F32, 1.0)
    except Exception as error:
        print(type(error).__name__, flush=True)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    )
    assert done.stdout.split() == ["1.0", "HostcallError", "0"]
