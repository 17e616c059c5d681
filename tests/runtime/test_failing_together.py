"""What a failure in one process of a job does in all of them (real processes)."""

from __future__ import annotations

import os
import re

import jax
import older_jax
import pytest
from failing_jobs import run_job

import hostcall as hc
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
    "late": effect("unordered", hc.host(late, timeout=3.0), fail="together"),
    "pure": over_shards(pure),
    "masked": over_shards(masked),
    "in_a_loop": over_shards(in_a_loop),
    "partitioned": jax.jit(partitioned),
    "configured": over_shards(configured),
}
total = jax.jit(lambda x: x.sum())
want = float(total(x))
mine = np.arange(2.0 * n)[[s.index[0] for s in x.addressable_shards][0]]
for name, f in cases.items():
    hc.configure(fail="together" if name == "configured" else "alone")
    fails = False
    good = np.asarray(f(x).addressable_shards[0].data)
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
    say(name)
    # All processes have raised it, so the job could go on, and does for the next case.
    goes_on()
slow.set()
"""

CASES = [
    "unordered",
    "ordered",
    "late",
    "pure",
    "masked",
    "in_a_loop",
    "partitioned",
    "configured",
]


def test_a_failure_raises_in_all():
    """Each process computes, raises the failure, and refuses further programs."""
    for process in run_job(TOGETHER, devices=2):
        assert process.code == 0, process.err
        assert process.said == CASES, process.err


# --- Failures that the program can't tell ---------------------------------------------

ALONE = """
fails = False
class Bad(Exception):
    pass
def host(v):
    if fails and me != WHO:
        write_to_store(f"in the program/{me}", "yes")
    elif fails:  # not before the others are in it: they would refuse to start it
        for other in set(range(size)) - {me}:
            assert awaited(f"in the program/{other}")
        ACT
    return v
def body(v):  # the collective needs the call's result, so it comes after the call
    v = hc.call(host, v, v)
    return v + jax.lax.psum(v.sum(), "x")
f = over_shards(body)
f(x).block_until_ready()
fails = True
"""


def alone(failing, who=1, rest="f(x).block_until_ready()\nsay('wrong')", **how):
    head = ALONE.replace("ACT", failing).replace("WHO", str(who))
    return run_job(head + rest, **how)


@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_ends_the_others_too(who):
    """The failed process waits for nobody, and its end closes its connections."""
    ended = alone('raise LookupError("no such row")', who)
    other, failed = ended[1 - who], ended[who]
    assert failed.code == 1, failed
    assert failed.last.startswith("jax.errors.JaxRuntimeError: INTERNAL: LookupError")
    assert f"\nprocess {who} failed: LookupError: no such row (in" in f"\n{other.err}"
    assert other.code == 1, other
    assert [other.said, failed.said] == [[], []]


def test_a_process_that_works_on_its_own_is_left_alone():
    """It hears of the failure, and its own programs run. What others write into the
    job's store does no harm.
    """
    rest = """
wrong = ["failed/7", "failed/x", "failed/1/2", "asks/1", "asks/9.1", "asks/../x", "x/1"]
if me == 1:
    for name in wrong:
        write_to_store(f"hostcall/board/{name}", "wrong")
    from jax._src import distributed
    put_bytes = distributed.global_state.client.key_value_set_bytes
    put_bytes("hostcall/board/failed/8", b"\\xff no text")
    for number, text in enumerate(["[", "[1, 2, 3]", '[1, 0, "", [[{}]]]', "[" * 9999]):
        write_to_store(f"hostcall/answers/0.{number}/1", text)
meet("written")
if me == 0:
    for _ in range(4):
        here, there = hc.monitor.status(processes="all", limit=0.1)
        assert here.answered and not there.answered, there
    here, there = hc.monitor.status(processes="all", limit=60)
    assert there.answered and there.main and there.calls == (), there
meet("asked")
if me == 1:
    raise Bad("outside\\x1b of a program")
deadline = time.monotonic() + 60
while failure_of_another() is None and time.monotonic() < deadline:
    time.sleep(0.01)
local = jax.jit(lambda v: hc.call(lambda v: v + 1, v, v))
say(float(local(np.float32(1))))
try:
    f(x)
except hc.errors.HostcallError as error:
    say("refused:", "process 1 failed: Bad: outside? of a program" in str(error))
