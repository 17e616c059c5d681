"""`hc.watch`: what it raises, and what else it can do."""

from __future__ import annotations

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import watched
from watched import down, fired

import hostcall as hc
from hostcall.errors import SpecError, WatchError

# --- The error --------------------------------------------------------------------------


def test_the_error_comes_out_of_the_program():
    error = fired(jax.jit(down), 2.5)
    assert isinstance(error, hc.errors.HostcallError)
    assert np.isnan(error.values["y"])
    assert error.also == -0.5
    assert (error.step, error.row) == (3, ())
    assert error.device == jax.devices()[0]
    assert error.name == "state"
    assert (error.place.file, error.place.function) == (
        watched.__file__,
        "down.<locals>.body",
    )
    assert np.isfinite(jax.jit(down)(20.0)).all()


def test_the_text():
    x = np.array([[1, 2], [np.inf, 4], [np.nan, 6]], np.float32)
    error = fired(jax.jit(lambda x: hc.watch({"w": x, "n": 3, "ok": x[0]})), x)
    line = error.place.line
    assert str(error).splitlines() == [
        "hostcall: x is not finite at step 0 (executions of this place in this run,"
        f" from 0), on {jax.devices()[0]}; watched at {__file__}:{line} in"
        " test_the_text.<locals>.<lambda>",
        "  x['w']: 2 of 6 numbers, the first is inf at [1, 0] (float32[3, 2])",
        "  The error's .values and .also have the arrays. Write them to a file with"
        " .save(path), and read it with hostcall.tools.load_failure(path).",
        "  To see how it came about, give inputs as also=, and record what was before with"
        " hc.Recorder.",
        "[hc-watch] python -m hostcall explain hc-watch",
    ]


def test_a_check_of_yours():
    def positive(tree):
        return (tree["a"] > 0).all()

    f = jax.jit(lambda x: hc.watch({"a": x}, positive)["a"] + 1)
    assert f(jnp.ones(2)).tolist() == [2, 2]
    error = fired(f, jnp.array([1.0, -1.0]))
    assert "x did not pass its check" in str(error)
    assert "`test_a_check" in str(error)
    assert error.values["a"].tolist() == [1, -1]


def test_a_step_that_python_calls_is_a_run():
    step = jax.jit(lambda x: hc.watch(jnp.log(x), also=x))
    for x in (3.0, 2.0, 1.0):
        step(x)
    assert fired(step, -1.0).step == 0


def test_other_calls_count_no_executions():
    def fn(x):
        assert hc.current().execution is None
        return x

    assert jax.jit(lambda x: hc.call(fn, x, x, where=x > 0))(1.0) == 1


def test_a_history_is_recorded(tmp_path):
    pytest.importorskip("pyarrow")

    def body(c, _):
        hc.watch(jnp.log(c), also=c)
        record(at=c)
        return c - 1, None

    with hc.Recorder(tmp_path / "run") as record:
        error = fired(jax.jit(lambda x: jax.lax.scan(body, x, None, length=8)[0]), 2.5)
        hc.barrier()
    assert hc.tools.read(tmp_path / "run").table().column("at").to_pylist() == [
        2.5,
        1.5,
        0.5,
    ]
    with pytest.raises(AttributeError, match=r"no history any more: hc\.Recorder"):
        error.history


def test_nothing_needs_the_result():
    @jax.jit
    def f(x):
        hc.watch(jnp.log(x))
        return x + 1

    assert fired(f, -1.0).step == 0
    with pytest.raises(WatchError):
        f(-1.0)
        jax.effects_barrier()


@pytest.mark.parametrize("reader", ["barrier", "reraise", "effects_barrier"])
def test_waits_raise_it(reader):
    f = jax.jit(lambda x: hc.watch(jnp.log(x)))
    with pytest.raises(WatchError) as caught:
        if reader == "reraise":
            with hc.reraise():
                y = f(-1.0)
        else:
            y = f(-1.0)
            hc.barrier() if reader == "barrier" else y.block_until_ready()
    assert np.isnan(caught.value.values)
    assert hc.errors.last_error() is caught.value


def test_leaves_that_jax_does_not_take_are_passed_on():
    x = {"a": jnp.ones(2), "b": np.ones(2, ">f4")}
    assert hc.watch(x) is x
    x["a"] *= np.nan
    assert fired(hc.watch, x).values["b"].tolist() == [1, 1]


