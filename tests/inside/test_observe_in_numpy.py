"""What NumPy computes in XLA's place, where the host looks for a cause: the same bits.

Each equation runs both ways. The numbers are those at which processors and libraries
differ: zeros of both signs, numbers that are not normal, infinities, the largest and the
smallest integers, and any bits.
"""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from hostcall._jax import jaxprs
from hostcall.tools._observe import in_numpy

BITS = {"float32": np.uint32, "float64": np.uint64}
DTYPES = ["bool", "float32", "float64", "int8", "int32", "int64", "uint8", "uint64"]
SIGNED = ["float32", "float64", "int8", "int32", "int64"]
SHAPE = (2, 3)

pytestmark = pytest.mark.usefixtures("x64")


def numbers(dtype):
    """Numbers of a type, of which most are special."""
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return st.booleans()
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return st.sampled_from([0, 1, info.min, info.max]) | st.integers(
            int(info.min), int(info.max)
        )
    info = np.finfo(kind)
    near = [kind.type(1), info.tiny, info.max]
    special = [0.0, info.smallest_subnormal, np.inf, np.nan, 2.0, 2.0**31, 2.0**63]
    special += [*near, *(np.nextafter(x, kind.type(0)) for x in near)]
    signed = [sign * float(x) for x in special for sign in (1, -1)]
    most = np.iinfo(BITS[kind.name]).max
    any_bits = st.integers(0, int(most)).map(
        lambda bits: float(np.array(bits, BITS[kind.name]).view(kind))
    )
    return st.sampled_from(signed) | any_bits


def arrays(dtype, shape=SHAPE):
    size = int(np.prod(shape))
    lists = st.lists(numbers(dtype), min_size=size, max_size=size)
    return lists.map(lambda values: np.array(values, dtype).reshape(shape))


def compare(function, *operands):
    """Runs the one equation of a function by NumPy and by XLA."""
    (eqn,) = jax.make_jaxpr(function)(*operands).jaxpr.eqns
    with np.errstate(all="ignore"):
        (by_numpy,) = map(np.asarray, in_numpy.evaluate(eqn, operands))
    (by_xla,) = map(np.asarray, jaxprs.evaluate(eqn, operands))
    assert (by_numpy.shape, by_numpy.dtype) == (by_xla.shape, by_xla.dtype)
    if by_xla.dtype.kind != "f":
        np.testing.assert_array_equal(by_numpy, by_xla)
        return
    is_nan = np.isnan(by_xla)
    np.testing.assert_array_equal(np.isnan(by_numpy), is_nan)
    bits = BITS[by_xla.dtype.name]
    np.testing.assert_array_equal(
        np.ascontiguousarray(by_numpy).view(bits)[~is_nan],
        np.ascontiguousarray(by_xla).view(bits)[~is_nan],
    )


OF_TWO = {
    name: getattr(lax, name)
    for name in [
        "add",
        "sub",
        "mul",
        "div",
        "max",
        "min",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    ]
}
OF_ONE = {
    name: getattr(lax, name)
    for name in ["square", "sqrt", "is_finite", "abs", "neg", "sign"]
}


@pytest.mark.parametrize("name", OF_TWO)
@given(data=st.data())
def test_operations_of_two_arrays(name, data):
    dtype = data.draw(st.sampled_from(DTYPES[1:]))
    compare(OF_TWO[name], data.draw(arrays(dtype)), data.draw(arrays(dtype)))


@pytest.mark.parametrize("name", OF_ONE)
@given(data=st.data())
def test_operations_of_one_array(name, data):
    dtypes = SIGNED
    if name in ("sqrt", "is_finite"):
        dtypes = [*BITS]
    dtype = data.draw(st.sampled_from(dtypes))
    compare(OF_ONE[name], data.draw(arrays(dtype)))


@pytest.mark.parametrize("to", DTYPES)
@given(data=st.data())
def test_conversions(to, data):
    others = [dtype for dtype in DTYPES if dtype != to]
    x = data.draw(arrays(data.draw(st.sampled_from(others))))
    params = {"new_dtype": np.dtype(to), "weak_type": False, "sharding": None}
    compare(lambda x: lax.convert_element_type_p.bind(x, **params), x)


@given(data=st.data())
def test_flags(data):
    x = data.draw(arrays("bool"))
    y = data.draw(arrays("bool"))
    compare(lax.bitwise_and, x, y)
    compare(lax.bitwise_or, x, y)
    compare(lax.bitwise_not, x)


MOVES = {
    "broadcast": lambda x: lax.broadcast_in_dim(x, (2, 4, 3), (0, 2)),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "expand": lambda x: lax.expand_dims(x, (0, -1)),
    "reshape": lambda x: lax.reshape(x, (3, 2)),
    "reshape of a transpose": lambda x: lax.reshape(x, (6,), dimensions=(1, 0)),
    "reverse": lambda x: lax.rev(x, (1,)),
    "slice": lambda x: lax.slice(x, (0, 1), (2, 3), (1, 2)),
    "transpose": lambda x: lax.transpose(x, (1, 0)),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_moves(name, dtype):
    compare(MOVES[name], np.arange(6).reshape(SHAPE).astype(dtype))


@given(data=st.data())
def test_choices(data):
    cases = [data.draw(arrays("float32")) for _ in range(3)]
    flags = data.draw(arrays("bool"))
    compare(lax.select_n, flags, *cases[:2])
    # JAX promises nothing of numbers that stand for no case, and XLA takes them.
    which = st.integers(-2, 4)
    compare(lax.select_n, np.int32(data.draw(which)), *cases)
    each = st.lists(which, min_size=6, max_size=6)
    compare(lax.select_n, np.array(data.draw(each), np.int32).reshape(SHAPE), *cases)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_product_that_only_rounding_makes_normal(dtype):
    """It is below the smallest normal number, for which XLA has a zero."""
    info = np.finfo(dtype)
    one = np.full(8, 1, dtype)
    below_one = np.nextafter(one, 0)
    compare(lax.mul, below_one, one * info.tiny)
    compare(lax.mul, one, one * info.tiny)
    compare(lax.div, one * info.tiny, one / below_one)


@pytest.mark.parametrize("pair", [(0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0), (0.0, 0.0)])
@pytest.mark.parametrize("name", ["max", "min"])
def test_signs_of_zeros(name, pair):
    for shape in [(), (1,), (33,)]:
        compare(OF_TWO[name], *(np.full(shape, x, np.float32) for x in pair))
