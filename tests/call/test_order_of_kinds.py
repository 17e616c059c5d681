"""All host calls of a program run in program order, whatever their kinds, and wherever in
the program they are. The oracle is the same function without jit.
"""

from __future__ import annotations

import jax
import jax.experimental
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from jax import lax
from meshes import grid, line

import hostcall as hc

I32 = jax.ShapeDtypeStruct((), np.int32)


class Log:
    """What has happened: (kind, number), or (kind, *numbers) for several rows at once."""

    def __init__(self, seen=None, offset=0):
        self.seen = [] if seen is None else seen
        self.offset = offset

    def add(self, kind, number):
        self.seen.append((kind, *np.ravel(number + self.offset).tolist()))

    def with_offset(self, offset):
        """The same log, where host code adds `offset` to each number."""
        return Log(self.seen, offset)

    def called(self, kind):
        """The host function of a call. The taps before it have left the program."""

        def host(number):
            hc.barrier(programs=False)
            self.add(kind, number)

        return host

    def taken(self):
        hc.barrier()
        seen = list(self.seen)
        self.seen.clear()
        return seen


def call(log, i, order):
    hc.call(log.called(order + " call"), None, i, order=order)


def result(log, i, order):
    def host(number):
        log.called(order + " result")(number)
        return number

    hc.call(host, I32, i, order=order)


def tap(log, i, order):
    hc.tap(lambda n: log.add(order + " tap", n), i, order=order)


def io(log, i, order):
    hc.io_callback(log.called(order + " io"), None, i, ordered=order == "ordered")


def debug(log, i, order):
    hc.debug.callback(log.called(order + " debug"), i, ordered=order == "ordered")


FACES = {"call": call, "result": result, "tap": tap, "io": io, "debug": debug}
KINDS = {
    f"{order} {name}": (face, order)
    for name, face in FACES.items()
    for order in ("ordered", "unordered")
}


def emit(log, kind, number, offset=0):
    face, order = KINDS[kind]
    face(log.with_offset(offset), number, order)


def all_pairs(kinds):
    """A sequence in which each kind comes directly after each, itself too."""
    kinds = list(kinds)
    pairs = {first: list(kinds) for first in kinds}
    stack, path = [kinds[0]], []
    while stack:  # the path that uses each pair once
        if pairs[stack[-1]]:
            stack.append(pairs[stack[-1]].pop())
        else:
            path.append(stack.pop())
    return path[::-1]