def test_a_number_of_a_subclass():
    class Loss(float):
        pass

    assert np.isnan(fired(hc.watch, {"a": jnp.ones(2), "b": Loss("nan")}).values["b"])


def test_an_eager_watch():
    x = jnp.ones(3)
    assert hc.watch(x) is x
    assert np.isnan(fired(hc.watch, x * np.nan).values).all()


def test_threads_get_their_own_errors():
    f = jax.jit(down)
    f(20.0)
    found = {}

    def run(start):
        try:
            jax.block_until_ready(f(start))
        except WatchError as error:
            found[start] = error

    threads = [threading.Thread(target=run, args=(x + 0.5,)) for x in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {x: error.step for x, error in found.items()} == {
        x + 0.5: x + 1 for x in range(6)
    }
    assert all(error.also == -0.5 for error in found.values())


# --- Other actions ----------------------------------------------------------------------


def test_log_goes_on(caplog):
    f = jax.jit(lambda x: down(x, action="log"))
    with caplog.at_level(logging.WARNING, "hostcall"):
        assert np.isnan(f(0.5)).sum() == 7
        jax.effects_barrier()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3  # of seven: the rest would flood the log
    assert "state is not finite at step 1" in said[0]
    assert "[time 3 at" in said[2]


def test_an_action_of_yours_gets_the_error():
    seen = []
    f = jax.jit(lambda x: down(x, action=seen.append))
    y = f(5.5)
    jax.effects_barrier()
    assert [error.step for error in seen] == [6, 7]
    assert [float(error.also) for error in seen] == [-0.5, -1.5]
    assert np.isnan(y).sum() == 2


# --- Mistakes ---------------------------------------------------------------------------

MISTAKES = {
    "check": ((1.0, "nan"), {}, 'check= of hc.watch should be "finite" or a function'),
    "keep": ((1.0,), {"keep": 3}, "hc.watch has no keep= any more: hc.Recorder"),
    "action": ((1.0,), {"action": "stop"}, "'raise', 'log' or a function of the error"),
    "breakpoint": (
        (1.0,),
        {"action": "breakpoint"},
        r"as lambda error: breakpoint\(\)",
    ),
    "name": ((1.0,), {"name": 3}, r"name= of hc.watch should be a str, got 3"),
    "no floats": (
        ({"a": 1, "b": "text"},),
        {},
        r"nothing in hc.watch\(x\) can be nan or infinite: it has int, str",
    ),
    "no array of JAX": (
        (np.array([1, np.nan], ">f4"),),
        {},
        r"nothing in hc.watch\(x\) can be nan or infinite: it has >f4",
    ),
    "no number of JAX": ((np.longdouble(1),), {}, "can be nan or infinite: it has "),
    "no bool": (
        (jnp.ones(2), lambda x: x > 0),
        {},
        r"should return a bool scalar, got bool\[2\]. Reduce it with jnp.all",
    ),
    "where": ((1.0,), {"where": jnp.ones(2, bool)}, "where"),
}
WRITTEN_FOR_NUMBERS = {
    "NumPy": lambda v: np.isfinite(v).all(),
    "bool": lambda v: bool(jnp.isfinite(v).all()),
    "if": lambda v: v[0] > 0 and v[1] > 0,
    "float": lambda v: float(v[0]) > 0,
    "int": lambda v: range(v[0].astype(int))[0],
}


@pytest.mark.parametrize("name", WRITTEN_FOR_NUMBERS)
def test_a_check_that_is_no_jax_code(name):
    check = WRITTEN_FOR_NUMBERS[name]
    with pytest.raises(SpecError) as found:
        jax.jit(lambda x: hc.watch(x, check, name="loss"))(jnp.ones(2))
    assert str(found.value) == (
        "hostcall: check= of hc.watch(loss) is part of the program, and `<lambda>` used"
        " a traced value as a number, as bool(), float(), `if` and NumPy do. Write it"
        " with jnp, and let it return a bool scalar that is computed: lambda x:"
        " jnp.isfinite(x).all()"
        "\n[hc-option] python -m hostcall explain hc-option"
    )
    assert isinstance(found.value.__cause__, TypeError)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    args, options, text = MISTAKES[name]
    with pytest.raises(SpecError, match=text):
        hc.watch(*args, **options)
