"""What a file declares of an object, as its group has it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import registered as r

import hostcall as hc

pytest.importorskip("flatbuffers")

KEY = jax.ShapeDtypeStruct((3,), jax.random.key(0).dtype)


def test_64_bit_objects_where_64_bits_are_off():
    with jax.enable_x64(True):
        env = hc.Object(
            r.Walk,
            methods={"step": jax.ShapeDtypeStruct((), np.float64), "key": KEY},
        )
        data = bytes(hc.export(lambda x: env.step(x))(np.float64(1)))
    declared = hc.load(data).objects["Walk"]._group.methods
    assert declared["step"].avals[0].dtype == np.float64
    assert declared["key"].keys == (KEY.dtype,)
    assert declared["key"].avals[0].shape == (3, 2)
