"""JAX's compilation cache finds programs whatever else was compiled, in which order."""

from __future__ import annotations

import functools
import gc
import random
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tqdm

import hostcall as hc

ORDERS = """
import gc, random, sys
import jax, jax.numpy as jnp, numpy as np
import hostcall as hc
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))

def double(a): return 2 * a
def triple(a): return 3 * a
def logs(of):
    def log(a): of.append(float(np.sum(a)))
    return log
def wrapped(f):  # one code for all that it wraps
    def call(a): return f(a)
    return call
class Adds:
    def __init__(self, n): self.n = n
    def __call__(self, a): return a + self.n
    def method(self, a): return a - self.n

def programs(seen):
    square = hc.host(lambda a: a * a, result=hc.results.like(0), name="square")
    square.defvjp(lambda a: (a * a, a), lambda a, t: (2 * a * t,))
    return {
        "double": lambda v: hc.call(double, v, v),
        "triple": lambda v: hc.call(triple, v, v),
        "of a wrapper": lambda v: hc.call(wrapped(double), v, v) + 1,
        "of another": lambda v: hc.call(wrapped(triple), v, v) + 2,
        "ordered": lambda v: hc.call(double, v, v, order="ordered"),
        "tap": lambda v: (hc.tap(logs(seen), v), v)[1],
        "object": lambda v: hc.call(Adds(5), v, v) * hc.call(Adds(6).method, v, v),
        "gradient": lambda v: jax.grad(lambda v: square(v).sum())(v),
    }

def wants(x):
    return {
        "double": 2 * x, "triple": 3 * x, "of a wrapper": 2 * x + 1,
        "of another": 3 * x + 2, "ordered": 2 * x, "tap": x,
        "object": (x + 5) * (x - 6), "gradient": 2 * x,
    }

x = np.arange(3, dtype=np.float32)
for order in range(int(sys.argv[2]), int(sys.argv[2]) + 10):
    seen = []
    todo = list(programs(seen).items())
    random.Random(order).shuffle(todo)
    results, alive = {}, []
    events.clear()
    for name, f in todo:
        program = jax.jit(f)
        if order % 2:
            alive.append(program)
        results[name] = np.asarray(program(x))
    hc.barrier()
    for name, want in wants(x).items():
        np.testing.assert_allclose(results[name], want)
    assert seen == [3.0], seen
    print(sum(e.endswith("/cache_hits") for e in events),
          sum(e.endswith("/cache_misses") for e in events))
    del alive, program, todo, f
    jax.clear_caches()
    gc.collect()
"""


def test_programs_in_twenty_orders_and_two_processes(run_python, tmp_path):
    done = [run_python(ORDERS, str(tmp_path), str(first)) for first in (0, 10)]
    orders = [
        tuple(map(int, line.split()))
        for d in done
        for line in d.stdout.split("\n")
        if line
    ]
    assert len(orders) == 20
    asked = sum(orders[0])
    # jax before 0.11 caches no program with host callbacks, as the ordered
    assert asked >= 7
    assert orders[1:] == [(asked, 0)] * 19


STATIC = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
import hostcall as hc
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
seen = []
def double(a): return 2 * a
def note(a): seen.append(a.tolist())
square = hc.host(lambda a: a * a, result=hc.results.like(0))
square.defvjp(lambda a: (a * a, a), lambda a, t: (2 * a * t,))
feed = hc.feed(iter(np.ones((99, 3), np.float32)))

# Programs of one name, which differ in what jit's static argument chooses.
def once(x, n): return hc.call(double, x, x) + n
def twice(x, n):
    for _ in range(2):
        x = hc.call(double, x, x)
    return x * n
def rows(x, n): return jax.vmap(lambda v: hc.call(double, v, v, where=v > 9))(x) + n
def tap(x, n):
    hc.tap(note, x)
    return x + n
def gradient(x, n): return jax.grad(lambda x: square(x).sum())(x) * n
def fed(x, n): return feed()[0] * x + n

