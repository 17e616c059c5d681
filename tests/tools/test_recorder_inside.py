"""hc.Recorder: an interrupt at one moment, memory and disks of other sizes, and what it
keeps of a program."""

import threading

import jax
import jax.numpy as jnp
import pytest

import hostcall as hc
from hostcall.tools._recorder import arrow, worker
from hostcall.tools._recorder.store import RunFolder

pa = pytest.importorskip("pyarrow")


def test_a_recorder_that_was_interrupted_is_not_in_the_way(tmp_path, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "_resume", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            hc.Recorder(tmp_path)
    hc.Recorder(tmp_path).close()
    del caught  # its frames held the lock until here


@pytest.fixture
def held(monkeypatch):
    """The bytes that Arrow holds at each look at a column of a file."""
    column, before, found = arrow.column, pa.total_allocated_bytes(), []

    def noted(batch, name):
        found.append(pa.total_allocated_bytes() - before)
        return column(batch, name)

    monkeypatch.setattr(arrow, "column", noted)
    return found


def test_large_arrays_are_read_batch_by_batch(tmp_path, held):
    want = [number + 0.5j for number in range(8)]
    with hc.Recorder(tmp_path / "run") as rec:
        for number in want:
            rec(x=jnp.full(1 << 18, number))
            rec.flush()
    _, values = hc.tools.read(tmp_path / "run").array("x")
    assert values[:, 0].tolist() == want
    assert 0 < max(held) < values.nbytes // 2


def test_resuming_reads_no_values(tmp_path, held):
    for number in range(3):
        with hc.Recorder(tmp_path / "run") as rec:
            rec(x=jnp.full(1 << 18, number))
    assert len(held) == 3
    assert max(held) < 1 << 18
    steps, values = hc.tools.read(tmp_path / "run").array("x")
    assert steps.tolist() == values[:, 0].tolist() == [0, 1, 2]


def test_a_disk_that_is_slow_makes_the_program_wait(rec, monkeypatch):
    """At most MOST bytes wait, and nothing is lost."""
    monkeypatch.setattr(worker, "MOST", 1000)
    monkeypatch.setattr(worker, "ENOUGH", 500)
    begun, go_on = threading.Event(), threading.Event()
    write, sizes = rec._store.write, []

    def slow(deliveries):
        begun.set()
        assert go_on.wait(60)
        sizes.append(sum(d.values[0].nbytes for d in deliveries))
        return write(deliveries)

    monkeypatch.setattr(rec._store, "write", slow)
    rec(x=0.0)
    for number in range(1, 1000):
        rec(x=float(number))
        if number == 1:
            threading.Thread(target=rec._writer.flush).start()
            assert begun.wait(60)
    assert not hc.barrier(0.2)
    assert rec._writer._bytes <= 1004
    go_on.set()
    assert rec.table()["x"].to_pylist() == list(range(1000))
    assert max(sizes) <= 1004


def test_a_run_that_does_not_fit_into_memory(tmp_path):
    text = "It does not fit into memory, or a file of it was damaged"
    with pytest.raises(hc.errors.HostcallError, match=text), arrow.reading(tmp_path):
        raise MemoryError


def test_a_traced_program_is_found_again(rec, compiled_during):
    """A call with the same names taps the same function, so JAX's cache finds it."""
    f = lambda: jax.jit(lambda x: rec(x=x))(1.0)
    f()
    assert rec.table().num_rows == 1
    tapped = dict(rec._tapped)
    jax.clear_caches()
    f()
    assert rec._tapped == tapped
