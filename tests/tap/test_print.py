"""`hc.print`: what it prints, what it refuses, and how long its programs live."""

import gc
import io
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc

EAGER_AND_JIT = pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit], ids=["eager", "jit"]
)
X = np.arange(3, dtype=np.float32)


def printed(capsys):
    hc.barrier()
    return capsys.readouterr().out


# --- What it prints ------------------------------------------------------------------

TREE = {"a": X, "b": (X + 1, 2)}
# (format, positional, keywords), printed as by str.format.
FORMATS = {
    "one": ("x = {}", (X,), {}),
    "several": ("{} {:.3f} {n}", (X, 1.5), {"n": 3}),
    "indices": ("{1} {0} {1}", (X, 2), {}),
    "attributes": ("{0.shape} {x.dtype} {0.ndim}", (X,), {"x": X}),
    "automatic attributes": ("{.shape} {[1]}", (X, X), {}),
    "items": ("{0[1]:.1f} {t[a]} {t[b][0]} {t[b][1]}", (X,), {"t": TREE}),
    "trees": ("{}", (TREE,), {}),
    "conversions": ("{!r} {x!s} {y!a}", (X,), {"x": 1.0, "y": "é"}),
    "nested": ("{:{width}.{digits}f}|", (1.5,), {"width": 9, "digits": 2}),
    "nested automatic": ("{:{}} {}|", (1.5, 8, 3), {}),
    "nested before a text": ("{:{}} {:>4s}|", (1.5, 8, "x"), {}),
    "nested conversion": ("{:{fill}{align}8}|", (2,), {"fill": "-", "align": "^"}),
    "static": ("{} {} {s:>6} {o}", ("text", X), {"s": "right", "o": None}),
    "braces": ("{{}} {} {{x}}", (1,), {}),
    "nothing": ("100% {{x}} \n", (), {}),
    "bools": ("{} {}", (True, np.array([True, False])), {}),
    "complex": ("{:.2f} {}", (1 + 2j, X * 1j), {}),
    "numbers": ("{:04d} {:#x} {:,} {:.1e}", (7, 255, 12345, 1.5), {}),
}


def as_it_arrives(path, leaf):
    """An array; a number in a container stays Python's."""
    number = len(path) > 2 and isinstance(leaf, (bool, int, float))
    same = isinstance(leaf, str) or number
    return leaf if same else np.asarray(jnp.asarray(leaf))


@EAGER_AND_JIT
@pytest.mark.parametrize("name", FORMATS)
def test_prints_as_str_format(name, wrap, capsys):
    fmt, args, kwargs = FORMATS[name]
    wrap(lambda: hc.print(fmt, *args, **kwargs))()
    args, kwargs = jax.tree_util.tree_map_with_path(as_it_arrives, (args, kwargs))
    assert printed(capsys) == fmt.format(*args, **kwargs) + "\n"


@EAGER_AND_JIT
def test_a_spec_of_an_unnamed_item_holds_for_each_element(wrap, capsys):
    wrap(lambda: hc.print("{[0]:.1f} {[a]:.1f}", np.ones((1, 2)), {"a": X}))()
    each = " ".join(f"{x:.1f}" for x in X)
    assert printed(capsys) == f"[1.0 1.0] [{each}]\n"


@EAGER_AND_JIT
def test_numbers_in_containers_are_pythons(wrap, capsys):
    args = (X.shape, [0.1, True, 1e-30, float("nan"), float("-inf")], {"b": (2, X[1])})
    with np.printoptions(precision=2):
        wrap(lambda: hc.print("{} {} {} {n}", *args, n={"a": -3}))()
    assert printed(capsys) == (
        "(3,) [0.1, True, 1e-30, nan, -inf] {'b': (2, array(1., dtype=float32))}"
        " {'a': -3}\n"
    )
    jax.vmap(lambda x: hc.print("{} {}", x, x.shape, rows="each"))(np.ones((2, 1)))
    assert printed(capsys) == "[1.] (1,)\n[1.] (1,)\n"


@EAGER_AND_JIT
@pytest.mark.parametrize("name", ["name", "fn", "remat", "arrays", "sample", "self"])
def test_arguments_may_have_any_name_that_print_does_not_take(name, wrap, capsys):
    wrap(lambda: hc.print(f"{{{name}}}", **{name: 0.5}))()
    assert printed(capsys) == "0.5\n"