WANTED = {
    once: lambda x, n: 2 * x + n, twice: lambda x, n: 4 * x * n,
    rows: lambda x, n: 0 * x + n, tap: lambda x, n: x + n,
    gradient: lambda x, n: 2 * x * n, fed: lambda x, n: x + n,
}
x = jax.block_until_ready(jnp.arange(3, dtype=np.float32))
for f, wanted in WANTED.items():
    events.clear()
    program = jax.jit(f, static_argnums=1)
    for n in map(int, sys.argv[2].split(",")):
        np.testing.assert_allclose(program(x, n), wanted(np.asarray(x), n))
    hc.barrier()
    print(sum(e.endswith("/cache_hits") for e in events),
          sum(e.endswith("/cache_misses") for e in events))
assert seen == [[0, 1, 2]] * 3, seen
"""


def test_live_programs_of_one_name_that_hold_one_function(run_python, tmp_path):
    """Each finds itself in the cache, whichever of them was lowered before."""
    orders = ("1,2,3", "3,1,2", "2,3,1")
    done = [run_python(STATIC, str(tmp_path), o).stdout.split("\n") for o in orders]
    first, *others = (
        [tuple(map(int, line.split())) for line in d if line] for d in done
    )
    asked = [hits + misses for hits, misses in first]
    # jax before 0.11 caches no program with host callbacks, as those of effects.
    assert min(asked[:3]) == 3
    assert others == [[(n, 0) for n in asked]] * 2


class Equal:
    """All are equal, as objects of users may be, and hold other data."""

    def __init__(self, data):
        self.data = data

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1

    def __call__(self, a):
        return a + self.data


@jax.tree_util.register_pytree_node_class
class Node:
    """A pytree whose data beside its leaves is anything that is hashable."""

    def __init__(self, leaf, aux):
        self.leaf, self.aux = leaf, aux

    def tree_flatten(self):
        return (self.leaf,), self.aux

    @classmethod
    def tree_unflatten(cls, aux, leaves):
        return cls(*leaves, aux)


def show(a, held):
    """Adds a number that differs for things that are equal."""
    if isinstance(held, Equal):
        return a + held.data
    kinds = [bool, int, float, complex]
    sign = np.copysign(1, np.real(held))
    return a + np.float32(10 * kinds.index(type(held)) + 2 * np.real(held) + sign)


derived = hc.host(lambda a, held: a, result=hc.results.like(0), name="derived")
derived.defjvp(lambda p, t: show(0 * t[0], p[1]))
pulled = hc.host(lambda a, held: a, result=hc.results.like(0), name="pulled")
pulled.defvjp(lambda a, held: (a, held), lambda held, t: (show(0 * t, held), None))
kept = hc.host(lambda node: node.leaf, result=np.float32(0), name="kept")
kept.defvjp(
    lambda node: (node.leaf, node.aux),
    lambda aux, t: (Node(show(0 * t, aux), aux),),
)

# Where programs hold a thing that is no array: (what the user writes, for any hashable).
HOLDERS = {
    "an argument": (lambda v, h: hc.call(show, v, v, h), False),
    "a keyword": (lambda v, h: hc.call(show, v, v, held=h), False),
    "a list": (lambda v, h: hc.call(lambda a, b: show(a, b[0]), v, v, [h]), False),
    "a jvp rule": (lambda v, h: jax.jvp(lambda x: derived(x, h), (v,), (v,))[1], False),
    "a backward rule": (lambda v, h: jax.grad(lambda x: pulled(x, h))(v), False),
    "the data of a tree": (
        lambda v, h: hc.call(lambda n: show(n.leaf, n.aux), v, Node(v, h)),
        True,
    ),
    "data in the data": (
        lambda v, h: hc.call(lambda n: show(n.leaf, n.aux[0]), v, Node(v, (h,))),
        True,
    ),
    "a key": (
        lambda v, h: hc.call(lambda d: show(v_of(d), key_of(d)), v, {h: v}),
        True,
    ),
    "the data in a rule": (
        lambda v, h: jax.grad(lambda x: kept(Node(x, h)))(v),
        True,
    ),
}
EQUALS = {
    "objects": (Equal(1), Equal(2), Equal(3)),
    "numbers": (1, 1.0, True, 1 + 0j),
    "zeros": (0.0, -0.0, 0),
}


def key_of(d):
    return next(iter(d))


def v_of(d):
    return next(iter(d.values()))


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        (w, k)
        for w, (_, any_hashable) in HOLDERS.items()
        for k in EQUALS
        if any_hashable or k == "objects"
    ],  # elsewhere a number is an array
)
def test_live_programs_of_one_line_that_hold_equal_things_get_their_own(where, kind):
    holder, _ = HOLDERS[where]
    x = np.float32(0)
    programs = [jax.jit(lambda v, h=h: holder(v, h)) for h in EQUALS[kind]]
    compiled = [program.lower(x).compile() for program in programs]
    want = [float(show(x, h)) for h in EQUALS[kind]]
    assert len(set(want)) == len(want)
    assert [float(one(x)) for one in compiled] == want


def test_live_programs_of_one_line_have_bars_of_their_own():
    made = []

    def program(n):
        def factory(**how):
            made.append(n)
            return tqdm.tqdm(**how, disable=True)

        def body(i, v):
            hc.progress(i, total=3, bar=factory, every=None)
            return v + i

        return jax.jit(lambda v: jax.lax.fori_loop(0, 3, body, v))

    compiled = [program(n).lower(0).compile() for n in (1, 2)]
    for one in compiled:
        one(0)
        hc.barrier()
    assert made == [1, 2]


def test_programs_of_equal_objects_call_their_own():
    programs = [
        jax.jit(lambda v, held=Equal(np.float32(data)): hc.call(held, v, v))
        for data in (1, 2)
    ]
    lowered = [program.lower(np.float32(0)) for program in programs]
    assert [float(one.compile()(np.float32(0))) for one in lowered] == [1, 2]


class Unhashable(type):
    """Classes of it are equal only to themselves, and have no hash."""

    def __eq__(cls, other):
        return cls is other

    __hash__ = None


class Odd(metaclass=Unhashable):
    def __call__(self, a):
        return a + 1


def nested(depth):
    data = ()
    for _ in range(depth):
        data = (data,)
    return data


ODD = {
    "a function of an unhashable class": lambda v: hc.call(ODD_ONE, v, v),
    "an argument of one": lambda v: hc.call(lambda a, _: a + 1, v, v, ODD_ONE),
    "data deeper than the stack": lambda v: hc.call(
        lambda node: node.leaf + 1, v, Node(v, DEEP)
    ),
}
ODD_ONE, DEEP = Odd(), nested(1500)


@pytest.mark.parametrize("kind", ODD)
def test_live_programs_of_one_line_that_hold_odd_things(kind):
    program = jax.jit(lambda v, n: ODD[kind](v) * n, static_argnums=1)
    assert [float(program(np.float32(1), n)) for n in (1, 2, 3)] == [2, 4, 6]


def test_a_class_is_freed_with_the_programs_that_call_its_object(in_time):
    def gone():
        class Adds:
            def __call__(self, a):
                return a + 1

        adds = Adds()
        program = jax.jit(lambda v, n: hc.call(adds, v, v) * n, static_argnums=1)
        assert [float(program(np.float32(1), n)) for n in (1, 2)] == [2, 4]
        return weakref.ref(Adds)

    ref = gone()
    jax.clear_caches()
    assert in_time(lambda: ref() is None)


def test_programs_that_share_a_call_outlive_each_other():
    def program(v, n):
        return hc.call(plus, v, v) * n

    x = jnp.arange(3.0)
    first, second = (jax.jit(program, static_argnums=1).lower(x, n) for n in (2, 3))
    first, second = first.compile(), second.compile()
    np.testing.assert_allclose(first(x), (x + 1) * 2)
    del first
    jax.clear_caches()
    gc.collect()
    np.testing.assert_allclose(second(x), (x + 1) * 3)


BLOCKS = """
import gc, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, numpy as np
import hostcall as hc
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
whole = np.arange(32, dtype=np.float32).reshape(4, 8)
x = jax.device_put(whole, jax.NamedSharding(mesh, jax.P("a", "b")))
jax.block_until_ready(x)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
for factor in (1, 10):
    taps, calls = [], []
    def tap(block):
        ((rows, columns),) = hc.current().index
        taps.append(np.array_equal(block, factor * whole[rows, columns]))
    def call(block):
        calls.append(float(np.sum(block)))
    @jax.jit
    def program(x):
        hc.tap(tap, x * factor, on="shards")
        hc.debug.callback(call, x, partitioned=True)
        return x
    program(x)
    hc.barrier()
    assert taps == [True] * 4, taps
    blocks = [whole[i:i + 2, j:j + 4].sum() for i in (0, 2) for j in (0, 4)]
    assert sorted(calls) == sorted(blocks), calls
    print(sum(e.endswith("/cache_hits") for e in events),
          sum(e.endswith("/cache_misses") for e in events))
    events.clear()
    del program
    jax.clear_caches()
    gc.collect()
