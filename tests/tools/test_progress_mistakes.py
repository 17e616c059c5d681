"""The messages of `hc.progress`: what came, what was wanted, and what to type."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc

MISTAKES = {
    "float step": (
        lambda: hc.progress(0.5),
        "the step should be an integer scalar, the loop's counter: the index of a"
        " fori_loop, or the x of a scan over jnp.arange(n), got 0.5",
    ),
    "array step": (lambda: hc.progress(jnp.arange(3)), "jnp.arange(n), got int32[3]"),
    "traced step": (
        lambda: jax.jit(lambda x: hc.progress(x))(1.0),
        "an integer scalar, the loop's counter: the index of a fori_loop, or the x of a"
        " scan over jnp.arange(n), got float32[]",
    ),
    "bool step": (lambda: hc.progress(True), "jnp.arange(n), got True"),
    "step and total exchanged": (
        lambda: jax.jit(lambda i: hc.progress(100, i))(3),
        "number of steps: hc.progress(i, n). The total is a value of the loop, but the"
        " step is not, got 100",
    ),
    "float total": (
        lambda: hc.progress(1, 1e3),
        "total= should be an int or an integer scalar, the number of steps, or None if"
        " it is not known, got 1000.0",
    ),
    "initial": (
        lambda: hc.progress(1, 5, initial=np.int32(2)),
        "initial= should be an int, the number of the first step, which is part of the"
        " compiled program, got np.int32(2)",
    ),
    "every": (
        lambda: hc.progress(1, every=0),
        "every= of the tap `hc.progress` should be a number of executions (an int) or of"
        " seconds (a float) above 0 and below 2**31, got 0",
    ),
    "rows": (
        lambda: hc.progress(1, rows="all"),
        "rows= should be 'batched' (one bar for the batch) or 'each' (a bar for each"
        " row), got 'all'",
    ),
    "bar": (
        lambda: hc.progress(1, bar="tqdm"),
        "bar= should be 'auto' (tqdm), or a function that returns a bar, got 'tqdm'",
    ),
    "array metric": (
        lambda: hc.progress(1, norms=jnp.ones(3)),
        "keywords that are not options of hc.progress are metrics, and the metric"
        " norms= should be a real scalar, such as x.mean(), or a text, got float32[3]",
    ),
    "complex metric": (lambda: hc.progress(1, z=1j), "or a text, got 1j"),
    "a scan without a counter": (
        lambda: jax.lax.scan(
            hc.progress.scan(lambda c, x: (c, x), 10), 0, None, length=10
        ),
        "the step should be an integer scalar, the loop's counter: the index of a"
        " fori_loop, or the x of a scan over jnp.arange(n) (that of hc.progress.scan, in"
        " place of xs=None), got None",
    ),
    "an option of hc.tap": (
        lambda: hc.progress(1, 10, where=jnp.bool_(True)),
        "hc.progress has no option where=, and keywords that it does not know are"
        " metrics. This one is an option of hc.tap, and hc.progress can't take it. Leave"
        " it out; every= says how often the bar is drawn. A metric needs another name",
    ),
    "a share of the steps": (
        lambda: hc.progress(1, 10, sample=0.1),
        "Write every=, an interval in seconds (a float) or in steps (an int)",
    ),
    "an option of tqdm": (
        lambda: hc.progress(1, 10, color="green"),
        "hc.progress has no option color=, and keywords that it does not know are"
        " metrics. This one is an option of tqdm. Write bar=functools.partial(tqdm.tqdm,"
        " colour='green'). A metric needs another name",
    ),
    "an interval of tqdm": (
        lambda: hc.progress(1, 10, mininterval=0.5),
        "This one is an option of tqdm. Write every=, an interval in seconds",
    ),
    "a bar that is switched off": (
        lambda: hc.progress(1, 10, disable=True),
        "Set HOSTCALL_PROGRESS=0 in the environment to run without bars",
    ),
    "the number of steps": (
        lambda: hc.progress(1, n=10),
        "has no option n=, and keywords that it does not know are metrics. This one is"
        " the number of steps, perhaps. Write it as the second argument, hc.progress(i,"
        " 10)",
    ),
    "wrapper without a body": (
        lambda: hc.progress.scan(100),
        "the first argument of hc.progress.scan should be the body of the loop (the"
        " decorator of jax-tqdm, which takes a number of steps, is"
        " hostcall.tools.jax_tqdm.scan_tqdm), got 100",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name):
    make, text = MISTAKES[name]
    with pytest.raises(hc.errors.SpecError) as caught:
        make()
    assert str(caught.value).startswith("hostcall: ")
    assert text in str(caught.value)


def test_metrics_with_names_like_options(capsys):
    @jax.jit
    def steps(x):
        def body(i, c):
            hc.progress(i, 3, n=x, sample=x, batch=i, position=1)
            return c

        return jax.lax.fori_loop(0, 3, body, x)

    steps(2.0)
    hc.barrier()
    assert "batch=2, n=2, position=1, sample=2" in capsys.readouterr().err


def test_constants_with_names_of_options_of_other_types(capsys):
    jax.jit(lambda x: hc.progress(x, n=2.5, sample=3))(0)
    jax.jit(lambda x: hc.progress(x, n="t", sample="all"))(0)
    hc.barrier()
    err = capsys.readouterr().err
    assert "n=2.5, sample=3" in err
    assert "n=t, sample=all" in err


def test_arrays_are_metrics_by_any_name():
    names = ("order", "on", "leave", "color", "miniters", "disable")
    f = lambda x: hc.progress(0, 1, **dict.fromkeys(names, x))
    assert jax.make_jaxpr(f)(jnp.float32(3)).eqns
