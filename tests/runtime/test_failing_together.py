"""What a failure in one process of a job does in all of them (real processes)."""

from __future__ import annotations

import os
import re
import struct
import sys
import threading
import time

import jax
import pytest
from failing_jobs import run_job

import hostcall as hc
from hostcall._runtime import mail, ring, stuck
from hostcall.errors import SpecError

# --- Calls that fail in all processes -------------------------------------------------

TOGETHER = """
wrong, slow = LookupError("no such row"), threading.Event()
fails = False
def host(v):
    if fails and me == size - 1:
        raise wrong
def late(v):
    if fails and me == size - 1:
        slow.wait()
def effect(order, fn=host, **how):
    def body(v):
        hc.call(fn, None, v, order=order, **how)
        return v + jax.lax.psum(v.sum(), "x")
    return over_shards(body)
def pure(v):
    y = hc.call(lambda v: (host(v), v)[1], v, v, fail="together")
    return y + jax.lax.psum(y.sum(), "x")
def masked(v):
    here = v[0] >= 2 * (n - 1)  # on the last device only
    hc.call(host, None, v, order="unordered", where=here, fail="together")
    return v + jax.lax.psum(v.sum(), "x")
def in_a_loop(v):
    def step(i, v):
        hc.call(host, None, v, order="unordered", fail="together")
        return v + jax.lax.psum(v.sum(), "x") * 0
    return jax.lax.fori_loop(0, 3, step, v) + v.sum() * 0 + jax.lax.psum(v.sum(), "x")
def partitioned(x):
    hc.call(host, None, x, order="ordered", on=jax.devices()[-1], fail="together")
    return x + x.sum()
def configured(v):
    hc.call(host, None, v, order="unordered")
    return v + jax.lax.psum(v.sum(), "x")
cases = {
    "unordered": effect("unordered", fail="together"),
    "ordered": effect("ordered", fail="together"),
    "late": effect("unordered", late, fail="together", timeout=3.0),
    "pure": over_shards(pure),
    "masked": over_shards(masked),
    "in_a_loop": over_shards(in_a_loop),
    "partitioned": jax.jit(partitioned),
    "configured": over_shards(configured),
}
total = jax.jit(lambda x: x.sum())
want = float(total(x))
mine = np.arange(2.0 * n)[[s.index[0] for s in x.addressable_shards][0]]
name = "CASE"
f = cases[name]
if name == "configured":
    hc.configure(fail="together")
def run():
    return np.asarray(f(x).addressable_shards[0].data)
fails = False
good = run()
assert (good == mine + want).all(), (name, good)
fails = True
try:
    with hc.reraise():
        f(x).block_until_ready()
    say(name, "did not fail")
except BaseException as error:
    said = f"{type(error).__name__}: {error}"
kind, text = "LookupError", "no such row"
if name == "late":
    kind, text = "CallTimeoutError", "took longer than timeout=3.0 s"
if me == size - 1:
    assert said.startswith(kind) and text in said, (name, said)
else:
    assert said.startswith("HostcallError: hostcall: `"), (name, said)
    assert f"` failed in process {size - 1}: {kind}: " in said, (name, said)
    assert text in said, (name, said)
fails = False
for refused in (f, total):
    try:
        refused(x)
        say("was not refused")
    except hc.errors.HostcallError as error:
        assert "restart them from the last checkpoint" in str(error), error
        assert text in str(error), error
say("done")
slow.set()
"""


CASES = (
    "unordered",
    "ordered",
    "late",
    "pure",
    "masked",
    "in_a_loop",
    "partitioned",
    "configured",
)


@pytest.mark.parametrize(("size", "devices"), [(2, 2), (3, 1)])
@pytest.mark.parametrize("case", CASES)
def test_a_failure_raises_in_all(case, size, devices):
    """Each process computes, raises the failure, and refuses further programs."""
    for process in run_job(TOGETHER.replace("CASE", case), size, devices):
        assert process.code == 0, process.err
        assert process.said == ["done"], process.err


# --- Failures that the program can't tell ---------------------------------------------

ALONE = """
from hostcall import _jax
hc.configure(fail_grace=GRACE)
fails = False
class Bad(Exception):
    pass
def host(v):
    if fails and me != WHO:
        _jax.job_put(f"in the program/{me}", "yes")
    elif fails:  # not before the others are in it: they would refuse to start it
        for other in set(range(size)) - {me}:
            assert _jax.job_get(f"in the program/{other}", 60)
        ACT
    return v
def body(v):  # the collective needs the call's result, so it comes after the call
    v = hc.call(host, v, v)
    return v + jax.lax.psum(v.sum(), "x")
f = over_shards(body)
want = np.asarray(f(x).addressable_shards[0].data)
from hostcall._runtime import peers
deadline = time.monotonic() + 60
while not peers._ring.is_joined and time.monotonic() < deadline:
    time.sleep(0.01)
fails = True
"""


def alone(
    failing, who=1, grace=1, rest="f(x).block_until_ready()\nsay('wrong')", **how
):
    head = ALONE.replace("ACT", failing).replace("WHO", str(who))
    return run_job(head.replace("GRACE", str(grace)) + rest, **how)


