"""The checks of `hc.testing.check`, on one example."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hostcall._core import codes
from hostcall._core.errors import DerivativeError, EscapeError
from hostcall._host_function.check.slopes import slopes
from hostcall._host_function.function import HostFunction
from hostcall._host_function.host import host
from hostcall._runtime.reraise import reraise

tree = jax.tree

Status = Literal["passed", "failed", "left out"]


class LeftOut(Exception):
    """The check does not apply; the message says why."""


class Wrong(Exception):
    """The check failed; the message says what is wrong."""


class Checks:
    """All checks of one example."""

    def __init__(
        self,
        f: HostFunction[..., Any],
        args: tuple[Any, ...],
        rtol: float | None,
        random: np.random.Generator,
        threads: int,
    ) -> None:
        self.f, self.args, self.random, self.threads = f, args, random, threads
        nondiff = f.nondiff_of(len(args))
        self.places = [
            n for n, arg in enumerate(args) if n not in nondiff and _is_floating(arg)
        ]
        self.arrays = [n for n, arg in enumerate(args) if _is_array(arg)]
        leaves = [x for n in self.places for x in tree.leaves(args[n])]
        self.wide = bool(leaves) and all(map(_is_wide, leaves))
        self.rtol = rtol if rtol is not None else 1e-4 if self.wide else 2e-2
        self.out: Any = None

    def run(self) -> list[tuple[str, Status, str]]:
        results: list[tuple[str, Status, str]] = []
        for name, body in (
            ("result", self.result),
            ("purity", self.purity),
            ("jit", self.jit),
            ("vmap", self.batching),
            ("jvp", self.forward),
            ("vjp", self.reverse),
            ("transpose", self.transpose),
            ("lent arguments", self.lent),
            ("threads", self.several_threads),
        ):
            status: Status = "passed"
            try:
                with reraise():
                    detail = body() or ""
            except LeftOut as reason:
                status, detail = "left out", str(reason)
            except DerivativeError as error:
                status, detail = "left out", _first_sentence(error)
            except Wrong as wrong:
                status, detail = "failed", str(wrong)
            except Exception as error:
                status, detail = (
                    "failed",
                    f"{type(error).__name__}: {codes.without(str(error))}",
                )
            results.append((name, status, detail))
            if name == "result" and status == "failed":
                break  # every later check would fail for the same reason
        return results

    # --- Values ----------------------------------------------------------------------

    def result(self) -> str:
        self.out = tree.map(np.asarray, jax.block_until_ready(self.f(*self.args)))
        leaves = tree.leaves(self.out)
        return ", ".join(f"{x.dtype}{list(x.shape)}" for x in leaves)

    def needs_purity(self) -> None:
        order = self.f.options["order"]
        if order != "pure":
            raise LeftOut(f"order={order!r}")

    def purity(self) -> None:
        self.needs_purity()
        again = self.f(*self.args)
        self.same(again, self.out, "a second call gives another result")

    def jit(self) -> None:
        self.needs_purity()
        self.same(self.jitted(*self.args), self.out, "the compiled program differs")

    def jitted(self, *args: Any) -> Any:
        arrays = self.arrays

        def program(values: list[Any]) -> Any:
            return self.f(*_put(args, arrays, values))

        return jax.jit(program)([args[n] for n in arrays])

    def batching(self) -> str:
        self.needs_purity()
        arrays = self.arrays
        if not arrays:
            raise LeftOut("no array among the arguments")
        choices = [arrays] + ([[n] for n in arrays] if len(arrays) > 1 else [])
        for chosen in choices:
            rows = [self.nearby(chosen) for _ in range(3)]
            stacked = [
                tree.map(lambda *x: np.stack(x), *(row[i] for row in rows))
                for i in range(len(chosen))
            ]

            def one(values: Any, chosen: list[int] = chosen) -> Any:
                return self.f(*_put(self.args, chosen, values))

            wanted = tree.map(lambda *x: np.stack(x), *(one(row) for row in rows))
            got = jax.jit(jax.vmap(one))(stacked)
            which = "all arguments" if chosen == arrays else f"argument {chosen[0]}"
            self.close(got, wanted, f"vmap over {which} differs from a loop", 1e-5)
        return "one argument" if len(arrays) == 1 else "all arguments, and each alone"

    def nearby(self, chosen: list[int]) -> list[Any]:
        """Other values for these arguments, near the example's."""

        def other(x: Any) -> Any:
            x = np.asarray(x)
            if not _inexact(x.dtype):
                return x
            return (x * (1 + 0.01 * self.random.standard_normal())).astype(x.dtype)

        return [tree.map(other, self.args[n]) for n in chosen]

    # --- Derivatives -----------------------------------------------------------------

    def along(self) -> Callable[..., Any]:
        """`f` as a function of its differentiable arguments only."""
        self.needs_purity()
        if not self.places:
            raise LeftOut("no floating argument")
        return lambda *values: self.f(*_put(self.args, self.places, values))

    def primals(self) -> tuple[Any, ...]:
        return tuple(tree.map(jnp.asarray, self.args[n]) for n in self.places)

    def direction(self, like: Any) -> Any:
        def draw(x: Any) -> Any:
            x = np.asarray(x)
            if not _inexact(x.dtype):
                return np.zeros(x.shape, jax.dtypes.float0)
            noise = self.random.standard_normal(x.shape)
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                # Not all functions are holomorphic, so both parts move.
                noise = noise + 1j * self.random.standard_normal(x.shape)
            return jnp.asarray(noise, x.dtype)

        return tree.map(draw, like)

    def difference(
        self, g: Callable[..., Any], primals: Any, tangents: Any
    ) -> tuple[list[Any], list[float]]:
        """The derivative along a direction by differences, and the errors of that."""
        found, errors = slopes(g, primals, tangents, self.wide)
        for slope, error in zip(found, errors, strict=True):
            size = float(np.max(np.abs(slope), initial=0.0))
            if error > 0.1 * size and error > 1e-6:
                raise LeftOut(
                    f"differences are {size:.3g} +- {error:.3g}, too inexact to check"
                    " against. Give an example where the function is smooth"
                )
        return found, errors

    def forward(self) -> None:
        g, primals = self.along(), self.primals()
        tangents = self.direction(primals)
        _, got = jax.jvp(g, primals, tangents)
        wanted, errors = self.difference(g, primals, tangents)
        what = "the forward derivative differs from differences"
        self.close(got, wanted, what, errors=errors)

    def reverse(self) -> str:
        g, primals = self.along(), self.primals()
        tangents = self.direction(primals)
        out, pull = jax.vjp(g, *primals)
        cotangents = self.direction(out)
        errors: list[float] = []
        try:
            _, pushed = jax.jvp(g, primals, tangents)
            against = "the forward derivative"
        except DerivativeError:
            found, errors = self.difference(g, primals, tangents)
            pushed = tree.unflatten(tree.structure(out), found)
            against = "differences"
        # A random cotangent may be nearly orthogonal to the tangent. The second
        # cotangent is parallel to it.
        for given in (cotangents, tree.map(_along, pushed, out)):
            there, here = _inner(given, pushed), _inner(pull(given), tangents)
            size = max(_size(given) * _size(pushed), 1e-6)
            rough = 2 * sum(errors) * _size(given)
            if not abs(there - here) <= self.rtol * size + rough:
                raise Wrong(
                    f"<cotangent, J tangent> is {there:.6g} by {against}, and"
                    f" <J^T cotangent, tangent> is {here:.6g} by the reverse derivative"
                )
        return f"against {against}"

    def transpose(self) -> None:
        if self.f.rules.transpose is None:
            raise LeftOut("not declared linear (deftranspose)")
        g, primals = self.along(), self.primals()
        other = self.direction(primals)
        both = tree.map(lambda x, y: 2 * x + y, primals, other)
        wanted = tree.map(lambda x, y: 2 * x + y, g(*primals), g(*other))
        self.close(g(*both), wanted, "it is not linear: f(2x + y) is not 2f(x) + f(y)")
        cotangents = self.direction(g(*primals))
        back = jax.linear_transpose(g, *primals)(cotangents)
        there, here = _inner(cotangents, g(*primals)), _inner(back, primals)
        if not abs(there - here) <= self.rtol * max(abs(there), abs(here), 1e-6):
            raise Wrong(f"<y, A x> is {there:.6g}, and <A^T y, x> is {here:.6g}")

    # --- Memory, threads -------------------------------------------------------------

    def lent(self) -> str:
        self.needs_purity()
        if self.f.options["lend"] == "out":
            raise LeftOut('lend="out": every call is checked')
        spec = tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.out)
        try:
            with reraise():
                lent = host(self.f.fn, result=spec, lend=True)
                jax.block_until_ready(lent(*self.args))
        except EscapeError as error:
            said = codes.without(str(error))
            return self.not_lent(f"keeps a view of its arguments ({said})")
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            return self.not_lent("writes to its arguments")
        return "neither kept nor written: lend=True is safe"

    def not_lent(self, what: str) -> str:
        if self.f.options["lend"]:
            raise Wrong(f"the function {what}, and has lend=True")
        return f"the function {what}: it needs its own copies, as without lend="

    def several_threads(self) -> str:
        self.needs_purity()
        arrays = self.arrays
        inputs = [_put(self.args, arrays, self.nearby(arrays)) for _ in range(8)]
        wanted = [tree.map(np.asarray, self.f(*args)) for args in inputs]
        wrong: list[str] = []
        start = threading.Barrier(self.threads)
        wide = jax.config.jax_enable_x64  # the setting is per thread

        def work(first: int) -> None:
            try:
                start.wait()
                with jax.enable_x64(wide):
                    for i in range(len(inputs) * 2):
                        k = (first + i) % len(inputs)
                        got = self.f(*inputs[k])
                        self.same(got, wanted[k], "threads at once give another result")
            except Exception as error:
                wrong.append(codes.without(str(error)))

        workers = [
            threading.Thread(target=work, args=(n,)) for n in range(self.threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if wrong:
            raise Wrong(wrong[0])
        return f"{self.threads} at once"

    # --- Comparing -------------------------------------------------------------------

    def same(self, got: Any, wanted: Any, what: str) -> None:
        for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            if not np.array_equal(a, b, equal_nan=_inexact(a.dtype)):
                raise Wrong(f"{what}: {_short(a)} where {_short(b)} was expected")

    def close(
        self,
        got: Any,
        wanted: Any,
        what: str,
        rtol: float | None = None,
        errors: Sequence[float] | None = None,
    ) -> None:
        """`errors` says how wrong each leaf of `wanted` may be itself."""
        rtol = self.rtol if rtol is None else rtol
        leaves = tree.leaves(wanted)
        roughs = [0.0] * len(leaves) if errors is None else errors
        for a, b, rough in zip(tree.leaves(got), leaves, roughs, strict=True):
            if not _inexact(np.asarray(a).dtype):
                continue  # integers: their derivative is zero
            size = float(np.max(np.abs(b), initial=0.0))
            atol = rtol * size + 2 * rough + 1e-6
            if not np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
                raise Wrong(f"{what}: {_short(a)} where {_short(b)} was expected")


def _put(args: tuple[Any, ...], places: list[int], values: Any) -> tuple[Any, ...]:
    full = list(args)
    for n, value in zip(places, values, strict=True):
        full[n] = value
    return tuple(full)


def _inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _is_array(arg: Any) -> bool:
    leaves = tree.leaves(arg)
    kinds = (jax.Array, np.ndarray, np.generic, float, int, complex)
    return bool(leaves) and all(isinstance(x, kinds) for x in leaves)


def _is_floating(arg: Any) -> bool:
    return _is_array(arg) and any(
        _inexact(jnp.result_type(x)) for x in tree.leaves(arg)
    )


def _is_wide(x: Any) -> bool:
    dtype = jnp.result_type(x)
    parts = 2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1
    return bool(dtype.itemsize >= 8 * parts)


def _inner(a: Any, b: Any) -> float:
    """The real part of the sum of products, without conjugation.

    By JAX's rules a derivative J and its transpose have equal <ct, J t> and <J^T ct, t>
    in this product, whether or not the function is holomorphic (JAX, Autodiff Cookbook,
    "Complex numbers and differentiation").
    """
    total = 0.0
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if _inexact(x.dtype) and _inexact(y.dtype):
            total += float(np.real(np.vdot(np.conj(x), y)))
    return total


def _along(pushed: Any, out: Any) -> Any:
    """The cotangent whose product with this tangent is largest."""
    if not _inexact(out.dtype):
        return np.zeros(out.shape, jax.dtypes.float0)
    return jnp.conj(jnp.asarray(pushed)).astype(out.dtype)


def _size(a: Any) -> float:
    leaves = [np.asarray(x) for x in tree.leaves(a)]
    squares = [np.sum(np.abs(x) ** 2) for x in leaves if _inexact(x.dtype)]
    return float(np.sqrt(sum(squares)))


def _short(x: Any) -> str:
    text = np.array2string(np.asarray(x), threshold=6, precision=6, edgeitems=2)
    return " ".join(text.split())


def _first_sentence(error: Exception) -> str:
    return codes.without(str(error)).partition(". ")[0].removeprefix("hostcall: ")
