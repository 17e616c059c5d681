"""What a ufunc says about itself: how many results it has, their dtypes and shapes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core.dimensions import Signature, read_signature
from hostcall._core.errors import SpecError
from hostcall._core.host_code import HostCode, OfArguments
from hostcall._core.result_rules import (
    Trees,
    arrays_only,
    broadcast,
    floating,
    promoted,
    struct,
)
from hostcall._core.signatures import positional
from hostcall._core.spec import widened


def ufunc_of(fn: object) -> np.ufunc | None:
    """NumPy's ufunc behind a callable: itself, or that of Numba's `@vectorize` and
    `@guvectorize`; None if it is no ufunc.
    """
    if isinstance(fn, np.ufunc):
        return fn
    # Numba's classes are no ufuncs. Nothing is asked of an object of another class.
    for module, kind in (("dufunc", "DUFunc"), ("gufunc", "GUFunc")):
        numbas = sys.modules.get(f"numba.np.ufunc.{module}")
        if numbas is not None and type(fn) is vars(numbas).get(kind):
            found = getattr(fn, "ufunc", None)
            return found if isinstance(found, np.ufunc) else None
    return None


@dataclass(frozen=True)
class OfUfunc(OfArguments):
    """The results of a ufunc.

    Their shape is the one to which the arguments broadcast, or what the signature of a
    generalized ufunc says. Their dtypes are those of the loop that NumPy chooses, at
    the precision that JAX promotes the arguments to: float32 gives float32, and
    integers give the default floating dtype where the loop is a floating one.

    Attributes:
        fn: the ufunc, or Numba's object around one.
        float64: whether floating arguments reach it as float64.
        dtypes: of the results, if the user gave them.
        dimensions: the signature of a generalized ufunc; None for any other.
    """

    _takes_batches = True

    fn: Callable[..., Any]
    float64: bool = False
    dtypes: tuple[np.dtype, ...] | None = None
    dimensions: Signature | None = None

    def __repr__(self) -> str:
        return f"what {self.fn!r} says"

    def _shown(self) -> str:
        return "(ufunc)" if self.dimensions is None else self.dimensions._shown()

    @property
    def _ufunc(self) -> np.ufunc:
        ufunc = ufunc_of(self.fn)
        assert ufunc is not None, "`of_ufunc` makes these"
        return ufunc

    def spec(self, avals: Trees, name: str) -> Any:
        ufunc = self._ufunc
        arrays = arrays_only(self, avals, name, ufunc.nin)
        shapes = [array.shape for array in arrays]
        if self.dimensions is None:
            try:
                results = [broadcast(shapes)] * ufunc.nout
            except ValueError:
                raise SpecError(
                    f"hostcall: the arguments of `{name}` don't broadcast: their shapes"
                    f" are {', '.join(map(str, shapes))}",
                    code="hc-arguments",
                ) from None
        else:
            results = self.dimensions.shapes(shapes, name)
        dtypes = self.dtypes or self._dtypes(ufunc, arrays, name)
        specs = tuple(map(struct, results, dtypes))
        return specs if len(specs) > 1 else specs[0]

    def _of_arrays(self) -> str:
        return "a ufunc"

    def _core_axes(self, axes: Sequence[int]) -> tuple[int, ...]:
        if self.dimensions is None:
            return (0,) * len(axes)
        return self.dimensions._core_axes(axes)

    def _lines_up(self, axes: Sequence[int]) -> bool:
        return self.dimensions is None or self.dimensions._lines_up(axes)

    def _is_elementwise(self) -> bool:
        return self.dimensions is None and self._ufunc.nout == 1

    def _dtypes(
        self, ufunc: np.ufunc, arrays: Sequence[jax.ShapeDtypeStruct], name: str
    ) -> tuple[np.dtype, ...]:
        given = [array.dtype for array in arrays]
        if self.float64:
            given = [widened(dtype) or dtype for dtype in given]
        try:  # NumPy has no dtype for typed PRNG keys
            loop = _loop(self.fn, ufunc, given)
        except Exception as error:  # of NumPy's, of Numba's compiler, or the user's own
            wanted = ", ".join(map(str, given))
            raise SpecError(
                f"hostcall: `{name}` has no loop for ({wanted}). It has"
                f" {_loops(ufunc)}. Convert the arguments before the call"
                " (x.astype(jnp.float32)), or write hc.host(fn, float64=True)",
                code="hc-arguments",
            ) from error
        if any(dtype.kind not in "biufcV" for dtype in loop):
            raise SpecError(
                f"hostcall: `{name}` returns {', '.join(map(str, loop))} for"
                f" ({', '.join(map(str, given))}), which JAX arrays can't have. Say"
                " what its results are: hc.host(fn, dtype=...)",
                code="hc-result-spec",
            )
        precision = floating(promoted(arrays))
        return tuple([_at_precision(dtype, precision) for dtype in loop])


def _loop(
    fn: Callable[..., Any], ufunc: np.ufunc, given: Sequence[np.dtype]
) -> tuple[np.dtype, ...]:
    """The dtypes of the results of the loop that NumPy chooses.

    Raises:
        Exception: there is none, and this says why.
    """
    wanted = (*given, *(None,) * ufunc.nout)
    try:
        dtypes = ufunc.resolve_dtypes(wanted)
    except TypeError:
        if fn is ufunc or ufunc.signature is not None:
            raise
        # Numba compiles a loop at the first call for its dtypes.
        fn(*[np.ones((), dtype) for dtype in given])
        dtypes = ufunc.resolve_dtypes(wanted)
    return tuple(dtypes[ufunc.nin :])


def _loops(ufunc: np.ufunc) -> str:
    """The loops of a ufunc, by the names of NumPy's dtypes."""
    shown = []
    for loop in ufunc.types:
        arguments, _, results = loop.partition("->")
        words = [[np.dtype(c).name for c in part] for part in (arguments, results)]
        shown.append(f"({', '.join(words[0])}) -> {', '.join(words[1])}")
    return "; ".join(shown) or "none"


