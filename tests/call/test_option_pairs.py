"""Every two options of a call: what they do together, or how the pair is refused.

The tables are the promise. A pair that is allowed has the number of calls that the
function gets, and the values are compared with the plain function. A pair that is
refused has the stage at which that is known, and the code of the error:

    face      where the call is written, without any transformation
    vmap      when the program is batched
    lowering  when the program is lowered for its devices
    run       when it runs
"""

from __future__ import annotations

import io
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import policies
import pytest
from meshes import line

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)
ROWS = np.arange(4, dtype=np.float32)
FILL = np.float32(-1)
CONFLICT = "face hc-conflict"
LOWERED = "lowered"


def doubled(x):
    return x * 2


class Double:
    """Doubles an array of any shape and kind, and counts its calls."""

    def __init__(self, names):
        self.calls = 0
        self._lock = threading.Lock()  # rows of a pool come on several threads
        if "async" in names or "concurrency" in names:
            self.function = self._later
        elif "out" in names:
            self.function = self._write
        else:
            self.function = self._now

    def _now(self, x):
        with self._lock:
            self.calls += 1
        return np.from_dlpack(x) * 2

    async def _later(self, x):
        return self._now(x)

    def _write(self, x, out):
        out[...] = self._now(x)


def row_by_row(axis_size, in_batched, x):
    return x * 2, True


# An option that is nothing without another one comes with it. "async" is a coroutine
# function, which is no option, and meets all of them.
OPTIONS = {
    "async": {},
    "unordered": {"order": "unordered"},
    "ordered": {"order": "ordered"},
    "parallel": {"vmap_method": "parallel"},
    "whole": {"vmap_method": "expand_dims"},
    "legacy": {"vmap_method": "legacy_vectorized"},
    "rule": {"vmap_method": row_by_row},
    "where": {"fill": FILL},  # the program has the mask
    "on": {"on": jax.devices()[1]},
    "jax": {"arrays": "jax"},
    "dlpack": {"arrays": "dlpack"},
    "cuda": {"arrays": "cuda"},
    "lend": {"lend": True},
    "out": {"lend": "out"},
    "timeout": {"timeout": 60},
    "executor": {"vmap_method": "parallel", "executor": None},  # the pool of the test
    "concurrency": {"concurrency": 2},
    "fail": {"fail": "alone"},
    "tag": {"tag": "doubles"},
    "float64": {"float64": True},
}
ONLY_CALL = {"on", "fail"}


def test_every_option_and_value_of_the_table_is_here():
    here = [pair for each in OPTIONS.values() for pair in each.items()]
    assert policies.CALL.keys() <= {name for name, _ in here}
    for name in ("order", "vmap_method", "arrays", "lend"):
        left_out = {"numpy", "pure", "sequential", "broadcast_all", False, None}
        values = [value for option, value in here if option == name]
        assert set(policies.CALL[name].values) - left_out <= set(values), name


# Of each option: what comes of it with those that follow it.
PAIRS = {
    "async": {
        4: "unordered ordered parallel on jax dlpack timeout concurrency fail tag float64",
        3: "where",
        1: "whole legacy",
        0: "rule",
        CONFLICT: "cuda lend out executor",
    },
    "unordered": {
        4: "parallel on jax dlpack lend out timeout executor concurrency fail tag float64",
        3: "where",
        1: "whole legacy",
        0: "rule",
        "run hc-device": "cuda",  # there is no GPU here
    },
    "ordered": {
        4: "parallel on jax dlpack lend out timeout executor concurrency fail tag float64",
        3: "where",
        1: "whole legacy",
        0: "rule",
        "run hc-device": "cuda",
    },
    "parallel": {
        4: "on jax dlpack timeout concurrency fail tag float64",
        3: "where",
        CONFLICT: "cuda lend out",
    },
    "whole": {
        1: "where on jax dlpack lend out timeout concurrency fail tag float64",
        "run hc-device": "cuda",
    },
    "legacy": {
        1: "on jax dlpack lend out timeout concurrency fail tag float64",
        "vmap hc-batching": "where",
        "run hc-device": "cuda",
    },
    "rule": {
        0: "on jax dlpack lend out timeout concurrency fail tag float64",
        CONFLICT: "cuda",
        "vmap hc-batching": "where",
    },
    "where": {
        3: "on jax dlpack lend out timeout executor concurrency fail tag float64",
        CONFLICT: "cuda",
    },
    "on": {
        4: "jax dlpack lend out timeout executor concurrency fail tag float64",
        CONFLICT: "cuda",
    },
    "jax": {
        4: "lend out timeout executor concurrency fail tag",
        CONFLICT: "float64",
    },
    "dlpack": {
        4: "lend out timeout executor concurrency fail tag float64",
    },
    "cuda": {
        CONFLICT: "lend out timeout executor concurrency float64",
        "run hc-device": "fail tag",
    },
    "lend": {
        4: "fail tag float64",
        CONFLICT: "timeout executor concurrency",
    },
    "out": {
        4: "fail tag float64",
        CONFLICT: "timeout executor concurrency",
    },
    "timeout": {
        4: "executor concurrency fail tag float64",
    },
    "executor": {
        4: "fail tag float64",
        CONFLICT: "concurrency",
    },
    "concurrency": {
        4: "fail tag float64",
    },
    "fail": {4: "tag float64"},
    "tag": {4: "float64"},
}
# Where `hc.host` knows it later than `hc.call`: the function it makes calls both faces.
LATER_OF_HOST = {
    ("legacy", "where"): "lowering hc-batching",
    ("rule", "cuda"): 0,
    ("where", "cuda"): "lowering hc-conflict",
}


