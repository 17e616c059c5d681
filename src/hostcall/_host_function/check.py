"""`hc.testing.check`: tests a host function and its rules against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hostcall import _jax
from hostcall._core import errors
from hostcall._core.annotations import OfAnnotations
from hostcall._core.dimensions import Signature
from hostcall._core.errors import DerivativeError, EscapeError, SpecError
from hostcall._core.result_rules import avals_of, is_aval
from hostcall._core.spec import is_array_like
from hostcall._core.ufuncs import OfUfunc
from hostcall._host_function.difference_error import central_error, eps_of, lines
from hostcall._host_function.function import HostFunction
from hostcall._host_function.host import host
from hostcall._host_function.primitives import Arrays
from hostcall._host_function.rules import Tree, among
from hostcall._runtime.reraise import reraise

tree = jax.tree

Code = Callable[..., Arrays]
Slopes = tuple[Arrays, list[float]]  # derivatives and the errors of each
Status = Literal["passed", "failed", "left out"]
# How many steps differences may try, without and with 64 bits. At the last one only
# rounding is left to see.
_STEPS = {False: 7, True: 10}
# What says which sizes fit.
_DRAWS_SIZES = (Signature, OfUfunc, OfAnnotations)
# How many sets of sizes are drawn for it.
_DRAWN = 5


@dataclass(frozen=True)
class Check:
    """One check and its outcome.

    Attributes:
        name: the name of the check.
        status: "passed", "failed", or "left out" if it does not apply.
        detail: what was found, or why it was left out.
    """

    name: str
    status: Status
    detail: str = ""

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.status:8} {self.name}{detail}"


class Ended(Exception):
    """A check ended early: (status, detail)."""


@dataclass
class Checks:
    """All checks of one example.

    Attributes:
        f, args, rtol, random, threads: as for `check`.
        arrays: which leaves of the arguments are arrays.
        places: the same by the argument's position.
        moving: the leaves that have derivatives.
        rough: the tolerance for derivatives.
        out: the result.
    """

    f: HostFunction[..., Tree]
    args: tuple[Tree, ...]
    rtol: float | None
    random: np.random.Generator
    threads: int
    out: Tree = None

    def __post_init__(self) -> None:
        self.leaves, self.treedef = tree.flatten(self.args)
        fixed = among(self.f.nondiff, len(self.args))
        self.arrays: list[int] = []
        self.places: dict[int, list[int]] = {}
        self.moving: list[int] = []
        n = 0  # of the leaf, among those of all arguments
        for position, arg in enumerate(self.args):
            for leaf in tree.leaves(arg):
                if isinstance(leaf, jax.Array) or is_array_like(leaf):
                    self.arrays.append(n)
                    self.places.setdefault(position, []).append(n)
                    if position not in fixed and _inexact(leaf):
                        self.moving.append(n)
                n += 1
        dtypes = [jnp.result_type(self.leaves[n]) for n in self.moving]
        # One leaf in 32 bits makes the whole derivative as rough as that.
        self.wide = {jnp.finfo(dtype).bits for dtype in dtypes} == {64}
        usual = 1e-4 if self.wide else 2e-2
        self.rough = usual if self.rtol is None else self.rtol

    def run(self, label: str) -> list[Check]:
        """The outcomes; `label` says which example this is."""
        bodies = {
            "result": self.result,
            "purity": self.purity,
            "jit": self.jit,
            "vmap": self.batching,
            "jvp": self.forward,
            "vjp": self.reverse,
            "transpose": self.transpose,
            "lent arguments": self.lent,
            "threads": self.several_threads,
        }
        if isinstance(self.f.result, _DRAWS_SIZES):
            bodies["sizes"] = self.sizes
        outcomes: list[Check] = []
        for name, body in bodies.items():
            status, detail = self._outcome(body)
            outcomes.append(Check(name + label, status, detail))
            if outcomes[0].status == "failed":
                break  # every later check would fail for the same reason
        return outcomes

    def _outcome(self, body: Callable[[], str | None]) -> tuple[Status, str]:
        order = self.f.options.order
        # What has effects is called once, for its result: a second call counts.
        if order != "pure" and body != self.result:
            return "left out", f"order={order!r}"
        try:
            with reraise():
                return "passed", body() or ""
        except Ended as end:
            status, detail = end.args
            return status, detail
        except DerivativeError as error:
            # A rule that is not there is no fault. The advice of the error is left out.
            first, _, _ = _said(error).partition(". ")
            return "left out", first.removeprefix("hostcall: ")
        except Exception as error:
            return "failed", f"{type(error).__name__}: {_said(error)}"

    def sizes(self) -> str:
        """What comes for other sizes is what the function says; else the call raises.

        The values are the example's, repeated and moved a little: a matrix whose rows
        repeat has no inverse.
        """
        rule = self.f.result
        assert isinstance(rule, _DRAWS_SIZES), "`run` asks only then"
        examples = [np.asarray(self.leaves[n]) for n in self.arrays]
        avals = avals_of(self.args)
        fitted = 0
        for number in range(_DRAWN):
            largest = 6 if number else 1  # once all sizes are 1
            draw = partial(self.random.integers, 1, 1 + largest)
            drawn = rule.with_sizes(avals, draw)
            try:
                rule.spec(drawn, self.f.__name__)
            except SpecError:  # a size of a result would be negative
                continue
            fitted += 1
            shapes = [leaf.shape for leaf in tree.leaves(drawn) if is_aval(leaf)]
            self.call(self.arrays, self.other_values(examples, shapes))
        if not fitted:
            raise Ended("left out", "no sizes were drawn that fit")
        return f"{fitted} drawn"

    def other_values(
        self, examples: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]]
    ) -> Arrays:
        """Values of these shapes, not far from the examples."""
        values: Arrays = []
        for example, shape in zip(examples, shapes, strict=True):
            value = np.resize(example, shape)
            if _inexact(example):
                moved = value + 0.1 * self.random.standard_normal(shape)
                value = moved.astype(example.dtype)
            values.append(jnp.asarray(value))
        return values

    def call(self, places: Sequence[int], values: Arrays) -> Arrays:
        """The leaves of the result, with other values for these leaves."""
        leaves = list(self.leaves)
        for n, value in zip(places, values, strict=True):
            leaves[n] = value
        return list(tree.leaves(self.f(*self.treedef.unflatten(leaves))))

    def nearby(self, places: list[int]) -> Arrays:
        """Other values for these leaves, near the example's."""

        def near(x: np.ndarray) -> np.ndarray:
            # One factor for the whole leaf, so that a matrix stays as regular as it is.
            factor = 1 + 0.01 * self.random.standard_normal()
            return (x * factor).astype(x.dtype)

        examples = [np.asarray(self.leaves[n]) for n in places]
        return [near(x) if _inexact(x) else x for x in examples]

    # --- Values ----------------------------------------------------------------------

    def result(self) -> str:
        # Waits, so that an exception of the function is raised here.
        out = jax.block_until_ready(self.f(*self.args))
        self.out = tree.map(np.asarray, out)
        return ", ".join(
            f"{leaf.dtype}{list(leaf.shape)}" for leaf in tree.leaves(self.out)
        )

    def purity(self) -> None:
        _same(self.call((), []), self.out, "a second call gives another result")

    def jit(self) -> None:
        places = self.arrays
        values = [self.leaves[n] for n in places]
        got = jax.jit(partial(self.call, places))(values)
        _same(got, self.out, "the compiled program differs")

    def batching(self) -> str:
        if not self.places:
            raise Ended("left out", "no array among the arguments")
        choices = {"all arguments": self.arrays}
        if len(self.places) > 1:
            for position, leaves in self.places.items():
                choices[f"argument {position}"] = leaves
        for which, places in choices.items():
            # Rows must differ: a rule that mixes them up would pass on equal ones.
            rows = [self.nearby(places) for _ in range(3)]
            one_row = partial(self.call, places)
            wanted = _stacked(map(one_row, rows))
            got = jax.jit(jax.vmap(one_row))(_stacked(rows))
            _close(got, wanted, f"vmap over {which} differs from a loop", 1e-5)
        return "one argument" if len(choices) == 1 else "all arguments, and each alone"

    # --- Derivatives -----------------------------------------------------------------

    def along(self) -> tuple[Code, Arrays, Arrays]:
        """`f` as a function of what has derivatives; the example's values of that, and
        a direction.
        """
        if not self.moving:
            raise Ended("left out", "no floating argument")

        def g(*values: jax.Array) -> Arrays:
            return list(filter(_inexact, self.call(self.moving, list(values))))

        primals = [jnp.asarray(self.leaves[n]) for n in self.moving]
        return g, primals, self.direction(primals)

    def direction(self, like: Arrays) -> Arrays:
        # Not all functions are holomorphic, so both parts of complex ones move.
        def noise(x: jax.Array) -> jax.Array:
            real, imag = self.random.standard_normal((2, *x.shape))
            part = real + 1j * imag if jnp.iscomplexobj(x) else real
            return jnp.asarray(part, x.dtype)

        return list(map(noise, like))

    def difference(self, g: Code, primals: Arrays, tangents: Arrays) -> Slopes:
        """The derivative along a direction by differences, and the errors of that.

        Takes the best of several steps. No single one suits all functions: a long one
        is wrong for a function that varies fast, and a short one drowns in rounding.
        """
        step = max([1.0, *map(_largest, primals)]) / 16
        best: list[tuple[float, np.ndarray]] = []  # (error, slope) of each result

        def at(distance: float) -> tuple[list[np.ndarray], float]:
            moved = [
                primal + distance * tangent
                for primal, tangent in zip(primals, tangents, strict=True)
            ]
            return list(map(np.asarray, g(*moved))), distance

        varies: list[np.ndarray] = []  # where a step so far saw each result change
        for steps_left in reversed(range(_STEPS[self.wide])):
            step /= 4
            try:
                of_results = lines(at, step)
            except Exception:  # so far from the example it is perhaps not defined
                if not steps_left and not best:
                    raise
                continue
            # Where a longer step saw a change, none now is rounding.
            changes = [~line.flat for line in of_results]
            varies = list(map(np.logical_or, varies or changes, changes))
            by_this_step = []
            for line, changed in zip(of_results, varies, strict=True):
                errors = central_error(eps_of(line) * changed, line)
                by_this_step.append((_largest(errors), line.central(2)))
            best = [
                min(pair, key=itemgetter(0))
                for pair in zip(by_this_step, best or by_this_step, strict=True)
            ]
            is_exact = [
                error <= 0.01 * self.rough * _largest(slope) for error, slope in best
            ]
            if all(is_exact):
                break
        # The best of all steps may still be too rough to say that a rule is wrong.
        for error, slope in best:
            size = _largest(slope)
            if error > max(0.1 * size, 1e-6):
                raise Ended(
                    "left out",
                    f"differences are {size:.3g} +- {error:.3g}, too inexact to check"
                    " against. Give an example where the function is smooth",
                )
        return [slope for _, slope in best], [error for error, _ in best]

    def forward(self) -> None:
        g, primals, tangents = self.along()
        _, got = jax.jvp(g, primals, tangents)
        wanted, errors = self.difference(g, primals, tangents)
        mismatch = "the forward derivative differs from differences"
        _close(got, wanted, mismatch, self.rough, errors)

    def reverse(self) -> str:
        g, primals, tangents = self.along()
        out, pull = jax.vjp(g, *primals)
        cotangents = self.direction(out)
        errors: list[float] = []
        try:
            _, pushed = jax.jvp(g, primals, tangents)
            against = "the forward derivative"
        except DerivativeError:
            pushed, errors = self.difference(g, primals, tangents)
            against = "differences"
        # A random cotangent may be nearly orthogonal to the tangent. The product of
        # the second one with the tangent is the largest of all.
        largest = [
            jnp.conj(jnp.asarray(tangent)).astype(x.dtype)
            for tangent, x in zip(pushed, out, strict=True)
        ]
        mismatch = (
            f"<cotangent, J tangent> is {{:.6g}} by {against}, and <J^T cotangent,"
            " tangent> is {:.6g} by the reverse derivative"
        )
        for cotangent in (cotangents, largest):
            products = _inner(cotangent, pushed), _inner(pull(cotangent), tangents)
            length = _size(cotangent)
            tolerance = self.rough * max(length * _size(pushed), 1e-6)
            # If differences stand for the forward derivative, they are wrong by this.
            error = 2 * sum(errors) * length
            _agree(products, tolerance + error, mismatch)
        return f"against {against}"

    def transpose(self) -> None:
        if self.f.rules.transpose is None:
            raise Ended("left out", "not declared linear (deftranspose)")
        g, primals, direction = self.along()

        def both(xs: Arrays, ys: Arrays) -> Arrays:
            return [2 * x + y for x, y in zip(xs, ys, strict=True)]

        # f(2x + y) finds a function that is only additive, or only homogeneous, wrong.
        out = g(*primals)
        wanted = both(out, g(*direction))
        got = g(*both(primals, direction))
        mismatch = "it is not linear: f(2x + y) is not 2f(x) + f(y)"
        _close(got, wanted, mismatch, self.rough)
        cotangents = self.direction(out)
        back = jax.linear_transpose(g, *primals)(cotangents)
        products = _inner(cotangents, out), _inner(back, primals)
        size = self.rough * max(*map(abs, products), 1e-6)
        _agree(products, size, "<y, A x> is {:.6g}, and <A^T y, x> is {:.6g}")

    # --- Memory, threads -------------------------------------------------------------

    def lent(self) -> str:
        if self.f.options.lend == "out":
            raise Ended("left out", 'lend="out": every call is checked')
        # A function with lend= of its own shows what it does to memory that it borrows:
        # the engine checks each view, and lent arrays are read-only. A signature says
        # which items the function gets, and so how it is called; of other results only
        # what they were is needed, since a bridge asks its library for them.
        result: Any = self.f.result
        if not isinstance(result, _DRAWS_SIZES):
            result = tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.out
            )
        lent = host(
            self.f.fn,
            result=result,
            vmap_method=self.f.options.vmap_method,
            float64=self.f.policy.float64,
            lend=True,
        )
        try:
            with reraise():
                jax.block_until_ready(lent(*self.args))
        except EscapeError as error:
            habit = f"keeps a view of its arguments ({_said(error)})"
        except ValueError as error:
            if "read-only" not in str(error):  # as NumPy says of an assignment
                raise
            habit = "writes to its arguments"
        else:
            return "neither kept nor written: lend=True is safe"
        if self.f.options.lend:
            raise Ended("failed", f"the function {habit}, and has lend=True")
        return f"the function {habit}: it needs its own copies, as without lend="

    def several_threads(self) -> str:
        one_call = partial(self.call, self.arrays)
        wide = jax.config.jax_enable_x64
        inputs = [self.nearby(self.arrays) for _ in range(8)]
        wanted = [list(map(np.asarray, one_call(values))) for values in inputs]

        def work(values: Arrays) -> Arrays:
            with jax.enable_x64(wide):  # the setting is per thread
                return one_call(values)

        # Each thread calls several times, so that calls really meet.
        times = 2 * self.threads
        with futures.ThreadPoolExecutor(self.threads) as pool:
            results = pool.map(work, inputs * times)
            for got, want in zip(results, wanted * times, strict=True):
                _same(got, want, "threads at once give another result")
        return f"{self.threads} at once"


