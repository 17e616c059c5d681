"""Mistakes in a host function, found when it is traced, with what to write instead."""

from __future__ import annotations

import functools
import inspect
import operator
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from platforms import without_xlas_words

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)
X = np.float32(2)


def refused(run, *args):
    with pytest.raises(hc.errors.SpecError) as caught:
        run(*args)
    return str(caught.value).removeprefix("hostcall: ")


# --- Nothing needs the host function -------------------------------------------------


@pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("result", [None, (), {}, [None]], ids=repr)
def test_a_pure_call_without_results(mode, result):
    seen = []

    def log(x):
        seen.append(float(x))

    text = (
        "`test_a_pure_call_without_results.<locals>.log` returns nothing, and {} calls"
        ' it with order="pure", the default. A program drops such a call, since nothing'
        " needs its results. To send values out without waiting, write"
        " hc.tap(test_a_pure_call_without_results.<locals>.log, ...); for a call that"
        ' the program waits for, add order="ordered" (or "unordered")'
        "\n[hc-dropped] python -m hostcall explain hc-dropped"
    )
    call = mode(lambda x: hc.call(log, result, x))
    assert refused(call, X) == text.format("hc.call")
    with pytest.raises(
        hc.errors.SpecError, match="`f` returns nothing, and hc.host calls"
    ):
        hc.host(log, result=result, name="f")
    assert seen == []
    mode(lambda x: hc.call(lambda x: log(x) or result, result, x, order="ordered"))(X)
    jax.effects_barrier()
    assert seen == [2]


@pytest.mark.parametrize("result", ["infer", lambda x: None], ids=["infer", "function"])
def test_a_pure_host_function_that_turns_out_to_return_nothing(result):
    host = hc.host(lambda x: None, result=result, name="f")
    assert "`f` returns nothing, and hc.host calls it" in refused(jax.jit(host), X)
    tree = hc.host(lambda x: x, result=hc.results.same_tree(0))
    assert tree({}) == {}


# --- Traced values ---------------------------------------------------------------------


FACES = {
    "call": lambda fn, *args: hc.call(fn, F32, *args),
    "tap": hc.tap,
    "tap_through": hc.tap_through,
    "tap_tangent": hc.derivatives.tap_tangent,
    "host": lambda fn, *args: hc.host(fn, result=F32)(*args),
}


def by_name(x):
    loss = x * 2
    return lambda v: np.float32(v + loss), "uses `loss`", "loss"


def by_f_string(x):
    loss = x * 2
    return lambda v: print(f"{v}: {loss:.3f}"), "uses `loss`", "loss"


def by_method(x):
    loss = x * 2
    return lambda v: v + loss.sum(), "uses `loss`", "loss"


def in_an_inner_function(x):
    loss = x * 2

    def fn(v):
        return sum(v + loss for v in (v,)) + (lambda: loss)()

    return fn, "uses `loss`", "loss"


def through_another(x):
    loss = x * 2

    def helper():
        return loss

    return lambda v: v + helper(), "uses `helper`, which uses `loss`", "loss"


def by_item(x):
    metrics = {"loss": [0, x]}
    return lambda v: v + metrics["loss"][1], "uses `metrics['loss'][1]`", None


def by_item_from_the_end(x):
    metrics = [0, x]
    return lambda v: v + metrics[-1], "uses `metrics[-1]`", None


def container_in_f_string(x):
    metrics = {"loss": x}
    return lambda v: print(f"{metrics}"), "uses `metrics`", "metrics"


def container_printed(x):
    metrics = [x]
    return lambda v: print(metrics), "uses `metrics`", "metrics"


def by_default(x):
    return lambda v, loss=x: v + loss, "uses the default of `loss`", "loss"


def by_keyword_default(x):
    return lambda v, *, loss=x: v + loss, "uses the default of `loss`", "loss"


def by_partial(x):
    given = functools.partial(operator.add, x)
    return given, "uses argument 0 of its functools.partial", "x"


