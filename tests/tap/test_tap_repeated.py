"""Eager taps of one line, again and again: each does what a program's tap does.

From the third one on a line makes no plan. So each way in which two taps of one line can
differ is here, and the oracle is the same function under jit.
"""

import functools
import gc
import inspect
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

TIMES = 4


def tap_here(fn, *args, **options):
    """All taps of this file are of this line."""
    hc.tap(fn, *args, **options)


@pytest.fixture
def seen():
    return []


def compare(taps, seen):
    """Makes these taps eagerly, some times over, and then in programs."""
    for _ in range(TIMES):
        for fn, args in taps:
            tap_here(fn, *args)
    hc.barrier()
    eagerly = seen.copy()
    seen.clear()
    for _ in range(TIMES):
        for fn, args in taps:
            texts = [number for number, arg in enumerate(args) if type(arg) is str]
            jax.jit(functools.partial(tap_here, fn), static_argnums=texts)(*args)
    hc.barrier()
    assert eagerly == seen
    assert len(seen) == TIMES * len(taps)


def noting(seen, **marks):
    """A new function each time, with the code of the others."""

    def note(x):
        current = hc.current()
        found = current.name, current.order, current.device, current.place
        seen.append((marks, found, type(x), x.dtype, x.shape, x.tolist()))

    return note


def test_functions_of_one_code_get_their_own_values(seen):
    compare(
        [(noting(seen, number=n), [jnp.full(3, n, jnp.float32)]) for n in range(5)],
        seen,
    )


def test_arrays_of_many_kinds(seen):
    values = [
        jnp.float32(1),
        jnp.ones(3),
        jnp.ones((2, 0)),
        jnp.arange(3),
        jnp.ones(3, jnp.bfloat16),
        jnp.array([True, False]),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.float32(2),
        3,
        4.0,
        True,
    ]
    compare([(noting(seen), [value]) for value in values], seen)


def test_functions_of_several_kinds(seen):
    def two(x, y):
        seen.append((x.tolist(), y.tolist()))

    def any_number(*values):
        seen.append([value.tolist() for value in values])

    def more(x, by=2):
        seen.append((x * by).tolist())

    class Bound:
        def method(self, x):
            seen.append(x.tolist())

        def __call__(self, x):
            seen.append(x.tolist())

    x = jnp.arange(3)
    compare(
        [
            (two, [x, jnp.float32(1)]),
            (two, [jnp.float32(1), x]),
            (any_number, []),
            (any_number, [x]),
            (any_number, [x, x]),
            (more, [x]),
            (more, [x, 3]),
            (Bound().method, [x]),
            (Bound(), [x]),
            (functools.partial(two, np.float32(2)), [x]),
            (lambda tree: seen.append(tree["x"].tolist()), [{"x": x}]),
            (lambda how, x: seen.append((how, x.tolist())), ["text", x]),
        ],
        seen,
    )


def test_options_between_taps_without(seen):
    note = noting(seen)
    x = jnp.arange(3)
    for where in (True, False, True):
        tap_here(note, x)
        tap_here(note, x, where=where)
        tap_here(note, x, tag="between")
    hc.barrier()
    assert len(seen) == 8


def test_settings_of_the_thread_reach_each_tap(seen):
    def note(x):
        seen.append((x.dtype, jnp.asarray(1.0).dtype))

    for _ in range(TIMES):
        for wide in (False, True):
            with jax.enable_x64(wide):
                tap_here(note, jnp.asarray(1.0))
    hc.barrier()
    narrow = (np.dtype(np.float32),) * 2
    assert seen == [narrow, (np.dtype(np.float64),) * 2] * TIMES


def test_a_tracer_that_has_left_its_trace_is_refused(seen):
    left = []
    jax.jit(left.append)(1.0)
    tap_here(noting(seen), jnp.float32(1))
    with pytest.raises(jax.errors.UnexpectedTracerError):
        tap_here(noting(seen), left[0])


def test_marked_coroutine_functions_are_awaited(seen):
    async def inner(x):
        seen.append(x.tolist())

    marked = False

    def outer(x):
        return inner(x) if marked else seen.append("plain")

    if not hasattr(inspect, "markcoroutinefunction"):
        pytest.skip("Python 3.12 has the mark")
    tap_here(outer, 1)
    hc.barrier()
    inspect.markcoroutinefunction(outer)
    marked = True
    for n in range(TIMES):
        tap_here(outer, n)
    hc.barrier()
    assert seen == ["plain", *range(TIMES)]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_each_failure_has_its_own_object_and_name(wrap):
    def failing(number):
        def fails(x):
            raise ValueError(f"number {number}")

        return fails

    fns = [failing(number) for number in range(TIMES)]
    for fn in fns:
        wrap(functools.partial(tap_here, fn))(jnp.float32(1))
    with pytest.raises(ExceptionGroup) as caught:
        hc.barrier()
    texts = [str(error) for error in caught.value.exceptions]
    assert texts == [f"number {number}" for number in range(TIMES)]


def test_what_the_engine_counts(seen):
    def named_to_count(x):
        seen.append(x)

    for _ in range(TIMES):
        tap_here(named_to_count, jnp.float32(1))
    hc.barrier()
    (row,) = [
        row for name, row in hc.monitor.stats().items() if "named_to_count" in name
    ]
    assert row.calls == TIMES
    assert row.errors == 0


def test_no_function_is_kept():
    def make(number):
        def named(x):
            return number

        tap_here(named, jnp.arange(3))
        return weakref.ref(named)

    references = [make(number) for number in range(TIMES)]
    hc.barrier()
    gc.collect()
    assert [reference() for reference in references] == [None] * TIMES


def test_devices_of_one_line(seen):
    taps = [
        (noting(seen), [jax.device_put(jnp.arange(3), device)])
        for device in jax.devices()[:2]
    ]
    compare(taps, seen)


def test_arguments_of_the_users_own_classes_are_asked_once(seen):
    """A tap without options looks first whether its line has tapped before."""
    asked = []

    class Holder:
        def __jax_array__(self):
            asked.append("array")
            return jnp.arange(3)

    class Tree:
        pass

    def flatten(tree):
        asked.append("tree")
        return (jnp.arange(3),), None

    jax.tree_util.register_pytree_node(Tree, flatten, lambda *_: Tree())
    for argument in (Holder(), Tree()):
        for _ in range(TIMES):
            tap_here(seen.append, argument)
            tap_here(lambda x: seen.append(x), argument)
    hc.barrier()
    assert asked == ["array"] * 2 * TIMES + ["tree"] * 2 * TIMES
    assert len(seen) == 4 * TIMES