print(len(os.listdir(sys.argv[1])))
"""


def test_blocks_of_devices_come_from_the_cache(run_python, tmp_path):
    """No compiler asks which block a device gets: the program's text tells it."""
    first, second = (run_python(BLOCKS, str(tmp_path)) for _ in range(2))
    *lines, files = first.stdout.splitlines()
    assert any(not line.endswith(" 0") for line in lines), lines
    *lines, same = second.stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["0", "0"], lines
    assert same == files


def text(f, *args):
    return jax.jit(f).lower(*args).as_text()


def plus(a):
    return a + 1


def minus(a):
    return a - 1


def test_the_text_depends_on_the_call_alone():
    x = jnp.arange(3.0)
    first = text(lambda v: hc.call(plus, v, v), x)
    others = [jax.jit(lambda v: hc.call(minus, v, v)) for _ in range(5)]
    for other in others:
        other(x)
    assert text(lambda v: hc.call(plus, v, v), x) == first
    assert text(lambda v: hc.call(minus, v, v), x) != first


def test_live_equals_are_counted_and_run_their_own():
    x = np.float32(1)
    programs = []
    for number in range(4):

        def add(a, number=number):
            return a + np.float32(number)

        programs.append(jax.jit(lambda v, add=add: hc.call(add, v, v)))
    lowered = [program.lower(x) for program in programs]
    assert len({one.as_text() for one in lowered}) == 4
    assert [float(one.compile()(x)) for one in lowered] == [1, 2, 3, 4]


