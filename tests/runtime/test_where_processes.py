"""Where host code runs in a job of several processes, and what they tell each other."""

from __future__ import annotations

import pytest
from jobs import run_job

import hostcall as hc

# --- Taps ----------------------------------------------------------------------------

TAPS = """
import contextlib, io, re
devices = np.array(jax.devices())
square = Mesh(devices.reshape(2, 2), ("p", "l"))  # p: the processes
line, turned = Mesh(devices, ("x",)), Mesh(devices[::-1], ("x",))
mixed = Mesh(devices[[0, 2, 1, 3]], ("x",))
X = np.arange(32, dtype=np.float32).reshape(4, 8)
shardings = {
    "replicated": (square, P()),
    "over processes": (square, P("p")),
    "inside a process": (square, P("l")),
    "both axes": (square, P("p", "l")),
    "both turned": (square, P("l", "p")),
    "one axis": (line, P("x")),
    "columns": (line, P(None, "x")),
    "from the last": (turned, P("x")),
    "mixed": (mixed, P("x")),
}
seen = []
def see(x):
    seen.append((hc.current(), x))
def taken():
    hc.barrier()
    found, seen[:] = seen[:], []
    for here, x in found:
        assert (here.process, here.processes) == (me, 2)
        assert here.device.process_index == me
    return found

for name, (mesh, spec) in shardings.items():
    x = put(X, NamedSharding(mesh, spec))
    # What the devices of this process hold, each block once.
    blocks = {str(s.index): np.asarray(s.data) for s in x.addressable_shards}
    for jit in (True, False):
        def run(on, order="unordered"):
            f = lambda x: (hc.tap(see, x, on=on, order=order), x * 2)[1]
            (jax.jit(f) if jit else f)(x)
            return taken()
        if jit:
            first = mesh.devices.flat[0]
            for order in ("unordered", "ordered"):
                found = run("once", order)
                assert len(found) == (first.process_index == me), name
                for here, value in found:
                    assert here.device == first and here.index is None
                    assert here.devices == tuple(mesh.devices.flat)
                    np.testing.assert_array_equal(value, X)
            for device in jax.devices():
                assert [h.device for h, _ in run(device)] == [device] * (
                    device.process_index == me)
        for order in ("unordered", "ordered"):
            found = run("shards", order)
            # Among devices that hold one block, the first taps, maybe in the other process.
            assert len(found) <= len(blocks), name
            for here, value in found:
                np.testing.assert_array_equal(value, X[here.index[0]])
    say(name)

try:
    hc.tap(see, put(X, NamedSharding(line, P("x"))))
except hc.errors.SpecError as error:
    assert "outside of jax.jit with an array of shape [4, 8] that is sharded over" in str(error)
    assert "which gathers it, or use on='shards' for the parts" in str(error)
    say("parts")

# An array that one process has. The others run the same line, and have no values of it.
for owner, device in enumerate([devices[0], devices[2]]):
    held = [jax.device_put(X, device)] if me == owner else []
    x = jax.make_array_from_single_device_arrays(
        X.shape, jax.sharding.SingleDeviceSharding(device), held, dtype=X.dtype)
    for _ in range(3):
        hc.tap(see, x)
    assert [here.device for here, _ in taken()] == [device] * 3 * (me == owner)
say("one device")
try:
    one = Mesh(devices[:2], ("x",))
    jax.jit(lambda x: hc.tap(see, x, on=devices[3])).lower(
        jax.ShapeDtypeStruct((4,), np.float32, sharding=NamedSharding(one, P("x"))))
except hc.errors.HostcallError as error:
    assert "`see` has on=" in str(error) and "not among the devices of the" in str(error)
    say("not among")

x = put(X, NamedSharding(line, P("x")))
jax.jit(lambda v: hc.tap(see, v))(np.float32(me))  # a program of one process is its own
((here, value),) = taken()
assert value == me and here.devices == (here.device,)

# hc.print
out = io.StringIO()
def prints(x):
    hc.print("once {}", x.sum(), file=out)
    hc.print("shard {}", x[:, 0], on="shards", file=out)
    jax.debug.callback(lambda v: out.write(f"debug {v}\\n"), x.sum())
    hc.debug.print("drop-in {}", x.sum())
with contextlib.redirect_stdout(out):
    jax.jit(prints)(x)
    jax.effects_barrier(); hc.barrier()
lines = sorted(out.getvalue().splitlines())
mine = [f"shard [{16 * me}.]", f"shard [{16 * me + 8}.]"]
first = ["debug 496.0", "drop-in 496.0", "once 496.0"] if me == 0 else []
assert [" ".join(l.split()).replace("[ ", "[") for l in lines] == sorted(first + mine), lines
say("printed")
"""