def _same(got: Arrays, wanted: Tree, mismatch: str) -> None:
    for a, b in zip(map(np.asarray, got), tree.leaves(wanted), strict=True):
        _expect(np.array_equal(a, b, equal_nan=_inexact(a)), mismatch, a, b)


def _close(
    got: Arrays,
    wanted: Arrays,
    mismatch: str,
    rtol: float,
    errors: Sequence[float] = (),
) -> None:
    """`errors` says how wrong each leaf of `wanted` may be itself; else none is."""
    exact = [0.0] * len(got)
    for a, b, error in zip(got, wanted, errors or exact, strict=True):
        # Twice the error, which is itself an estimate.
        atol = rtol * _largest(b) + 2 * error + 1e-6
        # Integers may be rounded values.
        close = not _inexact(a) or np.allclose(a, b, rtol, atol, equal_nan=True)
        _expect(close, mismatch, a, b)


def _expect(holds: bool, mismatch: str, got: jax.Array, wanted: jax.Array) -> None:
    if not holds:
        values = f"{_short(got)} where {_short(wanted)} was expected"
        raise Ended("failed", f"{mismatch}: {values}")


def _agree(products: tuple[float, float], error: float, mismatch: str) -> None:
    if not abs(products[0] - products[1]) <= error:
        raise Ended("failed", mismatch.format(*products))


