"""Rows, and their derivatives, in other processes: pools, Dask, Ray."""

import contextlib
import copy
import multiprocessing
import os
import pickle
import sys
import threading
import traceback
from concurrent import futures
from multiprocessing.pool import ThreadPool

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from limits import HANG_SECONDS

import hostcall as hc

X = np.array([0.3, -1.2, 2.0, -0.5], dtype=np.float32)
PID = jax.ShapeDtypeStruct((), np.int32)
SPAWN = multiprocessing.get_context("spawn")


def pid():
    return np.int32(os.getpid())


# --- Functions of this module, which are pickled by name -----------------------------


def sine(x):
    return np.sin(x), pid()


def push(primals, tangents):
    (x,), (t,) = primals, tangents
    return np.cos(x) * t, np.zeros((), jax.dtypes.float0)


class Residual:
    """An object that records where it was made."""

    def __init__(self, x):
        self.slope, self.made_in = np.cos(x), os.getpid()


def forward(x):
    return sine(x), Residual(x)


def backward(residual, cotangent):
    assert residual.made_in == os.getpid() or multiprocessing.parent_process()
    return (residual.slope * cotangent[0],)


def fails(x):
    if x > 1:
        raise LookupError(f"no {x:.1f} here")
    return x


def dies(x):
    os._exit(3) if x > 1 else None
    return x


def leaves_a_lock(x):
    import threading

    return np.sin(x), threading.Lock()


@hc.host(result=hc.results.like(0), vmap_method="parallel")
def decorated(x):
    return np.sin(x)


@decorated.defjvp
def _(primals, tangents):
    return np.cos(primals[0]) * tangents[0]


# --- Executors --------------------------------------------------------------------------


@contextlib.contextmanager
def process_pool():
    with futures.ProcessPoolExecutor(2, mp_context=SPAWN) as pool:
        yield pool


@contextlib.contextmanager
def multiprocessing_pool():
    with SPAWN.Pool(2) as pool:
        yield pool


@contextlib.contextmanager
def dask_client():
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=None,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@contextlib.contextmanager
def ray_pool():
    pytest.importorskip("ray")
    import ray.util.multiprocessing

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
    )
    pool = ray.util.multiprocessing.Pool(2)
    yield pool
    pool.terminate()
    ray.shutdown()


@contextlib.contextmanager
def loky_pool():
    loky = pytest.importorskip("loky")
    with loky.ProcessPoolExecutor(2) as pool:
        yield pool


KINDS = {
    "processes": process_pool,
    "multiprocessing": multiprocessing_pool,
    "dask": dask_client,
    "loky": loky_pool,
    "ray": ray_pool,
}
KEPT_BY_OTHERS = pytest.mark.filterwarnings("default")  # other libraries'


@pytest.fixture(scope="module", params=KINDS)
def executor(request):
    with KINDS[request.param]() as executor:
        yield executor


@pytest.fixture
def processes():
    with futures.ProcessPoolExecutor(2, mp_context=forked.CONTEXT) as pool:
        yield pool


def host(fn, executor, result=hc.results.like(0)):
    return hc.host(fn, result=result, vmap_method="parallel", executor=executor)


def value_and_pid(x):
    return x, PID


# --- Values and derivatives --------------------------------------------------------------


