"""What a function may return for a `result=`, and what is refused."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import without_xlas_words

import hostcall as hc

JaxRuntimeError = jax.errors.JaxRuntimeError
MODES = {"eager": lambda f: f, "jit": jax.jit}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def spec(dtype="float32", *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


F32, I32 = spec(), spec("int32")


def returning(value, result, order="pure"):
    """A program with a callback `give` that returns `value`."""

    def give():
        return value

    return lambda: hc.call(give, result, order=order)


def refusal(mode, value, result):
    """Checks that the value is refused, and returns the error's text."""
    program = mode(returning(value, result, "unordered"))
    with pytest.raises(hc.errors.ResultError) as caught, hc.reraise():
        jax.block_until_ready(program())
    text = str(caught.value)
    assert text.startswith("hostcall: ")
    assert "give`" in text
    if mode is jax.jit:
        with pytest.raises(JaxRuntimeError) as plain:
            jax.block_until_ready(program())
            jax.effects_barrier()  # without results, a GPU's failure comes here
        # The place comes between the message and the line of its code.
        message, line = text.rsplit("\n", 1)
        assert f"ResultError: {message} (in callback `" in str(plain.value)
        assert without_xlas_words(str(plain.value)).endswith(f"]\n{line}")
        assert f"called at {__file__}" in str(plain.value)
    return text


# --- Structure ---------------------------------------------------------------------

STRUCTURES = {
    "too few": ((1.0,), (F32, F32), "Expected (*, *), got (*,)"),
    "too many": ((1.0, 2.0), (F32,), "Expected (*,), got (*, *)"),
    "one for a tuple": (1.0, (F32, F32), "Expected (*, *), got *"),
    "list for a tuple": ([1.0, 2.0], (F32, F32), "Expected (*, *), got [*, *]"),
    "tuple for a list": ((1.0,), [F32], "Expected [*], got (*,)"),
    "other keys": (
        {"b": 1.0},
        {"a": F32},
        "Expected {'a': *}, got {'b': *}. Change what the function returns, or what",
    ),
    "deeper": ({"a": (1.0,)}, {"a": [F32]}, "Expected {'a': [*]}, got {'a': (*,)}"),
    "something for None": (3, None, "The call has result=None: return nothing"),
    "arrays for nothing": ([1.0], [], "The call has result=None: return nothing"),
}


@modes
@pytest.mark.parametrize(
    ("value", "result", "say"), STRUCTURES.values(), ids=STRUCTURES
)
def test_another_structure_is_refused(mode, value, result, say):
    text = refusal(mode, value, result)
    assert "returned a structure that differs from its result=" in text
    assert say in text


@modes
@pytest.mark.parametrize("result", [F32, (F32, F32), {"a": F32}], ids=str)
def test_a_forgotten_return_is_named(mode, result):
    assert "Does the function lack a `return`?" in refusal(mode, None, result)


@modes
def test_none_for_a_leaf_is_refused(mode):
    assert "result[0] of" in refusal(mode, (None, 1.0), (F32, F32))


# --- Shapes ------------------------------------------------------------------------

SHAPES = {
    "shorter": (
        {"a": np.zeros(2, np.float32)},
        {"a": spec("float32", 3)},
        "result['a'] of ",
        "should be float32[3], got float32[2].",
    ),
    "scalar": (1.5, spec("float32", 1), "result of ", "float32[1], got float64[]."),
    "vector": ([1.5], F32, "result of ", "Return x.item() or x.reshape(()) for a"),
    "two numbers": ([1.5, 2], F32, "result of ", "float64[2]. Change what the"),
    "transposed": (
        (np.zeros((2, 3)), 0.0),
        (spec("float32", 3, 2), F32),
        "result[0] of ",
        "should be float32[3,2], got float64[2,3].",
    ),
    "one more axis": (
        np.zeros((8, 3), np.float32),
        spec("float32", 3),
        "result of ",
        "got float32[8,3]. Change what the function returns, or what result= declares",
    ),
    "an axis of size 1": (
        np.zeros((1, 3), np.float32),
        spec("float32", 3),
        "result of ",
        "got float32[1,3]. Return x.reshape((3,))",
    ),
    "empty": (np.zeros((0,)), spec("float32", 2), "result of ", "got float64[0]."),
    "broadcast": (np.zeros((1, 2)), spec("float32", 3, 2), "result of ", "[1,2]."),
}


