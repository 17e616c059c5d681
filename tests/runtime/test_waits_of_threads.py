"""Who hears of a program: the thread that dispatched it, whatever others do meanwhile.

Each program here has a call with an effect, on one CPU device, where no token leaves a
program (`_jax/fast_dispatch.py`). Its input is computed by a program that waits for an
event, so it is still pending when its dispatch returns. The oracle is plain JAX, whose
tokens are each thread's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import random
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import late_square

import hostcall as hc

LIMIT = 60  # seconds: what takes longer hangs
SCALAR = jax.ShapeDtypeStruct((), np.float32)


class Gate:
    """Gives a value that is not ready before the gate opens.

    The program is too large for the thread that dispatches it, so a thread of XLA's
    waits in its pure call.
    """

    def __init__(self):
        self._event, self._value = threading.Event(), None
        self._program = jax.jit(self._compute)
        self._ones = jnp.ones(late_square(128))

    def _compute(self, m):
        return hc.call(self._wait, SCALAR, (m @ m).sum())

    def _wait(self, x):
        assert self._event.wait(LIMIT)
        return np.float32(0)

    def __call__(self, x):
        """`x`, once the gate is open."""
        if self._value is None:
            self._value = self._program(self._ones)
        return self._value + np.float32(x)

    def warm(self):
        """From now on, its programs are on JAX's fast path."""
        self._event.set()
        for _ in range(2):
            jax.block_until_ready(self(0))
            self._value = None
        self._event.clear()

    def open(self):
        self._event.set()
        jax.block_until_ready(self._value)


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.open()
    with contextlib.suppress(Exception):  # what a test that failed has left
        hc.barrier()


class Log:
    """Notes what it is called with, and fails for negative numbers."""

    def __init__(self):
        self.seen = []

    def __call__(self, x):
        self.seen.append(float(x))
        if x < 0:
            raise ValueError(f"no {int(x)} here")
        return np.float32(x)

    def nothing(self, x):
        self(x)


CALLS = {
    "call": lambda f, result, x: hc.call(f, result, x, order="ordered"),
    "unordered call": lambda f, result, x: hc.call(f, result, x, order="unordered"),
    "drop-in": lambda f, result, x: hc.io_callback(f, result, x, ordered=True),
}
RESULTS = ["kept", "dropped", "none"]


def program(log, call, results):
    if results == "none":
        f = jax.jit(lambda x: CALLS[call](log.nothing, None, x))
    else:
        f = jax.jit(lambda x: CALLS[call](log, SCALAR, x))
    for x in np.float32(0), jnp.float32(0):  # it is on the fast path from now on
        f(x)
    hc.barrier()
    log.seen.clear()
    return f


# --- Ways to wait ---------------------------------------------------------------------


def by(wait):
    def way(dispatch, until):
        kept = dispatch()
        until()
        wait()
        del kept

    return way


def by_reraise(dispatch, until):
    with hc.reraise():
        kept = dispatch()
        until()
        del kept


def by_eager_call(dispatch, until):
    """An ordered call comes after the programs; it logs their failures."""
    kept = dispatch()
    until()
    assert hc.call(lambda x: x, SCALAR, np.float32(5), order="ordered") == 5
    hc.barrier()
    del kept


WAITS = {
    "hc.barrier": by(hc.barrier),
    "with a limit": by(lambda: hc.barrier(LIMIT)),
    "effects_barrier": by(jax.effects_barrier),
    "reraise": by_reraise,
    "eager call": by_eager_call,
}


class Worker:
    """A thread that dispatches, says so, and waits when it is told to."""

    def __init__(self, way, dispatch):
        self._dispatched, self.go = threading.Event(), threading.Event()
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(way, dispatch))
        self._thread.start()
        assert self._dispatched.wait(LIMIT)

    def _run(self, way, dispatch):
        def until():
            self._dispatched.set()
            assert self.go.wait(LIMIT)

        try:
            way(dispatch, until)
        except Exception as error:
            self.error = error
        finally:
            self._dispatched.set()

    def waits(self):
        """What its wait raises."""
        self.go.set()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        return self.error


