"""Which blocks of a value devices hold.

Tests in this folder look at private parts: what they check can't be seen from outside, or
only in programs that are too many or too rare.
"""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import line

from hostcall._primitives import blocks


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
