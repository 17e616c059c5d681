"""`hc.debug` and `jax.debug` print the same text, as often, under all transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from older_jax import OPTIONS_ALONE, SMALL_CALLBACKS

import hostcall as hc


def printed(run, capsys):
    capsys.readouterr()
    run()
    jax.effects_barrier()
    return capsys.readouterr().out


def assert_prints_the_same(f, capsys, *args, wrap=jax.jit):
    """Checks that `f(debug, *args)` prints the same with our functions as with JAX's."""
    got, wanted = (
        printed(lambda d=d: wrap(lambda *a: f(d, *a))(*args), capsys)
        for d in (hc.debug, jax.debug)
    )
    assert wanted
    assert got == wanted


LINES = {
    "plain": lambda d, x: d.print("x = {}", x),
    "named": lambda d, x: d.print("{a} and {b}", a=x, b=x * 2),
    "spec": lambda d, x: d.print("{:.3f} {:8.2f}|{:<9}|", x.sum(), x[0], x[1]),
    "conversion": lambda d, x: d.print("{!r} {!s} {a!r}", x, x[0], a=x[1]),
    "index": lambda d, x: d.print("{0[1]} {a[0]}", x, a=x),
    "attribute": lambda d, x: d.print("{0.shape} {a.dtype}", x, a=x),
    "nested spec": lambda d, x: d.print("{:.{n}f}", x[0], n=2),
    "tree": lambda d, x: d.print("{}", {"a": x, "b": [x[0], (x[1],)]}),
    "static": lambda d, x: d.print("{} {} {}", "text", x, None),
    "object": lambda d, x: d.print("{} {o}", x, o=range(2)),
    "no fields": lambda d, x: d.print("only text"),
    "text, then values": lambda d, x: d.print("text", x, x[0], skip_format_check=True),
    "empty": lambda d, x: d.print("", skip_format_check=True),
    "starts with braces": lambda d, x: d.print("{{", skip_format_check=True),
    "integer": lambda d, x: d.print("{:04d}", x[0].astype(int)),
    "bool": lambda d, x: d.print("{} {}", x > 1, x[0] > 1),
    "complex": lambda d, x: d.print("{} {:.1f}", x * 1j, x[0] * 1j),
    "bfloat16": lambda d, x: d.print(
        "{} {}", x.astype(jnp.bfloat16), x[0].astype(jnp.bfloat16)
    ),
    "int4": lambda d, x: d.print("{} {}", x.astype(jnp.int4), x[0].astype(jnp.int4)),
    "key": lambda d, x: d.print("{}", jax.random.key(3)),
    "Python's numbers": lambda d, x: d.print("{} {} {}", 1, 2.5, True),
    "ordered": lambda d, x: d.print("{}", x, ordered=True),
    "options first": lambda d, x: d.print(ordered=True)("{ordered} {}", x, ordered=3),
    "large": lambda d, x: d.print("{}", jnp.zeros((40, 40)) + x[0]),
    "empty array": lambda d, x: d.print("{}", x[:0]),
}


if SMALL_CALLBACKS.is_missing:
    del LINES["int4"]
if OPTIONS_ALONE.is_missing:
    del LINES["options first"]


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("line", LINES)
def test_lines(line, wrap, capsys):
    x = jnp.array([1.25, 2.0, 3.5])
    assert_prints_the_same(LINES[line], capsys, x, wrap=wrap)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(
    "fmt",
    ['{{"loss": {x}}}', "}}{x}", "{{}}{{{x}", "{{", "text {{ {x:.3f}", "{{{{{x}}}}}"],
)
def test_a_format_that_begins_with_a_brace(fmt, wrap, ordered, capsys):
    """As `str.format` has it. JAX's own leaves the values out, or fails."""
    given = {"x": jnp.float32(2.5)} if "x" in fmt else {}

    def show(given):
        hc.debug.print(fmt, ordered=ordered, **given)

    wrap(show)(given)
    jax.effects_barrier()
    # Without a field, JAX prints a text as it is.
    assert capsys.readouterr().out == (fmt.format(**given) if given else fmt) + "\n"


def test_values_by_position_behind_a_brace(capsys):
    jax.jit(lambda x: hc.debug.print("{{}} {}", x))(2.5)
    jax.effects_barrier()
    assert capsys.readouterr().out == "{} 2.5\n"


def test_named_values_without_a_field_are_refused():
    with pytest.raises(ValueError, match=r"'step \{\{' has no fields .* \['x'\]"):
        hc.debug.print("step {{", skip_format_check=True, x=1.0)


def test_numpys_print_options_count_where_it_is_traced(capsys):
    def f(d, x):
        with np.printoptions(precision=2, suppress=True):
            d.print("{}", x)

    assert_prints_the_same(f, capsys, jnp.array([1.23456, 1e-7]))