@modes
@pytest.mark.parametrize(
    ("value", "result", "path", "say"), SHAPES.values(), ids=SHAPES
)
def test_another_shape_is_refused(mode, value, result, path, say):
    text = refusal(mode, value, result)
    assert path in text
    assert say in text


BATCHES = {
    "rows": (
        {},
        lambda x: np.zeros((4, *x.shape), np.float32),
        "should be float32[2], got float32[4,2]. Does the function return the whole"
        " batch where one row is wanted?",
    ),
    "rows, an axis of size 1": (
        {},
        lambda x: x[None],
        "got float32[1,2]. Return x.reshape((2,))",
    ),
    "no axis of the batch": (
        {"vmap_method": "expand_dims"},
        lambda x: x[0],
        'should be float32[4,2], got float32[2]. With vmap_method="expand_dims" the'
        " function gets all 4 rows at once, and must return one result for each, along"
        " a new axis in front",
    ),
    "without some rows": (
        {"vmap_method": "broadcast_all", "where": "mask"},
        lambda x: x[0],
        'should be float32[3,2], got float32[2]. With vmap_method="broadcast_all" the'
        " function gets all 3 rows at once",
    ),
}


@modes
@pytest.mark.parametrize(("options", "give", "say"), BATCHES.values(), ids=BATCHES)
def test_another_shape_under_vmap_is_refused(mode, options, give, say):
    def row(x, mask):
        given = {**options, "where": mask} if "where" in options else options
        return hc.call(give, spec("float32", 2), x, **given)

    program = mode(jax.vmap(row))
    rows = jnp.ones((4, 2)), jnp.arange(4) > 0
    with pytest.raises(hc.errors.ResultError) as caught, hc.reraise():
        jax.block_until_ready(program(*rows))
    assert say in str(caught.value)


SHAPES_FOR_RESULTS = {
    "tuple": ((3,), np.zeros(3), "It declares 1 integer. For an array write"),
    "list": ([2, 3], np.zeros((2, 3)), "write jax.ShapeDtypeStruct((2, 3), dtype)"),
    "another shape": ((4, 4), np.zeros((2, 3)), "Is result= meant as a shape? It decl"),
}


@modes
@pytest.mark.parametrize(
    ("result", "value", "say"), SHAPES_FOR_RESULTS.values(), ids=SHAPES_FOR_RESULTS
)
def test_a_shape_in_place_of_a_result_is_named(mode, result, value, say):
    assert say in refusal(mode, value, result)


@modes
def test_python_integers_as_results(mode):
    assert mode(returning((7, 8), (2, 3)))() == (7, 8)


@modes
def test_a_ragged_list_is_refused(mode):
    text = refusal(mode, [[1.0, 2.0], [3.0]], spec("float32", 2, 2))
    assert "is a list that NumPy can't read" in text


# --- Numbers -----------------------------------------------------------------------