def use(v):
    return hc.call(plus, v, v)


def twice(v):
    return use(v) + use(v + 1)


def elsewhere(v):
    return hc.call(plus, v, v) * 3


def tapped(v):
    hc.tap(print, v)
    return v


def gradient(v):
    return jax.grad(lambda v: square(v).sum())(v)


class Adds:
    def method(self, a):
        return a + 1


adds = Adds()
square = hc.host(lambda a: a * a, result=hc.results.like(0), name="square")
square.defvjp(lambda a: (a * a, a), lambda a, t: (2 * a * t,))
# Each is a program of its own name, as functions have.
SHARING = {
    "a call": lambda v: use(v) + 1,
    "the same call": lambda v: use(v) * 2,
    "two calls of one line": twice,
    "three": lambda v: twice(v) + use(v),
    "another line": elsewhere,
    "both lines": lambda v: use(v) + elsewhere(v),
    "a tap": lambda v: tapped(v) + 1,
    "the same tap": lambda v: tapped(v) + 2,
    "a drop-in": lambda v: hc.pure_callback(plus, v, v),
    "a method": lambda v: hc.call(adds.method, v, v) + 1,
    "the same method": lambda v: hc.call(adds.method, v, v) * 2,
    "a host function": lambda v: square(v) + 1,
    "its gradient": gradient,
    "more than its gradient": lambda v: gradient(v) * 2,
}
for name, f in SHARING.items():
    SHARING[name] = functools.wraps(f)(functools.partial(f))
    SHARING[name].__name__ = name.replace(" ", "_")