@pytest.mark.parametrize("results", RESULTS)
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("call", CALLS)
def test_each_thread_hears_of_its_own_programs(gate, call, wait, results):
    """Three threads run one program at the same time; it fails in two of them."""
    log = Log()
    f = program(log, call, results)

    def dispatch(x):
        made = f(gate(x))
        return made if results == "kept" else None

    numbers = [-1, 2, -3]
    workers = [Worker(WAITS[wait], lambda x=x: dispatch(x)) for x in numbers]
    gate.open()
    # The one whose program does not fail waits first, then the last, then the first.
    errors = {numbers[i]: workers[i].waits() for i in (1, 2, 0)}
    assert errors[2] is None
    for x in -1, -3:
        assert f"no {x} here" in str(errors[x])
    assert sorted(log.seen) == [-3, -1, 2]
    hc.barrier()
    jax.effects_barrier()


@pytest.mark.parametrize("results", RESULTS)
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_waits_for_the_threads_own_programs(gate, wait, results):
    log = Log()
    f = program(log, "call", results)
    seen = []

    def way(dispatch, until):
        WAITS[wait](dispatch, until)
        seen.extend(log.seen)

    worker = Worker(way, lambda: f(gate(7)))
    worker.go.set()
    assert seen == []  # it waits for the gate
    gate.open()
    assert worker.waits() is None
    assert seen == [7]


# --- Threads that can't wait ----------------------------------------------------------


@pytest.mark.parametrize("results", RESULTS)
def test_the_main_thread_hears_of_a_thread_that_has_ended(gate, results):
    log, kept = Log(), []
    f = program(log, "call", results)

    def dispatch():
        made = f(gate(-1))
        if results == "kept":
            kept.append(made)

    dispatcher = threading.Thread(target=dispatch)
    dispatcher.start()
    dispatcher.join(LIMIT)
    gate.open()
    other = Worker(by(hc.barrier), lambda: f(np.float32(2)))
    assert other.waits() is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="no -1 here"):
        hc.barrier()
    hc.barrier()
    jax.effects_barrier()


def test_many_threads_that_end_leave_little(gate):
    """Their failures are kept, up to a thousand; their signs are not."""
    log = Log()
    f = program(log, "call", "dropped")
    gate.open()
    gc.collect()
    before = len(jax.live_arrays())
    slow = Gate()

    def dispatch(x):
        f(slow(x))

    for i in range(10):
        thread = threading.Thread(target=dispatch, args=(-1 if i < 3 else 1,))
        thread.start()
        thread.join(LIMIT)
    slow.open()
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no -1 here"):
            hc.barrier()
    hc.barrier()
    slow = None
    gc.collect()
    assert len(jax.live_arrays()) <= before + 4


END = """
import logging, sys, threading, jax, jax.numpy as jnp, numpy as np, hostcall as hc
logging.basicConfig(format="%(message)s", stream=sys.stdout)
SCALAR = jax.ShapeDtypeStruct((), np.float32)
event = threading.Event()
def wait(x):
    assert event.wait(60)
    return np.float32(0)
slow = jax.jit(lambda m: hc.call(wait, SCALAR, (m @ m).sum()))(jnp.ones((128, 128)))
def bad(x):
    raise ValueError("nobody was told")
f = jax.jit(lambda x: hc.call(bad, None, x, order="unordered"))
f.lower(jnp.float32(0)).compile()
ready = threading.Event()
def work():
    f(slow)
    ready.set()
    if sys.argv[1] == "lives":
        threading.Event().wait()
thread = threading.Thread(target=work, daemon=True)
thread.start()
ready.wait()
if sys.argv[1] == "ended":
    thread.join()
event.set()
"""


@pytest.mark.parametrize("thread", ["ended", "lives"])
def test_the_end_of_the_process_tells_what_nobody_heard(run_python, thread):
    said = run_python(END, thread).stdout
    assert said.count("a program failed while the process was ending") == 1
    assert "nobody was told" in said


