"""hc.tap: what is delivered, when, and what happens to errors."""

import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc


class Log:
    """Records deliveries. Its bound method compares equal, so programs are reused."""

    def __init__(self):
        self.seen = []

    def __call__(self, *args, **kwargs):
        self.seen.append((args, kwargs))

    def values(self):
        hc.barrier()
        return [args[0].tolist() for args, _ in self.seen]


@pytest.fixture
def log():
    return Log()


ORDERS = pytest.mark.parametrize("order", ["unordered", "ordered"])


@ORDERS
def test_a_loop_is_delivered_in_order(log, order):
    @jax.jit
    def f(x):
        def body(i, c):
            hc.tap(log, c, order=order)
            return c + 1

        return lax.fori_loop(0, 1000, body, x)

    assert f(0) == 1000
    assert log.values() == list(range(1000))


@ORDERS
def test_straight_line_code_is_delivered_in_order(log, order):
    @jax.jit
    def f(x):
        for i in range(30):
            hc.tap(log, x + i, order=order)
        return x

    for _ in range(20):
        f(0)
    assert log.values() == list(range(30)) * 20


def test_ordered_taps_keep_order_across_programs(log):
    @jax.jit
    def slow(x):
        y = lax.fori_loop(0, 200_000, lambda i, c: jnp.sin(c) + 1, x * 1.0)
        hc.tap(log, (y * 0).astype(jnp.int32), order="ordered")
        return y

    @jax.jit
    def quick(x):
        hc.tap(log, x, order="ordered")

    for i in range(1, 6):
        slow(i)
        quick(i)
    assert log.values() == [v for i in range(1, 6) for v in (0, i)]


def test_trees_and_static_leaves(log):
    config = object()

    @jax.jit
    def f(x):
        hc.tap(log, {"a": x, "b": (x + 1, None)}, "text", config, mode=[x, "static"])

    f(jnp.arange(3))
    hc.barrier()
    ((args, kwargs),) = log.seen
    tree, text, same = args
    assert list(tree) == ["a", "b"]
    assert tree["b"][1] is None
    np.testing.assert_array_equal(tree["a"], [0, 1, 2])
    np.testing.assert_array_equal(tree["b"][0], [1, 2, 3])
    assert text == "text"
    assert same is config
    assert kwargs["mode"][1] == "static"


def test_no_arguments_and_no_arrays():
    count = []
    jax.jit(lambda: hc.tap(lambda: count.append(1)))()
    jax.jit(lambda: hc.tap(lambda s: count.append(s), "static"))()
    jax.jit(lambda x: hc.tap(lambda a: count.append(a.shape), x))(jnp.zeros((0, 3)))
    hc.barrier()
    assert count == [1, "static", (0, 3)]


def test_keys_arrive_as_keys(log):
    key = jax.random.key(3)
    jax.jit(lambda k: hc.tap(log, k))(key)
    hc.barrier()
    ((arrived,), _) = log.seen[0]
    np.testing.assert_array_equal(
        jax.random.key_data(arrived), jax.random.key_data(key)
    )


@pytest.mark.parametrize("arrays", ["jax", "dlpack"])
def test_other_arrays(log, arrays):
    jax.jit(lambda x: hc.tap(log, x, arrays=arrays))(jnp.arange(3.0))
    hc.barrier()
    ((arrived,), _) = log.seen[0]
    assert isinstance(arrived, jax.Array) == (arrays == "jax")
    np.testing.assert_array_equal(np.from_dlpack(arrived), [0, 1, 2])


@pytest.mark.parametrize("size", [1, 1000, 1_000_000])
def test_arrays_are_the_functions_own(size):
    kept = []

    def keep(x):
        assert x.flags.writeable
        assert x.flags.owndata
        kept.append(x)

    f = jax.jit(
        lambda x: lax.fori_loop(0, 5, lambda i, c: (hc.tap(keep, c), c + 1)[1], x)
    )
    f(jnp.zeros(size))
    hc.barrier()
    for i, array in enumerate(kept):
        np.testing.assert_array_equal(array, np.full(size, i))
        array[:] = -1


