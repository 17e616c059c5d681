"""`hc.bridge.scipy`: SciPy solves equations and minimizes functions that are JAX code.

Each solver takes a JAX function `fun(x, *args)` and makes a `HostFunction` of a first
guess and the args, which returns the solution.

The idea: a solution x is where some JAX function F(x, args) is zero: `fun` itself, or
the gradient of what is minimized. SciPy finds x. If F(x, args) stays zero while args
move, then F_x dx + F_args dargs = 0, so

    dx = -F_x^-1 F_args dargs

(the implicit function theorem). That is JAX code over x, so JAX transposes it and
differentiates it again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from hostcall._core.arguments import check_function, wrong
from hostcall._core.errors import HostcallError, SpecError
from hostcall._core.host_code import HostCode, TakesMask
from hostcall._core.spec import Template
from hostcall._host_function.host import host
from hostcall._host_function.trees import pick
from hostcall.bridge._library import Arrays, along, is_operand, needed, split

__all__ = ["Outcome", "least_squares", "minimize", "root"]

tree = jax.tree_util

# Compiled code of a flat unknown.
Code: TypeAlias = Callable[..., jax.Array]
# The same on NumPy arrays, of the unknown alone.
Runs: TypeAlias = Sequence[Callable[[np.ndarray], Any]]
Limits: TypeAlias = tuple[np.ndarray, np.ndarray] | None


class Outcome(NamedTuple):
    """How a solve ended (`full_output=True`), as arrays of the program.

    Attributes:
        success: a bool, whether SciPy says that it found a solution.
        status: an int32, SciPy's code for why it ended.
        nfev: an int32, how often SciPy evaluated the function.
    """

    success: Any
    status: Any
    nfev: Any


def root(
    fun: Callable[..., Any] | None = None,
    *,
    method: str = "hybr",
    tol: float | None = None,
    options: Mapping[str, Any] | None = None,
    full_output: bool = False,
    vmap_method: str | None = None,
    timeout: float | None = None,
    name: str | None = None,
) -> Any:
    """Makes a solver of `fun(x, *args) = 0`: SciPy finds x, which has derivatives.

        @hc.bridge.scipy.root
        def kepler(E, M, e):                    # a JAX function, zero at the solution
            return E - e * jnp.sin(E) - M

        E = kepler(M, M, e)                     # from the first guess E = M
        jax.grad(kepler, 2)(M, M, e)            # dE/de

    Args:
        fun: a JAX function `fun(x, *args)`. The unknown `x` is a pytree of real
            floating arrays, and the result has as many numbers. The args are any
            pytrees; what has derivatives or is traced must be among them, and not in a
            closure. Without `fun`, `root` returns a decorator.
        method: as in `scipy.optimize.root`, which gets the exact Jacobian with "hybr".
            All but "lm", which may end where `fun` is not zero.
        tol: as in `scipy.optimize.root`.
        options: as in `scipy.optimize.root`: of the method.
        full_output: whether the result is `(x, ending)`, with an `Outcome`. A solve
            that fails then returns its last x and `ending.success == False`.
        vmap_method: "sequential" (default) or "parallel": one solve for each row.
        timeout: as in `hc.host`: seconds for one solve, compilation included.
        name: as in `hc.host`.

    Returns:
        A `HostFunction`, called as `solve(x0, *args)`; it returns x, in the structure,
        shapes and dtypes of x0.

    Raises:
        PackageError: SciPy is not installed.
        SpecError: an option is wrong, or `fun` or `x0` does not fit, when the program
            is traced.
        HostcallError: SciPy found no solution, with SciPy's message, when the program
            runs (unless `full_output`). A root from which a Newton step is shorter than
            `tol` (default: 1.5e-8) of x is one, though "hybr" may not say so.

    Under transformations:
        jit, scan, while_loop, cond, remat, shard_map: as a pure `hc.call`.
        vmap: one solve for each row.
        jvp, grad, jacobian, hessian, any order, both modes: one solve, and JAX code of
            the program: the Jacobian of `fun` at x, and a linear solve with it, in the
            program's precision. The first guess has no influence, so its derivative is
            zero. A singular Jacobian gives infinite or NaN derivatives.

    Cost: a host call, SciPy's own time, and about 40 us for each evaluation. `fun` and
    its derivatives are traced in float64, whatever JAX's mode, and compiled once for
    each combination of shapes. Derivatives of x need a dense n x n matrix for n
    numbers in x.

    Source: scipy.optimize; the rule is that of `jax.lax.custom_root`.
    """
    return _made(_Root, dict(locals()))


def minimize(
    fun: Callable[..., Any] | None = None,
    *,
    method: str | None = None,
    tol: float | None = None,
    options: Mapping[str, Any] | None = None,
    bounds: tuple[Any, Any] | None = None,
    full_output: bool = False,
    vmap_method: str | None = None,
    timeout: float | None = None,
    name: str | None = None,
) -> Any:
    """Makes a function that minimizes `fun(x, *args)` over x by SciPy.

        closest = hc.bridge.scipy.minimize(lambda x, p: ((x - p) ** 4).sum() + x @ x)
        x = closest(jnp.zeros(3), p)
        jax.jacobian(closest, 1)(jnp.zeros(3), p)

    Args:
        fun: as in `root`, with one real number as its result. It must have second
            derivatives, and at the solution a Hessian that is not singular.
        method: as in `scipy.optimize.minimize`, one that gets the gradient: "BFGS",
            "CG", "L-BFGS-B", "TNC", "SLSQP", or (with the Hessian, too) "Newton-CG",
            "dogleg", "trust-ncg", "trust-krylov", "trust-exact". Others may end where
            the gradient is not zero, and there the derivative of x does not follow.
            Default: "BFGS"; with bounds "L-BFGS-B".
        tol: as in `scipy.optimize.minimize`. SciPy's defaults end at a gradient of
            1e-5, so x and its derivatives are no more exact than that.
        options: as in `scipy.optimize.minimize`: of the method.
        bounds: (low, high), each a number, or a pytree like x of what broadcasts to it;
            infinite for none. For "L-BFGS-B", "TNC" and "SLSQP". They are constants.
            A number of x that is at a bound stays there: its derivative is zero.
        full_output: as in `root`.
        vmap_method: as in `root`.
        timeout: as in `root`.
        name: as in `root`.

    Returns:
        As `root`: a `HostFunction`, called as `solve(x0, *args)`.

    Raises:
        As `root`.

    Under transformations:
        As `root`, with the gradient of `fun` in place of `fun`: a derivative of x needs
        the Hessian. Where a number of x is at its bound and its gradient is zero as
        well, x has no derivative; the result is then that of a number at its bound.

    Cost: as `root`.

    Source: scipy.optimize.
    """
    return _made(_Minimize, dict(locals()))


def least_squares(
    fun: Callable[..., Any] | None = None,
    *,
    method: str = "trf",
    tol: float | None = None,
    options: Mapping[str, Any] | None = None,
    bounds: tuple[Any, Any] | None = None,
    full_output: bool = False,
    vmap_method: str | None = None,
    timeout: float | None = None,
    name: str | None = None,
) -> Any:
    """Makes a function that minimizes the sum of squares of `fun(x, *args)` by SciPy.

        @hc.bridge.scipy.least_squares
        def fit(p, t, y):
            return p[0] * jnp.exp(p[1] * t) - y

        jax.jacobian(fit, 2)(p0, t, y)          # how the fit depends on the data

    Args:
        fun: as in `root`, with any pytree of real floating arrays as its result.
        method: as in `scipy.optimize.least_squares`: "trf", "dogbox", "lm".
        tol: `ftol`, `xtol` and `gtol` of `scipy.optimize.least_squares`.
        options: others of its keywords: `ftol`, `xtol`, `gtol`, `max_nfev`, `x_scale`,
            `tr_solver`, `tr_options`.
        bounds: as in `minimize`, for "trf" and "dogbox".
        full_output: as in `root`.
        vmap_method: as in `root`.
        timeout: as in `root`.
        name: as in `root`.

    Returns:
        As `root`: a `HostFunction`, called as `solve(x0, *args)`.

    Raises:
        As `root`.

    Under transformations:
        As `minimize`, of half the sum of squares. The Hessian is the full one, with the
        second derivatives of `fun`, so derivatives are exact for large residuals too.

    Cost: as `root`.

    Source: scipy.optimize.
    """
    return _made(_LeastSquares, dict(locals()))


def _made(kind: type[_Problem], given: dict[str, Any]) -> Any:
    """The solver of a problem, or a decorator that makes it."""
    fun = given.pop("fun")
    public = {_Root: root, _Minimize: minimize, _LeastSquares: least_squares}[kind]
    if fun is None:
        return functools.partial(public, **given)
    usage = f"hc.bridge.scipy.{kind.word}(fun)"
    shown = given["name"] or check_function(fun, usage)
    rows = given["vmap_method"]
    if rows not in (None, "sequential", "parallel"):
        why = ": SciPy solves for one row at a time"
        wanted = "'sequential' or 'parallel'"
        raise wrong("vmap_method", f"`{shown}`", wanted, rows, why)
    of_host = {key: given.pop(key) for key in ("vmap_method", "timeout")}
    problem = kind(fun, {**given, "name": shown})
    made = host(problem, result=problem.spec, float64=True, name=shown, **of_host)
    made.defjvp(_Implicit(problem, made), where="jax")
    return made


class _Implicit(TakesMask):
    """The rule of a solver, which solves only where the mask of `where` is True."""

    def __init__(self, problem: _Problem, solve: Any) -> None:
        self._problem, self._solve = problem, solve

    def __call__(self, primals: Arrays, tangents: Arrays) -> Any:
        return self._problem.push(self._solve, primals, tangents)

    def where(self, mask: Any) -> _Implicit:
        return _Implicit(self._problem, self._solve.where(mask))


def _value(flat: Code, *given: Any) -> jax.Array:
    return flat(*given)


def _slope(flat: Code, *given: Any) -> jax.Array:
    return jax.jacfwd(flat, 1)(*given)


def _value_and_slope(flat: Code, *given: Any) -> Any:
    return jax.value_and_grad(lambda *given: flat(*given)[0], 1)(*given)


def _bend(flat: Code, *given: Any) -> jax.Array:
    return jax.hessian(lambda *given: flat(*given)[0], 1)(*given)


class _Problem(HostCode):
    """What SciPy solves: the host code of a solver, and the JAX code of its rule.

    Attributes:
        word: its function in scipy.optimize.
        codes: what SciPy gets, as functions of (`_flat`, template, z, *arrays).
        methods: those that may be chosen.
        bounded: those that take bounds.
        others: why there are no other methods.
    """

    word: str
    codes: Sequence[Code] = (_value, _slope)
    methods: Sequence[str]
    bounded: Sequence[str] = ()
    others: str

    def __init__(self, fun: Callable[..., Any], given: dict[str, Any]) -> None:
        self.fun = self.__wrapped__ = fun
        self.scipy = needed("scipy.optimize", "scipy")
        self._given, self.name = given, given["name"]
        self.__name__ = self.__qualname__ = self.name
        self.tol, self.options = given["tol"], dict(given["options"] or {})
        self.full, self.bounds = given["full_output"], given.get("bounds")
        self.method = given["method"] or ("BFGS" if self.bounds is None else "L-BFGS-B")
        may = self.methods if self.bounds is None else self.bounded
        if self.method not in may:
            why = f": {self.others}"
            if self.bounds is not None and self.method in self.methods:
                why = ": the others take no bounds, or end near one but not at it"
            raise wrong("method", f"`{self.name}`", str(may), self.method, why)
        if self.bounds is not None and not (
            isinstance(self.bounds, tuple) and len(self.bounds) == 2
        ):
            wanted = "a tuple (low, high), each a number or a pytree like x"
            raise wrong("bounds", f"`{self.name}`", wanted, self.bounds)
        self._codes = [
            jax.jit(functools.partial(code, self._flat), static_argnums=0)
            for code in self.codes
        ]

    def __reduce__(self) -> Any:
        return type(self), (self.fun, self._given)

    # --- JAX code --------------------------------------------------------------------

    def zero(self, x: Any, *args: Any) -> Any:
        """What is zero at a solution."""
        raise NotImplementedError

    def spec(self, x: Any, *args: Any) -> Any:
        """The spec of the result; refuses a `fun` or first guess that does not fit."""
        for leaf in tree.tree_leaves(x):
            there = isinstance(leaf, jax.ShapeDtypeStruct)
            if not (there and jnp.issubdtype(leaf.dtype, jnp.floating)):
                raise SpecError(
                    f"hostcall: the first guess of `{self.name}` should be a pytree of"
                    f" real floating arrays, got {leaf}. Write 1.0 for 1, and give the"
                    " real and imaginary parts of a complex unknown"
                )
        outs = self._traced(x, *args)
        sizes = [sum(a.size for a in tree.tree_leaves(t)) for t in (x, outs)]
        floats = all(
            jnp.issubdtype(a.dtype, jnp.floating) for a in tree.tree_leaves(outs)
        )
        if not floats or (why := self.refused(*sizes)):
            why = why if floats else "real floating numbers"
            got = str(tree.tree_map(lambda a: f"{a.dtype}{list(a.shape)}", outs))
            raise SpecError(
                f"hostcall: `{self.name}` should return {why} for hc.bridge.scipy."
                f"{self.word}, got {got} for an unknown of {sizes[0]} numbers"
            )
        if self.bounds is not None:
            self._limits(x)
        flag = jax.ShapeDtypeStruct((), np.bool_)
        count = jax.ShapeDtypeStruct((), np.int32)
        return (x, Outcome(flag, count, count)) if self.full else x

    def _traced(self, *args: Any) -> Any:
        """The avals of what `fun` returns, traced with the program's dtypes."""
        template, arrays = split(args, {})
        try:
            made = jax.make_jaxpr(
                functools.partial(self._of, template), return_shape=True
            )
            jaxpr, outs = made(*arrays)
        except Exception as error:
            raise SpecError(
                f"hostcall: `{self.name}` failed when it was traced with the first"
                f" guess and the args: {type(error).__name__}: {error}"
            ) from error
        for value in jaxpr.consts:
            if isinstance(value, jax.core.Tracer):
                raise SpecError(
                    f"hostcall: `{self.name}` uses a traced value of the program"
                    f" ({value.dtype}{list(value.shape)}) that is not among its"
                    " arguments: it has no value on the host, and would get no"
                    " derivative. Pass it after the first guess: solve(x0, *args)",
                    code="hc-traced",
                )
        return outs

    def refused(self, size: int, results: int) -> str:
        """What `fun` should return, if that is not how many numbers it returns."""
        raise NotImplementedError

    def push(self, made: Callable[..., Any], primals: Arrays, tangents: Arrays) -> Any:
        """(result, its tangent), by the implicit function theorem."""
        out = made(*primals)
        x, ending = out if self.full else (out, None)
        flat, unravel = ravel_pytree(x)
        leaves = filter(is_operand, tree.tree_leaves(primals[1:]))
        moves = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
        args, filled, _ = along(primals[1:], moves, is_operand)
        dots = pick(tree.tree_leaves(tangents[1:]), moves)

        def zero(z: jax.Array, *args: jax.Array) -> jax.Array:
            return ravel_pytree(self.zero(unravel(z), *filled(args)))[0]

        moved = jnp.zeros_like(flat)
        if args:
            still = functools.partial(zero, flat)
            _, moved = jax.jvp(still, tuple(args), tuple(dots))
        slope = jax.jacfwd(zero)(flat, *args)
        if self.bounds is not None:  # what is at a bound stays there
            low, high = (b.astype(flat.dtype) for b in self._limits(x))
            free = (flat > low) & (flat < high)
            slope = jnp.where(
                free[:, None], slope, jnp.eye(flat.size, dtype=slope.dtype)
            )
            moved = jnp.where(free, moved, 0)
        wide = jnp.promote_types(flat.dtype, np.float32)  # LAPACK's
        found = -jnp.linalg.solve(slope.astype(wide), moved.astype(wide))
        dx = unravel(found.astype(flat.dtype))
        still = tree.tree_map(lambda r: np.zeros(r.shape, jax.dtypes.float0), ending)
        return out, ((dx, still) if self.full else dx)

    def _of(self, template: Template, *arrays: jax.Array) -> Any:
        args, _ = template.fill(arrays)
        return self.fun(*args)

    def _flat(self, template: Template, z: jax.Array, *arrays: jax.Array) -> jax.Array:
        """`fun` of a flat unknown, as one flat array."""
        (x, *args), _ = template.fill(arrays)
        return ravel_pytree(self.fun(ravel_pytree(x)[1](z), *args))[0]

    def _limits(self, x: Any) -> tuple[np.ndarray, np.ndarray]:
        """The bounds of each number of x."""
        leaves, treedef = tree.tree_flatten(x)
        try:
            found = []
            for bound in self.bounds or ():
                every = [bound] * len(leaves) if np.isscalar(bound) else None
                each = treedef.flatten_up_to(bound) if every is None else every
                both = zip(each, leaves, strict=True)
                wide = [
                    np.broadcast_to(np.float64(b), a.shape).ravel() for b, a in both
                ]
                found.append(np.concatenate(wide))
            low, high = found
            if (low < high).all():
                return low, high
            why = "low is below high"
        except (TypeError, ValueError) as error:
            why = f"each has the structure of x ({error})"
        wanted = f"(low, high), where {why}"
        raise wrong("bounds", f"`{self.name}`", wanted, self.bounds)

    # --- Host code -------------------------------------------------------------------

    def solve(self, start: np.ndarray, run: Runs, limits: Limits) -> Any:
        """SciPy's result. `run` are the compiled codes of NumPy arrays."""
        raise NotImplementedError

    def __call__(self, x0: Any, *args: Any) -> Any:
        leaves, treedef = tree.tree_flatten(x0)
        start = np.concatenate([np.ravel(leaf) for leaf in leaves])
        limits = None if self.bounds is None else self._limits(x0)
        template, arrays = split((x0, *args), {})
        with jax.enable_x64(True):
            arrays = [jnp.asarray(x) for x in arrays]  # sent once, not in each step

            def bound(code: Code) -> Callable[..., Any]:
                # Copies, since SciPy may write to them.
                return lambda z: tree.tree_map(np.array, code(template, z, *arrays))

            found = self.solve(start, [*map(bound, self._codes)], limits)
        if not (found.success or self.full):
            message = " ".join(found.message.split())
            raise HostcallError(
                f"hostcall: `{self.name}` found no solution: {message} (by"
                f" scipy.optimize.{self.word}, method={self.method!r}). Give another"
                " first guess, or options=; with full_output=True it returns a flag",
                code="hc-failed",
            )
        parts = np.split(found.x, np.cumsum([leaf.size for leaf in leaves])[:-1])
        each = zip(parts, leaves, strict=True)
        x = treedef.unflatten([part.reshape(leaf.shape) for part, leaf in each])
        ending = Outcome(*(found.get(key, 0) for key in Outcome._fields))
        return (x, ending) if self.full else x


