"""An eager call is what a program would make of it.

Each row of the table is called eagerly and in a compiled program: values, dtypes, what
the function gets, `hc.current()`, the counters and the errors are the same.
"""

import asyncio
import dataclasses
import gc
import inspect
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import hostcall as hc

X = jnp.arange(3, dtype=jnp.float32)
LIKE = jax.ShapeDtypeStruct((3,), np.float32)


def doubled(x):
    return 2 * np.asarray(x)


async def awaited(x):
    await asyncio.sleep(0)
    return 2 * x


def written(x, out):
    out[...] = 2 * x


def of_dlpack(x):
    return 2 * np.from_dlpack(x)


def of_tree(tree, how, by=1):
    return {how: tree["x"] * by, "n": tree["n"]}


def refuses(x):
    raise ValueError("too large")


def with_nan(x):
    return x / np.float32(0) * 0


@dataclasses.dataclass
class Row:
    """
    Attributes:
        function: what is called.
        result: its declared result.
        args: its arguments.
        options: of `hc.call`.
        host: options of `hc.host`, if the function goes through that.
        settings: of JAX.
    """

    function: Any = doubled
    result: Any = LIKE
    args: tuple[Any, ...] = (X,)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    host: dict[str, Any] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def call(self, *args):
        function = self.function
        if self.host is not None:
            function = hc.host(function, **self.host)
        return hc.call(function, self.result, *args, **self.options)


ROWS = {
    "pure": Row(),
    "unordered": Row(options={"order": "unordered"}),
    "ordered": Row(options={"order": "ordered"}),
    "no result": Row(print, None, ("",), {"order": "ordered"}),
    "arrays of JAX": Row(options={"arrays": "jax"}),
    "arrays of DLPack": Row(of_dlpack, options={"arrays": "dlpack"}),
    "lent": Row(options={"lend": True}),
    "lent results": Row(written, options={"lend": "out"}),
    "a true mask": Row(options={"where": True}),
    "a false mask": Row(options={"where": False, "fill": 7}),
    "a tag": Row(options={"tag": "doubled by eager calls"}),
    "a tree, a static argument and a keyword": Row(
        of_tree,
        {"x": LIKE, "n": 0},
        ({"x": X, "n": 3}, "x"),
        {"by": 2},
    ),
    "a NumPy array": Row(args=(np.float32([1, 2, 3]),)),
    "a number": Row(result=0.0, args=(2.0,)),
    "a bool": Row(np.isfinite, jax.ShapeDtypeStruct((3,), bool)),
    "bfloat16": Row(
        lambda x: np.asarray(x, ml_dtypes.bfloat16),
        jax.ShapeDtypeStruct((3,), jnp.bfloat16),
    ),
    "complex": Row(lambda x: x * 1j, jax.ShapeDtypeStruct((3,), np.complex64)),
    "no elements": Row(
        result=jax.ShapeDtypeStruct((0, 2), np.float32), args=(np.ones((0, 2)),)
    ),
    "a typed key": Row(
        lambda key: key, jax.random.key(0), (jax.random.key(3),), {"arrays": "jax"}
    ),
    "on a device": Row(options={"on": jax.devices()[0]}),
    "a coroutine": Row(awaited, host={}),
    "a limit": Row(host={"timeout": 60.0}),
    "in float64": Row(host={"float64": True}),
    "parallel": Row(host={"vmap_method": "parallel"}),
    "64 bits": Row(
        result=jax.ShapeDtypeStruct((3,), np.float64),
        args=(np.arange(3.0),),
        settings={"enable_x64": True},
    ),
    "a signature": Row(np.sum, "(n)->()", (np.ones((2, 3), np.float32),)),
    "a ufunc": Row(np.hypot, ..., (X, 2.0)),
    "it raises": Row(refuses),
    "another shape": Row(lambda x: x[:2]),
    "another kind": Row(lambda x: "text"),
    "nothing where something is declared": Row(lambda x: None),
    "too large for the dtype": Row(
        lambda x: np.int64([2**40]), jax.ShapeDtypeStruct((1,), np.int32)
    ),
    "a lent array is written to": Row(
        lambda x: x.fill(1), None, options={"lend": True, "order": "ordered"}
    ),
    "NaNs are refused": Row(with_nan, settings={"debug_nans": True}),
}


