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
        " seconds (a float) above 0, got 0",
    ),
    "rows": (
        lambda: hc.progress(1, rows="all"),
        "rows= should be 'batched' (one bar for the batch) or 'each' (a bar for each"
        " row), got 'all'",
    ),
    "bar": (
        lambda: hc.progress(1, bar="tqdm"),
        "bar= should be 'auto' (tqdm), 'rich', or a function that returns a bar, got"
        " 'tqdm'",
    ),
    "array metric": (
        lambda: hc.progress(1, norms=jnp.ones(3)),
        "keywords that are not options of hc.progress are metrics, and the metric"
        " norms= should be a real scalar, such as x.mean(), or a text, got float32[3]",
    ),
    "complex metric": (lambda: hc.progress(1, z=1j), "or a text, got 1j"),
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