class _Root(_Problem):
    word = "root"
    methods = (
        *("hybr", "broyden1", "broyden2", "anderson", "linearmixing"),
        *("diagbroyden", "excitingmixing", "krylov", "df-sane"),
    )
    others = (
        "'lm' may end where fun is not zero, and then the implicit function theorem"
        " says nothing. Use hc.bridge.scipy.least_squares"
    )

    def zero(self, x: Any, *args: Any) -> Any:
        return self.fun(x, *args)

    def refused(self, size: int, results: int) -> str:
        return "" if size == results else "as many numbers as the unknown has"

    def solve(self, start: np.ndarray, run: Runs, limits: Limits) -> Any:
        value, slope = run
        how = {"jac": slope} if self.method == "hybr" else {}
        given = {"method": self.method, "tol": self.tol, "options": self.options}
        found = self.scipy.root(value, start, **given, **how)
        if not found.success:
            # "hybr" makes "no good progress" at a root that is exact up to rounding, as
            # of a linear function. Its own criterion, of a Newton step from there.
            with contextlib.suppress(np.linalg.LinAlgError):
                step = np.linalg.solve(slope(found.x), value(found.x))
                near = (self.tol or 1.5e-8) * np.linalg.norm(found.x)
                found.success = bool(np.linalg.norm(step) <= near)
        return found