# --- Waits need nothing of XLA's ------------------------------------------------------

PLACES = """
import os, threading, jax, jax.numpy as jnp, numpy as np, hostcall as hc
N = 32  # as many programs as XLA has places for
started, event = threading.Semaphore(0), threading.Event()
def host(x):
    started.release()
    assert event.wait(60)
f = jax.jit(lambda x: hc.call(host, None, x, order="unordered"))
x = jnp.float32(0)
f.lower(x).compile()
event.set()
f(x)
f(x)
hc.barrier()
event.clear()
while started.acquire(blocking=False):
    pass
threads = [threading.Thread(target=f, args=(x,)) for _ in range(N)]
for thread in threads:
    thread.start()
for thread in threads:
    assert started.acquire(timeout=60)
jax.effects_barrier()
assert hc.barrier()
assert hc.barrier(60)
assert hc.barrier(0.05)
with hc.reraise():
    pass
hc.call(lambda x: None, None, 1.0, order="ordered")
hc.tap(print, 1.0, order="ordered")
hc.Object(dict, methods={"get": x}).close()
event.set()
for thread in threads:
    thread.join()
"""


def test_no_wait_needs_a_place_of_xlas(run_python):
    run_python(PLACES)


INSIDE = """
import threading, jax, jax.numpy as jnp, numpy as np, hostcall as hc
from jax import lax
X = jax.device_put(jnp.float32(6), jax.devices()[0])  # a program of it runs there
@jax.jit
def slow(x):
    y = lax.fori_loop(0, 60, lambda i, m: jnp.tanh(m @ m) * 0.5, jnp.ones((300, 300)))
    return x + 0 * y[0, 0]
seen = []
def note(x):
    seen.append(float(x))
def bad(x):
    raise ValueError("boom")
f = jax.jit(lambda x: hc.call(note, None, x, order="ordered"))
t = jax.jit(lambda x: (hc.tap(note, x, order="ordered"), x)[1])
g = jax.jit(lambda x: hc.call(bad, None, x, order="ordered"))
f(slow(X)); t(slow(X)); hc.barrier(); g.lower(X).compile()
def effects_barrier(x):
    f(slow(X)); jax.effects_barrier(); seen.append("after")
def call(x):
    f(slow(X)); hc.call(note, None, jnp.float32(7), order="ordered")
def tap(x):
    t(slow(X)); hc.tap(note, jnp.float32(7), order="ordered")
def fails(x):
    try:
        g(slow(X))
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        seen.append("raised")
def reraise(x):
    try:
        with hc.reraise(): g(slow(X))
    except ValueError:
        seen.append("raised")
WANT = {effects_barrier: [6, "after"], call: [6, 7], tap: [6, 7], fails: ["raised"],
        reraise: ["raised"]}
for host, want in WANT.items():
    program = jax.jit(lambda x, host=host: hc.call(host, None, x, order="unordered"))
    ways = {
        "outside": lambda: host(1),
        "in a call": lambda: program(jnp.float32(1)),
        "in an eager call": lambda: hc.call(host, None, 1.0, order="unordered"),
        "on a thread of XLA's": lambda: program(slow(X)),
    }
    for name, way in ways.items():
        seen.clear()
        way()
        hc.barrier()
        assert seen == want, (host, name, seen)
"""


def test_waits_inside_a_host_function(run_python):
    run_python(INSIDE)


