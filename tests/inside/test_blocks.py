"""Which blocks of a value the devices of a process hold.

Tests in this folder look at private parts: what they check can't be seen from outside, or
only in programs that are too many or too rare.
"""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import line

from hostcall._primitives import blocks
from hostcall._primitives.tap import partitioned


def box(*ends):
    return tuple(ends)


HULLS = {
    "one": ([box((0, 2), (0, 3))], box((0, 2), (0, 3))),
    "rows": ([box((0, 2), (0, 3)), box((2, 4), (0, 3))], box((0, 4), (0, 3))),
    "square": (
        [box((i, i + 1), (j, j + 1)) for i in (0, 1) for j in (4, 5)],
        box((0, 2), (4, 6)),
    ),
    "scalar": ([box()], box()),
    "apart": ([box((0, 1)), box((2, 3))], None),
    "a corner": ([box((0, 1), (0, 1)), box((0, 1), (1, 2)), box((1, 2), (0, 1))], None),
}


@pytest.mark.parametrize("name", HULLS)
def test_blocks_that_make_one(name):
    given, whole = HULLS[name]
    assert partitioned.hull(set(given)) == whole


GRIDS = {
    "halves": ({box((0, 2)): [0], box((2, 4)): [1]}, (4,), [2]),
    "a square": (
        {box((i, i + 2), (j, j + 3)): [i, j] for i in (0, 2) for j in (0, 3)},
        (4, 6),
        [2, 2],
    ),
    "of different sizes": ({box((0, 3)): [0], box((3, 4)): [1]}, (4,), None),
    "on unequally many devices": ({box((0, 2)): [0], box((2, 4)): [1, 2]}, (4,), None),
    "overlapping": ({box((0, 2)): [0], box((1, 3)): [1]}, (4,), None),
    "not all of it": ({box((0, 2)): [0], box((2, 4)): [1]}, (6,), None),
}


@pytest.mark.parametrize("name", GRIDS)
def test_parts_that_tile_a_value(name):
    owners, shape, tiles = GRIDS[name]
    assert partitioned.grid(owners, shape) == tiles


def test_blocks_of_different_sizes_are_gathered():
    # JAX refuses such shardings from a user, but the compiler may choose one.
    class Uneven:
        shape = (10,)

        class sharding:
            @staticmethod
            def devices_indices_map(shape):
                raise AssertionError("ragged")

    everywhere = object()
    assert blocks._even(Uneven, everywhere) is everywhere
    even = jax.ShapeDtypeStruct(
        (4,), np.float32, sharding=NamedSharding(line(), P("x"))
    )
    assert blocks._even(even, everywhere) is even.sharding