SMALL = {
    "bfloat16": (1.5, "1.5 |  1.50| 1.5"),
    "float8_e4m3fn": (1.5, "1.5 |  1.50| 1.5"),
    "float16": (1.5, "1.5 |  1.50| 1.5"),
    "int4": (-3, "-3 | -3.00| -3"),
    "uint4": (9, "9 |  9.00| 9"),
    "int2": (-2, "-2 | -2.00| -2"),
}


@EAGER_AND_JIT
@pytest.mark.parametrize("dtype", SMALL)
def test_scalars_of_small_types_take_formats(dtype, wrap, capsys):
    value, text = SMALL[dtype]
    x = jnp.asarray(value, dtype)
    wrap(lambda x: hc.print("{} |{:6.2f}| {t[0]}", x, x, t=[x]))(x)
    assert printed(capsys) == text + "\n"


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_scalars_of_small_types_take_formats_wherever_they_are(dtype, capsys):
    x = jnp.arange(4).astype(dtype)
    hc.print("{t[a]:.1f} {x[2]:.1f} {t[b][1]}", x=x, t={"a": x[1], "b": (x, x)})
    assert printed(capsys).split()[:2] == ["1.0", "2.0"]


@EAGER_AND_JIT
@pytest.mark.parametrize("dtype", [np.float32, np.int16, jnp.bfloat16, np.complex64])
def test_a_format_holds_for_each_element(dtype, wrap, capsys):
    spec = "+d" if dtype is np.int16 else "+.2f"
    row = np.asarray([1, 2, -3], dtype)
    wrap(lambda x: hc.print(f"{{:{spec}}} {{n}}", x, n=7))(jnp.stack([row, row]))
    each = " ".join(format(element.item(), spec) for element in row)
    assert printed(capsys) == f"[[{each}]\n [{each}]] 7\n"


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "bool", "complex64"])
@pytest.mark.parametrize("conversion", ["r", "a", "s"])
@EAGER_AND_JIT
def test_a_converted_scalar_is_a_number(conversion, dtype, wrap, capsys):
    value = jnp.ones((), dtype)
    wrap(lambda x: hc.print(f"{{!{conversion}}} {{}}", x, x))(value)
    converted, plain = printed(capsys).split()
    assert converted == plain


def test_a_format_of_a_batch(capsys):
    f = jax.jit(jax.vmap(lambda x: hc.print("loss {:.3f}", x)))
    f(jnp.array([0.5, 0.25]))
    assert printed(capsys) == "loss [0.500 0.250]\n"


def test_in_loops_conditions_and_vmap(capsys):
    def f(x):
        def turn(i, c):
            hc.print("{} {}", i, c, order="ordered", where=i != 1)
            return c * 2

        return lax.fori_loop(0, 3, turn, x)

    jax.jit(f)(1)
    assert printed(capsys) == "0 1\n2 4\n"
    batch = np.array([1, 2], np.int32)
    jax.jit(jax.vmap(f))(batch)
    assert printed(capsys) == "0 [1 2]\n2 [4 8]\n"
    jax.jit(jax.vmap(lambda x: hc.print("x {}", x, rows="each")))(batch)
    assert printed(capsys) == "x 1\nx 2\n"
    jax.jit(jax.vmap(lambda x: hc.print("x {}", x, where=x > 1)))(batch)
    assert printed(capsys) == "x [2]\n"
    jax.jit(jax.grad(lambda x: (hc.print("x {}", x), x * x)[1]))(3.0)
    assert printed(capsys) == "x 3.0\n"


# --- The stream ----------------------------------------------------------------------


class File(io.StringIO):
    """Records each write and flush."""

    def __init__(self):
        super().__init__()
        self.events = []

    def write(self, text):
        self.events.append(text)

    def flush(self):
        self.events.append("flushed")


@EAGER_AND_JIT
def test_file_flush_and_end(wrap, capsys):
    file = File()
    options = ({}, {"flush": True}, {"end": ""}, {"end": "!\n", "flush": True})
    for n, more in enumerate(options):
        wrap(lambda n, more=more: hc.print("line {}", n, file=file, **more))(n)
        hc.barrier()
    assert printed(capsys) == ""
    want = ["line 0\n", "line 1\n", "flushed", "line 2", "line 3!\n", "flushed"]
    assert file.events == want