FORK = """
import os, sys, threading, jax, jax.numpy as jnp, numpy as np, hostcall as hc
SCALAR = jax.ShapeDtypeStruct((), np.float32)
f = jax.jit(lambda x: (hc.call(lambda v: None, None, x, order="ordered"), x + 1)[1])
x = jnp.float32(1)
f(x).block_until_ready()
event = threading.Event()
def wait(v):
    assert event.wait(60)
    return np.float32(0)
if sys.argv[1] == "pending":  # programs that never end in the child
    gate = jax.jit(lambda m: hc.call(wait, SCALAR, (m @ m).sum()))
    slow = gate(jnp.ones((128, 128)))
    f(slow)
    token = jax.jit(lambda v: jax.debug.callback(lambda v: None, v, ordered=True))
    token(slow)
def refused():
    try:
        f(x)
    except hc.errors.HostcallError as error:
        assert "forked" in str(error)
    else:
        raise AssertionError
def barrier(): hc.barrier()
def limited(): assert hc.barrier(60)
def effects_barrier(): jax.effects_barrier()
def leave(): sys.exit(0)
def reraise():
    with hc.reraise(): pass
for wait_in_child in barrier, limited, effects_barrier, leave, reraise:
    for refuses in False, True:
        child = os.fork()
        if child == 0:
            if refuses:
                refused()
            wait_in_child()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, (wait_in_child, refuses, status)
event.set()
hc.barrier()
"""


@pytest.mark.parametrize("programs", ["ended", "pending"])
def test_a_forked_child_waits_for_nothing(run_python, programs):
    run_python(FORK, programs)


# --- Signs ----------------------------------------------------------------------------


def test_a_hidden_result_is_seen_by_nobody(gate):
    log = Log()
    jitted = jax.jit(lambda x: hc.call(log.nothing, None, x, order="unordered"))
    compiled = jitted.lower(np.float32(0)).compile()
    assert compiled.output_shardings is None
    for _ in range(3):
        assert compiled(np.float32(1)) is None
        assert jitted(np.float32(1)) is None
    nested = jax.jit(lambda x: {"none": None, "empty": (), "of": jitted(x)})
    for _ in range(3):
        assert nested(np.float32(1)) == {"none": None, "empty": (), "of": None}
    assert len(log.seen) == 9


@pytest.mark.parametrize("run", ["jitted", "ahead of time"])
@pytest.mark.parametrize("kind", ["call", "tap"])
def test_programs_compiled_ahead_of_time(gate, kind, run):
    log = Log()

    def f(x):
        if kind == "tap":
            hc.tap(log.nothing, x)
        else:
            hc.call(log.nothing, None, x, order="unordered")

    g = jax.jit(f)
    if run == "ahead of time":
        g = g.lower(np.float32(0)).compile()
    for _ in range(3):
        g(np.float32(1))
    g(gate(2))
    gate.open()
    jax.effects_barrier()
    if kind == "tap":
        hc.barrier()
    assert log.seen == [1, 1, 1, 2]


def large(log, x):
    hc.call(log.nothing, None, x, order="unordered")
    return jnp.zeros(1 << 16) + x


def several(log, x):
    got = hc.call(log, SCALAR, x, order="ordered")
    return {"a": jnp.zeros((300, 300)), "b": [got, None], "c": jax.random.key(3)}


def a_key(log, x):
    hc.call(log.nothing, None, x, order="unordered")
    return jax.random.key(x.astype(jnp.int32))


def differentiated(log, x):
    hc.call(log.nothing, None, jax.lax.stop_gradient(x), order="unordered")
    return x * 2


PROGRAMS = [large, several, a_key, differentiated]


@pytest.mark.parametrize("make", PROGRAMS)
def test_programs_of_every_kind_of_results(gate, make):
    log = Log()
    f = jax.jit(lambda x: make(log, x))
    first = f(np.float32(1))
    again = [f(np.float32(1)) for _ in range(3)]
    show = lambda tree: str(jax.tree.map(lambda x: (type(x), x.dtype, x), tree))
    assert all(show(x) == show(first) for x in again)
    f(gate(-5))
    gate.open()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no -5 here"):
        hc.barrier()
    hc.barrier()
    assert log.seen == [1, 1, 1, 1, -5]


def test_a_program_that_writes_to_refs(gate):
    log = Log()
    ref = jax.new_ref(jnp.float32(0))

    def f(x):
        hc.call(log.nothing, None, x, order="unordered")
        ref[...] = x

    g = jax.jit(f)
    for i in range(3):
        g(np.float32(i))
    assert ref[...] == 2
    g(gate(-5))
    gate.open()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no -5 here"):
        jax.effects_barrier()
    hc.barrier()  # JAX 0.10's own wait raises it again: it has a token too
    assert log.seen == [0, 1, 2, -5]


