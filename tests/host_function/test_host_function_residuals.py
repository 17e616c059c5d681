"""Residuals on the host: right wherever JAX reads them, and never leaked."""

import gc
import json
import threading
import traceback

import jax
import numpy as np
import pytest
from limits import holds_in_time

import hostcall as hc

X = np.array([0.3, -1.2, 2.0], dtype=np.float32)


class Residual:
    """Counts its living instances."""

    alive = 0

    def __init__(self, slope):
        self.slope = slope
        Residual.alive += 1

    def __del__(self):
        Residual.alive -= 1


ROOM = 1024  # residuals that are kept on the host, if nobody configures another number


def empty():
    """Drops what is kept: there is no room for it."""
    gc.collect()
    hc.configure(residuals=0)
    f = hc.host(lambda x: x, result=hc.results.like(0))
    f.defvjp(lambda x: (x, None), lambda residual, ct: (ct,))
    jax.vjp(f, X)
    hc.configure(residuals=ROOM)


@pytest.fixture(autouse=True)
def empty_store():
    empty()
    assert Residual.alive == 0
    yield
    empty()
    assert Residual.alive == 0


@pytest.fixture
def small():
    """A store with room for two."""
    hc.configure(residuals=2)


def make(fwd_calls=None):
    f = hc.host(np.sin, result=hc.results.like(0))

    def fwd(x):
        if fwd_calls is not None:
            fwd_calls.append(x)
        return np.sin(x), Residual(np.cos(x))

    f.defvjp(fwd, lambda residual, ct: (residual.slope * ct,))
    return f


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def is_empty():
    gc.collect()
    return Residual.alive == 0


def test_one_program():
    calls = []
    f = jax.jit(jax.grad(lambda x: make(calls)(x).sum()))
    for _ in range(5):
        close(f(X), np.cos(X))
        assert is_empty()
    assert len(calls) == 5


def test_an_eager_pullback_called_twice():
    calls = []
    out, pullback = jax.vjp(make(calls), X)
    close(out, np.sin(X))
    for scale in (1.0, 2.0):
        close(pullback(scale * np.ones_like(X))[0], scale * np.cos(X))
    assert len(calls) == Residual.alive == 1
    del pullback
    assert is_empty()


def test_an_eager_pullback_that_is_never_called():
    _, pullback = jax.vjp(make(), X)
    assert Residual.alive == 1
    del pullback
    assert holds_in_time(is_empty)  # a thread of XLA may hold the array for a moment


def test_two_programs():
    calls = []
    f = make(calls)
    out, pullback = jax.jit(lambda x: jax.vjp(f, x))(X)
    close(out, np.sin(X))
    assert Residual.alive == 1
    run = jax.jit(lambda pullback, ct: pullback(ct)[0])
    for scale in (1.0, 2.0, 3.0):  # evicted, computed again, and kept
        close(run(pullback, scale * np.ones_like(X)), scale * np.cos(X))
    assert len(calls) == 2
    close(pullback(np.ones_like(X))[0], np.cos(X))  # eagerly, it dies with its array
    del pullback
    assert is_empty()


def test_a_program_whose_pullback_is_never_called(small):
    forward = jax.jit(lambda x: jax.vjp(make(), x))
    for _ in range(5):
        forward(X)[0].block_until_ready()
    assert Residual.alive == 2  # as many as there is room for


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_vmap(wrap):
    calls = []
    f = make(calls)
    xs = np.stack([X, 2 * X])
    close(wrap(jax.vmap(jax.grad(lambda x: f(x).sum())))(xs), np.cos(xs))
    close(wrap(jax.grad(lambda xs: jax.vmap(f)(xs).sum()))(xs), np.cos(xs))
    assert len(calls) == 4
    assert is_empty()


@pytest.mark.parametrize("method", ["expand_dims", "parallel"])
def test_vmap_by_method(method):
    """Objects can't have a batch axis, so their rules run row by row."""
    f = hc.host(np.sin, result=hc.results.like(0), vmap_method=method)
    shapes = []

    def fwd(x):
        shapes.append(x.shape)
        return np.sin(x), Residual(np.cos(x))

    f.defvjp(fwd, lambda residual, ct: (residual.slope * ct,))
    close(jax.jit(jax.vmap(jax.grad(f)))(X), np.cos(X))
    assert shapes == [()] * 3
    assert is_empty()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_rows_that_share_a_residual(wrap):
    calls = []
    close(wrap(jax.jacrev(make(calls)))(X), np.diag(np.cos(X)))
    assert len(calls) == 1


def nested(x, n):
    """sin of sin of ..., and its derivative."""
    slope = np.ones_like(x)
    for _ in range(n):
        slope = slope * np.cos(x)
        x = np.sin(x)
    return slope


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("remat", [lambda f: f, jax.checkpoint], ids=["", "remat"])
def test_scan(wrap, remat):
    calls = []
    body = remat(make(calls))

    def run(x):
        return jax.lax.scan(lambda c, _: (body(c), None), x, None, length=5)[0].sum()

    close(wrap(jax.grad(run))(X), nested(X, 5))
    assert len(calls) == 5
    assert is_empty()