def test_stdout_is_the_one_at_the_time_of_printing(monkeypatch, capsys):
    f = jax.jit(lambda x: hc.print("{}", x))
    f(1)
    assert printed(capsys) == "1\n"
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", other)
    f(2)
    hc.barrier()
    assert other.getvalue() == "2\n"


@EAGER_AND_JIT
def test_numpys_print_options_count_where_it_is_traced(wrap, capsys):
    x = X / 3
    f = wrap(lambda x: hc.print("{}", x))
    with np.printoptions(precision=2, linewidth=20, suppress=True):
        f(x)
        assert printed(capsys) == f"{x}\n"
        traced = f"{x}\n"
    assert traced != f"{x}\n"
    f(x)
    assert printed(capsys) == (traced if wrap is jax.jit else f"{x}\n")


def test_formatters_count_too(capsys):
    with np.printoptions(formatter={"float": lambda v: f"<{v:.1f}>"}):
        jax.jit(lambda x: hc.print("{}", x))(X)
    assert printed(capsys) == "[<0.0> <1.0> <2.0>]\n"


# --- What it refuses -----------------------------------------------------------------

REFUSED = {
    "no string": ((X,), {}, r"should be a format string, got array\("),
    "no argument": (
        ("{} {} {y}", 1),
        {"z": 2},
        "for its fields 1, y. It got 1 .* keywords z",
    ),
    "index too high": (
        ("{0} {2}", 1, 2),
        {},
        "for its fields 2. It got 2 positional arguments, and the keywords none. Its"
        " fields without names need 3 positional arguments",
    ),
    "too few": (
        ("x={} {}", X),
        {},
        "It got 1 positional argument, and the keywords none. Its fields without names"
        " need 2 positional arguments",
    ),
    "by position, for a name": (
        ("x={x}", X),
        {},
        r"The field \{x\} needs a keyword: hc.print\('x=\{x\}', x=x\)",
    ),
    "several names": (
        ("{} {a} {b}", X, X),
        {"b": X},
        r"needs a keyword: hc.print\('{} {a} {b}', ..., a=a, b=b\)",
    ),
    "JSON": (
        ('{"loss": {}}', X),
        {},
        r"for its fields \"loss\".*If the braces belong to the text, write them twice:"
        " {{ and }}",
    ),
    "negative": (("{-1}", 1), {}, "for its fields -1"),
    "nested": (("{:{w}}", 1), {}, "for its fields w. It got 1 positional"),
    "an option of hc.tap": (
        ("{}", X),
        {"always": True},
        r"does not use always.* always= is an option of hc.tap, not of hc.print. Write"
        r" hc.tap\(lambda x: print\(x\), x, always=...\)",
    ),
    "sample": (("{}", X), {"sample": 0.5}, "sample= is an option of hc.tap"),
    "remat": (("{}", X), {"remat": "once"}, "remat= is an option of hc.tap"),
    "an integer's format": (
        ("{:d}", 1.5),
        {},
        r"hc.print\('{:d}'\) can't format its argument 0 as {:d}: it is float32, and"
        " Python says: Unknown format code 'd' for object of type 'float'. Write"
        r" \{:.3g\}, or \{\}",
    ),
    "an integer's format, of each element": (
        ("{x:d}",),
        {"x": X},
        "can't format its x= as {:d}: it is float32",
    ),
    "of a small type": (("{:d}", jnp.bfloat16(1)), {}, "it is bfloat16, and Python"),
    "of a complex number": (("{:d}", 1j), {}, "it is complex64, and Python says"),
    "of a container": (
        ("{:.3f}", {"a": X}),
        {},
        r"can't format its argument 0 as {:.3f}: a dict takes no format. Give its"
        r" numbers fields of their own, as in \{x\[0\]:.3f\} and \{x\[name\]:.3f\}, or"
        r" write \{\}",
    ),
    "of nothing": (("{:>5}", None), {}, "a NoneType takes no format"),
    "unused": (("{}", 1, 2), {"z": 3}, "does not use argument 1, z. Each argument"),
    "only text": (("x = 3", 1), {}, "does not use argument 0.*an f-string has none"),
    "open": (("{x",), {"x": 1}, r"can't read the format '{x'.*braces twice: {{ }}"),
    "closed": (("x}",), {}, "can't read the format 'x}': Single '}'"),
    "numbering": (("{} {0}", 1), {}, r"can't read the format '{} \{0}'"),
    "conversion": (("{!q}", 1), {}, "can't read the format '{!q}'"),
    "deep": (("{:{:{}}}", 1, 2, 3), {}, "a field in a spec has fields in its own spec"),
}