def by_partial_keyword(x):
    given = functools.partial(lambda v, loss: v, loss=(1, x))
    return given, "uses `loss` of its functools.partial", "x"


def around_a_method(x):
    class Logger:
        def log(self, v):
            return v + x

    return Logger().log, "uses `x`", "x"


USES = [
    by_name, by_f_string, by_method, in_an_inner_function, through_another, by_item,
    by_item_from_the_end,
    container_in_f_string, container_printed, by_default, by_keyword_default,
    by_partial, by_partial_keyword, around_a_method,
]  # fmt: skip
TRACED = {
    "jit": lambda f: jax.jit(f)(X),
    "vmap": lambda f: jax.vmap(f)(np.ones(3, np.float32)),
    "grad": lambda f: jax.grad(f)(X),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, np.ones(3, np.float32)),
}


@pytest.mark.parametrize("make", USES, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("face", "traced"),
    [*((face, "jit") for face in FACES), *(("tap", traced) for traced in TRACED)],
)
def test_a_traced_value_from_around_the_function(face, make, traced):
    def f(x):
        fn, how, name = make(x)
        text = refused(FACES[face], fn, x)
        assert f" {how}, a traced value (float32[]) of the program around it" in text
        assert "It has no value when " in text
        if name is not None:
            assert f"..., {name})" in text
            assert text.endswith(
                ", with a parameter for it"
                "\n[hc-traced] python -m hostcall explain hc-traced"
            )
        return x

    TRACED[traced](f)


def test_rules_in_host_code():
    def f(x):
        host = hc.host(lambda v: v, result=F32, name="f")
        rule = lambda primals, tangents: tangents[0] * x
        text = refused(host.defjvp, rule)
        assert "uses `x`, a traced value" in text
        assert "Pass it as an argument: f(..., x)" in text
        assert "uses `x`" in refused(host.defvjp, lambda v: (v, v), lambda r, ct: (x,))
        host.defjvp(rule, where="jax")  # JAX code may use traced values
        return jax.grad(host)(x)

    assert jax.jit(f)(X) == 2


def test_the_whole_message():
    def f(x):
        loss = x * 2
        log = lambda: print(f"loss {loss}")
        hc.tap(log)

    assert refused(jax.jit(f), X) == (
        "`test_the_whole_message.<locals>.f.<locals>.<lambda>` uses `loss`, a traced"
        " value (float32[]) of the program around it. It has no value when"
        " `test_the_whole_message.<locals>.f.<locals>.<lambda>` runs on the host. Pass"
        " it as an argument:"
        " hc.tap(test_the_whole_message.<locals>.f.<locals>.<lambda>, ..., loss), with"
        " a parameter for it"
        "\n[hc-traced] python -m hostcall explain hc-traced"
    )


@pytest.mark.parametrize("face", sorted(set(FACES) - {"tap_tangent"}))
def test_a_text_with_a_traced_value(face):
    def f(x):
        text = refused(FACES[face], lambda v: 0, f"loss {x}")
        assert " is given the text 'loss JitTracer(float32[])', which contains" in text
        assert "an f-string is formatted while the program is traced" in text
        return x

    jax.jit(f)(X)


class Counts:
    def __init__(self, first=0):
        self.n = first

    def add(self, k):
        return np.float32(self.n + k)


@pytest.mark.parametrize("partial", [False, True])
def test_the_factory_of_an_object(partial):
    def f(k):
        make = functools.partial(Counts, k) if partial else lambda: Counts(k)
        text = refused(lambda: hc.Object(make, methods={"add": F32}))
        how = "argument 0 of its functools.partial" if partial else "`k`"
        assert f" uses {how}, a traced value (float32[]) of the program" in text
        name = "x" if partial else "k"
        assert text.endswith(
            "Make the object before the program, and give its methods what the program"
            f" computes: env.step(..., {name})"
            "\n[hc-traced] python -m hostcall explain hc-traced"
        )
        return hc.Object(lambda: Counts(k.ndim), methods={"add": F32}).add(k)

    assert jax.jit(f)(X) == 2


