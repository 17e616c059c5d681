"""`hc.bridge.sympy`: SymPy expressions, evaluated by SciPy, differentiated by SymPy."""

from __future__ import annotations

import builtins
import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._core.errors import DerivativeError, SpecError
from hostcall._core.host_code import Handle, HostCode
from hostcall._core.result_rules import elementwise, with_axes
from hostcall._host_function.function import HostFunction
from hostcall.bridge._library import Arrays, Function, needed

# Expressions and symbols of SymPy's.
Expr: TypeAlias = Any
Exprs: TypeAlias = tuple[Expr, ...]
# Arrays -> a value for each expression.
Code: TypeAlias = Callable[..., Arrays]
# "one", "list", or the shape of a Matrix.
Form: TypeAlias = Literal["one", "list"] | tuple[int, int]


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
    are_symbols = all(isinstance(s, sympy.Symbol) for s in names)
    if not names or not are_symbols or len(set(names)) != len(names):
        raise SpecError(
            f"hostcall: the second argument of hc.bridge.sympy should be a Symbol, or a"
            f" list of the Symbols that are its arguments, got {symbols!r}. Each symbol"
            " is one argument, so it never names a symbol twice"
        )
    is_matrix = isinstance(expr, sympy.MatrixBase)
    several = is_matrix or isinstance(expr, (list, tuple, sympy.Tuple))
    try:
        outs = [sympy.sympify(e, strict=True) for e in (expr if several else [expr])]
    except sympy.SympifyError:
        outs = [None]
    if not all(isinstance(e, sympy.Expr) for e in outs):
        raise SpecError(
            f"hostcall: hc.bridge.sympy takes a SymPy expression, a list of them or a"
            f" Matrix, whose values are numbers, got {expr!r}. Make one from text with"
            " sympy.sympify(text), and from a condition with"
            " sympy.Piecewise((1, condition), (0, True))"
        )
    text = " ".join(str(expr).split())
    shown = name or (text if len(text) <= 40 else text[:37] + "...")
    others = set().union(*(e.free_symbols for e in outs)) - set(names)
    if others:
        given = ", ".join(sorted(map(str, others)))
        raise SpecError(
            f"hostcall: `{shown}` has the symbols {given}, which are not among its"
            f" arguments {names}. Add them to the second argument of hc.bridge.sympy,"
            " or replace them by numbers with expr.subs(...)"
        )
    form: Form = expr.shape if is_matrix else "list" if several else "one"
    return OfSympy(Evaluate(shown, tuple(outs), form, names, modules), timeout)


class OfSympy(Function):
    """Expressions as a function. `hc.bridge.sympy` makes it."""

    fn: Evaluate
    _callee = Handle._callee  # hc.call calls it as JAX code does

    def __init__(self, evaluate: Evaluate, timeout: float | None) -> None:
        name, result = evaluate.name, evaluate.spec
        how: dict[str, Any] = {"vmap_method": "expand_dims", "timeout": timeout}
        super().__init__(evaluate, name=name, result=result, **how)
        self._slopes: dict[object, tuple[list[int], OfSympy | None]] = {}
        shares = [
            functools.partial(self._share, n) for n in range(len(evaluate.symbols))
        ]
        self.defjvps(*shares, where="jax")

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
                    f" which is declared real. Write sympy.Symbol({str(symbol)!r})"
                )
        # vmap puts the batch axis in front of an array. With fewer axes than the
        # result, it would line up with an axis of another argument.
        return super().__call__(*with_axes(args, max(map(np.ndim, args))))

    def _share(
        self, number: int, tangent: jax.Array, _: object, *primals: jax.Array
    ) -> object:
        """One argument's share of the result's tangent, as JAX code."""
        key = number, tuple(not jnp.iscomplexobj(x) for x in primals)
        if key not in self._slopes:
            self._slopes[key] = self._derived(*key)
        at, slopes = self._slopes[key]
        shape = jnp.broadcast_shapes(*map(jnp.shape, primals))
        touts = [jnp.zeros(shape, tangent.dtype) for _ in self.fn.outs]
        if slopes is not None:
            for k, slope in zip(at, slopes(*primals), strict=True):
                touts[k] = slope * tangent
        return self.fn.formed(touts, jnp)

    def _derived(
        self, number: int, real: tuple[bool, ...]
    ) -> tuple[list[int], OfSympy | None]:
        """(which expressions depend on symbol `number`, their derivatives by it).

        `real` says which symbols stand for real arrays.
        """
        sympy = needed("sympy", "sympy")
        symbols = self.fn.symbols

        def is_of_step(part: Expr) -> bool:  # SymPy leaves its derivative unevaluated
            steps = sympy.floor, sympy.ceiling
            return isinstance(part, sympy.Derivative) and isinstance(part.expr, steps)

        to = {
            symbol: sympy.Dummy(symbol.name, real=True)
            for symbol, flag in zip(symbols, real, strict=True)
            if flag and not symbol.is_extended_real
        }
        back, by = {dummy: symbol for symbol, dummy in to.items()}, symbols[number]
        found = [e.xreplace(to).diff(to.get(by, by)).doit() for e in self.fn.outs]
        # The derivative of a step is zero except at the step itself.
        found = [e.replace(sympy.DiracDelta, lambda *_: sympy.S.Zero) for e in found]
        found = [e.replace(is_of_step, lambda _: sympy.S.Zero).doit() for e in found]
        for out, slope in zip(self.fn.outs, found, strict=True):
            if slope.has(sympy.Derivative, sympy.Subs):
                raise DerivativeError(
                    f"hostcall: SymPy can't differentiate {out} with respect to {by}:"
                    f" it returns {slope.xreplace(back)}. Use other functions, or keep"
                    " this derivative out with jax.lax.stop_gradient"
                )
        # The others would cost time, and give NaN for an infinite tangent.
        at = [k for k, slope in enumerate(found) if slope != 0]
        if not at:
            return at, None
        outs = tuple(found[k].xreplace(back) for k in at)
        name = f"d({self.__name__})/d{by}"
        evaluate = dataclasses.replace(self.fn, name=name, outs=outs, form="list")
        return at, OfSympy(evaluate, self.policy.timeout)


