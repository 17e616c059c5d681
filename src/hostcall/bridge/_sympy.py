"""`hc.bridge.sympy`: SymPy expressions, evaluated by SciPy, differentiated by SymPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._core.errors import DerivativeError, SpecError
from hostcall._host_function import results
from hostcall._host_function.function import HostFunction
from hostcall.bridge._programs import needed
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
    found = _Expressions(shown, tuple(outs), form, names, modules, timeout)
    return OfSympy(found)


class OfSympy(HostFunction[..., Any]):
    """Expressions as a function. `hc.bridge.sympy` makes it."""

    def __init__(self, expressions: _Expressions) -> None:
        super().__init__(
            expressions.evaluate,
            name=expressions.name,
            result=expressions.spec,
            nondiff=(),
            order="pure",
            lend=False,
            arrays="numpy",
            vmap_method="expand_dims",
            timeout=expressions.timeout,
            executor=None,
        )
        self.expressions = expressions
        columns = [_Column(expressions, i) for i in range(len(expressions.symbols))]
        self.defjvps(*columns, where="jax")

    def __reduce__(self) -> Any:
        return OfSympy, (self.expressions,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its result; keywords are names of symbols."""
        if kwargs:
            args = self.expressions.positional(args, kwargs)
        return super().__call__(*self.expressions.checked(args))


def _is_of_step(part: Any) -> bool:
    """Whether this is a derivative of a step, which SymPy leaves unevaluated."""
    import sympy

    return isinstance(part, sympy.Derivative) and isinstance(
        part.expr, (sympy.floor, sympy.ceiling)
    )


class _Expressions:
    """Expressions of the same symbols, which are evaluated together.

    Attributes:
        outs: the expressions.
        form: "one", "list", or the shape of a Matrix.
        symbols: the symbols of the arguments.
    """

    def __init__(
        self,
        name: str,
        outs: tuple[Any, ...],
        form: Any,
        symbols: tuple[Any, ...],
        modules: Any,
        timeout: float | None,
    ) -> None:
        self.name, self.outs, self.form, self.symbols = name, outs, form, symbols
        self.modules, self.timeout = modules, timeout
        self._derivatives: dict[Any, tuple[list[int], OfSympy | None]] = {}
        # Made now, so that missing functions are found before a program runs.
        self.evaluate = Evaluate(name, outs, form, symbols, modules)

    def __reduce__(self) -> Any:
        given = (self.name, self.outs, self.form, self.symbols)
        return _Expressions, (*given, self.modules, self.timeout)

    def spec(self, *avals: Any) -> Any:
        plain = results.elementwise(*avals)
        structs = []
        for unit in self.evaluate.units:
            dtype = plain.dtype
            if unit:
                dtype = jnp.promote_types(dtype, jnp.complex64)
            structs.append(jax.ShapeDtypeStruct(plain.shape, dtype))
        if self.form == "one":
            return structs[0]
        if self.form == "list":
            return structs
        dtype = jnp.result_type(plain.dtype, *(s.dtype for s in structs))
        return jax.ShapeDtypeStruct((*plain.shape, *self.form), dtype)

    def positional(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        left = [str(symbol) for symbol in self.symbols[len(args) :]]
        if sorted(kwargs) != sorted(left):
            raise SpecError(
                f"hostcall: `{self.name}` takes an array for each of {self.symbols},"
                f" got {len(args)} by position and the keywords {sorted(kwargs)}",
                code="hc-arguments",
            )
        return (*args, *(kwargs[name] for name in left))

    def checked(self, args: tuple[Any, ...]) -> list[Any]:
        """The arguments, as arrays with as many axes as the result.

        vmap puts the batch axis in front of an array. With fewer axes, it would line up
        with an axis of another argument.
        """
        if len(args) != len(self.symbols):
            raise SpecError(
                f"hostcall: `{self.name}` takes an array for each of {self.symbols},"
                f" got {len(args)}",
                code="hc-arguments",
            )
        for symbol, arg in zip(self.symbols, args, strict=True):
            if symbol.is_extended_real and jnp.iscomplexobj(arg):
                raise SpecError(
                    f"hostcall: `{self.name}` got a complex array for {symbol}, which"
                    " is declared real. Declare it as"
                    f" sympy.Symbol({str(symbol)!r})"
                )
        rank = max(np.ndim(arg) for arg in args)
        return [
            jnp.expand_dims(x, range(rank - x.ndim))
            if hasattr(x, "ndim") and x.ndim < rank
            else x
            for x in args
        ]

    def derivative(
        self, number: int, real: tuple[bool, ...]
    ) -> tuple[list[int], OfSympy | None]:
        """The derivatives with respect to symbol `number`.

        Returns which expressions depend on the symbol, and their derivatives; for a
        Matrix, all of them. `real` says which symbols stand for real arrays.
        """
        key = (number, real)
        if key not in self._derivatives:
            self._derivatives[key] = self._derived(number, real)
        return self._derivatives[key]

    def _derived(
        self, number: int, real: tuple[bool, ...]
    ) -> tuple[list[int], OfSympy | None]:
        sympy = needed("sympy", "sympy")
        to, back = {}, {}
        for symbol, flag in zip(self.symbols, real, strict=True):
            if flag and not symbol.is_extended_real:
                to[symbol] = sympy.Dummy(symbol.name, real=True)
                back[to[symbol]] = symbol
        by = self.symbols[number]
        found = [e.xreplace(to).diff(to.get(by, by)).doit() for e in self.outs]
        # The derivative of a step is zero except at the step itself.
        found = [e.replace(sympy.DiracDelta, lambda *_: sympy.S.Zero) for e in found]
        found = [e.replace(_is_of_step, lambda _: sympy.S.Zero).doit() for e in found]
        for out, slope in zip(self.outs, found, strict=True):
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
        if self.form != "list":
            at = list(range(len(found)))
        outs = tuple(found[k].xreplace(back) for k in at)
        name = f"d({self.name})/d{by}"
        made = _Expressions(
            name, outs, self.form, self.symbols, self.modules, self.timeout
        )
        return at, OfSympy(made)


class _Column:
    """One argument's share of the result's tangent, as JAX code."""

    def __init__(self, expressions: _Expressions, number: int) -> None:
        self.expressions, self.number = expressions, number

    def __call__(self, tangent: Any, out: Any, *primals: Any) -> Any:
        real = tuple(not jnp.iscomplexobj(x) for x in primals)
        at, slopes = self.expressions.derivative(self.number, real)
        if slopes is None:
            return jax.tree.map(jnp.zeros_like, out)
        found = slopes(*primals)
        if self.expressions.form == "one":
            return found * tangent
        if self.expressions.form != "list":
            return found * jnp.asarray(tangent)[..., None, None]
        touts = list(map(jnp.zeros_like, out))
        for k, slope in zip(at, found, strict=True):
            touts[k] = slope * tangent
        return touts


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
