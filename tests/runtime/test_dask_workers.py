"""A Dask cluster whose workers come and go while a program runs on it."""

import collections
import threading
import time
import uuid
from concurrent import futures
from pathlib import Path

import jax
import numpy as np
import policies
import pytest
from limits import HANG_SECONDS, holds_in_time

import hostcall as hc

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.filterwarnings("default")  # Dask's own

X = np.arange(8, dtype=np.float32)
WAIT = HANG_SECONDS / 2


def gated(x, folder):
    """Says in a file that the row has begun, and ends when there is a file `go`."""
    Path(folder, f"row-{int(x)}-{uuid.uuid4().hex}").touch()
    end = time.monotonic() + 120
    while not Path(folder, "go").exists():
        assert time.monotonic() < end
        time.sleep(0.01)  # until the workers have come
    return 2 * x


def runs(folder):
    """How often each row has begun."""
    names = [path.name.split("-")[1] for path in Path(folder).glob("row-*")]
    return collections.Counter(map(int, names))


@pytest.fixture
def cluster():
    with distributed.LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address=None,
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with distributed.Client(cluster) as client:
        yield client


def started(client, folder, order):
    """A program of eight rows, which runs on a thread of its own."""

    def row(x):
        result = jax.ShapeDtypeStruct((), np.float32)
        options = {"vmap_method": "parallel", "executor": client, "order": order}
        return policies.call(gated, result, x, str(folder), **options)

    program = jax.jit(jax.vmap(row))
    task: futures.Future = futures.Future()

    def run():
        try:
            with hc.reraise():
                task.set_result(np.asarray(program(X)))
        except BaseException as error:
            task.set_exception(error)

    threading.Thread(target=run).start()
    assert holds_in_time(lambda: bool(runs(folder)))
    return task


@pytest.mark.parametrize("order", ["pure", "unordered"])
def test_workers_that_come_while_rows_run(cluster, client, tmp_path, order):
    task = started(client, tmp_path, order)
    cluster.scale(3)
    client.wait_for_workers(3, WAIT)
    assert holds_in_time(lambda: len(runs(tmp_path)) == 3)  # the new ones take part
    Path(tmp_path, "go").touch()
    np.testing.assert_array_equal(task.result(WAIT), 2 * X)
    assert runs(tmp_path) == dict.fromkeys(range(8), 1)


@pytest.mark.parametrize("order", ["pure", "unordered"])
def test_workers_that_go_while_rows_run(cluster, client, tmp_path, order):
    cluster.scale(3)
    client.wait_for_workers(3, WAIT)
    task = started(client, tmp_path, order)
    assert holds_in_time(lambda: len(runs(tmp_path)) == 3)
    cluster.scale(1)
    # The scheduler lets a worker go that still runs rows, and sends these again.
    assert holds_in_time(lambda: len(client.nthreads()) == 1)
    Path(tmp_path, "go").touch()
    error = task.exception(WAIT)
    if error is None:
        np.testing.assert_array_equal(task.result(), 2 * X)
        assert set(runs(tmp_path)) == set(range(8))
    else:
        assert order != "pure"
        assert isinstance(error, hc.errors.HostcallError)
        assert "must run only once" in str(error)
    if order != "pure":
        assert max(runs(tmp_path).values()) == 1


def test_an_adaptive_cluster(cluster, client, tmp_path):
    """It grows for the rows of each program, and shrinks to nothing in between."""
    cluster.adapt(minimum=0, maximum=2, interval="50ms", wait_count=2)
    for n in (1, 2):
        folder = tmp_path / str(n)
        folder.mkdir()
        task = started(client, folder, "pure")
        Path(folder, "go").touch()
        np.testing.assert_array_equal(task.result(WAIT), 2 * X)
        assert set(runs(folder)) == set(range(8))
        assert holds_in_time(lambda: len(client.nthreads()) == 0)