def test_where(log):
    @jax.jit
    def f(x):
        def body(i, c):
            hc.tap(log, i, where=i % 3 == 0)
            return c

        return lax.fori_loop(0, 10, body, x)

    f(0)
    assert log.values() == [0, 3, 6, 9]
    hc.tap(log, 10, where=False)
    hc.tap(log, 11, where=np.True_)
    assert log.values() == [0, 3, 6, 9, 11]


def scan_of(log, n, every):
    """Taps 0, 1, ... n-1 at one place in one run."""

    def f(x):
        return lax.fori_loop(0, n, lambda i, c: (hc.tap(log, i, every=every), c)[1], x)

    return f


def test_every_counts_by_itself_each_run_that_is_longer(log):
    skipped = lambda: sum(v.skipped for v in hc.monitor.stats().values())
    program, before = jax.jit(scan_of(log, 1000, 100)), skipped()
    for _ in range(3):
        program(0)
        assert log.values() == list(range(0, 1000, 100))
        log.seen.clear()
    assert skipped() - before == 3 * 990
    uneven = jax.jit(scan_of(log, 10, 4))
    uneven(0)
    uneven(0)
    assert log.values() == [0, 4, 8, 0, 4, 8]


@pytest.mark.parametrize("length", [1, 3, 8])
def test_every_counts_shorter_runs_together(log, length):
    """A jitted step in a Python loop, perhaps with a short loop of its own."""
    step = jax.jit(scan_of(log, length, 10))
    for _ in range(30):
        step(0)
    numbers = range(0, 30 * length, 10)
    assert log.values() == [number % length for number in numbers]


def test_every_in_a_loop_of_changing_length(log):
    @jax.jit
    def f(n):
        return lax.while_loop(
            lambda i: i < n, lambda i: (hc.tap(log, i, every=5), i + 1)[1], 0
        )

    for n in (3, 3, 12, 2, 7):  # counted together until the third, which is longer
        f(n)
    assert log.values() == [0, 2, 4, 5, 10, 0, 0, 5]


def test_every_counts_on_each_device(log):
    devices = jax.devices()[:3]
    f = jax.pmap(scan_of(log, 10, 4), devices=devices)
    step = jax.pmap(scan_of(log, 1, 4), devices=devices)
    f(jnp.zeros(3))
    assert sorted(log.values()) == sorted(3 * [0, 4, 8])
    log.seen.clear()
    f(jnp.zeros(3))
    for _ in range(9):
        step(jnp.zeros(3))
    assert sorted(log.values()) == sorted(3 * [0, 4, 8] + 3 * 3 * [0])


def test_every_counts_runs_that_overlap(log):
    """Each run is counted as if it were alone."""
    program = jax.jit(scan_of(log, 2000, 100))
    program(0)
    log.values()
    log.seen.clear()
    start = threading.Barrier(4)

    def work():
        start.wait()
        for _ in range(5):
            program(0).block_until_ready()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(log.values()) == sorted(20 * list(range(0, 2000, 100)))


def test_every_and_sample_hold_outside_of_programs(log):
    for i in range(10):
        hc.tap(log, i, every=4, where=i != 2)
        hc.tap(log, 100 + i, every=3)  # a tap on another line
    assert log.values() == [0, 100, 103, 5, 106, 9, 109]
    log.seen.clear()

    def work():
        for _ in range(50):
            hc.tap(log, 1, every=100)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.values() == [1, 1]
    log.seen.clear()
    for i in range(1000):
        hc.tap(log, i, sample=0.1)
        hc.tap(log, -1 - i, every=3600.0)
        assert hc.tap_through(log, i, every=10**6) == i
    values = log.values()
    assert 60 < len(values) < 140
    assert values[:1] == [0] or -1 in values
    assert values.count(-1) == 1


def test_every_without_jit_is_every_with_it(log):
    f = scan_of(log, 10, 4)
    with jax.disable_jit():
        f(0)
        f(0)
    assert log.values() == [0, 4, 8, 2, 6]
    log.seen.clear()
    for device in jax.devices()[:2]:
        for i in range(3):
            hc.tap(log, jax.device_put(i, device), every=2)
    assert log.values() == [0, 2, 0, 2]


