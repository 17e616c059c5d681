"""A program that two threads load at the same time."""

from __future__ import annotations

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registered as r

import hostcall as hc
from hostcall._export import methods

pytest.importorskip("flatbuffers")

SCALAR = jax.ShapeDtypeStruct((), np.float32)
ONE = jnp.float32(1)


def test_two_threads_that_load_a_program_share_its_objects(monkeypatch):
    """One loads it after the other has made its object, and before that is known."""
    with hc.Object(r.Walk, methods={"step": SCALAR}) as env:
        data = bytes(hc.export(lambda x: env.step(x))(ONE))
    count, second = itertools.count(1), []

    def slow(*args, **options):
        made = hc.Object(*args, **options)
        if next(count) == 1:
            second.append(hc.load(data))
        return made

    monkeypatch.setattr(methods, "Object", slow)
    first = hc.load(data)
    both = [first, *second]
    assert [float(each.call(ONE)) for each in both] == [1, 2]
    states = [each.objects["Walk"].save()["objects"] for each in both]
    assert [pickle.loads(state[()]).at for state in states] == [2, 2]