TRANSFORMED = {
    "vmap": lambda f: jax.vmap(f),
    "vmap twice": lambda f: lambda x: jax.vmap(jax.vmap(f))(x[None]),
    "vmap, ordered": lambda f: jax.vmap(lambda v: f(v, ordered=True)),
    "grad": lambda f: jax.vmap(jax.grad(lambda v: (f(v), v**2)[1])),
    "vjp": lambda f: lambda x: jax.vjp(lambda v: (f(v), v)[1], x)[1](x),
    "fori": lambda f: lambda x: lax.fori_loop(0, 3, lambda i, c: (f(c), c * 2)[1], x),
    "while": lambda f: (
        lambda x: lax.while_loop(lambda c: (f(c), c[0] < 9)[1], lambda c: c * 2, x)
    ),
    "cond under vmap": lambda f: jax.vmap(
        lambda v: lax.cond(v > 2, f, lambda v: None, v)
    ),
    "while under vmap": lambda f: jax.vmap(
        lambda v: lax.while_loop(
            lambda c: (f(c, ordered=True), c < 9)[1], lambda c: c * 2, v
        )
    ),
    "remat": lambda f: jax.grad(
        jax.checkpoint(lambda x: (f(jnp.sin(x)), jnp.sin(jnp.sin(x)).sum())[1])
    ),
    "remat that saves": lambda f: jax.grad(
        jax.checkpoint(
            lambda x: (f(jnp.sin(x)), jnp.sin(jnp.sin(x)).sum())[1],
            policy=jax.checkpoint_policies.everything_saveable,
        )
    ),
    "remat that saves nothing": lambda f: jax.grad(
        jax.checkpoint(
            lambda x: (f(jnp.sin(x)), jnp.sin(jnp.sin(x)).sum())[1],
            policy=jax.checkpoint_policies.nothing_saveable,
        )
    ),
    "custom_jvp": lambda f: lambda x: jax.jvp(_with_jvp(f), (x,), (x,)),
    "custom_vjp": lambda f: jax.grad(lambda x: _with_vjp(f)(x).sum()),
    "hessian": lambda f: lambda x: jax.hessian(lambda v: (f(v[0]), (v**3).sum())[1])(x),
}


def _with_jvp(f):
    g = jax.custom_jvp(lambda x: (f(x), x)[1])
    g.defjvp(
        lambda primals, tangents: (f(primals[0] * 3), (primals[0], tangents[0]))[1]
    )
    return g


def _with_vjp(f):
    g = jax.custom_vjp(lambda x: (f(x), x)[1])
    g.defvjp(lambda x: (f(x * 3), (x, None))[1], lambda _, ct: (f(ct * 5), (ct,))[1])
    return g


@pytest.mark.parametrize("what", TRANSFORMED)
def test_transformed(what, capsys):
    def f(d, x):
        def say(v, ordered=False):
            d.print("seen {}", v, ordered=ordered)

        TRANSFORMED[what](say)(x)

    x = jnp.array([1.0, 2.0, 3.0])
    got, wanted = (
        printed(lambda d=d: jax.jit(lambda x: f(d, x))(x), capsys)
        for d in (hc.debug, jax.debug)
    )
    assert wanted
    assert sorted(got.splitlines()) == sorted(wanted.splitlines())
    if "ordered" in what or "vmap" not in what:
        assert got == wanted


REFUSED = {
    "unused": lambda d: d.print("{}", 1, 2),
    "unused keyword": lambda d: d.print("{}", 1, a=2),
    "f-string": lambda d: d.print(f"x is {1 + 1}", x=1),
    "missing": lambda d: d.print("{} {}", 1),
    "missing keyword": lambda d: d.print("{a}"),
    "not a function": lambda d: d.callback("text"),
}
if not OPTIONS_ALONE.is_missing:
    REFUSED |= {
        "arguments first": lambda d: d.callback(ordered=True, a=1),
        "arguments of a print first": lambda d: d.print(None, 1, ordered=True),
    }


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what):
    raised = []
    for debug in (hc.debug, jax.debug):
        with pytest.raises((ValueError, TypeError, KeyError, IndexError)) as caught:
            REFUSED[what](debug)
        raised.append((type(caught.value), str(caught.value)))
    assert raised[0] == raised[1]