@KEPT_BY_OTHERS
def test_values_and_derivatives(executor):
    f = host(sine, executor, value_and_pid)
    f.defjvp(push)
    f.defvjp(forward, backward)

    @jax.jit
    @jax.vmap
    def forward_mode(x):
        return jax.jvp(f, (x,), (2 * x,))

    @jax.jit
    @jax.vmap
    def reverse_mode(x):
        return jax.value_and_grad(f, has_aux=True)(x)

    (values, there), (dots, _) = forward_mode(X)
    np.testing.assert_allclose(values, np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(dots, np.cos(X) * 2 * X, rtol=1e-6)
    (values, also_there), slopes = reverse_mode(X)
    np.testing.assert_allclose(values, np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(slopes, np.cos(X), rtol=1e-6)
    assert os.getpid() not in {*there.tolist(), *also_there.tolist()}


@KEPT_BY_OTHERS
def test_residuals_that_have_gone_are_made_again_there(executor):
    f = host(sine, executor, value_and_pid)
    f.defvjp(forward, backward)
    hc.configure(residuals=0)
    try:
        _, pull = jax.vjp(jax.vmap(f), X)
        ct = (jnp.ones_like(X), np.zeros(4, jax.dtypes.float0))
        for _ in range(2):
            np.testing.assert_allclose(pull(ct)[0], np.cos(X), rtol=1e-6)
    finally:
        hc.configure(residuals=1024)


@KEPT_BY_OTHERS
def test_an_error_of_a_worker_has_the_traceback_from_there(executor):
    f = jax.jit(jax.vmap(host(fails, executor)))
    with pytest.raises(LookupError, match=r"no 2\.0 here") as caught, hc.reraise():
        jax.block_until_ready(f(X))
    assert "raise LookupError" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(jax.errors.JaxRuntimeError, match="LookupError: no 2.0 here"):
        jax.block_until_ready(f(X))
    good = np.minimum(X, 1)
    assert f(good).tolist() == good.tolist()


def test_decorated_functions_are_sent_by_name(processes):
    before, decorated.policy = decorated.policy, host(np.sin, processes).policy
    try:
        values, dots = jax.vmap(lambda x: jax.jvp(decorated, (x,), (1.0,)))(X)
    finally:
        decorated.policy = before
    np.testing.assert_allclose(values, np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(dots, np.cos(X), rtol=1e-6)


@KEPT_BY_OTHERS
def test_functions_without_a_name_are_sent_by_value(executor):
    if isinstance(executor, futures.ProcessPoolExecutor | multiprocessing.pool.Pool):
        pytest.skip("sends functions by name")
    two = 2
    f = jax.vmap(host(lambda x: two * x, executor))
    assert f(X).tolist() == (2 * X).tolist()


# --- What goes wrong ---------------------------------------------------------------------


def test_a_function_that_cannot_be_sent(processes):
    f = jax.vmap(host(lambda x: x, processes))
    with pytest.raises(
        hc.errors.SpecError, match="can't be sent to another process"
    ) as e:
        f(X)
    assert "at the top level of a module" in str(e.value)


def test_a_residual_that_cannot_come_back(processes):
    f = host(np.sin, processes)
    f.defvjp(leaves_a_lock, backward)
    with pytest.raises(TypeError, match="cannot pickle") as caught, hc.reraise():
        jax.block_until_ready(jax.jit(jax.vmap(jax.grad(f)))(X))
    note = caught.value.__notes__[-1]  # pickle adds some of its own from 3.14 on
    assert "what `leaves_a_lock` returns" in note
    assert "residuals=" in note


def test_a_worker_that_dies(processes):
    f = jax.jit(jax.vmap(host(dies, processes)))
    with pytest.raises(futures.BrokenExecutor) as caught, hc.reraise():
        jax.block_until_ready(f(X))
    (note,) = caught.value.__notes__
    assert "of `dies` failed because a worker of executor= has died" in note
    assert "Make a new executor" in note


def test_a_new_pool_of_loky_after_a_worker_has_died(run_python, tmp_path):
    """In a process of its own: loky keeps the pool that it made last."""
    pytest.importorskip("loky")
    run_python(
        """
        import concurrent.futures, os, pathlib, sys
        import jax, jax.numpy as jnp, loky
        import hostcall as hc

        died = pathlib.Path(sys.argv[1]) / "died"

        def dies_once(x):
            if x == 5 and not died.exists():
                died.touch()
                os._exit(3)
            return x + 1

        def run(xs):
            pool = loky.get_reusable_executor(2)
            how = {"vmap_method": "parallel", "executor": pool}
            f = jax.jit(jax.vmap(hc.host(dies_once, result=lambda x: x, **how)))
            with hc.reraise():
                return pool, jax.block_until_ready(f(xs))

        if __name__ == "__main__":
            xs = jnp.arange(12.0)
            try:
                run(xs)
                raise SystemExit("no worker died")
            except concurrent.futures.BrokenExecutor:
                pass
            pool, values = run(xs)
            assert values.tolist() == (xs + 1).tolist()
            assert run(xs)[0] is pool  # without a death the pool stays
            pool.shutdown()
        """,
        str(tmp_path),
    )


def test_the_time_limit_holds_for_derivatives():
    leave = threading.Event()

    def slow(residual, ct):
        leave.wait(HANG_SECONDS)
        return (ct,)

    for method in ("sequential", "parallel"):
        f = hc.host(np.sin, result=hc.results.like(0), vmap_method=method, timeout=0.1)
        f.defvjp(lambda x: (np.sin(x), None), slow)
        with (
            pytest.raises(hc.errors.CallTimeoutError, match=r"timeout=0\.1"),
            hc.reraise(),
        ):
            jax.block_until_ready(jax.jit(jax.vmap(jax.grad(f)))(X))
    leave.set()


def test_an_error_in_a_pool_of_threads_of_multiprocessing():
    with ThreadPool(2) as pool, pytest.raises(LookupError, match="no 2.0 here"):
        jax.vmap(host(lambda x: fails(x), pool))(X)


def test_an_executor_that_is_shut_down_meanwhile():
    class Pool(futures.ThreadPoolExecutor):
        """Shuts down once it has all rows, while one of them runs."""

        rows = 0

        def submit(self, *args, **kwargs):
            task = super().submit(*args, **kwargs)
            self.rows += 1
            if self.rows == len(X):
                started.wait(60)
                self.shutdown(wait=False, cancel_futures=True)
                shut_down.set()
            return task

    started, shut_down = threading.Event(), threading.Event()

    def slow(x):
        started.set()
        shut_down.wait(60)
        return x

    f = jax.jit(jax.vmap(host(slow, Pool(1))))
    with pytest.raises(futures.CancelledError), hc.reraise():
        jax.block_until_ready(f(X))


def test_a_function_is_copied_and_pickled_without_its_executor(processes):
    f = host(np.sin, processes)
    assert copy.deepcopy(f) is f
    assert pickle.loads(pickle.dumps(f)).policy.pool is None
    np.testing.assert_allclose(jax.vmap(f)(X), np.sin(X), rtol=1e-6)