def test_a_scan_longer_than_the_store(small):
    calls = []
    f = make(calls)

    def run(x):
        return jax.lax.scan(lambda c, _: (f(c), None), x, None, length=6)[0].sum()

    close(jax.jit(jax.grad(run))(X), nested(X, 6))
    assert Residual.alive <= 2
    assert 6 < len(calls) <= 10


def waiting(name, length=6):
    """A program whose forward rule runs `length` times before its backward rule."""
    f = hc.host(np.sin, result=hc.results.like(0), name=name)
    f.defvjp(
        lambda x: (np.sin(x), Residual(np.cos(x))),
        lambda residual, ct: (residual.slope * ct,),
    )

    def run(x):
        return jax.lax.scan(lambda c, _: (f(c), None), x, None, length=length)[0].sum()

    return jax.jit(jax.grad(run))


def test_evicted_residuals_are_reported_once_for_each_function(small, caplog):
    fits, one, other = (waiting(name, n) for name, n in (("a", 2), ("b", 6), ("c", 6)))
    close(fits(X), nested(X, 2))
    assert not caplog.records
    for _ in range(3):
        close(one(X), nested(X, 6))
    close(waiting("b")(X), nested(X, 6))
    close(other(X), nested(X, 6))
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("`b` left more than 2 residuals on the host before its")
    assert f"(differentiated at {__file__}:" in first
    assert "hostcall.configure(residuals=...) keeps more; with residuals= of" in first
    assert second.startswith("`c` left more than 2")
    assert caplog.records[0].levelname == "WARNING"


def test_calls_that_run_again_for_other_reasons_are_not_reported(caplog):
    calls = []
    f = make(calls)
    out, pullback = jax.vjp(jax.jit(f), X)
    pullback = jax.jit(pullback)
    for _ in range(3):  # the second call finds nothing: the first took the residual
        close(pullback(np.ones_like(X))[0], np.cos(X))
    assert len(calls) == 2
    hc.configure(residuals=0)
    close(waiting("d")(X), nested(X, 6))
    assert not caplog.records
    del out, pullback


def test_configure(small):
    calls = []
    hc.configure(residuals=6)
    f = make(calls)
    run = jax.jit(
        jax.grad(
            lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=6)[
                0
            ].sum()
        )
    )
    close(run(X), nested(X, 6))
    assert len(calls) == 6
    assert is_empty()
    pullbacks = [jax.vjp(f, X)[1] for _ in range(5)]
    assert Residual.alive == 5
    hc.configure(residuals=1)
    pullbacks.append(jax.vjp(f, X)[1])
    assert Residual.alive == 1
    for wrong in (-1, 1.5, True, "many"):
        with pytest.raises(
            hc.errors.SpecError,
            match="residuals= of hc.configure should be a number of obj",
        ):
            hc.configure(residuals=wrong, tap_queue_bytes=10)
        with pytest.raises(
            hc.errors.SpecError,
            match="pinned_bytes= of hc.configure should be a number of",
        ):
            hc.configure(residuals=5, pinned_bytes=-1)
    pullbacks.append(jax.vjp(f, X)[1])
    assert Residual.alive == 1
    assert hc.monitor.tap_queue().limit != 10
    del pullbacks


def test_a_store_without_room(small):
    hc.configure(residuals=0)
    _, pullback = jax.vjp(make(), X)
    close(pullback(np.ones_like(X))[0], np.cos(X))
    close(jax.jit(jax.grad(lambda x: make()(x).sum()))(X), np.cos(X))
    assert is_empty()


def test_remat():
    g = jax.checkpoint(lambda x: make()(make()(x)).sum())
    for f in (jax.grad(g), jax.jit(jax.grad(g))):
        close(f(X), nested(X, 2))
        assert is_empty()


def test_overlapping_forwards():
    f = make()
    pullbacks = [jax.vjp(f, X * n)[1] for n in range(4)]
    for n in (2, 0, 3, 1):
        close(pullbacks[n](np.ones_like(X))[0], np.cos(X * n))
    del pullbacks
    assert is_empty()


def test_the_same_call_twice_in_one_program():
    """XLA may merge the two forward calls: the second backward call finds nothing."""
    f = make()
    twice = jax.jit(jax.grad(lambda x: (f(x) * 2).sum() + (f(x) * 3).sum()))
    close(twice(X), 5 * np.cos(X))


def test_cond_and_while_under_it():
    f = make()

    def run(x):
        y = jax.lax.cond(x.sum() > 0, lambda: f(x), lambda: x)
        return jax.lax.fori_loop(0, 3, lambda _, c: f(c), y).sum()

    close(jax.jit(jax.grad(run))(X), nested(X, 4))
    close(jax.grad(run)(-X), nested(-X, 3))
    assert is_empty()


