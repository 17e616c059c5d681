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
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from hostcall import _jax
from hostcall._core.errors import HostcallError, SpecError, choices, wrong
from hostcall._core.host_code import HostCode, TakesMask
from hostcall._core.mistakes import check_function
from hostcall._core.options import ROWS, Option, check
from hostcall._core.spec import Template
from hostcall._core.suggestions import suggests
from hostcall._host_function.host import host
from hostcall._host_function.trees import pick
from hostcall.bridge._library import Arrays, along, is_operand, needed, split

__all__ = ["Outcome", "least_squares", "minimize", "root"]

tree = jax.tree_util

# JAX code of a flat unknown.
Code: TypeAlias = Callable[..., Any]
# The same on NumPy arrays, of the unknown alone.
Runs: TypeAlias = Sequence[Callable[[np.ndarray], Any]]
Limits: TypeAlias = tuple[np.ndarray, np.ndarray] | None


class Outcome(NamedTuple):
    """How a solve ended (`full_output=True`), as arrays of the program.

    Attributes:
        success: a bool, whether SciPy says that it found a solution, where `fun` is a
            number.
        status: an int32, SciPy's code for why it ended; -1 if it raised an error.
        nfev: an int32, how often SciPy evaluated the function.
    """

    success: Any
    status: Any
    nfev: Any


_DERIVED = "JAX derives it from fun: leave it out"
_ARGUMENTS = "The function that is returned takes them: solve(x0, *args)"
# Options of SciPy's functions, and what to write instead.
_OF_SCIPY = {
    "args": _ARGUMENTS,
    "x0": _ARGUMENTS,
    "jac": _DERIVED,
    "hess": _DERIVED,
    "hessp": _DERIVED,
    "constraints": (
        "A derivative through constraints is not offered. Bounds are: bounds=(low,"
        " high). For other constraints add a penalty to fun, or call"
        " scipy.optimize.minimize in a function of hc.call or hc.host"
    ),
    "callback": "To see the values of fun, write hc.tap or hc.print in it",
}