"""
    other, failed = alone("pass", rest=rest)
    assert other.said == ["2.0", "refused: True"], other
    assert other.code == 0
    assert failed.code == 1
    assert failed.last == "Bad: outside\x1b of a program"


@pytest.mark.parametrize("where", ["in a collective", "at its end"])
def test_a_process_that_is_killed(where):
    """The other one ends by Gloo's closed connection, or by JAX's heartbeats."""
    rest = "f(x).block_until_ready()"
    if where == "at its end":
        rest = """
if me == 0:
    sys.exit()
assert awaited("hostcall/end/count") == "1"
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = alone(
        "os.kill(os.getpid(), signal.SIGKILL)", rest=rest, heartbeat_seconds=10
    )
    assert ended[1].code == -9
    aborts = where == "at its end" and not older_jax.LOST_JOBS_ABORT.is_missing
    assert ended[0].code == (-6 if aborts else 1), ended[0]


def test_sys_exit_while_the_others_wait():
    """It waits for them at its end, for as long as JAX would, and no longer."""
    rest = """
waits_at_its_end(1.0)
if me == 1:
    sys.exit(3)
f(x).block_until_ready()
"""
    other, left = alone("pass", rest=rest)
    assert (other.code, left.code) == (1, 3), (other, left)
    text = "process 1 failed: it waited 1 s at its end for the others"
    assert text in other.err


@pytest.mark.parametrize("fails", [False, True])
def test_all_end_at_once(fails):
    """Nobody waits for JAX's own end, whether or not a process has failed."""
    rest = """
if me == 1:
    assert awaited("hostcall/end/count") == "1"  # the other is at its end
    FAILS
"""
    fail = "raise Bad('late')" if fails else "pass"
    ended = alone("pass", rest=rest.replace("FAILS", fail))
    assert [process.code for process in ended] == ([0, 1] if fails else [0, 0])
    assert ("process 1 failed: Bad: late" in ended[0].err) is fails


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_looking_for_messages_keeps_no_memory():
    (ended,) = run_job(
        """
import resource
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
def look(times):
    for _ in range(times):
        assert keys_in_store("hostcall/board/") == {}
        assert in_store("hostcall/end/all") is None
look(200)
before = resident()
look(2000)  # blocking gets would leave 70 MB
say(resident() - before < 10e6)
""",
        size=1,
    )
    assert ended.said == ["True"], ended


# --- More than a few processes --------------------------------------------------------

MANY = """
fails = False
def host(v):
    if fails and me not in WHO:
        write_to_store(f"in the program/{me}", "yes")
    elif fails:  # not before the others are in it: they would refuse to start it
        for other in set(range(size)) - WHO:
            assert awaited(f"in the program/{other}")
        ACT
    return v
def alone(v):  # the collective needs the call's result, so it comes after the call
    v = hc.call(host, v, v, fail="alone")
    return v + jax.lax.psum(v.sum(), "x")
def together(v):
    v = hc.call(host, v, v, fail="together")
    return v + jax.lax.psum(v.sum(), "x")
def jitted(x):  # WHO has one process
    out = hc.call(host, x, x, on=jax.devices()[min(WHO)])
    return out + x.sum()
f = {
    "alone": over_shards(alone),
    "together": over_shards(together),
    "jit": jax.jit(jitted, out_shardings=sharding),
}["WAY"]
total = 2 * n * (2 * n - 1) / 2  # of the numbers that the devices have
for shard in f(x).addressable_shards:
    want = np.arange(2.0 * n)[shard.index[0]] + total
    assert (np.asarray(shard.data) == want).all(), (shard.data, want)
if "WAY" == "jit" and me not in WHO:  # the function runs in the other process only
    write_to_store(f"in the program/{me}", "yes")
fails = True
"""


def many(act, who, way="alone", rest="f(x).block_until_ready()\nsay('wrong')", **how):
    """Runs a job in which the processes `who` fail by `act`, after a good step."""
    head = MANY.replace("ACT", act).replace("WHO", str(who)).replace("WAY", way)
    return run_job(head + rest, **how)


