"""What hc.host and hc.call say of results that nobody can read, or that do not come.

One table, for each word that says what a function returns: a signature, annotations and
a ufunc. Each text names the function, the argument or the result, and both values.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

import jax
import numpy as np
import pytest

import hostcall as hc

pytest.importorskip("jaxtyping")
from jaxtyping import Bool, Float, Int, PyTree

A = np.ndarray
X = np.arange(6, dtype=np.float32).reshape(2, 3)
V = X[0]
MATVEC = "(m,n),(n)->(m)"


def matvec(m, v):
    return m @ v


def annotated(m: Float[A, "m n"], v: Float[A, "n"]) -> Float[A, "m"]:
    return m @ v


def no_meaning(x: Float[A, "n"]) -> Float[A, "n+"]: ...
def no_meaning_of_argument(x: Float[A, "n+"]) -> Float[A, "2"]: ...
def unknown(x: Float[A, "n"]) -> Float[A, "k"]: ...
def of_a_value(x: Float[A, "n"], k) -> Float[A, "{k}"]: ...
def negative(x: Float[A, "n"]) -> Float[A, "n-9"]: ...
def shorter(x: Float[A, "n"]) -> Float[A, "n"]:
    return x[:1]


def first(x):
    return x[:1]


def calls(x: Float[A, "n"]) -> Float[A, "{print(n)}"]: ...
def attribute(x: Float[A, "n"]) -> Float[A, "{n.nothing}"]: ...
def anything(x: Float[A, "..."]) -> Float[A, "..."]: ...
def integers(x: Int[A, "n"]) -> Int[A, "n"]: ...
def many(x: Bool[A, "n"]) -> Bool[A, "n"] | Int[A, "n"]: ...
def without_shape(x) -> np.ndarray[Any, np.dtype[np.float32]]: ...
def nowhere(x: Float[A, "n"]) -> NotThere[A, "n"]: ...
def optional(x: Float[A, "n"]) -> Float[A, "n"] | None: ...
def tree_of(x: Float[A, "n"]) -> PyTree[Float[A, "n"]]: ...
def list_of(x: Float[A, "n"]) -> list[Float[A, "n"]]: ...
def tuple_of(x: Float[A, "n"]) -> tuple[Float[A, "n"], ...]: ...
def with_int(x: Float[A, "n"]) -> tuple[Float[A, "n"], int]: ...
def unknown_class(x: Float[A, "n"]) -> Unregistered: ...
def of_itself(x: Float[A, "n"]) -> Ring: ...
def perhaps(x: Float[A, "n"]) -> Perhaps: ...


@dataclasses.dataclass
class Unregistered:
    x: Float[A, "n"]


@dataclasses.dataclass
class Ring:
    x: Float[A, "n"]
    next: Ring


class Perhaps(TypedDict, total=False):
    x: Float[A, "n"]


MISTAKES = {
    # A text that can't be read.
    "signature, unreadable, host": (
        lambda: hc.host(first, result="(n->(n)"),
        "hc-result-spec",
        "result='(n->(n)' of `first` can't be read at column 3: expected ',' or ')', found '->'. Write '(m,n),(n)->(m)': a list of dimensions for each argument, '->', and one for each result",
    ),
    "signature, unreadable, call": (
        lambda: hc.call(first, "(n)->", V),
        "hc-result-spec",
        "result='(n)->' of `first` can't be read at column 6: expected '(', found the end. Write '(m,n),(n)->(m)': a list of dimensions for each argument, '->', and one for each result",
    ),
    "signature, unreadable, results": (
        lambda: hc.results.signature("(n),->(n)"),
        "hc-result-spec",
        "result='(n),->(n)' of `a function` can't be read at column 5: expected '(', found '->'. Write '(m,n),(n)->(m)': a list of dimensions for each argument, '->', and one for each result",
    ),
    "signature, |1, call": (
        lambda: hc.call(first, "(n|1)->(n)", V),
        "hc-result-spec",
        "result='(n|1)->(n)' of `first` can't be read at column 3: expected ',' or ')', found '|'. A dimension that broadcasts, as in (n|1), is read by NumPy alone: broadcast that argument yourself, in a function around this one",
    ),
    "annotation, unreadable, host": (
        lambda: hc.host(no_meaning)(V),
        "hc-result-spec",
        "the result of `no_meaning` is annotated Float[ndarray, 'n+'], which has no meaning: 'n+' can't be read at column 3. The arguments name n. A result has names of arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or say with result= what the function returns",
    ),
    "annotation, unreadable, call": (
        lambda: hc.call(no_meaning, ..., V),
        "hc-result-spec",
        "the result of `no_meaning` is annotated Float[ndarray, 'n+'], which has no meaning: 'n+' can't be read at column 3. The arguments name n. A result has names of arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or say with result= what the function returns",
    ),
    "annotation, unreadable argument, host": (
        lambda: hc.host(no_meaning_of_argument)(V),
        "hc-result-spec",
        "argument `x` of `no_meaning_of_argument` is annotated Float[ndarray, 'n+'], which has no meaning: 'n+' can't be read at column 3. The arguments name nothing. A result has names of arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or say with result= what the function returns",
    ),
    # A number of arguments that differs.
    "signature, arguments, host": (
        lambda: hc.host(matvec, result=MATVEC)(X),
        "hc-arguments",
        "`matvec` is a function with the signature '(m,n),(n)->(m)' of 2 arrays, and was called with 1. Give one for each",
    ),
    "signature, arguments, call": (
        lambda: hc.call(matvec, MATVEC, X),
        "hc-arguments",
        "`matvec` is a function with the signature '(m,n),(n)->(m)' of 2 arrays, and was called with 1. Give one for each",
    ),
    "signature, more arguments, host": (
        lambda: hc.host(matvec, result=MATVEC)(X, V, V),
        "hc-arguments",
        "`matvec` is a function with the signature '(m,n),(n)->(m)' of 2 arrays, and was called with 3. Give one for each",
    ),
    "annotation, arguments, host": (
        lambda: hc.host(annotated)(X),
        "hc-arguments",
        'a hc.host function calls `annotated` with 1 positional argument. `annotated` takes (m, v). Arguments and parameters must match: annotated(*args)',
    ),
    "annotation, arguments, call": (
        lambda: hc.call(annotated, ..., X),
        "hc-arguments",
        "`annotated`: missing a required argument: 'v'",
    ),
    "annotation, more arguments, host": (
        lambda: hc.host(annotated)(X, V, V),
        "hc-arguments",
        'a hc.host function calls `annotated` with 3 positional arguments. `annotated` takes (m, v). Arguments and parameters must match: annotated(*args)',
    ),
    "ufunc, arguments, call": (
        lambda: hc.call(np.hypot, ..., X),
        "hc-arguments",
        '`hypot` is a ufunc of 2 arrays, and was called with 1. Give one for each',
    ),
    "ufunc, more arguments, host": (
        lambda: hc.host(np.hypot)(X, X, X),
        "hc-arguments",
        '`hypot` is a ufunc of 2 arrays, and was called with 3. Give one for each',
    ),
    # Arguments with other shapes and dtypes.
    "signature, sizes, host": (
        lambda: hc.host(matvec, result=MATVEC)(X, X[0, :2]),
        "hc-arguments",
        "argument 1 of `matvec` has n=2, and argument 0 has n=3. The signature is '(m,n),(n)->(m)', and the shapes are (2, 3), (2,)",
    ),
    "signature, sizes, call": (
        lambda: hc.call(matvec, MATVEC, X, X[0, :2]),
        "hc-arguments",
        "argument 1 of `matvec` has n=2, and argument 0 has n=3. The signature is '(m,n),(n)->(m)', and the shapes are (2, 3), (2,)",
    ),
    "signature, fixed size, host": (
        lambda: hc.host(matvec, result="(m,4),(4)->(m)")(X, V),
        "hc-arguments",
        "argument 0 of `matvec` has 3 where the signature '(m,4),(4)->(m)' has 4: its shape is (2, 3)",
    ),
    "signature, axes, call": (
        lambda: hc.call(matvec, MATVEC, V, V),
        "hc-arguments",
        "argument 0 of `matvec` has the shape (3,), and (m,n) in the signature '(m,n),(n)->(m)' wants at least 2 axes",
    ),
    "signature, axes in front, host": (
        lambda: hc.host(matvec, result=MATVEC)(np.stack([X] * 2), np.stack([V] * 5)),
        "hc-arguments",
        "the arguments of `matvec` have the axes (2,), (5,) in front of those of the signature '(m,n),(n)->(m)', and these don't broadcast. The shapes are (2, 2, 3), (5, 3)",
    ),
    "signature, a tree, call": (
        lambda: hc.call(matvec, MATVEC, [X, X], V),
        "hc-arguments",
        "argument 0 of `matvec` is ['float32[2, 3]', 'float32[2, 3]'], and not one array, as a function with the signature '(m,n),(n)->(m)' takes. Give its arrays one by one, or say with result= what the function returns",
    ),
    "annotation, sizes, host": (
        lambda: hc.host(annotated)(X, X[0, :2]),
        "hc-arguments",
        "argument `v` of `annotated` is float32[2], which is not Float[ndarray, 'n']: it has n=2, and argument `m` has n=3",
    ),
    "annotation, sizes, call": (
        lambda: hc.call(annotated, ..., X, X[0, :2]),
        "hc-arguments",
        "argument `v` of `annotated` is float32[2], which is not Float[ndarray, 'n']: it has n=2, and argument `m` has n=3",
    ),
    "annotation, axes, host": (
        lambda: hc.host(annotated)(V, V),
        "hc-arguments",
        "argument `m` of `annotated` is float32[3], which is not Float[ndarray, 'm n']: it has 1 axis, and the annotation 2 axes",
    ),
    "annotation, dtype, host": (
        lambda: hc.host(annotated)(X.astype(int), V),
        "hc-arguments",
        "argument `m` of `annotated` is int32[2, 3], which is not Float[ndarray, 'm n']: its dtype is int32",
    ),
    "ufunc, sizes, host": (
        lambda: hc.host(np.hypot)(X, X[0, :2]),
        "hc-arguments",
        "the arguments of `hypot` don't broadcast: their shapes are (2, 3), (2,)",
    ),
    "ufunc, sizes, call": (
        lambda: hc.call(np.hypot, ..., X, X[0, :2]),
        "hc-arguments",
        "the arguments of `hypot` don't broadcast: their shapes are (2, 3), (2,)",
    ),
    "gufunc, sizes, host": (
        lambda: hc.host(np.vecdot)(X, X[0, :2]),
        "hc-arguments",
        "argument 1 of `vecdot` has n=2, and argument 0 has n=3. The signature is '(n),(n)->()', and the shapes are (2, 3), (2,)",
    ),
    "ufunc, dtype, host": (
        lambda: hc.host(np.hypot)(X * 1j, X),
        "hc-arguments",
        '`hypot` has no loop for (complex64, float32). It has (float16, float16) -> float16; ...',
    ),
    "ufunc, a tree, host": (
        lambda: hc.host(np.hypot)([X, X], X),
        "hc-arguments",
        "argument 0 of `hypot` is ['float32[2, 3]', 'float32[2, 3]'], and not one array, as a ufunc takes. Give its arrays one by one, or say with result= what the function returns",
    ),
    # Keywords.
    "signature, keywords, call": (
        lambda: hc.call(matvec, MATVEC, m=X, v=V),
        "hc-arguments",
        "`matvec` is called with the keyword arguments ['m', 'v'], and what it returns follows from its arguments by position. Pass them by position, or put them into a function around it (a lambda, or functools.partial)",
    ),
    "annotation, keywords, call": (
        lambda: hc.call(annotated, ..., m=X, v=V),
        "hc-arguments",
        "`annotated` is called with the keyword arguments ['m', 'v'], and what it returns follows from its arguments by position. Pass them by position, or put them into a function around it (a lambda, or functools.partial)",
    ),
    "ufunc, keywords, call": (
        lambda: hc.call(np.hypot, ..., x1=X, x2=X),
        "hc-arguments",
        "`hypot` is called with the keyword arguments ['x1', 'x2'], and what it returns follows from its arguments by position. Pass them by position, or put them into a function around it (a lambda, or functools.partial)",
    ),
    "ufunc, keywords, host": (
        lambda: hc.host(np.hypot)(x1=X, x2=X),
        "hc-arguments",
        "`hypot`: 'x1' parameter is positional only, but was passed as a keyword",
    ),
    # Sizes that are traced, or none.
    "signature, traced size, host": (
        lambda: jax.jit(lambda k: hc.host(first, result="(n)->(k)", sizes={"k": k})(V))(1),
        "hc-traced",
        "sizes={'k': ...} of `first` is a traced value, which has no number when the program is traced. Take it from a shape (x.shape[0]), or make it a static argument of jit",
    ),
    "signature, traced size, results": (
        lambda: jax.jit(lambda k: hc.call(first, hc.results.signature("(n)->(k)", sizes={"k": k}), V))(1),
        "hc-traced",
        "sizes={'k': ...} of `a function` is a traced value, which has no number when the program is traced. Take it from a shape (x.shape[0]), or make it a static argument of jit",
    ),
    "annotation, traced size, host": (
        lambda: jax.jit(lambda k: hc.host(of_a_value)(V, k))(1),
        "hc-result-spec",
        "the result of `of_a_value` is annotated Float[ndarray, '{k}'], which has no meaning: 'k' is an argument whose value the program does not know yet. The arguments name n. A result has names of arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or say with result= what the function returns",
    ),
    "annotation, traced size, call": (
        lambda: jax.jit(lambda k: hc.call(of_a_value, ..., V, k))(1),
        "hc-result-spec",
        "the result of `of_a_value` is annotated Float[ndarray, '{k}'], which has no meaning: 'k' is an argument whose value the program does not know yet. The arguments name n. A result has names of arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or say with result= what the function returns",
    ),
    "signature, size below 0, host": (
        lambda: hc.host(first, result="(n)->(k)", sizes={"k": -1}),
        "hc-result-spec",
        "sizes={'k': -1} of `first`: a size is an integer of at least 0, or a function of other dimensions",
    ),
    "signature, size computed below 0, host": (
        lambda: hc.host(first, result="(n)->(k)", sizes={"k": lambda n: n - 9})(V),
        "hc-result-spec",
        "sizes={'k': ...} of `first` gave -6 for {'n': 3}. A size is an integer of at least 0",
    ),
    "signature, float size, results": (
        lambda: hc.results.signature("(n)->(k)", sizes={"k": 2.0}),
        "hc-result-spec",
        "sizes={'k': 2.0} of `a function`: a size is an integer of at least 0, or a function of other dimensions",
    ),
    "annotation, size below 0, host": (
        lambda: hc.host(negative)(V),
        "hc-result-spec",
        "the result of `negative` is Float[ndarray, 'n-9'], which is (-6,) for these arguments. A size is at least 0",
    ),
    # Names that no argument has.
    "signature, unknown name, host": (
        lambda: hc.host(first, result="(n)->(k)"),
        "hc-result-spec",
        "the signature '(n)->(k)' of `first` has k in a result and in no argument. Say its size: sizes={'k': ...}, an integer or a function of other dimensions (lambda n: ...)",
    ),
    "signature, unknown name, call": (
        lambda: hc.call(first, "(n)->(k)", V),
        "hc-result-spec",
        "the signature '(n)->(k)' of `first` has k in a result and in no argument. Say its size: sizes={'k': ...}, an integer or a function of other dimensions (lambda n: ...)",
    ),
    "signature, name of a size, host": (
        lambda: hc.host(first, result="(n)->(k)", sizes={"k": lambda q: 1}),
        "hc-result-spec",
        "sizes={'k': ...} of `first` is a function of 'q', which is no dimension of an argument in '(n)->(k)'. Its parameters have the names of dimensions",
    ),
    "signature, size that is known, host": (
        lambda: hc.host(first, result="(n)->(n)", sizes={"n": 3}),
        "hc-result-spec",
        "sizes= of `first` has 'n', and in the signature '(n)->(n)' the arguments have its size. Leave it out",
    ),
    "annotation, unknown name, host": (
        lambda: hc.host(unknown)(V),
        "hc-result-spec",
        "the result of `unknown` is annotated Float[ndarray, 'k'], which has no meaning: 'k' has no size. The arguments name n. A result has names of arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or say with result= what the function returns",
    ),
    "annotation, unknown name, call": (
        lambda: hc.call(unknown, ..., V),
        "hc-result-spec",
        "the result of `unknown` is annotated Float[ndarray, 'k'], which has no meaning: 'k' has no size. The arguments name n. A result has names of arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or say with result= what the function returns",
    ),
    # What comes is not what was said.
    "signature, another shape, host": (
        lambda: hc.host(first, result="(n)->(n)")(V),
        "hc-result",
        'result of `first` should be float32[3], got float32[1]. Change what the function returns, or what result= declares',
    ),
    "signature, another shape, call": (
        lambda: hc.call(first, "(n)->(n)", V),
        "hc-result",
        'result of `first` should be float32[3], got float32[1]. Change what the function returns, or what result= declares',
    ),
    "signature, number of results, host": (
        lambda: hc.host(first, result="(n)->(),()")(V),
        "hc-result",
        '`first` returned a structure that differs from its result=. Expected (*, *), got *. Change what the function returns, or what result= declares',
    ),
    "annotation, another shape, host": (
        lambda: hc.host(shorter)(V),
        "hc-result",
        'result of `shorter` should be float32[3], got float32[1]. Change what the function returns, or what result= declares',
    ),
    "annotation, another shape, call": (
        lambda: hc.call(shorter, ..., V),
        "hc-result",
        'result of `shorter` should be float32[3], got float32[1]. Change what the function returns, or what result= declares',
    ),
    "ufunc, another dtype, host": (
        lambda: hc.host(np.multiply, dtype=np.int32)(V, 1.5),
        "hc-result-dtype",
        "result of `multiply` should be int32, got float32. hostcall does not convert float to integer silently: return x.astype('int32') if that is what you mean, or declare float32",
    ),
    # Nothing says it.
    "nothing, host": (
        lambda: hc.host(first)(V),
        "hc-result-spec",
        '`first` has no result=, so it can only be given to hc.call: hc.call(first, result, *args). To call it by itself, say what it returns: hc.host(fn, result=...)',
    ),
    "nothing, call": (
        lambda: hc.call(first, ..., V),
        "hc-result-spec",
        "`first` does not say what it returns, and hc.call does not try it out. Give a result: jax.ShapeDtypeStruct(shape, dtype), a function from the arguments' specs, a signature such as '(n)->()', or hc.results.like(0)",
    ),
    "dtype alone, host": (
        lambda: hc.host(first, dtype=np.float32),
        "hc-result-spec",
        '`first` has dtype= and neither a signature as result= nor a ufunc. Elsewhere result= has the dtypes: jax.ShapeDtypeStruct(shape, dtype)',
    ),
    "sizes alone, host": (
        lambda: hc.host(first, result=V, sizes={"k": 1}),
        "hc-result-spec",
        "`first` has sizes= without a signature. They are the sizes of dimensions that stand in results only: result='(n)->(k)', sizes={'k': 3}",
    ),
    "ufunc, number of dtypes, host": (
        lambda: hc.host(np.frexp, dtype=(np.float32,) * 3),
        "hc-result-spec",
        'dtype= of `frexp` has 3 dtypes, and the ufunc has 2 results. Give one for each, or one for all',
    ),
    "signature, number of dtypes, host": (
        lambda: hc.host(first, result="(n)->(n)", dtype=(np.float32,) * 2),
        "hc-result-spec",
        "dtype= of `first` has 2 dtypes, and the signature '(n)->(n)' has 1 result. Give one for each, or one for all",
    ),
    # Annotations that say nothing, or too much.
    "annotation, a function in braces, host": (
        lambda: hc.host(calls)(V),
        "hc-result-spec",
        "the result of `calls` is annotated Float[ndarray, '{print(n)}'], which has no meaning: an expression of sizes has numbers, names, attributes of arguments, + - * // % **, min, max, abs and len. The arguments name n. A result has names of arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or say with result= what the function returns",
    ),
    "annotation, an attribute in braces, host": (
        lambda: hc.host(attribute)(V),
        "hc-result-spec",
        "the result of `attribute` is annotated Float[ndarray, '{n.nothing}'], which has no meaning: 'int' object has no attribute 'nothing'. The arguments name n. A result has names of arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or say with result= what the function returns",
    ),
    "annotation, any axes, host": (
        lambda: hc.host(anything)(V),
        "hc-result-spec",
        "the result of `anything` is annotated Float[ndarray, '...'], which has no meaning: ... has no size. The arguments name nothing. A result has names of arguments' axes, numbers, and expressions of both, as 'n-1' or '2*n'; or say with result= what the function returns",
    ),
    "annotation, dtype, call": (
        lambda: hc.call(integers, ..., V),
        "hc-arguments",
        "argument `x` of `integers` is float32[3], which is not Int[ndarray, 'n']: its dtype is float32",
    ),
    "annotation, no shape, host": (
        lambda: hc.host(without_shape)(V),
        "hc-result-spec",
        "`without_shape` is annotated to return numpy.ndarray[typing.Any, numpy.dtype[numpy.float32]], which has a dtype and no shape. Annotate it with jaxtyping, as in Float[np.ndarray, 'n']; or say with result= what it returns",
    ),
    "annotation, a name of nothing, host": (
        lambda: hc.host(nowhere)(V),
        "hc-result-spec",
        "the annotations of `nowhere` can't be evaluated: NameError: name 'NotThere' is not defined. With `from __future__ import annotations` they are texts, whose names must stand in the module. Move what they name there, or say with result= what the function returns",
    ),
    "annotation, perhaps None, host": (
        lambda: hc.host(optional)(V),
        "hc-result-spec",
        "`optional` is annotated to return jaxtyping.Float[ndarray, 'n'] | None, which is one of several types. A result has one: annotate it; or say with result= what it returns",
    ),
    "annotation, a union, host": (
        lambda: hc.host(many)(V),
        "hc-result-spec",
        "`many` is annotated to return jaxtyping.Bool[ndarray, 'n'] | jaxtyping.Int[ndarray, 'n'], which is one of several types. A result has one: annotate it; or say with result= what it returns",
    ),
    "annotation, PyTree, host": (
        lambda: hc.host(tree_of)(V),
        "hc-result-spec",
        "`tree_of` is annotated to return PyTree[jaxtyping.Float[ndarray, 'n']], which does not say how many arrays there are. Annotate a tuple with a type for each, a TypedDict, a NamedTuple or a dataclass; or say with result= what it returns",
    ),
    "annotation, a list, call": (
        lambda: hc.call(list_of, ..., V),
        "hc-result-spec",
        "`list_of` is annotated to return list[jaxtyping.Float[ndarray, 'n']], which does not say how many arrays there are. Annotate a tuple with a type for each, a TypedDict, a NamedTuple or a dataclass; or say with result= what it returns",
    ),
    "annotation, a tuple of any length, host": (
        lambda: hc.host(tuple_of)(V),
        "hc-result-spec",
        "`tuple_of` is annotated to return tuple[jaxtyping.Float[ndarray, 'n'], ...], which does not say how many arrays there are. Annotate a tuple with a type for each, a TypedDict, a NamedTuple or a dataclass; or say with result= what it returns",
    ),
    "annotation, a tuple with an int, host": (
        lambda: hc.host(with_int)(V),
        "hc-result-spec",
        "`with_int` is annotated to return tuple[jaxtyping.Float[ndarray, 'n'], int], whose part result[1] is annotated as no array, and has no default. Annotate it with jaxtyping; or say with result= what it returns",
    ),
    "annotation, a class without a pytree, host": (
        lambda: hc.host(unknown_class)(V),
        "hc-result-spec",
        '`unknown_class` is annotated to return Unregistered, of which Unregistered is no pytree. Register it: jax.tree_util.register_dataclass(Unregistered); or say with result= what it returns',
    ),
    "annotation, a class of itself, host": (
        lambda: hc.host(of_itself)(V),
        "hc-result-spec",
        '`of_itself` is annotated to return Ring, whose part result.next is of its own kind. A result has so many arrays; or say with result= what it returns',
    ),
    "annotation, keys that may be missing, host": (
        lambda: hc.host(perhaps)(V),
        "hc-result-spec",
        '`perhaps` is annotated to return Perhaps, whose keys x may be missing. A result has all of them; or say with result= what it returns',
    ),
    "annotation, dtype= beside it, host": (
        lambda: hc.host(annotated, dtype=np.float32),
        "hc-result-spec",
        '`annotated` has dtype= and neither a signature as result= nor a ufunc. Elsewhere result= has the dtypes: jax.ShapeDtypeStruct(shape, dtype)',
    ),
    # More of texts, sizes and dtypes.
    "signature, another text, host": (
        lambda: hc.host(first, result="first"),
        "hc-result-spec",
        "result= of `first` is 'first'. A text is 'infer', or a signature such as '(m,n),(n)->(m)'; otherwise give a spec, a function, hc.results.like(i), hc.results.same_tree(i) or hc.results.elementwise",
    ),
    "signature, sizes= of another kind, host": (
        lambda: hc.host(first, result="(n)->(k)", sizes=3),
        "hc-result-spec",
        "sizes= of `first` is 3. Give a dict from dimensions to sizes: sizes={'k': 3}",
    ),
    "signature, a size of nothing, host": (
        lambda: hc.host(first, result="(n)->(n)", sizes={"j": 3}),
        "hc-result-spec",
        "sizes= of `first` has 'j', and in the signature '(n)->(n)' it has no such dimension. Leave it out",
    ),
    "signature, a size that is no integer, host": (
        lambda: hc.host(first, result="(n)->(k)", sizes={"k": lambda n: n / 2})(V),
        "hc-result-spec",
        "sizes={'k': ...} of `first` gave 1.5 for {'n': 3}. A size is an integer of at least 0",
    ),
    "signature, a static argument in place of an array, host": (
        lambda: hc.host(matvec, result=MATVEC)("m", X),
        "hc-arguments",
        "`matvec` is a function with the signature '(m,n),(n)->(m)' of 2 arrays, and was called with 1. Give one for each",
    ),
    "ufunc, a key, host": (
        lambda: hc.host(np.sin)(jax.random.key(0)),
        "hc-arguments",
        '`sin` has no loop for (key<fry>). It has (float16) -> float16; ...',
    ),
    "ufunc, objects, host": (
        lambda: hc.host(np.frompyfunc(abs, 1, 1))(1.0),
        "hc-result-spec",
        "`abs (vectorized)` returns object for (float32), which JAX arrays can't have. Say what its results are: hc.host(fn, dtype=...)",
    ),
    "ufunc, dtype= of another kind, host": (
        lambda: hc.host(np.sin, dtype="what"),
        "hc-result-spec",
        "dtype= of `sin` is 'what'. Give a dtype such as np.float32, or a tuple with one for each result",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "code", "text"), MISTAKES.values(), ids=MISTAKES)
def test_what_a_mistake_is_told(call, code, text):
    with pytest.raises(hc.errors.HostcallError) as caught:
        call()
    words, _, explain = str(caught.value).rpartition("\n")
    assert explain.startswith(f"[{code}] ")
    if text.endswith("..."):  # which loops a ufunc has is NumPy's to say
        words = words[: len("hostcall: " + text) - 3] + "..."
    assert words == f"hostcall: {text}"
