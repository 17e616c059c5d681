"""`hc.trace` and `hc.monitor.events`: what a viewer gets to see."""

from __future__ import annotations

import functools
import gzip
import json
import os
import signal
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall.tools import read_trace

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def double(x):
    return x * 2


def seen(x):
    pass


@jax.jit
def step(x):
    y = hc.call(double, SCALAR, x)
    hc.tap(seen, y, tag="loss")
    return y


def written(path: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_trace(path) if e.get("cat") == kind and e["ph"] == "X"]


def check(events: list[dict[str, Any]]) -> None:
    """What Chrome's format asks for: members, and slices of a row that nest."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        assert e["ph"] in "XBMCsfi"
        assert isinstance(e["pid"], int)
        assert isinstance(e["tid"], int)
        if e["ph"] == "M":
            assert e["args"]
            continue
        assert e["ts"] > 0
        assert e["name"]
        if e["ph"] == "X":
            assert e["dur"] >= 0
            row = rows.setdefault((e["pid"], e["tid"]), [])
            row.append((e["ts"], e["ts"] + e["dur"]))
    for row in rows.values():
        row.sort(key=lambda span: (span[0], -span[1]))
        around: list[float] = []
        for start, end in row:
            while around and around[-1] <= start + 2e-3:  # rounded to nanoseconds
                around.pop()
            assert not around or end <= around[-1] + 2e-3
            around.append(end)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_trace_has_what_happened(tmp_path, name):
    path = tmp_path / name
    step(1.0)
    hc.barrier()  # what this tapped is delivered before the trace begins
    with hc.trace(path) as trace:
        for _ in range(3):
            step(1.0).block_until_ready()
        hc.barrier()
    events = read_trace(path)
    check(events)
    opener = gzip.open if name.endswith("gz") else open
    with opener(path, "rt") as file:
        assert json.load(file) == events
    assert trace.dropped == 0

    calls, taps = written(path, "call"), written(path, "tap")
    deliveries = written(path, "delivery")
    assert [len(each) for each in (calls, taps, deliveries)] == [3, 3, 3]
    assert {e["name"] for e in calls} == {"double"}
    assert {e["name"] for e in taps + deliveries} == {"loss"}
    assert {e["args"]["bytes"] for e in calls} == {8}
    assert all(e["args"]["place"].startswith(f"{__file__}:") for e in calls)
    device = jax.devices()[0].id
    assert {e["pid"] for e in calls + taps} == {100 + device}
    assert {(e["pid"], e["tid"]) for e in deliveries} == {(1, 1)}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[100 + device] == f"device {device}"
    assert names[1] == "hostcall"
    for call, tap in zip(calls, taps, strict=True):
        assert call["ts"] + call["dur"] <= tap["ts"]

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == 3
    assert starts.keys() == ends.keys()
    assert [e["ts"] for e in starts.values()] == [e["ts"] for e in taps]
    assert [e["ts"] for e in ends.values()] == [e["ts"] for e in deliveries]
    assert [e for e in events if e["name"] == "queued taps"]
    assert [e["name"] for e in written(path, "wait")].count("hc.barrier") == 1


def test_compilation_and_parallel_rows_have_tracks(tmp_path):
    path = tmp_path / "run.json"

    @jax.jit
    @jax.vmap
    def rows(x):
        return hc.call(double, SCALAR, x, vmap_method="parallel")

    with hc.trace(path):
        rows(jnp.arange(6.0)).block_until_ready()
    check(read_trace(path))
    steps = {e["name"].split()[0] for e in written(path, "compilation")}
    assert steps >= {"trace", "lower", "compile"}
    workers = written(path, "rows")
    assert sum(e["args"].get("rows", 1) for e in workers) == 6
    assert {e["pid"] for e in workers} == {2}
    (call,) = written(path, "call")
    assert call["args"]["rows"] == 6
    for each in workers:
        assert call["ts"] <= each["ts"]
        assert each["ts"] + each["dur"] <= call["ts"] + call["dur"]


def test_rows_in_other_processes_have_tracks(tmp_path):
    path = tmp_path / "run.json"
    with futures.ProcessPoolExecutor(2, mp_context=forked.CONTEXT) as pool:

        @jax.jit
        @jax.vmap
        def rows(x):
            return hc.call(
                hc.host(np.cos, executor=pool), SCALAR, x, vmap_method="parallel"
            )

        with hc.trace(path):
            rows(jnp.arange(6.0)).block_until_ready()
    check(read_trace(path))
    assert sum(e["args"].get("rows", 1) for e in written(path, "rows")) == 6


def test_each_device_has_a_track(tmp_path):
    path = tmp_path / "run.json"
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("i",))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")
    )
    def blocks(x):
        return hc.call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with hc.trace(path):
        blocks(jnp.ones(4)).block_until_ready()
    assert {e["pid"] for e in written(path, "call")} == {100, 101}


def test_results_are_the_same_bits(tmp_path, optimized):
    def program(x):
        def body(c, _):
            y = hc.call(np.sin, SCALAR, c)
            hc.tap(seen, y)
            return y * 1.1, y

        return jax.lax.scan(body, x, None, length=50)

    x = jnp.linspace(0, 1, 8)
    plain = jax.jit(jax.vmap(program))(x)
    hc.barrier()
    with hc.trace(tmp_path / "run.json"):
        traced = jax.jit(jax.vmap(program))(x)
        hc.barrier()
    for a, b in zip(plain, traced, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_traces_nest_and_repeat(tmp_path):
    outer, inner = tmp_path / "outer.json", tmp_path / "inner.json"
    with hc.trace(outer):
        step(1.0).block_until_ready()
        for _ in range(2):
            with hc.trace(inner):  # the second replaces the file
                step(1.0).block_until_ready()
    step(1.0).block_until_ready()
    hc.barrier()
    assert len(written(outer, "call")) == 3
    assert len(written(inner, "call")) == 1


def test_traces_of_several_threads(tmp_path):
    paths = [tmp_path / f"{i}.json" for i in range(4)]
    begin = threading.Barrier(4, timeout=60)

    def run(path):
        with hc.trace(path):
            begin.wait()
            step(1.0).block_until_ready()
            begin.wait()

    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(run, paths))
    hc.barrier()
    for path in paths:
        check(read_trace(path))
        assert len(written(path, "call")) == 4


def test_an_error_in_the_block_passes_and_the_trace_is_whole(tmp_path):
    path = tmp_path / "run.json.gz"

    def fails(x):
        raise ValueError("no")

    with pytest.raises(jax.errors.JaxRuntimeError), hc.trace(path):
        jax.jit(lambda x: hc.call(fails, SCALAR, x))(1.0).block_until_ready()
    (call,) = written(path, "call")
    assert call["args"]["state"] == "failed"
    with gzip.open(path, "rt") as file:
        json.load(file)


def test_what_is_under_way_at_the_end_is_shown(tmp_path):
    path = tmp_path / "run.json"
    entered, leave = threading.Event(), threading.Event()

    def waits(x):
        entered.set()
        assert leave.wait(60)
        return x

    program = jax.jit(lambda x: hc.call(waits, SCALAR, x, order="unordered"))
    thread = threading.Thread(target=program, args=(1.0,))
    with hc.trace(path):
        thread.start()
        assert entered.wait(60)
    leave.set()
    thread.join()
    begun = [e for e in read_trace(path) if e["ph"] == "B"]
    assert [e["name"].rsplit(".", 1)[-1] for e in begun] == ["waits"]


def test_events_that_nobody_takes_are_counted():
    many = jax.jit(
        lambda x: jax.lax.fori_loop(
            0, 70_000, lambda i, c: hc.call(double, SCALAR, c) * 0, x
        )
    )
    with hc.monitor.events() as events:
        many(1.0).block_until_ready()
        batch = events.take()
    assert events.dropped > 0
    assert len(batch) + events.dropped == 70_000
    assert (batch["start"][1:] >= batch["end"][:-1]).all()


def test_a_trace_says_how_many_are_missing(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    with hc.trace(path) as trace:
        trace._events.dropped = 7  # as the buffer counts them
    *_, last = read_trace(path)
    assert last["args"] == {"dropped": 7}
    assert trace.dropped == 7


def test_events_as_arrays():
    hc.barrier()
    since = time.monotonic_ns()
    with hc.monitor.events() as events:
        step(1.0).block_until_ready()
        hc.barrier()
        batch = events.take()
        assert len(events.take()) == 0
    call, tap, delivery = (
        batch[batch["kind"] == kind][0] for kind in ("call", "tap", "delivery")
    )
    assert since <= call["start"] <= call["entered"] <= call["end"] <= tap["start"]
    assert tap["end"] <= time.monotonic_ns()
    assert tap["number"] == delivery["number"]
    assert tap["run"] == call["run"]
    assert set(batch["state"]) == {"ended"}
    assert events.name(int(tap["place"])).startswith(f"loss, {__file__}:")
    assert events.name(0) == ""


def test_a_dropped_tap_is_marked(tmp_path):
    leave = threading.Event()
    before = hc.monitor.tap_queue().limit
    hc.configure(tap_queue_bytes=256)
    path = tmp_path / "run.json"
    try:
        with hc.trace(path):
            for _ in range(20):
                hc.tap(lambda x: leave.wait(60), np.ones(8), when_full="drop_newest")
            leave.set()
            hc.barrier()
    finally:
        hc.configure(tap_queue_bytes=before)
    states = [e["args"].get("state", "queued") for e in written(path, "tap")]
    assert len(states) == 20
    assert states.count("dropped") == 20 - len(written(path, "delivery")) > 0


WRITES = """
import os, signal, sys, time
import jax, jax.numpy as jnp
import hostcall as hc
from hostcall.tools import read_trace
step = jax.jit(lambda x: hc.call(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x))
path = sys.argv[1]
def run():
    step(1.0).block_until_ready()
    while not any(e.get("cat") == "call" for e in read_trace(path)):
        pass