class EachAfterEach:
    """`do(i)` has host calls in which each kind comes directly after each.

    One call in COMPUTED gets a number that the program computes for it alone, which XLA
    makes a kernel for. With one for each call, kernels are most of the time of the test.
    """

    PARTS = 6
    COMPUTED = 5

    def __init__(self, log, kinds, numbers=lambda i: i):
        self.log, self.numbers = log, numbers
        self.path = all_pairs(kinds)

    def __call__(self, i, begin=0, end=None):
        numbers = self.numbers(i)
        for place, kind in enumerate(self.path[begin:end], begin):
            if place % self.COMPUTED == 0:
                emit(self.log, kind, numbers + 1000 * place)
            else:
                emit(self.log, kind, numbers, offset=1000 * place)

    def part(self, k):
        """`do` with a sixth of the pairs, so that all are in a program of six parts."""
        size = -(-(len(self.path) - 1) // self.PARTS)
        begin = k * size
        # The last kind of a part is the first one of the next.
        return lambda i: self(i, begin, begin + size + 1)


# --- Where they are -------------------------------------------------------------------
#
# Each puts a function `do(i)`, which has host calls, into a program of one number.


def straight(do, x):
    do(x)
    do(x + 1)
    return x


def in_scan(do, x):
    return lax.scan(lambda c, i: (do(i), (c, None))[1], x, jnp.arange(2))[0]


def in_unrolled_scan(do, x):
    step = lambda c, i: (do(i), (c, None))[1]
    return lax.scan(step, x, jnp.arange(5), unroll=2)[0]


def in_while(do, x):
    return lax.while_loop(lambda i: i < 2, lambda i: (do(i), i + 1)[1], x)


def in_condition(do, x):
    def condition(i):
        do(i)
        return i < 2

    return lax.while_loop(condition, lambda i: (do(i + 100), i + 1)[1], x)


def in_cond(do, x):
    def step(c, i):
        do(i)
        lax.cond(i > 0, lambda: do(i + 100), lambda: do(i + 200))
        do(i + 300)
        return c, None

    return lax.scan(step, x, jnp.arange(2))[0]


def in_jit(do, x):
    inner = jax.jit(lambda i: (do(i), i + 1)[1])

    def step(c, i):
        do(inner(i))
        inner(i + 100)
        do(i + 200)
        return c, None

    return lax.scan(step, x, jnp.arange(2))[0]


def around_loops(do, x):
    """Loops, and host calls between them. The places above have all pairs inside of loops;
    here they are divided, and each boundary of a loop has other kinds on its sides.
    """
    part = getattr(do, "part", lambda k: do)
    part(0)(x)
    x = in_scan(part(1), x)
    part(2)(x + 100)
    x = in_while(part(3), x * 0)
    part(4)(x + 200)
    return in_cond(part(5), x)


def in_remat(do, x):
    @jax.checkpoint
    def inner(y):
        do(jnp.int32(7))
        return jnp.sin(y)

    def loss(y):
        do(jnp.int32(8))
        y = lax.scan(lambda c, _: (inner(c), None), y, None, length=2)[0]
        do(jnp.int32(9))
        return y

    # JAX 0.10.2 drops a checkpoint whose result nothing uses, with its effects.
    return loss(jnp.float32(x))


PLACES = {
    "straight": straight,
    "scan": in_scan,
    "unrolled scan": in_unrolled_scan,
    "while": in_while,
    "condition": in_condition,
    "cond": in_cond,
    "jit": in_jit,
    "around loops": around_loops,
    "remat": in_remat,
}


def compare(program, log):
    with jax.disable_jit():
        program(jnp.int32(0))
    want = log.taken()
    jax.block_until_ready(jax.jit(program)(jnp.int32(0)))
    assert log.taken() == want
    return want


@pytest.mark.parametrize("place", PLACES)
def test_each_kind_after_each_in_one_program(place):
    log = Log()
    do = EachAfterEach(log, KINDS)
    seen = compare(lambda x: PLACES[place](do, x), log)
    assert len(seen) >= 2 * len(KINDS) ** 2


@pytest.mark.parametrize("place", ["scan", "around loops"])
@pytest.mark.parametrize("first", KINDS)
def test_pairs_alone(first, place):
    kinds = list(KINDS)
    if place == "around loops":  # there each comes after the other too
        kinds = kinds[kinds.index(first) :]
    for second in kinds:
        log = Log()

        def do(i, second=second, log=log):
            emit(log, first, i)
            emit(log, second, i)

        compare(lambda x, do=do: PLACES[place](do, x), log)


@pytest.mark.parametrize("place", ["scan", "while", "cond", "around loops"])
def test_rows_of_a_vmap(place):
    """Each call is one in the program, with a row for each row of the batch."""
    log = Log()
    refused = ["ordered io", "unordered io"]  # by JAX, the second inside cond
    kinds = [kind for kind in KINDS if kind not in refused]

    def row(x, y):
        return PLACES[place](EachAfterEach(log, kinds, lambda i: i + y), x)

    compare(lambda x: jax.vmap(row, (None, 0))(x, jnp.array([10, 20])), log)


@pytest.mark.parametrize("place", ["scan", "cond", "around loops"])
def test_backward_passes(place):
    """Host calls of rules for derivatives, in the pass that runs backwards."""
    log = Log()
    kinds = [kind for kind in KINDS if "io" not in kind]  # JAX refuses these

    @jax.custom_vjp
    def f(y, i):
        return y

    def forward(y, i):
        for number, kind in enumerate(kinds):
            emit(log, kind, i + 1000 * number)
        return y, i

    def backward(i, g):
        for number, kind in enumerate(reversed(kinds)):
            emit(log, kind, i + 1000 * number + 500)
        return g, None

    f.defvjp(forward, backward)

    def loss(y):
        def do(i):
            nonlocal y
            y = f(y, i)

        def step(c, i):
            c = f(c, i)
            c = lax.cond(i > 0, lambda v: f(v, i + 100), lambda v: v, c)
            return f(c, i + 200), None

        if place != "scan":
            do(jnp.int32(50))
        y = lax.scan(step, y, jnp.arange(2))[0]
        if place == "around loops":
            y = jax.jit(f)(y, jnp.int32(60))
        return y

    compare(lambda x: jax.grad(loss)(jnp.float32(x)), log)


# --- Patched callbacks, feeds, and hash seeds -----------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_patched_callbacks_whatever_the_hash_seed(seed, run_python):
    """Sets of effects have an order that depends on it."""
    done = run_python(
        """
        import itertools, jax, jax.numpy as jnp, jax.experimental, hostcall as hc

        hc.patch_jax()
        seen = []
        note = lambda kind: lambda i: seen.append((kind, int(i)))
        io = jax.experimental.io_callback
        kinds = {
            "io": lambda i: io(note("io"), None, i, ordered=True),
            "unordered io": lambda i: io(note("unordered io"), None, i),
            "debug": lambda i: jax.debug.callback(note("debug"), i, ordered=True),
            "unordered debug": lambda i: jax.debug.callback(note("unordered debug"), i),
            "call": lambda i: hc.call(note("call"), None, i, order="ordered"),
        }
        for pair in itertools.permutations(kinds, 2):
            def step(c, i):
                for kind in pair:
                    kinds[kind](i)
                return c, None
            f = jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(3))[0])
            jax.block_until_ready(f(0.0))
            jax.effects_barrier()
            assert seen == [(k, i) for i in range(3) for k in pair], (pair, seen)
            seen.clear()
        """,
        env={"PYTHONHASHSEED": str(seed)},
    )
    assert done.returncode == 0


def test_unordered_callbacks_of_jaxs_own_code_stay_unordered(run_python):
    """As those of Pallas' interpreter. JAX promises no order, and one that failed must
    not keep the others from running.
    """
    done = run_python(
        """
        import functools
        import jax, jax.numpy as jnp, hostcall as hc
        from jax.experimental import io_callback

        hc.patch_jax()
        seen = []

        def jaxs(note):
            return functools.partial(jax.tree.map, note)

        def f(x, around=lambda i: None):
            def step(c, i):
                io_callback(jaxs(lambda i: seen.append(int(i))), None, i)
                around(i)
                return c, None
            io_callback(jaxs(lambda x: seen.append("before")), None, x)
            return jax.lax.scan(step, x, jnp.arange(3))[0]

        def with_own(x):
            return f(x, lambda i: hc.call(lambda i: None, None, i, order="unordered"))

        def hands_on_a_token(f):
            lines = jax.jit(f).lower(0.0).as_text().splitlines()
            return any("stablehlo.while" in line and "token" in line for line in lines)

        assert not hands_on_a_token(f)
        assert hands_on_a_token(with_own)
        jax.block_until_ready(jax.jit(f)(0.0))
        jax.effects_barrier()
        assert sorted(map(str, seen)) == ["0", "1", "2", "before"]
        """
    )
    assert done.returncode == 0


@pytest.mark.parametrize("kind", ["ordered call", "unordered call", "unordered io"])
def test_feeds(kind):
    """How many items have been taken, seen from calls around a feed."""
    taken = []
    source = [np.int32(i) for i in range(20)]

    def do(feed, i):
        def host(n):
            taken.append((int(n), feed.state()["item"]))

        face = hc.io_callback if "io" in kind else hc.call
        options = {} if "io" in kind else {"order": kind.split()[0]}
        face(host, None, i, **options)
        feed()
        face(host, None, i + 100, **options)

    with hc.feed(source) as feed:
        f = jax.jit(lambda x: (do(feed, x + 50), in_scan(lambda i: do(feed, i), x))[1])
        jax.block_until_ready(f(0))
        hc.barrier()
    assert taken == [(50, 0), (150, 1), (0, 1), (100, 2), (1, 2), (101, 3)]


def test_beside_jaxs_own_callbacks():
    """Those that are not patched, and ordered: in order with all host calls."""
    seen = []
    note = lambda kind: lambda i: seen.append((kind, int(i)))

    def do(i):
        hc.call(note("before"), None, i, order="unordered")
        jax.experimental.io_callback(note("JAX's own"), None, i, ordered=True)
        hc.call(note("after"), None, i, order="ordered")
        hc.io_callback(note("drop-in"), None, i)

    jax.block_until_ready(jax.jit(lambda x: around_loops(do, x))(0))
    hc.barrier()
    jax.effects_barrier()
    kinds = ["before", "JAX's own", "after", "drop-in"]
    assert [kind for kind, _ in seen] == kinds * (len(seen) // 4)
    numbers = [n for kind, n in seen if kind == "before"]
    assert [n for _, n in seen] == [n for n in numbers for _ in range(4)]


# --- Several devices ------------------------------------------------------------------

# Before, XLA ends the process for a token in a shard_map over some axes.
TOKENS_OVER_SOME_AXES = jaxlib.version.__version_info__ >= (0, 11, 2)
OVER_SEVERAL = [kind for kind in KINDS if kind != "ordered debug"]  # JAX refuses it


@pytest.mark.parametrize("place", PLACES)
def test_programs_that_the_compiler_splits(place):
    """One device makes the calls."""
    log = Log()
    do = EachAfterEach(log, OVER_SEVERAL)
    sharding = jax.NamedSharding(line(), jax.P("x"))

    def program(x):
        return PLACES[place](do, x[0]), x * 2

    with jax.disable_jit():
        program(jnp.zeros(4, np.int32))
    want = log.taken()
    x = jax.device_put(jnp.zeros(4, np.int32), sharding)
    jax.block_until_ready(jax.jit(program)(x))
    assert log.taken() == want


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("manual", ["all axes", "some axes"])
def test_each_device_of_a_shard_map(place, manual):
    log, kinds = Log(), OVER_SEVERAL
    if manual == "some axes":  # where JAX refuses drop-ins' io
        kinds = [kind for kind in OVER_SEVERAL if "io" not in kind]
        if jaxlib.version.__version_info__ < (
            0,
            11,
            2,
        ):  # where ordered ones are refused
            kinds = [kind for kind in kinds if kind.startswith("unordered")]

    def program(x):
        def do(i):
            for number, kind in enumerate(kinds):
                emit(log, kind, i + 10 * x[0], offset=1000 * number)

        if manual == "all axes":
            do = EachAfterEach(log, kinds, lambda i: i + 10 * x[0])
        return PLACES[place](do, jnp.int32(0)) + x

    def of(device, seen):
        return [(kind, n) for kind, n in seen if n // 10 % 10 == device]

    mesh, axes = line(), {"x"}
    if manual == "some axes":
        mesh, axes = grid(), {"x"}
    devices = mesh.shape["x"]
    run = jax.jit(
        jax.shard_map(
            program,
            mesh=mesh,
            in_specs=jax.P("x"),
            out_specs=jax.P("x"),
            axis_names=axes,
            check_vma=False,
        )
    )
    jax.block_until_ready(run(jnp.arange(devices, dtype=np.int32)))
    got = log.taken()
    with jax.disable_jit():
        program(jnp.array([0], np.int32))
    of_the_first = log.taken()
    for device in range(devices):
        want = [(kind, n + 10 * device) for kind, n in of_the_first]
        if manual == "all axes" or TOKENS_OVER_SOME_AXES:
            assert of(device, got) == want
        else:  # each jaxpr has an order of its own
            assert sorted(of(device, got)) == sorted(want)