RAISE = 'raise LookupError("no such row")'


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("way", ["alone", "together", "jit"])
def test_all_processes_raise_the_failure_of_one(way, size):
    """All end by a Python exception that names the process and its error, also those
    that are not its neighbours in the collective. Process 0, which has the coordination
    service, ends after them.
    """
    ended = many(RAISE, {1}, way, size=size)
    assert [process.code for process in ended] == [1] * size, ended
    assert [process.said for process in ended] == [[]] * size
    for number, process in enumerate(ended):
        traceback = process.err.rpartition("Traceback (most recent call last)")[2]
        if number == 1:
            if older_jax.PLAIN_REPORTS.is_missing:
                traceback = traceback.replace(" Buffer Definition Event:", "")
            assert "INTERNAL: LookupError: no such row (in callback `host`" in traceback
            assert "before this error" not in traceback
        elif way == "alone":
            text = "hostcall: before this error, process 1 failed: LookupError: no such"
            assert f"\n{text} row (in callback `host`" in traceback
        else:
            assert " failed in process 1: LookupError: no such row" in traceback
            assert "before this error" not in traceback


def test_process_0_fails_and_stays_for_the_others():
    ended = many(RAISE, {0}, size=4)
    assert [process.code for process in ended] == [1] * 4, ended
    for process in ended[1:]:
        assert "before this error, process 0 failed: LookupError" in process.err


def test_two_processes_fail_at_once():
    ended = many(RAISE, {1, 2}, size=4)
    assert [process.code for process in ended] == [1] * 4, ended
    for process in ended[1:3]:
        assert "before this error" not in process.err
    for process in ended[::3]:
        named = re.search(r"before this error, process (\d) failed: Look", process.err)
        assert named is not None, process
        assert named[1] in "12"


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGINT"])
def test_a_signal_ends_one_of_four(signal):
    """One that is killed says nothing: the others hear of the first that lost it."""
    act = f"os.kill(os.getpid(), signal.{signal}); awaited('never')"
    ended = many(act, {1}, size=4)
    assert ended[1].code < 0
    others = [ended[number] for number in (0, 2, 3)]
    assert [process.code for process in others] == [1] * 3, ended
    assert any("before this error, process " in process.err for process in others)
    if signal == "SIGINT":
        for process in others:
            assert "before this error, process 1 failed: KeyboardInterr" in process.err


GOES_ON = """
stays_at_its_end(0.5)
if me in AT_WORK:
    try:
        WORK
    except BaseException as error:
        say(type(error).__name__, error)
        raise
f(x).block_until_ready()
"""


@pytest.mark.parametrize(
    ("act", "at_work", "work"),
    [
        (RAISE, {1}, "catch(lambda: f(x).block_until_ready()); go_on(0)"),
        (RAISE, {2}, "catch(lambda: f(x).block_until_ready()); go_on(0)"),
        (RAISE, {2}, "in_the_program(); go_on(0)"),
        (RAISE, {2}, "in_the_program(); jax.jit(called)(1.0).block_until_ready()"),
    ],
    ids=["failed", "raised", "in_python", "in_a_call"],
)
def test_a_process_that_goes_on_is_ended_by_an_exception(act, at_work, work):
    """Before process 0 ends, by which jaxlib would abort it."""
    head = """
def in_the_program():
    write_to_store(f"in the program/{me}", "yes")
def catch(run):
    try:
        run()
    except jax.errors.JaxRuntimeError:
        pass
    except ValueError:
        pass
def go_on(v):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        time.sleep(0.01)
    return v
def called(v):
    return hc.call(go_on, v, v)
"""
    rest = head + GOES_ON.replace("AT_WORK", str(at_work)).replace("WORK", work)
    ended = many(act, {1}, rest=rest, size=3)
    assert [process.code for process in ended] == [1] * 3, ended
    (process,) = (ended[number] for number in at_work)
    assert "which has gone on after a failure: process 1 failed: Look" in process.err
    if work != "in_the_program(); jax.jit(called)(1.0).block_until_ready()":
        (said,) = process.said
        assert said.startswith(
            "HostcallError hostcall: process 0 of the job, which has"
        )


OPEN = """
import socket
server = socket.create_server(("localhost", 0))
mine = socket.create_connection(server.getsockname())
other, _ = server.accept()
def is_open():
    mine.sendall(b"still open")
    return other.recv(100).decode()
"""


def test_only_the_connections_of_collectives_are_closed():
    """Whatever else the job's store has where Gloo puts its addresses."""
    rest = """
from jax._src import distributed
put_bytes = distributed.global_state.client.key_value_set_bytes
if me == 1:
    for number, value in enumerate([b"", b"no address", b"x" * 10_000, bytes(136)]):
        put_bytes(f"cpu:gloo/wrong/{number}", value)
meet("written")
if me == 0:
    say(closes_collectives(), is_open())
meet("closed")
f(x).block_until_ready()
"""
    ended = many("pass", {1}, rest=OPEN + rest)
    assert [process.code for process in ended] == [1, 1], ended
    assert [process.said for process in ended] == [["1 still open"], []], ended