def test_every_in_seconds(log):
    program = jax.jit(
        lambda: lax.fori_loop(
            0, 1000, lambda i, c: (hc.tap(log, i, every=3600.0), c)[1], 0
        )
    )
    program()
    program()
    assert log.values() == [0]


def test_sample_is_a_share_and_the_same_in_every_run(log):
    def run():
        jax.jit(
            lambda: lax.fori_loop(
                0, 4000, lambda i, c: (hc.tap(log, i, sample=0.25), c)[1], 0
            )
        )()
        values = log.values()
        log.seen.clear()
        jax.clear_caches()
        return values

    first = run()
    assert 900 < len(first) < 1100
    assert run() == first


def test_current(log):
    here = []

    def look(x):
        here.append(hc.current())

    @jax.jit
    def f(x):
        hc.tap(look, x)
        hc.tap(look, x)

    f(1)
    f(2)
    hc.barrier()  # a GPU's taps may come after its program has ended
    hc.tap(look, 3)
    hc.barrier()
    a, b, c, d, eager = here
    assert a.device == jax.devices()[0]
    assert a.order == "unordered"
    assert a.name.endswith("look")
    assert a.place.function.endswith("f")
    assert a.place.file == __file__
    assert b.place.line == a.place.line + 1
    assert a.run == b.run != c.run == d.run
    assert [h.step for h in here] == list(range(a.step, a.step + 5))
    assert eager.run == -1
    assert eager.device == jax.devices()[0]
    assert hc.current() is None
    hc.tap(look, jax.device_put(1, jax.devices()[2]))
    hc.barrier()
    assert here[-1].device == jax.devices()[2]


# --- Errors ------------------------------------------------------------------------


def raising(error):
    def fail(x):
        raise error

    return fail


@pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])
@ORDERS
def test_one_error_is_the_object_itself(mode, order, caplog, log):
    error = LookupError("gone")

    def f(x):
        hc.tap(raising(error), x, order=order)
        hc.tap(log, x, order=order)
        return x * 2

    assert mode(f)(3) == 6  # the program goes on
    with pytest.raises(LookupError) as caught:
        hc.barrier()
    assert caught.value is error
    assert hc.errors.last_error() is error
    hc.barrier()  # raised once
    assert log.values() == [3]
    (record,) = (r for r in caplog.records if r.name == "hostcall")
    assert record.levelname == "ERROR"
    assert record.exc_info[1] is error
    assert "tap `raising.<locals>.fail`, written at" in record.getMessage()
    assert __file__ in record.getMessage()


def test_several_errors_are_a_group():
    errors = [ValueError("a"), KeyError("b"), ValueError("c")]

    @jax.jit
    def f(x):
        for error in errors:
            hc.tap(raising(error), x)

    f(1)
    with pytest.raises(ExceptionGroup, match="3 taps failed") as caught:
        hc.barrier()
    assert list(caught.value.exceptions) == errors


def test_many_errors_are_a_few_and_their_count():
    def fail(x):
        raise ValueError(int(x))

    jax.jit(lambda: lax.fori_loop(0, 250, lambda i, c: (hc.tap(fail, i), c)[1], 0))()
    with pytest.raises(
        ExceptionGroup, match="250 taps failed; the errors here are different ones"
    ) as caught:
        hc.barrier()
    assert [e.args[0] for e in caught.value.exceptions] == list(range(16))


def test_a_row_that_fails_does_not_keep_the_others(log):
    def fail(x):
        log(x)
        if x == 1:
            raise KeyError("row")

    jax.jit(jax.vmap(lambda x: hc.tap(fail, x, rows="each")))(jnp.arange(4))
    with pytest.raises(KeyError, match="row"):
        hc.barrier()
    assert log.values() == [0, 1, 2, 3]


def test_barrier_raises_a_taps_system_exit_and_keyboard_interrupt():
    for error in (SystemExit(3), KeyboardInterrupt()):
        jax.jit(lambda x, e=error: hc.tap(raising(e), x))(1)
        with pytest.raises(type(error)) as caught:
            hc.barrier()
        assert caught.value is error


