"""hc.Recorder when a process ends: killed, without close, after an error, forked."""

import threading

import jobs
import numpy as np
import pytest

import hostcall as hc

pytest.importorskip("pyarrow")

FLUSH = 0.5

# Each child is forked before JAX has started, so that they share its import. It says
# what has been delivered, and is killed at a random moment, whatever it does then.
KILLED = """
import os, random, signal, sys, time, warnings
import jax, jax.numpy as jnp, hostcall as hc
warnings.simplefilter("ignore")
home, flush = sys.argv[1], float(sys.argv[2])

def record(folder, said):
    rec = hc.Recorder(folder, flush=flush)
    @jax.jit
    def run(begin):
        def body(c, i):
            rec(step=i, square=i * i, pair=jnp.stack([i, -i]))
            rec(step=i, big=jnp.full(20, i), every=10)
            return c, None
        return jax.lax.scan(body, 0, begin + jnp.arange(50))[0]
    for begin in range(0, 10**9, 50):
        run(begin)
        hc.barrier()
        os.write(said, f"{begin + 49} {time.time()}\\n".encode())
        time.sleep(random.random() / 100)  # so that moments to be killed at differ

def begin(number):
    child = os.fork()
    if child == 0:
        random.seed(number)
        said = os.open(f"{home}/{number}.said", os.O_WRONLY)
        record(f"{home}/{number}", said)
    return child

random.seed(0)
for wave in range(5):
    for n in range(4):
        open(f"{home}/{4 * wave + n}.said", "w").close()
    children = [begin(4 * wave + n) for n in range(4)]
    for n, child in enumerate(children):
        while not os.path.getsize(f"{home}/{4 * wave + n}.said"):
            time.sleep(0.01)
    moments = sorted((random.random() * 1.5, child) for child in children)
    first = time.monotonic()
    for moment, child in moments:
        time.sleep(max(0, first + moment - time.monotonic()))  # any moment
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


def checked(run):
    """The number of rows. All steps from the first on are there, whole."""
    table = run.table()
    step = np.array(table["step"].to_pylist(), int)
    np.testing.assert_array_equal(step, np.arange(len(step)))
    square = step.astype(np.int32) ** 2  # wraps, as in the program
    np.testing.assert_array_equal(table["square"].to_pylist(), square)
    pairs = np.array(table["pair"].to_pylist(), int).reshape(-1, 2)
    np.testing.assert_array_equal(pairs, np.stack([step, -step], 1))
    if "big" in run.arrays:
        steps, big = run.array("big")
        np.testing.assert_array_equal(steps, 10 * np.arange(len(steps)))
        np.testing.assert_array_equal(big, np.repeat(steps[:, None], 20, 1))
    return len(step)


def test_killed_at_twenty_moments(tmp_path, run_python):
    """What is there is whole, a new recorder goes on behind it, and at most the last
    FLUSH seconds of what had been delivered are lost. The seconds are those of the
    median child: on a busy machine the system may not let a thread run in time.
    """
    run_python(KILLED, str(tmp_path), str(FLUSH))
    lost = []
    for number in range(20):
        folder = tmp_path / str(number)
        run = hc.tools.read(folder)
        rows = checked(run) if run.table().num_rows else 0
        said = (tmp_path / f"{number}.said").read_text().splitlines()
        first, last = (float(line.split()[1]) for line in (said[0], said[-1]))
        recorded = run.table()["time"].to_pylist()[-1] if rows else first - 0.01
        lost.append(last - recorded)
        if rows:
            with hc.Recorder(folder) as rec:
                square = (np.array([rows], np.int32) ** 2)[0]
                pair = np.array([rows, -rows], np.int32)
                rec(step=rows, square=square, pair=pair)
            assert checked(run) == rows + 1
    assert np.median(lost) <= FLUSH, lost


PROGRAM = """
import sys, jax, jax.numpy as jnp, hostcall as hc
{first}
rec = hc.Recorder(sys.argv[1], sinks=[hc.tools.sinks.jsonl(sys.argv[1] + ".jsonl")], flush=1e6)
@jax.jit
def run(x):
    body = lambda c, i: ((rec(step=i, x=c, big=jnp.full(20, c)), c + 1.0)[1], None)
    return jax.lax.scan(body, x, jnp.arange(500))[0]