@pytest.mark.parametrize("spec", [F32, None], ids=["spec", "no spec"])
def test_the_source_of_a_feed(spec):
    def f(k):
        text = refused(lambda: hc.feed(lambda: (k * i for i in range(3)), spec))
        assert " uses `k`, a traced value (float32[]) of the program around it" in text
        assert text.endswith(
            "Make the feed before the program, and compute with its items and k in the"
            " program: item, ok = feed()"
            "\n[hc-traced] python -m hostcall explain hc-traced"
        )
        return k

    jax.jit(f)(X)


def shape(x):
    return lambda v: v + np.zeros(x.shape, x.dtype).sum() + x.ndim + x.size


def asked(x):
    return lambda v: v if np.ndim(x) == 0 and isinstance(x, jax.Array) else len(x)


def absent(x):
    return lambda v: v if x is not None else 2 * v


def absent_as_a_value(x):
    def fn(v):
        y = x is None
        return v + y

    return fn


def not_used(x):
    def fn(v):
        def never():
            nonlocal x
            x = 3

        return v

    return fn


def shape_of_an_item(x):
    metrics = {"loss": x}
    return lambda v: v + np.zeros(metrics["loss"].shape) + len(metrics)


def keys(x):
    metrics = {"loss": x, 1: 2}
    return lambda v: v + (1 in metrics) + metrics[1] + len(list(metrics.keys()))


def length_of_an_item(x):
    metrics = {"loss": x}
    return lambda v: v + isinstance(metrics["loss"], jax.Array)


def shape_in_another(x):
    helper = lambda: x.shape
    return lambda v: v + len(helper())


def itself(x):
    def fn(v, again=True):
        return fn(v, False) if again else v

    return fn


def emptied(x):
    if x is None:
        y = x
    return lambda v: v if v > 0 else y


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    "make",
    [shape, asked, absent, absent_as_a_value, not_used, shape_of_an_item, keys,
     length_of_an_item,
     shape_in_another, itself, emptied],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_what_is_known_of_a_traced_value_may_be_used(face, make):
    got = []

    def f(x):
        fn = make(x)
        outs = FACES[face](lambda v: got.append(fn(v)) or np.float32(0), x)
        hc.call(fn, F32, x)  # checks the function
        return outs

    jax.block_until_ready(jax.jit(f)(X))
    jax.effects_barrier()
    hc.barrier()


def test_the_search_skips_large_objects_and_cycles():
    class Large(list):
        def __iter__(self):
            raise AssertionError("nobody prints it")

    seen, ring = Large(range(1000)), [0] * 1000
    ring.append(ring)

    def f(x):
        hc.tap(lambda v: seen.append(v), x)
        hc.tap(lambda v: f"{ring} {seen[5]}", x)
        ring.insert(5, x)
        assert "uses `ring`" in refused(hc.tap, lambda: print(ring))
        return x

    jax.jit(f)(X)
    hc.barrier()
    assert seen[-1] == X


