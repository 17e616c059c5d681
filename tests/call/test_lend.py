"""lend=True: views of XLA's memory, which must not be written to or kept."""

import contextlib
import functools
import gc
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specs import N, ramp, spec

import hostcall as hc

MODES = {"eager": lambda f: f, "jit": jax.jit}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def lending(host, *, lend=True, order="pure", result=spec()):
    def program(x, y):
        return hc.call(host, result, {"x": x}, lend=lend, order=order, other=y)

    return program


@modes
def test_lent_arrays_can_not_be_written_to(mode):
    def host(tree, other):
        for x in (tree["x"], other, tree["x"][3:], tree["x"].view(np.int32)):
            assert not x.flags.writeable
            assert memoryview(x).readonly
            assert x.__array_interface__["data"][1]
            for attempt in (
                lambda x=x: x.__setitem__(0, 1),
                lambda x=x: x.setflags(write=True),
                lambda x=x: setattr(x.flags, "writeable", True),
                lambda x=x: np.ndarray(3, np.uint8, x).__setitem__(0, 1),
                lambda x=x: np.frombuffer(x, np.uint8).__setitem__(0, 1),
                lambda x=x: memoryview(x).cast("B").__setitem__(0, 1),
                lambda x=x: np.from_dlpack(x).__setitem__(0, 1),
            ):
                with pytest.raises((ValueError, TypeError)):
                    attempt()
        return other.sum()

    with hc.reraise():
        assert mode(lending(host))(ramp(), np.ones(3, np.float32)) == 3


WRITES = {
    "an element": lambda x: x.__setitem__(0, 1),
    "in place": lambda x: x.__iadd__(1),
    "out=": lambda x: np.add(x, 1, out=x),
    "sort": lambda x: x.sort(),
}


