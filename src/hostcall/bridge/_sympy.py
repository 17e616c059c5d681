"""`hc.bridge.sympy`: SymPy expressions, evaluated by SciPy, differentiated by SymPy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._core.errors import DerivativeError, SpecError
from hostcall._host_function.function import HostFunction
from hostcall.bridge._library import PLAIN, needed
from hostcall.bridge._sympy_code import Evaluate


def of_sympy(
    expr: Any,
    symbols: Any,
    *,
    modules: Any = ("scipy", "numpy"),
    timeout: float | None = None,
    name: str | None = None,
) -> HostFunction[..., Any]:
    """Makes a host function from a SymPy expression; SymPy gives its derivatives.

        n, x = sympy.symbols("n x")
        f = hc.bridge.sympy(sympy.besselj(n, x) / x, (n, x))
        jax.vmap(jax.grad(f, 1), (None, 0))(2, xs)

    It works element by element on arrays that broadcast against each other.

    Args:
        expr: an expression, a list or tuple of them, or a Matrix. Integrals, sums and
            derivatives in it must have been evaluated: `expr.doit()`.
        symbols: a Symbol, or a list of the symbols in `expr`: the arguments, in order.
        modules: as in `sympy.lambdify`: the modules that evaluate the functions in
            `expr`.
        timeout: as in `hc.host`.
        name: as in `hc.host`.

    Returns:
        A `HostFunction` of one array per symbol. Its result has the shape to which they
        broadcast and the floating dtype to which they promote (a complex one if `expr`
        has the imaginary unit). A list gives a list of such arrays; a Matrix gives one
        array with the two axes of the Matrix at the end.

    Raises:
        PackageError: SymPy or SciPy is not installed.
        SpecError: `expr` has other symbols, or functions that `modules` lack; or a
            symbol that is declared real gets a complex array.
        DerivativeError: SymPy lacks a derivative that the program asks for (raised when
            it is traced).

    Under transformations:
        jit, scan, while_loop, cond, remat, shard_map: as a pure `hc.call`.
        vmap: one call for the batch.
        jvp, grad, hessian, any order, both modes: one call for the derivative with
            respect to each differentiated argument; SymPy makes it when it is first
            asked for. The derivative of a step (Heaviside, sign, floor, ceiling) is
            zero: SymPy's term at the step itself (DiracDelta) is left out.
        real arguments: if a function has a complex value there (hankel1), the result is
            NaN, as in NumPy; give a complex array.
        complex arguments: `expr` is taken to be analytic; `Abs`, `re` and `conjugate`
            of symbols that aren't declared real have no derivative here.

    Cost: a host call, and NumPy's and SciPy's time for the expressions; common
    subexpressions are computed once. SymPy takes milliseconds to seconds to make a
    derivative.
    """
    sympy = needed("sympy", "sympy")
    if "scipy" in modules:
        needed("scipy", "sympy")
    names = (symbols,) if isinstance(symbols, sympy.Symbol) else tuple(symbols)
    if not names or not all(isinstance(s, sympy.Symbol) for s in names):
        raise SpecError(
            f"hostcall: the second argument of hc.bridge.sympy should be a Symbol, or a"
            f" list of the Symbols that are its arguments, got {symbols!r}"
        )
    if len(set(names)) != len(names):
        raise SpecError(
            f"hostcall: the second argument of hc.bridge.sympy names a symbol twice:"
            f" {names}. Each symbol is one argument"
        )
    outs, form = _parts(expr)
    shown = name or _short(expr)
    others = set().union(*(e.free_symbols for e in outs)) - set(names)
    if others:
        given = ", ".join(sorted(map(str, others)))
        raise SpecError(
            f"hostcall: `{shown}` has the symbols {given}, which are not among its"
            f" arguments {names}. Add them to the second argument of hc.bridge.sympy,"
            " or replace them by numbers with expr.subs(...)"
        )
    return OfSympy(Evaluate(shown, tuple(outs), form, names, modules), timeout)


class OfSympy(HostFunction[..., Any]):
    """Expressions as a function. `hc.bridge.sympy` makes it."""

    fn: Evaluate

    def __init__(self, evaluate: Evaluate, timeout: float | None) -> None:
        given = {"name": evaluate.__name__, "result": evaluate.spec, "timeout": timeout}
        super().__init__(evaluate, **{**PLAIN, "vmap_method": "expand_dims", **given})
        self._slopes: dict[Any, tuple[list[int], OfSympy | None]] = {}
        numbers = range(len(evaluate.symbols))
        rules = (functools.partial(self._share, number) for number in numbers)
        self.defjvps(*rules, where="jax")

    def __reduce__(self) -> Any:
        return OfSympy, (self.fn, self.options["timeout"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its result; keywords are names of symbols."""
        symbols = self.fn.symbols
        left = [str(symbol) for symbol in symbols[len(args) :]]
        if len(args) > len(symbols) or sorted(kwargs) != sorted(left):
            by = f" by position and the keywords {sorted(kwargs)}" if kwargs else ""
            raise SpecError(
                f"hostcall: `{self.__name__}` takes an array for each of {symbols}, got"
                f" {len(args)}{by}",
                code="hc-arguments",
            )
        args = (*args, *(kwargs[name] for name in left))
        for symbol, arg in zip(symbols, args, strict=True):
            if symbol.is_extended_real and jnp.iscomplexobj(arg):
                raise SpecError(
                    f"hostcall: `{self.__name__}` got a complex array for {symbol},"
                    " which is declared real. Declare it as"
                    f" sympy.Symbol({str(symbol)!r})"
                )
        # vmap puts the batch axis in front of an array. With fewer axes than the
        # result, it would line up with an axis of another argument.
        rank = max(map(np.ndim, args))
        return super().__call__(
            *(
                jnp.expand_dims(x, range(rank - x.ndim))
                if hasattr(x, "ndim") and x.ndim < rank
                else x
                for x in args
            )
        )

    def _share(self, number: int, tangent: Any, out: Any, *primals: Any) -> Any:
        """One argument's share of the result's tangent, as JAX code."""
        key = number, tuple(not jnp.iscomplexobj(x) for x in primals)
        if key not in self._slopes:
            self._slopes[key] = self._derived(*key)
        at, slopes = self._slopes[key]
        if slopes is None:
            return jax.tree.map(jnp.zeros_like, out)
        found = slopes(*primals)
        if self.fn.form == "one":
            return found * tangent
        if self.fn.form != "list":
            return found * jnp.asarray(tangent)[..., None, None]
        touts = list(map(jnp.zeros_like, out))
        for k, slope in zip(at, found, strict=True):
            touts[k] = slope * tangent
        return touts

    def _derived(
        self, number: int, real: tuple[bool, ...]
    ) -> tuple[list[int], OfSympy | None]:
        """The derivatives with respect to symbol `number`.

        Returns which expressions depend on the symbol, and their derivatives; for a
        Matrix, all of them. `real` says which symbols stand for real arrays.
        """
        sympy = needed("sympy", "sympy")
        symbols = self.fn.symbols
        to = {
            symbol: sympy.Dummy(symbol.name, real=True)
            for symbol, flag in zip(symbols, real, strict=True)
            if flag and not symbol.is_extended_real
        }
        back, by = {dummy: symbol for symbol, dummy in to.items()}, symbols[number]
        found = [e.xreplace(to).diff(to.get(by, by)).doit() for e in self.fn.outs]
        # The derivative of a step is zero except at the step itself.
        found = [e.replace(sympy.DiracDelta, lambda *_: sympy.S.Zero) for e in found]
        found = [e.replace(_is_of_step, lambda _: sympy.S.Zero).doit() for e in found]
        for out, slope in zip(self.fn.outs, found, strict=True):
            if slope.has(sympy.Derivative, sympy.Subs):
                raise DerivativeError(
                    f"hostcall: SymPy can't differentiate {out} with respect to {by}:"
                    f" it returns {slope.xreplace(back)}. Use functions that SymPy can"
                    " differentiate, or keep this derivative out with"
                    " jax.lax.stop_gradient"
                )
        at = [k for k, slope in enumerate(found) if slope != 0]
        if not at:
            return [], None
        if self.fn.form != "list":
            at = list(range(len(found)))
        outs = tuple(found[k].xreplace(back) for k in at)
        name = f"d({self.__name__})/d{by}"
        evaluate = dataclasses.replace(self.fn, name=name, outs=outs)
        return at, OfSympy(evaluate, self.options["timeout"])


