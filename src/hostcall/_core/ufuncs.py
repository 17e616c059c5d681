"""What a ufunc says about itself: how many results it has, their dtypes and shapes.

The story of a call:

  1. The arguments broadcast to the shape of each result. Those of a generalized ufunc,
     which has a signature, go by that (`dimensions`).
  2. NumPy is asked for the loop that it would choose for the arguments' dtypes. That
     says which kind each result is of: integer, floating, complex or bool.
  3. Floating results have the precision to which JAX promotes the arguments, whatever
     the loop computes in: float32 in, float32 out.

Nothing of a ufunc is kept: Numba's get new loops as they are called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hostcall._core.dimensions import Shape, Signature, one_for_each, read_signature
from hostcall._core.errors import SpecError
from hostcall._core.host_code import HostCode, OfArguments
from hostcall._core.result_rules import (
    Trees,
    arrays_only,
    at_precision,
    broadcast,
    floating,
    is_aval,
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
    if type(fn) is NumbersOf:
        return fn.fn
    # Numba's classes are no ufuncs. Nothing is asked of an object of another class.
    for module_name, class_name in (("dufunc", "DUFunc"), ("gufunc", "GUFunc")):
        module = sys.modules.get(f"numba.np.ufunc.{module_name}")
        if module is not None and type(fn) is vars(module).get(class_name):
            ufunc = getattr(fn, "ufunc", None)
            return ufunc if isinstance(ufunc, np.ufunc) else None
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
        shapes = self._shapes([array.shape for array in arrays], ufunc.nout, name)
        dtypes = self.dtypes
        if dtypes is None:
            dtypes = self._dtypes(ufunc, arrays, name)
        specs = tuple(map(struct, shapes, dtypes))
        # As NumPy returns them: of one result no tuple.
        return specs if len(specs) > 1 else specs[0]

    def _shapes(
        self, shapes: Sequence[Shape], results: int, name: str
    ) -> Sequence[Shape]:
        """The shapes of so many results for arguments of these shapes."""
        if self.dimensions is not None:
            return self.dimensions.shapes(shapes, name)
        try:
            return [broadcast(shapes)] * results
        except ValueError:
            raise SpecError(
                f"hostcall: the arguments of `{name}` don't broadcast: their shapes"
                f" are {', '.join(map(str, shapes))}",
                code="hc-arguments",
            ) from None

    def with_sizes(self, avals: Trees, draw: Callable[[], int]) -> Trees:
        """Other arguments that fit, with drawn sizes.

        Without a signature each axis to which the arguments broadcast gets a size; axes
        of size 1 stay, and so broadcast again.
        """
        if self.dimensions is not None:
            return self.dimensions.with_sizes(avals, draw)
        axes = [len(aval.shape) for aval in avals if is_aval(aval)]
        most = max(axes, default=0)
        sizes = [int(draw()) for _ in range(most)]
        drawn: list[Any] = []
        for aval in avals:
            if not is_aval(aval):
                drawn.append(aval)
                continue
            # Axes line up from the right.
            pairs = zip(aval.shape, sizes[most - len(aval.shape) :], strict=True)
            shape = tuple([size if old != 1 else 1 for old, size in pairs])
            drawn.append(struct(shape, aval.dtype, aval.weak_type))
        return tuple(drawn)

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
        self, ufunc: np.ufunc, avals: Sequence[jax.ShapeDtypeStruct], name: str
    ) -> tuple[np.dtype, ...]:
        dtypes = [aval.dtype for aval in avals]
        if self.float64:
            dtypes = [widened(dtype) or dtype for dtype in dtypes]
        if _takes_results_alone(self.fn):
            raise SpecError(
                f"hostcall: `{name}` is Numba's @guvectorize without types, which takes"
                " its results as arguments and returns none. Give it types, as in"
                " @guvectorize(['void(float32[:], float32[:])'], '(n)->(n)')",
                code="hc-result-spec",
            )
        try:  # NumPy has no dtype for typed PRNG keys
            loop = _loop(self.fn, ufunc, dtypes)
        except Exception as error:  # of NumPy's, of Numba's compiler, or the user's own
            raise SpecError(
                f"hostcall: `{name}` has no loop for ({_shown(dtypes)}). It has"
                f" {_loops(ufunc)}. Convert the arguments before the call"
                " (x.astype(jnp.float32)), or write hc.host(fn, float64=True)",
                code="hc-arguments",
            ) from error
        # "V" are the dtypes of JAX that NumPy does not have, as bfloat16.
        if any(dtype.kind not in "biufcV" for dtype in loop):
            raise SpecError(
                f"hostcall: `{name}` returns {_shown(loop)} for"
                f" ({_shown(dtypes)}), which JAX arrays can't have. Say"
                " what its results are: hc.host(fn, dtype=...)",
                code="hc-result-spec",
            )
        # The loop may be float64's alone, as many of SciPy's are. Its results have the
        # precision that those of JAX's own functions would have.
        precision = floating(promoted(avals))
        return tuple([at_precision(dtype, precision) for dtype in loop])


def _shown(dtypes: Sequence[np.dtype]) -> str:
    """Dtypes in a message. NumPy takes 4 us for the name of one."""
    return ", ".join(map(str, dtypes))


def _takes_results_alone(fn: Callable[..., Any]) -> bool:
    """Whether this is Numba's `@guvectorize` without types. Numba does not allocate its
    results, so that a call without them fails even when it has a loop.
    """
    is_of_numba = not isinstance(fn, np.ufunc)
    return is_of_numba and getattr(fn, "is_dynamic", False) is True


def _loop(
    fn: Callable[..., Any], ufunc: np.ufunc, arguments: Sequence[np.dtype]
) -> tuple[np.dtype, ...]:
    """The dtypes of the results of the loop that NumPy chooses.

    Raises:
        Exception: there is none, and this says why.
    """
    wanted = (*arguments, *(None,) * ufunc.nout)
    try:
        dtypes = ufunc.resolve_dtypes(wanted)
    except TypeError:
        if fn is ufunc or ufunc.signature is not None:
            raise
        # Numba compiles a loop at the first call for its dtypes.
        ones = [np.ones((), dtype) for dtype in arguments]
        fn(*ones)
        dtypes = ufunc.resolve_dtypes(wanted)
    return tuple(dtypes[ufunc.nin :])


def _loops(ufunc: np.ufunc) -> str:
    """The loops of a ufunc, by the names of NumPy's dtypes."""
    loops = []
    for loop in ufunc.types:  # "dd->d": one character of NumPy's for each dtype
        arguments, _, results = loop.partition("->")
        taken = [np.dtype(character).name for character in arguments]
        returned = [np.dtype(character).name for character in results]
        loops.append(f"({', '.join(taken)}) -> {', '.join(returned)}")
    return "; ".join(loops) or "none"


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
    if dtypes is not None:
        dtypes = one_for_each(dtypes, ufunc.nout, name, "the ufunc")
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
    if not isinstance(fn, np.ufunc) or not isinstance(result, OfUfunc):
        return fn
    if not _returns_objects(fn):
        return fn
    # Objects are no results: NumPy has one loop for them, and says nothing of kinds. So
    # their dtypes are those that the user gave.
    return fn if result.dtypes is None else NumbersOf(fn, result.dtypes)


def _returns_objects(ufunc: np.ufunc) -> bool:
    """Whether its only loop is one of Python objects, as that of numpy.frompyfunc."""
    arguments = "O" * ufunc.nin
    results = "O" * ufunc.nout
    return ufunc.types == [f"{arguments}->{results}"]


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
        # For scalars NumPy returns the objects themselves, and no arrays of them.
        results = (value,) if self.fn.nout == 1 else value
        arrays: list[np.ndarray] = []
        for result, dtype in zip(results, self.dtypes, strict=True):
            arrays.append(np.asarray(result).astype(dtype))
        return arrays[0] if self.fn.nout == 1 else tuple(arrays)