def test_where_taps_and_prints_run(run_python):
    first, second = run_job(run_python, TAPS)
    assert first == second
    assert first[-4:] == ["parts", "one device", "not among", "printed"]
    assert len(first) == 9 + 4


# --- Status --------------------------------------------------------------------------

AFTER_A_TAP = """
x = put(np.arange(4, dtype=np.float32), NamedSharding(Mesh(jax.devices(), "x"), P("x")))
jax.block_until_ready(jax.jit(lambda x: (hc.tap(lambda v: None, x, on=ON), x)[1])(x))
hc.barrier()
if me == 1:
    first, second = hc.monitor.status(processes="all", limit=60)
    assert first.answered and second.answered, str(first)
meet("asked")
say("answered")
"""


@pytest.mark.parametrize("on", ["once", "shards"])
def test_processes_that_have_only_tapped_answer(run_python, on):
    first, second = run_job(run_python, AFTER_A_TAP.replace("ON", repr(on)))
    assert first[-1] == second[-1] == "answered"


STATUS = """
line = Mesh(np.array(jax.devices()), ("x",))
x = put(np.arange(4, dtype=np.float32), NamedSharding(line, P("x")))
def until(condition, what):
    for _ in range(120):
        found = hc.monitor.status(processes="all", limit=60)
        if condition(found):
            return found
        threading.Event().wait(0.05)
    raise AssertionError((what, [str(f) for f in found]))
if me == 1:
    first, second = hc.monitor.status(processes="all", limit=1)
    assert not first.answered and second.answered and second.pid == os.getpid()
    assert "process 0 did not answer: it has ended, is stopped, or" in str(first)
    say("silent")
meet("asked")
# The processes' first meeting in a collective has a limit of 30 s.
jax.jit(lambda x: x.sum())(x).block_until_ready()

def looks(v):
    # This callback holds up both processes: 0 waits in the all-reduce.
    def stuck(found):
        return "in waits_for_it" in found[0].main and found[1].calls
    first, second = until(stuck, "stuck")
    assert first.answered and first.calls == () and first.process == 0
    (call,) = second.calls
    assert call.name == "looks, in 1" and call.place.file == "<string>"
    assert call.seconds > 0 and "in looks" in call.stack
    assert f"process 0 (pid {first.pid}), 0 taps queued: no call is running" in str(first)
    assert "looks, in 1, for " in str(second)
    say("stuck")
    return v
def shard(v):
    v = hc.call(looks, v, v, where=jax.lax.axis_index("x") == 2, tag="looks, in 1")
    return jax.lax.psum(v, "x")
f = jax.jit(jax.shard_map(shard, mesh=line, in_specs=P("x"), out_specs=P()))
def waits_for_it():
    f(x).block_until_ready()
waits_for_it()

# From the process whose main thread waits, about a tap that the other one is in.
seen, leave = threading.Event(), threading.Event()
def slow(v):
    seen.set()
    assert leave.wait(60)
jax.jit(lambda v: hc.tap(slow, v, tag="slow", on=jax.devices()[0]))(x)
if me == 0:
    assert seen.wait(60)
meet("tapped")
if me == 1:
    first, _ = hc.monitor.status(processes="all", limit=60)
    assert [c.name for c in first.calls] == ["slow"] and first.taps == 1
    say("tap")
meet("told")
leave.set()
hc.barrier()
for wrong, text in [({"processes": "some"}, "should be 'all', got 'some'"),
                    ({"processes": "all", "limit": 0}, "seconds above 0, got 0")]:
    try:
        hc.monitor.status(**wrong)
    except hc.errors.SpecError as error:
        assert text in str(error)
        say("refused")
assert keys_in_store("hostcall/board/") == {}
assert keys_in_store("hostcall/answers/") == {}
assert "hostcall-job" in {t.name for t in threading.enumerate()}
# One process asks for the job's service to be gone before the end, the other leaves it
# to JAX; neither may crash or hang.
meet("end")
if sys.argv[5] == "shutdown":
    jax.distributed.shutdown()
    assert hc.monitor.status(processes="all")[0].answered
say("end")
"""


@pytest.mark.parametrize("end", ["shutdown", "exit"])
def test_status_of_all_processes(run_python, end):
    first, second = run_job(run_python, STATUS, end)
    assert first == ["refused", "refused", "end"]
    assert second == ["silent", "stuck", "tap", "refused", "refused", "end"]