def rows_of(table):
    """(a, b, outcome) for each pair of a table."""
    return [
        (a, b, outcome)
        for a, groups in table.items()
        for outcome, names in groups.items()
        for b in names.split()
    ]


def cases_of_calls():
    """(face, a, b, outcome). A pair that `hc.call` has run is lowered by `hc.host`, which
    makes the same call of it; the first pair of each option that it may have runs too.
    """
    met = set()
    for a, b, want in rows_of(PAIRS):
        yield "call", a, b, want
        if not {a, b} & ONLY_CALL:
            of_host = LATER_OF_HOST.get((a, b), want)
            if of_host == want and isinstance(want, int) and {a, b} <= met:
                of_host = LOWERED
            elif isinstance(of_host, int):
                met |= {a, b}
            yield "host", a, b, of_host


def missing(options, table):
    """Pairs that may meet, since they share no keyword, and are not in the table."""
    given = {frozenset(row[:2]) for row in rows_of(table)}
    return [
        pair
        for pair in itertools.combinations(options, 2)
        if frozenset(pair) not in given
        and not options[pair[0]].keys() & options[pair[1]].keys()
    ]


def call(function, names, options):
    """The function of a row, by `hc.call`."""

    def row(x):
        mask = x > 0 if "where" in names else None
        return policies.call(function, F32, x, where=mask, **options)

    return row


def host(function, names, options):
    """The function of a row, by `hc.host`."""
    fill = options.pop("fill", None)

    def row(x):
        f = hc.host(function, result=F32, **options)
        return (f.where(x > 0, fill) if "where" in names else f)(x)

    return row


FACES = {"call": call, "host": host}


def outcome(face, names, pool, run):
    """The number of calls of a batch of four rows, or the stage and code of the refusal.

    If nothing is to `run`, LOWERED.
    """
    double = Double(names)
    options = {k: v for name in names for k, v in OPTIONS[name].items()}
    if "executor" in options:
        options["executor"] = pool
    row = FACES[face](double.function, names, options)
    rows = jax.device_put(ROWS, spread() if "on" in names else None)
    stage = "face"
    try:
        jax.make_jaxpr(row)(ROWS[0])
        stage = "vmap"
        traced = jax.jit(jax.vmap(row)).trace(rows)
        stage = "lowering"
        lowered = traced.lower()
        if not run:
            return LOWERED
        program = lowered.compile()
        stage = "run"
        with hc.reraise():
            got = np.asarray(program(rows))
        want = np.where(ROWS > 0, ROWS * 2, FILL) if "where" in names else ROWS * 2
        np.testing.assert_array_equal(got, want)
    except hc.errors.HostcallError as error:
        return f"{stage} {error.code}"
    return double.calls


def spread():
    return jax.NamedSharding(line(), jax.P("x"))


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.mark.parametrize(("face", "a", "b", "want"), [*cases_of_calls()])
def test_two_options_of_a_call(face, a, b, want, pool, pytestconfig):
    if want == "run hc-device" and pytestconfig.getoption("--platform") != "cpu":
        pytest.skip("there is a device of CUDA, and what the call does there differs")
    assert outcome(face, (a, b), pool, want != LOWERED) == want


def test_no_pair_is_left_out():
    assert missing(OPTIONS, PAIRS) == []
    assert missing(TAP_OPTIONS, TAP_PAIRS) == []
    assert missing(PRINT_OPTIONS, PRINT_PAIRS) == []


# --- Taps and prints ---------------------------------------------------------------

