"""`hc.observe(nans=True)` runs equations again on the host: what it computes there is
what the device has computed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hostcall import observe

X = jnp.array([[0.5, 2.0, -4.0], [0.25, -1.0, 8.0]])
Y = jnp.array([[2.0, 2.0, -0.5], [-8.0, 4.0, 1.0]])
f32 = jnp.float32


def raised(f, *args):
    with pytest.raises(FloatingPointError) as caught, observe(nans=True):
        jax.block_until_ready(f(*args))
    return str(caught.value)


def integers(x):
    return lax.convert_element_type(x * 4, np.int32)


OPERATIONS = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "max": lax.max,
    "min": lax.min,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: abs(x),
    "square": lambda x, y: lax.square(x),
    "sqrt": lambda x, y: lax.sqrt(x * x * x * x),
    "tests": lambda x, y: (x < y) & (x <= y) | (x == y) & ~(x > y) | (x != y),
    "not less": lambda x, y: x >= y,
    "finite": lambda x, y: lax.is_finite(x),
    "all": lambda x, y: lax.reduce_and(x > y, [1]),
    "any": lambda x, y: lax.reduce_or(x > y, [0]),
    "integers": lambda x, y: lax.max(integers(x) * integers(y), -integers(y)),
    "integers that are divided": lambda x, y: integers(x) // (integers(y) + 64),
    "chosen": lambda x, y: lax.select(x > y, x, y),
    "one of three": lambda x, y: lax.select_n(integers(x) % 3, x, y, x),
    "broadcast": lambda x, y: lax.broadcast_in_dim(x, (2, 4, 3), (0, 2)),
    "joined": lambda x, y: lax.concatenate([x, y], 1),
    "turned": lambda x, y: lax.rev(x, [1]),
    "transposed": lambda x, y: x.T,
    "in another shape": lambda x, y: lax.reshape(x, (3, 2)),
    "a part": lambda x, y: lax.slice(x, (0, 1), (2, 3), (1, 2)),
    "an axis more": lambda x, y: lax.squeeze(lax.expand_dims(x[:1], [0]), [1]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_same_result_as_on_the_device(name):
    """Else its difference from that would not be zero."""
    f = lambda x, y: lax.convert_element_type(OPERATIONS[name](x, y), f32)
    expected = jax.jit(f)(X, Y)
    program = jax.jit(lambda x, y, expected: 1 / (f(x, y) - expected))
    assert "div made the first bad value, inf at [" in (
        text := raised(program, X, Y, expected)
    )
    assert "from 1, 0 " in text


def test_a_number_too_small_to_be_normal_is_zero():
    """As on the CPU: its logarithm would be finite."""
    program = jax.jit(lambda x: jnp.log(x * 1e-25))
    assert "log made the first bad value, -inf, from 0" in raised(program, f32(1e-20))


def test_a_number_too_small_to_be_normal_keeps_its_sign():
    program = jax.jit(lambda x: 1 / (x * -1e-25))
    assert "div made the first bad value, -inf, from 1, -0" in raised(
        program, f32(1e-20)
    )


def test_an_infinity_of_a_narrower_type():
    """float64 to float32: an overflow, of which NumPy would warn."""
    with jax.enable_x64(True):
        program = jax.jit(lambda x: lax.convert_element_type(x * 2, f32) + 1)
        assert "convert_element_type made" in raised(program, np.float64(1e300))