LOSSY = {
    "wide integer": (np.int64(2**40), "int32", "got int64 holding 1099511627776"),
    "wide Python int": (2**40, "int32", "which int32 can't hold"),
    "wider than C": (2**100, "int32", "result of "),
    "low": (np.array(-(2**31) - 1), "int32", "holding -2147483649"),
    "negative": (-1, "uint8", "holding -1, which uint8 can't hold"),
    "unsigned": (np.uint8(200), "int8", "got uint8 holding 200"),
    "small": (np.int8(8), "int4", "got int8 holding 8, which int4 can't hold"),
    "smaller": (4, "uint2", "holding 4, which uint2 can't hold"),
    "number for bool": (
        1,
        "bool",
        "hostcall does not convert integer to bool silently: return bool(x)",
    ),
    "float": (
        np.float32(2.0),
        "int32",
        "should be int32, got float32. hostcall does not convert float to integer"
        " silently: return x.astype('int32') if that",
    ),
    "Python float": (2.0, "int32", "got float64 from Python numbers."),
    "rounded": (2.0, "int32", "silently: return round(x) if that is what you mean"),
    "float8": (jnp.float8_e4m3fn(2.0), "int32", "got float8_e4m3fn."),
    "complex": (
        1 + 2j,
        "float32",
        "hostcall does not convert complex to float silently: return x.real if that is"
        " what you mean, or declare complex64",
    ),
    "complex for integer": (
        np.complex64(1 + 2j),
        "int32",
        "return x.real.astype('int32') if that is what you mean",
    ),
    "integer for float": (2**24 + 1, "float32", "that float32 can't hold exactly"),
    "integer for half": (np.int32(2049), "float16", "can't hold exactly"),
    "text": ("2.0", "float32", "got str '2.0', which is not an array of numbers"),
    "object": (object(), "float32", "which is not an array of numbers"),
}


@modes
@pytest.mark.parametrize(("value", "dtype", "say"), LOSSY.values(), ids=LOSSY)
def test_numbers_are_not_changed_silently(mode, value, dtype, say):
    text = refusal(mode, value, spec(dtype))
    assert say in text


ADVICE = {  # (value, dtype, shape, what to return)
    "bool": (1, "bool", (), "bool(x)"),
    "bools": ([1, 0], "bool", (2,), "np.asarray(x).astype('bool')"),
    "integer": (2.0, "int32", (), "round(x)"),
    "integers": ([2.0], "int32", (1,), "np.asarray(x).astype('int32')"),
    "wide": (2**40, "int32", (), "np.asarray(x).astype('int32')"),
    "wide array": (np.array([2**40]), "int32", (1,), "x.astype('int32')"),
    "real": (2j, "float32", (), "x.real"),
    "reals": ([2j], "float32", (1,), "np.asarray(x).real"),
    "real array": (np.array([2j]), "float32", (1,), "x.real"),
    "real integer": (2j, "int32", (), "round(x.real)"),
    "real integers": (np.array([2j]), "int32", (1,), "x.real.astype('int32')"),
    "inexact": (2**24 + 1, "float32", (), "np.asarray(x).astype('float32')"),
    "bytes": (b"ab", "uint8", (2,), "np.frombuffer(x, 'uint8')"),
    "values": ({"a": 1.0}.values(), "float32", (1,), "np.asarray(list(x), 'float32')"),
}


@modes
@pytest.mark.parametrize(
    ("value", "dtype", "shape", "advice"), ADVICE.values(), ids=ADVICE
)
def test_what_a_message_says_to_return_can_be_returned(
    mode, value, dtype, shape, advice
):
    assert f"eturn {advice}" in refusal(mode, value, spec(dtype, *shape))
    mode(returning(eval(advice, {"np": np}, {"x": value}), spec(dtype, *shape)))()


