"""Finds out what a function returns: from `result=`, or from the function itself.

What is asked, in this order:

  1. `result=`, if it is given. A text that is not "infer" is read as a signature.
  2. The function: a ufunc says it itself, any other one by jaxtyping's annotations.

The second half of the file is about axes in front of items: what a signature or a ufunc
describes is one item, and a call may have an array of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hostcall._core import result_rules, ufuncs
from hostcall._core.annotations import Unreadable, of_annotations
from hostcall._core.dimensions import Signature, read_signature
from hostcall._core.errors import SpecError
from hostcall._core.host_code import OfArguments
from hostcall._core.options import WHOLE
from hostcall._core.result_rules import Tree, expanded, is_aval
from hostcall._core.signature_sizes import ResultSize


def rule_of(
    fn: Callable[..., Any],
    name: str,
    result: Tree,
    *,
    sizes: Mapping[str, ResultSize] | None = None,
    dtype: Any = None,
    float64: bool = False,
) -> Tree:
    """What `result=` says: itself, unless it is a signature or missing.

    Returns:
        A spec, a function, a rule, or "infer"; `...` if `result` is missing and the
        function does not say what it returns.

    Raises:
        SpecError: `result` is a text and no signature, or `sizes` or `dtype` are wrong.
    """
    dtypes = None if dtype is None else _dtypes(dtype, name)
    if isinstance(result, str) and result != "infer":
        _refuse_other_text(result, name)
        return read_signature(
            text=result,
            name=name,
            sizes=sizes,
            dtypes=dtypes,
            takes_batches=ufuncs.ufunc_of(fn) is not None,
        )
    if sizes is not None:
        raise SpecError(
            f"hostcall: `{name}` has sizes= without a signature. They are the sizes of"
            " dimensions that stand in results only: result='(n)->(k)', sizes={'k': 3}",
            code="hc-result-spec",
        )
    if result is ...:
        of_ufunc = ufuncs.of_ufunc(fn, name, float64, dtypes)
        if of_ufunc is not None:
            return of_ufunc
        # Annotations say dtypes themselves, so `dtype=` beside them is refused below.
        annotated = of_annotations(fn, name, float64) if dtypes is None else None
        if annotated is not None:
            return annotated
    if dtypes is not None:
        raise SpecError(
            f"hostcall: `{name}` has dtype= and neither a signature as result= nor a"
            " ufunc. Elsewhere result= has the dtypes: jax.ShapeDtypeStruct(shape,"
            " dtype)",
            code="hc-result-spec",
        )
    return result


def _refuse_other_text(text: str, name: str) -> None:
    """Refuses a text that nobody meant as a signature, in other words than a misspelt
    one.
    """
    if "->" in text or "(" in text:
        return
    raise SpecError(
        f"hostcall: result= of `{name}` is {text!r}. A text is 'infer', or a"
        " signature such as '(m,n),(n)->(m)'; otherwise give a spec, a"
        " function, hc.results.like(i), hc.results.same_tree(i) or"
        " hc.results.elementwise",
        code="hc-result-spec",
    )


def is_unsaid(result: Tree) -> bool:
    """Whether neither `result=` nor the function says what it returns."""
    return result is ... or isinstance(result, Unreadable)


def signature(
    text: str, *, sizes: Mapping[str, ResultSize] | None = None, dtype: Any = None
) -> Any:
    """A signature as `result=`, with sizes and dtypes, for `hc.host` and `hc.call`.

        k_smallest = hc.results.signature("(n)->(k)", sizes={"k": 3})
        hc.call(lambda x: np.sort(x)[:3], k_smallest, x)

    Args:
        text: as in `numpy.vectorize`: for each argument and result the dimensions of
            one item, as "(m,n),(n)->(m)". A dimension is a name, which has one size in
            a call, or a size; one with "?" may be missing. Axes in front of an item's
            broadcast.
        sizes: of dimensions that stand in results only: an integer, or a function whose
            parameters are names of other dimensions, as `lambda n: 2 * n`.
        dtype: of the results, or a tuple with one for each. Default: the dtype to which
            JAX promotes the arguments.

    Raises:
        SpecError: the text is no signature, or a size or dtype is missing or wrong.
    """
    rule = rule_of(lambda: None, "a function", text, sizes=sizes, dtype=dtype)
    assert isinstance(rule, Signature), "a text that is none was refused"
    return rule


def _dtypes(dtype: Any, name: str) -> tuple[np.dtype, ...]:
    """`dtype=` as one dtype for each result, or one for all of them."""
    several = dtype if isinstance(dtype, (tuple, list)) else (dtype,)
    try:
        return tuple(map(np.dtype, several))
    except TypeError as error:
        raise SpecError(
            f"hostcall: dtype= of `{name}` is {dtype!r}. Give a dtype such as"
            " np.float32, or a tuple with one for each result",
            code="hc-result-spec",
        ) from error


# --- Axes in front of the items of a call ---------------------------------------------


def maps_items(result: Tree, vmap_method: object) -> bool:
    """Whether the function gets one item at a time, so that axes in front of the items
    are mapped over.
    """
    return isinstance(result, Signature) and vmap_method not in WHOLE


def default_method(result: Tree, elsewhere: bool = False) -> str | None:
    """`vmap_method` of a function for which none was given; `elsewhere` is whether it
    has an executor, which runs rows alone.
    """
    if not isinstance(result, OfArguments) or not result._takes_batches:
        return None
    # An executor is there to run rows at once: a whole batch would be one of them.
    return "parallel" if elsewhere else "expand_dims"


# For each argument, how many axes are in front of its item; None for one that is no
# array.
Counts = Sequence[int | None]


def leading(result: Tree, avals: Sequence[Any]) -> Counts | None:
    """The counts of arguments with these avals; None if `result=` says nothing of
    items.
    """
    arrays = [aval for aval in avals if is_aval(aval)]
    cores = result_rules.core_axes(result, [len(aval.shape) for aval in arrays])
    if cores is None:
        return None
    # A signature has no list for a static argument, which may stand between arrays.
    remaining = iter(cores)
    counts: list[int | None] = []
    for aval in avals:
        if is_aval(aval):
            counts.append(len(aval.shape) - next(remaining))
        else:
            counts.append(None)
    return counts


def over_leading_axes(
    call: Callable[..., Tree], args: Sequence[Any], counts: Counts
) -> Tree:
    """Calls for each item, by a `jax.vmap` for each axis in front of the items.

    Axes of the arguments line up from the right, as NumPy broadcasts them. An axis of
    size 1 beside a longer one is dropped, and the `vmap` does not map that argument.

    For matrices (5, 2, 3) and vectors (4, 1, 3) the items are in front of the last two
    axes and of the last one. The loop is (4, 5): the outer `vmap` maps the vectors
    alone, and the inner one the matrices alone, whose axis of 1 was dropped.
    """
    pairs = list(zip(args, counts, strict=True))
    arrays = [(arg, count) for arg, count in pairs if count is not None]
    loop = result_rules.broadcast([np.shape(arg)[:count] for arg, count in arrays])
    # For each axis of the loop, `in_axes` of its `vmap`. An axis that is mapped is the
    # first one by then: the outer ones are gone.
    in_axes: list[list[int | None]] = [[None] * len(arrays) for _ in loop]
    stacks: list[Any] = []
    for number, (arg, count) in enumerate(arrays):
        shape = np.shape(arg)
        dropped: list[int] = []
        for axis in range(count):
            position = len(loop) - count + axis
            if shape[axis] == 1 and loop[position] != 1:
                dropped.append(axis)
            else:
                in_axes[position][number] = 0
        stacks.append(jax.numpy.squeeze(arg, dropped) if dropped else arg)

    def call_item(*items: Any) -> Tree:
        # Static arguments go around `vmap`, which takes arrays alone.
        remaining = iter(items)
        arguments: list[Any] = []
        for arg, count in pairs:
            arguments.append(arg if count is None else next(remaining))
        return call(*arguments)

    function: Callable[..., Tree] = call_item
    for axes in reversed(in_axes):
        function = jax.vmap(function, tuple(axes))
    return function(*stacks)


def lines_up(result: Tree, avals: Sequence[Any]) -> bool:
    """Whether a batch may stand in front of arguments with these avals, if `result=`
    says what an item is.
    """
    axes = [len(aval.shape) for aval in avals if is_aval(aval)]
    return result_rules.lines_up(result, axes)


def lined_up(args: Sequence[Any], counts: Counts) -> list[Any]:
    """The arguments with as many axes in front of their items as any of them has, so
    that the axis of a batch, which comes in front, lines up.
    """
    of_arrays = [count for count in counts if count is not None]
    most = max(of_arrays, default=0)
    return [
        arg if count is None else expanded(arg, most - count)
        for arg, count in zip(args, counts, strict=True)
    ]