"""


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_killed_process_leaves_a_readable_file(run_python, tmp_path, name, end):
    path = tmp_path / name
    run_python(
        WRITES + f"\nwith hc.trace(path):\n    run()\n    {end}", str(path), check=False
    )
    check(read_trace(path))
    assert len(written(path, "call")) == 1
    if name.endswith("gz"):
        with gzip.open(path) as file:  # whole members: no error at the end
            assert file.read().rstrip().endswith(b"},")


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path, name):
    path = tmp_path / name
    with hc.trace(path):
        step(1.0).block_until_ready()
        hc.barrier()
    whole, data = read_trace(path), path.read_bytes()
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        part = read_trace(path)
        assert part == whole[: len(part)]


@pytest.mark.parametrize(
    "tag", ["a\u2028b", "a\x85b", 'quote " and \\', "a\nb", "a\ud800"]
)
def test_tags_of_any_characters(tmp_path, tag):
    with hc.trace(tmp_path / "run.json"):
        hc.call(double, SCALAR, 1.0, tag=tag)
    (call,) = written(tmp_path / "run.json", "call")
    assert call["name"] == tag.replace("\ud800", "\\ud800")


@pytest.mark.parametrize("line", ["{oh}", "3", "[" * 100_000])
def test_a_line_that_is_no_event(tmp_path, line):
    (tmp_path / "run.json").write_text(f'[\n{{"ph": "M"}},\n{line},\n]')
    with pytest.raises(
        hc.errors.LoadError, match=r"line 3 of .* is no event of a trace"
    ):
        read_trace(tmp_path / "run.json")


def test_ctrl_c_ends_a_trace(start_python, tmp_path):
    path = tmp_path / "run.json"
    process = start_python(
        WRITES
        + """