@EAGER_AND_JIT
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_where_it_is_written(name, wrap):
    args, kwargs, text = REFUSED[name]
    with pytest.raises(hc.errors.SpecError, match=text):
        wrap(lambda: hc.print(*args, **kwargs))()


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, jax.grad])
@pytest.mark.parametrize("more", [False, True])
def test_f_strings_are_refused(wrap, more):
    def f(x):
        hc.print(f"x = {x}", *([x] if more else []))
        return x

    with pytest.raises(
        hc.errors.SpecError, match=r"looks like an f-string.*hc\.print\('x ="
    ):
        wrap(f)(X if wrap is jax.vmap else 1.0)


def test_what_only_formatting_finds_out_is_raised_by_barrier(capsys):
    f = jax.jit(lambda x: hc.print("{:{spec}}", x, spec="q"))
    assert f(1.0) is None
    with pytest.raises(ValueError, match="format code 'q'"):
        hc.barrier()
    jax.jit(lambda x: hc.print("{}", x))(1.0)
    assert printed(capsys) == "1.0\n"


# --- How long programs live ----------------------------------------------------------


class Held:
    """An object that a callback holds."""

    def __call__(self, *_):
        pass

    def write(self, _):
        pass


def tell(*_):
    """A tap function for cases in which something else is held."""


KINDS = {
    "print": lambda held: lambda x: hc.print("{}", x, file=held),
    "tap": lambda held: lambda x: hc.tap(held, x, tag="x", every=2),
    "static": lambda held: lambda x: hc.tap(tell, x, held),
    "through": lambda held: lambda x: hc.tap_through(held, x),
    "cotangent": lambda held: jax.grad(
        lambda x: hc.derivatives.tap_cotangent(held, x * x)
    ),
    "tangent": lambda held: (
        lambda x: jax.jvp(lambda x: hc.derivatives.tap_tangent(held, x), (x,), (x,))
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_jitted_again_finds_what_was_compiled(
    kind, no_program, compiled_during, live
):
    f = KINDS[kind](Held())

    def run():
        programs = [jax.jit(f) for _ in range(5)]
        for program in programs:
            jax.block_until_ready(program(np.float32(1)))
            assert live() == 1

    assert compiled_during(run) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_traced_by_fresh_functions_does_not_grow(kind, in_time, live):
    f = KINDS[kind](Held())
    for _ in range(5):
        jax.block_until_ready(jax.jit(lambda x: f(x))(np.float32(1)))
        hc.barrier()
        assert in_time(lambda: live() == 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [False, True], ids=["", "vmap"])
def test_a_tap_dies_when_its_program_is_dropped(batch, kind, in_time, live):
    held = Held()
    gone = weakref.ref(held)
    f = KINDS[kind](held)
    program = jax.jit(jax.vmap(f) if batch else f)
    del held, f
    for _ in range(2):
        jax.block_until_ready(program(X if batch else 1.0))
    hc.barrier()
    gc.collect()
    assert gone() is not None
    del program
    assert in_time(lambda: gone() is None and live() == 0)


def test_programs_without_stdout_and_stderr(run_python):
    """Both are None in daemons, and under pythonw."""
    done = run_python(
        """
        import os, sys
        sys.stdout = sys.stderr = None
        import jax, jax.numpy as jnp
        import hostcall as hc
        from hostcall import host_callback, monitor

        def bad(v):
            raise ValueError("no")

        def body(i, c):
            hc.progress(i, 5)
            return c + hc.watch(c)

        def steps(x):
            return jax.lax.fori_loop(0, 5, body, x)

        x = jnp.float32(1)
        for f in (
            lambda v: hc.print("a {}", v, flush=True),
            lambda v: hc.debug.print("b {}", v),
            lambda v: host_callback.id_print(v),
            steps,
        ):
            f(x), jax.jit(f)(x)
            hc.barrier()
        monitor.report()
        for failing, error in (
            (lambda: hc.tap(bad, x) or hc.barrier(), ValueError),
            (lambda: hc.call(bad, x, x), ValueError),
            (lambda: hc.watch(x / 0), hc.errors.WatchError),
        ):
            try:
                failing()
            except error:
                os.write(1, b"raised ")
        os.write(1, b"ended")
        hc.tap(bad, x)
        """
    )
    assert done.stdout == "raised raised raised ended"