@suggests("hc.bridge.scipy.root", _OF_SCIPY)
def root(
    fun: Callable[..., Any] | None = None,
    *,
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
        tol: as in `scipy.optimize.root`.
        options: as in `scipy.optimize.root`, whose method is "hybr": the others make no
            use of the exact Jacobian, or may end where `fun` is not zero ("lm").
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
            `tol` (default: 1.5e-8) of x is one, though "hybr" may not say so. Where a
            value is NaN or infinite is none, though SciPy may say so.

    Under transformations:
        jit, scan, while_loop, cond, remat, shard_map: as a pure `hc.call`.
        jit over sharded arrays: one solve, with the whole args. The derivative needs
            them on each device.
        vmap: one solve for each row.
        jvp, grad, jacobian, hessian, any order, both modes: one solve, and JAX code of
            the program: the Jacobian of `fun` at x, and a linear solve with it, in the
            program's precision. The first guess has no influence, so its derivative is
            zero. A singular Jacobian gives infinite or NaN derivatives.

    Cost: a host call, SciPy's own time, and 30 us for each value of `fun`, and for each
    Jacobian; 60 us for a value with a gradient. `fun` and its derivatives are traced in
    float64, whatever JAX's mode, and compiled once for each combination of shapes.
    Derivatives of x need a dense n x n matrix for n numbers in x.

    Source: scipy.optimize; the rule is that of `jax.lax.custom_root`.
    """
    return _made(root, _Root, dict(locals()))


@suggests("hc.bridge.scipy.minimize", _OF_SCIPY)
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
        As `root`. A minimum from which a Newton step is shorter than 1.5e-8 of x is
        one, though a line search that has lost its precision does not say so.

    Under transformations:
        As `root`, with the gradient of `fun` in place of `fun`: a derivative of x needs
        the Hessian. Where a number of x is at its bound and its gradient is zero as
        well, x has no derivative; the result is then that of a number at its bound.

    Cost: as `root`.

    Source: scipy.optimize.
    """
    return _made(minimize, _Minimize, dict(locals()))


@suggests("hc.bridge.scipy.least_squares", _OF_SCIPY)
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
    return _made(least_squares, _LeastSquares, dict(locals()))


def _made(public: Callable[..., Any], kind: type[_Problem], settings: Any) -> Any:
    """The solver of a problem, or a decorator that makes it."""
    fun = settings.pop("fun")
    if fun is None:
        return functools.partial(public, **settings)
    usage = f"hc.bridge.scipy.{kind.word}(fun)"
    shown = settings["name"] or check_function(fun, usage).name
    problem = kind(fun, {**settings, "name": shown})
    of_host = {key: settings[key] for key in ("vmap_method", "timeout")}
    solver = host(problem, result=problem.spec, float64=True, name=shown, **of_host)
    solver.defjvp(_Implicit(problem, solver), where="jax")
    return solver


# What the options may be that all solvers have.
_ROWS = {
    "vmap_method": Option(
        f"{choices(ROWS)}, since SciPy solves for one row at a time", ROWS.__contains__
    ),
    "tol": Option(
        "a number of at least 0", lambda v: isinstance(v, (int, float)) and v >= 0
    ),
    "full_output": Option("True or False", lambda v: isinstance(v, bool)),
    "bounds": Option(
        "a tuple (low, high), each a number or a pytree like x",
        lambda v: isinstance(v, tuple) and len(v) == 2,
    ),
}


class _Implicit(TakesMask):
    """The rule of a solver, which solves only where the mask of `where` is True."""

    def __init__(self, problem: _Problem, solve: Any) -> None:
        self._problem = problem
        self._solve = solve

    def __call__(self, primals: Arrays, tangents: Arrays) -> Any:
        return self._problem.push(self._solve, primals, tangents)

    def where(self, mask: Any) -> _Implicit:
        return _Implicit(self._problem, self._solve.where(mask))


class _Problem(HostCode):
    """What SciPy solves: the host code of a solver, and the JAX code of its rule.

    Attributes:
        word: its function in scipy.optimize.
        codes: what SciPy gets, made of `fun` on flat arrays.
        shape: of what `fun` returns there.
        returns: what `fun` should return, in words.
        methods: those that may be chosen; the first is the default.
        bounded: the same with bounds.
        others: what an error says of other methods.
        keys: those that its options may have; empty for any.
        other_keys: what an error says of others.
    """

    word: str
    codes: tuple[Callable[[Code], Code], ...] = (lambda fun: fun, jax.jacfwd)
    shape: tuple[int, ...] = (-1,)
    returns = "real floating numbers"
    methods: Sequence[str] = ("hybr",)
    bounded: Sequence[str] = ()
    others = ""
    other_keys = ""
    keys: Sequence[str] = ()

    def __init__(self, fun: Callable[..., Any], settings: dict[str, Any]) -> None:
        self.fun = self.__wrapped__ = fun
        self.scipy = needed("scipy.optimize", "scipy")
        self._given = settings
        self.name = settings["name"]
        self.__name__ = self.__qualname__ = self.name
        self.tol = settings["tol"]
        self.full = settings["full_output"]
        self.options = settings["options"] or {}
        self.bounds = settings.get("bounds")
        may = self.methods if self.bounds is None else self.bounded
        self.method = settings.get("method") or may[0]
        self._check(may)
        self._codes = [jax.jit(self._on_flat(c), static_argnums=0) for c in self.codes]
        self._traced = jax.jit(self._numbers, static_argnums=0)

    def _check(self, may: Sequence[str]) -> None:
        """Refuses wrong options; `may` are the methods."""
        options = Option(
            f"a dict of options of scipy.optimize.{self.word}{self.other_keys}",
            lambda v: isinstance(v, Mapping) and set(v) <= set(self.keys or v),
        )
        method = Option(choices(may) + self.others, may.__contains__)
        rows = {**_ROWS, "method": method, "options": options}
        check(f"`{self.name}`", {**self._given, "method": self.method}, rows)

    def __reduce__(self) -> Any:
        return type(self), (self.fun, self._given)

    # --- JAX code --------------------------------------------------------------------

    @staticmethod
    def zero(fun: Code) -> Code:
        """What is zero at a solution, made of `fun` on flat arrays."""
        return fun

    def _flat(self, *args: Any) -> jax.Array:
        """What `fun` returns, as one array."""
        return ravel_pytree(self.fun(*args))[0].reshape(self.shape)

    def _numbers(self, template: Template, *arrays: jax.Array) -> Any:
        return self.fun(*template.unflatten(arrays)[0])

    def _on_flat(self, code: Callable[[Code], Code]) -> Callable[..., Any]:
        """(template, z, *arrays) -> the code at z, which is x as one array."""

        def run(template: Template, z: jax.Array, *arrays: jax.Array) -> Any:
            (x, *args), _ = template.unflatten(arrays)
            _, unravel = ravel_pytree(x)

            def of_unknown(z: jax.Array) -> jax.Array:
                return self._flat(unravel(z), *args)

            return code(of_unknown)(z)

        return run

    def spec(self, x: Any, *args: Any) -> Any:
        """The spec of the result; refuses a `fun` or first guess that does not fit."""
        for leaf in tree.tree_leaves(x):
            is_array = isinstance(leaf, jax.ShapeDtypeStruct)
            if not (is_array and jnp.issubdtype(leaf.dtype, jnp.floating)):
                raise SpecError(
                    f"hostcall: the first guess of `{self.name}` should be a pytree of"
                    f" real floating arrays, got {leaf}. Write 1.0 for 1, and give the"
                    " real and imaginary parts of a complex unknown"
                )
        outs = self._results(x, *args)
        out_leaves = tree.tree_leaves(outs)
        size = sum(leaf.size for leaf in tree.tree_leaves(x))
        out_size = sum(leaf.size for leaf in out_leaves)
        # Residuals of least squares may be any number.
        wanted_size = {"root": size, "minimize": 1}.get(self.word, out_size)
        floats = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in out_leaves)
        if not floats or out_size != wanted_size:
            got = tree.tree_map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", outs)
            raise SpecError(
                f"hostcall: `{self.name}` should return {self.returns} for"
                f" bridge.scipy.{self.word}, got {got} for an unknown of {size} numbers"
            )
        if self.bounds is not None:
            self._limits(x)  # refuses bounds that don't fit x
        flag = jax.ShapeDtypeStruct((), np.bool_)
        number = jax.ShapeDtypeStruct((), np.int32)
        return (x, Outcome(flag, number, number)) if self.full else x

    def _results(self, *args: Any) -> Any:
        """The avals of what `fun` returns, traced with the program's dtypes."""
        template, arrays = split(args, {})
        try:
            traced = self._traced.trace(template, *arrays)
        except Exception as error:
            raise SpecError(
                f"hostcall: `{self.name}` failed when it was traced with the first"
                f" guess and the args: {type(error).__name__}: {error}"
            ) from error
        # Values of the program that it closes over are arguments of what was traced.
        if len(traced.jaxpr.in_avals) > len(arrays):
            raise SpecError(
                f"hostcall: `{self.name}` uses a traced value of the program that is"
                " not among its arguments: it has no value on the host, and would get"
                " no derivative. Pass it after the first guess: solve(x0, *args)",
                code="hc-traced",
            )
        return traced.out_info

    def push(
        self, solver: Callable[..., Any], primals: Arrays, tangents: Arrays
    ) -> Any:
        """(result, its tangent), by the implicit function theorem."""
        # With F as at the top of the file: `moved` is F_args dargs, `slope` is F_x, and
        # a linear solve with it gives dx. The first guess, primals[0], does not matter.
        out = solver(*primals)
        x, ending = out if self.full else (out, None)
        flat, unravel = ravel_pytree(x)
        moves = [
            jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
            for leaf in tree.tree_leaves(primals[1:])
            if is_operand(leaf)
        ]
        args, filled, _ = along(primals[1:], moves, is_operand)
        arg_tangents = pick(tree.tree_leaves(tangents[1:]), moves)
        # JAX refuses reshapes and LUs along explicit axes of a mesh.
        at = tuple(map(_jax.replicated, args))
        to = tuple(map(_jax.replicated, arg_tangents))

        def flat_fun(z: jax.Array, *args: jax.Array) -> jax.Array:
            return self._flat(unravel(z), *filled(args))

        zero = self.zero(flat_fun)
        _, moved = jax.jvp(functools.partial(zero, flat), at, to)
        slope = jax.jacfwd(zero)(flat, *at)
        if self.bounds is not None:  # what is at a bound stays there
            low, high = self._limits(x)
            # A bound that becomes infinite in the program's dtype holds no number.
            with np.errstate(over="ignore"):
                low = low.astype(flat.dtype)
                high = high.astype(flat.dtype)
            free = (flat > low) & (flat < high)
            # The equation dx_i = 0 in place of that of a number at its bound.
            fixed = jnp.eye(flat.size, dtype=slope.dtype)
            slope = jnp.where(free[:, None], slope, fixed)
            moved = jnp.where(free, moved, 0)
        # LAPACK has no narrower dtypes.
        wide = jnp.promote_types(flat.dtype, np.float32)
        flat_tangent = -jnp.linalg.solve(slope.astype(wide), moved.astype(wide))
        dx = unravel(flat_tangent.astype(flat.dtype))
        # An ending is of integers and a bool, which have no tangent.
        return out, ((dx, ending) if self.full else dx)

    def _limits(self, x: Any) -> tuple[np.ndarray, np.ndarray]:
        """The bounds of each number of x."""

        def every(bound: Any) -> np.ndarray:
            of_leaves = tree.tree_leaves(jax.tree.broadcast(bound, x))
            flat = [
                np.broadcast_to(np.float64(of_leaf), leaf.shape).ravel()
                for of_leaf, leaf in zip(of_leaves, tree.tree_leaves(x), strict=True)
            ]
            return np.concatenate(flat)

        try:
            low, high = map(every, self.bounds or ())
            if (low < high).all():
                return low, high
            why = "low is below high"
        except (TypeError, ValueError) as error:
            why = f"each has the structure of x ({error})"
        wanted = f"(low, high), where {why}"
        raise wrong("bounds", f"`{self.name}`", wanted, self.bounds)

    # --- Host code -------------------------------------------------------------------

    def solve(self, start: np.ndarray, run: Runs, limits: Limits) -> Any:
        """SciPy's result. `run` are the compiled codes, of NumPy arrays."""
        raise NotImplementedError

    def __call__(self, x0: Any, *args: Any) -> Any:
        leaves, treedef = tree.tree_flatten(x0)
        start = np.concatenate([np.ravel(leaf) for leaf in leaves])
        template, arrays = split((x0, *args), {})
        with jax.enable_x64(True):
            solution = self._found(start, template, arrays)
        if not (solution.success or self.full):
            message = " ".join(solution.message.split())
            raise HostcallError(
                f"hostcall: `{self.name}` found no solution: {message} (by"
                f" scipy.optimize.{self.word}, method={self.method!r}). Give another"
                " first guess, or options=; with full_output=True it returns a flag",
                code="hc-failed",
            )
        ends = np.cumsum([leaf.size for leaf in leaves])
        x_leaves = [
            numbers.reshape(leaf.shape)
            for numbers, leaf in zip(
                np.split(solution.x, ends[:-1]), leaves, strict=True
            )
        ]
        x = treedef.unflatten(x_leaves)
        ending = Outcome(solution.success, solution.status, solution.nfev)
        return (x, ending) if self.full else x

    def _found(self, start: np.ndarray, template: Template, arrays: Arrays) -> Any:
        """SciPy's result, which is no success where a number is NaN."""
        (x0, *_), _ = template.unflatten(arrays)
        limits = None if self.bounds is None else self._limits(x0)
        arrays = [jnp.asarray(x) for x in arrays]  # sent once, not in each step
        evaluated = _Seen(start, bool(np.isfinite(start).all()))

        def bound(code: Code) -> Callable[..., Any]:
            def run(z: np.ndarray) -> Any:
                # Copies, since SciPy may write to them.
                values = tree.tree_map(np.array, code(template, z, *arrays))
                evaluated.note(z, values)
                return values

            return run

        try:
            solution = self.solve(start, [*map(bound, self._codes)], limits)
        except ValueError as error:
            # Many of its solvers raise an error of their own at a NaN.
            if evaluated.finite and not isinstance(error, np.linalg.LinAlgError):
                raise
            ended = {"success": False, "status": -1, "message": str(error)}
            solution = self.scipy.OptimizeResult(
                ended, x=evaluated.x, nfev=evaluated.count
            )
        else:
            numbers = np.append(solution.x, solution.fun)
            is_finite = np.isfinite(numbers).all()
            # An infinite gradient may be right, at a bound.
            if not is_finite or np.isnan(solution.get("jac", 0.0)).any():
                solution.success = False
        if not evaluated.finite:
            message = solution.message.rstrip(".")
            solution.message = (
                f"{message}, and it saw NaN or infinite values (from an arg?)"
            )
        return solution