MASKED = np.ma.array(np.float32([1, 2, 3]), mask=[0, 1, 0])
ROW = np.float32([1, 2, 3])
OBJECTS = "not an array of numbers but Python objects. Return np.asarray(x, 'float32')"
NO_NUMBERS = {
    "objects": (ROW.astype(object), OBJECTS),
    "None among them": ([1.0, None, 3.0], OBJECTS),
    "a set": ({1.0, 2.0, 3.0}, "an iterable. Return np.asarray(list(x), 'float32')"),
    "one field": (
        np.zeros(3, [("a", "f4")]),
        "with the fields 'a'. Return one of them",
    ),
    "fields": (np.zeros(3, "f4,f4"), "fields 'f0', 'f1'. Return one of them, x['f0']"),
    "bytes": (np.zeros(3, "V4"), "bytes (|V4). Return x.view('float32')"),
    "dates": (np.zeros(3, "M8[s]"), "Return seconds, (x - x[0]) / np.timedelta64(1,"),
    "durations": (np.zeros(3, "m8[s]"), "Return seconds, x / np.timedelta64(1, 's')"),
    "strings": (
        np.array(["1", "2", "3"]),
        "strings (<U1). Return np.asarray(x, 'float",
    ),
    "byte strings": (np.array([b"1", b"2", b"3"]), "strings (|S1). Return"),
    "new strings": (
        np.array(["1"] * 3, np.dtypes.StringDType()),
        "StringDType()). Ret",
    ),
    "masked": (MASKED, "got a masked array with 1 of 3 elements masked"),
    "masked float64": (MASKED.astype(np.float64), "Return np.ma.filled(x, number)"),
    "masked numbers": ([1.0, np.ma.masked, 3.0], "with 1 of 1 elements masked"),
    "masked rows": (tuple(MASKED[i : i + 1] for i in range(3)), "masks. Return"),
}


