"""hc.tap(always=): executions that go through whatever `every` and `sample` say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax import lax

import hostcall as hc

N = 50
SELDOM = {"every": 3600.0}


class Log(list):
    def __call__(self, *arrays):
        self.append(tuple(np.asarray(a).tolist() for a in arrays))

    def taken(self):
        hc.barrier()
        seen, self[:] = [v[0] if len(v) == 1 else v for v in self], []
        return seen


@pytest.fixture
def log():
    return Log()


def loop(log, at, **options):
    """Taps 0, 1, ... N-1, with the flag where `at(i)` is True."""

    def body(i, c):
        hc.tap(log, i, always=at(i), **options)
        return c

    return lambda: lax.fori_loop(0, N, body, 0)


@pytest.mark.parametrize("order", ["unordered", "ordered"])
@pytest.mark.parametrize("when_full", ["block", "drop_oldest"])
def test_the_last_step_of_each_run(log, order, when_full):
    last = lambda i: i == N - 1
    f = jax.jit(loop(log, last, **SELDOM, order=order, when_full=when_full))
    f(), f()
    assert log.taken() == [0, N - 1, N - 1]


def test_the_choices_of_every_and_sample_stay_the_same(log):
    odd = lambda i: (i == 7) | (i == N - 1)
    for options in ({"every": 20}, {"sample": 0.2}):
        runs = []
        for flag in (lambda i: False, odd):
            f = jax.jit(loop(log, flag, **options))
            f()
            runs.append(log.taken())
        without, with_flag = runs
        assert 1 <= len(without) < N / 2
        assert with_flag == sorted({*without, 7, N - 1})


def test_skipped_executions_are_counted_without_those_that_go_through(log):
    skipped = lambda: sum(s.skipped for s in hc.monitor.stats().values())
    before = skipped()
    jax.jit(loop(log, lambda i: i % 10 == 9, **SELDOM))()
    assert log.taken() == [0, 9, 19, 29, 39, 49]
    assert skipped() - before == N - 6


def test_outside_of_programs(log):
    for i in range(10):
        hc.tap(log, i, always=i in (4, 9), where=i != 9, **SELDOM)
    assert log.taken() == [0, 4]
    with jax.disable_jit():
        loop(log, lambda i: i == N - 1, every=30)()
    assert log.taken() == [0, 30, N - 1]


def test_without_a_throttle_the_flag_is_left_out(log):
    f = lambda flag: hc.tap(log, 1, always=flag)
    assert "always" not in str(jax.make_jaxpr(f)(True))
    jax.jit(f)(False)
    assert log.taken() == [1]


def test_batches(log):
    f = jax.jit(loop(log, lambda i: i % 10 == 9, **SELDOM, batch=100))
    f()
    hc.barrier()
    assert [i for (run,) in log for i in run] == [0, 9, 19, 29, 39, 49]


# --- Transformations ------------------------------------------------------------------


def stepped(log, **options):
    """(value, number of the flagged step, number from which on `where` is False)"""

    def run(x, at, end):
        def body(i, c):
            where = i < end if options.get("masked") else None
            given = {k: v for k, v in options.items() if k != "masked"}
            hc.tap(log, i, x, always=i == at, where=where, **given, **SELDOM)
            return c

        return lax.fori_loop(0, 9, body, 0)

    return run


X = jnp.array([1, 2, 3])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_row_is_enough_for_the_batch(log, wrap):
    run = stepped(log)
    wrap(jax.vmap(run, (0, 0, None)))(X, jnp.array([3, 5, 3]), 0)
    rows = X.tolist()
    assert log.taken() == [(0, rows), (3, rows), (5, rows)]
    # Nothing but the flag has rows: one tap, as without vmap.
    wrap(jax.vmap(run, (None, 0, None)))(7, jnp.array([3, 5, 3]), 0)
    assert log.taken()[-2:] == [(3, 7), (5, 7)]


def test_rows_one_by_one(log):
    jax.jit(jax.vmap(stepped(log, rows="each")))(X, X + 3, X)
    assert log.taken() == [(i, x) for i in (0, 4, 5, 6) for x in (1, 2, 3)]


def test_the_flag_of_a_masked_row_does_not_count(log):
    """Row 0 ends before its flagged step, rows 1 and 2 do not."""
    run = jax.vmap(stepped(log, masked=True))
    at, end = jnp.array([4, 5, 6]), jnp.array([3, 9, 9])
    jax.jit(run)(X, at, end)
    assert log.taken() == [(0, [1, 2, 3]), (5, [2, 3]), (6, [2, 3])]
    run = jax.vmap(jax.vmap(stepped(log, masked=True), (0, None, 0)), (None, 0, 0))
    jax.jit(run)(X, at, jnp.array([[9, 9, 9], [0, 0, 0], [3, 9, 9]]))
    later = [1, 2, 3, 2, 3]  # step 5 is flagged in the second batch, which is masked
    assert log.taken() == [(0, [1, 2, 3] * 2), (4, later), (6, later)]


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: f], ids=["remat", "plain"])
def test_grad(log, wrap):
    def body(c, i):
        hc.tap(log, i, always=i == 8, **SELDOM)
        return jnp.sin(c) * i, None

    f = wrap(lambda x: lax.scan(body, x, jnp.arange(9))[0])
    jax.jit(jax.vmap(jax.grad(f)))(jnp.ones(2))
    assert log.taken() == [0, 8]


def test_devices(log):
    mesh = meshes.line()
    spec = jax.sharding.PartitionSpec("x")
    size = mesh.size

    def run(x):
        def body(i, c):
            hc.tap(log, i, always=i == 5 + c[0], **SELDOM)
            return c

        return lax.fori_loop(0, 9, body, x)

    x = jax.device_put(jnp.arange(size) % 2, jax.NamedSharding(mesh, spec))
    jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    wanted = [0] * size + [5] * -(-size // 2) + [6] * (size // 2)
    assert sorted(log.taken()) == wanted


@pytest.mark.parametrize("on", ["once", "shards"])
def test_programs_that_the_compiler_partitions(log, on):
    mesh = meshes.line()
    spec = jax.sharding.PartitionSpec("x")
    x = jax.device_put(jnp.arange(8), jax.NamedSharding(mesh, spec))

    def body(i, c):
        hc.tap(log, c, on=on, always=c.sum() == 28 + 5 * 8, **SELDOM)
        return c + 1

    jax.jit(lambda x: lax.fori_loop(0, 9, body, x))(x)
    taken = log.taken()
    deliveries = 1 if on == "once" else mesh.size
    assert len(taken) == 2 * deliveries
    for number, begin in enumerate((0, 5)):
        part = taken[number * deliveries :][:deliveries]
        assert sorted(x for block in part for x in block) == [*range(begin, begin + 8)]


@pytest.mark.parametrize("flag", [1, jnp.ones(2, bool)], ids=["int", "array"])
def test_a_wrong_flag_is_refused(flag):
    with pytest.raises(hc.errors.SpecError, match="always= of `print` should be one"):
        hc.tap(print, 1, every=2, always=flag)