STEPS = 4
TAP_OPTIONS = {
    "async": {},
    "ordered": {"order": "ordered"},
    "where": {},  # the program has the mask
    "newest": {"when_full": "drop_newest"},
    "each": {"rows": "each"},
    "repeat": {"remat": "repeat"},
    "device": {"on": jax.devices()[1]},
    "shards": {"on": "shards"},
    "jax": {"arrays": "jax"},
    "dlpack": {"arrays": "dlpack"},
    "every": {"every": 2},
    "seconds": {"every": 1e9},
    "sample": {"sample": 0.5},
    "always": {},  # the program has the flag
    "batch": {"batch": 4},
    "tag": {"tag": "kept"},
}
PRINT_OPTIONS = {
    name: options
    for name, options in TAP_OPTIONS.items()
    if not options.keys() & {"remat", "arrays", "sample", "batch", "tag"}
    and name not in ("async", "always")
} | {"flush": {"flush": True}, "end": {"end": ";\n"}}
TAP_PAIRS = {
    "async": {
        4: "ordered where newest repeat device jax dlpack always batch tag",
        16: "each shards",
        2: "every sample",
        1: "seconds",
    },
    "ordered": {
        4: "where newest repeat device jax dlpack always tag",
        16: "each shards",
        2: "every sample",
        1: "seconds",
        CONFLICT: "batch",
    },
    "where": {
        4: "newest repeat device jax dlpack always tag",
        12: "each",
        2: "every sample",
        1: "seconds",
        "lowering hc-conflict": "shards batch",
    },
    "newest": {
        4: "repeat device jax dlpack always batch tag",
        16: "each shards",
        2: "every sample",
        1: "seconds",
    },
    "each": {
        16: "repeat device jax dlpack always tag",
        8: "every sample",
        4: "seconds",
        CONFLICT: "batch",
        "lowering hc-conflict": "shards",
    },
    "repeat": {
        4: "device jax dlpack always batch tag",
        16: "shards",
        2: "every sample",
        1: "seconds",
    },
    "device": {
        4: "jax dlpack always batch tag",
        2: "every sample",
        1: "seconds",
    },
    "shards": {
        16: "jax dlpack always batch tag",
        8: "every sample",
        4: "seconds",
    },
    "jax": {
        4: "always batch tag",
        2: "every sample",
        1: "seconds",
    },
    "dlpack": {
        4: "always batch tag",
        2: "every sample",
        1: "seconds",
    },
    "every": {3: "always", 2: "batch tag", 1: "sample"},
    "seconds": {2: "always", 1: "sample batch tag"},
    "sample": {3: "always", 2: "batch tag"},
    "always": {4: "batch tag"},
    "batch": {4: "tag"},
}
PRINT_PAIRS = {
    "ordered": {
        4: "where newest device flush end",
        16: "each shards",
        2: "every",
        1: "seconds",
    },
    "where": {
        4: "newest device flush end",
        12: "each",
        2: "every",
        1: "seconds",
        "lowering hc-conflict": "shards",
    },
    "newest": {
        4: "device flush end",
        16: "each shards",
        2: "every",
        1: "seconds",
    },
    "each": {
        16: "device flush end",
        8: "every",
        4: "seconds",
        "lowering hc-conflict": "shards",
    },
    "device": {4: "flush end", 2: "every", 1: "seconds"},
    "shards": {16: "flush end", 8: "every", 4: "seconds"},
    "every": {2: "flush end"},
    "seconds": {1: "flush end"},
    "flush": {4: "end"},
}
ON = {"device", "shards"}


class Kept:
    """Counts the deliveries of a tap, and keeps their numbers.

    With `batch=` a call has as many deliveries as were queued, one for each entry.
    """

    def __init__(self, names):
        self.calls, self.numbers = 0, []
        self.function = self._later if "async" in names else self._now
        self._stacked = "batch" in names

    def _now(self, x):
        x = np.from_dlpack(x)
        self.calls += len(x) if self._stacked else 1
        self.numbers += x.ravel().tolist()

    async def _later(self, x):
        self._now(x)


class Lines(io.StringIO):
    """The same for the lines of a print."""

    calls = property(lambda self: self.getvalue().count("\n"))
    numbers = property(lambda self: [float(n) for n in self._texts()])

    def _texts(self):
        return self.getvalue().translate(str.maketrans("[];", "   ")).split()


def deliver(face, names):
    """The number of deliveries of four runs of a batch, or the refusal's stage and code.

    Run `s` hands out `10 * s + row` for four rows.
    """
    every = PRINT_OPTIONS if face == "print" else TAP_OPTIONS
    options = {k: v for name in names for k, v in every[name].items()}
    kept = Lines() if face == "print" else Kept(names)

    def row(step, x):
        given = dict(options, where=x > 0) if "where" in names else options
        if "always" in names:
            given = given | {"always": step == STEPS - 1}
        if face == "print":
            hc.print("{}", 10 * step + x, file=kept, **given)
        else:
            hc.tap(kept.function, 10 * step + x, **given)

    def batch(step, xs):
        jax.vmap(lambda x: row(step, x))(xs)

    xs = jax.device_put(ROWS, spread() if ON & {*names} else None)
    stage = "face"
    try:
        jax.make_jaxpr(row)(np.float32(0), ROWS[0])
        stage = "vmap"
        traced = jax.jit(batch).trace(np.float32(0), xs)
        stage = "lowering"
        program = traced.lower().compile()
    except hc.errors.HostcallError as error:
        return f"{stage} {error.code}"
    for step in range(STEPS):
        program(np.float32(step), xs)
    hc.barrier()
    check_numbers(kept.numbers, names)
    return kept.calls