@dataclass
class _Seen:
    """What SciPy has seen in a solve.

    Attributes:
        x: where it evaluated last.
        finite: whether all values were.
        count: how many evaluations there were.
    """

    x: np.ndarray
    finite: bool
    count: int = 0

    def note(self, x: np.ndarray, values: Any) -> None:
        self.x = x
        self.count += 1
        leaves = tree.tree_leaves(values)
        self.finite &= all(np.isfinite(leaf).all() for leaf in leaves)


_NEAR = 1.5e-8  # of the length of x: the root of float64's precision


class _Root(_Problem):
    word = "root"
    returns = "as many real floating numbers as the unknown has"

    def solve(self, start: np.ndarray, run: Runs, limits: Limits) -> Any:
        value, slope = run
        options = {"jac": slope, "tol": self.tol, "options": dict(self.options)}
        solution = self.scipy.root(value, start, **options)
        if not solution.success:
            # "hybr" makes "no good progress" at a root that is exact up to rounding, as
            # of a linear function. Its own criterion, of a Newton step from there.
            with contextlib.suppress(np.linalg.LinAlgError):
                x = solution.x
                step = np.linalg.solve(slope(x), value(x))
                near = (self.tol or _NEAR) * np.linalg.norm(x)
                solution.success = bool(np.linalg.norm(step) <= near)
        return solution