@pytest.mark.parametrize("how", ["deleted", "donated"])
def test_a_program_whose_result_is_gone(gate, how):
    log = Log()
    f = program(log, "call", "dropped")
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    double(jnp.float32(1))
    made = f(gate(-1))
    if how == "deleted":
        made.delete()
    else:
        double(made)
    del made
    gate.open()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no -1 here"):
        jax.effects_barrier()
    assert log.seen == [-1]
    jax.effects_barrier()
    hc.barrier()


def test_a_limit_holds_if_the_result_is_gone(gate):
    log = Log()
    f = program(log, "call", "dropped")
    made = f(gate(1))
    made.delete()
    del made
    assert not hc.barrier(0.05)  # the gate's own value is alive
    gate.open()
    assert hc.barrier(LIMIT)
    jax.effects_barrier()
    assert log.seen == [1]


SERIALIZED = """
import sys, threading, pickle, jax, jax.numpy as jnp, numpy as np, hostcall as hc
from jax.experimental import serialize_executable
path, role = sys.argv[1:]
seen, F32 = [], jax.ShapeDtypeStruct((), np.float32)
@hc.register("tests.waits.note")
def note(x):
    seen.append(float(x))
    if x < 0:
        raise ValueError("no such number")
if role == "writes":
    f = jax.jit(lambda x: hc.call(note, None, x, order="unordered"))
    g = jax.jit(hc.load(bytes(hc.export(f)(F32))).call)
    compiled = g.lower(F32).compile()
    with open(path, "wb") as file:
        pickle.dump(serialize_executable.serialize(compiled), file)
else:
    with open(path, "rb") as file:
        f = serialize_executable.deserialize_and_load(
            *pickle.load(file), execution_devices=jax.devices()[:1])
    event = threading.Event()
    def wait(x):
        assert event.wait(60)
        return np.float32(0)
    assert f(np.float32(1)) is None
    slow = jax.jit(lambda m: hc.call(wait, F32, (m @ m).sum()))(jnp.ones((128, 128)))
    f(slow - 2)
    event.set()
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        assert "no such number" in str(error)
    else:
        raise AssertionError
    assert seen == [1, -2]
"""


def test_a_serialized_executable_keeps_its_sign(run_python, tmp_path):
    pytest.importorskip("flatbuffers")
    path = str(tmp_path / "program")
    run_python(SERIALIZED, path, "writes")
    run_python(SERIALIZED, path, "reads")


def test_a_chain_of_donations_tells_each_failure_once(gate):
    log = Log()
    f = jax.jit(
        lambda x: hc.call(log, SCALAR, x, order="ordered") + 1, donate_argnums=0
    )
    f(jnp.float32(1) + 0)
    hc.barrier()
    state = gate(-1)
    for _ in range(5):
        state = f(state)
    del state
    gate.open()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no -1 here"):
        hc.barrier()
    hc.barrier()
    assert log.seen == [1, -1]


def test_what_ends_a_program_ends_the_thread_that_dispatched_it(gate):
    """SystemExit of a callback is raised where its thread waits, and nowhere else."""

    def leave(x):
        if x < 0:
            raise SystemExit(3)
        return x

    f = jax.jit(lambda x: hc.call(leave, SCALAR, x, order="unordered"))
    f(np.float32(1))
    ended = []

    def way(dispatch, until):
        kept = dispatch()
        until()
        try:
            hc.barrier()
        except SystemExit as error:
            ended.append(error.code)
        del kept

    worker = Worker(way, lambda: f(gate(-1)))
    gate.open()
    hc.barrier()
    jax.effects_barrier()
    assert worker.waits() is None
    assert ended == [3]


