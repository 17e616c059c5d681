"""cache= with several callers of one key at the same time."""

import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from limits import HANG_SECONDS, holds_in_time

import hostcall as hc

X = np.arange(4, dtype=np.float32)
WAIT = HANG_SECONDS / 4


class Gate:
    """A function that runs until the test lets it end, and how often it was entered."""

    def __init__(self):
        self.entered, self.end, self.ran = threading.Semaphore(0), threading.Event(), []

    def __call__(self, x):
        self.ran.append(float(np.max(x)))
        self.entered.release()
        assert self.end.wait(WAIT)
        return 2 * x


def in_threads(run, count):
    pool = futures.ThreadPoolExecutor(count)
    tasks = [pool.submit(run, i) for i in range(count)]
    pool.shutdown(wait=False)
    return tasks


def on(i, x):
    """Each device runs one program at a time: on others, calls may meet."""
    return jax.device_put(x, jax.devices()[i % len(jax.devices())])


def waiting(host):
    """How many calls of a function wait for another's computation."""
    flights = host.policy.cache.cache.under_way.values()
    return sum(flight.waiting for flight in list(flights))


PROGRAMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "sequential": lambda f: jax.jit(jax.vmap(f)),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_concurrent_callers_compute_once(kind):
    gate = Gate()
    f = hc.host(gate, result=hc.results.like(0), cache="memory")
    program = PROGRAMS[kind](f)
    x = X if kind != "sequential" else X[:1]
    tasks = in_threads(lambda i: np.asarray(program(on(i, x))), 4)
    assert gate.entered.acquire(timeout=WAIT)
    # Programs of several devices need not run at once: older ones of JAX do not.
    assert kind != "eager" or holds_in_time(lambda: waiting(f) == 3)
    gate.end.set()
    for task in tasks:
        np.testing.assert_array_equal(task.result(WAIT), 2 * x)
    assert len(gate.ran) == 1


def test_batches_with_common_rows_compute_each_once():
    """Each batch computes what it claimed before it waits for the other's rows."""
    gate = Gate()
    f = hc.host(gate, result=hc.results.like(0), cache="memory", vmap_method="parallel")
    program = jax.jit(jax.vmap(f))
    batches = [X, X[::-1].copy(), X[[2, 0, 3, 1]]]
    gate.end.set()
    for _ in range(5):
        f.cache_clear()
        gate.ran.clear()
        tasks = in_threads(lambda i: np.asarray(program(on(i, batches[i]))), 3)
        for batch, task in zip(batches, tasks, strict=True):
            np.testing.assert_array_equal(task.result(WAIT), 2 * batch)
        assert sorted(gate.ran) == X.tolist()


def test_if_the_computation_fails_one_that_waits_computes():
    gate = Gate()

    def fails_first(x):
        value = gate(x)
        if len(gate.ran) == 1:
            raise LookupError("no")
        return value

    f = hc.host(fails_first, result=hc.results.like(0), cache="memory")
    tasks = in_threads(lambda _: np.asarray(f(X)), 3)
    assert gate.entered.acquire(timeout=WAIT)
    assert holds_in_time(lambda: waiting(f) == 2)
    gate.end.set()
    outcomes = [task.exception(WAIT) for task in tasks]
    assert sum(isinstance(error, LookupError) for error in outcomes) == 1
    assert outcomes.count(None) == 2
    assert len(gate.ran) == 2


def test_a_function_that_calls_itself_for_the_same_key():
    """The inner call, of a program that the function starts, computes and does not
    wait for the outer one.
    """
    depth = []

    def again(x):
        depth.append(1)
        if len(depth) == 3:
            return x
        inner = f if len(depth) == 1 else jax.jit(f)
        return np.asarray(inner(jnp.asarray(x))) + 1

    f = hc.host(again, result=hc.results.like(0), cache="memory")
    np.testing.assert_array_equal(jax.jit(f)(X), X + 2)
    depth.clear()
    np.testing.assert_array_equal(f(2 * X), 2 * X + 2)