class _Minimize(_Problem):
    word = "minimize"
    returns = "one real floating number"
    codes = (jax.value_and_grad, jax.hessian)
    shape = ()
    with_hessian = ("Newton-CG", "dogleg", "trust-ncg", "trust-krylov", "trust-exact")
    bounded = ("L-BFGS-B", "TNC", "SLSQP")
    methods = ("BFGS", "CG", *bounded, *with_hessian)
    others = " (others may end where the gradient is not zero, or take no bounds)"
    zero = staticmethod(jax.grad)

    def solve(self, start: np.ndarray, run: Runs, limits: Limits) -> Any:
        both, bend = run
        options = {
            "method": self.method,
            "tol": self.tol,
            "options": dict(self.options),
        }
        if self.method in self.with_hessian:
            options["hess"] = bend
        if limits is not None:
            options["bounds"] = self.scipy.Bounds(*limits)
        solution = self.scipy.minimize(both, start, jac=True, **options)
        if not solution.success:
            # Line searches end with a "precision loss" where values no longer differ,
            # and that may be before the gradient is below `tol`.
            solution.success = _is_minimum(
                solution.x, both(solution.x)[1], bend(solution.x), limits
            )
        return solution


def _is_minimum(
    x: np.ndarray, slope: np.ndarray, bend: np.ndarray, limits: Limits
) -> bool:
    """Whether a Newton step from `x` would not matter, of what no bound holds."""
    free = np.ones(x.shape, bool)
    if limits is not None:
        low, high = limits
        # The function rises from a lower bound, and falls towards an upper one.
        held_below = (x <= low) & (slope >= 0)
        held_above = (x >= high) & (slope <= 0)
        free = ~(held_below | held_above)
    bend = bend[free][:, free]
    slope = slope[free]
    try:
        np.linalg.cholesky(bend)  # which fails where it is no minimum
        step = np.linalg.solve(bend, slope)
    except np.linalg.LinAlgError:
        return False
    near = _NEAR * np.linalg.norm(x)
    return bool(np.linalg.norm(step) <= near)