class _Minimize(_Problem):
    word = "minimize"
    codes = (_value_and_slope, _bend)
    with_hessian = ("Newton-CG", "dogleg", "trust-ncg", "trust-krylov", "trust-exact")
    bounded = ("L-BFGS-B", "TNC", "SLSQP")
    methods = ("BFGS", "CG", *bounded, *with_hessian)
    others = (
        "others may end where the gradient is not zero, and then the implicit function"
        " theorem says nothing"
    )

    def zero(self, x: Any, *args: Any) -> Any:
        return jax.grad(lambda x: jnp.reshape(self.fun(x, *args), ()))(x)

    def refused(self, size: int, results: int) -> str:
        return "" if results == 1 else "one number"

    def solve(self, start: np.ndarray, run: Runs, limits: Limits) -> Any:
        both, bend = run
        given = {"method": self.method, "tol": self.tol, "options": self.options}
        if self.method in self.with_hessian:
            given["hess"] = bend
        if limits is not None:
            given["bounds"] = self.scipy.Bounds(*limits)
        return self.scipy.minimize(both, start, jac=True, **given)


class _LeastSquares(_Problem):
    word = "least_squares"
    bounded = ("trf", "dogbox")
    methods = ("trf", "dogbox", "lm")
    others = "these are SciPy's"
    keywords = (
        "ftol",
        "xtol",
        "gtol",
        "max_nfev",
        "x_scale",
        "tr_solver",
        "tr_options",
    )

    def __init__(self, fun: Callable[..., Any], given: dict[str, Any]) -> None:
        super().__init__(fun, given)
        if more := sorted(self.options.keys() - set(self.keywords)):
            why = ". Another loss= is another problem: write it into fun"
            wanted = f"a dict with keys among {self.keywords}"
            raise wrong("options", f"`{self.name}`", wanted, more, why)

    def zero(self, x: Any, *args: Any) -> Any:
        def half(x: Any) -> jax.Array:
            return (ravel_pytree(self.fun(x, *args))[0] ** 2).sum() / 2

        return jax.grad(half)(x)

    def refused(self, size: int, results: int) -> str:
        few = self.method == "lm" and results < size
        return (
            "at least as many numbers as the unknown has (method='lm')" if few else ""
        )

    def solve(self, start: np.ndarray, run: Runs, limits: Limits) -> Any:
        value, slope = run
        given = dict(self.options)
        if self.tol is not None:
            given = {**dict.fromkeys(("ftol", "xtol", "gtol"), self.tol), **given}
        if limits is not None:
            given["bounds"] = limits
        found = self.scipy.least_squares(
            value, start, slope, method=self.method, **given
        )
        if limits is not None:  # "trf" stays inside, within a rounding of the bound
            at = found.active_mask
            found.x = np.select([at < 0, at > 0], limits, found.x)
        return found