with hc.trace(path):
    run()
    print("ready", flush=True)
    while True:  # `signal.pause` would miss a signal that comes just before it
        time.sleep(0.01)
""",
        str(path),
    )
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    json.loads(path.read_text())
    assert len(written(path, "call")) == 1


def test_a_trace_without_an_end_ends_with_the_process(run_python, tmp_path):
    path = tmp_path / "run.json"
    run_python(WRITES + "hc.trace(path).__enter__(); run()", str(path))
    json.loads(path.read_text())


def test_a_forked_child_leaves_the_file_alone(run_python, tmp_path):
    path = tmp_path / "run.json"
    run_python(
        WRITES
        + """
with hc.trace(path):
    run()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
if not child:
    os._exit(0)
""",
        str(path),
    )
    json.loads(path.read_text())


def test_mistakes_are_named(tmp_path):
    with pytest.raises(hc.errors.SpecError, match=r"End it in \.json or \.json\.gz"):
        hc.trace(tmp_path / "run.pb")
    with pytest.raises(FileNotFoundError):
        hc.trace(tmp_path / "no" / "run.json").__enter__()
    trace = hc.trace(tmp_path / "run.json")
    with trace:
        pass
    with pytest.raises(hc.errors.HostcallError, match="Make a new one"), trace:
        pass


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_an_error_at_the_end(tmp_path):
    path = tmp_path / "run.json"
    path.symlink_to("/dev/full")
    trace = hc.trace(path)
    with pytest.raises(OSError, match="No space left"), trace:
        step(1.0).block_until_ready()
    assert not hc.tools.trace._open