def test_callbacks_get_trees_and_static_arguments():
    seen = []

    def f(d, x):
        def host(*args, **kwargs):
            leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda v: v is None)
            seen.append((tree, [getattr(v, "dtype", v) for v in leaves]))

        d.callback(host, {"a": x}, 1, 2.0, "text", None, print, [x, (x,)], flag=True)
        if not OPTIONS_ALONE.is_missing:
            d.callback(ordered=True)(host, x, ordered="mine", partitioned=x)

    for debug in (hc.debug, jax.debug):
        jax.jit(lambda x: f(debug, x))(1.5)
        f(debug, 1.5)
        jax.effects_barrier()
    half = 2 if OPTIONS_ALONE.is_missing else 4
    assert len(seen) == 2 * half
    # JAX's unordered callbacks may run before or after the others of their program.
    assert sorted(seen[:half], key=str) == sorted(seen[half:], key=str)


def test_keys(capsys):
    """Outside programs, typed keys print as such, also row by row; inside, their data."""
    key = jax.random.key(3)

    def f(d):
        d.print("{}", key)
        jax.jit(lambda: d.print("{}", key))()
        jax.vmap(lambda k: d.print("{}", k))(jax.random.split(key, 2))
        d.callback(lambda k: print(k.shape), key)

    assert printed(lambda: f(hc.debug), capsys) == printed(lambda: f(jax.debug), capsys)


def test_lines_are_counted_together(capsys):
    before = hc.monitor.stats().keys()
    for i in range(5):
        hc.debug.print(f"counted {i} {{}}", 1.0)
    assert hc.monitor.stats()["debug.print"].calls >= 5
    assert hc.monitor.stats().keys() - before <= {"debug.print"}


def test_the_same_line_traced_again_is_the_same_program():
    """JAX's callback differs each time."""

    def f(x):
        hc.debug.callback(print, "x", x)
        hc.debug.print("{}", x)

    first, second = (jax.make_jaxpr(f)(1.0) for _ in range(2))
    for a, b in zip(first.eqns, second.eqns):
        assert a.params["params"] == b.params["params"]


def test_what_is_printed_is_there_when_the_program_has_ended(capsys):
    f = jax.jit(lambda x: (hc.debug.print("{}", x), x + 1)[1])
    f(1.0).block_until_ready()
    assert capsys.readouterr().out == "1.0\n"


def test_refs(capsys):
    """A mutable array is read at the point of the call."""

    @jax.jit
    def f():
        ref = jax.new_ref(jnp.float32(1))
        hc.debug.print("{}", ref[...])
        hc.debug.callback(lambda v: print("ref", float(v)), ref)
        ref[...] = 5.0
        hc.debug.print("{}", ref[...])
        return ref[...]

    assert f() == 5
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "1.0", "5.0", "ref 1.0"]


def test_its_primitives_bear_the_names_of_jaxs():
    def f(debug):
        def body(x):
            debug.print("x {}", x)
            debug.callback(lambda x: None, x)
            return x

        jaxpr = jax.make_jaxpr(jax.value_and_grad(body))(1.0)
        return [eqn.primitive.name for eqn in jaxpr.eqns]

    assert f(hc.debug)[:2] == f(jax.debug)[:2] == ["debug_print", "debug_callback"]


# --- JAX's tables of rules by primitive ----------------------------------------------


@pytest.fixture
def key_reuse():
    """JAX refuses programs that use a key twice."""
    jax.config.update("jax_debug_key_reuse", True)
    yield
    jax.config.update("jax_debug_key_reuse", False)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_looking_at_a_key_does_not_use_it_up(key_reuse, wrap, ordered):
    for callback in (jax.debug.callback, hc.debug.callback):

        def draw(key, callback=callback):
            callback(lambda *_: None, key, {"more": key}, ordered=ordered)
            return jax.random.normal(key)

        got = wrap(draw)(jax.random.key(0))
        np.testing.assert_array_equal(got, jax.random.normal(jax.random.key(0)))

    def twice(key):
        hc.debug.callback(lambda *_: None, key)
        return jax.random.normal(key) + jax.random.normal(key)

    with pytest.raises(jax.errors.KeyReuseError):
        jax.jit(twice)(jax.random.key(1))
    jax.effects_barrier()


CALLBACKS = {
    "pure": lambda own, x: (hc if own else jax).pure_callback(np.sin, x, x),
    "io": lambda own, x: (hc.io_callback if own else io_callback)(np.sin, x, x),
    "debug": lambda own, x: (hc if own else jax).debug.callback(np.sin, x),
}


@pytest.mark.parametrize("kind", CALLBACKS)
def test_rooflines_are_those_of_jaxs_callbacks(kind):
    # Under JAX 0.10 it needs absl.
    roofline = pytest.importorskip("jax.experimental.roofline")
    theirs, ours = (
        roofline.roofline(lambda x, own=own: CALLBACKS[kind](own, x))(jnp.ones(4))[1]
        for own in (False, True)
    )
    assert ours == theirs
    assert ours.unfused_hbm_bytes > 0