STAYS = """
_jax.job_put(f"pid/{me}", str(os.getpid()))
other = os.pidfd_open(int(_jax.job_get(f"pid/{1 - me}", 60)))
def end_with_the_other():
    select.select([other], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
try:
    f(x).block_until_ready()
    say("wrong")
except BaseException as error:
    say(type(error).__name__)
    if me == WHO:
        try:
            jax.jit(lambda x: x.sum())(x)
            say("wrong")
        except hc.errors.HostcallError:
            say("refused")
        threading.Thread(target=end_with_the_other).start()
        threading.Event().wait()  # it lives on
"""


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_is_stuck_ends_itself(who):
    """The failed process lives on and never comes to the collective."""
    rest = STAYS.replace("WHO", str(who))
    ended = alone('raise LookupError("no such row")', who, rest=rest)
    other, failed = ended[1 - who], ended[who]
    assert other.code == 70, other
    assert failed.code == -9, failed  # it waits for a lock, not for XLA
    assert failed.said == ["JaxRuntimeError", "refused"]
    assert other.said == []
    assert f"hostcall: process {who} failed: LookupError: no such row (in" in other.last
    assert "ends with exit code 70 (hc.configure(fail_grace=))" in other.err
    assert re.search(rf"^process {who} failed: LookupError", other.err, re.M)


def test_a_process_that_works_on_its_own_is_left_alone():
    """It hears of the failure, and is neither ended nor slowed; its own programs run."""
    rest = """
if me == 1:
    raise Bad("outside of a program")
deadline = time.monotonic() + 60
while peers.known() is None and time.monotonic() < deadline:
    time.sleep(0.01)
say(peers.known())
time.sleep(2.5)  # longer than the grace, in one call
local = jax.jit(lambda v: hc.call(lambda v: v + 1, v, v))
say(float(local(np.float32(1))))
threading.Event().wait(2.5)
try:
    f(x)
except hc.errors.HostcallError as error:
    say("refused:", "Bad: outside of a program" in str(error))
"""
    other, failed = alone("pass", rest=rest)
    assert other.said == [
        "process 1 failed: Bad: outside of a program",
        "2.0",
        "refused: True",
    ], other
    assert other.code == 0
    assert failed.code == 1
    assert failed.last == "Bad: outside of a program"


@pytest.mark.parametrize("who", [1, 2])
def test_a_process_that_is_killed(who):
    rest = """
try:
    f(x).block_until_ready()
    say("wrong")
except Exception:
    deadline = time.monotonic() + 60
    while not peers.gone() and time.monotonic() < deadline:
        time.sleep(0.01)
    raise
"""
    ended = alone("os.kill(os.getpid(), signal.SIGKILL)", who, rest=rest, size=3)
    assert ended[who].code == -9
    for number, process in enumerate(ended):
        if number != who:
            assert process.code in (1, 70), ended
            assert process.said == []
            assert f"process {who} died without a word (killed" in process.err


def test_sys_exit_while_the_others_wait():
    """It waits for them at its end; they find out, end, and it keeps its exit code."""
    rest = """
if me == 1:
    sys.exit(3)
f(x).block_until_ready()
say("wrong")
"""
    other, left = alone("pass", rest=rest)
    assert (other.code, left.code) == (70, 3)
    assert other.last == "hostcall: process 1 is at its end and waits for the others"


@pytest.mark.parametrize("fails", [False, True])
def test_all_end_at_once(fails):
    """Nobody waits for JAX's own end, whether or not a process has failed."""
    rest = "if me == 1:\n    raise Bad('late')\n" if fails else "f(x)\n"
    ended = alone("pass", rest=rest.replace("raise", "raise" if fails else ""))
    assert [process.code for process in ended] == ([0, 1] if fails else [0, 0])


def test_a_process_that_works_is_waited_for():
    """Process 2 has ended, and process 0 is stuck: it waits for process 1, which works
    until process 0 has said that it is stuck.
    """
    ended = run_job(
        """
from hostcall._runtime import peers
from jax.experimental import multihost_utils
hc.call(np.sin, np.float32(1), np.float32(1))
while not peers.all_started():  # all use hostcall
    time.sleep(0.05)
multihost_utils.sync_global_devices("all have seen it")
if me == 2:
    sys.exit()
two = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("y",))
rows = NamedSharding(two, P("y"))
y = jax.make_array_from_callback((2,), rows, lambda i: np.ones(2, "float32")[i])
step = jax.jit(lambda y: y.sum())
step(y).block_until_ready()
if me == 1:
    while 0 not in peers._idle:
        time.sleep(0.05)
say(float(step(y + 1)))
""",
        3,
        env={"HOSTCALL_FAIL_GRACE": "5"},
    )
    assert [process.code for process in ended] == [0, 0, 0], ended
    assert [process.said for process in ended] == [["4.0"], ["4.0"], []]


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_looking_for_messages_keeps_no_memory():
    ended = run_job(
        """
import resource
from hostcall._runtime import mail
hc.call(np.sin, np.float32(1), np.float32(1))
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
for _ in range(200):
    assert mail.read(1000) is None
before = resident()
for _ in range(2000):  # blocking gets would leave 70 MB
    assert mail.read(1000) is None
say(resident() - before < 10e6)
"""
    )
    assert [process.said for process in ended] == [["True"], ["True"]], ended