def _is_of_step(part: Any) -> bool:
    """Whether this is a derivative of a step, which SymPy leaves unevaluated."""
    import sympy

    return isinstance(part, sympy.Derivative) and isinstance(
        part.expr, (sympy.floor, sympy.ceiling)
    )


def _parts(expr: Any) -> tuple[list[Any], Any]:
    """(the expressions, their form)."""
    sympy = needed("sympy", "sympy")
    if isinstance(expr, sympy.MatrixBase):
        return list(expr), expr.shape
    several = isinstance(expr, (list, tuple, sympy.Tuple))
    outs = list(expr) if several else [expr]
    try:
        outs = [sympy.sympify(e, strict=True) for e in outs]
    except sympy.SympifyError as error:
        raise SpecError(
            f"hostcall: hc.bridge.sympy takes a SymPy expression, a list of them or a"
            f" Matrix, got {expr!r}. Make one from text with sympy.sympify(text)"
        ) from error
    if not all(isinstance(e, sympy.Expr) for e in outs):
        raise SpecError(
            f"hostcall: hc.bridge.sympy takes expressions whose values are numbers, got"
            f" {expr!r}. Make one from a condition with"
            " sympy.Piecewise((1, condition), (0, True))"
        )
    return outs, "list" if several else "one"


def _short(expr: Any) -> str:
    text = " ".join(str(expr).split())
    return text if len(text) <= 40 else text[:37] + "..."