def test_threads():
    f = jax.jit(jax.grad(lambda x: make()(x).sum()))
    f(X)
    wrong = []

    def work(n):
        for i in range(20):
            x = X + n + i
            if not np.allclose(f(x), np.cos(x), atol=1e-5):
                wrong.append(x)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong
    assert is_empty()


def test_linearize_of_a_function_with_both_rules():
    f = make()
    f.defjvp(lambda p, t: np.cos(p[0]) * t[0])
    _, push = jax.linearize(f, X)
    close(push(X), np.cos(X) * X)
    close(jax.linear_transpose(push, X)(X)[0], np.cos(X) * X)
    del push
    assert holds_in_time(is_empty)


def test_the_forward_rule_may_keep_its_arguments():
    f = hc.host(np.sin, result=hc.results.like(0), lend=True)
    f.defvjp(lambda x: (np.sin(x), x), lambda x, ct: (np.cos(x) * ct,))
    g = jax.jit(jax.grad(lambda x: f(x).sum()))
    close(g(X), np.cos(X))
    close(g(2 * X), np.cos(2 * X))


def test_an_exception_of_a_rule_is_raised_and_leaves_nothing():
    f = hc.host(np.sin, result=hc.results.like(0))

    def bwd(residual, ct):
        raise LookupError("bwd")

    f.defvjp(lambda x: (np.sin(x), Residual(x)), bwd)
    with pytest.raises(LookupError, match="bwd") as caught, hc.reraise():
        jax.block_until_ready(jax.jit(jax.grad(lambda x: f(x).sum()))(X))
    traceback.clear_frames(caught.tb)  # what is raised holds its frames
    assert is_empty()


# --- Which are kept ------------------------------------------------------------------


def test_the_newest_are_kept_and_one_that_was_missed_stays(small):
    calls = []
    f = make(calls)
    forward = jax.jit(lambda x: jax.vjp(f, x)[1])
    pullbacks = [forward(X * n) for n in range(3)]
    run = jax.jit(lambda pullback, ct: pullback(ct)[0])
    # The first of three has no room. A call takes its residual out, unless that had to
    # be computed again.
    for n, ran in ((2, 3), (1, 3), (2, 4), (2, 4), (0, 5), (0, 5), (2, 5), (1, 6)):
        close(run(pullbacks[n], np.ones_like(X)), np.cos(X * n))
        assert len(calls) == ran, (n, ran)


def test_a_residual_that_holds_another_is_dropped():
    """Then the other one's array dies while the store is in use."""
    holder = []
    f = hc.host(np.sin, result=hc.results.like(0))
    f.defvjp(
        lambda x: (np.sin(x), (Residual(np.cos(x)), holder)),
        lambda residual, ct: (residual[0].slope * ct,),
    )
    hc.configure(residuals=2)
    jax.block_until_ready(jax.jit(lambda x: jax.vjp(f, x))(X))
    holder.append(jax.vjp(make(), X)[1])
    assert Residual.alive == 2
    f = holder = None
    gc.collect()
    assert Residual.alive == 2
    _, pullback = jax.vjp(make(), 2 * X)  # drops the first, and so the second
    gc.collect()
    assert Residual.alive == 1
    close(pullback(np.ones_like(X))[0], np.cos(2 * X))


PROGRAM = """
import json, sys, weakref
import jax, numpy as np
import hostcall as hc

class Residual:
    def __init__(self, slope):
        self.slope = slope

left = []

def forward(x):
    residual = Residual(np.cos(x))
    left.append(weakref.ref(residual))
    return np.sin(x), residual

f = hc.host(np.sin, result=hc.results.like(0))
f.defvjp(forward, lambda residual, ct: (residual.slope * ct,))
"""


def test_a_handle_of_another_process_finds_nothing(run_python):
    source = """
handles = json.loads(sys.argv[1])
pullback = jax.jit(lambda x: jax.vjp(f, x)[1])(np.ones(3, np.float32))
mine, tree = jax.tree.flatten(pullback)
theirs = [np.array(x, own.dtype) for x, own in zip(handles, mine, strict=True)]
run = jax.jit(lambda pullback: pullback(np.ones(3, np.float32))[0])
print(run(jax.tree.unflatten(tree, theirs)).tolist(), len(left))
"""
    pullback = jax.jit(lambda x: jax.vjp(make(), x)[1])(X)
    handles = json.dumps([leaf.tolist() for leaf in jax.tree.leaves(pullback)])
    found, _, ran = run_python(PROGRAM + source, handles).stdout.rpartition(" ")
    close(json.loads(found), np.cos(X))
    assert int(ran) == 2


def test_the_limit_is_read_from_the_environment(run_python):
    source = """
xs = np.zeros(20, np.float32)
jax.block_until_ready(jax.jit(lambda x: jax.vjp(jax.vmap(f), x))(xs))
print(len(left), sum(ref() is not None for ref in left))
"""
    done = run_python(PROGRAM + source, env={"HOSTCALL_RESIDUALS": "7"})
    assert done.stdout.split() == ["20", "7"]