class _LeastSquares(_Problem):
    word = "least_squares"
    bounded = ("trf", "dogbox")
    methods = (*bounded, "lm")
    others = " ('lm' takes no bounds)"
    tolerances = ("ftol", "xtol", "gtol")
    keys = (*tolerances, "max_nfev", "x_scale", "tr_solver", "tr_options")
    other_keys = f": {keys}. Another loss= is another problem (write it into fun)"

    @staticmethod
    def zero(fun: Code) -> Code:
        def half_sum_of_squares(*args: Any) -> jax.Array:
            return (fun(*args) ** 2).sum() / 2

        slope: Code = jax.grad(half_sum_of_squares)
        return slope

    def solve(self, start: np.ndarray, run: Runs, limits: Limits) -> Any:
        tolerances = {}
        if self.tol is not None:
            tolerances = dict.fromkeys(self.tolerances, self.tol)
        # options= may have others for some of them.
        options = {"method": self.method, **tolerances, **self.options}
        if limits is not None:
            options["bounds"] = limits
        solution = self.scipy.least_squares(run[0], start, run[1], **options)
        if limits is not None:  # "trf" stays inside, within a rounding of the bound
            at_bound = solution.active_mask  # -1 at the lower one, 1 at the upper one
            solution.x = np.select([at_bound < 0, at_bound > 0], limits, solution.x)
        return solution