# --- SymPy expressions as NumPy code -------------------------------------------------


def _code_of(name: str, outs: Exprs, symbols: Exprs, modules: object) -> Code:
    """All expressions as one function of arrays."""
    sympy = needed("sympy", "sympy")
    undone = (sympy.Derivative, sympy.Subs, sympy.Integral)
    for part in set().union(*(out.atoms(*undone) for out in outs)):
        raise SpecError(
            f"hostcall: `{name}` contains {part}, which SymPy has not evaluated, so it"
            " can't be computed from arrays. Try expr.doit()"
        )
    # SciPy's factorial is zero for negative numbers; the gamma function is right there.
    outs = tuple(o.replace(sympy.factorial, lambda n: sympy.gamma(n + 1)) for o in outs)
    given = list(modules) if isinstance(modules, tuple) else modules
    try:
        code: Code = sympy.lambdify(symbols, outs, modules=given, cse=True)
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


@dataclasses.dataclass(eq=False, repr=False)
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
    outs: Exprs
    form: Form
    symbols: Exprs
    modules: object

    def __post_init__(self) -> None:
        sympy = needed("sympy", "sympy")
        self.__name__ = self.__qualname__ = self.name
        # For each expression, whether it has the imaginary unit.
        self._units = tuple(bool(out.has(sympy.I)) for out in self.outs)
        # Made now, so that missing functions are found before a program runs.
        self._code = _code_of(self.name, self.outs, self.symbols, self.modules)

    def __reduce__(self) -> tuple[type[Evaluate], tuple[object, ...]]:
        given = (self.name, self.outs, self.form, self.symbols, self.modules)
        return Evaluate, given

    def formed(self, outs: Arrays, np: ModuleType) -> object:
        """The result, of an array for each expression; `np` is NumPy or JAX's."""
        if self.form == "one":
            return outs[0]
        if self.form == "list":
            return outs
        return np.stack(outs, -1).reshape(*outs[0].shape, *self.form)

    def spec(self, *avals: jax.ShapeDtypeStruct) -> object:
        """The spec of its result for such arrays."""
        plain = elementwise(*avals)
        wide = jnp.promote_types(plain.dtype, jnp.complex64)
        dtypes = [wide if unit else plain.dtype for unit in self._units]
        structs = [jax.ShapeDtypeStruct(plain.shape, dtype) for dtype in dtypes]
        return jax.eval_shape(lambda *outs: self.formed(list(outs), jnp), *structs)

    def __call__(self, *arrays: np.ndarray) -> object:
        shape = np.broadcast_shapes(*(x.shape for x in arrays))
        real = not any(map(np.iscomplexobj, arrays))
        with np.errstate(all="ignore"):  # NaN and infinity without warnings, as in JAX
            values = self._code(*map(_wide, arrays))
            outs = [
                np.broadcast_to(_real(v) if real and not unit else v, shape)
                for v, unit in zip(values, self._units, strict=True)
            ]
        return self.formed(outs, np)


def _wide(x: np.ndarray) -> np.ndarray:
    """Converts the array to a floating dtype that SciPy computes in."""
    if x.dtype.kind in "biu":
        return x.astype(np.float64)
    known = x.dtype.kind == "c" or x.dtype in (np.float32, np.float64)
    return x if known else x.astype(np.float32)


def _real(value: np.ndarray | complex) -> np.ndarray | complex:
    """The real part; NaN where the value is truly complex.

    SciPy gives complex numbers for some functions of real arguments, often with a zero
    imaginary part.
    """
    if not np.iscomplexobj(value):
        return value
    wrong = np.abs(value.imag) > 1e-6 * np.abs(value)
    return np.where(wrong, np.nan, value.real)