def test_dispatches_that_nobody_waits_for_keep_nothing(gate):
    log = Log()
    f = program(log, "call", "dropped")
    gate.open()
    gc.collect()
    before = len(jax.live_arrays())
    for i in range(1000):
        f(jnp.float32(i) + 0)
    f(np.float32(0))
    gc.collect()
    assert len(jax.live_arrays()) <= before + 40
    assert len(log.seen) == 1001


def test_an_eager_call_logs_the_threads_failures_and_a_barrier_raises_them(
    gate, caplog
):
    log = Log()
    f = program(log, "call", "none")
    f(gate(-1))
    gate.open()
    with caplog.at_level(logging.ERROR):
        hc.call(log, SCALAR, np.float32(4), order="ordered")
    assert log.seen == [-1, 4]
    with pytest.raises(jax.errors.JaxRuntimeError, match="no -1 here"):
        hc.barrier()


def test_random_programs_of_six_threads(gate):
    """Each thread hears of all its failures, and of no other, whenever they come."""
    del gate
    log = Log()
    programs = [program(log, "call", "dropped"), program(log, "unordered call", "none")]
    large = jnp.ones(late_square(256))
    late = jax.jit(lambda m, x: x + 0 * jnp.tanh(m @ m @ m).sum())
    waits = [hc.barrier, jax.effects_barrier]
    wrong = []

    def failed_with(call):
        """The number that a call's error names; None if there is no error."""
        try:
            call()
        except jax.errors.JaxRuntimeError as error:
            return int(str(error).split("no ")[1].split(" here")[0])
        return None

    def work(thread):
        choose = random.Random(thread)
        for i in range(30):
            owed, told = set(), set()
            for k in range(choose.randrange(1, 4)):
                number = choose.choice([1, -(1000 * thread + 10 * i + k + 1)])
                x = np.float32(number)
                if choose.random() < 0.7:
                    x = late(large, x)
                f = choose.choice(programs)
                at_once = failed_with(lambda f=f, x=x: f(x))
                if at_once is None and number < 0:
                    owed.add(number)
                elif at_once not in (None, number):
                    wrong.append((thread, number, at_once))
            while (number := failed_with(choose.choice(waits))) is not None:
                told.add(number)
            if told != owed:
                wrong.append((thread, owed, told))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert wrong == []
    hc.barrier()


# --- A dispatch that raises, then one that must be waited for -------------------------
#
# A program whose call ran on the dispatching thread has ended. What is known of that
# call must not be taken for the thread's next program, which has the same call.


@jax.tree_util.register_pytree_node_class
class Refusing:
    """A result whose class refuses it when it is told to."""

    refuses = False

    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, data, children):
        if cls.refuses:
            raise RuntimeError("refused")
        return cls(*children)


class Key(str):
    """A key of a dict of results, which refuses when it is told to."""

    refuses = False
    __eq__ = str.__eq__

    def __hash__(self):
        if Key.refuses:
            raise RuntimeError("refused")
        return str.__hash__(self)


PICKY = """
#include "xla/ffi/api/c_api.h"
extern "C" XLA_FFI_Error* Picky(XLA_FFI_CallFrame* frame) {
  for (auto* e = frame->extension_start; e != nullptr; e = e->next) {
    if (e->type != XLA_FFI_Extension_Metadata) continue;
    auto* asked = reinterpret_cast<XLA_FFI_Metadata_Extension*>(e);
    asked->metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    asked->metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return nullptr;
  }
  const auto* in = static_cast<const XLA_FFI_Buffer*>(frame->args.args[0]);
  const auto* out = static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[0]);
  const float x = *static_cast<const float*>(in->data);
  *static_cast<float*>(out->data) = x;
  if (x < 1) return nullptr;
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr,
                                    "refused", XLA_FFI_Error_Code_INTERNAL};
  return frame->api->XLA_FFI_Error_Create(&args);
}
"""