def test_an_error_that_is_caught_names_the_failure_too():
    """The process that failed lives on, so its end closes no connection. What it writes
    about the end of process 0 changes nothing.
    """
    rest = """
if me == 1:
    for name in ["ends/1", "ends/x", "ends/0/0", "ends/"]:
        write_to_store(f"hostcall/board/{name}", "wrong")
try:
    with hc.reraise():
        f(x).block_until_ready()
except Exception as error:
    if me == 1:
        assert awaited("checked")
        raise
    (note,) = error.__notes__
    say("process 1 failed: LookupError: no such row" in note, is_open())
    write_to_store("checked", "yes")
    raise
"""
    ended = many(RAISE, {1}, rest=OPEN + rest)
    assert [process.code for process in ended] == [1, 1], ended
    assert [process.said for process in ended] == [["True still open"], []], ended


@pytest.mark.parametrize(
    ("wait", "texts"),
    [
        (  # one that has heard of the failure by now refuses to start it
            "from jax.experimental import multihost_utils\n"
            "multihost_utils.sync_global_devices('x')",
            [": UNKNOWN: Gloo ", "refuses further programs over several"],
        ),
    ],
    ids=["plain_jax"],
)
def test_what_else_waits_for_a_process_that_failed(wait, texts):
    """Programs without host code, and what the processes give to each other."""
    head = "class Bad(Exception):\n    pass\n"
    rest = f"if me == 1:\n    raise Bad('outside')\n{wait}\n"
    ended = many("pass", {1}, rest=head + rest, size=4)
    assert [process.code for process in ended] == [1] * 4, ended
    for process in (ended[number] for number in (0, 2, 3)):
        traceback = process.err.rpartition("Traceback (most recent call last)")[2]
        assert any(text in traceback for text in texts), process.err
        assert "process 1 failed: Bad: outside" in traceback


def test_process_0_can_not_see_who_leaves():
    """Behind a proxy, for example. The others say that they leave."""
    ended = many(RAISE, {0}, rest="sees_nobody_leave()\nf(x).block_until_ready()")
    assert [process.code for process in ended] == [1, 1], ended


# --- Without other processes ----------------------------------------------------------


def test_a_single_process():
    with pytest.raises(ZeroDivisionError), hc.reraise():
        jax.jit(lambda v: hc.call(_fail, v, v, fail="together"))(1.0)


def _fail(v):
    return 1 / 0


def test_a_job_of_one_process_has_none_of_this(run_python):
    done = run_python("""
        import sys, threading
        import jax, numpy as np
        import hostcall as hc
        def step(x):
            hc.tap(print, x)
            y = hc.call(np.sin, x, x, fail="together")
            hc.call(print, None, y, order="ordered")
            return y
        x = jax.numpy.ones(4)
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        P = jax.sharding.PartitionSpec("x")
        jax.jit(step)(x)
        jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P, out_specs=P))(x)
        hc.Object(lambda: [], methods={"clear": None}, name="state").save()
        assert len(hc.monitor.status()) == 0
        hc.barrier()
        assert not [m for m in sys.modules if m.startswith("hostcall._job")]
        assert {t.name for t in threading.enumerate()} <= {
            "MainThread", "hostcall-watcher", "hostcall-taps"
        }, threading.enumerate()
        """)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"fail": "all"}, "should be one of 'together', 'alone' or None, got 'all'"),
        ({"fail_grace": 1}, "hc.configure has no setting fail_grace="),
        ({"fail_grace": 1}, "heartbeat_timeout_seconds=10"),
        ({"fails": "alone"}, "Did you mean fail=?"),
    ],
)
def test_wrong_settings(how, text):
    with pytest.raises(SpecError, match=re.escape(text)):
        hc.configure(**how)


def test_wrong_options():
    text = "hostcall: fail= of `_fail` should be one of 'together', 'alone' or None"
    with pytest.raises(SpecError, match=text):
        hc.call(_fail, 1.0, 1.0, fail="all")


def test_a_name_that_is_gone_says_what_to_do():
    with pytest.raises(AttributeError, match="restart them from the last checkpoint"):
        hc.recover
