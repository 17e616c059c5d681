"""Programs over several processes: which function they call, and failures."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

HEAD = """
import functools, gc, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=" + sys.argv[3]
import jax, jax.numpy as jnp, numpy as np
def say(*what):
    os.write(1, f"says: {' '.join(map(str, what))}\\n".encode())
me, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{port}", 2, me)
if sys.argv[4:]:
    sys.path.append(sys.argv[4])
    import staged
    staged.start()
import hostcall as hc
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
n = jax.device_count()
mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, P("x"))
x = jax.make_array_from_callback(
    (2 * n,), sharding, lambda index: np.arange(2.0 * n, dtype="float32")[index]
)
"""
HEAD += jobs.STORE


@pytest.fixture
def run_both(run_python):
    """The output of two processes of one job, numbered 0 and 1."""

    def run(source, devices=2, staged=False):
        more = [str(devices), *[str(Path(__file__).parents[1])] * staged]

        def run_one(me, port):
            done = run_python(HEAD + source, str(me), port, *more)
            return jobs.said(done.stdout)

        return jobs.in_each(2, run_one)

    return run


def test_processes_write_the_same_text_whatever_else_one_of_them_compiles(run_both):
    first, second = run_both(
        """
import hashlib
def host(v):
    return v + 1
if me == 0:
    kept = [jax.jit(lambda v, i=i: hc.call(host, v, v) + i) for i in range(3)]
    for f in kept:
        f(np.ones((2 * n,), np.float32))
@jax.jit
def program(x):
    hc.tap(host, x, on="shards")
    return hc.call(host, x, x) + hc.call(lambda v: v, x, x, order="ordered")
say(hashlib.sha256(program.lower(x).as_text().encode()).hexdigest())
"""
    )
    assert first == second
    assert len(first) == 1


def test_executables_that_jax_keeps_by_their_text(run_both):
    """Three programs that differ only in their function. With this flag, the first
    process of the job keeps what it has compiled. Only that process sets it here: on
    CPUs the keys of the processes differ.
    """
    first, second = run_both(
        """
jax.config.update("jax_share_binary_between_hosts", me == 0)
def run(f):
    out = jax.jit(f, in_shardings=sharding, out_shardings=sharding)(x)
    got = {s.index[0].start: s.data.tolist() for s in out.addressable_shards}
    jax.clear_caches()
    for _ in range(2):
        gc.collect()
    return got
mine = range(4 * me, 4 * me + 4, 2)
for factor in (1, 10, 100):
    if me == 0:  # a program of its own, which moves no number of theirs
        local = jax.jit(lambda v: hc.call(lambda v: v + 1, v, v))
        assert local(np.float32(factor)) == factor + 1
        jax.jit(lambda x: hc.call(lambda v: v, x, x)).lower(x)
    wanted = {i: [float(i * factor), float((i + 1) * factor)] for i in mine}
    assert run(lambda x: hc.call(lambda v: v * factor, x, x)) == wanted
    def shard(v):
        return hc.call(lambda v: v * factor, v, v, order="unordered")
    assert run(jax.shard_map(shard, mesh=mesh, in_specs=P("x"), out_specs=P("x"))) == wanted
    blocks = []
    def tap(v):
        blocks.append((hc.current().index[0][0].start, (v * factor).tolist()))
    run(lambda x: (hc.tap(tap, x, on="shards"), x)[1])
    hc.barrier()
    assert dict(blocks) == wanted, blocks
say("done")
"""
    )
    assert (first, second) == (["done"], ["done"])


def test_the_callers_results_reach_all_bit_by_bit(run_both):
    """The results of the first process, the only one that calls the function."""
    printed = run_both(
        """
jax.config.update("jax_enable_x64", True)
whole = jax.device_put(np.zeros(16, np.float32), NamedSharding(mesh, P()))
exotic = ["float4_e2m1fn", "float8_e4m3fn", "bfloat16", "int2", "int4", "uint4"]
numbers = [np.dtype(c) for c in "?bBhHiIqQefdFD"] + [
    jnp.dtype(name) for name in exotic if hasattr(jnp, name)
]
bits = np.random.default_rng(0)
for dtype in numbers:
    if dtype == bool or jnp.dtype(dtype).name in exotic and dtype.itemsize == 1:
        want = np.arange(-4, 12).astype(np.int8).astype(dtype)
    else:  # with NaNs of all kinds
        want = np.frombuffer(bits.bytes(16 * dtype.itemsize), dtype)
    def host(_):
        assert me == 0
        return want
    out = jax.jit(lambda x: hc.call(host, jax.ShapeDtypeStruct((16,), dtype), x))(whole)
    got = np.asarray(out.addressable_shards[0].data)
    assert got.tobytes() == want.tobytes(), (dtype, got, want)