def outcome(row, call):
    """(value, text and type of what it raises, the error that is kept)."""
    value = text = kind = kept = None
    before = hc.errors.last_error()
    try:
        value = jax.block_until_ready(call(*row.args))
        hc.barrier()  # on a GPU, the failure of a program without results comes later
    except Exception as error:
        text = str(error)
        kind = type(error)
    last = hc.errors.last_error()
    if last is not before:
        kept = type(last), str(last)
    return value, text, kind, kept


def compiled(row):
    """The same in a compiled program; what is no array is part of the program."""
    leaves, treedef = jax.tree.flatten(row.args)
    static = [isinstance(leaf, str) for leaf in leaves]
    arrays = [leaf for leaf, stays in zip(leaves, static, strict=True) if not stays]

    @jax.jit
    def program(*arrays):
        rest = iter(arrays)
        filled = [
            leaf if stays else next(rest)
            for leaf, stays in zip(leaves, static, strict=True)
        ]
        return row.call(*treedef.unflatten(filled))

    return lambda *args: program(*arrays)


def described(value):
    """Values, dtypes and places of a result."""

    def leaf(x):
        data = (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        )
        return str(x.dtype), x.shape, x.devices(), np.asarray(data).tolist()

    return jax.tree.map(leaf, value)


def under(settings):
    if settings.get("enable_x64"):
        return jax.enable_x64(True)
    return jax.debug_nans(bool(settings.get("debug_nans")))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_an_eager_call_does_what_a_program_does(row):
    with under(row.settings):
        value, text, kind, kept = outcome(row, row.call)
        of_program, text_of_program, kind_of_program, kept_of_program = outcome(
            row, compiled(row)
        )
    assert (text is None) == (text_of_program is None)
    assert described(value) == described(of_program)
    if kind is FloatingPointError:
        assert kind_of_program is FloatingPointError
    elif text is not None:
        # A program raises a JaxRuntimeError, and keeps the exception itself.
        assert kept == (kind, text)
        assert kept_of_program[0] is kind
        assert kept_of_program[1] == text


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("order", ["pure", "unordered", "ordered"])
def test_what_the_function_finds_and_what_is_counted(wrap, order):
    seen = []

    def named(x):
        current = hc.current()
        seen.append(
            (
                current.name,
                current.order,
                current.device,
                current.devices,
                current.row,
                current.grid,
                type(x),
            )
        )
        return x

    tag = f"{wrap.__name__}, {order}"
    f = wrap(lambda x: hc.call(named, LIKE, x, order=order, tag=tag))
    for _ in range(3):
        jax.block_until_ready(f(X))
    hc.barrier()
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert hc.monitor.stats()[tag].calls == 3


# --- Host functions, taps and prints --------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"result": hc.results.like(0)},
        {"result": LIKE},
        {"result": "()->()"},
        {"result": LIKE, "order": "unordered"},
        {"result": LIKE, "order": "ordered", "tag": "an ordered host function"},
        {"result": LIKE, "arrays": "jax"},
        {"result": LIKE, "lend": True},
        {"result": LIKE, "float64": True},
        {"result": LIKE, "vmap_method": "expand_dims"},
        {"result": LIKE, "timeout": 60.0},
    ],
    ids=str,
)
def test_an_eager_host_function_does_what_a_program_does(options):
    seen = []

    def named(x):
        current = hc.current()
        seen.append((current.name, current.order, current.device, type(x), x.dtype))
        return (2 * np.asarray(x)).astype(np.float32)

    f = hc.host(named, **options)
    of_calls = [described(f(X)), described(jax.jit(f)(X))]
    hc.barrier()
    assert of_calls[0] == of_calls[1]
    calls = len(seen) // 2  # a signature says what an item is, and each is a call
    assert calls == (3 if options["result"] == "()->()" else 1)
    assert seen[:calls] == seen[calls:]