@pytest.fixture(scope="session")  # XLA takes a name once in a process
def picky(tmp_path_factory):
    """Another library's call, which fails from 1 on."""
    folder = tmp_path_factory.mktemp("picky")
    (folder / "picky.cc").write_text(PICKY)
    command = ["c++", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", "picky.cc"]
    subprocess.run([*command, "-o", "picky.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "picky.so"))
    jax.ffi.register_ffi_target("tests_picky", jax.ffi.pycapsule(library.Picky))
    return jax.ffi.ffi_call("tests_picky", SCALAR)


def fails_from_one(x):
    if x >= 1:
        raise RuntimeError("refused")
    return x


# What such a program makes of the call's result. A part of it refuses 1. The sign is the
# smallest result, which comes last.
LEFT = {
    "a class of results": lambda y, picky: (Refusing(jnp.stack([y, y])), y),
    "a key of results": lambda y, picky: ({Key("a"): jnp.stack([y, y])}, y),
    "another library's call": lambda y, picky: picky(y),
    "another call": lambda y, picky: hc.call(
        fails_from_one, SCALAR, y, order="unordered"
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("left", LEFT)
def test_a_dispatch_that_raised_says_nothing_about_the_next(
    gate, call, left, picky, monkeypatch
):
    log = Log()
    f = jax.jit(lambda x: LEFT[left](CALLS[call](log, SCALAR, x), picky))
    for x in np.float32(0), jnp.float32(0):
        f(x)
    hc.barrier()
    log.seen.clear()
    gate.warm()
    one = jnp.float32(1)
    with monkeypatch.context() as patch:
        patch.setattr(Refusing, "refuses", True)
        patch.setattr(Key, "refuses", True)
        with pytest.raises(Exception, match="refused"):
            jax.block_until_ready(f(one))
    f(gate(-1))
    gate.open()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no -1 here"):
        jax.effects_barrier()
    hc.barrier()
    assert log.seen == [1, -1]


def test_a_dispatch_in_python_says_nothing_about_the_next(gate):
    """A program with an effect of JAX's beside the same call leaves a token."""
    log = Log()

    def noted(x):
        return hc.call(log, SCALAR, x, order="unordered")

    f = jax.jit(lambda x: noted(x))
    g = jax.jit(lambda x: (jax.debug.callback(lambda x: None, x), noted(x))[1])
    for h in f, g:
        for x in np.float32(0), jnp.float32(0):
            h(x)
    hc.barrier()
    log.seen.clear()
    gate.warm()
    g(jnp.float32(1))
    f(gate(-1))
    gate.open()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no -1 here"):
        jax.effects_barrier()
    hc.barrier()
    assert log.seen == [1, -1]


ON_XLAS_THREAD = """
import jax, jax.numpy as jnp, numpy as np, hostcall as hc
from jax import lax
SCALAR = jax.ShapeDtypeStruct((), np.float32)
X = jax.device_put(jnp.float32(-1), jax.devices()[0])
@jax.jit
def slow(x):
    y = lax.fori_loop(0, 60, lambda i, m: jnp.tanh(m @ m) * 0.5, jnp.ones((300, 300)))
    return x + 0 * y[0, 0]
seen, heard = [], []
def log(x):
    seen.append(float(x))
    if x < 0:
        raise ValueError("no such number")
    return x
def noted(x):
    return hc.call(log, SCALAR, x, order="ordered")
f = jax.jit(lambda x: noted(x))
def dispatches(x):
    if x == 1:
        try:
            f(slow(X))  # raises it, if it runs here
            jax.effects_barrier()
        except jax.errors.JaxRuntimeError as error:
            heard.append("no such number" in str(error))
    return x
both = jax.jit(lambda x: hc.call(dispatches, SCALAR, noted(x), order="ordered"))
for g in f, both:
    for x in np.float32(0), jnp.float32(0):
        g(x)
slow(X)
hc.barrier()
seen.clear()
both(slow(-2 * X) - 1)
hc.barrier()
assert heard == [True], heard
assert seen == [1, -1], seen
"""


def test_a_call_on_xlas_thread_says_nothing_about_what_the_next_one_dispatches(
    run_python,
):
    run_python(ON_XLAS_THREAD)