say(len(numbers))
"""
    )
    assert printed[0] == printed[1]
    assert int(printed[0][0]) >= 18


def test_results_take_no_more_memory_on_more_devices(run_both):
    printed = run_both(
        """
devices, mib = jax.devices(), jax.ShapeDtypeStruct((1 << 18,), np.float32)
for n in (1, 4, 16):
    of_both = devices[:n] + devices[16 : 16 + n]
    mesh = jax.sharding.Mesh(np.array(of_both), "x")
    x = jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(mesh, P()))
    program = jax.jit(lambda x: hc.call(lambda x: x, mib, x)).lower(x).compile()
    say(program.memory_analysis().temp_size_in_bytes)
""",
        devices=16,
    )
    on_2, on_8, on_32 = (int(line) for line in printed[0])
    assert on_2 == on_8 == on_32 < 3 << 20


@pytest.mark.parametrize("staged", [False, True], ids=["cpu", "staged"])
def test_a_failure_of_the_caller_raises_in_all(run_both, staged):
    """Each case is a program. Each that fails is followed by one that shows that no
    process took one value for another.
    """
    printed = run_both(
        """
last = jax.devices()[-1]
whole = jax.device_put(np.zeros((4, 3), np.float32), NamedSharding(mesh, P()))
fails = False
def host(v, error=None):
    assert me == 1
    if not fails:
        return v + 1
    if error is None:
        return v[:1, :1]
    raise error
def call(error, fn=host, **options):
    return lambda x: hc.call(fn, x, x, error, on=last, **options)
def masked(x):
    return hc.call(host, x, x, row, where=x[0, 0] == 0, on=last)
def rows(x):
    one = jax.ShapeDtypeStruct((3,), x.dtype)
    called = lambda v: hc.call(host, one, v, row, vmap_method="sequential", on=last)
    return jax.vmap(called)(x)
def many(x):
    two = lambda v, error: (host(v, error), np.ones(1 << 17))
    return hc.call(two, (x, jax.ShapeDtypeStruct((1 << 17,), x.dtype)), x, row, on=last)[0]
def dropped_in(x):
    return hc.pure_callback(bad, x, x, sharding=SingleDeviceSharding(last))
def dropped_in_order(x):
    return hc.io_callback(bad, x, x, sharding=SingleDeviceSharding(last), ordered=True)
def in_a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda i, x: call(row, order="unordered")(x), x)
row = LookupError("no such row")
bad = functools.partial(host, error=row)
cases = {
    "pure": (call(row), "LookupError: no such row (in callback `host`"),
    "unordered": (call(row, order="unordered"), "LookupError: no such row"),
    "ordered": (call(row, order="ordered"), "LookupError: no such row"),
    "late": (call(row, hc.host(host, timeout=60)), "LookupError: no such row"),
    "masked": (masked, "LookupError: no such row"),
    "rows": (rows, "LookupError: no such row (in callback `host`, row 0"),
    "many": (many, "LookupError: no such row"),
    "pure_callback": (dropped_in, "LookupError: no such row"),
    "io_callback": (dropped_in_order, "LookupError: no such row"),
    "loop": (in_a_loop, "LookupError: no such row"),
    "long": (call(LookupError("é" * 5000)), "LookupError: " + "é" * 400),
    "interrupted": (call(KeyboardInterrupt("by hand")), "KeyboardInterrupt: by hand"),
    "wrong result": (call(None), "ResultError: hostcall: result of `host`"),
}
for name, (f, text) in cases.items():
    f = jax.jit(f)
    good = np.asarray(f(whole).addressable_shards[0].data)
    assert (good == (3 if f is in_a_loop else good[0, 0])).all(), (name, good)
    fails = True
    try:
        with hc.reraise():
            f(whole).block_until_ready()
        say(name, "did not fail")
    except BaseException as error:
        said = str(error) if me == 0 else f"{type(error).__name__}: {error}"
        if me == 0:
            assert type(error) is hc.errors.HostcallError, repr(error)
            assert "whose results all processes take, failed in process 1: " in said
        assert text.partition(" (in callback")[0] in said, (name, said)
        assert me == 1 or text in said, (name, said)
    fails = False
    try:
        f(whole)
    except hc.errors.HostcallError as error:
        assert "therefore refuses further ones" in str(error), error
    goes_on()
    again = np.asarray(f(whole).addressable_shards[0].data)
    assert (again == good).all(), (name, again, good)
    say(name)