def _stacked(rows: Iterable[Arrays]) -> list[np.ndarray]:
    return [np.stack(column) for column in zip(*rows, strict=True)]


def _inexact(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _inner(a: Arrays, b: Arrays) -> float:
    """The real part of the sum of products, without conjugation.

    By JAX's rules a derivative J and its transpose have equal <ct, J t> and <J^T ct, t>
    in this product, whether or not the function is holomorphic (JAX, Autodiff Cookbook,
    "Complex numbers and differentiation").
    """
    products = [
        np.vdot(np.conj(x), y)  # which conjugates its first argument again
        for x, y in zip(a, b, strict=True)
    ]
    return float(sum(map(np.real, products)))


def _size(a: Arrays) -> float:
    """The length of a vector that has these parts."""
    squares = [np.sum(np.abs(np.asarray(x)) ** 2) for x in a]
    return float(np.sqrt(sum(squares)))


def _largest(x: jax.Array) -> float:
    return float(np.max(np.abs(x), initial=0.0))


def _short(x: jax.Array) -> str:
    text = np.array2string(np.asarray(x), threshold=6, precision=6, edgeitems=2)
    return " ".join(text.split())


def _said(error: Exception) -> str:
    return errors.without_code(str(error))


# --- The report ----------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What `hc.testing.check` found: true if nothing failed. Prints a line a check."""

    function: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "failed")

    def __bool__(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        title = f"hc.testing.check of `{self.function}`"
        return "\n".join([title, *map(str, self.checks)])

    __repr__ = __str__


def check(
    f: HostFunction[..., Any],
    *examples: Any,
    rtol: float | None = None,
    seed: int = 0,
    threads: int = 4,
) -> Report:
    """Tests a host function and its rules against each other.

        assert hc.testing.check(f, (x, y), (x2, y2))      # in a test: shows the report

    For each example it checks:

      * the result against `result=`;
      * a second call, and the compiled program, against the first call;
      * vmap against a loop, with all arguments batched and with each alone;
      * forward derivatives against differences;
      * reverse derivatives against forward ones, or against differences;
      * that a function with a transpose is linear, and its transpose by inner products;
      * whether the function keeps or writes to memory that it is lent;
      * calls from several threads at once against calls one by one;
      * for a ufunc, a signature or annotations, what comes for other sizes against what
        they say.

    Complex arguments move in both parts, so rules are checked by JAX's conventions
    whether or not the function is holomorphic.

    Args:
        f: a function that `hc.host` made.
        *examples: each a tuple of arguments, or one argument, where the function is
            smooth.
        rtol: for derivatives, relative to the size of the whole array; default 2e-2 for
            32 bits (and complex64, which has two 32-bit parts), 1e-4 for 64.
        seed: for the random directions and cotangents.
        threads: how many threads call at once.

    Returns:
        A `Report`, true if nothing failed. A check that does not apply (no such rule, a
        function with effects, or differences too inexact to tell) is "left out", with
        the reason.

    Raises:
        SpecError: there is no example, or `f` is not a HostFunction.

    Cost: some hundred calls of the function, ten for each argument, and as many
    compilations.
    """
    if not isinstance(f, HostFunction):
        raise SpecError(
            f"hostcall: check() takes what hc.host made, got {f!r}. Write"
            " hc.testing.check(hc.host(f, result=...), example)"
        )
    if not examples:
        raise SpecError(
            "hostcall: check() needs an example of arguments: check(f, (x, y))"
        )
    checks: list[Check] = []
    for number, example in enumerate(examples):
        args = example if isinstance(example, tuple) else (example,)
        label = f" (example {number})" if len(examples) > 1 else ""
        random = np.random.default_rng(seed)
        dtypes = [x.dtype for x in tree.leaves(args) if isinstance(x, jax.Array)]
        with _jax.able_to_hold(*dtypes):
            checks += Checks(f, args, rtol, random, threads).run(label)
    return Report(f.__name__, tuple(checks))
