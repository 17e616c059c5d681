"""Forked children at moments, and in states, that no public name brings about."""

from __future__ import annotations

from stepping import STEPPING


def test_a_child_that_was_forked_before_jax_started_is_as_good_as_new(run_python):
    done = run_python(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        import jax, numpy as np
        import hostcall as hc
        from hostcall._engine import targets
        targets.start()
        child = os.fork()
        if child:
            print(os.waitpid(child, 0)[1], flush=True)
        x = np.float32(1)
        hc.tap(lambda v: print("tapped", v, flush=True), x)
        hc.barrier()
        print(jax.jit(lambda v: hc.call(lambda a: a + 1, v, v))(x), flush=True)
        """
    )
    worked = ["tapped 1.0", "2.0"]
    assert done.stdout.splitlines() == [*worked, "0", *worked]


def test_a_fork_while_a_feed_waits_for_its_first_item(run_python):
    run_python(
        """
import os, threading
import jax, numpy as np
import hostcall as hc
at, go = threading.Event(), threading.Event()
def slow():
    at.set()
    go.wait()
    yield np.int32(3)
made = []
maker = threading.Thread(target=lambda: made.append(hc.feed(slow)))
maker.start()
at.wait()
child = os.fork()
if child == 0:
    from hostcall._core.process import living
    (puller,) = living(hc._runtime.puller.Puller)
    os._exit(7 if "spawn" in puller.closed else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
go.set()
maker.join()
assert made[0]()[0] == 3
"""
    )


def test_a_fork_while_another_thread_installs_what_is_replaced_in_jax(run_python):
    run_python(
        """
import os, threading
import jax, numpy as np
import hostcall as hc
from hostcall._jax import installing
at, go = threading.Event(), threading.Event()
def install():
    with installing._installed.lock:
        at.set()
        go.wait()
thread = threading.Thread(target=install)
thread.start()
at.wait()
child = os.fork()
if child == 0:
    print(jax.make_jaxpr(lambda x: hc.call(np.square, x, x))(1.0))
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
go.set()
thread.join()
"""
    )


def test_a_forked_child_leaves_its_parents_objects_alone(run_python):
    done = run_python(
        STEPPING
        + """
import warnings
warnings.simplefilter("ignore")
f(1).block_until_ready()
child = os.fork()
if child == 0:
    for use in (lambda: env.step(1), env.save):
        try:
            use()
        except hc.errors.HostcallError as error:
            print("refused" if "'spawn'" in str(error) else error, flush=True)
    env.close()
    from hostcall._api.object import groups
    groups._at_exit()
    del env
    os._exit(0)  # JAX's own end may hang in a forked child (0.10.2, without callbacks)
assert os.waitpid(child, 0)[1] == 0
env.step(1)
"""
    )
    assert done.stdout.split() == ["step"] * 10 + ["refused"] * 2 + ["step", "closed"]