run(0.0)
{last}
"""


USED = "hc.tap(print, 'first')"


@pytest.mark.parametrize(
    ("first", "last"), [("", "raise SystemExit(3)"), (USED, ""), (USED, "1 / 0")]
)
def test_a_process_that_does_not_close_writes_everything(
    first, last, tmp_path, run_python
):
    """Whether the engine or the recorder was there first."""
    folder = tmp_path / "run"
    source = PROGRAM.format(first=first, last=last)
    done = run_python(source, str(folder), check=False)
    assert done.returncode == {"": 0, "1 / 0": 1}.get(last, 3)
    assert ("ZeroDivisionError" in done.stderr) == (last == "1 / 0")
    assert last == "1 / 0" or done.stderr == ""
    run = hc.tools.read(folder)
    assert run.table()["x"].to_pylist() == list(range(500))
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 500
    np.testing.assert_array_equal(run.array("big")[1][:, 3], np.arange(500))


def test_a_sink_that_fails_at_exit_is_printed(tmp_path, run_python):
    done = run_python(
        """
        import sys, hostcall as hc
        def fails(columns): raise ConnectionError("gone")
        rec = hc.Recorder(sys.argv[1], sinks=[fails], flush=1e6)
        rec(x=1.0)
        """,
        str(tmp_path / "run"),
        check=False,
    )
    assert "ConnectionError: gone" in done.stderr
    assert hc.tools.read(tmp_path / "run").table().num_rows == 1


def test_an_interrupted_close_can_be_repeated(tmp_path, run_python):
    """Here by the end of the process."""
    done = run_python(
        """
        import signal, sys, threading, hostcall as hc
        begun, interrupted = threading.Event(), threading.Event()
        def slow(columns):
            begun.set()
            interrupted.wait(60)
            print(columns["x"].tolist())
        rec = hc.Recorder(sys.argv[1], sinks=[slow], flush=1e6)
        rec(x=1.0)
        def interrupt():
            begun.wait(60)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            rec.close()
        except KeyboardInterrupt:
            print("interrupted")
        interrupted.set()
        """,
        str(tmp_path / "run"),
    )
    assert done.stdout.splitlines() == ["interrupted", "[1.0]"]


def test_a_forked_child_leaves_the_run_alone(tmp_path, run_python):
    run_python(
        """
        import os, sys, warnings, hostcall as hc
        warnings.simplefilter("ignore")
        rec = hc.Recorder(sys.argv[1])
        rec(x=1.0)
        hc.barrier()
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        rec(x=2.0)
        """,
        str(tmp_path / "run"),
    )
    table = hc.tools.read(tmp_path / "run").table()
    assert table["x"].to_pylist() == [1.0, 2.0]


def test_a_reader_sees_only_whole_batches(tmp_path):
    """Another thread reads all the time while batches are written."""
    end = threading.Event()
    counts = []

    def reads():
        run = hc.tools.read(tmp_path / "run")
        while not end.is_set():
            values = run.table().to_pydict().get("x", [])
            assert values == list(range(len(values)))
            counts.append(len(values))

    with hc.Recorder(tmp_path / "run", flush=0) as rec:
        thread = threading.Thread(target=reads)
        thread.start()
        for number in range(300):
            rec(x=number)
        rec.flush()
        end.set()
        thread.join(60)
    assert counts == sorted(counts)
    assert len(counts) > 0


JOB = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np, hostcall as hc
from jax.sharding import NamedSharding, PartitionSpec as P
me, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", 2, me)
mesh = jax.make_mesh((4,), ("x",))
x = jax.make_array_from_callback(
    (8, 20), NamedSharding(mesh, P("x")), lambda i: np.arange(160.0, dtype="f").reshape(8, 20)[i]
)
with hc.Recorder(folder) as rec:
    @jax.jit
    def whole(x):
        def body(i, c):
            rec(step=i, x=c, few=c[:, 0], on="shards")
            rec(step=i, total=c.sum(), w=c + 0)
            return c + 1
        return jax.lax.fori_loop(0, 10, body, x)
    whole(x)
    same = jax.device_put(np.arange(20.0, dtype="f"), NamedSharding(mesh, P()))
    @jax.jit
    def parameters(w):
        rec(step=0, each=w, on="shards")
        return w
    parameters(same)
    def shard(block):
        # One shard of each process records each step; the processes differ in theirs.
        at = jax.lax.axis_index("x")
        for i in range(4):
            rec(step=i, first=block[0, 0], block=block + i, where=(i % 2 == at % 2) | (at == 3))
        return block
    jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x)
    rec(alone=me)  # each process has this program
"""


def test_the_processes_of_a_job_share_a_folder(tmp_path, run_python):
    """read() puts together what they wrote: rows, and blocks by their steps."""
    folder = tmp_path / "run"
    jobs.in_each(2, lambda me, port: run_python(JOB, str(me), port, str(folder)))
    run = hc.tools.read(folder)
    want = np.arange(160.0, dtype=np.float32).reshape(8, 20)
    steps, x = run.array("x")
    np.testing.assert_array_equal(steps, np.arange(10))
    np.testing.assert_array_equal(x, want + np.arange(10)[:, None, None])
    table = run.table().to_pylist()
    totals = [(r["step"], r["process"]) for r in table if r["total"] is not None]
    assert sorted(totals) == [(step, 0) for step in range(10)]  # once in the job
    np.testing.assert_array_equal(run.array("w")[1], x)
    steps, whole = run.array("each")  # each process holds it whole, and it is one entry
    np.testing.assert_array_equal(steps, [0])
    np.testing.assert_array_equal(whole, [np.arange(20.0)])
    steps, few = run.array("few")
    np.testing.assert_array_equal(steps, np.arange(10))
    np.testing.assert_array_equal(few, x[:, :, 0])
    first = [
        (r["step"], r["process"], r["first"]) for r in table if r["first"] is not None
    ]
    assert len(first) == 4 * 1 + 2 * 3
    assert {value for *_, value in first} == {0, 40, 80, 120}
    steps, block = run.array("block")
    assert sorted(steps.tolist()) == [0, 1, 2, 3]
    for step, entry in zip(steps.tolist(), block, strict=True):
        for at in range(4):
            there = step % 2 == at % 2 or at == 3
            expected = want[2 * at : 2 * at + 2] + step if there else np.nan
            np.testing.assert_array_equal(entry[at], np.broadcast_to(expected, (2, 20)))
    assert sorted(r["alone"] for r in table if r["alone"] is not None) == [0, 1]


def test_a_forked_child_that_leaves_the_block_of_a_recorder(run_python, tmp_path):
    run_python(
        """
        import os, sys
        import hostcall as hc
        with hc.Recorder(sys.argv[1]) as rec:
            rec(step=0, loss=1.0)
            child = os.fork()
            if not child:
                sys.exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, code
        table = hc.tools.read(sys.argv[1]).table()
        assert table["loss"].to_pylist() == [1.0], table
        """,
        str(tmp_path / "run"),
    )