def test_status_of_all_without_a_job():
    (here,) = hc.monitor.status(processes="all")
    assert here.process == 0
    assert here.answered
    assert here.calls == ()
    assert "test_status_of_all_without_a_job" in here.main


# --- Objects -------------------------------------------------------------------------

EACH = """
import base64, json, pathlib
from jax.experimental import multihost_utils
path, part = pathlib.Path(sys.argv[5]), sys.argv[6]
line = Mesh(np.array(jax.devices()), ("x",))
x = put(np.zeros(4, np.float32), NamedSharding(line, P("x")))
class Counter:
    def __init__(self, index): self.n = 100 * index[0]
    def add(self, by):
        self.n += int(by)
        return np.float32(self.n)
one = jax.ShapeDtypeStruct((), np.float32)
made = hc.Object(Counter, methods={"add": one})
add = jax.jit(jax.shard_map(lambda v: v + made.add(1), mesh=line, in_specs=P("x"), out_specs=P("x")))
def blocks(out):
    return {s.index[0].start or 0: float(s.data[0]) for s in out.addressable_shards}
if part == "save":
    add(x), add(x)
    own = np.frombuffer(pickle.dumps(made.save()), np.uint8)
    most = int(multihost_utils.process_allgather(np.int32(own.size)).max())
    every = multihost_utils.process_allgather(np.pad(own, (0, most - own.size)))
    objects = [base64.b64encode(part.tobytes()).decode() for part in every]
    if me == 0:
        path.write_text(json.dumps(objects))
else:
    objects = json.loads(path.read_text())
    made.restore(pickle.loads(base64.b64decode(objects[jax.process_index()])))
say(sorted(blocks(add(x)).items()))
"""


def test_objects_of_each_process_in_one_checkpoint(run_python, tmp_path):
    """As docs/processes.md does it, with a file in place of Orbax."""
    path = str(tmp_path / "objects.json")
    saved = run_job(run_python, EACH, path, "save")
    assert saved == [["[(0, 3.0), (1, 103.0)]"], ["[(2, 203.0), (3, 303.0)]"]]
    assert run_job(run_python, EACH, path, "restore") == saved


ORBAX = """
import base64, pathlib
from jax.experimental import multihost_utils
import orbax.checkpoint as ocp
folder, part = pathlib.Path(sys.argv[5]), sys.argv[6]
line = Mesh(np.array(jax.devices()), ("x",))
sharding = NamedSharding(line, P("x"))
class Noise:
    def __init__(self, index): self.rng = np.random.default_rng(index[0])
    def draw(self, v): return np.float32(self.rng.normal() + v)
one = jax.ShapeDtypeStruct((), np.float32)
noise = hc.Object(Noise, methods={"draw": one})
def shard(w):
    return w * 0.5 + noise.draw(w[0])
step = jax.jit(jax.shard_map(shard, mesh=line, in_specs=P("x"), out_specs=P("x")))
w = put(np.arange(8, dtype=np.float32), sharding)
def told(w):
    return {s.index[0].start: s.data.tolist() for s in w.addressable_shards}
with ocp.CheckpointManager(folder) as saved:
    if part == "save":
        for _ in range(3):
            w = step(w)
        own = np.frombuffer(pickle.dumps(noise.save()), np.uint8)
        most = int(multihost_utils.process_allgather(np.int32(own.size)).max())
        every = multihost_utils.process_allgather(np.pad(own, (0, most - own.size)))
        objects = [base64.b64encode(part.tobytes()).decode() for part in every]
        saved.save(3, args=ocp.args.Composite(
            w=ocp.args.StandardSave({"w": w}), objects=ocp.args.JsonSave(objects)))
        saved.wait_until_finished()
        for _ in range(2):
            w = step(w)
    else:
        like = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)
        found = saved.restore(3, args=ocp.args.Composite(
            w=ocp.args.StandardRestore({"w": like}), objects=ocp.args.JsonRestore()))
        mine = found["objects"][jax.process_index()]
        noise.restore(pickle.loads(base64.b64decode(mine)))
        w = found["w"]["w"]
        for _ in range(2):
            w = step(w)
say(sorted(told(w).items()))
"""


def test_objects_beside_arrays_that_orbax_saves(run_python, tmp_path):
    """The job that restores goes on with the same numbers as the one that saved."""
    pytest.importorskip("orbax.checkpoint")
    saved = run_job(run_python, ORBAX, str(tmp_path), "save")
    assert [len(said) for said in saved] == [1, 1]
    assert saved == run_job(run_python, ORBAX, str(tmp_path), "restore")
