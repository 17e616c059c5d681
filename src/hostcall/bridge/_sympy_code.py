"""SymPy expressions as NumPy code."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._core.errors import SpecError
from hostcall._core.host_code import HostCode
from hostcall._host_function.results import elementwise
from hostcall.bridge._library import needed


def code_of(
    name: str, outs: tuple[Any, ...], symbols: tuple[Any, ...], modules: Any
) -> Any:
    """All expressions as one function of arrays."""
    sympy = needed("sympy", "sympy")
    undone = (sympy.Derivative, sympy.Subs, sympy.Integral)
    for out in outs:
        for part in out.atoms(*undone):
            raise SpecError(
                f"hostcall: `{name}` contains {part}, which SymPy has not evaluated, so"
                " it can't be computed from arrays. Try expr.doit()"
            )
    # SciPy's factorial is zero for negative numbers; the gamma function is right there.
    outs = tuple(o.replace(sympy.factorial, lambda n: sympy.gamma(n + 1)) for o in outs)
    given = list(modules) if isinstance(modules, tuple) else modules
    try:
        code = sympy.lambdify(symbols, outs, modules=given, cse=True)
    except NotImplementedError as error:
        raise SpecError(
            f"hostcall: SymPy can't generate code for `{name}`: {error}"
        ) from error
    names = code.__code__.co_names
    lost = [n for n in names if n not in code.__globals__ and n not in vars(builtins)]
    if lost:
        raise SpecError(
            f"hostcall: `{name}` uses {', '.join(lost)}, which {modules}"
            " don't have. Pass a function that computes it on NumPy arrays:"
            f" modules=[{{{lost[0]!r}: function}}, 'scipy', 'numpy']"
        )
    return code


@dataclass(eq=False, repr=False)
class Evaluate(HostCode):
    """Evaluates expressions on NumPy arrays.

    Attributes:
        name: in messages.
        outs: the expressions.
        form: "one", "list", or the shape of a Matrix.
        symbols: the symbols of the arguments.
        modules: as in `sympy.lambdify`.
    """

    stays = (  # read for derivatives: the user can register the value
        "a bridge makes it when SymPy differentiates, so it can have no name. Register"
        " hc.bridge.sympy of the derivative itself, and call that"
    )

    name: str
    outs: tuple[Any, ...]
    form: Any
    symbols: tuple[Any, ...]
    modules: Any

    def __post_init__(self) -> None:
        sympy = needed("sympy", "sympy")
        self.__name__ = self.__qualname__ = self.name
        # For each expression, whether it has the imaginary unit.
        self._units = tuple(bool(out.has(sympy.I)) for out in self.outs)
        # Made now, so that missing functions are found before a program runs.
        self._code = code_of(self.name, self.outs, self.symbols, self.modules)

    def __reduce__(self) -> Any:
        given = (self.name, self.outs, self.form, self.symbols, self.modules)
        return Evaluate, given

    def spec(self, *avals: Any) -> Any:
        """The spec of its result for such arrays."""
        plain = elementwise(*avals)
        wide = jnp.promote_types(plain.dtype, jnp.complex64)
        dtypes = [wide if unit else plain.dtype for unit in self._units]
        structs = [jax.ShapeDtypeStruct(plain.shape, dtype) for dtype in dtypes]
        if self.form == "one":
            return structs[0]
        if self.form == "list":
            return structs
        dtype = jnp.result_type(plain.dtype, *dtypes)
        return jax.ShapeDtypeStruct((*plain.shape, *self.form), dtype)

    def __call__(self, *arrays: Any) -> Any:
        shape = np.broadcast_shapes(*(x.shape for x in arrays))
        real = not any(map(np.iscomplexobj, arrays))
        with np.errstate(all="ignore"):  # NaN and infinity without warnings, as in JAX
            values = self._code(*map(_wide, arrays))
            outs = [
                np.broadcast_to(_real(v) if real and not unit else v, shape)
                for v, unit in zip(values, self._units, strict=True)
            ]
        if self.form == "one":
            return outs[0]
        if self.form == "list":
            return outs
        return np.stack(outs, -1).reshape(*shape, *self.form)


def _wide(x: np.ndarray) -> np.ndarray:
    """Converts the array to a floating dtype that SciPy computes in."""
    if x.dtype.kind in "biu":
        return x.astype(np.float64)
    known = x.dtype.kind == "c" or x.dtype in (np.float32, np.float64)
    return x if known else x.astype(np.float32)


def _real(value: Any) -> Any:
    """The real part; NaN where the value is truly complex.

    SciPy gives complex numbers for some functions of real arguments, often with a zero
    imaginary part.
    """
    if not np.iscomplexobj(value):
        return value
    wrong = np.abs(value.imag) > 1e-6 * np.abs(value)
    return np.where(wrong, np.nan, value.real)