@pytest.mark.parametrize("committed", [False, True], ids=["", "committed"])
def test_functions_that_run_programs_while_others_wait(committed):
    """All threads of XLA's pool may be in calls that wait for one whose own program
    needs a thread.
    """
    if committed and jax.__version_info__ < (0, 12):
        pytest.skip("may hang without a cache too (docs/design/threads.md)")
    ran = []
    inner = jax.jit(lambda x: (x @ x.T) / 300)

    def computes(x):
        ran.append(1)
        x = jax.device_put(x, jax.devices()[0]) if committed else jnp.asarray(x)
        return np.asarray(inner(x))

    f = hc.host(computes, result=hc.results.like(0), cache="memory")

    @jax.jit
    def program(x):  # large enough for XLA to run it on a thread of its own
        return f(x @ x / 300) @ x

    x = np.ones((300, 300), np.float32)
    wanted = np.asarray(program(x))
    for _ in range(5):
        f.cache_clear()
        ran.clear()
        tasks = in_threads(lambda i: np.asarray(program(on(i, x))), 8)
        for task in tasks:
            np.testing.assert_array_equal(task.result(WAIT), wanted)
        # Calls on XLA's threads do not wait: each of them may compute. One that is
        # asked to be made inside one of XLA's host callbacks runs again.
        assert 1 <= len(ran) <= 9


@pytest.mark.parametrize("method", ["sequential", "parallel"])
def test_a_time_limit_holds_for_the_computation(method):
    gate = Gate()
    f = hc.host(
        gate, result=hc.results.like(0), cache="memory", timeout=0.1, vmap_method=method
    )
    with pytest.raises(hc.errors.CallTimeoutError), hc.reraise():
        jax.block_until_ready(jax.jit(jax.vmap(f))(X[:2]))
    gate.end.set()
    np.testing.assert_array_equal(jax.vmap(f)(X[:2]), 2 * X[:2])


def test_devices_of_a_mesh_share_the_results():
    ran = []

    def sine(x):
        ran.append(1)
        return np.sin(x)

    f = hc.host(sine, result=hc.results.like(0), cache="memory")
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    program = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))
    x = np.tile(X, 4)
    np.testing.assert_array_equal(program(x), np.sin(x))
    computed = len(ran)
    assert 1 <= computed <= 4  # calls on XLA's threads do not wait for each other
    np.testing.assert_array_equal(program(x), np.sin(x))
    assert len(ran) == computed


def test_ctrl_c_ends_the_wait_for_another_computation(run_python):
    done = run_python(
        """
        import os, signal, threading
        import numpy as np
        import hostcall as hc

        entered, end = threading.Event(), threading.Event()

        def slow(x):
            entered.set()
            end.wait(120)
            return x

        f = hc.host(slow, result=hc.results.like(0), cache="memory")
        first = threading.Thread(target=lambda: print(f(1.0)))
        first.start()
        entered.wait(120)
        flights = f.policy.cache.cache.under_way

        def interrupt():
            while not any(flight.waiting for flight in flights.values()):
                pass
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            f(1.0)
        except KeyboardInterrupt:
            print("interrupted")
        end.set()
        first.join()
        print(f(1.0))
        """
    )
    assert done.stdout.split() == ["interrupted", "1.0", "1.0"]


def test_a_forked_child_keeps_functions_apart(run_python):
    """One of the parent's and one that the child makes."""
    done = run_python(
        """
        import os
        import numpy as np, jax
        import hostcall as hc
        S = jax.ShapeDtypeStruct((), "float32")
        one = hc.host(lambda x: np.float32(x + 1), result=S, cache="memory")
        child = os.fork()
        if child:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        other = hc.host(lambda x: np.float32(x * 100), result=S, cache="memory")
        assert float(one(3.0)) == 4 and float(other(3.0)) == 300
        del one
        import gc; gc.collect()
        assert float(other(3.0)) == 300
        os._exit(0)
        """
    )
    assert done.returncode == 0