def _at_precision(dtype: np.dtype, precision: np.dtype) -> np.dtype:
    """A loop's dtype at the precision of another floating dtype."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        canonical: np.dtype = _jax.canonical_dtype(dtype)
        return canonical
    found: np.dtype = jnp.finfo(precision).dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        found = jnp.result_type(found, np.complex64)
    return found


def of_ufunc(
    fn: Callable[..., Any],
    name: str,
    float64: bool = False,
    dtypes: tuple[np.dtype, ...] | None = None,
) -> OfUfunc | None:
    """What a ufunc says of its results; None for any other callable."""
    ufunc = ufunc_of(fn)
    if ufunc is None:
        return None
    if dtypes is not None and len(dtypes) == 1:
        dtypes = dtypes * ufunc.nout
    if dtypes is not None and len(dtypes) != ufunc.nout:
        raise SpecError(
            f"hostcall: dtype= of `{name}` has {len(dtypes)} dtypes, and the ufunc has"
            f" {ufunc.nout} results. Give one for each, or one for all",
            code="hc-result-spec",
        )
    dimensions = None
    if ufunc.signature is not None:
        dimensions = read_signature(ufunc.signature, name, takes_batches=True)
    return OfUfunc(fn, float64, dtypes, dimensions)


def parameters(ufunc: np.ufunc) -> inspect.Signature:
    """The arguments of a ufunc, as `help` shows them."""
    return positional(ufunc.nin)


def with_numbers(fn: Callable[..., Any], result: object) -> Callable[..., Any]:
    """The function itself, or around a ufunc of numpy.frompyfunc what makes numbers of
    its objects.
    """
    if isinstance(fn, np.ufunc) and isinstance(result, OfUfunc) and result.dtypes:
        return NumbersOf(fn, result.dtypes) if _returns_objects(fn) else fn
    return fn


def _returns_objects(ufunc: np.ufunc) -> bool:
    return ufunc is not None and ufunc.types == [
        "O" * ufunc.nin + "->" + "O" * ufunc.nout
    ]


@dataclass(frozen=True)
class NumbersOf(HostCode):
    """A ufunc of numpy.frompyfunc, whose objects become arrays of numbers.

    Attributes:
        fn: the ufunc.
        dtypes: of its results.
    """

    fn: np.ufunc
    dtypes: tuple[np.dtype, ...]

    def inside(self) -> Callable[..., Any]:
        return self.fn

    def __call__(self, *args: Any) -> Any:
        value = self.fn(*args)
        if self.fn.nout == 1:
            return np.asarray(value).astype(self.dtypes[0])
        pairs = zip(value, self.dtypes, strict=True)
        return tuple([np.asarray(each).astype(dtype) for each, dtype in pairs])