def test_reraise_leaves_taps_to_the_barrier():
    error = LookupError("tap")
    with hc.reraise():
        jax.jit(lambda x: hc.tap(raising(error), x))(1)
        hc.barrier(programs=False)
    with pytest.raises(LookupError):
        hc.barrier()


@pytest.mark.parametrize("programs", [True, False])
def test_waiting_inside_a_tap_is_refused(programs):
    jax.jit(lambda x: hc.tap(lambda v: hc.barrier(programs=programs), x))(1)
    text = r"hc.barrier\(\) inside a tap would wait for the tap itself"
    with pytest.raises(hc.errors.HostcallError, match=text):
        hc.barrier()


# --- Taps that do more -------------------------------------------------------------


def test_a_tap_may_use_jax_tap_and_call(log):
    inner = jax.jit(lambda v: (hc.tap(log, v), hc.call(lambda a: a + 1, v, v))[1])

    def outer(x):
        y = inner(x * 10)
        hc.tap(log, y)
        assert y == x * 10 + 1

    jax.jit(lambda x: lax.map(lambda v: (hc.tap(outer, v), v)[1], x))(jnp.arange(5))
    hc.barrier()
    hc.barrier()  # the taps that the first ones made
    assert sorted(log.values()) == sorted(
        [v * 10 for v in range(5)] + [v * 10 + 1 for v in range(5)]
    )


def test_a_tap_may_start_threads_that_use_jax(log):
    def outer(x):
        thread = threading.Thread(target=lambda: log(np.asarray(jnp.sin(x))))
        thread.start()
        thread.join()

    jax.jit(lambda x: hc.tap(outer, x))(0.0)
    assert log.values() == [0.0]


def test_a_tap_inside_a_call(log):
    def host(x):
        hc.tap(log, x)
        jax.jit(lambda v: hc.tap(log, v + 1))(x)
        return x

    jax.jit(lambda x: hc.call(host, x, x))(1).block_until_ready()
    assert log.values() == [1, 2]


# --- Lifetime ----------------------------------------------------------------------


def test_a_program_may_die_before_its_taps_are_delivered(in_time):
    gate, seen = threading.Event(), []

    class Sink:
        def wait(self, x):
            gate.wait(60)

        def __call__(self, x):
            seen.append(int(x))

    sink = Sink()

    def shown(x, sink=sink):
        hc.tap(sink.wait, x)
        hc.tap(sink, x + 1)

    f = jax.jit(shown)
    f(1)
    ref = weakref.ref(sink)
    del f, shown, sink
    jax.clear_caches()
    gc.collect()
    assert ref() is not None
    assert seen == []
    gate.set()
    hc.barrier()
    assert seen == [2]
    assert in_time(lambda: ref() is None)


def test_two_thousand_sites():
    seen = []

    def note(number, x):
        seen.append(number + int(x))

    def program(base):
        def f(x):
            for i in range(base, base + 100):
                hc.tap(functools.partial(note, i), x)  # XLA computes nothing

        return jax.jit(f)

    for base in range(0, 2_000, 100):
        program(base)(0)
    hc.barrier()
    assert seen == list(range(2_000))


def test_stats_count_deliveries_and_masked(log):
    def counted(x):
        log(x)

    jax.jit(
        lambda: lax.fori_loop(
            0, 6, lambda i, c: (hc.tap(counted, i, where=i > 1), c)[1], 0
        )
    )()
    hc.barrier()
    (stats,) = (
        s
        for name, s in hc.monitor.stats().items()
        if "test_stats_count_deliveries" in name
    )
    assert stats.calls == 4
    assert stats.bytes_in == 16
    assert stats.masked == 2
    assert stats.dropped == 0


# --- What is refused ---------------------------------------------------------------