@modes
@pytest.mark.parametrize(("value", "say"), NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_refusing_results_that_are_not_numbers_says_what_to_return(mode, value, say):
    result = {"a": spec("float32", 3), "b": F32}
    text = refusal(mode, {"a": value, "b": 1.0}, result)
    assert text.startswith("hostcall: result['a'] of ")
    assert "should be float32[3], got " in text
    assert say in text


def test_host_functions_and_their_rules_refuse_it_too():
    f = hc.host(
        lambda x: np.ma.array(x, mask=x > 2), result=hc.results.like(0), name="f"
    )
    g = hc.host(np.sin, result=hc.results.like(0), name="g")
    g.defjvp(lambda p, t: np.cos(p[0]).astype(object) * t[0])
    h = hc.host(np.sin, result="infer", name="h")
    h.defvjp(lambda x: (x, None), lambda _, ct: (np.zeros(3, "M8[s]"),))
    programs = {
        "masked": lambda x: f(x),
        "Python objects": lambda x: jax.jvp(g, (x,), (x,)),
        "dates": lambda x: jax.grad(lambda x: h(x).sum())(x),
    }
    for say, program in programs.items():
        for mode in MODES.values():
            with pytest.raises(hc.errors.ResultError, match=say), hc.reraise():
                jax.block_until_ready(mode(program)(ROW))
    i = hc.host(lambda x: x.astype(object), result="infer", name="i")
    with pytest.raises(hc.errors.SpecError, match="which JAX arrays can't have"):
        i(ROW)


SUBCLASSES = {
    "nothing masked": np.ma.array(ROW, mask=False),
    "no mask": np.ma.array(ROW, dtype=np.float64),
    "records": ROW.view(np.recarray),
}


@modes
@pytest.mark.parametrize("value", SUBCLASSES.values(), ids=SUBCLASSES)
def test_subclasses_of_arrays_that_hold_their_data_alone(mode, value):
    out = mode(returning(value, spec("float32", 3)))()
    np.testing.assert_array_equal(out, ROW)


@modes
def test_one_bad_integer_among_many_is_found(mode):
    values = np.arange(10_000)
    values[9_876] = 2**31
    assert "holding 2147483648" in refusal(mode, values, spec("int32", 10_000))
    values[9_876] = -7
    out = mode(returning(values, spec("int32", 10_000)))()
    np.testing.assert_array_equal(out, values)


ALLOWED = {
    "float64": (np.float64(1 / 3), "float32", np.float32(1 / 3)),
    "Python float": (1 / 3, "float32", np.float32(1 / 3)),
    "to half": (1 / 3, "float16", np.float16(1 / 3)),
    "to bfloat16": (np.float32(1 / 3), "bfloat16", jnp.bfloat16(1 / 3)),
    "integer": (7, "float32", 7.0),
    "wide but exact": (2**40, "float32", 2.0**40),
    "bool": (True, "int32", 1),
    "bool to float": (np.True_, "float32", 1.0),
    "int64 that fits": (np.int64(-5), "int32", -5),
    "unsigned that fits": (np.uint64(127), "int8", 127),
    "to int4": (-8, "int4", -8),
    "float to complex": (1.5, "complex64", 1.5 + 0j),
    "complex128": (1 / 3 + 1j, "complex64", np.complex64(1 / 3 + 1j)),
    "int to complex": (3, "complex64", 3 + 0j),
}


@modes
@pytest.mark.parametrize(("value", "dtype", "want"), ALLOWED.values(), ids=ALLOWED)
def test_numbers_that_may_become_others(mode, value, dtype, want):
    out = mode(returning(value, spec(dtype)))()
    assert out.dtype == dtype
    assert np.asarray(out) == want


OVERFLOWS = {  # (value, dtype, the number that is named, what it would become)
    "Python float": (1e300, "float32", "1e+300", "inf"),
    "negative": (-1e39, "float32", "-1e+39", "-inf"),
    "just beyond": (3.5e38, "float32", "3.5e+38", "inf"),
    "float64": (np.float64(1e300), "float32", "1e+300", "inf"),
    "array": (np.array([np.inf, 1.0, 1e300]), "float32", "1e+300", "inf"),
    "list": ([1e300, 1.0], "float32", "1e+300", "inf"),
    "half": (np.float32(1e5), "float16", "100000.0", "inf"),
    "bfloat16": (np.float64(3.4e38), "bfloat16", "3.4e+38", "inf"),
    "without infinities": (np.float32(1e5), "float8_e4m3fn", "100000.0", "nan"),
    "to complex": (1e300, "complex64", "1e+300", "(inf+0j)"),
    "real part": (1e300 + 1j, "complex64", "(1e+300+1j)", "(inf+1j)"),
    "imaginary part": (np.array([-1e300j]), "complex64", "(-0-1e+300j)", "(-0-infj)"),
    "beside an infinite part": (
        np.array([complex(np.inf, 1e300)]),
        "complex64",
        "(inf+1e+300j)",
        "(inf+infj)",
    ),
}


@modes
@pytest.mark.parametrize(
    ("value", "dtype", "named", "becomes"), OVERFLOWS.values(), ids=OVERFLOWS
)
def test_a_finite_number_does_not_become_infinite(mode, value, dtype, named, becomes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy's own, which does not name the function
        text = refusal(mode, value, spec(dtype, *np.shape(value)))
    x = "x" if hasattr(value, "dtype") else "np.asarray(x)"
    assert f"should be {dtype}, got " in text
    assert (
        f" holding {named}, which {dtype} can't hold: it would become {becomes}. Scale"
        " or clip it, declare a wider result, or return"
        f" {x}.astype('{dtype}') to let it overflow"
    ) in text
    assert text.endswith("hostcall explain hc-result-dtype")
    with np.errstate(over="ignore"):
        let = eval(f"{x}.astype('{dtype}')", {"np": np}, {"x": value})
    out = mode(returning(let, spec(dtype, *np.shape(value))))()
    np.testing.assert_array_equal(np.asarray(out).astype(complex), let.astype(complex))


@modes
def test_the_largest_numbers_are_held(mode):
    largest = float(np.finfo(np.float32).max)
    assert mode(returning(largest, F32))() == np.float32(largest)
    # A double between it and the infinity is rounded down.
    assert mode(returning(largest * (1 + 2**-26), F32))() == np.float32(largest)


@modes
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_values_that_are_no_numbers_stay_so(mode, dtype):
    result = spec(dtype, 3)
    out = np.asarray(mode(returning([np.nan, np.inf, -np.inf], result))())
    assert np.isnan(out[0])
    assert np.isinf(out[1:]).all()
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(out[1:].real, [np.inf, -np.inf])


@modes
@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_a_call_for_its_effect_returns_nothing(mode, order):
    assert mode(returning(None, None, order))() is None
    assert mode(returning([], [], order))() == []
    program = mode(returning(1.0, None, order))
    with pytest.raises(hc.errors.ResultError, match="result=None"), hc.reraise():
        program()


@modes
def test_no_wide_integers_fit(mode):
    assert mode(returning(np.zeros(0, np.int64), spec("int8", 0)))().dtype == np.int8


@modes
def test_none_in_place_of_an_array(mode):
    text = refusal(mode, [None, 1.0], [F32, F32])
    assert "result[0] of " in text
    assert "should be float32[], got None. Does the function lack" in text


class Refuses:
    """Speaks of DLPack, and gives what nobody can read."""

    def __init__(self, device, capsule):
        self.device, self.capsule = device, capsule

    def __dlpack__(self, **options):
        return self.capsule

    def __dlpack_device__(self):
        return self.device


@modes
@pytest.mark.parametrize(
    "given", [((99, 0), None), ((1, 0), None), ("x", None)], ids=str
)
def test_dlpack_that_can_not_be_read(mode, given):
    text = refusal(mode, Refuses(*given), spec("float32", 3))
    assert "is a Refuses that NumPy can't read" in text


@modes
def test_a_dict_whose_keys_can_not_be_sorted(mode):
    text = refusal(mode, {1: 1.0, "a": 2.0}, {"a": F32})
    assert "got {1: 1.0, 'a': 2.0}, which is no pytree (Comparator raised" in text


@modes
def test_a_refused_result_leaves_the_program_usable(mode):
    values = [1.0, [1.0], 2.0]
    program = mode(lambda: hc.call(lambda: values.pop(0), F32, order="unordered"))
    assert program() == 1
    with pytest.raises(hc.errors.ResultError, match="x.item()"), hc.reraise():
        program()
    assert program() == 2


# --- Typed keys ----------------------------------------------------------------------

KEYS = {name: jax.random.key(3, impl=name) for name in ("rbg", "unsafe_rbg")}


@modes
@pytest.mark.parametrize(
    ("want", "got"), [("rbg", "unsafe_rbg"), ("unsafe_rbg", "rbg")]
)
def test_a_key_of_another_implementation(mode, want, got):
    text = refusal(mode, KEYS[got], KEYS[want])
    assert (
        f"should be {KEYS[want].dtype}[], got {KEYS[got].dtype}[]: the numbers of a key"
        " mean something else in another implementation. Make it with"
        f" jax.random.key(seed, impl='{want}'), or declare the other one"
    ) in text
    assert "hc-result-dtype" in text
    same = mode(returning(KEYS[want], KEYS[want]))()
    assert same.dtype == KEYS[want].dtype
    np.testing.assert_array_equal(
        jax.random.key_data(same), jax.random.key_data(KEYS[want])
    )


@modes
def test_keys_of_another_implementation_in_an_array(mode):
    several = jax.random.split(KEYS["rbg"], 3)
    text = refusal(mode, several, jax.random.split(KEYS["unsafe_rbg"], 3))
    assert "should be key<urbg>[3], got key<rbg>[3]: the numbers" in text


@modes
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_a_key_where_numbers_are_declared(mode, dtype):
    text = refusal(mode, jax.random.key(3), spec(dtype, 2))
    assert (
        f"should be {dtype}[2], got key<fry>[], a PRNG key, which is no number. Return"
        " numbers, or declare the key: jax.ShapeDtypeStruct(x.shape, x.dtype)"
    ) in text


@modes
def test_numbers_where_a_key_is_declared(mode):
    key = jax.random.key(3)
    text = refusal(mode, np.ones(2, np.float32), key)
    assert "should be uint32, got float32. hostcall does not convert float" in text
    # A key's block has all that the key has.
    block = np.asarray(jax.random.key_data(key))
    out = mode(returning(block, key))()
    assert out.dtype == key.dtype
    assert mode(returning(key, spec("uint32", 2)))().tolist() == block.tolist()