TAPS = {
    "unordered": {},
    "ordered": {"order": "ordered"},
    "arrays of JAX": {"arrays": "jax"},
    "arrays of DLPack": {"arrays": "dlpack"},
    "a true mask": {"where": True},
    "a false mask": {"where": False},
    "a full queue": {"when_full": "drop_oldest"},
    "each row": {"rows": "each"},
    "repeated": {"remat": "repeat"},
    "every execution": {"every": 1},
    "all of them": {"sample": 1.0},
    "one of them always": {"every": 1000, "always": True},
    "in batches": {"batch": 1},
    "a tag": {"tag": "taps, eager and not"},
    "on a device": {"on": jax.devices()[0]},
    "in blocks": {"on": "shards"},
}


def test_no_option_of_a_tap_is_left_out():
    options = {*inspect.signature(hc.tap).parameters} - {"fn", "args", "kwargs"}
    assert {name for row in TAPS.values() for name in row} == options


@pytest.mark.parametrize("options", TAPS.values(), ids=TAPS)
def test_an_eager_tap_does_what_a_program_does(options):
    seen = []

    def note(x):
        current = hc.current()
        value = np.from_dlpack(x) if options.get("arrays") == "dlpack" else x
        found = current.name, current.order, current.device, type(x)
        seen.append((*found, np.asarray(value).tolist()))

    hc.tap(note, X, **options)
    hc.barrier()
    eagerly = seen.copy()
    seen.clear()
    jax.jit(lambda x: hc.tap(note, x, **options))(X)
    hc.barrier()
    assert eagerly == seen
    assert len(seen) == (options.get("where") is not False)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_tap_that_fails_is_raised_by_the_next_barrier(wrap):
    wrap(lambda x: hc.tap(refuses, x))(X)
    with pytest.raises(ValueError, match="too large"):
        hc.barrier()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_a_print_writes(wrap, capfd):
    wrap(lambda x: hc.print("x = {}, {}", x, x[0], order="ordered"))(X)
    hc.barrier()
    assert capfd.readouterr().out == "x = [0. 1. 2.], 0.0\n"


def test_numbers_that_jax_has_in_classes_of_its_own():
    """Under grad, a Python number reaches the call as one of these."""

    @jax.custom_jvp
    def halved(x):
        return hc.call(lambda x: np.asarray(x) / 2, jax.ShapeDtypeStruct((), "f4"), x)

    halved.defjvp(lambda primals, tangents: (halved(*primals), tangents[0] / 2))
    assert float(halved(0.5)) == 0.25
    assert float(jax.grad(halved)(0.5)) == 0.5
    assert float(jax.value_and_grad(halved)(0.5)[0]) == 0.25


def test_nothing_of_an_eager_call_is_kept():
    """The function goes with the last reference of the user's."""

    def make():
        def named(x):
            return x

        hc.call(named, LIKE, X)
        hc.tap(named, X)
        hc.host(named, result=LIKE)(X)
        hc.barrier()
        return weakref.ref(named)

    reference = make()
    hc.call(doubled, LIKE, X)  # the last failure or call may hold a frame
    gc.collect()
    assert reference() is None


def test_eager_calls_and_programs_keep_one_order():
    seen = []
    note = jax.jit(lambda n: hc.call(seen.append, None, n, order="ordered"))
    for n in range(0, 12, 3):
        note(n)
        hc.call(seen.append, None, n + 1, order="ordered")
        hc.tap(lambda n: seen.append(n), n + 2, order="ordered")
        hc.barrier()
    assert [int(n) for n in seen] == list(range(12))