def test_live_programs_that_call_one_function_have_the_same_text_in_any_order():
    x = np.arange(3, dtype=np.float32)
    texts = {name: text(f, x) for name, f in SHARING.items()}
    for order in range(10):
        names = list(SHARING)
        random.Random(order).shuffle(names)
        jax.clear_caches()
        gc.collect()
        alive = {name: jax.jit(SHARING[name]).lower(x) for name in names}
        assert {name: alive[name].as_text() for name in SHARING} == texts
        del alive


def test_equal_calls_of_one_program_keep_counts_of_their_own():
    """Of `every=`, for example: each of the two is a place."""
    seen = []

    def log(v):
        seen.append(int(v))

    def one(v):
        hc.tap(log, v, every=2)

    @jax.jit
    def program(v):
        def step(i, v):
            one(v + i)
            one(v + i)
            return v

        return jax.lax.fori_loop(0, 4, step, v)

    others = [jax.jit(lambda v: (one(v), v)[1]).lower(0) for _ in range(2)]
    program(0)
    hc.barrier()
    assert seen == [0, 0, 2, 2]
    del others


def here(a):
    return a + 1


def _there():
    def here(a):
        return a + 1

    return here


def wrapper(f):
    def inner(*args):
        return f(*args)

    return inner


class Callable:
    def __call__(self, a):
        return a

    def method(self, a):
        return a

    def other(self, a):
        return a


def added(constant, a):
    return a + constant


def _with(constant):
    return lambda a: a + constant


SAME = {
    "data of a closure": (_with(1), _with(2)),
    "data of a partial": (functools.partial(added, 1), functools.partial(added, 2)),
    "objects": (Callable(), Callable()),
    "methods": (Callable().method, Callable().method),
    "the same function twice": (here, here),
}
DIFFERENT = {
    "functions": (plus, minus),
    "lambdas": (lambda a: a + 1, lambda a: a + 2),
    "places": (here, _there()),
    "what is wrapped": (wrapper(plus), wrapper(minus)),
    "what is wrapped twice": (wrapper(wrapper(plus)), wrapper(wrapper(minus))),
    "parts of partials": (functools.partial(plus), functools.partial(minus)),
    "defaults that are functions": (
        lambda a, f=plus: f(a),
        lambda a, f=minus: f(a),
    ),
    "jitted functions": (jax.jit(plus), jax.jit(minus)),
    "methods": (Callable().method, Callable().other),
    "ufuncs": (np.sin, np.cos),
    "sets of constants": (lambda a: a in {1, 2}, lambda a: a in {1, 3}),
}


def program_key(fn):
    """What a program's text has instead of the function, which JAX's cache reads."""
    program = jax.jit(lambda v: hc.call(fn, v, v))
    return re.search(r"\bkey = (-?\d+)", program.lower(np.float32(1)).as_text())[1]


@pytest.mark.parametrize("kind", SAME)
def test_functions_with_the_same_key(kind):
    first, second = SAME[kind]
    assert program_key(first) == program_key(second)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_functions_with_different_keys(kind):
    first, second = DIFFERENT[kind]
    assert program_key(first) != program_key(second)


def test_a_function_that_holds_itself_has_a_key():
    def again(a):
        return again(a - 1) if a else a

    assert program_key(again) != program_key(here)


def test_calls_that_stand_often_in_a_program_and_in_others():
    """Programs with other numbers of equal calls share what both have."""

    def add(v):
        return v + 1

    def program(n):
        def times(v):
            for _ in range(n):
                v = hc.call(add, v, v)
            return v

        return jax.jit(times)

    runs = {n: program(n) for n in (3, 1, 5, 2)}
    texts = {n: run.lower(np.float32(0)).as_text() for n, run in runs.items()}
    assert {
        n: text.count("custom_call @hostcall_call") for n, text in texts.items()
    } == {n: n for n in runs}
    for n, run in runs.items():
        assert float(run(np.float32(0))) == n