""",
        staged=staged,
    )
    assert printed[0] == printed[1]
    assert len(printed[0]) == 13


def test_a_call_that_another_process_makes(run_both):
    """The options of such a call concern only the calling process: nothing runs here."""
    printed = run_both(
        """
from concurrent import futures
last = jax.devices()[-1]
whole = jax.device_put(np.arange(12, dtype=np.float32).reshape(4, 3), NamedSharding(mesh, P()))
one = jax.ShapeDtypeStruct((3,), np.float32)
def host(v):
    assert me == 1
    return v + 1
def on_processes(x):
    cos = hc.host(np.cos, executor=futures.ThreadPoolExecutor(1))
    called = lambda v: hc.call(cos, one, v, vmap_method="parallel", on=last)
    return jax.vmap(called)(x)
def some_rows(x):
    return jax.vmap(lambda v, w: hc.call(host, one, v, where=w, vmap_method="expand_dims",
                                         on=last))(x, x[:, 0] > 2)
def late(x):
    return hc.call(hc.host(host, timeout=60), x, x, on=last)
def written(x):
    def writes(v, out):
        assert me == 1
        out[...] = v * 2
    return hc.call(writes, x, x, lend="out", on=last)
def in_place(x):
    def fills(context, out, v):
        assert me == 0
        np.asarray(out[0])[...] = np.asarray(v) + 5
        np.asarray(out[1])[...] = 7
    a, b = hc.buffers.buffer_callback(fills, (x, one))(x)
    return a + b + 0 * hc.call(host, x, x, on=last)
wanted = np.arange(12, dtype=np.float32).reshape(4, 3)
for f, want in [
    (on_processes, np.cos(wanted)),
    (some_rows, np.where(wanted[:, :1] > 2, wanted + 1, 0)),
    (late, wanted + 1),
    (written, wanted * 2),
    (in_place, wanted + 12),
]:
    got = jax.jit(f)(whole).addressable_shards[0].data
    np.testing.assert_allclose(got, want, rtol=1e-6)
    say(f.__name__)
"""
    )
    assert printed[0] == printed[1]
    assert len(printed[0]) == 5


def test_a_program_that_fails_at_its_first_run(run_both):
    """JAX asks once more whether the program may run after it has run."""
    waiting, failed = run_both(
        """
whole = jax.device_put(np.zeros(4, np.float32), NamedSharding(mesh, P()))
def host(v):
    raise LookupError("no such row")
try:
    with hc.reraise():
        jax.jit(lambda x: hc.call(host, x, x))(whole).block_until_ready()
except BaseException as error:
    say(type(error).__name__)
"""
    )
    assert (waiting, failed) == (["LookupError"], ["HostcallError"])


def test_after_a_failure_a_process_takes_part_in_nothing_more(run_both):
    """The other process does not learn that a call without results failed: it waits in
    the failed program's collective, where a value of any step would reach it.
    """
    waiting, failed = run_both(
        """
last = jax.devices()[1]
fails = False
def host(v):
    if fails:
        raise LookupError("no such row")
def step(x, k):
    hc.call(host, None, x, on=last, order="unordered")
    return x.sum() * k
step = jax.jit(step)
total = jax.jit(lambda x, k: (x * k).sum())
untraced = jax.jit(lambda x: x + x.sum())
compiled = total.lower(x, 1.0).compile()
local = jax.jit(lambda v: v * 2)
call = jax.jit(lambda v: hc.call(lambda v: v + 1, v, v))
def all_local():
    return float(local(1.0)), float(call(np.float32(1))), float(jnp.sin(0.0) + 1)
assert float(step(x, 2.0)) == 12 and float(total(x, 2.0)) == 12
assert all_local() == (2, 2, 1)
fails = True
if me == 0:
    try:
        say(float(step(x, 1.0)), "of another step")
    except jax.errors.JaxRuntimeError:
        say("the other one is gone")
    os._exit(0)  # JAX's own end would wait for the other one
try:
    step(x, 1.0).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    assert "no such row" in str(error), error
fails = False
for f in (step, total, compiled, lambda x, _: untraced(x), lambda x, _: x.sum()):
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiles.append(name) if "compile" in name else None
    )
    try:
        f(x, 1.0)
    except hc.errors.HostcallError as error:
        assert "therefore refuses further ones" in str(error), error
        assert "The first failure was: LookupError: no such row (in callback `host`" in str(error)
        assert not compiles
        say("refused")
assert all_local() == (2, 2, 1)  # compiled again, and on the fast path
assert all_local() == (2, 2, 1)
os._exit(0)
""",
        devices=1,
    )
    assert waiting == ["the other one is gone"]
    assert failed == ["refused"] * 5