LEAKED = {}
LEAKS = {
    "computes": lambda x: LEAKED["x"] * x,
    "converts": lambda x: np.cos(LEAKED["x"]),
    "decides": lambda x: x if LEAKED["x"] else -x,
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_traced_value_of_a_global_variable(name):
    """It is not looked for while the program is traced; the error says what to write."""
    fn = LEAKS[name]

    @jax.jit
    def f(x):
        LEAKED["x"] = x
        return hc.call(fn, F32, x)

    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        f(jnp.float32(1)).block_until_ready()
    LEAKED.clear()
    said = without_xlas_words(str(error.value))
    assert (
        "Error: hostcall: `<lambda>` uses a traced value, by a global variable" in said
    )
    assert "Pass it as an argument (in callback `<lambda>`, called at" in said
    assert "JAX says: " in said
    assert said.endswith("[hc-traced] python -m hostcall explain hc-traced")


def test_a_traced_value_of_a_function_that_the_host_function_jits():
    own = lambda v: jax.jit(lambda y: np.cos(y))(v)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.jit(lambda x: hc.call(own, F32, x))(jnp.float32(1)).block_until_ready()
    said = str(error.value)
    assert "or in a function that it traces itself. Such a value has no number." in said
    assert "JAX says: The numpy.ndarray conversion method" in said


def test_outside_of_a_trace_nothing_is_traced():
    leaked = []
    jax.jit(leaked.append)(X)
    fn = lambda v: v if v > 0 else leaked
    assert hc.call(fn, F32, X) == 2


# --- Arguments -------------------------------------------------------------------------


def two(a, b=1, /, c=2, *, d=3):
    return np.float32(a)


class Counter:
    def __init__(self):
        self.n = 0

    def add(self, k, twice=False):
        self.n += int(k)
        return np.float32(self.n)


WRONG = {
    "misspelt": (
        lambda x: hc.tap(lambda v: None, x, evry=10),
        "hc.tap calls `<lambda>` with the keyword evry=, which it does not take."
        " `<lambda>` takes (v). Did you mean every=?",
    ),
    "misspelt, to a ufunc": (
        lambda x: hc.call(np.sqrt, F32, x, ordr="ordered"),
        "hc.call calls `sqrt` with the keyword ordr=, which it does not take. `sqrt`"
        " takes (x, /, out=None, *,",
    ),
    "too many for a ufunc": (
        lambda x: hc.call(np.sqrt, F32, x, x, x),
        "hc.call calls `sqrt` with 3 positional arguments.",
    ),
    "the function's, misspelt": (
        lambda x: hc.call(lambda v, scale: v, F32, x, scael=10),
        "hc.call calls `<lambda>` with the keyword scael=, which it does not take."
        " `<lambda>` takes (v, scale). Did you mean scale=?",
    ),
    "JAX's ordered": (
        lambda x: hc.call(lambda v: v, F32, x, ordered=True),
        "hc.call calls `<lambda>` with the keyword ordered=, which it does not take."
        ' `<lambda>` takes (v). In hc.call, JAX\'s ordered= is order="ordered"',
    ),
    "JAX's vectorized": (
        lambda x: hc.call(lambda v: v, F32, x, vectorized=True),
        'vectorized= is vmap_method="expand_dims"',
    ),
    "JAX's result": (
        lambda x: hc.call(lambda v: v, F32, x, result_shape_dtypes=F32),
        "result_shape_dtypes= is the second argument, result",
    ),
    "JAX's side effect": (
        lambda x: hc.call(lambda v: v, F32, x, has_side_effect=True),
        'has_side_effect= is order="unordered"',
    ),
    "JAX's ordered, of a tap": (
        lambda x: hc.tap(lambda v: None, x, ordered=True),
        'In hc.tap, JAX\'s ordered= is order="ordered"',
    ),
    "JAX's sharding": (
        lambda x: hc.call(lambda v: v, F32, x, sharding=None),
        "sharding= is on=device",
    ),
    "JAX's partitioned": (
        lambda x: hc.tap(lambda v: None, x, partitioned=True),
        'partitioned= is on="shards"',
    ),
    "of another face": (
        lambda x: hc.tap(lambda v: None, x, vmap_method="sequential"),
        'vmap_method= is rows="batched", or "each"',
    ),
    "like nothing": (
        lambda x: hc.tap(lambda v: None, x, zzz=1),
        "The options of hc.tap are always, arrays, batch, every, on, order, remat, rows,"
        " sample, tag, when_full, where",
    ),
    "printed": (
        lambda x: hc.print("x {}", x, evry=10),
        "does not use evry. Each argument needs a field in the format, and an f-string"
        " has none left. Write hc.print('x = {}', x). Did you mean every=?",
    ),
    "printed JAX's way": (
        lambda x: hc.print("x {}", x, ordered=True),
        'In hc.print, JAX\'s ordered= is order="ordered"',
    ),
    "too many": (
        lambda x: hc.tap(lambda v: None, x, x),
        "hc.tap calls `<lambda>` with 2 positional arguments. `<lambda>` takes (v)."
        " Arguments and parameters must match: hc.tap(<lambda>, *args)",
    ),
    "too few": (
        lambda x: hc.call(lambda a, b: a, F32, x),
        "hc.call calls `<lambda>` with 1 positional argument. `<lambda>` takes (a, b)."
        " Arguments and parameters must match: hc.call(<lambda>, result, *args)",
    ),
    "result forgotten": (
        lambda x: hc.call(lambda v: v, x),
        "with 0 positional arguments. `<lambda>` takes (v). The first array (float32[])"
        " was taken for the result. What `<lambda>` returns is described before its"
        " arguments: hc.call(<lambda>, result, *args), where `result` is a"
        " jax.ShapeDtypeStruct(shape, dtype), or an array of that shape and dtype",
    ),
    "result forgotten, one of several arguments": (
        lambda x: hc.call(np.add, jnp.asarray(x), x),
        "`add` takes (x1, x2, /, out=None, *",
    ),
    "result forgotten, of NumPy": (
        lambda x: hc.call(np.sort, x[None]),
        "The first array (float32[1]) was taken for the result.",
    ),
    "no parameter for the lent results": (
        lambda x: hc.call(lambda v: v, F32, x, lend="out"),
        "hc.call calls `<lambda>` with 1 positional argument and out=. `<lambda>` takes"
        ' (v). lend="out" also passes out=, the arrays of the results, for the function'
        " to write into: write def f(v, out), or leave out lend=",
    ),
    "the same, of a function with a name": (
        lambda x: hc.call(two, F32, x, lend="out"),
        "write def two(a, b, c, d, out), or leave out lend=",
    ),
    "the same, of a host function": (
        lambda x: hc.host(lambda v: v, result=F32, lend="out")(x),
        "with 1 positional argument and out=.",
    ),
    "too few beside the lent results": (
        lambda x: hc.call(lambda a, b, out: a, F32, x, lend="out"),
        "with 1 positional argument and out=. `<lambda>` takes (a, b, out). Arguments"
        " and parameters must match: hc.call(<lambda>, result, *args)",
    ),
    "result forgotten, with lent results": (
        lambda x: hc.call(lambda v, out: v, jnp.asarray(x), lend="out"),
        "The first array (float32[]) was taken for the result.",
    ),
    "an order for NumPy": (
        lambda x: hc.call(np.sort, F32, x, order="C"),
        "order= of `sort` should be one of 'pure', 'unordered', 'ordered', got 'C'."
        " `sort` has order= of its own: to give it that, write functools.partial(sort,"
        " order='C')",
    ),
    "a mask for NumPy": (
        lambda x: hc.call(np.sum, F32, x, where=np.ones(3, bool)),
        "where= of `sum` should be one bool, got bool[3]. For one bool per row, vmap"
        " the function that makes the call. `sum` has where= of its own: to give it"
        " that, pass it as an argument of lambda x, a: sum(x, where=a)",
    ),
    "a mask for a ufunc": (
        lambda x: hc.call(np.sqrt, F32, x, where=1),
        "write functools.partial(sqrt, where=1)",
    ),
    "another argument forgotten": (
        lambda x: hc.call(lambda a, b, c: a, x, x),
        "`<lambda>` takes (a, b, c). Arguments and parameters must match:",
    ),
    "a keyword missing": (
        lambda x: hc.call(lambda a, *, b: a, F32, x),
        "with 1 positional argument.",
    ),
    "positional only": (lambda x: hc.call(two, F32, x, b=1), "the keyword b="),
    "twice": (
        lambda x: hc.call(lambda v: v, F32, x, v=x),
        "with 1 positional argument and v=",
    ),
    "a method": (lambda x: hc.call(Counter().add, F32), "takes (k, twice=False)"),
    "an object": (
        lambda x: hc.call(type("C", (), {"__call__": lambda self: 0})(), F32, x),
        "takes ()",
    ),
    "partial": (
        lambda x: hc.call(functools.partial(two, 1, d=2), F32, x, x, x),
        "with 3 positional arguments",
    ),
    "of C": (lambda x: hc.tap([].append, x, x), "with 2 positional arguments"),
    "a class": (lambda x: hc.call(Counter, F32, x), "`Counter` takes ()"),
    "jitted": (lambda x: hc.call(jax.jit(lambda v: v), F32, x, x), "takes (v)"),
    "through": (
        lambda x: hc.tap_through(lambda: None, x),
        "hc.tap_through calls `<lambda>` with 1 positional argument",
    ),
    "tangent": (
        lambda x: hc.derivatives.tap_tangent(lambda: None, x),
        "hc.derivatives.tap_tangent calls `<lambda>` with 1 positional argument",
    ),
    "given twice": (
        lambda x: hc.call(lambda v, **k: v, F32, x, v=x),
        "hc.call calls `<lambda>` with 1 positional argument and v=. `<lambda>` takes",
    ),
    "a host function": (
        lambda x: hc.host(lambda a, b: a, result=F32)(x),
        "a hc.host function calls `<lambda>` with 1 positional argument. `<lambda>`"
        " takes (a, b).",
    ),
    "an object's method": (
        lambda x: hc.Object(Counter, methods={"add": F32}).add(x, x, x),
        "the object `Counter` calls `Counter.add` with 3 positional arguments."
        " `Counter.add` takes (k, twice=False).",
    ),
    "an object's option": (
        lambda x: hc.Object(Counter, methods={"add": F32}).add(x, wher=True),
        " `Counter.add` takes (k, twice=False). Did you mean where=?",
    ),
}


if np.lib.NumpyVersion(np.__version__) < "2.4.0":
    # It does not tell the options of its ufuncs, so they seem to take any.
    for name in ("misspelt, to a ufunc", "a mask for a ufunc"):
        del WRONG[name]


def test_ufuncs_of_a_numpy_that_tells_no_signatures(monkeypatch):
    told = inspect.signature

    def signature(fn, **options):
        if isinstance(fn, np.ufunc):
            raise ValueError
        return told(fn, **options)

    monkeypatch.setattr(inspect, "signature", signature)
    add = lambda *args, **options: hc.call(np.add, F32, *args, **options)
    said = refused(add, X)
    assert "with 1 positional argument. `add` takes (x1, x2, /, out=None, **opt" in said
    said = refused(lambda: add(X, X, ordr="ordered"))
    assert "has no option ordr=" in said
    assert "Did you mean order=?" in said
    assert add(X, X, dtype=np.float32) == 4


@pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(("call", "text"), WRONG.values(), ids=WRONG)
def test_arguments_that_the_function_does_not_take(mode, call, text):
    assert text in refused(mode(call), X).replace("<lambda>.<locals>.", "")


def out_too(x, *, out):
    out[...] = x


RIGHT = {
    "defaults": lambda x: hc.call(two, F32, x),
    "by position": lambda x: hc.call(two, F32, x, 1, 2),
    "by name": lambda x: hc.call(two, F32, x, 1, c=2, d=3),
    "any": lambda x: hc.call(lambda *a, **k: k["depth"], F32, x, depth=x),
    "its own": lambda x: hc.call(lambda v, evry: v, F32, x, evry=1),
    "positional only again": lambda x: hc.call(lambda v, /, **k: v, F32, x, v=x),
    "required": lambda x: hc.call(lambda v, *, k: v, F32, x, k=1),
    "out": lambda x: hc.call(out_too, F32, x, lend="out"),
    "method": lambda x: hc.call(Counter().add, F32, x, twice=True),
    "partial": lambda x: hc.call(functools.partial(two, d=1), F32, x, c=1),
    "partial given again": lambda x: hc.call(functools.partial(two, d=1), F32, x, d=2),
    "ufunc": lambda x: hc.call(np.sqrt, F32, x),
    "a ufunc's options": lambda x: hc.call(np.add, F32, x, x, dtype=np.float32),
    "a ufunc's out": lambda x: hc.call(np.sqrt, F32, x, lend="out"),
    "of two results": lambda x: hc.call(np.modf, (F32, F32), x),
    "scipy": lambda x: hc.call(scipy.special.jv, F32, x, x),
    "numpy": lambda x: hc.call(np.sum, F32, x, dtype=np.float32),
    "of C": lambda x: hc.call(operator.add, F32, x, x),
    "class": lambda x: hc.call(np.float32, F32, x),
    "jitted": lambda x: hc.call(jax.jit(lambda v, w=1: v), F32, x, w=x),
    "cached": lambda x: hc.call(functools.lru_cache(lambda v=0: v), F32),
    "wrapped": lambda x: hc.call(
        functools.wraps(lambda a, b, c: 0)(lambda v: v), F32, x
    ),
    "static": lambda x: hc.call(
        type("C", (), {"__call__": staticmethod(lambda v: v)})(), F32, x
    ),
    "host": lambda x: hc.host(two, result=F32)(x, 1, 2),
    "host, out": lambda x: hc.host(out_too, result=F32, lend="out")(x),
    "object": lambda x: hc.Object(lambda: Counter(), methods={"add": F32}).add(x),
}


@pytest.mark.parametrize("mode", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("call", RIGHT.values(), ids=RIGHT)
def test_arguments_that_it_does_take(mode, call):
    jax.block_until_ready(mode(call)(X))


# --- Values that a method takes from its object ---------------------------------------


class Model:
    def __init__(self, weight):
        self.weight = weight
        self.shapes = {"weight": weight}

    def apply(self, x):
        return np.float32(x * self.weight)

    def shape(self, x):
        return np.float32(x * len(self.weight.shape))

    def __call__(self, x):
        return np.float32(x + self.shapes["weight"])

    def total(self, x):
        return np.float32(x + sum(v for v in self.shapes.values()))

    def how_many(self, x):
        return np.float32(x * len(self.shapes))


METHODS = {
    "a method": (lambda m: m.apply, "`Model.apply` uses `self.weight`"),
    "an object that can be called": (
        lambda m: m,
        "`Model` uses `self.shapes['weight']`",
    ),
    "a loop over a container": (
        lambda m: m.total,
        "`Model.total` uses `self.shapes`",
    ),
    "a partial of a method": (
        lambda m: functools.partial(m.apply),
        "`partial(Model.apply)` uses `self.weight`",
    ),
    "a function that calls a method": (
        lambda m, apply=None: (lambda f: lambda x: f(x))(m.apply),
        "uses `f`, which uses `self.weight`",
    ),
}


@pytest.mark.parametrize(("make", "said"), METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("face", [*FACES])
def test_a_traced_value_of_the_object_of_a_method(face, make, said):
    def f(x):
        text = refused(FACES[face], make(Model(x)), x)
        assert f"{said}, a traced value (float32[]) of the program around it" in text
        return x

    jax.jit(f)(X)


def test_what_is_known_of_a_traced_value_may_be_used_by_a_method():
    f = jax.jit(lambda x: hc.call(Model(x[None]).shape, F32, x))
    assert f(X) == 2
    f = jax.jit(lambda x: hc.call(Model(x).how_many, F32, x))
    assert f(X) == 2


# --- Refs ----------------------------------------------------------------------------

REFS = {
    "hc.call": lambda ref: hc.call(np.sin, F32, ref),
    "in a tree": lambda ref: hc.call(lambda d: d["x"], F32, {"x": ref}),
    "hc.tap": lambda ref: hc.tap(print, ref),
    "hc.print": lambda ref: hc.print("{}", ref),
    "hc.host": lambda ref: hc.host(np.sin, result=F32)(ref),
}


@pytest.mark.parametrize("use", REFS.values(), ids=REFS)
def test_a_traced_ref_is_not_a_value(use):
    def f(x):
        text = refused(use, jax.new_ref(x))
        assert text.startswith("an argument is a Ref of JAX")
        assert "Pass its value, ref[...]" in text
        return x

    jax.jit(f)(jnp.float32(1))


# --- Options that the function has as parameters ---------------------------------------

OWN = {
    "every": (lambda fn: hc.tap(fn, X, every=5), 5),
    "batch": (lambda fn: hc.tap(fn, X, batch=2), 2),
    "tag": (lambda fn: hc.call(fn, F32, X, tag="mine"), "mine"),
}


@pytest.mark.parametrize("option", OWN)
def test_an_option_that_the_function_has_as_a_parameter(option):
    use, value = OWN[option]
    names: dict = {}
    exec(f"def named(x, {option}=None): return np.float32(1)", {"np": np}, names)
    with pytest.warns(UserWarning, match="is an option of hc") as warned:
        use(names["named"])
    (warning,) = warned
    said = str(warning.message)
    assert f"{option}={value!r} is an option of hc." in said
    assert f"functools.partial(named, {option}={value!r})" in said
    assert warning.filename == __file__
    use(lambda *args: names["named"](*args))  # says nothing
    hc.barrier()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: hc.call(np.sin, x, x),
        lambda x: hc.tap(print, x),
        lambda x: hc.print("{}", x),
        lambda x: hc.host(np.sin, result=hc.results.like(0))(x),
        lambda x: hc.Object(dict, methods={"get": x}),
        lambda x: hc.configure(fail="alone"),
    ],
)
def test_under_a_debugger_that_reads_local_variables(call, capsys):
    def look(frame, event, arg):
        del event, arg
        assert frame.f_locals is not None
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        call(jnp.float32(1))
    finally:
        sys.settrace(before)
    hc.barrier()


def test_a_result_by_name_behind_arguments():
    x = jnp.float32(1)
    for f in (
        lambda x: hc.call(np.cos, x, result=x),
        jax.jit(lambda x: hc.call(np.cos, x, x, result=x)),
    ):
        with pytest.raises(
            hc.errors.SpecError,
            match=r"with result= and \d positional arguments?, of which the first is the"
            r" result, too. .* write hc\.call\(cos, result, \*args\)",
        ):
            f(x)
    assert hc.call(lambda: np.float32(3), result=x) == 3
    assert hc.call(fn=lambda: np.float32(3), result=x) == 3


MOST = 2**70
HUGE = {
    "batch": (lambda: hc.tap(print, 1.0, batch=MOST), "batch= of"),
    "every": (lambda: hc.tap(print, 1.0, every=MOST), "every= of"),
    "concurrency": (
        lambda: hc.host(print, result=1.0, concurrency=MOST),
        r"concurrency= of .* \(below 2\*\*31\)",
    ),
    "timeout": (lambda: hc.host(print, result=1.0, timeout=10**99), "timeout= of"),
    "a number that Python can't write": (
        lambda: hc.host(print, result=1.0, timeout=10**5000),
        "timeout= of .* got an int of 16610 bits",
    ),
    "prefetch": (lambda: hc.feed([1.0], prefetch=MOST), "prefetch= of"),
    "a feed's batch": (lambda: hc.feed([1.0], batch=MOST), "batch= of"),
    "nondiff": (lambda: hc.host(np.sqrt, result=1.0, nondiff=MOST), "nondiff= of"),
    "tap_queue_bytes": (
        lambda: hc.configure(tap_queue_bytes=MOST),
        "tap_queue_bytes= of",
    ),
    "total": (lambda: hc.progress(0, MOST, bar=print), "steps should fit into 64 bits"),
    "initial": (
        lambda: hc.progress(0, 5, initial=MOST, bar=print),
        "steps should fit into 64 bits",
    ),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_number_beyond_64_bits_is_refused_by_name(name):
    use, said = HUGE[name]
    with pytest.raises(hc.errors.SpecError, match=said):
        use()


def test_a_limit_may_be_infinite():
    f = hc.host(lambda x: x, result=hc.results.like(0), timeout=float("inf"))
    assert f(jnp.float32(2)) == 2