@modes
@pytest.mark.parametrize("lend", [True, "out"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_to_a_lent_array_tells_of_lend(mode, lend, write):
    def host(x, **out):
        write(x)

    text = (
        f"host` has lend={lend!r}, so its arguments are views of memory that the"
        " program still reads. Write to a copy (x = x.copy()), or leave out lend="
    )
    program = mode(lambda x: hc.call(host, spec(), x, lend=lend))
    with pytest.raises(ValueError, match="read-only") as caught, hc.reraise():
        jax.block_until_ready(program(ramp()))
    assert text in "\n".join(caught.value.__notes__)
    if mode is jax.jit:
        with pytest.raises(jax.errors.JaxRuntimeError) as report:
            jax.block_until_ready(program(ramp()))
        assert text in str(report.value)


def test_a_raised_error_is_told_of_lend_once():
    error = ValueError("assignment destination is read-only")

    def host(x):
        raise error

    for _ in range(3):
        with pytest.raises(ValueError, match="read-only"), hc.reraise():
            hc.call(host, spec(), ramp(), lend=True)
    assert len(error.__notes__) == 1


def test_an_array_of_the_functions_own_is_not_lent():
    mine = ramp()
    mine.flags.writeable = False

    def host(x):
        mine[0] = 1

    with pytest.raises(ValueError, match="read-only") as caught:
        hc.call(host, spec(), ramp())
    assert not hasattr(caught.value, "__notes__")


def test_lent_arrays_are_the_programs_memory():
    places = []

    def host(x):
        places.append(x.__array_interface__["data"][0])
        return x.sum()

    def program(x):
        return [hc.call(host, spec(), x, lend=True, order="unordered") for _ in "ab"]

    x = jnp.asarray(ramp())
    assert jax.jit(program)(x) == [x.sum()] * 2
    assert places == [x.unsafe_buffer_pointer()] * 2


ESCAPES = {
    "array": lambda x: x,
    "view": lambda x: x[:],
    "part": lambda x: x[3:7],
    "view of a view": lambda x: x.reshape(10, -1)[:, ::1].reshape(N),
    "memoryview": lambda x: memoryview(x),
    "iterator": lambda x: x.flat,
    "dlpack": lambda x: np.from_dlpack(x),
    "capsule": lambda x: x.__dlpack__(max_version=(1, 0)),
    "in a container": lambda x: {"deep": [x]},
    "in a closure": lambda x: lambda: x,
    "in a thread": lambda x: started(x),
}


def started(x):
    stop = threading.Event()
    threading.Thread(target=lambda: (stop.wait(), x)).start()
    return stop


@modes
@pytest.mark.parametrize("keep", ESCAPES.values(), ids=ESCAPES)
@pytest.mark.parametrize("order", ["pure", "ordered"])
def test_a_kept_view_is_an_error_that_names_the_argument(mode, keep, order):
    kept = []

    def host(tree, other):
        if other > 0:
            kept.append(keep(tree["x"]))
        return tree["x"][0]

    program = mode(lending(host, order=order))
    assert program(ramp(3), -1.0) == 3
    with pytest.raises(hc.errors.EscapeError) as caught, hc.reraise():
        jax.block_until_ready(program(ramp(4), 1.0))
    text = str(caught.value)
    assert "host` kept a view of args[0]['x'] after it returned" in text
    assert "keep a copy (x.copy()), or drop lend=" in text
    for one in kept:
        if isinstance(one, threading.Event):
            one.set()
    assert program(ramp(5), -1.0) == 5


def test_an_array_that_escaped_keeps_its_values():
    kept = []
    program = jax.jit(lending(lambda tree, other: kept.append(tree["x"]) or 0.0))
    for start in range(3):
        with pytest.raises(hc.errors.EscapeError), hc.reraise():
            jax.block_until_ready(program(ramp(start), 0.0))
    for start, array in enumerate(kept):
        np.testing.assert_array_equal(array, ramp(start))


@modes
def test_what_only_looks_kept_is_not(mode):
    def host(tree, other):
        cycle = [tree["x"]]
        cycle.append(cycle)
        try:
            raise ValueError("caught, with a traceback to this frame")
        except ValueError as error:
            cycle.append(error)
        return other

    assert mode(lending(host))(ramp(), 2.0) == 2


def leaves_nothing(x, out=None):
    return x[0]


def leaves_a_cycle(x, out=None):
    cycle = [x, out]
    cycle.append(cycle)
    return x[0]


def leaves_the_frames_of_an_error(x, out=None):
    try:
        raise ValueError("caught, with a traceback to this frame")
    except ValueError as error:
        kept = error
    return kept and x[0]


def computes_with_jax(x, out=None):
    return np.asarray(jnp.asarray(x)[0])


# (function, options of the call, the oldest generation of objects to be collected)
SEEM_KEPT = {
    "jax": (leaves_nothing, {"arrays": "jax"}, -1),
    "computes with jax": (computes_with_jax, {}, -1),
    "cycle": (leaves_a_cycle, {}, 0),
    "caught": (leaves_the_frames_of_an_error, {}, 0),
    "out": (leaves_a_cycle, {"lend": "out"}, 0),
    "ordered": (leaves_a_cycle, {"order": "ordered"}, 0),
}
seem_kept = pytest.mark.parametrize(
    ("host", "options", "oldest"), SEEM_KEPT.values(), ids=SEEM_KEPT
)


def seeming(host, options):
    options = {"lend": True, **options}
    return lambda x: hc.call(host, spec(), x, **options)


@modes
@seem_kept
def test_views_that_seem_kept_are_released_at_little_cost(mode, host, options, oldest):
    """No call collects all objects of the process, which takes 60 ms."""
    program, x = mode(seeming(host, options)), jnp.asarray(ramp(3))
    assert program(x) == 3
    collected = []

    def note(phase, about):
        if phase == "stop":
            collected.append(about["generation"])

    gc.disable()  # collections that nobody asks for
    gc.callbacks.append(note)
    try:
        for _ in range(5):
            assert program(x) == 3
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert max(collected, default=-1) <= oldest


class Finalized:
    """A cycle, whose finalizer runs while garbage is collected."""

    def __init__(self, finalizer):
        self.me, self.finalizer = self, finalizer

    def __del__(self):
        self.finalizer()


@modes
@seem_kept
def test_views_that_seem_kept_while_another_thread_collects(
    mode, host, options, oldest
):
    """Its collection may have passed the views before they were dropped."""
    collecting, over = threading.Event(), threading.Event()

    def during():
        collecting.set()
        over.wait(0.5)  # the call waits for the end of the collection

    def collect():
        Finalized(during)
        gc.collect()

    program, x = mode(seeming(host, options)), jnp.asarray(ramp(3))
    assert program(x) == 3
    other = threading.Thread(target=collect)
    other.start()
    assert collecting.wait(60)
    with contextlib.ExitStack() as stack:
        stack.callback(other.join)
        stack.callback(over.set)
        with hc.reraise():
            assert program(x) == 3


@modes
@seem_kept
def test_views_that_seem_kept_on_several_threads(mode, host, options, oldest):
    program, x = mode(seeming(host, options)), jnp.asarray(ramp(3))
    assert program(x) == 3
    results, errors = [], []

    def work():
        try:
            results.extend([float(program(x)) for _ in range(10)])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert results == [3] * 30


def test_a_view_that_seems_kept_in_the_collection_that_makes_the_call():
    """No other collection can begin, so nothing waits for one."""
    results = []
    program = seeming(leaves_nothing, {})
    Finalized(functools.partial(lambda x: results.append(program(x)), ramp(3)))
    gc.collect()
    assert results == [3]


def test_a_kept_view_is_found_while_garbage_is_collected_by_hand():
    kept = []
    program = seeming(lambda x: kept.append(x[1:]) or 0.0, {})

    def call():
        with pytest.raises(hc.errors.EscapeError), hc.reraise():
            program(ramp())
        kept.append("told")

    Finalized(call)
    gc.collect()
    assert kept[-1] == "told"


@modes
@pytest.mark.parametrize("lend", [True, "out"])
def test_a_failing_function_keeps_its_own_error(mode, lend):
    def host(tree, other, out=None):
        x = tree["x"]
        try:
            raise LookupError("inner")
        except LookupError:
            raise ValueError(f"first is {x[0]}")  # noqa: B904 (the context holds frames)

    program = mode(lending(host, lend=lend))
    with pytest.raises(ValueError, match="first is 7") as caught, hc.reraise():
        jax.block_until_ready(program(ramp(7), 0.0))
    assert type(caught.value) is ValueError
    assert "host" in [f.name for f in traceback.extract_tb(caught.value.__traceback__)]


@modes
def test_an_error_in_a_function_within(mode):
    """Clearing a frame keeps the functions made in it, and the variables they share."""

    def host(tree, other, out=None):
        def inner():
            return tree["x"].sum() + undefined  # noqa: F821

        return inner()

    program = mode(lending(host, lend=True))
    with pytest.raises(NameError, match="undefined") as caught, hc.reraise():
        jax.block_until_ready(program(ramp(7), 0.0))
    caught.value.__traceback__ = None


@modes
@pytest.mark.parametrize("lend", [True, "out"])
def test_a_failing_function_that_kept_a_view(mode, lend):
    kept, raised = [], ValueError("its own")

    def host(tree, other, out=None):
        kept.append(tree["x"])
        raise raised

    program = mode(lending(host, lend=lend))
    with pytest.raises(hc.errors.EscapeError) as caught, hc.reraise():
        jax.block_until_ready(program(ramp(7), 0.0))
    assert "kept a view of args[0]['x'] after it raised ValueError" in str(caught.value)
    assert caught.value.__cause__ is raised
    np.testing.assert_array_equal(kept[0], ramp(7))
    raised.__traceback__ = None  # a cycle through the program


@modes
def test_lent_arguments_may_be_returned(mode):
    host = lambda tree, other: tree["x"][::-1]
    out = mode(lending(host, result=spec(N)))(ramp(), 0.0)
    np.testing.assert_array_equal(out, ramp()[::-1])


@modes
@pytest.mark.parametrize("dtype", ["float32", "int4", "bfloat16"])
def test_lent_rows(mode, dtype):
    seen = []

    def host(x, shared):
        assert not x.flags.writeable
        seen.append(float(x[0]))
        return x[::-1]

    rows = np.arange(6).reshape(2, 3).astype(dtype)
    call = lambda x: hc.call(host, spec(3, dtype=dtype), x, rows[0], lend=True)
    np.testing.assert_array_equal(mode(jax.vmap(call))(rows), rows[:, ::-1])
    assert seen == [0, 3]