def test_a_message_that_two_processes_write_at_the_same_time():
    """None is lost: a number of an inbox that is taken is not written again."""
    ended = run_job(
        """
from hostcall._runtime import mail
for i in range(50):
    mail.post(mail.Message("test", me, str(i)), 0)
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("all have posted")
if me == 0:
    got = [mail.read(number) for number in range(50 * size)]
    for process in range(size):
        assert [m.text for m in got if m.process == process] == list(map(str, range(50)))
    assert mail.read(50 * size) is None
    say("done")
multihost_utils.sync_global_devices("all has been read")
""",
        3,
    )
    assert [process.code for process in ended] == [0, 0, 0], ended
    assert ended[0].said == ["done"]


def test_the_address_of_a_machine_whose_name_is_its_loopback(monkeypatch):
    """As on Debian: the ring must not tell other machines a loopback address."""
    there = ring._address_towards
    named = {"node0": "127.0.1.1", ring._ELSEWHERE: "10.1.2.3"}
    monkeypatch.setattr(ring, "_address_towards", lambda h: named.get(h) or there(h))
    assert ring._own_address("node0") == "10.1.2.3"
    assert ring._own_address("localhost") in ("127.0.0.1", "::1")
    assert ring._own_address("127.0.0.1") == "127.0.0.1"


# --- Without other processes ----------------------------------------------------------


def test_a_single_process():
    with pytest.raises(ZeroDivisionError), hc.reraise():
        jax.jit(lambda v: hc.call(_fail, v, v, fail="together"))(1.0)


def _fail(v):
    return 1 / 0


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"fail": "all"}, "fail should be one of 'together', 'alone', got 'all'"),
        ({"fail_grace": -1}, "fail_grace should be a number of seconds, 0 or more"),
        ({"fail_grace": True}, "fail_grace should be a number of seconds, 0 or more"),
    ],
)
def test_wrong_settings(how, text):
    with pytest.raises(SpecError, match=f"hostcall: {re.escape(text)}"):
        hc.configure(**how)


def test_wrong_options():
    text = "hostcall: fail= of `_fail` should be one of 'together', 'alone' or None"
    with pytest.raises(SpecError, match=text):
        hc.call(_fail, 1.0, 1.0, fail="all")


def test_a_name_that_is_gone_says_what_to_do():
    with pytest.raises(AttributeError, match="restart them from the last checkpoint"):
        hc.recover


def test_this_process_is_not_stuck():
    """The main thread waits in the test; only a wait inside XLA counts."""
    begun, release = threading.Event(), threading.Event()
    looks = []

    def look():
        begun.wait(60)
        one = stuck.Stuck()
        looks.append(one.seconds())
        time.sleep(0.05)
        looks.append(one.seconds())
        release.set()

    thread = threading.Thread(target=look)
    thread.start()
    # The main thread is inside XLA here; but the program's callback runs, on its own.
    jax.jit(lambda v: hc.call(lambda v: (begun.set(), release.wait(60), v)[2], v, v))(
        1.0
    ).block_until_ready()
    thread.join()
    assert looks[1] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    ("newest", "waits"),
    [
        ("cccxxxxxxxxxxp", True),
        ("cxpxxcxxxxxx", True),  # an address of Python's, left there from before
        ("ccxpxpxxxxxx", False),
        ("xccppppppppxxxxxxxx", False),  # Python's lock; an address of XLA's was left
        ("ccppppppppxxxxxxxx", False),  # Python's lock, in a callback
        ("cccxxxxxxx", True),
        ("cccxxxxxx", False),
        ("", False),
    ],
)
def test_whose_stack_it_is(newest, waits):
    """By return addresses: c in the C library, p in Python, x in XLA; newest first."""
    inside = stuck._Inside()
    files = {"c": ("libc.so", "libc-"), "p": ("libpython", "python"), "x": ("libjax",)}
    start = {
        kind: next(at for at, _, name in inside._ranges if name.startswith(names))
        for kind, names in files.items()
    }
    words = [word for kind in newest for word in (7, start[kind] + 16, 0)]
    assert inside.is_xlas(struct.pack(f"{len(words)}Q", *words)) is waits


def test_the_main_thread_of_a_forked_process(run_python):
    """Its stack is this process's: else it would never be taken for stuck."""
    done = run_python("""
        import os, threading
        if os.fork():
            raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
        from hostcall._runtime import stuck
        native = stuck._native_id(threading.main_thread())
        assert native == threading.get_native_id()
        """)
    assert done.returncode == 0


def test_what_a_message_says():
    said = str(mail.Message("died", 3, ""))
    assert said == "process 3 died without a word (killed, out of memory, or cut off)"