def check_numbers(numbers, names):
    steps = {int(n) // 10 for n in numbers}
    rows = ROWS[ROWS > 0] if "where" in names else ROWS
    # Each number once: a step is delivered with all its rows, or not at all.
    assert sorted(numbers) == [
        10 * step + row for step in sorted(steps) for row in rows
    ]
    if {"ordered", "each"} & {*names} and "shards" not in names:
        assert numbers == sorted(numbers)
    if "sample" in names:
        return  # the table has how many steps it picks
    want = {0} if "seconds" in names else {0, 2} if "every" in names else {0, 1, 2, 3}
    assert steps == want | ({3} if "always" in names else set())


@pytest.mark.parametrize(("a", "b", "want"), rows_of(TAP_PAIRS))
def test_two_options_of_a_tap(a, b, want):
    assert deliver("tap", (a, b)) == want


@pytest.mark.parametrize(("a", "b", "want"), rows_of(PRINT_PAIRS))
def test_two_options_of_a_print(a, b, want):
    assert deliver("print", (a, b)) == want


# --- Options that need another, or that meet something that is no option -----------------

DEVICE = jax.devices()[0]


@hc.register("tests.option_pairs.same", version=1)
def same(x):
    return x


def plain(**options):
    return lambda: policies.call(doubled, F32, np.float32(1), **options)


def of_host(fn=doubled, result=F32, **options):
    return lambda: hc.host(fn, result=result, **options)


def in_shard_map():
    def block(x):
        return hc.call(doubled, x, x, on=DEVICE)

    part = jax.shard_map(block, mesh=line(), in_specs=jax.P("x"), out_specs=jax.P("x"))
    jax.jit(part).lower(ROWS)


def exported():
    program = jax.jit(lambda x: hc.call(same, x, x, on=DEVICE))
    hc.export(program)(jax.device_put(ROWS, spread()))


def derivative(order):
    hc.host(doubled, result=F32, order=order).defjvp(lambda primals, tangents: tangents)


def feed(then=lambda feed: None, source=(np.zeros(4, np.float32),), **options):
    with hc.feed(source, **options) as made:
        then(made)


def sharded(then):
    feed(then, sharding=jax.NamedSharding(line(), jax.P("x")))


def write(ctx, out, x):
    np.asarray(out)[...] = np.asarray(x) * 2


def buffer(**options):
    return hc.buffers.buffer_callback(write, F32, **options)


REFUSED = {
    "executor without parallel": (plain(executor=ThreadPoolExecutor(1)), "hc-conflict"),
    "executor with sequential": (
        plain(executor=ThreadPoolExecutor(1), vmap_method="sequential"),
        "hc-conflict",
    ),
    "concurrency of a plain function": (plain(concurrency=2), "hc-conflict"),
    "pure without results": (lambda: hc.call(doubled, None, 1.0), "hc-dropped"),
    "pure without results, host": (of_host(result=None), "hc-dropped"),
    "pure tap": (lambda: hc.tap(doubled, 1.0, order="pure"), "hc-dropped"),
    "concurrency of a plain function, host": (of_host(concurrency=2), "hc-conflict"),
    "executor without parallel, host": (
        of_host(executor=ThreadPoolExecutor(1)),
        "hc-conflict",
    ),
    "a device inside shard_map": (in_shard_map, "hc-device"),
    "a device in an export": (exported, "hc-export"),
    "rules of an unordered function": (lambda: derivative("unordered"), "hc-conflict"),
    "rules of an ordered function": (lambda: derivative("ordered"), "hc-conflict"),
    "feed: rows and sharding": (lambda: sharded(lambda f: f(rows=1)), "hc-conflict"),
    "feed: repeat and an iterator": (
        lambda: feed(source=iter([np.zeros(4)]), on_end="repeat"),
        "hc-feed-source",
    ),
    "buffer: pure and a side effect": (
        lambda: buffer(order="pure", has_side_effect=True),
        "hc-conflict",
    ),
    "buffer: machine code and a whole batch": (
        lambda: hc.buffers.buffer_callback(
            hc.buffers.native(1), F32, vmap_method="expand_dims"
        ),
        "hc-conflict",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    make, code = REFUSED[what]
    with pytest.raises(hc.errors.HostcallError) as caught:
        make()
    assert caught.value.code == code
