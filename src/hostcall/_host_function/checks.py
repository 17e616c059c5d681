"""The checks of `hc.testing.check`, of one example each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._core.annotations import OfAnnotations
from hostcall._core.array_values import is_array_like
from hostcall._core.dimensions import Signature
from hostcall._core.errors import DerivativeError, EscapeError, SpecError, without_code
from hostcall._core.result_rules import avals_of, is_aval
from hostcall._core.ufuncs import OfUfunc
from hostcall._host_function.comparisons import (
    Ended,
    agree,
    close,
    inexact,
    inner,
    largest,
    same,
    size,
    stacked,
)
from hostcall._host_function.difference_error import best_slopes
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


@dataclass
class Checks:
    """All checks of one example.

    Attributes:
        f, args, rtol, random, threads: as for `check`.
        array_leaves: which leaves of the arguments are arrays.
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
        self.array_leaves: list[int] = []
        self.places: dict[int, list[int]] = {}
        self.moving: list[int] = []
        n = -1  # of the leaf, among those of all arguments
        for position, arg in enumerate(self.args):
            for leaf in tree.leaves(arg):
                n += 1
                if not isinstance(leaf, jax.Array) and not is_array_like(leaf):
                    continue
                self.array_leaves.append(n)
                self.places.setdefault(position, []).append(n)
                if position not in fixed and inexact(leaf):
                    self.moving.append(n)
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
        """Runs one check, and says how it ended."""
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
        examples = [np.asarray(self.leaves[n]) for n in self.array_leaves]
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
            self.call(self.array_leaves, self.other_values(examples, shapes))
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
            if inexact(example):
                moved = value + 0.1 * self.random.standard_normal(shape)
                value = moved.astype(example.dtype)
            values.append(jnp.asarray(value))
        return values

    def call(self, places: Sequence[int], values: Sequence[jax.Array]) -> Arrays:
        """The leaves of the result, with other values for these leaves."""
        leaves = list(self.leaves)
        for n, value in zip(places, values, strict=True):
            leaves[n] = value
        args = self.treedef.unflatten(leaves)
        return list(tree.leaves(self.f(*args)))

    def nearby(self, places: list[int]) -> Arrays:
        """Other values for these leaves, near the example's."""

        values: Arrays = []
        for n in places:
            value = np.asarray(self.leaves[n])
            if inexact(value):
                # One factor for the whole leaf: a matrix stays as regular as it is.
                factor = 1 + 0.01 * self.random.standard_normal()
                value = (value * factor).astype(value.dtype)
            values.append(value)
        return values

    # --- Values ----------------------------------------------------------------------

    def result(self) -> str:
        # Waits, so that an exception of the function is raised here.
        out = jax.block_until_ready(self.f(*self.args))
        self.out = tree.map(np.asarray, out)
        leaves = tree.leaves(self.out)
        return ", ".join([f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves])

    def purity(self) -> None:
        """A second call gives the same."""
        same(self.call((), []), self.out, "a second call gives another result")

    def jit(self) -> None:
        """The compiled program gives the same."""
        places = self.array_leaves
        values = [self.leaves[n] for n in places]
        got = jax.jit(partial(self.call, places))(values)
        same(got, self.out, "the compiled program differs")

    def batching(self) -> str:
        """A batch gives what a loop over its rows gives."""
        if not self.places:
            raise Ended("left out", "no array among the arguments")
        choices = {"all arguments": self.array_leaves}
        if len(self.places) > 1:
            for position, leaves in self.places.items():
                choices[f"argument {position}"] = leaves
        for which, places in choices.items():
            # Rows must differ: a rule that mixes them up would pass on equal ones.
            rows = [self.nearby(places) for _ in range(3)]
            one_row = partial(self.call, places)
            wanted = stacked(map(one_row, rows))
            got = jax.jit(jax.vmap(one_row))(stacked(rows))
            close(got, wanted, f"vmap over {which} differs from a loop", 1e-5)
        return "one argument" if len(choices) == 1 else "all arguments, and each alone"

    # --- Derivatives -----------------------------------------------------------------

    def along(self) -> tuple[Code, Arrays, Arrays]:
        """`f` as a function of what has derivatives; the example's values of that, and
        a direction.
        """
        if not self.moving:
            raise Ended("left out", "no floating argument")

        def g(*values: jax.Array) -> Arrays:
            results = self.call(self.moving, values)
            return [result for result in results if inexact(result)]

        primals = [jnp.asarray(self.leaves[n]) for n in self.moving]
        return g, primals, self.direction(primals)

    def direction(self, like: Arrays) -> Arrays:
        """Random arrays of the shapes and dtypes of these."""
        directions: Arrays = []
        for x in like:
            noise, imag = self.random.standard_normal((2, *x.shape))
            if jnp.iscomplexobj(x):
                # Not all functions are holomorphic, so both parts move.
                noise = noise + 1j * imag
            directions.append(jnp.asarray(noise, x.dtype))
        return directions

    def difference(self, g: Code, primals: Arrays, tangents: Arrays) -> Slopes:
        """The derivative along a direction by differences, and the errors of that.

        Takes the best of several steps. No single one suits all functions: a long one
        is wrong for a function that varies fast, and a short one drowns in rounding.
        """
        slopes = best_slopes(
            code=g,
            primals=primals,
            tangents=tangents,
            step_count=_STEPS[self.wide],
            share=0.01 * self.rough,
        )
        # The best of all steps may still be too rough to say that a rule is wrong.
        for slope in slopes:
            length = largest(slope.value)
            if slope.error > max(0.1 * length, 1e-6):
                raise Ended(
                    "left out",
                    f"differences are {length:.3g} +- {slope.error:.3g}, too inexact to"
                    " check against. Give an example where the function is smooth",
                )
        return [slope.value for slope in slopes], [slope.error for slope in slopes]

    def forward(self) -> None:
        """The derivative along a direction is what differences say."""
        g, primals, tangents = self.along()
        _, got = jax.jvp(g, primals, tangents)
        wanted, errors = self.difference(g, primals, tangents)
        mismatch = "the forward derivative differs from differences"
        close(got, wanted, mismatch, self.rough, errors)

    def reverse(self) -> str:
        """<ct, J t> by forward mode is <J^T ct, t> by reverse mode."""
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
        along_tangent = [
            jnp.conj(jnp.asarray(tangent)).astype(x.dtype)
            for tangent, x in zip(pushed, out, strict=True)
        ]
        mismatch = (
            f"<cotangent, J tangent> is {{:.6g}} by {against}, and <J^T cotangent,"
            " tangent> is {:.6g} by the reverse derivative"
        )
        for cotangent in (cotangents, along_tangent):
            by_forward = inner(cotangent, pushed)
            by_reverse = inner(pull(cotangent), tangents)
            length = size(cotangent)
            tolerance = self.rough * max(length * size(pushed), 1e-6)
            # If differences stand for the forward derivative, they are wrong by this.
            error = 2 * sum(errors) * length
            agree((by_forward, by_reverse), tolerance + error, mismatch)
        return f"against {against}"

    def transpose(self) -> None:
        """The function is linear, and <y, A x> is <A^T y, x>."""
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
        close(got, wanted, mismatch, self.rough)
        cotangents = self.direction(out)
        back = jax.linear_transpose(g, *primals)(cotangents)
        products = inner(cotangents, out), inner(back, primals)
        tolerance = self.rough * max(*map(abs, products), 1e-6)
        agree(products, tolerance, "<y, A x> is {:.6g}, and <A^T y, x> is {:.6g}")

    # --- Memory, threads -------------------------------------------------------------

    def lent(self) -> str:
        """What the function does with memory that is lent to it."""
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
        """Calls at once, on several threads, give what calls one by one give."""
        one_call = partial(self.call, self.array_leaves)
        wide = jax.config.jax_enable_x64
        inputs = [self.nearby(self.array_leaves) for _ in range(8)]
        wanted = [list(map(np.asarray, one_call(values))) for values in inputs]

        def work(values: Arrays) -> Arrays:
            with jax.enable_x64(wide):  # the setting is per thread
                return one_call(values)

        # Each thread calls several times, so that calls really meet.
        times = 2 * self.threads
        with futures.ThreadPoolExecutor(self.threads) as pool:
            results = pool.map(work, inputs * times)
            for got, want in zip(results, wanted * times, strict=True):
                same(got, want, "threads at once give another result")
        return f"{self.threads} at once"


def _said(error: Exception) -> str:
    return without_code(str(error))