WRONG = {
    "order='pure' would drop the tap": {"order": "pure"},
    "order= of the tap": {"order": "sorted"},
    "when_full= of the tap": {"when_full": "explode"},
    "rows= of the tap": {"rows": "all"},
    "remat= of the tap": {"remat": "twice"},
    "arrays= of the tap": {"arrays": "torch"},
    "every= of the tap": {"every": 0},
    "should be a number of executions": {"every": True},
    r"below 2\*\*31, got 2147483648": {"every": 2**31},
    r"below 2\*\*31, got inf": {"every": float("inf")},
    "sample= of the tap": {"sample": 1.5},
    "tag= of": {"tag": 3},
    "tag= of .*non-empty": {"tag": ""},
    "where= of": {"where": 1},
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_options(text, log):
    with pytest.raises(hc.errors.SpecError, match=text):
        hc.tap(log, 1.0, **WRONG[text])


def test_generators_and_objects_that_are_not_functions():
    def generator(x):
        yield x

    with pytest.raises(hc.errors.SpecError) as caught:
        hc.tap(generator, 1)
    assert (
        "is a generator function: calling it only makes a generator. What a tap returns"
        " is ignored, so nothing would run the generator: write a function without"
        " `yield`. If a generator should get the values, start it outside the program,"
        " and pass its method generator.send"
    ) in str(caught.value)
    with pytest.raises(hc.errors.SpecError, match=r"Write hc.tap_through\(fn, x\)"):
        hc.tap_through(jnp.ones(3), print)
    with pytest.raises(
        hc.errors.SpecError, match=r"Write hc.derivatives.tap_tangent\("
    ):
        hc.derivatives.tap_tangent(1.0, print)
    with pytest.raises(hc.errors.SpecError, match=r"Write hc.tap\(fn, \*args\)"):
        hc.tap(3, 1)


def test_through_gives_the_value_back_and_keeps_fast_dispatch(log):
    @jax.jit
    def f(tree):
        out = hc.tap_through(lambda t: log(t["x"]), tree)
        return out["x"] + 1, out

    tree = {"x": jnp.arange(3), "key": jax.random.key(1), "n": None}
    for _ in range(2):
        y, out = f(tree)
    np.testing.assert_array_equal(y, [1, 2, 3])
    assert jax.random.key_data(out["key"]).tolist() == [0, 1]
    assert log.values() == [[0, 1, 2]] * 2
    assert not jax.make_jaxpr(f)(tree).effects


def test_through_whose_result_is_unused_may_be_dropped(log):
    jax.jit(lambda x: (hc.tap_through(log, x), x)[1])(1)
    assert log.values() == []


@pytest.mark.parametrize(
    "wrong", ["256MB", [1], float("inf"), float("nan"), 0, True, 1e30]
)
def test_a_size_that_is_none(wrong):
    with pytest.raises(hc.errors.SpecError) as caught:
        hc.configure(tap_queue_bytes=wrong)
    assert (
        "tap_queue_bytes= of hc.configure should be a number of bytes above 0, such as"
        f" 256e6 for 256 MB, got {wrong!r}"
    ) in str(caught.value)


@pytest.mark.parametrize("size", [np.float32(2**28), np.array(2**28), jnp.int32(2**28)])
def test_a_size_of_any_type(size):
    try:
        hc.configure(tap_queue_bytes=size)
        assert hc.monitor.tap_queue().limit == 2**28
    finally:
        hc.configure(tap_queue_bytes=256_000_000)


def test_a_barrier_in_a_traced_function():
    def f(x):
        hc.barrier()
        return x

    text = (
        r"hc.barrier\(\) is called while a program is traced, and not when it runs. It"
        " waits only for what was before this program. Call it after the program"
    )
    for traced in (jax.jit, lambda f: jax.jit(jax.vmap(f)), jax.checkpoint):
        with pytest.warns(RuntimeWarning, match=text) as warned:
            traced(f)(jnp.ones(2))
        assert warned[0].filename == __file__
    jax.vmap(f)(jnp.ones(2))
    jax.grad(f)(1.0)
    with jax.ensure_compile_time_eval():
        f(1.0)


def test_every_of_executions_and_of_seconds_are_two(log):
    def twice(every):
        for _ in range(2):
            hc.tap(log, 1.0, every=every)

    for every in (1000, 1000.0):  # equal numbers
        twice(every)
    hc.barrier()
    assert len(log.seen) == 2
