"""The host code of a solver of `hc.bridge.scipy`.

A `Problem` holds the user's `fun(x, *args)`. SciPy knows only flat arrays, so what it
gets is made of `fun` as a function of z, which is the unknown x as one array:

    traced      `spec` traces `fun` with the program's dtypes, and checks that it fits
    runs        `__call__` lets SciPy solve. What SciPy evaluates (`codes`) is JAX code,
                traced and compiled in float64, whatever the program's dtypes are
    derivative  implicit.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from hostcall._core.errors import HostcallError, SpecError, choices, wrong
from hostcall._core.host_code import HostCode
from hostcall._core.option_checks import check
from hostcall._core.options import ROWS, Option
from hostcall._core.spec import Template
from hostcall.bridge._library import Arrays, needed, split

tree = jax.tree_util

Tree: TypeAlias = Any  # a pytree of arrays
# JAX code of z, and perhaps of the arrays of the args behind it.
Code: TypeAlias = Callable[..., Any]
# A problem's `codes` as SciPy calls them, from and to NumPy arrays: functions of z.
Evaluations: TypeAlias = Sequence[Callable[[np.ndarray], Any]]
# (low, high), with a number for each of z; None without bounds.
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


_NUMBER = jax.ShapeDtypeStruct((), np.int32)
_OUTCOME_SPEC = Outcome(
    success=jax.ShapeDtypeStruct((), np.bool_), status=_NUMBER, nfev=_NUMBER
)

# What the options may be that all solvers have.
_OPTIONS = {
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


class Problem(HostCode):
    """What SciPy solves. Each function of SciPy's has a subclass (solvers.py).

    Attributes:
        word: the name of the function in scipy.optimize.
        codes: what SciPy evaluates; each is made of `fun` as a function of z.
        zero: makes F, which is zero at a solution, of `fun` as a function of z.
        result_shape: of what `fun` returns, made flat.
        returns: what `fun` should return, in words.
        methods: those that may be chosen; the first is the default.
        methods_with_bounds: the same if bounds are given.
        on_other_methods: what an error says of other methods.
        option_names: those that `options=` may have; empty for any.
        on_other_options: what an error says of others.
    """

    word: str
    codes: tuple[Callable[[Code], Code], ...] = (lambda fun: fun, jax.jacfwd)
    zero: Callable[[Code], Code]
    result_shape: tuple[int, ...] = (-1,)
    returns = "real floating numbers"
    methods: Sequence[str]
    methods_with_bounds: Sequence[str] = ()
    on_other_methods = ""
    option_names: Sequence[str] = ()
    on_other_options = ""

    def __init__(self, fun: Callable[..., Any], settings: dict[str, Any]) -> None:
        self.fun = self.__wrapped__ = fun  # whose signature and line messages have
        self.scipy = needed("scipy.optimize", "scipy")
        self._settings = settings
        self.name = settings["name"]
        self.__name__ = self.__qualname__ = self.name
        self.tol = settings["tol"]
        self.full_output = settings["full_output"]
        self.options = settings["options"] or {}
        self.bounds = settings.get("bounds")
        has_bounds = self.bounds is not None
        methods = self.methods_with_bounds if has_bounds else self.methods
        self.method = settings.get("method") or methods[0]
        self._check_options(methods)
        # The template of x and the args is static; their arrays are arguments.
        self._compiled = [
            jax.jit(self._of_flat(code), static_argnums=0) for code in self.codes
        ]
        self._on_arrays = jax.jit(self._call_fun, static_argnums=0)

    def _check_options(self, methods: Sequence[str]) -> None:
        allowed = {
            **_OPTIONS,
            "method": Option(
                choices(methods) + self.on_other_methods, methods.__contains__
            ),
            "options": Option(
                f"a dict of options of scipy.optimize.{self.word}"
                f"{self.on_other_options}",
                lambda v: (
                    isinstance(v, Mapping) and set(v) <= set(self.option_names or v)
                ),
            ),
        }
        chosen = {**self._settings, "method": self.method}
        check(f"`{self.name}`", chosen, allowed)

    def __reduce__(self) -> Any:
        # Made again: compiled functions can't be pickled.
        return type(self), (self.fun, self._settings)

    @staticmethod
    def fits(unknown: int, result: int) -> bool:
        """Whether `fun` may return so many numbers, for so many in the unknown."""
        raise NotImplementedError

    def solve(self, start: np.ndarray, codes: Evaluations, limits: Limits) -> Any:
        """SciPy's result, from the first guess `start`."""
        raise NotImplementedError

    # --- `fun` on other arguments ----------------------------------------------------

    def flat(self, *args: Tree) -> jax.Array:
        """What `fun` returns, as one array."""
        flat, _ = ravel_pytree(self.fun(*args))
        return flat.reshape(self.result_shape)

    def _call_fun(self, template: Template, *arrays: jax.Array) -> Tree:
        args, _ = template.unflatten(arrays)
        return self.fun(*args)

    def _of_flat(self, make: Callable[[Code], Code]) -> Code:
        """(template, z, *arrays) -> what `make` makes of `fun`, at z.

        x among the arrays says only how to make x of z.
        """

        def run(template: Template, z: jax.Array, *arrays: jax.Array) -> Any:
            (x, *args), _ = template.unflatten(arrays)
            _, unravel = ravel_pytree(x)

            def of_unknown(z: jax.Array) -> jax.Array:
                return self.flat(unravel(z), *args)

            code = make(of_unknown)
            return code(z)

        return run

    # --- When a program is traced ----------------------------------------------------

    def spec(self, x: Tree, *args: Tree) -> Tree:
        """The spec of the result; refuses a `fun` or first guess that does not fit."""
        x_leaves = tree.tree_leaves(x)
        for leaf in x_leaves:
            if not (isinstance(leaf, jax.ShapeDtypeStruct) and _is_floating(leaf)):
                raise SpecError(
                    f"hostcall: the first guess of `{self.name}` should be a pytree of"
                    f" real floating arrays, got {leaf}. Write 1.0 for 1, and give the"
                    " real and imaginary parts of a complex unknown"
                )
        result = self._result_of_fun(x, *args)
        result_leaves = tree.tree_leaves(result)
        size = _size(x_leaves)
        are_floating = all(map(_is_floating, result_leaves))
        if not are_floating or not self.fits(size, _size(result_leaves)):
            got = tree.tree_map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", result)
            raise SpecError(
                f"hostcall: `{self.name}` should return {self.returns} for"
                f" bridge.scipy.{self.word}, got {got} for an unknown of {size} numbers"
            )
        if self.bounds is not None:
            self.limits(x)  # refuses bounds that don't fit x
        return self.with_outcome(x, _OUTCOME_SPEC)

    def _result_of_fun(self, *args: Tree) -> Tree:
        """The avals of what `fun` returns, traced with the program's dtypes."""
        template, arrays = split(args, {})
        try:
            traced = self._on_arrays.trace(template, *arrays)
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

    def with_outcome(self, x: Tree, outcome: Outcome | None) -> Tree:
        """The result of a solver that found x."""
        return (x, outcome) if self.full_output else x

    def limits(self, x: Tree) -> tuple[np.ndarray, np.ndarray]:
        """(low, high): the bounds of each number of x, if there are bounds."""
        assert self.bounds is not None, "asked for only if there are bounds"
        try:
            low, high = (_flat_bound(bound, x) for bound in self.bounds)
            if (low < high).all():  # an equal pair would leave x no freedom
                return low, high
            wanted = "(low, high), where low is below high"
        except (TypeError, ValueError) as error:
            wanted = f"(low, high), where each has the structure of x ({error})"
        raise wrong("bounds", f"`{self.name}`", wanted, self.bounds)

    # --- Host code -------------------------------------------------------------------

    def __call__(self, x0: Tree, *args: Tree) -> Tree:
        leaves, treedef = tree.tree_flatten(x0)
        start = np.concatenate([np.ravel(leaf) for leaf in leaves])
        template, arrays = split((x0, *args), {})
        limits = None if self.bounds is None else self.limits(x0)
        with jax.enable_x64(True):
            solution = self._solution(start, template, arrays, limits)
        if not (solution.success or self.full_output):
            message = " ".join(solution.message.split())  # it may have several lines
            raise HostcallError(
                f"hostcall: `{self.name}` found no solution: {message} (by"
                f" scipy.optimize.{self.word}, method={self.method!r}). Give another"
                " first guess, or options=; with full_output=True it returns a flag",
                code="hc-failed",
            )
        ends = np.cumsum([leaf.size for leaf in leaves])
        parts = np.split(solution.x, ends[:-1])
        x_leaves = [
            part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)
        ]
        outcome = Outcome(solution.success, solution.status, solution.nfev)
        return self.with_outcome(treedef.unflatten(x_leaves), outcome)

    def _solution(
        self, start: np.ndarray, template: Template, arrays: Arrays, limits: Limits
    ) -> Any:
        """SciPy's result, which is no success where a number is NaN."""
        arrays = [jnp.asarray(x) for x in arrays]  # sent once, not in each step
        log = _EvaluationLog(start, bool(np.isfinite(start).all()))

        def evaluation(compiled: Code) -> Callable[[np.ndarray], Any]:
            def evaluate(z: np.ndarray) -> Any:
                values = compiled(template, z, *arrays)
                # Copies, since SciPy may write to them.
                values = tree.tree_map(np.array, values)
                log.note(z, values)
                return values

            return evaluate

        codes = [evaluation(compiled) for compiled in self._compiled]
        try:
            solution = self.solve(start, codes, limits)
        except ValueError as error:
            # Many of its solvers raise an error of their own at a NaN.
            if log.all_finite and not isinstance(error, np.linalg.LinAlgError):
                raise
            solution = self.scipy.OptimizeResult(
                success=False,
                status=-1,
                message=str(error),
                x=log.newest,
                nfev=log.count,
            )
        else:
            numbers = np.append(solution.x, solution.fun)
            is_finite = np.isfinite(numbers).all()
            # An infinite gradient may be right, at a bound.
            if not is_finite or np.isnan(solution.get("jac", 0.0)).any():
                solution.success = False
        if not log.all_finite:
            message = solution.message.rstrip(".")
            solution.message = (
                f"{message}, and it saw NaN or infinite values (from an arg?)"
            )
        return solution


@dataclass
class _EvaluationLog:
    """What SciPy has evaluated in one solve.

    Attributes:
        newest: the z of the last evaluation; before it, the first guess.
        all_finite: whether all values were finite, and the first guess.
        count: how many evaluations there were.
    """

    newest: np.ndarray
    all_finite: bool
    count: int = 0

    def note(self, z: np.ndarray, values: Tree) -> None:
        self.newest = z
        self.count += 1
        for leaf in tree.tree_leaves(values):
            self.all_finite &= bool(np.isfinite(leaf).all())


def _is_floating(leaf: jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _size(leaves: Sequence[jax.ShapeDtypeStruct]) -> int:
    return sum(leaf.size for leaf in leaves)


def _flat_bound(bound: Tree, x: Tree) -> np.ndarray:
    """A bound for each number of x; raises ValueError if the bound is not like x."""
    x_leaves = tree.tree_leaves(x)
    bound_leaves = tree.tree_leaves(jax.tree.broadcast(bound, x))
    flat = []
    for of_leaf, leaf in zip(bound_leaves, x_leaves, strict=True):
        flat.append(np.broadcast_to(np.float64(of_leaf), leaf.shape).ravel())
    return np.concatenate(flat)
