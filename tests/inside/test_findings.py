"""What `hc.monitor.report` finds in counts: the rule behind each remedy.

Programs can't be made to need a given number of seconds.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall._api.report import _finding, _Row
from hostcall._engine.counters import Facts, costs
from hostcall.monitor import CallStats

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


NONE = CallStats(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)


def stats(calls: int, **others: float) -> CallStats:
    return dataclasses.replace(NONE, calls=calls, **others)


def call(**others: object) -> Facts:
    facts = {"kinds": {"call"}, "arrays": {"numpy"}, "nothing": False, **others}
    return Facts(**facts)  # type: ignore[arg-type]


TAP = Facts({"tap"}, {"numpy"}, {"sequential"})


RULES = {
    "queue": (stats(100, python_seconds=1.0, wait_seconds=2.0), TAP, "every="),
    "gil": (stats(100, python_seconds=0.1, gil_seconds=1.0), call(), "release it"),
    "gil, no result": (
        stats(100, python_seconds=0.1, gil_seconds=1.0),
        call(nothing=True),
        "hc.tap",
    ),
    "no result": (stats(100, python_seconds=1.0), call(nothing=True), "hc.tap hands"),
    "jax arrays": (
        stats(10_000, python_seconds=0.1),
        call(arrays={"jax"}),
        'arrays="numpy" hands out NumPy arrays',
    ),
    "drop-in": (
        stats(10_000, python_seconds=0.1),
        call(arrays={"free"}),
        "instead of the drop-in",
    ),
    "rows": (
        stats(10_000, python_seconds=0.1),
        call(methods={"sequential"}, rows=64),
        'vmap_method="expand_dims"',
    ),
    "slow rows": (
        stats(100, python_seconds=2.0),
        call(methods={"sequential"}, rows=4),
        'vmap_method="parallel"',
    ),
    "copies": (
        stats(100, python_seconds=0.1, bytes_in=100 << 20),
        call(),
        "lend=True",
    ),
    "many taps": (stats(1_000_000, python_seconds=1.0), TAP, "batch="),
}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_has_its_remedy(name):
    counted, facts, remedy = RULES[name]
    found = _finding(_Row("f", counted, facts))
    assert remedy in found.remedy
    assert found.cause


# What keeps each rule from firing.
QUIET = {
    "little time": (stats(100, python_seconds=1e-4), call(nothing=True)),
    "few calls": (stats(2, python_seconds=1.0), call(nothing=True)),
    "a slow function": (stats(100, python_seconds=2.0), call(arrays={"jax"})),
    "one row": (stats(10_000, python_seconds=0.1), call(methods={"sequential"})),
    "lent": (stats(100, python_seconds=0.1, bytes_in=100 << 20), call(lends=True)),
    "small": (stats(100, python_seconds=0.1, bytes_in=100), call()),
    "few taps": (stats(1000, python_seconds=0.1), TAP),
}


@pytest.mark.parametrize("name", QUIET)
def test_a_rule_that_does_not_fit_says_nothing(name):
    assert _finding(_Row("f", *QUIET[name])).remedy == ""


def test_programs_give_the_facts():
    @jax.jit
    @jax.vmap
    def rows(x):
        return hc.call(lambda x: x, SCALAR, x, tag="report rows", lend=True)

    rows(jnp.arange(12.0)).block_until_ready()
    jax.jit(
        lambda x: hc.call(lambda x: None, None, x, tag="report none", order="ordered")
    )(1.0)
    hc.tap(lambda x: None, np.float32(1), tag="report tap")
    hc.barrier()
    facts = dict(costs.facts)
    assert facts["report rows"] == Facts(
        {"call"}, {"numpy"}, {"sequential"}, 12, True, False
    )
    assert facts["report none"].nothing
    assert facts["report tap"].kinds == {"tap"}
