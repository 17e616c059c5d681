"""Under JAX's transformations, a tap delivers what plain Python would see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc

ORDERS = pytest.mark.parametrize("order", ["unordered", "ordered"])


class Taps:
    """A tap with this `order`; `taken()` returns what was delivered since the last
    time.
    """

    def __init__(self, order, **options):
        self.options = {"order": order, **options}
        self.seen = []

    def __call__(self, value):
        hc.tap(self.host, value, **self.options)

    def host(self, value):
        self.seen.extend(np.ravel(value).tolist())

    def taken(self):
        hc.barrier()
        taken, self.seen = self.seen, []
        # Unordered taps are in order only within a block.
        return taken if self.options["order"] == "ordered" else sorted(taken)


# --- Programs of a tap and a stand-in for jax.checkpoint -----------------------------


def programs(tap, remat):
    """Functions from scalar to scalar, by name."""

    def told(f):
        return lambda v: (tap(v), f(v))[1]

    double, negate, xs = told(lambda v: v * 2), lambda v: -v, np.float32([1, 2, 3])
    branches = [told(lambda v, n=n: v * n + n) for n in (1, 2, 3)]
    inner = jax.jit(double)
    layer = remat(lambda c: told(jnp.cos)(jnp.sin(c)))
    jvp, vjp = jax.custom_jvp(double), jax.custom_vjp(double)
    jvp.defjvp(lambda xs, dots: (jvp(*xs), dots[0] * 2))
    vjp.defvjp(lambda x: (double(x), None), lambda _, ct: (ct * 2,))

    def scan(**options):
        step = lambda c, y: (double(c) + y, c)
        return lambda x: lax.scan(step, x, xs, **options)[0]

    return {
        "straight": lambda x: double(double(x)) + double(x),
        "scan": scan(),
        "reversed scan": scan(reverse=True),
        "unused scan": lambda x: (scan()(x), x * 5)[1],
        "map": lambda x: lax.map(double, x * xs).sum(),
        "fori": lambda x: lax.fori_loop(0, 3, lambda i, v: double(v + i), x),
        "while": lambda x: lax.while_loop(told(lambda v: v < 20), double, x),
        "cond": lambda x: lax.cond(
            x < 1, double, told(negate), lax.cond(x > 1, double, negate, x)
        ),
        "switch": lambda x: lax.switch(2, branches, lax.switch(0, branches, x)),
        "nested jit": lambda x: inner(inner(x)),
        "unused jit": lambda x: (inner(x), inner(x), x * 5)[2],
        "remat": lambda x: layer(layer(x)),
        "remat in scan": lambda x: lax.scan(lambda c, y: (layer(c) * y, None), x, xs)[
            0
        ],
        "custom jvp": lambda x: jvp(jvp(x)),
        "custom vjp": lambda x: vjp(vjp(x)),
    }


NAMES = list(programs(None, jax.checkpoint))
FORWARD = [name for name in NAMES if name != "custom vjp"]
REVERSIBLE = [name for name in NAMES if name != "while"]
X = np.float32(1.25)


def oracle(name, order, *xs):
    """What plain Python sees if the rows run one after the other."""
    seen = []
    with jax.disable_jit():
        for x in xs:
            programs(lambda v: seen.append(float(v)), lambda f: f)[name](jnp.float32(x))
    assert seen
    return seen if order == "ordered" else sorted(seen)


EAGER_AND_JIT = (lambda f: f, jax.jit)


def in_turn(number, names=NAMES):
    """(name, order, mode) for each program: over four transformations, numbered, each
    program has both orders in both modes, and each transformation has them too.
    """
    ways = [(order, mode) for order in ("unordered", "ordered") for mode in (0, 1)]
    return pytest.mark.parametrize(
        ("name", "order", "mode"),
        [(name, *ways[(NAMES.index(name) + number) % 4]) for name in names],
    )


def check(name, order, mode, transform):
    taps = Taps(order)
    f = EAGER_AND_JIT[mode](transform(programs(taps, jax.checkpoint)[name]))
    jax.block_until_ready(f(X))
    np.testing.assert_allclose(taps.taken(), oracle(name, order, X), rtol=1e-6)


@in_turn(0)
def test_a_run_delivers_what_python_sees(name, order, mode):
    check(name, order, mode, lambda f: f)


@in_turn(1, FORWARD)
def test_jvp_delivers_primals_once(name, order, mode):
    check(name, order, mode, lambda f: lambda x: jax.jvp(f, (x,), (x * 3,)))


@in_turn(2, [name for name in FORWARD if name != "while"])
def test_linearize_delivers_primals_once(name, order, mode):
    check(name, order, mode, lambda f: lambda x: [*map(jax.linearize(f, x)[1], (x, x))])


@ORDERS
def test_a_linearized_while_delivers_once(order):
    # JAX can't keep the values of a loop of unknown length, so its linear program is the
    # whole loop. JAX's own callbacks run with it; taps do not.
    taps = Taps(order)
    f = programs(taps, jax.checkpoint)["while"]
    jax.block_until_ready(f(X))
    once = taps.taken()
    _, linear = jax.linearize(f, X)
    np.testing.assert_allclose(taps.taken(), once, rtol=1e-6)
    jax.block_until_ready(linear(X))
    assert len(taps.taken()) == 0


@in_turn(3, REVERSIBLE)
def test_reverse_derivatives_deliver_primals_once(name, order, mode):
    check(name, order, mode, jax.grad)


# --- vmap ----------------------------------------------------------------------------


HOW = [  # each pair of two of them
    ("rows", "each", "ordered"),
    ("rows", "batched", "unordered"),
    ("rows of grad", "each", "unordered"),
    ("rows of grad", "batched", "ordered"),
    ("grad of rows", "each", "ordered"),
    ("grad of rows", "batched", "unordered"),
]


@pytest.mark.parametrize("name", [name for name in REVERSIBLE if name != "cond"])
@pytest.mark.parametrize(("how", "rows", "order"), HOW)
def test_vmap_delivers_what_each_row_would(name, rows, how, order):
    taps = Taps(order, rows=rows)
    f = programs(taps, jax.checkpoint)[name]
    batch = {
        "rows": jax.vmap(f),
        "rows of grad": jax.vmap(jax.grad(f)),
        "grad of rows": jax.grad(lambda xs: jax.vmap(f)(xs).sum()),
    }[how]
    xs = np.array([0.5, X, 2], np.float32)
    want = sorted(oracle(name, order, *xs))
    # In turn, so that each program and each line of HOW has both modes.
    mode = (NAMES.index(name) + HOW.index((how, rows, order)) // 2) % 2
    jax.block_until_ready(EAGER_AND_JIT[mode](batch)(xs))
    np.testing.assert_allclose(sorted(taps.taken()), want, rtol=1e-6)


# in_axes of the outer and of the inner vmap, over two arrays.
AXES = [
    ((0, None), (0, None)),
    ((1, 0), (None, 0)),
    ((-1, None), (1, 0)),
    ((None, 0), (0, None)),
    ((0, 1), (0, 0)),
    ((2, 2), (-1, -1)),
]
BATCHES = np.random.default_rng(0).integers(0, 9, (2, 2, 4, 3), np.int32)


def in_place(batch, outer, inner):
    """The argument of which vmap takes `batch[i, j]`, with index 0 for a missing axis."""
    parts = [p[0] if inner is None else np.moveaxis(p, 0, inner) for p in batch]
    return parts[0] if outer is None else np.stack(parts, outer)


def wanted(a, b):
    return (a.sum() + b.sum()) % 3 != 0


@pytest.mark.parametrize(("outer", "inner"), AXES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "where"])
@pytest.mark.parametrize("rows", ["each", "batched"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_nested_vmap_and_what_current_says_of_it(wrap, rows, masked, outer, inner):
    seen = []

    def f(*arrays):
        host = lambda *arrays: seen.append((hc.current(), arrays))
        hc.tap(host, *arrays, where=wanted(*arrays) if masked else None, rows=rows)

    wrap(jax.vmap(jax.vmap(f, inner), outer))(*map(in_place, BATCHES, outer, inner))
    hc.barrier()
    # For each array and each axis: all rows, or the only one.
    has = [(o is not None, i is not None) for o, i in zip(outer, inner)]
    views = [
        batch[tuple(slice(None) if axis else slice(1) for axis in axes)]
        for batch, axes in zip(BATCHES, has)
    ]
    rows_of = [np.broadcast_to(view, BATCHES[0].shape) for view in views]
    kept = [
        at
        for at in np.ndindex(2, 4)
        if not masked or wanted(*(batch[at] for batch in rows_of))
    ]
    assert 0 < len(kept) < 8 or not masked
    if rows == "each":
        assert [current.row for current, _ in seen] == kept
        assert {(c.transforms, c.rows) for c, _ in seen} == {((), None)}
        got = [list(arrays) for _, arrays in seen]
        want = [[batch[at] for batch in rows_of] for at in kept]
    else:
        ((current, arrays),) = seen
        assert current.row == ()
        assert current.transforms == tuple(
            ("batch", {"batch_dims": tuple(None if d is None else 0 for d in axes)})
            for axes in (inner, outer)
        )
        assert (current.rows is not None) == masked
        got = list(arrays)
        if masked:
            assert list(zip(*current.rows, strict=True)) == kept
            want = [
                np.array([batch[at] for at in kept]) if any(axes) else batch[0, 0]
                for batch, axes in zip(rows_of, has)
            ]
        else:
            want = [
                view.squeeze(tuple(n for n in range(2) if not axes[n]))
                for view, axes in zip(views, has)
            ]
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("rows", ["each", "batched"])
@ORDERS
def test_where_keeps_out_what_vmap_makes_of_conditions(rows, order):
    taps = Taps(order, rows=rows)

    def f(x):
        tap = lambda v, where: hc.tap(taps.host, v, **taps.options, where=where)
        x = lax.cond(
            x > 1,
            lambda v: (tap(v, x > 1), v + 1)[1],
            lambda v: (tap(-v, x <= 1), v)[1],
            x,
        )
        return lax.while_loop(lambda v: v < 4, lambda v: (tap(v, v < 4), v + 1)[1], x)

    xs = np.array([0.0, 2.0, 1.0, 5.0], np.float32)
    # Both branches; then, in each iteration, the rows that are not done.
    want = [2, 5, 0, -1, 0, 3, 1, 1, 2, 2, 3, 3]
    for g in (jax.vmap(f), jax.jit(jax.vmap(f))):
        np.testing.assert_array_equal(g(xs), [4, 4, 4, 6])
        got = taps.taken()
        assert sorted(got) == sorted(want)
        if order == "ordered":
            assert sorted(got[:4]) == sorted(want[:4])  # the branches in any order
            assert got[4:] == want[4:]


@ORDERS
def test_without_where_vmap_runs_both_branches_for_all_rows(order):
    taps = Taps(order)
    xs = np.array([0.5, 2], np.float32)
    f = programs(taps, jax.checkpoint)["cond"]
    jax.jit(jax.vmap(f))(xs)
    # The inner cond taps x in one branch, the outer one -0.5 and 4 in both branches.
    assert sorted(taps.taken()) == sorted([0.5, 2, -0.5, 4, -0.5, 4])


# --- remat ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("loop", [False, True], ids=["plain", "scan"])
@ORDERS
def test_remat_repeat_taps_again_what_the_backward_pass_computes(order, loop, wrap):
    taps = Taps(order, remat="repeat")

    @jax.checkpoint
    def layer(x):
        y = jnp.sin(x)
        taps(y)
        return jnp.sin(y)

    def stack(x):
        if loop:
            return lax.scan(lambda c, _: (layer(c), None), x, None, length=3)[0]
        return layer(x)

    values = [np.sin(X)]
    for _ in range(2 if loop else 0):
        values.append(np.sin(np.sin(values[-1])))
    again = values[::-1]  # back from the last iteration
    for f, want in ((stack, values), (jax.grad(stack), values + again)):
        wrap(f)(X)
        want = want if order == "ordered" else sorted(want)
        np.testing.assert_allclose(taps.taken(), want, rtol=1e-6)
